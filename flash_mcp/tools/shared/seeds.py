"""Runs that one call started with several seeds: what each came to, and how far they spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flash_mcp.judgement import comparison, statistics
from flash_mcp.judgement.comparison import Verdict
from flash_mcp.protocol.records import Evaluation, Run
from flash_mcp.state.store import Store


def verdict_of(store: Store, run: Run, evaluations: Sequence[Evaluation]) -> Verdict | None:
    """The verdict on a training run, by those of its evaluations that can be judged."""
    pairs = store.pairs(run.id, evaluations)
    judged = comparison.judge(evaluations, pairs, run.lineage.get("overlap"))
    return judged[1] if judged else None


def spread_of(store: Store, run: Run) -> str | None:
    """The held-out success of the runs with other seeds, if `run` is one of several: their mean and
    its interval, then each with its verdict. Only runs that succeeded count in the mean.
    """
    if run.seed_group is None:
        return None
    shares: list[float] = []
    lines: list[str] = []
    for other in store.seed_runs(run):
        line = f"{other.id} (seed {other.training.seed}) {other.state}"
        evaluations = [row for row in store.evals(other.id) if row.can_be_judged]
        if evaluations and evaluations[-1].step > 0:
            share = evaluations[-1].summary["success"]
            line += f", {share:.3f}"
            if other.state == "succeeded":
                shares.append(share)
        if verdict := verdict_of(store, other, evaluations):
            line += f", {verdict.outcome}"
        lines.append(line)
    return f"{_in_words(shares, len(lines))}: {'; '.join(lines)}"


def _in_words(shares: Sequence[float], runs: int) -> str:
    if not shares:
        return f"{runs} seeds, none with a held-out success yet"
    text = f"held-out success of {len(shares)} of {runs} seeds: mean {fmean(shares):.3f}"
    if len(shares) == 1:
        return text
    interval = statistics.mean_interval(shares)
    low, high = max(0.0, interval.low), min(1.0, interval.high)
    return f"{text}, 95 % interval over seeds {low:.3f} to {high:.3f}"
