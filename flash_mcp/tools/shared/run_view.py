"""One run as status shows it: one read, one judgement, one view."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.untrusted_text import quoted
from flash_mcp.exam import looks
from flash_mcp.judgement import comparison, health, mixture, statistics
from flash_mcp.judgement.comparison import Change, Verdict
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, failure_counts
from flash_mcp.judgement.health import Flag, Metrics, Trend
from flash_mcp.protocol.base_models import pinned
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE, Evaluation, Rollout, Run, RunState, StepMetrics
from flash_mcp.protocol.result_model import ResultModel, Rounded, rounded
from flash_mcp.protocol.spec import AUTO, LOCAL_TARGET, EvalSpec
from flash_mcp.state import costs, queue
from flash_mcp.state.history import RunHistory, read_log
from flash_mcp.state.references import split_size
from flash_mcp.state.retention import better_than_newest
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.next_steps import RunContext, next_of
from flash_mcp.tools.shared.resolve import adapter_name
from flash_mcp.tools.shared.scores import (
    ByLabel,
    Scores,
    by_label,
    by_words,
    elsewhere,
    scores_of,
    spread_of,
)
from flash_mcp.tools.shared.truncation import shorten, without_empty
from flash_mcp.tools.shared.waiting import obstacles

NEWEST = (
    "reward/std",
    "groups/uniform_share",
    "rollouts/truncated_share",
    "rollouts/error_share",
    "rollouts/refused_share",
    "rollouts/turns_mean",
    "tokens/completion_mean",
    "loss",
    "entropy",
    "kl",
    "teacher_kl",
    "grad_norm",
    "learning_rate",
    "is_ratio/mean",
)
"""Metrics of the newest step that are shown without their trend."""


class HeldOut(ResultModel):
    """One evaluation on the eval split. Step 0 is the model before training."""

    step: int
    n: int
    success: (
        Rounded  # low, high: its 95 % interval over kinds; constant: the best constant answer's
    )
    low: Rounded
    high: Rounded
    constant: Rounded | None = None
    reward: Rounded | None = None
    truncated: float | None = None
    errors: float | None = None


class Failure(ResultModel):
    """Why a run failed, or why its last attempt was lost."""

    code: str
    values: str | None = None
    what: str
    fix: str | None = None
    log_tail: str | None = None


class Lineage(ResultModel):
    """What a run was made of."""

    model: str
    code: str | None = None
    environment: str
    parent: str | None = None
    parent_digest: str | None = None
    dataset: str | None = None
    gate: str | None = None
    checkpoints: dict[int, str] | None = None


class RunView(ResultModel):
    """One run."""

    run_id: str
    name: str | None = None
    note: str | None = None
    state: RunState
    algorithm: str
    model: str
    environment: str
    step: int
    steps: int | None = None  # absent until the worker has counted those of epochs
    last_step: str | None = None
    cancel_reason: str | None = None
    target: str | None = None
    pending_reason: str | None = None
    queued_ahead: int | None = None
    phase: str | None = None
    attempt: str | None = None
    elapsed_s: int | None = None
    hours: float | None = None
    cost: str | None = None
    eta_s: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    reward: Trend | None = None
    success: Trend | None = None
    loss: Trend | None = None
    held_out_loss: Trend | None = None
    held_out: list[HeldOut] | None = None
    verdict: Verdict | None = None
    mixture: list[str] | None = None
    regression: str | None = None
    seeds: str | None = None
    exams: list[str] | None = None
    newest: dict[str, float] | None = None
    checkpoint: int | None = None
    best: str | None = None
    outlook: str | None = None
    flags: list[Flag] | None = None
    warnings: list[str] | None = None
    scores: Scores | None = None
    by_label: ByLabel | None = None
    error: Failure | None = None
    # From here on in the detailed form only.
    failures: dict[str, int] | None = None
    metrics: dict[str, str] | None = None
    lineage: Lineage | None = None
    values: dict[str, Any] | None = None
    sources: dict[str, list[str]] | None = None
    log_tail: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run as it is: what it reported, what that means, how it is shown, and what to do next."""

    history: RunHistory
    blocked: list[str]
    """What keeps it from going on."""
    view: RunView
    context: RunContext

    @property
    def next_step(self) -> str:
        return next_of(self.context)


