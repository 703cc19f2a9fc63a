"""evaluate: how good a model is on an environment's tasks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from pydantic import Field

from environments.untrusted_text import plain_name
from flash_mcp.exam import looks
from flash_mcp.exam.exams import find_exam
from flash_mcp.exam.looks import Marks
from flash_mcp.judgement import health
from flash_mcp.protocol.errors import FlashError, nearest
from flash_mcp.protocol.exams import REFERENCE as EXAM
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import (
    AUTO,
    DEFAULT_MODEL,
    LOCAL_TARGET,
    MAX_GPUS,
    EvalSpec,
    Precision,
    ResolvedEval,
    default_of,
)
from flash_mcp.state import queue, references
from flash_mcp.state.database import pick
from flash_mcp.state.queue import Label
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.launch.devices import need_of
from flash_mcp.tools.shared import loading, resolve
from flash_mcp.tools.shared.next_steps import next_of
from flash_mcp.tools.shared.placing import check_architecture, check_gateway, check_gpus, placed
from flash_mcp.tools.shared.run_view import RunReport
from flash_mcp.tools.shared.scores import (
    ByLabel,
    FailedAttempt,
    Scores,
    by_label,
    scores,
    thoughts,
    worst_attempts,
)
from flash_mcp.tools.shared.tool_base import Result, report
from flash_mcp.tools.shared.truncation import error_text, utc, without_empty
from flash_mcp.tools.shared.waiting import deadline_after, ended, look_after, submit, tried_again

SystemPrompt = Annotated[str | None, Field(max_length=20_000)]
MOST_ATTEMPTS = 50_000
SHOWN = {
    "temperature",
    "top_p",
    "max_tokens",
    "max_length",
    "stop_sequences",
    "thinking",
    "system_prompt",
    "precision",
    "seed",
}
"""Fields of the spec that are shown as `values`."""


class Evaluate(Result):
    """An evaluation, finished or under way."""

    run_id: str
    """The evaluation: a run like others; pass to status, rollouts, cancel, compare."""
    state: str
    """queued, starting, running, succeeded, failed or cancelled."""
    created: bool
    """False where the same was measured before, or idempotency_key found an earlier one."""
    environment: str
    """NAME@DIGEST."""
    of: str
    """The model that is evaluated, in words."""
    split: str
    tasks: int
    """Tasks to be attempted."""
    attempts: int
    """Attempts at each."""
    done: int
    """Attempts made so far."""
    values: dict[str, Any]
    """How it is sampled and limited."""
    exam: Marks | None = None
    """All that a sealed exam shows."""
    scores: Scores | None = None
    """Once it has finished."""
    by_label: ByLabel | None = None
    """Where answers are labels: label by label."""
    worst: list[FailedAttempt] | None = None
    """Failed attempts with the lowest rewards."""
    error: str | None = None
    """Why it failed."""
    notes: list[str] | None = None
    """What is worth a thought."""


async def evaluate(
    environment: Annotated[str | None, Field(min_length=1)] = None,
    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL,
    split: Literal["eval", "train"] = "eval",
    task_ids: Annotated[list[str] | None, Field(min_length=1, max_length=1000)] = None,
    limit: Annotated[int | None, Field(ge=1)] = None,
    attempts: Annotated[int, Field(ge=1, le=256)] = 1,
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None,
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None,
    max_tokens: Annotated[int | None, Field(ge=1, le=131_072)] = None,
    max_length: Annotated[int | None, Field(ge=16)] = None,
    stop_sequences: Annotated[list[str] | None, Field(max_length=16)] = None,
    thinking: bool | None = None,
    system_prompt: SystemPrompt = None,
    precision: Precision | None = None,
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None,
    environment_args: loading.Arguments = None,
    secrets: loading.Secrets = None,
    target: Annotated[str | None, Field(min_length=1)] = None,
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1,
    again: bool = False,
    name: loading.RunName = None,
    note: loading.RunNote = None,
    idempotency_key: Annotated[str | None, Field(min_length=1, max_length=200)] = None,
    wait_s: Annotated[float, Field(ge=0, le=45)] = 35.0,
) -> Evaluate:
    """Measure a model on an environment's tasks: success rate with its interval, mean reward,
    pass@k, length.

    An evaluation is a run: it is queued, goes on without the client, resumes after a crash, and
    keeps every transcript for rollouts (split='eval'). It trains nothing. Comparing two: compare.

    Args:
        environment: As for train, or exam:NAME (sealed: totals only); default: the run's.
        model: Base model; a run's checkpoint, RUN@STEP (@0: before training) or, its newest, RUN;
            or a deployment.
        split: The tasks' split.
        task_ids: Only these tasks.
        limit: Only so many, from the split's start.
        attempts: Attempts at each task, for pass@k.
        temperature: Default 0 (greedy) for one attempt, 1 for several.
        top_p: Nucleus sampling mass; default 1.
        max_tokens: Tokens of one turn; default the run's, else 512.
        max_length: Tokens of a conversation; default the run's, else at most 4096.
        stop_sequences: Strings that end a turn.
        thinking: With thinking; default the run's.
        system_prompt: In place of the environment's; empty: without one.
        precision: Default: the run's or the deployment's; for a base model, the faster one on the
            machine.
        target: As for train.
        gpus: To share a model too large for one.
        seed: Default 0.
        again: Measure anew what was measured alike before.
        idempotency_key: A repeated key returns the first.
        wait_s: Seconds to wait for the scores.
    """
    values: Json = {"temperature": temperature, "top_p": top_p, "seed": seed, "thinking": thinking}
    values |= {"max_tokens": max_tokens, "max_length": max_length}
    values |= {"stop_sequences": stop_sequences, "system_prompt": system_prompt, "gpus": gpus}
    values["precision"] = precision
    values |= {"environment_args": environment_args, "secrets": secrets, "target": target}
    request = EvaluationRequest(split, task_ids, limit, attempts, again, Label(name, note))
    return await _measure(environment, model, request, values, idempotency_key, wait_s)


@dataclass(frozen=True)
class EvaluationRequest:
    """Which attempts are asked for."""

    split: str
    task_ids: list[str] | None
    limit: int | None
    attempts: int
    again: bool
    """Even if they were made before."""
    label: Label


async def _measure(
    environment: str | None,
    model: str,
    request: EvaluationRequest,
    arguments: Json,
    idempotency_key: str | None,
    wait_s: float,
) -> Evaluate:
    store, deadline = open_store(), deadline_after(wait_s)
    subject = await run_sync(references.find_subject, store, model)
    reference = environment_of(environment, subject)
    if reference.startswith(EXAM):
        return await _examine(
            store, reference, subject, request, arguments, idempotency_key, deadline
        )
    row = await run_sync(references.environment, store, reference)
    if arguments["target"] != AUTO:
        loading.check_target(store, arguments["target"] or LOCAL_TARGET)
    resolved = functools.partial(
        resolve.resolve_eval,
        subject,
        row,
        split=request.split,
        attempts=request.attempts,
        arguments=arguments,
    )
    # Resolved once without tasks, for what the environment is loaded with.
    values = resolved(tasks=[]).spec
    await report("loading the environment in a child process")
    names = await task_names(row, values, subject.env_files)
    # Places of the tasks in the split
    places = {name: place for place, name in enumerate(names)}
    unknown = [name for name in request.task_ids or () if name not in places]
    if unknown:
        near = nearest(unknown[0], names) or names[:3]
        what = f"{len(unknown)} of task_ids are not in the {request.split} split"
        fix = f"use ids like {', '.join(map(plain_name, near))}"
        raise FlashError("invalid_argument", f"{what}, the first: {unknown[0]!r}", fix=fix)
    tasks = list(range(len(names)))
    if request.task_ids:
        tasks = list(dict.fromkeys(places[name] for name in request.task_ids))
    tasks = tasks[: request.limit]
    if len(tasks) * request.attempts > MOST_ATTEMPTS:
        what = f"{len(tasks)} tasks x {request.attempts} attempts are more than {MOST_ATTEMPTS:,}"
        raise FlashError("invalid_argument", what, fix="lower attempts, or set limit")
    complete = resolved(tasks=tasks)
    # A repeated key has to agree with the version that was named, too.
    spec = complete.spec.model_copy(update={"environment": reference})
    complete = complete.model_copy(update={"spec": spec})
    asked_for, why = await run_sync(place, store, complete, row, idempotency_key)
    run, created, trouble = await submit(
        store,
        asked_for,
        row,
        subject,
        idempotency_key,
        again=request.again,
        label=request.label,
        lineage={"tasks": {request.split: len(names)}, "env_files": subject.env_files},
    )
    if trouble is None:
        run = await ended(store, run.id, deadline)
    result = await run_sync(_describe, store, run, subject, len(names), created)
    if why and created:
        result.notes = [why, *(result.notes or [])]
    if trouble:
        result.next = f"{trouble} The evaluation is queued. {tried_again(run.id)}"
    return result


async def _examine(
    store: Store,
    reference: str,
    subject: Subject,
    request: EvaluationRequest,
    arguments: Json,
    key: str | None,
    deadline: float,
) -> Evaluate:
    """A look at a sealed exam, which decides its tasks and how they are scored."""
    exam = find_exam(store.base, reference.removeprefix(EXAM).partition("@")[0])
    chosen = pick(arguments, "environment_args", "secrets", "seed", "target")
    chosen |= {"task_ids": request.task_ids, "limit": request.limit}
    chosen |= {"attempts": request.attempts - 1, "split": request.split.removeprefix("eval")}
    if wrong := [name for name, value in chosen.items() if value]:
        what = f"an exam decides its tasks and how they are scored: {', '.join(wrong)} is refused"
        raise FlashError("invalid_argument", what, fix="leave it out")
    loading.check_target(store, LOCAL_TARGET)
    fixed: Json = {"env_timeout_s": default_of("env_timeout_s")}
    fixed["env_concurrency"] = default_of("env_concurrency")
    fixed |= {"environment_args": {}, "secrets": [exam.variable], "target": LOCAL_TARGET}
    resolved = functools.partial(
        resolve.resolve_eval,
        subject,
        exam.version(store.base),
        split="eval",
        attempts=1,
        arguments={**arguments, **fixed},
    )
    options: Json = {"again": request.again, "label": request.label}
    take = functools.partial(looks.take, store, exam, subject, lambda tasks: resolved(tasks=tasks))
    run, created = await run_sync(functools.partial(take, key, **options))
    trouble = await look_after(store, run)
    if trouble is None:
        run = await ended(store, run.id, deadline)
    return Evaluate(
        run_id=run.id,
        state=run.state,
        created=created,
        environment=reference,
        of=subject.name,
        split="eval",
        tasks=exam.per_look,
        attempts=1,
        done=run.step,
        values=without_empty(run.evaluation.model_dump(include=SHOWN)),
        exam=await run_sync(looks.marks_of, store, run),
        error=error_text(run.error, 1500),
        next=str(trouble or next_of(RunReport(run=run, near=store.near(run)))),
    )


def place(
    store: Store, resolved: ResolvedEval, environment: EnvironmentVersion, key: str | None = None
) -> tuple[ResolvedEval, str | None]:
    """With a target in place of "auto", and why that one."""
    first = queue.asked_before(store, resolved, key)
    need_on = functools.partial(need_of, resolved.spec)
    chosen = placed(store, resolved, need_on, first and first.target)
    check_gateway(environment, chosen[0].spec.target)
    if chosen[0].spec.target == LOCAL_TARGET:
        check_gpus(resolved.spec.gpus, shares_model=True)
        check_architecture(resolved.spec.model)
    return chosen


def environment_of(environment: str | None, subject: Subject) -> str:
    """The environment's name, by default that of the model's run. FlashError(invalid_argument)."""
    if environment is not None:
        return environment
    if subject.run is None:
        fix = "pass environment=NAME, as returned by env_push; catalog lists what was pushed"
        what = "environment: missing, and a base model has none of its own"
        raise FlashError("invalid_argument", what, fix=fix)
    return subject.run.environment_reference


async def task_names(
    environment: EnvironmentVersion, spec: EvalSpec, env_files: Sequence[str] = ()
) -> list[str]:
    """The ids of the split's tasks, in order. FlashError(dataset_invalid) for none."""
    split = spec.split
    async with loading.loaded(
        environment,
        args=spec.environment_args,
        secrets=spec.secrets,
        env_files=env_files,
        fix="fix the folder, env_test it, env_push it, and call again",
    ) as host:
        tasks = await host.tasks(split) if host.splits.get(split) else []
    if not tasks:
        fix = "add rows to that split (env.eval_dataset is the eval split), or name the other one"
        what = f"{environment.reference} has no task in its {split} split"
        raise FlashError("dataset_invalid", what, split=split, fix=fix)
    return [name for name, _ in tasks]


