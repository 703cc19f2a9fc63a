"""Whether one evaluation is better than another: a test that fits the data, a verdict, and how much
more would decide.

The unit is the task, never the attempt: attempts of one task are alike. Values are per task, means
over its attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from flash_mcp.judgement import health, statistics
from flash_mcp.judgement.statistics import Interval

Outcome = Literal["improved", "no_change", "regressed", "underpowered"]
Test = Literal["mcnemar_exact", "paired_bootstrap", "noise_band"]

MIN_CHANGE = 0.05
"""Of a share of successes: what is smaller is no change, unless the caller says otherwise."""
LEAST_TASKS = 10
"""With fewer, the absence of a difference is never claimed."""
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Comparison:
    """`change` = other - base, in the metric's own unit; `low` to `high` is where the true change
    lies 95 times of 100.

    improved, regressed: more than chance explains. no_change: whatever change there is, it is
    smaller than `effect`. underpowered: neither can be said; `decide_n` tasks (a side, where
    unpaired) would tell a change of the size seen, or of `effect` where less was seen."""

    outcome: Outcome
    test: Test
    change: float
    low: float
    high: float
    tasks: tuple[int, int]
    p: float | None
    decide_n: int | None
    explanation: str


def compare_paired(
    base: Sequence[float], other: Sequence[float], *, effect: float, seed: int = 0
) -> Comparison:
    """Compare the same tasks on two sides: exact McNemar where each value is 0 or 1, else a paired
    bootstrap.

    ValueError for no tasks, or another number of them on each side.
    """
    differences = [after - before for before, after in zip(base, other, strict=True)]
    if not differences:
        raise ValueError("no tasks to compare")
    count, change = len(differences), fmean(differences)
    if all(value in (0, 1) for value in (*base, *other)):
        won, lost = differences.count(1), differences.count(-1)
        p = statistics.mcnemar(won, lost)
        verdict = health.compare_pairs(
            [(bool(before), bool(after)) for before, after in zip(base, other, strict=True)]
        )
        interval = Interval(verdict.low, verdict.high)
        spread = (won + lost + 2) / (count + 2) - change**2
        how = f"exact McNemar test on the same {count} tasks ({won} newly solved, {lost} no longer; p = {p:.3g})"
        return _judged(
            "mcnemar_exact",
            change,
            interval,
            p < SIGNIFICANT,
            (count, count),
            effect,
            spread,
            how,
            p,
        )
    # One difference each way is added, for the reason that judge.compare_pairs adds one: few tasks
    # that happen to agree would otherwise claim to be free of noise.
    largest = max(effect, *map(abs, differences))
    smoothed = [*differences, largest, -largest]
    interval = statistics.bootstrap_mean(smoothed, seed=seed)
    how = f"paired bootstrap over the same {count} tasks ({statistics.RESAMPLES} resamples, seed {seed})"
    tests = interval.excludes_zero()
    return _judged(
        "paired_bootstrap",
        change,
        interval,
        tests,
        (count, count),
        effect,
        statistics.spread(smoothed),
        how,
        None,
    )


def compare_unpaired(base: Sequence[float], other: Sequence[float], *, effect: float) -> Comparison:
    """Compare different tasks by the noise band of each side: 1.96 sqrt(p (1 - p) / N) for shares
    of successes.

    ValueError for no tasks on a side.
    """
    if not base or not other:
        raise ValueError("no tasks to compare")
    counts = (len(base), len(other))
    change = fmean(other) - fmean(base)
    if all(value in (0, 1) for value in (*base, *other)):
        verdict = health.compare((fmean(base), counts[0]), (fmean(other), counts[1]))
        interval = Interval(verdict.low, verdict.high)
        spread = sum(share * (1 - share) for share in (_smoothed(base), _smoothed(other)))
    else:
        errors = [statistics.spread(side) / len(side) for side in (base, other)]
        half = statistics.Z95 * math.sqrt(sum(errors))
        interval = Interval(change - half, change + half)
        spread = statistics.spread(base) + statistics.spread(other)
    how = f"noise bands of {counts[0]} and {counts[1]} different tasks"
    decided = interval.excludes_zero() and min(counts) >= LEAST_TASKS
    return _judged("noise_band", change, interval, decided, counts, effect, spread, how, None)


def shared(base: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Task ids that stand on both sides, in the order of `base`; none where they are the smaller
    side's lesser part.
    """
    both = [task for task in base if task in other]
    return both if 2 * len(both) >= min(len(base), len(other)) else []


def _judged(
    test: Test,
    change: float,
    interval: Interval,
    significant: bool,
    tasks: tuple[int, int],
    effect: float,
    spread: float,
    how: str,
    p: float | None,
) -> Comparison:
    decide_n: int | None = None
    if significant:
        outcome: Outcome = "improved" if change > 0 else "regressed"
        meaning = "more than chance explains"
    elif interval.within(effect) and min(tasks) >= LEAST_TASKS:
        outcome, meaning = "no_change", f"if there is a change, it is smaller than {effect:g}"
    else:
        outcome, aim = "underpowered", max(abs(change), effect)
        decide_n = max(statistics.needed(spread, aim), LEAST_TASKS)
        side = " on each side" if test == "noise_band" else ""
        reason = "chance alone may explain it"
        if p is not None and interval.excludes_zero():
            reason = f"p is not below {SIGNIFICANT}, so {reason}"
        elif min(tasks) < LEAST_TASKS and (interval.excludes_zero() or interval.within(effect)):
            reason = f"fewer than {LEAST_TASKS} tasks are too few to say"
        meaning = f"{reason}; about {decide_n} tasks{side} would tell a change of {aim:.2g}"
    explanation = f"{change:+.3f}, 95 % interval {interval.low:+.3f} to {interval.high:+.3f}, by {how}: {meaning}"
    return Comparison(
        outcome, test, change, interval.low, interval.high, tasks, p, decide_n, explanation
    )


def _smoothed(values: Sequence[float]) -> float:
    return (sum(values) + 1) / (len(values) + 2)
