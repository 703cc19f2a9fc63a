"""evaluate and compare: how good a model is on an environment's tasks, and whether another one is
better.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from pydantic import Field

from flash_mcp.judgement import health
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state import references
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.fitting import shorten
from flash_mcp.tools.shared.frame import Result, report
from flash_mcp.tools.shared.loading import Arguments, Secrets, check_machine, loaded
from flash_mcp.tools.shared.next_steps import after_evaluation
from flash_mcp.tools.shared.scores import Scores, scores, thoughts
from flash_mcp.tools.shared.waiting import WAIT_LIMIT_S, ended, submit, tried_again

LOAD_TIMEOUT_S = 20.0
MOST_ATTEMPTS = 50_000


class Evaluate(Result):
    """An evaluation, finished or under way."""

    run_id: str = Field(
        description="The evaluation: a run like others; pass to status, rollouts, cancel, compare."
    )
    state: str = Field(description="queued, starting, running, succeeded, failed or cancelled.")
    created: bool = Field(description="False where idempotency_key found an earlier one.")
    environment: str = Field(description="NAME@DIGEST.")
    of: str = Field(description="The model that is evaluated, in words.")
    split: str
    tasks: int = Field(description="Tasks to be attempted.")
    attempts: int = Field(description="Attempts at each.")
    done: int = Field(description="Attempts made so far.")
    values: dict[str, Any] = Field(description="How it is sampled and limited.")
    scores: Scores | None = Field(default=None, description="Once it has finished.")
    error: str | None = Field(default=None, description="Why it failed.")
    notes: list[str] | None = Field(default=None, description="What is worth a thought.")


# -- evaluate --------------------------------------------------------------------------------------


async def evaluate(
    environment: Annotated[
        str | None,
        Field(
            min_length=1,
            description="NAME, NAME@DIGEST or reasoning-gym:DATASET; default: the run's, where model is a run.",
        ),
    ] = None,
    model: Annotated[
        str,
        Field(
            min_length=1,
            description="A base model; a run's checkpoint as RUN@STEP (@0: before training) or, its newest, as RUN; or "
            "a deployment, for the base model and adapter that it serves.",
        ),
    ] = DEFAULT_MODEL,
    split: Annotated[Literal["eval", "train"], Field(description="Default eval.")] = "eval",
    task_ids: Annotated[
        list[str] | None,
        Field(min_length=1, max_length=1000, description="Only these tasks of the split."),
    ] = None,
    limit: Annotated[
        int | None,
        Field(ge=1, description="Only so many tasks, from the start of the split; default all."),
    ] = None,
    attempts: Annotated[
        int, Field(ge=1, le=256, description="Attempts at each task, for pass@k; default 1.")
    ] = 1,
    temperature: Annotated[
        float | None,
        Field(ge=0, le=2, description="Default 0 (greedy) for one attempt, 1 for several."),
    ] = None,
    top_p: Annotated[
        float | None, Field(gt=0, le=1, description="Nucleus sampling mass; default 1.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        Field(ge=1, le=131_072, description="Tokens of one turn; default the run's, else 512."),
    ] = None,
    max_length: Annotated[
        int | None,
        Field(ge=16, description="Tokens of a conversation; default the run's, else at most 4096."),
    ] = None,
    stop_sequences: Annotated[
        list[str] | None, Field(max_length=16, description="Strings that end a turn.")
    ] = None,
    thinking: Annotated[
        bool | None, Field(description="Chat template with thinking; default the run's.")
    ] = None,
    seed: Annotated[
        int | None, Field(ge=0, le=2**31 - 1, description="Seed of sampling; default 0.")
    ] = None,
    environment_args: Arguments = None,
    secrets: Secrets = None,
    idempotency_key: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="A second call with the same key returns the same evaluation.",
        ),
    ] = None,
    wait_s: Annotated[
        float, Field(ge=0, le=45, description="Seconds to wait for the scores; default 35.")
    ] = 35.0,
) -> Evaluate:
    """Measure a model on an environment's tasks: success rate with its interval, mean reward,
    pass@k, length.

    An evaluation is a run: it is queued, goes on without the client, resumes after a crash, and
    keeps every transcript for rollouts (split='eval'). It samples as training does and trains
    nothing. Comparing two: compare."""
    started, store = time.monotonic(), open_store()
    subject = await anyio.to_thread.run_sync(references.find_subject, store, model)
    row = await anyio.to_thread.run_sync(
        references.environment, store, _environment_of(environment, subject)
    )
    check_machine()
    given: Json = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "stop_sequences": stop_sequences,
        "thinking": thinking,
        "seed": seed,
        "environment_args": environment_args,
        "secrets": secrets,
    }
    # Resolved once without tasks, for what the environment is loaded with.
    values = resolve.resolve_eval(
        subject, row, split=split, tasks=[], attempts=attempts, given=given
    ).spec
    await report("loading the environment in a child process")
    known = await task_names(row, split, values.environment_args, values.secrets)
    tasks = _chosen(known, split, task_ids, limit, attempts)
    resolved = resolve.resolve_eval(
        subject, row, split=split, tasks=tasks, attempts=attempts, given=given
    )
    run, created, trouble = await submit(store, resolved, row, subject, idempotency_key)
    if trouble is None:
        run = await ended(store, run.id, started + min(wait_s, WAIT_LIMIT_S))
    result = await anyio.to_thread.run_sync(_describe, store, run, subject, len(known), created)
    if trouble:
        result.next = f"{trouble} The evaluation is queued. {tried_again(run.id)}"
    return result


def _environment_of(environment: str | None, subject: Subject) -> str:
    if environment is not None:
        return environment
    if subject.run is None:
        fix = "pass environment=NAME, as returned by env_push; catalog lists what was pushed"
        raise FlashError(
            "invalid_argument", "a base model says nothing of the environment to use", fix=fix
        )
    return f"{subject.run.environment}@{subject.run.environment_digest}"


async def task_names(
    environment: EnvironmentVersion, split: str, args: Json, secrets: Sequence[str]
) -> list[str]:
    """The ids of a split's tasks, in order, by loading the environment. FlashError(dataset_invalid)
    for none.
    """
    async with loaded(
        environment,
        args=args,
        secrets=secrets,
        call_timeout_s=LOAD_TIMEOUT_S,
        start_timeout_s=LOAD_TIMEOUT_S,
        fix="mend the folder, env_test it, env_push it, and call again",
    ) as host:
        tasks = await host.tasks(split) if host.splits.get(split) else []
    reference = f"{environment.name}@{environment.digest}"
    if not tasks:
        fix = "add rows to that split (env.eval_dataset is the eval split), or name the other one"
        raise FlashError(
            "dataset_invalid", f"{reference} has no task in its {split} split", split=split, fix=fix
        )
    return [name for name, _ in tasks]


def _chosen(
    known: list[str], split: str, task_ids: list[str] | None, limit: int | None, attempts: int
) -> list[int]:
    places = {name: place for place, name in enumerate(known)}
    unknown = [name for name in task_ids or () if name not in places]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.5) or known[:3]
        what = f"{len(unknown)} of task_ids are not in the {split} split, the first: {unknown[0]!r}"
        raise FlashError("invalid_argument", what, fix=f"use ids like {', '.join(map(repr, near))}")
    tasks = (
        list(dict.fromkeys(places[name] for name in task_ids))
        if task_ids
        else list(range(len(known)))
    )
    tasks = tasks[:limit]
    if len(tasks) * attempts > MOST_ATTEMPTS:
        what = f"{len(tasks)} tasks x {attempts} attempts are more than {MOST_ATTEMPTS:,}"
        raise FlashError("invalid_argument", what, fix="lower attempts, or set limit")
    return tasks


def _describe(store: Store, run: Run, subject: Subject, known: int, created: bool) -> Evaluate:
    spec, found = run.spec, scores(store, run)
    shown = (
        "temperature",
        "top_p",
        "max_tokens",
        "max_length",
        "stop_sequences",
        "thinking",
        "seed",
    )
    notes: list[str] = []
    if subject.deployment:
        notes.append(
            f"this evaluates what {subject.deployment} serves, on an engine of its own, not its server"
        )
    if len(spec["tasks"]) < known:
        notes.append(f"{len(spec['tasks'])} of the split's {known} tasks")
    if subject.adapter and spec["split"] == "eval" and (overlap := store.overlap(run)):
        notes.append(f"CONTAMINATED: {health.contaminated(**overlap).evidence}")
    return Evaluate(
        run_id=run.id,
        state=run.state,
        created=created,
        environment=spec["environment"],
        of=subject.name,
        split=spec["split"],
        tasks=len(spec["tasks"]),
        attempts=spec["attempts"],
        done=run.step,
        values={name: spec[name] for name in shown if spec[name] is not None and spec[name] != []},
        scores=found,
        error=shorten(f"[{run.error['code']}] {run.error['what']}", 1500) if run.error else None,
        notes=[*notes, *(thoughts(found) if found else ())] or None,
        next=after_evaluation(store, run),
    )


# -- compare ---------------------------------------------------------------------------------------
