"""One run as status shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, cast

from pydantic import Field

from flash_mcp.judgement import comparison, health
from flash_mcp.judgement.comparison import Comparison
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, failure_counts
from flash_mcp.protocol.records import ACTIVE, Checkpoint, Evaluation, Json, Run, RunState
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.fitting import shorten
from flash_mcp.tools.shared.frame import Part
from flash_mcp.tools.shared.next_steps import after_evaluation, after_status
from flash_mcp.tools.shared.scores import Scores, scores
from flash_mcp.tools.shared.waiting import obstacles

SPEED_STEPS = 10


FLAG_STEPS = 400


class Trend(Part):
    """How a metric moved over the training steps so far."""

    first: float = Field(description="Mean over the first steps.")
    last: float = Field(description="Mean over the newest steps.")
    best: float = Field(description="The best single step.")
    over_steps: int = Field(description="Steps that first and last are each averaged over.")
    spark: str = Field(description="All steps as bars, from least to greatest.")


class HeldOut(Part):
    """One evaluation on the eval split. Step 0 is the model before training."""

    step: int = Field(description="Step of the evaluation.")
    n: int = Field(description="Examples.")
    success: float = Field(description="Share that succeeded.")
    band: float = Field(description="Noise: 1.96 sqrt(p(1-p)/n).")
    reward: float | None = Field(default=None, description="Mean reward.")
    truncated: float | None = Field(
        default=None, description="Share cut off at a limit, where not 0."
    )
    errors: float | None = Field(
        default=None, description="Share that failed in environment code, where not 0."
    )


class Verdict(Part):
    """The newest held-out evaluation against the one before training."""

    outcome: comparison.Outcome | Literal["contaminated"] = Field(
        description="As compare says it. underpowered: too few examples to say anything. contaminated: eval tasks were "
        "trained on, so nothing was judged."
    )
    explanation: str = Field(description="The change, its noise band, and on how many examples.")


class Flag(Part):
    """A warning sign."""

    name: str = Field(description="What it is called in the playbook.")
    severity: Literal["warning", "problem"] = Field(
        description="problem: the run is unlikely to get anywhere."
    )
    evidence: str = Field(description="The numbers.")
    remedy: str = Field(description="What usually helps.")


class Failure(Part):
    """Why a run failed, or why its last attempt was lost."""

    code: str = Field(description="Error code.")
    what: str = Field(description="What happened.")
    fix: str | None = Field(default=None, description="What to do about it.")
    log_tail: str | None = Field(default=None, description="The end of what the attempt printed.")


class Lineage(Part):
    """What a run was made of."""

    code: str | None = Field(
        default=None, description="Version of flash-mcp; with +gCOMMIT where it is a checkout."
    )
    environment: str = Field(description="NAME@DIGEST; the digest is of all its files.")
    parent: str | None = Field(
        default=None, description="Adapter that it started from, RUN_ID@STEP or a folder."
    )
    parent_digest: str | None = Field(default=None, description="Digest of that adapter.")
    dataset: str | None = Field(
        default=None, description="Dataset that it learned from, NAME@DIGEST (sft)."
    )
    checkpoints: dict[int, str] | None = Field(
        default=None, description="Digests of the newest checkpoints, by step."
    )


class RunView(Part):
    """One run."""

    run_id: str
    state: RunState
    algorithm: str
    model: str
    environment: str = Field(description="NAME@DIGEST.")
    step: int = Field(description="Optimizer steps done.")
    steps: int | None = Field(
        default=None,
        description="Steps in all; absent until the worker has counted those of epochs.",
    )
    phase: str | None = Field(default=None, description="What the worker does now.")
    attempt: str | None = Field(
        default=None, description="Attempt and how many are allowed, from the second on."
    )
    elapsed_s: int | None = Field(default=None, description="Seconds since it started.")
    eta_s: int | None = Field(
        default=None, description="Seconds left at the recent speed, evaluations not counted."
    )
    step_s: float | None = Field(
        default=None, description="Seconds a step takes, recently; an attempt, of an evaluation."
    )
    tokens_per_s: float | None = Field(default=None, description="Generation speed, recently.")
    reward: Trend | None = Field(default=None, description="Mean reward of the training rollouts.")
    success: Trend | None = Field(
        default=None, description="Success share of the training rollouts."
    )
    loss: Trend | None = Field(default=None, description="Loss (sft); `best` is the lowest.")
    held_out: list[HeldOut] | None = Field(
        default=None, description="Evaluations; the first, and the newest few."
    )
    verdict: Verdict | None = Field(
        default=None, description="Whether training helped on held-out examples."
    )
    newest: dict[str, float] | None = Field(
        default=None, description="Other metrics of the newest step."
    )
    checkpoint: int | None = Field(default=None, description="Step of the newest checkpoint.")
    outlook: str | None = Field(
        default=None,
        description="Whether it is worth continuing, and why: yes, no, doubtful or too early to say.",
    )
    flags: list[Flag] | None = Field(default=None, description="Warning signs, the gravest first.")
    warnings: list[str] | None = Field(default=None, description="The worker's newest warnings.")
    scores: Scores | None = Field(
        default=None, description="What a run made by evaluate found; a step is an attempt."
    )
    error: Failure | None = Field(default=None)
    failures: dict[str, int] | None = Field(
        default=None,
        description="detailed: failure modes of the newest rollouts, as far as they did not succeed.",
    )
    metrics: dict[str, str] | None = Field(
        default=None, description="detailed: every metric over all steps, as `first -> last spark`."
    )
    lineage: Lineage | None = Field(default=None, description="detailed: where the run comes from.")
    values: dict[str, Any] | None = Field(
        default=None, description="detailed: every field of the run."
    )
    sources: dict[str, list[str]] | None = Field(
        default=None,
        description="detailed: where values came from: argument, file; all others: recipe.",
    )
    log_tail: str | None = Field(
        default=None, description="detailed: the end of what the newest attempt printed."
    )


def view_of(store: Store, run_id: str, detailed: bool) -> tuple[RunView, str]:
    """A run's report, and what to do next. FlashError(unknown_run)."""
    run = store.run(run_id)
    held_up = obstacles(store, run)
    warnings = [*held_up, *(event.message for event in store.events(run_id, 3, ["warning"]))]
    recent = [row.metrics for row in store.metrics(run_id, limit=SPEED_STEPS)]
    newest = store.last_metrics(run_id)
    is_eval, saved = run.algorithm == "eval", store.checkpoints(run_id)
    evals = [] if is_eval else [row for row in store.evals(run_id) if row.summary["n"]]
    step = max(run.step, newest.step if newest else 0)
    step_s = _attempt_s(store, run) if is_eval else mean(recent, "time/step_s")
    left = run.steps - step if run.steps and run.state in ACTIVE else None
    is_grpo = run.algorithm == "grpo"
    last = newest.step if newest else 0
    outline = store.outline(run_id, max(1, last // FLAG_STEPS), last - health.WINDOW)
    history = [{**row.metrics, "step": row.step} for row in outline]
    overlap = run.lineage.get("overlap")
    verdict = _verdict(store, run_id, evals)
    trusted = None if overlap else verdict
    flags = health.flags(history)
    if overlap:
        flags = [health.contaminated(**overlap), *flags]
    view = RunView(
        run_id=run_id,
        state=run.state,
        algorithm=run.algorithm,
        model=run.model,
        environment=f"{run.environment}@{run.environment_digest}",
        step=step,
        steps=run.steps,
        phase=run.phase,
        attempt=f"{run.attempt} of {run.max_attempts}" if run.attempt > 1 else None,
        elapsed_s=round((run.ended or time.time()) - run.started) if run.started else None,
        eta_s=round(left * step_s) if left is not None and step_s else None,
        step_s=rounded(step_s, 2),
        tokens_per_s=rounded(mean(recent, "engine/tokens_per_s"), 0),
        reward=_trend(store, run_id, "reward/mean") if is_grpo else None,
        success=_trend(store, run_id, "success/rate") if is_grpo else None,
        loss=None if is_grpo else _trend(store, run_id, "loss", lower_is_better=True),
        held_out=[_held_out(row) for row in (evals if len(evals) <= 5 else [evals[0], *evals[-4:]])]
        or None,
        verdict=_told(verdict, overlap),
        newest=_others(newest.metrics) if newest else None,
        checkpoint=saved[-1].step if saved else None,
        outlook=health.outlook(history, flags, trusted and trusted.outcome) if history else None,
        flags=[Flag(**vars(flag)) for flag in flags] or None,
        warnings=[shorten(warning, 300) for warning in warnings] or None,
        scores=scores(store, run) if is_eval else None,
        error=_failure(run),
        failures=(_failures(store, run_id) or None) if detailed else None,
        metrics=(_metrics(history) or None) if detailed else None,
        lineage=_lineage(run, saved) if detailed else None,
        values=_given(run) if detailed else None,
        sources=by_source(run.sources) if detailed else None,
        log_tail=_log_tail(run, 2500) or None if detailed else None,
    )
    if held_up:
        return view, "do what the first of warnings says: nothing changes before"
    return view, after_evaluation(store, run) if is_eval else after_status(
        run, flags, trusted, bool(saved)
    )


def _attempt_s(store: Store, run: Run) -> float | None:
    """Seconds an attempt of an evaluation that goes on takes, since the worker began to sample;
    many run at once.
    """
    began = store.events(run.id, 1, ["sampling"])
    if run.state not in ACTIVE or not began or run.step <= began[0].data["step"]:
        return None
    return (time.time() - began[0].time) / (run.step - began[0].data["step"])


def _trend(store: Store, run_id: str, name: str, *, lower_is_better: bool = False) -> Trend | None:
    values = store.values(run_id, name)
    found = health.trend(values)
    if found is None:
        return None
    return Trend(
        first=round(found.first, 4),
        last=round(found.last, 4),
        best=round(min(values) if lower_is_better else found.best, 4),
        over_steps=found.width,
        spark=found.spark,
    )


def _held_out(row: Evaluation) -> HeldOut:
    summary = row.summary
    success, count = summary["success"], int(summary["n"])
    return HeldOut(
        step=row.step,
        n=count,
        success=round(success, 4),
        band=round(health.noise_band(success, count), 4),
        reward=rounded(summary.get("reward_mean"), 4),
        truncated=rounded(summary.get("truncated_share"), 4) or None,
        errors=rounded(summary.get("error_share"), 4) or None,
    )


def _verdict(store: Store, run_id: str, evals: list[Evaluation]) -> Comparison | None:
    """Paired by example, those left out that environment code failed on either side."""
    if len(evals) < 2 or evals[0].step != 0:
        return None
    base, trained = evals[0], evals[-1]
    sql = """SELECT a.success AS base, b.success AS trained FROM rollouts a JOIN rollouts b
             ON a.run_id = b.run_id AND a.split = b.split AND a.position = b.position
             WHERE a.run_id = ? AND a.split = 'eval' AND a.step = ? AND b.step = ?
             AND json_extract(a.body, '$.error') IS NULL AND json_extract(b.body, '$.error') IS NULL"""
    pairs = store.query(sql, [run_id, base.step, trained.step])
    if pairs:  # none where their files were lost
        sides = ([float(row[side]) for row in pairs] for side in ("base", "trained"))
        return comparison.compare_paired(*sides, effect=comparison.MIN_CHANGE)
    sides = (_successes(row.summary) for row in (base, trained))
    return comparison.compare_unpaired(*sides, effect=comparison.MIN_CHANGE)


def _successes(summary: Json) -> list[float]:
    """One value an example, 1 for each that succeeded."""
    count = int(summary["n"])
    solved = round(summary["success"] * count)
    return [1.0] * solved + [0.0] * (count - solved)


def _told(verdict: Comparison | None, overlap: Json | None) -> Verdict | None:
    """The verdict, as far as one may be told: figures of trained tasks are no evidence of learning."""
    if verdict is None:
        return None
    if overlap is None:
        return Verdict(outcome=verdict.outcome, explanation=verdict.explanation)
    shared = f"{overlap['shared']} of {overlap['eval_tasks']} eval tasks are train tasks too ({overlap['evidence']})"
    figures = f"not to be trusted: {verdict.explanation}"
    return Verdict(
        outcome="contaminated",
        explanation=f"CONTAMINATED: {shared}: this measures memory. {figures}",
    )


def _failures(store: Store, run_id: str) -> dict[str, int]:
    """Failure modes of the newest step's rollouts; of the newest evaluation where there are none
    (sft).
    """
    for split in ("train", "eval"):
        if steps := store.rollout_steps(run_id, split):
            rows = store.rollouts(run_id, split, steps[-1], "random", limit=SAMPLE_ROLLOUTS)
            return failure_counts(rows)
    return {}


def _metrics(history: Sequence[health.Metrics]) -> dict[str, str]:
    names = dict.fromkeys(name for metrics in history for name in metrics if name != "step")
    columns = {
        name: [value for row in history if (value := row.get(name)) is not None]
        for name in sorted(names)
    }
    trends = {
        name: (health.trend(values), health.sparkline(values, 12))
        for name, values in columns.items()
    }
    return {
        name: f"{found.first:.4g} -> {found.last:.4g} {spark}"
        for name, (found, spark) in trends.items()
        if found
    }


def _lineage(run: Run, saved: list[Checkpoint]) -> Lineage:
    parent, dataset = run.init_adapter, run.dataset
    from_run = parent and parent.get("run_id")
    return Lineage(
        code=run.lineage.get("code"),
        environment=f"{run.environment}@{run.environment_digest}",
        parent=None
        if not parent
        else f"{from_run}@{parent['step']}"
        if from_run
        else parent["path"],
        parent_digest=parent["digest"] if parent else None,
        dataset=f"{dataset['name']}@{dataset['digest']}" if dataset else None,
        checkpoints={row.step: row.digest for row in saved[-3:]} or None,
    )


def by_source(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The fields whose value somebody gave, by where."""
    found: dict[str, list[str]] = {}
    for name, source in sources.items():
        if source in ("argument", "file"):
            found.setdefault(source, []).append(name)
    return found


def _others(metrics: dict[str, float | None]) -> dict[str, float] | None:
    shown = (
        "reward/std",
        "groups/uniform_share",
        "rollouts/truncated_share",
        "rollouts/error_share",
        "rollouts/turns_mean",
        "tokens/completion_mean",
        "loss",
        "eval_loss",
        "entropy",
        "kl",
        "grad_norm",
        "learning_rate",
        "is_ratio/mean",
    )
    found = {
        name: float(f"{value:.4g}") for name in shown if (value := metrics.get(name)) is not None
    }
    return found or None


def _failure(run: Run) -> Failure | None:
    error = run.error
    if not error:
        return None
    values = cast("dict[str, Any]", error.get("values") or {})
    log = str(values.get("log") or "").strip()[-1500:] or _log_tail(run, 1500)
    return Failure(
        code=error["code"],
        what=shorten(error["what"], 2000),
        fix=error.get("fix") or None,
        log_tail=log or None,
    )


def _log_tail(run: Run, characters: int) -> str:
    text = RunFolder(run.folder).log_tail(run.attempt).strip()
    return text if len(text) <= characters else f"…{text[-characters:]}"


def _given(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.spec.items() if value not in (None, [], {})}


def mean(rows: Sequence[dict[str, float | None]], name: str) -> float | None:
    values = [value for row in rows if (value := row.get(name)) is not None]
    return fmean(values) if values else None


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