def report_on(store: Store, run_id: str, *, detailed: bool = False) -> RunReport:
    blocked = obstacles(store, store.run(run_id))
    history = store.load(run_id)
    run = history.run
    judged = _judge(store, history)
    view = _view(store, history, judged, blocked)
    view.mixture = _mixture(store, history, judged) or None
    view.regression = judged.regression
    view.seeds = spread_of(store, run)
    view.exams = looks.lines(store, run) or None
    if history.evaluations:
        view.by_label = by_label(store, run, history.evaluations[-1].step)
    if view.verdict and view.by_label:
        words = by_words(store, run)
        if words and words.macro_f1 >= view.by_label.macro_f1:
            view.verdict.explanation += "; but counting words does as well: by_label.baseline"
    if run.state == "queued":
        view.queued_ahead = queue.queued_ahead(store, run)
    if detailed:
        view.failures = failure_counts(_newest_rollouts(store, run.id)) or None
        view.metrics = _metrics(judged.history) or None
        lineage = Lineage(
            model=pinned(run.model, history.model_commit or run.lineage.get("model_commit")),
            code=run.lineage.get("code"),
            environment=run.environment_references,
            checkpoints={row.step: row.digest for row in history.checkpoints[-3:]} or None,
            gate=run.lineage.get("gate"),
        )
        if run.init_adapter:
            lineage.parent = adapter_name(run.init_adapter)
            lineage.parent_digest = run.init_adapter["digest"]
        if run.dataset:
            lineage.dataset = f"{run.dataset['name']}@{run.dataset['digest']}"
        view.lineage = lineage
        view.values = without_empty(run.spec.model_dump())
        view.sources = by_source(run.sources)
        view.log_tail = _log_tail(store, run, 2500) or None
    evaluations = _held_out(history)
    checkpoint = history.checkpoints[-1].step if history.checkpoints else None
    best = judged.better and judged.better[0]
    has_optimizer = True  # also where the folder is elsewhere: its store may not answer
    is_here = run.target == LOCAL_TARGET
    if checkpoint is not None and is_here and run.state in ("failed", "cancelled"):
        has_optimizer = folder_of(run).checkpoints.has_optimizer(checkpoint)
    context = RunContext(
        run=run,
        flags=judged.flags,
        change=judged.change,
        measured=int(evaluations[-1].summary["n"]) if evaluations else 0,
        checkpoint=checkpoint,
        best=best,
        has_optimizer=has_optimizer,
        split_size=split_size(store, run),
        deployment=_deployment_of(store, run, best or checkpoint),
        near=history.near,
        is_blocked=bool(blocked),
    )
    return RunReport(history=history, blocked=blocked, view=view, context=context)


def view_of(store: Store, run_id: str) -> RunView:
    """What lists show of `report_on`: nothing that other runs decide. FlashError(unknown_run)."""
    history = store.load(run_id, near=False)
    return _view(store, history, _judge(store, history), ())


# -- the judgement ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    history: list[Metrics]
    flags: list[Flag]
    change: Change | None = None
    """The change of the held-out success, unless the eval tasks were trained on."""
    verdict: Verdict | None = None
    better: tuple[int, str] | None = None
    """The checkpoint that is better than the newest, and how it compares."""
    regression: str | None = None
    """Whether it got worse at other kinds of tasks, in words."""
    is_sample: bool = False
    """Whether the flags are of groups of train tasks, and so of training on them."""


def _judge(store: Store, full: RunHistory) -> Judgement:
    history: list[Metrics] = [{**row.metrics, "step": row.step} for row in full.outline]
    spec = full.run.spec
    if full.evaluations and isinstance(spec, EvalSpec) and spec.is_sample:
        flags = health.sample_flags(full.tries, full.evaluations[-1].summary)
        return Judgement(history=history, flags=flags, is_sample=True)
    overlap = full.run.lineage.get("overlap")
    for part in full.run.mixture:
        overlap = overlap or part["overlap"]
    flags = health.flags(history)
    flags += mixture.flags_of([part["name"] for part in full.run.mixture], history, flags)
    evaluations = _held_out(full)
    is_active = full.run.state in ACTIVE
    # Its remedy is another evaluation, which need not interrupt whoever waits for the end.
    if evaluations and not is_active and all(flag.name != health.TRUNCATION for flag in flags):
        flags += health.cut_off(evaluations[-1])
    regression, is_worse = elsewhere(store, full.run)
    if is_worse:
        flags.insert(0, health.worse_elsewhere(regression))
    if overlap:
        flags.insert(0, health.contaminated(**overlap))
    judged = comparison.judge(evaluations, full.pairs, overlap, is_active)
    change, verdict = judged or (None, None)
    for flag in flags:
        if flag.name == health.DESTROYED and not (change and change.outcome == "improved"):
            said = [f"DESTROYED: {flag.evidence}"]
            if verdict:
                said.append(verdict.explanation)
            verdict = Verdict(outcome="destroyed", explanation=". ".join(said))
    return Judgement(
        history=history,
        flags=flags,
        change=None if overlap else change,
        verdict=verdict,
        better=better_than_newest(store, full.run, full.checkpoints, evaluations),
        regression=regression or None,
    )


