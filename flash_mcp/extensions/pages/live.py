"""The pages of `flash-mcp ui` besides that of one run: all runs, several runs in one chart,
transcripts, the tasks that a run changed, a dataset, and a chat."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import get_args

from flash_mcp.extensions.pages.charts import (
    COLOURS,
    POINTS,
    Series,
    as_data,
    chart,
    drawn,
    held_out,
    spark,
)
from flash_mcp.extensions.pages.render import nodes_of, render
from flash_mcp.extensions.pages.report import changed
from flash_mcp.judgement.failures import failure_modes
from flash_mcp.judgement.labels import are_labels
from flash_mcp.protocol.base_models import find
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Rollout, Run, RunState, text_of
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state import datasets
from flash_mcp.state.runs import RunKind, RunOrder
from flash_mcp.state.schema import RolloutOrder
from flash_mcp.state.store import Store
from flash_mcp.tools.catalog import catalog
from flash_mcp.tools.rollouts import shared_opening
from flash_mcp.tools.shared.resolve import adapter_name, differing_values
from flash_mcp.tools.shared.rows import Preview, folder_of, preview_by_default
from flash_mcp.tools.shared.run_view import RunView, headline, view_of

SPARK_POINTS = 24
RUNS = 25
"""Runs on a page of the overview."""
ROLLOUTS = 12
"""Transcripts on a page."""
PREVIEW_S = 2.0
"""How long rows of a dataset are rendered."""
LINES = {
    "Reward, training": "reward/mean",
    "Success, training": "success/rate",
    "Loss": "loss",
    "Held-out loss": "eval_loss",
}


@dataclass(frozen=True)
class RunRow:
    run: Run
    view: RunView
    parent: str | None
    """The adapter that it started from."""
    line: list[tuple[float, float]]
    """Its reward, or its loss, as a small picture's points."""

    @property
    def headline(self) -> str:
        return headline(self.view)

    @property
    def share(self) -> float | None:
        if self.run.ended is not None or not self.view.steps:
            return None
        return self.view.step / self.view.steps


@dataclass(frozen=True, kw_only=True)
class Listing:
    kind: RunKind = "trainings"
    state: RunState | None = None
    contains: str = ""
    order: RunOrder = "newest"
    page: int = 0


def overview(store: Store, live: str, listing: Listing) -> str:
    choice = (listing.kind, listing.state, listing.contains, listing.order)
    runs = store.listed_runs(*choice, RUNS + 1, listing.page * RUNS)
    rows: list[RunRow] = []
    for run in runs[:RUNS]:
        name = "loss" if run.algorithm == "sft" else "reward/mean"
        line = spark(store.series(run.id, name, SPARK_POINTS))
        parent = adapter_name(run.init_adapter)
        rows.append(RunRow(run, view_of(store, run.id), parent, line))
    return render(
        "overview.html.j2",
        live=live,
        rows=rows,
        kinds={kind: store.run_counts(kind) for kind in get_args(RunKind)},
        orders=get_args(RunOrder),
        listing=listing,
        has_more=len(runs) > RUNS,
        catalog=catalog(),
    )


def together(store: Store, live: str, run_ids: Sequence[str]) -> str:
    """Several runs in the same charts. FlashError(unknown_run | invalid_argument)."""
    if len(run_ids) > COLOURS:
        fix = f"choose at most {COLOURS} runs"
        raise FlashError(
            "invalid_argument", "these are too many for one chart", run=run_ids, fix=fix
        )
    runs = list(map(store.run, run_ids))
    views = [view_of(store, run.id) for run in runs]
    series: dict[str, list[Series]] = {}
    for title, name in LINES.items():
        series[title] = [Series(_label(run), store.series(run.id, name, POINTS)) for run in runs]
    pairs = zip(runs, views, strict=True)
    series["Success, held out (95 %)"] = [held_out(_label(run), view) for run, view in pairs]
    charts = drawn(series)
    return render(
        "together.html.j2",
        live=live,
        runs=list(zip(runs, map(headline, views), strict=True)),
        labels=list(map(_label, runs)),
        charts=[chart(title, lines) for title, lines in charts.items()],
        data=as_data(charts),
        differing=differing_values([run.spec.model_dump() for run in runs]),
    )


