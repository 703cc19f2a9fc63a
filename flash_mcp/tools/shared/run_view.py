"""One run as status shows it: one read, one judgement, one view."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.untrusted_text import quoted
from flash_mcp.exam import looks
from flash_mcp.judgement import comparison, health, statistics
from flash_mcp.judgement.comparison import Change, Verdict
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, failure_counts
from flash_mcp.judgement.health import WORSE_ELSEWHERE, Flag, Metrics, Trend
from flash_mcp.protocol.base_models import pinned
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import number, percent
from flash_mcp.protocol.records import ACTIVE, Checkpoint, Evaluation, Rollout, Run, RunState
from flash_mcp.protocol.result_model import ResultModel, Rounded, rounded
from flash_mcp.protocol.spec import AUTO, LOCAL_TARGET, EvalSpec
from flash_mcp.state import costs, queue
from flash_mcp.state.history import read_log
from flash_mcp.state.references import split_size
from flash_mcp.state.retention import better_than_newest
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.resolve import adapter_name
from flash_mcp.tools.shared.scores import (
    ByLabel,
    Scores,
    by_label,
    by_words,
    elsewhere,
    scores,
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


class RunHead(ResultModel):
    """What a report and a list say of a run."""

    run_id: str
    name: str | None = None
    state: RunState
    algorithm: str
    model: str
    environment: str
    step: int
    steps: int | None = None  # absent until the worker has counted those of epochs


class RunView(RunHead):
    """One run."""

    note: str | None = None
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


@dataclass(kw_only=True)
class RunReport:
    """One run: what is stored of it, what that means, and how it is shown."""

    run: Run
    evaluations: Sequence[Evaluation] = ()
    checkpoints: Sequence[Checkpoint] = ()
    metrics: Sequence[Metrics] = ()
    """Steps of the whole run, as many as a judgement needs."""
    near: Sequence[Run] = ()
    """Those of Store.near for an evaluation and for a run that succeeded."""
    blocked: Sequence[str] = ()
    """What keeps it from going on."""
    flags: Sequence[Flag] = ()
    """The gravest first; for `next` those that the caller was not told before."""
    change: Change | None = None
    """The change of the held-out success, unless the eval tasks were trained on."""
    verdict: Verdict | None = None
    better: tuple[int, str] | None = None
    """The checkpoint that is better than the newest, and how it compares."""
    regression: str | None = None
    """Whether it got worse at other kinds of tasks, in words."""
    split_size: int | None = None
    """Tasks of the split that is evaluated, if it is known."""
    deployment: str | None = None
    """The one that serves the best checkpoint, or else the newest."""
    has_optimizer: bool = True
    """Whether the newest checkpoint keeps the optimizer's state."""
    wait: str | None = None
    """The call that waits for more, if it is not the usual one."""
    view: RunView = field(init=False)

    @property
    def held_out(self) -> list[Evaluation]:
        """Of training, those that can be judged: environment code did not fail them all."""
        if self.run.algorithm == "eval":
            return []
        return [row for row in self.evaluations if row.can_be_judged]

    @property
    def checkpoint(self) -> int | None:
        """Step of the newest."""
        return self.checkpoints[-1].step if self.checkpoints else None

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint by a held-out measure, if it is not the newest."""
        return self.better and self.better[0]

    @property
    def problem(self) -> Flag | None:
        return next((flag for flag in self.flags if flag.severity == "problem"), None)

    def has(self, name: str) -> bool:
        return any(flag.name == name for flag in self.flags)


def report_on(store: Store, run_id: str, *, detailed: bool = False) -> RunReport:
    blocked = obstacles(store, store.run(run_id))
    report = _judged(store, store.run(run_id), blocked)
    run = report.run
    view = report.view
    view.mixture = _mixture(store, report) or None
    view.regression = report.regression
    view.seeds = spread_of(store, run)
    view.exams = looks.lines(store, run) or None
    if report.evaluations:
        view.by_label = by_label(store, run, report.evaluations[-1].step)
    if view.verdict and view.by_label:
        words = by_words(store, run)
        if words and words.macro_f1 >= view.by_label.macro_f1:
            view.verdict.explanation += "; but counting words does as well: by_label.baseline"
    if run.state == "queued":
        view.queued_ahead = queue.queued_ahead(store, run)
    if detailed:
        view.failures = failure_counts(_newest_rollouts(store, run.id)) or None
        view.metrics = _metrics(report.metrics) or None
        view.lineage = _lineage(store, report)
        view.values = without_empty(run.spec.model_dump())
        view.sources = by_source(run.sources)
        view.log_tail = _log_tail(store, run, 2500) or None
    # Where the folder is elsewhere its store may not answer.
    is_here = run.target == LOCAL_TARGET
    if report.checkpoint is not None and is_here and run.state in ("failed", "cancelled"):
        report.has_optimizer = folder_of(run).checkpoints.has_optimizer(report.checkpoint)
    report.split_size = split_size(store, run)
    if run.algorithm == "eval" or run.state == "succeeded":
        report.near = store.near(run)
    if run.state == "succeeded":
        served = (run.id, report.best or report.checkpoint)
        ready = {(row.run_id, row.step): row.id for row in reversed(store.deployments(("ready",)))}
        report.deployment = ready.get(served)
    return report


def view_of(store: Store, run_id: str) -> RunView:
    """What lists show of `report_on`: nothing that other runs decide. FlashError(unknown_run)."""
    return _judged(store, store.run(run_id)).view


# -- the judgement ---------------------------------------------------------------------------------


def _judged(store: Store, run: Run, blocked: Sequence[str] = ()) -> RunReport:
    """With its view, as far as no other runs decide it."""
    report = RunReport(
        run=run,
        evaluations=store.evals(run.id),
        checkpoints=store.checkpoints(run.id),
        metrics=store.outline(run.id),
        blocked=blocked,
    )
    spec = run.spec
    if report.evaluations and isinstance(spec, EvalSpec) and spec.is_sample:
        newest = report.evaluations[-1]
        report.flags = health.sample_flags(store.tries(run.id, newest.step), newest.summary)
        report.view = _view(store, report)
        return report
    overlap = run.lineage.get("overlap")
    for part in run.mixture:
        overlap = overlap or part["overlap"]
    flags = health.flags(report.metrics)
    flags += comparison.flags_of_parts(
        [part["name"] for part in run.mixture], report.metrics, flags
    )
    evaluations = report.held_out
    is_active = run.state in ACTIVE
    # Its remedy is another evaluation, which need not interrupt whoever waits for the end.
    if evaluations and not is_active and all(flag.name != health.TRUNCATION for flag in flags):
        flags += health.cut_off(evaluations[-1])
    regression, is_worse = elsewhere(store, run)
    if is_worse:
        flags.insert(0, health.worse_elsewhere(regression))
    if overlap:
        flags.insert(0, health.contaminated(**overlap))
    pairs = store.pairs(run.id, evaluations)
    change, verdict = comparison.judge(evaluations, pairs, overlap, is_active) or (None, None)
    for flag in flags:
        if flag.name == health.DESTROYED and not (change and change.outcome == "improved"):
            said = [f"DESTROYED: {flag.evidence}"]
            if verdict:
                said.append(verdict.explanation)
            verdict = Verdict(outcome="destroyed", explanation=". ".join(said))
    report.flags = flags
    report.change = None if overlap else change
    report.verdict = verdict
    report.better = better_than_newest(store, run, report.checkpoints, evaluations)
    report.regression = regression or None
    report.view = _view(store, report)
    return report


def _mixture(store: Store, report: RunReport) -> list[str]:
    run = report.run
    lines: list[str] = []
    total = sum(part["ratio"] for part in run.mixture)
    for part in run.mixture:
        rows = comparison.evaluations_of_part(part["name"], report.evaluations)
        pairs = store.pairs(run.id, rows, part["name"])
        share, is_active = part["ratio"] / total, run.state in ACTIVE
        lines.append(comparison.line_of_part(part, share, report.metrics, rows, pairs, is_active))
    return lines


# -- the view --------------------------------------------------------------------------------------


def _view(store: Store, report: RunReport) -> RunView:
    run = report.run
    recent = health.Steps(report.metrics).recent()
    newest: Metrics = recent.metrics[-1] if recent.metrics else {}
    step = max(run.step, int(newest.get("step") or 0))
    step_s = _step_s(store, run, recent)
    evaluations = report.held_out
    shown = evaluations if len(evaluations) <= 5 else [evaluations[0], *evaluations[-4:]]
    values = {name: newest.get(name) for name in NEWEST}
    shown_values = {
        name: float(f"{value:.4g}") for name, value in values.items() if value is not None
    }
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
        tokens_per_s=rounded(recent.mean("engine/tokens_per_s"), 0),
        held_out=[_point(row, store.solved_by_kind(run.id, row.step)) for row in shown] or None,
        verdict=report.verdict,
        newest=shown_values or None,
        checkpoint=report.checkpoint,
        flags=list(report.flags) or None,
        warnings=_warnings(store, report),
        error=_failure(store, run),
    )
    if report.better:
        view.best = report.better[1]
    view.last_step = _last_step(store, run)
    _add_place_and_times(view, run, step_s)
    if run.used_s:
        view.cost = costs.cost(run, store.base)
    if run.algorithm in ("grpo", "distill"):
        view.reward = health.trend(store.values(run.id, "reward/mean"))
        view.success = health.trend(store.values(run.id, "success/rate"))
    elif run.algorithm == "sft":
        view.loss = health.trend(store.values(run.id, "loss"), lower_is_better=True)
        view.held_out_loss = health.trend(store.values(run.id, "eval_loss"), lower_is_better=True)
    if report.metrics:
        outcome = report.change.outcome if report.change else None
        view.outlook = health.outlook(report.metrics, report.flags, outcome)
    if run.algorithm == "eval" and report.evaluations:
        view.scores = scores(store, run)
        if run.evaluation.is_sample:
            view.outlook = health.sample_outlook(report.flags)
    return view


def _warnings(store: Store, report: RunReport) -> list[str] | None:
    warnings = [shorten(warning, 300) for warning in report.blocked]
    for event in store.events(report.run.id, 3, ["warning"]):
        warnings.append(shorten(event.message, 300))
    if lost := store.lost_steps(report.run):
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


def _step_s(store: Store, run: Run, recent: health.Steps) -> float | None:
    """Seconds a step takes. Of an evaluation, an attempt: many run at once, so the time since the
    worker began to sample counts.
    """
    if run.algorithm != "eval":
        return recent.mean("time/step_s")
    began = next(iter(store.events(run.id, 1, ["sampling"])), None)
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


def _lineage(store: Store, report: RunReport) -> Lineage:
    run = report.run
    commit = store.model_commit(run.id) or run.lineage.get("model_commit")
    lineage = Lineage(
        model=pinned(run.model, commit),
        code=run.lineage.get("code"),
        environment=run.environment_references,
        checkpoints={row.step: row.digest for row in report.checkpoints[-3:]} or None,
        gate=run.lineage.get("gate"),
    )
    if run.init_adapter:
        lineage.parent = adapter_name(run.init_adapter)
        lineage.parent_digest = run.init_adapter["digest"]
    if run.dataset:
        lineage.dataset = f"{run.dataset['name']}@{run.dataset['digest']}"
    return lineage


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


# -- a run in one line, for people: the numbers that decide first ----------------------------------


def headline(view: RunView) -> str:
    """Such as "10 % → 100 % of 200 held-out tasks: improved"."""
    if any(flag.name == WORSE_ELSEWHERE for flag in view.flags or ()):
        return f"{_change(view)}, worse at other kinds of tasks"
    return _change(view)


def _change(view: RunView) -> str:
    if view.held_out:
        newest = view.held_out[-1]
        text = percent(newest.success)
        if len(view.held_out) > 1 and view.held_out[0].step == 0:
            text = f"{percent(view.held_out[0].success)} → {text}"
        text += f" of {newest.n} held-out tasks"
        if not newest.step:
            text += " before training"
            if view.state != "running":
                text += f": {view.state}"
        if view.verdict:
            text += f": {view.verdict.outcome.replace('_', ' ')}"
        return text
    subject = "Evaluation" if view.algorithm == "eval" else "Training"
    if view.state == "queued":
        place = "queued"
        if view.queued_ahead:
            place += f", {view.queued_ahead} before it"
        return f"{view.name or subject}: {place}"
    if view.state in ("failed", "cancelled"):
        return f"{subject}: {view.state}"
    if view.scores and view.scores.success is not None:
        return f"{percent(view.scores.success)} of {view.scores.tasks} tasks solved"
    if view.success:
        moved = f"{percent(view.success.first)} → {percent(view.success.last)}"
        return f"{moved} success in training"
    if view.held_out_loss:
        first, last = view.held_out_loss.first, view.held_out_loss.last
        return f"Held-out loss {number(first)} → {number(last)}"
    if view.loss:
        return f"Training loss {number(view.loss.first)} → {number(view.loss.last)}"
    return f"{subject}: {view.state}"