def _mixture(store: Store, history: RunHistory, judged: Judgement) -> list[str]:
    run = history.run
    lines: list[str] = []
    total = sum(part["ratio"] for part in run.mixture)
    for part in run.mixture:
        rows = mixture.evaluations_of(part["name"], history.evaluations)
        pairs = store.pairs(run.id, rows, part["name"])
        share, is_active = part["ratio"] / total, run.state in ACTIVE
        lines.append(mixture.line(part, share, judged.history, rows, pairs, is_active))
    return lines


def _held_out(history: RunHistory) -> list[Evaluation]:
    """Evaluations of a training run that can be judged: environment code did not fail them all."""
    if history.run.algorithm == "eval":
        return []
    return [row for row in history.evaluations if row.can_be_judged]


def _deployment_of(store: Store, run: Run, step: int | None) -> str | None:
    """The one that serves this checkpoint of a run that succeeded."""
    if run.state == "succeeded":
        for row in store.deployments(("ready",)):
            if (row.run_id, row.step) == (run.id, step):
                return row.id
    return None


# -- the view --------------------------------------------------------------------------------------


def _view(store: Store, history: RunHistory, judged: Judgement, blocked: Sequence[str]) -> RunView:
    run = history.run
    newest = history.recent[-1] if history.recent else None
    step = max(run.step, newest.step if newest else 0)
    step_s = _step_s(history)
    evaluations = _held_out(history)
    shown = evaluations if len(evaluations) <= 5 else [evaluations[0], *evaluations[-4:]]
    view = RunView(
        run_id=run.id,
        name=run.name,
        note=run.note,
        state=run.state,
        algorithm=run.algorithm,
        model=run.model,
        environment=run.environment_reference,
        step=step,
        steps=run.steps,
        cancel_reason=run.cancel_reason or None,
        phase=run.phase,
        attempt=f"{run.attempt} of {run.max_attempts}" if run.attempt > 1 else None,
        step_s=rounded(step_s, 2),
        tokens_per_s=rounded(mean_of(history.recent, "engine/tokens_per_s"), 0),
        held_out=[_point(row, store.solved_by_kind(run.id, row.step)) for row in shown] or None,
        verdict=judged.verdict,
        newest=_newest_values(newest) if newest else None,
        checkpoint=history.checkpoints[-1].step if history.checkpoints else None,
        flags=judged.flags or None,
        warnings=_warnings(store, history, blocked),
        error=_failure(store, run),
    )
    if judged.better:
        view.best = judged.better[1]
    view.last_step = _last_step(store, run)
    _add_place_and_times(view, run, step_s)
    if run.used_s:
        view.cost = costs.cost(run, store.base)
    if run.algorithm in ("grpo", "distill"):
        view.reward = health.trend(history.values["reward/mean"])
        view.success = health.trend(history.values["success/rate"])
    elif run.algorithm == "sft":
        view.loss = health.trend(history.values["loss"], lower_is_better=True)
        view.held_out_loss = health.trend(history.values["eval_loss"], lower_is_better=True)
    if judged.history:
        outcome = judged.change.outcome if judged.change else None
        view.outlook = health.outlook(judged.history, judged.flags, outcome)
    if run.algorithm == "eval" and history.evaluations:
        view.scores = scores_of(history.evaluations[-1], history.tries)
        if judged.is_sample:
            view.outlook = health.sample_outlook(judged.flags)
    return view


def _warnings(store: Store, history: RunHistory, blocked: Sequence[str]) -> list[str] | None:
    warnings = [shorten(warning, 300) for warning in (*blocked, *history.warnings)]
    if lost := store.lost_steps(history.run):
        were = "1 step was" if lost == 1 else f"{lost} steps were"
        warnings.insert(0, f"{were} lost: the attempt was killed before it had saved")
    return warnings or None