def _label(run: Run) -> str:
    return f"{run.name} ({run.id})" if run.name else run.id


@dataclass(frozen=True, kw_only=True)
class Selection:
    split: str = "train"
    step: int | None = None
    """None: of all steps."""
    order: RolloutOrder = "worst"
    contains: str = ""
    page: int = 0


def transcripts(store: Store, run_id: str, choice: Selection) -> str:
    run = store.run(run_id)
    split = "eval" if run.algorithm == "eval" else choice.split
    only = (run_id, split, choice.step)
    contains = choice.contains or None
    rows = store.rollouts(
        *only, choice.order, contains, limit=ROLLOUTS, offset=choice.page * ROLLOUTS
    )
    total = store.rollout_count(*only, contains)
    return render(
        "transcripts.html.j2",
        run=run,
        choice=choice,
        split=split,
        steps=store.rollout_steps(run_id, split),
        rows=_with_modes(rows),
        opening=nodes_of(shared_opening(rows)),
        total=total,
        first=choice.page * ROLLOUTS + 1,
        has_more=total > (choice.page + 1) * ROLLOUTS,
    )


def _with_modes(rows: Sequence[Rollout]) -> list[tuple[Rollout, str | None]]:
    return list(zip(rows, failure_modes(rows, rows), strict=True))


def changes(store: Store, live: str, run_id: str, page: int = 0) -> str:
    """The held-out tasks that a run newly solves or no longer solves, before beside after.
    FlashError(unknown_run)."""
    run = store.run(run_id)
    steps = [row.step for row in store.evals(run_id) if row.can_be_judged]
    differing = changed(store, run_id, steps[0], steps[-1]) if len(steps) > 1 else []
    start = page * ROLLOUTS
    pairs: list[list[tuple[Rollout, str | None]]] = []
    for _, after in differing[start : start + ROLLOUTS]:
        first = store.transcript(run_id, steps[0], after.index)
        last = store.transcript(run_id, steps[-1], after.index)
        pairs.append(_with_modes([first, last]))
    return render(
        "changes.html.j2",
        live=live,
        run=run,
        steps=steps,
        pairs=pairs,
        gained=sum(after.success for _, after in differing),
        lost=sum(before.success for before, _ in differing),
        page=page,
        has_more=len(differing) > start + ROLLOUTS,
    )


def dataset(reference: str) -> str:
    """What a dataset holds: labels, lengths, copies, rows. FlashError(unknown_dataset |
    dataset_invalid)."""
    kept = datasets.find(reference)
    rows = kept.rows()
    answers = [text_of(row["messages"][-1]) for row in rows if row["messages"]]
    labels = Counter(answers).most_common() if are_labels(answers) else []
    return render(
        "dataset.html.j2",
        dataset=kept,
        total=len(rows),
        held_back=len(kept.rows(datasets.HOLDOUT)),
        copies=len(rows) - len({json.dumps(row["messages"]) for row in rows}),
        labels=labels,
        preview=_preview(kept.path, folder_of(find(DEFAULT_MODEL))),
    )


@lru_cache(maxsize=32)
def _preview(path: Path, model: Path | None) -> Preview | None:
    """Of a dataset, by the default model, whose files may come to `model` later."""
    rows = list(datasets.load_rows((path / datasets.TRAIN).read_bytes()))
    return preview_by_default(rows, seconds=PREVIEW_S)[0]


def talk(
    store: Store,
    deployment: str,
    message: str = "",
    answers: Mapping[str, str] | None = None,
    *,
    opening: str | None = None,
    raw: bool = False,
) -> str:
    """A chat with a deployment; `answers` by who gave them, `opening` is what was sent before the
    message."""
    return render(
        "chat.html.j2",
        row=store.first("SELECT * FROM deployments WHERE id = ?", [deployment]),
        deployment=deployment,
        message=message,
        answers=answers or {},
        opening=opening,
        raw=raw,
    )


def problem(error: FlashError) -> str:
    return render("problem.html.j2", error=error)


def sign_in(problem: str | None = None) -> str:
    return render("sign_in.html.j2", problem=problem)
