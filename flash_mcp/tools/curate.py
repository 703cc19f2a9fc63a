"""curate: a dataset for supervised fine-tuning, from the attempts of runs and evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, cast

from anyio.to_thread import run_sync
from pydantic import Field

from flash_mcp.exam import exams as sealed
from flash_mcp.judgement import curation
from flash_mcp.judgement.curation import (
    Counts,
    Curated,
    CurationPlan,
    HeldBack,
    Select,
    Source,
    StoredAttempt,
    compile_filter,
)
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.recordings import Recording
from flash_mcp.protocol.records import Json, Run, text_of
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.state import datasets
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.loading import loaded, read_held_out
from flash_mcp.tools.shared.next_steps import passed_on
from flash_mcp.tools.shared.rows import Preview, is_rows, preview_by_default
from flash_mcp.tools.shared.table import keep_conversations, split_conversations
from flash_mcp.tools.shared.tool_base import Result, report
from flash_mcp.tools.shared.truncation import shorten

EXAMPLES = 3
EXAMPLE_CHARACTERS = 400
LEFT_OUT_CHARACTERS = 120
KEEP = "curate again with a name and without dry_run keeps it"


class Selected(ResultModel):
    """A conversation that was selected."""

    part: Literal["train", "holdout"]
    task_id: str
    run_id: str
    source: Source
    step: int
    index: int
    reward: Rounded | None = None
    question: str
    answer: str


class Curate(Result):
    """A dataset, or with dry_run what it would be."""

    dataset: str | None = None
    """NAME@DIGEST: exactly these rows, for good; none if dry_run."""
    created: bool | None = None
    """False where the same rows had been kept under that name."""
    path: str | None = None
    """Folder with train.jsonl, holdout.jsonl and manifest.json."""
    environment: str | None = None
    """NAME@DIGEST that all attempts were made in; none with rows of a file."""
    models: list[str]
    """Base models that wrote the attempts."""
    counts: Counts
    """Where every attempt and every task went."""
    notes: list[str] | None = None
    """What is worth a thought before it is trained on."""
    preview: Preview | None = None
    """With rows and dry_run: the shortest row, a typical one and the longest, with what is learnt.
    """
    examples: list[Selected]
    """A few of the conversations."""


async def curate(
    runs: Annotated[list[str], Field(min_length=1, max_length=50)],
    name: str | None = None,
    filter: str | None = None,
    select: Select = "correct",
    max_per_task: Annotated[int | None, Field(ge=1, le=10_000)] = None,
    success_threshold: float | None = None,
    source: Source | None = None,
    since_step: Annotated[int, Field(ge=0)] = 0,
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    deduplicate: bool = True,
    allow_eval_tasks: bool = False,
    dry_run: bool = False,
    question: str | None = None,
    answer: str | None = None,
) -> Curate:
    """Make an SFT dataset from the attempts of runs and evaluations: filter tasks, select attempts,
    hold tasks back.

    Attempts that environment code failed, and answers that were cut off, are left out and counted;
    so are tasks of the environment's eval split, recognised by id, question or prompt. All runs
    must be of one environment version. Training on the result: train with algorithm='sft' and
    dataset. Reading transcripts: rollouts.

    Args:
        runs: Runs, evaluations and recorded deployments to take attempts from; or one file of rows
            or hub:OWNER/NAME (question=, answer=: see env_setup).
        name: Name to keep the dataset under; only dry_run goes without.
        filter: Which tasks, default every: comparisons of avg, best, worst (rewards), n,
            n_correct and pass@k, and `solved`, with and, or, not: 'pass@4 >= 0.2 and avg < 0.9'.
        select: Which attempts of a task: correct; of the correct, best (one), best-n (the
            max_per_task best) or shortest; or all, right or wrong.
        max_per_task: Attempts of a task at most; default: no bound, shortest: 1.
        success_threshold: Reward from which an attempt is correct, in filter and select; default:
            its own `success`.
        source: Only these; default: all.
        since_step: Only attempts of this step and later ones.
        holdout: Share of tasks, by a hash of the id, kept to measure the loss on.
        deduplicate: Keep one of several attempts with the same words.
        allow_eval_tasks: Learn eval tasks too, which spoils the split for judging.
        dry_run: Show counts and examples and write nothing.
    """
    plan = CurationPlan(
        source=source,
        since_step=since_step,
        keep=compile_filter(filter) if filter is not None else None,
        select=select,
        max_per_task=max_per_task,
        success_threshold=success_threshold,
        holdout=holdout,
        deduplicate=deduplicate,
        allow_eval_tasks=allow_eval_tasks,
    )
    if name is None and not dry_run:
        what = "name: missing; the dataset is kept under one"
        fix = "pass name='...', or dry_run=true to look first"
        raise FlashError("invalid_argument", what, fix=fix)
    if plan.select == "best-n" and plan.max_per_task is None:
        what = "select='best-n' needs max_per_task, which is its n"
        raise FlashError("invalid_argument", what, fix="pass max_per_task=4, for instance")
    if any(map(is_rows, runs)):
        return await run_sync(_of_rows, runs, plan, None if dry_run else name, question, answer)
    if question or answer:
        what = "question and answer name columns of rows, and runs names no file of rows"
        raise FlashError("invalid_argument", what, fix="leave them out")
    return await _curated(runs, plan, None if dry_run else name)


def _of_rows(
    runs: Sequence[str],
    plan: CurationPlan,
    name: str | None,
    question: str | None,
    answer: str | None,
) -> Curate:
    """The rows of a file, kept under `name`; with None, their counts."""
    if len(runs) > 1:
        fix = "pass one file and nothing else in runs"
        raise FlashError("invalid_argument", "rows of a file are curated alone", fix=fix)
    defaults = CurationPlan(holdout=plan.holdout).to_dict()
    unused = [option for option, value in plan.to_dict().items() if value != defaults[option]]
    if unused:
        what = f"{', '.join(unused)} apply to attempts, not to rows of a file: every row is kept"
        fix = "leave them out, and change the file instead"
        raise FlashError("invalid_argument", what, fix=fix)
    if name is None:
        train, _, counts, origin = split_conversations(runs[0], plan.holdout, question, answer)
        notes = [str(origin)] if origin else []
        notes += sealed.notes(sealed.rows_by_exam(home(), sealed.questions_of(train)))
        preview, problem = preview_by_default(train, counts.model_dump())
        if problem:
            notes.append(problem)
        return Curate(
            models=[], counts=counts, notes=notes or None, preview=preview, examples=[], next=KEEP
        )
    kept = keep_conversations(runs[0], plan.holdout, question, answer, name)
    notes = [kept.manifest["source"]["said"]] if "source" in kept.manifest else []
    notes += sealed.notes(sealed.rows_by_exam(home(), sealed.questions_of(kept.rows())))
    return Curate(
        dataset=kept.reference,
        path=str(kept.path),
        models=[],
        counts=Counts(**kept.manifest["counts"]),
        notes=notes or None,
        examples=[],
        next=f"train(algorithm='sft', dataset={kept.reference!r}, validate_only=true)",
    )


async def _curated(runs: Sequence[str], plan: CurationPlan, name: str | None) -> Curate:
    """The dataset, kept under `name`; with None, what it would be."""
    store = open_store()
    # Reads are left to themselves when the call is: they may take longer than it has.
    runs = list(dict.fromkeys(runs))
    rows = await run_sync(_pooled, store, runs, abandon_on_cancel=True)
    await report("asking the environment for its eval split")
    environment = await run_sync(
        store.environment, rows[0].environment_reference, abandon_on_cancel=True
    )
    async with loaded(
        environment,
        args=rows[0].spec.environment_args,
        secrets=rows[0].spec.secrets,
        env_files=rows[0].env_files,
        fix="env_test it; without its eval split nothing can be kept out",
    ) as host:
        held_out = await read_held_out(host)
    await report("reading attempts")
    attempts = [_attempts_of(store, reference, plan.source) for reference in runs]
    curated = await run_sync(_select, attempts, plan, held_out, abandon_on_cancel=True)
    questions = sealed.questions_of(attempt.row() for attempt in curated.train)
    exams = await run_sync(sealed.rows_by_exam, store.base, questions)
    held_back = [_example("holdout", attempt) for attempt in curated.holdout[:1]]
    chosen = curated.train[: EXAMPLES - len(held_back)]
    examples = [_example("train", attempt) for attempt in chosen]
    result = Curate(
        environment=rows[0].environment_reference,
        models=sorted({row.model for row in rows}),
        counts=curated.counts,
        notes=[*_notes(curated, plan, held_out), *sealed.notes(exams)] or None,
        examples=[*examples, *held_back],
        next=KEEP,
    )
    if not curated.train:
        return _nothing(result, runs[0], is_dry=name is None)
    if name is not None:
        await run_sync(
            _keep, store, result, name, dict(zip(runs, rows, strict=True)), curated, plan
        )
    return result


def _keep(
    store: Store,
    result: Curate,
    name: str,
    runs: Mapping[str, Run],
    curated: Curated,
    plan: CurationPlan,
) -> None:
    """Register the dataset, and say so in the result. `runs` are by what the caller named."""
    rows = list(runs.values())
    train = [attempt.row() for attempt in curated.train]
    holdout = [attempt.row() for attempt in curated.holdout]
    manifest = _manifest(runs, curated, plan)
    kept = datasets.register(name, train, holdout, manifest, store.base)
    result.dataset = f"{kept.name}@{kept.digest}"
    result.created = kept.created
    result.path = str(kept.path)
    # The secrets of the runs that have any; none where these differ
    secrets = {tuple(sorted(row.spec.secrets)) for row in rows} - {()}
    names = secrets.pop() if len(secrets) == 1 else ()
    needed = passed_on(names, rows[0].spec.environment_args)
    result.next = (
        f"train(environment={result.environment!r}, algorithm='sft', dataset={result.dataset!r}, "
        f"validate_only=true{needed})"
    )


def _pooled(store: Store, references: Sequence[str]) -> list[Run]:
    """The runs. FlashError(invalid_argument) if their environments or arguments differ."""
    rows: list[Run] = []
    for reference in references:
        is_run = not reference.startswith("dep-")
        rows.append(store.run(reference if is_run else store.deployment(reference).run_id))
    kinds: dict[str, str] = {}
    for row in rows:
        if row.mixture:
            what = f"{row.id} trained on several environments: their attempts cannot be pooled"
            call = f"evaluate(model={row.id!r}, environment=..., split='train', attempts=8)"
            fix = f"curate attempts in one of them, which {call} makes"
            raise FlashError("invalid_argument", what, fix=fix)
        arguments = sorted(row.spec.environment_args.items())
        listed = ", ".join(f"{name}={value!r}" for name, value in arguments)
        kinds[row.id] = f"{row.environment_reference} {listed}"
    if len({*kinds.values()}) > 1:
        listing = "; ".join(f"{run_id}: {kinds[run_id]}" for run_id in [*kinds][:8])
        raise FlashError(
            "invalid_argument",
            "attempts in different environments cannot be pooled: a task or a reward may mean "
            f"something else ({listing})",
            fix="pass runs of one environment version with the same environment_args, and curate "
            "the others apart",
        )
    return rows


def _select(
    iterables: Iterable[Iterable[StoredAttempt]], plan: CurationPlan, held_out: HeldBack
) -> Curated:
    every = itertools.chain.from_iterable(iterables)
    attempts = (attempt for attempt in every if attempt.step >= plan.since_step)
    return curation.curate(attempts, plan, held_out)


def _attempts_of(store: Store, reference: str, source: Source | None) -> Iterator[StoredAttempt]:
    if not reference.startswith("dep-"):
        yield from read_attempts(store.run(reference), source)
    elif source in (None, "recordings"):
        for row in Recording(store.base, reference).rollouts():
            yield _attempt(reference, "recordings", 0, row.fields())


def read_attempts(run: Run, source: Source | None = None) -> Iterator[StoredAttempt]:
    """Every attempt that a run has left in its folder so far."""
    folder = folder_of(run)
    if source in (None, "rollouts"):
        for step in folder.rollout_steps():
            for row in folder.rollouts(step):
                yield _attempt(run.id, "rollouts", step, row)
    if source in (None, "evaluations"):
        for step in folder.eval_steps():
            for row in cast("list[Json]", (folder.evaluation(step) or {}).get("rollouts", [])):
                yield _attempt(run.id, "evaluations", step, {"split": "eval", **row})


def _attempt(run_id: str, source: Source, step: int, row: Json) -> StoredAttempt:
    return StoredAttempt.from_row({**row, "run_id": run_id, "source": source, "step": step})


def _manifest(named: Mapping[str, Run], curated: Curated, plan: CurationPlan) -> Json:
    """Where a dataset came from. Nothing in it depends on when it is made."""
    rows = list(named.values())
    runs: list[Json] = []
    for reference, row in sorted(named.items()):
        used = [item for item in (*curated.train, *curated.holdout) if item.run_id == reference]
        runs.append(
            {
                "run_id": reference,
                "algorithm": row.algorithm,
                "model": row.model,
                "init_adapter": row.init_adapter,
                "rows": len(used),
                "steps": sorted({attempt.step for attempt in used}),
            }
        )
    environment: Json = {
        "name": rows[0].environment,
        "digest": rows[0].environment_digest,
        "args": rows[0].spec.environment_args,
    }
    counts = curated.counts.model_dump()
    return {"environment": environment, "runs": runs, **plan.to_dict(), "counts": counts}


def _notes(curated: Curated, plan: CurationPlan, held_out: HeldBack) -> list[str]:
    counts = curated.counts
    notes: list[str] = []
    tasks = f"{counts.eval_tasks} tasks of the eval split"
    if counts.eval_tasks and plan.allow_eval_tasks:
        lost = "evaluations on it will no longer tell whether the model got better"
        notes.append(f"{tasks} may be learnt: {lost}")
    elif counts.eval_tasks:
        examples = "; ".join(_left_out(attempt, held_out) for attempt in curated.left_out[:2])
        notes.append(f"{tasks} were left out: {counts.eval_attempts} attempts, as {examples}")
    if not plan.allow_eval_tasks and len(held_out.prompts) < held_out.total:
        compared = f"{len(held_out.prompts)} of {held_out.total} eval tasks"
        others = "the others were told by id and question alone"
        notes.append(f"prompts were compared with those of {compared}; {others}")
    if counts.insufficient:
        few = f"{counts.insufficient} tasks have fewer attempts than pass@k needs"
        notes.append(f"{few}: make more of them")
    if plan.holdout and curated.train and not curated.holdout:
        notes.append(f"no task fell into the holdout of {percent(plan.holdout)}: too few tasks")
    wrong = [attempt for attempt in curated.train if not plan.is_correct(attempt)]
    if wrong:
        share = f"{len(wrong)} of {len(curated.train)} rows to train on"
        notes.append(f"{share} are not correct; they will be learnt all the same")
    return notes


def _left_out(attempt: StoredAttempt, held_out: HeldBack) -> str:
    """The end of its prompt, and that of the eval task if it is another."""
    asked = text_of(attempt.messages[attempt.prompt_messages - 1])
    said = f"{shorten(asked, LEFT_OUT_CHARACTERS)!r}"
    found = held_out.prompt_like(attempt)
    if found is None or found.text == asked:
        return said
    return f"{said}, which asks what eval's {shorten(found.text, LEFT_OUT_CHARACTERS)!r} asks"


def _example(part: Literal["train", "holdout"], attempt: StoredAttempt) -> Selected:
    question = text_of(attempt.messages[attempt.prompt_messages - 1])
    return Selected(
        part=part,
        task_id=attempt.task_id,
        run_id=attempt.run_id,
        source=attempt.source,
        step=attempt.step,
        index=attempt.index,
        reward=attempt.reward if attempt.is_scored else None,
        question=shorten(question, EXAMPLE_CHARACTERS),
        answer=shorten(attempt.answers[-1], EXAMPLE_CHARACTERS),
    )


def _nothing(result: Curate, first: str, *, is_dry: bool) -> Curate:
    """The dry run that says why nothing is left to train on, or that as an error."""
    counts = result.counts
    if counts.attempts == 0 and first.startswith("dep-"):
        fix = f"rollouts(run_id={first!r}) shows what it recorded; see source, since_step"
    elif counts.attempts == 0:
        runs = f"status(run_id={first!r}) says whether it has come to a step or an evaluation"
        fix = f"{runs}; see source, since_step"
    elif counts.eval_attempts and not counts.tasks:
        attempts = "a grpo run's rollouts, or evaluate with split='train'"
        fix = f"take attempts at train tasks: {attempts}"
    elif counts.holdout_rows:
        fix = "lower holdout, or add attempts at more tasks"
    elif counts.insufficient or counts.filtered:
        left_out = "counts say how many tasks it left out, and how often tasks were solved"
        fix = f"loosen the filter; {left_out}"
    else:
        fix = (
            "no attempt is correct, and wrong ones would be learnt: train(algorithm='sft', ...) "
            "learns from the tasks' gold answers; a lower success_threshold moves the bar"
        )
    if is_dry:
        result.next = fix
        return result
    listing = ", ".join(f"{name} {count}" for name, count in counts.model_dump().items() if count)
    what = f"nothing is left to train on: {listing or 'no attempts'}"
    raise FlashError("dataset_invalid", what, fix=fix)