def _last_step(store: Store, run: Run) -> str | None:
    if run.algorithm == "eval":
        return None
    for event in store.events(run.id, 1, ["last_step"]):
        return event.message
    if not run.training.finish_by:
        return None
    if run.steps and run.training.steps and run.steps < run.training.steps:
        fit = f"{run.steps} of {run.training.steps} steps fit"
        return f"finish_by={run.training.finish_by}: about {fit}"
    return None


def _add_place_and_times(view: RunView, run: Run, step_s: float | None) -> None:
    if run.target != LOCAL_TARGET:
        view.target = run.target
    if run.pending_reason:
        view.pending_reason = shorten(run.pending_reason, 300)
        if run.beat:
            ago_s = time.time() - run.beat
            view.pending_reason += f"; what is shown was read {ago_s:.0f} s ago"
    view.hours = round(run.used_s / 3600, 2) or None
    if run.started:
        view.elapsed_s = round((run.ended or time.time()) - run.started)
    if run.steps and run.state in ACTIVE and step_s:
        view.eta_s = round((run.steps - view.step) * step_s)


def _step_s(history: RunHistory) -> float | None:
    """Seconds a step takes. Of an evaluation, an attempt: many run at once, so the time since the
    worker began to sample counts.
    """
    run = history.run
    if run.algorithm != "eval":
        return mean_of(history.recent, "time/step_s")
    began = history.sampling
    if began is None or run.state not in ACTIVE or run.step <= began.data["step"]:
        return None
    return (time.time() - began.time) / (run.step - began.data["step"])


def _point(row: Evaluation, kinds: Sequence[Sequence[bool]]) -> HeldOut:
    summary = row.summary
    count = int(summary["n"])
    interval = statistics.wilson(summary["success"] * count, count)
    if len(kinds) >= statistics.FEWEST_KINDS:
        interval = statistics.success_interval(kinds)
    return HeldOut(
        step=row.step,
        n=count,
        success=summary["success"],
        low=interval.low,
        high=interval.high,
        constant=summary.get("constant_success"),
        reward=summary.get("reward_mean"),
        truncated=rounded(summary.get("truncated_share"), 4) or None,
        errors=rounded(summary.get("error_share"), 4) or None,
    )


def _newest_values(row: StepMetrics) -> dict[str, float] | None:
    values = {name: row.metrics.get(name) for name in NEWEST}
    shown = {name: float(f"{value:.4g}") for name, value in values.items() if value is not None}
    return shown or None


def _failure(store: Store, run: Run) -> Failure | None:
    if not run.error:
        return None
    error = FlashError.from_dict(run.error)
    log = str(error.values.pop("log", "")).strip()[-1500:] or _log_tail(store, run, 1500)
    error.values.pop("run_id", None)
    return Failure(
        code=error.code,
        values=" ".join(error.wrong_values) or None,
        what=shorten(error.what, 2000) + quoted(shorten(error.wrote, 2000)),
        fix=error.fix or None,
        log_tail=log or None,
    )


def _log_tail(store: Store, run: Run, characters: int) -> str:
    text = read_log(store, run).strip()
    if len(text) <= characters:
        return text
    return f"…{text[-characters:]}"


# -- the detailed form -----------------------------------------------------------------------------


def _newest_rollouts(store: Store, run_id: str) -> list[Rollout]:
    for split in ("train", "eval"):
        steps = store.rollout_steps(run_id, split)
        if steps:
            return store.rollouts(run_id, split, steps[-1], "random", limit=SAMPLE_ROLLOUTS)
    return []


def _metrics(history: Sequence[Metrics]) -> dict[str, str]:
    shown: dict[str, str] = {}
    steps = health.Steps(history)
    for name in sorted({name for metrics in history for name in metrics} - {"step"}):
        values = steps.column(name)
        result = health.trend(values)
        if result:
            spark = health.sparkline(values, 12)
            shown[name] = f"{result.first:.4g} -> {result.last:.4g} {spark}"
    return shown


def by_source(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The fields whose value somebody gave, by where."""
    results: dict[str, list[str]] = {}
    for name, source in sources.items():
        if source in ("argument", "file", "adapter", AUTO):
            results.setdefault(source, []).append(name)
    return results


def mean_of(rows: Sequence[StepMetrics], name: str) -> float | None:
    return health.Steps([row.metrics for row in rows]).mean(name)
