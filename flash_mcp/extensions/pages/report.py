"""A run as one page: the report, and the same page while it grows.

The figures are those of `status` (RunView)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import get_args

from flash_mcp.extensions.pages.charts import as_data, chart, series_of
from flash_mcp.extensions.pages.render import Node, nodes_of, render
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, failure_counts, failure_modes
from flash_mcp.protocol.extensions import ExportKind
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Rollout, Run, Try
from flash_mcp.state.owners import caller
from flash_mcp.state.store import Store
from flash_mcp.tools.rollouts import shared_opening
from flash_mcp.tools.shared.next_steps import next_of
from flash_mcp.tools.shared.run_view import RunView, headline, report_on, view_of
from flash_mcp.tools.shared.scores import conversation, last_prompt

TRAIN_STEPS = 5
"""Training steps whose rollouts are shown: the first, the newest and some between."""
EVAL_STEPS = 2
SHOWN_ROLLOUTS = 3
ENDED = 5
"""Runs that say how long others take."""


def html(store: Store, run_id: str, live: str | None = None, notice: str = "") -> str:
    """The page, which needs nothing else; see `render` for `live`. A live page has buttons, and
    says first in `notice` what the last one did. FlashError(unknown_run).
    """
    run = store.run(run_id)
    report = report_on(store, run_id, detailed=True)
    view = report.view
    series = series_of(store, view)
    train = _spread(store.rollout_steps(run_id, "train"), TRAIN_STEPS)
    held_out = _spread(store.rollout_steps(run_id, "eval"), EVAL_STEPS)
    steps = [_step(store, run_id, "train", step) for step in train]
    steps += [_step(store, run_id, "eval", step) for step in held_out]
    # The runs that one call started with several seeds, `run` among them
    others = store.seed_runs(run) if run.seed_group else []
    return render(
        "run.html.j2",
        live=live,
        notice=notice,
        seeds=[(other, view_of(store, other.id)) for other in others],
        **{
            "can_write": caller().access == "write",
            "is_local": caller().is_local,
            "export_kinds": get_args(ExportKind),
            "saved_steps": [row.step for row in reversed(store.checkpoints(run.id))],
            "deployments": [
                row for row in store.deployments(LIVE_DEPLOYMENT) if row.run_id == run.id
            ],
        },
        run=run,
        view=view,
        next_step=next_of(report),
        best=report.best,
        scores=view.scores and view.scores.model_dump(mode="json", exclude_none=True),
        charts=[chart(title, lines) for title, lines in series.items()],
        data=as_data(series),
        headline=headline(view),
        starts_in_s=_starts_in_s(store, run, view),
        examples=examples(store, run_id),
        steps=steps,
        facts=_lineage(run, view),
        values=run.spec.model_dump(),
        events=store.events(run_id, limit=30),
    )


def _starts_in_s(store: Store, run: Run, view: RunView) -> float | None:
    """About when a queued run starts: once the first of those under way ends, and those before it
    take as long as the newest that ended. None where nobody can say.
    """
    if view.queued_ahead is None:
        return None
    views = [view_of(store, other.id) for other in store.taken_runs(run.target)]
    left = [other.eta_s for other in views if other.eta_s is not None]
    ended = store.listed_runs("trainings", "succeeded", "", "newest", ENDED, 0)
    took = [other.ended - other.started for other in ended if other.ended and other.started]
    if not left or (view.queued_ahead and not took):
        return None
    return min(left) + view.queued_ahead * median(took or [0.0])


@dataclass(frozen=True)
class StepRollouts:
    """Rollouts of one step, each with its failure mode where it has one."""

    name: str
    summary: str
    rollouts: Sequence[tuple[Rollout, str | None]]
    opening: list[Node]
    """The messages that all of them begin with."""


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of `steps`, evenly from the first to the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _step(store: Store, run_id: str, split: str, step: int) -> StepRollouts:
    total = store.rollout_count(run_id, split, step)
    solved = store.rollout_count(run_id, split, step, success=True)
    name = f"Step {step}" if split == "train" else f"Held out, step {step}"
    summary = f"{name}: {total} rollouts, success {percent(solved / total)}"
    sample = store.rollouts(run_id, split, step, "random", limit=SAMPLE_ROLLOUTS)
    if counts := failure_counts(sample):
        failed = ", ".join(f"{mode} {count}" for mode, count in counts.items())
        of = f" of {len(sample)} drawn at random" if len(sample) < total else ""
        summary += f"; failures{of}: {failed}"
    shown: list[Rollout] = []
    # Evenly from the best to the worst: the best alone would flatter.
    for place in _spread(range(total), SHOWN_ROLLOUTS):
        shown += store.rollouts(run_id, split, step, "best", limit=1, offset=place)
    rows = list(zip(shown, failure_modes(shown, sample), strict=True))
    return StepRollouts(name, summary, rows, nodes_of(shared_opening(shown)))


def _lineage(run: Run, view: RunView) -> dict[str, str | None]:
    lineage = view.lineage
    if lineage is None:
        return {}
    gold = "the environment's gold answers" if view.algorithm == "sft" else None
    parent = f"{lineage.parent} (digest {lineage.parent_digest})"
    saved = (lineage.checkpoints or {}).items()
    return {
        "code": f"flash-mcp {lineage.code}" if lineage.code else "not recorded",
        "base model": lineage.model,
        "environment": lineage.environment,
        "env_test": lineage.gate,
        "parent adapter": parent if lineage.parent else "none: from scratch",
        "dataset": lineage.dataset or gold,
        "checkpoints": ", ".join(f"step {step}: {digest}" for step, digest in saved),
        "run folder": run.folder,
    }


# -- held-out tasks before and after training: those that changed, and a few to show at once -------

SHOWN = 6
"""Tasks on a run's page."""


@dataclass(frozen=True)
class BeforeAndAfter:
    """One held-out task, answered before and after training."""

    task_id: str
    question: str
    before: str
    after: str
    expected: str | None
    solved: tuple[bool, bool]
    """Whether it was solved before and after."""


def changed(store: Store, run_id: str, first: int, last: int) -> list[tuple[Try, Try]]:
    """The attempts before and after whose success differs; none that environment code failed."""
    # The rollouts of one evaluation may have been lost in part.
    tries = zip(store.tries(run_id, first), store.tries(run_id, last), strict=False)
    pairs: list[tuple[Try, Try]] = []
    for before, after in tries:
        is_valid = before.error is None and after.error is None
        if is_valid and before.success != after.success:
            pairs.append((before, after))
    return pairs


def examples(store: Store, run_id: str) -> list[BeforeAndAfter]:
    """A few of the tasks that changed; if none did, the first ones. Empty for a run without two
    held-out evaluations.
    """
    steps = [row.step for row in store.evals(run_id) if row.can_be_judged]
    if len(steps) < 2:
        return []
    pairs = changed(store, run_id, steps[0], steps[-1])
    stored = {row.index for row in store.tries(run_id, steps[0])}
    rows = [after for _, after in pairs] or store.tries(run_id, steps[-1])
    shown: list[BeforeAndAfter] = []
    for index in map(attrgetter("index"), rows):
        if index not in stored or len(shown) == SHOWN:
            continue
        before = store.transcript(run_id, steps[0], index)
        after = store.transcript(run_id, steps[-1], index)
        example = BeforeAndAfter(
            task_id=after.task_id,
            question=last_prompt(after),
            before=conversation(before),
            after=conversation(after),
            expected=after.expected,
            solved=(before.success, after.success),
        )
        shown.append(example)
    return shown