def _describe(store: Store, run: Run, subject: Subject, total: int, created: bool) -> Evaluate:
    spec = run.evaluation
    measured = scores(store, run)
    notes: list[str] = []
    if subject.deployment:
        served = f"this evaluates what {subject.deployment} serves"
        notes.append(f"{served}, on an engine of its own, not its server")
    if not created and run.state == "succeeded":
        notes.append(f"measured before, {utc(run.created)}: again=true measures it once more")
    if len(spec.tasks) < total:
        notes.append(f"{len(spec.tasks)} of the split's {total} tasks")
    if subject.adapter and spec.split == "eval" and (overlap := store.overlap(run)):
        notes.append(f"CONTAMINATED: {health.contaminated(**overlap).evidence}")
    if measured:
        notes += thoughts(measured)
    return Evaluate(
        run_id=run.id,
        state=run.state,
        created=created,
        environment=spec.environment,
        of=subject.name,
        split=spec.split,
        tasks=len(spec.tasks),
        attempts=spec.attempts,
        done=run.step,
        values=without_empty(
            spec.model_dump(include=SHOWN) | {"precision": run.precision or spec.precision}
        ),
        scores=measured,
        by_label=by_label(store, run, run.evaluation.step) if measured else None,
        worst=worst_attempts(store, run) if measured else None,
        error=error_text(run.error, 1500),
        notes=notes or None,
        next=next_of(RunReport(run=run, near=store.near(run))),
    )
