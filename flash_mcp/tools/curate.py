"""curate: from what models wrote in runs and evaluations to a dataset for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

import anyio.to_thread
from pydantic import Field

from flash_mcp.judgement import curation
from flash_mcp.judgement.attempts import prompt_length
from flash_mcp.judgement.curation import Attempt, Counts, Curated, HeldOut, Plan, Select, Source
from flash_mcp.judgement.task_filter import compile_filter
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, Rollout, Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import datasets
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.fitting import shorten
from flash_mcp.tools.shared.frame import Part, Result, report
from flash_mcp.tools.shared.loading import loaded
from flash_mcp.tools.shared.next_steps import passed_on

LOAD_TIMEOUT_S = 20.0
EXAMPLES = 3
EXAMPLE_CHARACTERS = 400


class Example(Part):
    """A conversation that was selected."""

    part: Literal["train", "holdout"] = Field(
        description="train, or holdout where its task is held back."
    )
    task_id: str
    run_id: str
    source: Source = Field(description="rollouts, or evaluations.")
    step: int
    index: int = Field(description="With run_id and step: what the rollouts tool shows whole.")
    reward: float
    asked: str = Field(description="The last message of its prompt, shortened.")
    answered: str = Field(description="The model's last answer, shortened.")


class Curate(Result):
    """A dataset, or with dry_run what it would be."""

    dataset: str | None = Field(
        default=None, description="NAME@DIGEST: exactly these rows, for good; none if dry_run."
    )
    created: bool | None = Field(
        default=None, description="False where the same rows had been kept under that name."
    )
    path: str | None = Field(
        default=None, description="Folder with train.jsonl, holdout.jsonl and manifest.json."
    )
    environment: str = Field(description="NAME@DIGEST that all attempts were made in.")
    models: list[str] = Field(description="Base models that wrote the attempts.")
    counts: Counts = Field(description="Where every attempt and every task went.")
    notes: list[str] | None = Field(
        default=None, description="What is worth a thought before it is trained on."
    )
    examples: list[Example] = Field(description="A few of the conversations.")


async def curate(
    runs: Annotated[
        list[str],
        Field(
            min_length=1,
            max_length=50,
            description="Ids of training runs and evaluations to take attempts from.",
        ),
    ],
    name: Annotated[
        str | None, Field(description="Name to keep the dataset under; only dry_run goes without.")
    ] = None,
    filter: Annotated[
        str | None,
        Field(
            description="Which tasks, by their attempts: comparisons of avg, best, worst (rewards), n, n_correct and "
            "pass@k, and `solved`, with and, or, not: 'pass@4 >= 0.2 and avg < 0.9'. Default: every task."
        ),
    ] = None,
    select: Annotated[
        Select,
        Field(
            description="Which attempts of a task: correct (default), best (one, right or not), best-n (the "
            "max_per_task best), shortest (of the correct), all."
        ),
    ] = "correct",
    max_per_task: Annotated[
        int | None,
        Field(
            ge=1,
            le=10_000,
            description="Attempts of a task at most; default: no bound, shortest: 1.",
        ),
    ] = None,
    success_threshold: Annotated[
        float | None,
        Field(
            description="Reward from which an attempt is correct, in filter and select; default: its own `success`."
        ),
    ] = None,
    source: Annotated[
        Source | None,
        Field(description="Only training rollouts or only evaluations; default: both."),
    ] = None,
    since_step: Annotated[
        int, Field(ge=0, description="Only attempts of this step and later ones; default 0.")
    ] = 0,
    holdout: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="Share of tasks held back to measure the loss on, by a hash of the id; default 0.",
        ),
    ] = 0.0,
    deduplicate: Annotated[
        bool,
        Field(description="Keep one of several attempts with the very same words; default true."),
    ] = True,
    allow_eval_tasks: Annotated[
        bool,
        Field(
            description="Learn tasks of the eval split too, which spoils it for judging; default false."
        ),
    ] = False,
    dry_run: Annotated[
        bool, Field(description="Show counts and examples and write nothing; default false.")
    ] = False,
) -> Curate:
    """Make an SFT dataset from the attempts of runs and evaluations: filter tasks, select attempts,
    hold tasks back.

    Attempts that environment code failed, and answers that were cut off, are left out and counted;
    so are tasks of the environment's eval split, recognised by id, question or prompt. All runs
    must be of one environment version. Training on the result: train with algorithm='sft' and
    dataset. Reading transcripts: rollouts."""
    plan = Plan(
        keep=compile_filter(filter) if filter is not None else None,
        select=select,
        max_per_task=max_per_task,
        success_threshold=success_threshold,
        holdout=holdout,
        deduplicate=deduplicate,
        allow_eval_tasks=allow_eval_tasks,
    )
    _check(name, plan, dry_run)
    store = open_store()
    # Reads are left to themselves when the call is: they may take longer than it has.
    rows = await anyio.to_thread.run_sync(_pooled, store, runs, abandon_on_cancel=True)
    await report("asking the environment for its eval split")
    held_out = await _held_out(store, rows[0])
    await report("reading attempts")
    curated = await anyio.to_thread.run_sync(
        _curated, rows, source, since_step, plan, held_out, abandon_on_cancel=True
    )
    result = Curate(
        environment=_environment_of(rows[0]),
        models=sorted({row.model for row in rows}),
        counts=curated.counts,
        notes=_notes(curated, plan, held_out) or None,
        examples=_examples(curated),
        next="curate again with a name and without dry_run keeps it",
    )
    if not curated.train:
        return _nothing(result, dry_run)
    if dry_run or name is None:
        return result
    manifest = _manifest(rows, source, since_step, plan, curated)
    train, holdout_rows = (
        [attempt.row() for attempt in part] for part in (curated.train, curated.holdout)
    )
    kept = await anyio.to_thread.run_sync(
        datasets.register, name, train, holdout_rows, manifest, store.base
    )
    result.dataset, result.created, result.path = (
        f"{kept.name}@{kept.digest}",
        kept.created,
        str(kept.path),
    )
    result.next = (
        f"train(environment={result.environment!r}, algorithm='sft', dataset={result.dataset!r}, validate_only=true"
        f"{passed_on(_secrets_of(rows), rows[0].spec.get('environment_args'))})"
    )
    return result


def _check(name: str | None, plan: Plan, dry_run: bool) -> None:
    if name is None and not dry_run:
        fix = "pass name='...', or dry_run=true to look first"
        raise FlashError(
            "invalid_argument", "name: missing; the dataset is kept under one", fix=fix
        )
    if plan.select == "best-n" and plan.max_per_task is None:
        fix = "pass max_per_task=4, for instance"
        raise FlashError(
            "invalid_argument", "select='best-n' needs max_per_task, which is its n", fix=fix
        )


def _pooled(store: Store, run_ids: Sequence[str]) -> list[Run]:
    """The runs, each once. FlashError(invalid_argument) where their environment's version or
    arguments differ.
    """
    rows = [store.run(run_id) for run_id in dict.fromkeys(run_ids)]
    kinds = {(_environment_of(row), _arguments_of(row)) for row in rows}
    if len(kinds) > 1:
        told = "; ".join(
            f"{row.id}: {_environment_of(row)} {_arguments_of(row)}" for row in rows[:8]
        )
        raise FlashError(
            "invalid_argument",
            f"attempts in different environments cannot be pooled: a task or a reward may mean something else ({told})",
            fix="pass runs of one environment version with the same environment_args, and curate the others apart",
        )
    return rows


def _environment_of(row: Run) -> str:
    return f"{row.environment}@{row.environment_digest}"


def _arguments_of(row: Run) -> str:
    arguments = cast("Json", row.spec.get("environment_args") or {})
    return ", ".join(f"{name}={value!r}" for name, value in sorted(arguments.items()))


def _secrets_of(rows: Sequence[Run]) -> list[str]:
    """Names of the secrets of the runs that have any; none where these differ."""
    named = {tuple(sorted(row.spec.get("secrets") or ())) for row in rows} - {()}
    return list(named.pop()) if len(named) == 1 else []


async def _held_out(store: Store, row: Run) -> HeldOut:
    spec = row.spec
    environment = await anyio.to_thread.run_sync(
        store.environment, _environment_of(row), abandon_on_cancel=True
    )
    async with loaded(
        environment,
        args=spec.get("environment_args"),
        secrets=spec.get("secrets"),
        call_timeout_s=LOAD_TIMEOUT_S,
        start_timeout_s=LOAD_TIMEOUT_S,
        fix="env_test it; without its eval split nothing can be kept out",
    ) as host:
        return await curation.read_held_out(host)


def _curated(
    rows: Sequence[Run], source: Source | None, since_step: int, plan: Plan, held_out: HeldOut
) -> Curated:
    attempts = (
        attempt
        for row in rows
        for attempt in read_attempts(row, source)
        if attempt.step >= since_step
    )
    return curation.curate(attempts, plan, held_out)


def read_attempts(run: Run, source: Source | None = None) -> Iterator[Attempt]:
    """Every attempt that a run has left in its folder so far."""
    folder = RunFolder(run.folder)
    if source != "evaluations":
        for step in folder.rollout_steps():
            for row in folder.rollouts(step):
                yield _attempt(run.id, "rollouts", step, Rollout.of(row))
    if source != "rollouts":
        for step in folder.eval_steps():
            for row in cast("list[Json]", (folder.evaluation(step) or {}).get("rollouts", [])):
                yield _attempt(run.id, "evaluations", step, Rollout.of({"split": "eval", **row}))


def _attempt(run_id: str, source: Source, step: int, row: Rollout) -> Attempt:
    return Attempt(
        run_id=run_id,
        source=source,
        step=step,
        index=row.index,
        task_id=row.task_id,
        split=row.split,
        reward=row.reward,
        success=row.success,
        messages=row.messages,
        prompt_messages=prompt_length(row),
        truncated=row.truncated,
        failed=bool(row.error),
    )


def _manifest(
    rows: Sequence[Run], source: Source | None, since_step: int, plan: Plan, curated: Curated
) -> Json:
    """Where a dataset came from. Nothing in it depends on when it is made."""
    used = curated.train + curated.holdout
    runs = [
        {
            "run_id": row.id,
            "algorithm": row.algorithm,
            "model": row.model,
            "init_adapter": row.init_adapter,
            "rows": sum(attempt.run_id == row.id for attempt in used),
            "steps": sorted({attempt.step for attempt in used if attempt.run_id == row.id}),
        }
        for row in sorted(rows, key=lambda row: row.id)
    ]
    environment: Json = {
        "name": rows[0].environment,
        "digest": rows[0].environment_digest,
        "args": rows[0].spec.get("environment_args") or {},
    }
    chosen = {"source": source, "since_step": since_step, **plan.to_dict()}
    return {
        "environment": environment,
        "runs": runs,
        **chosen,
        "counts": curated.counts.model_dump(),
    }


def _notes(curated: Curated, plan: Plan, held_out: HeldOut) -> list[str]:
    counts, notes = curated.counts, list[str]()
    if counts.eval_tasks and plan.allow_eval_tasks:
        notes.append(
            f"{counts.eval_tasks} tasks of the eval split may be learnt: evaluations on it will no longer tell whether "
            "the model got better"
        )
    elif counts.eval_tasks:
        notes.append(
            f"{counts.eval_tasks} tasks of the eval split were left out: {counts.eval_attempts} attempts"
        )
    if not plan.allow_eval_tasks and held_out.opened < held_out.total:
        notes.append(
            f"prompts were compared with those of {held_out.opened} of {held_out.total} eval tasks; the others were "
            "told by id and question alone"
        )
    if counts.insufficient:
        notes.append(
            f"{counts.insufficient} tasks have fewer attempts than pass@k needs: make more of them"
        )
    if plan.holdout and curated.train and not curated.holdout:
        notes.append(f"no task fell into the holdout of {plan.holdout:.0%}: too few tasks")
    wrong = sum(not plan.is_correct(attempt) for attempt in curated.train)
    if wrong:
        notes.append(
            f"{wrong} of {len(curated.train)} rows to train on are not correct; they will be learnt all the same"
        )
    return notes


def _examples(curated: Curated) -> list[Example]:
    """The first of each part, and more of those to train on."""
    shown = [("train", attempt) for attempt in curated.train[: EXAMPLES - bool(curated.holdout)]]
    shown += [("holdout", attempt) for attempt in curated.holdout[:1]]
    return [
        Example(
            part=cast(Any, part),
            **{
                field: getattr(attempt, field)
                for field in ("task_id", "run_id", "source", "step", "index")
            },
            reward=round(attempt.reward, 4),
            asked=shorten(
                str(attempt.messages[attempt.prompt_messages - 1]["content"]), EXAMPLE_CHARACTERS
            ),
            answered=shorten(attempt.answers[-1], EXAMPLE_CHARACTERS),
        )
        for part, attempt in shown
    ]


def _nothing(result: Curate, dry_run: bool) -> Curate:
    """The dry run that says why nothing is left to train on, or that as an error."""
    counts = {name: count for name, count in result.counts.model_dump().items() if count}
    if result.counts.attempts == 0:
        fix = "status(run_id=...) says whether the runs have come to a step or an evaluation; see source, since_step"
    elif result.counts.eval_attempts and not result.counts.tasks:
        fix = "take attempts at train tasks: a grpo run's rollouts, or evaluate with split='train'"
    elif result.counts.holdout_rows:
        fix = "lower holdout, or add attempts at more tasks"
    elif result.counts.insufficient or result.counts.filtered:
        fix = "loosen the filter; counts say how many tasks it left out, and how often tasks were solved"
    else:
        fix = "no attempt is correct: select='best' takes the best there is, success_threshold another bar"
    if dry_run:
        result.next = fix
        return result
    told = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no attempts"
    raise FlashError("dataset_invalid", f"nothing is left to train on: {told}", fix=fix)
