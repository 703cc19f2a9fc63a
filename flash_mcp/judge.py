"""What a run's numbers mean: trends, noise bands, a verdict, and warning signs with their remedy.

Pure functions of numbers, so that every sentence an agent reads can be tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Literal

from flash_mcp.stats import mcnemar

Metrics = Mapping[str, float | None]
Outcome = Literal["improved", "no_change", "regressed"]
Severity = Literal["warning", "problem"]
FlagName = Literal[
    "environment_errors",
    "no_gradient",
    "uniform_groups",
    "truncation",
    "reward_flat",
    "reward_falling",
    "length_collapse",
    "entropy_collapse",
    "policy_mismatch",
    "overfitting",
]

BARS = "▁▂▃▄▅▆▇█"
WINDOW = 10
"""Steps that a flag looks at: the newest so many."""


@dataclass(frozen=True)
class Trend:
    """`first` and `last` are means over the first and last `width` values; `spark` is the whole as tiny bars."""

    first: float
    last: float
    best: float
    width: int
    spark: str


@dataclass(frozen=True)
class Verdict:
    """`change` = trained - base, in success share; `low` to `high` is where the true change lies 95 times of 100."""

    outcome: Outcome
    change: float
    low: float
    high: float
    explanation: str


@dataclass(frozen=True)
class Flag:
    """A warning sign: what the numbers say, and what usually helps."""

    name: FlagName
    severity: Severity
    evidence: str
    remedy: str


def trend(values: Sequence[float]) -> Trend | None:
    """None for no values. The ends are averaged over a fifth of the values, at least 1 and at most 10."""
    if not values:
        return None
    width = min(10, max(1, len(values) // 5))
    return Trend(fmean(values[:width]), fmean(values[-width:]), max(values), width, sparkline(values))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """At most `width` bars between the least and the greatest value; flat values are flat bars."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def noise_band(share: float, count: int) -> float:
    """Half-width of the 95 % interval of a share measured on `count` examples: 1.96 sqrt(p (1 - p) / N)."""
    return 1.96 * math.sqrt(max(share * (1 - share), 0.0) / count) if count else 1.0


def compare(base: tuple[float, int], trained: tuple[float, int]) -> Verdict:
    """Verdict on two (success share, examples) that were measured on different examples.

    One success and one failure are added to each side first (Agresti and Caffo 2000): a share of exactly 0 or 1 would
    otherwise claim to be free of noise.
    """
    shares = [(share * count + 1) / (count + 2) for share, count in (base, trained)]
    counts = [base[1] + 2, trained[1] + 2]
    band = 1.96 * math.sqrt(sum(share * (1 - share) / count for share, count in zip(shares, counts, strict=True)))
    return _judged(trained[0] - base[0], shares[1] - shares[0], band, f"{base[1]} and {trained[1]} examples")


def compare_pairs(pairs: Sequence[tuple[bool, bool]]) -> Verdict:
    """Verdict on (base succeeded, trained succeeded) of the same examples.

    Only examples whose outcome changed carry information. For the interval one change each way is added for the same
    reason as above (Agresti and Min 2005); McNemar's exact test decides.
    """
    won = sum(trained and not base for base, trained in pairs)
    lost = sum(base and not trained for base, trained in pairs)
    count = len(pairs) + 2
    middle = (won - lost) / count
    band = 1.96 * math.sqrt(max((won + lost + 2) / count - middle**2, 0.0) / count)
    detail = f"the same {len(pairs)} examples ({won} newly solved, {lost} no longer)"
    return _judged((won - lost) / max(len(pairs), 1), middle, band, detail, significant=mcnemar(won, lost) < 0.05)


def _judged(change: float, middle: float, band: float, detail: str, *, significant: bool = True) -> Verdict:
    low, high = middle - band, middle + band
    outcome: Outcome = "no_change"
    if significant:
        outcome = "improved" if low > 0 else "regressed" if high < 0 else "no_change"
    words = {
        "improved": "more than chance explains",
        "no_change": "within what chance explains",
        "regressed": "worse than chance explains",
    }
    interval = f"95 % interval {low:+.3f} to {high:+.3f}"
    return Verdict(outcome, change, low, high, f"{change:+.3f} on {detail}, {interval}: {words[outcome]}")


def flags(history: Sequence[Metrics]) -> list[Flag]:
    """Warning signs in a run's metrics, one mapping a step in order of steps; the gravest first."""
    recent = history[-WINDOW:]
    found = [check(history, recent) for check in _CHECKS] if len(history) >= 3 else []
    return sorted((flag for flag in found if flag), key=lambda flag: flag.severity != "problem")


def _column(history: Sequence[Metrics], name: str) -> list[float]:
    return [value for metrics in history if (value := metrics.get(name)) is not None and math.isfinite(value)]


def _mean(history: Sequence[Metrics], name: str) -> float | None:
    values = _column(history, name)
    return fmean(values) if values else None


def _errors(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    share = _mean(recent, "rollouts/error_share")
    if share is None or share < 0.02:
        return None
    return Flag(
        "environment_errors",
        "problem" if share >= 0.2 else "warning",
        f"{share:.0%} of the rollouts of the last {len(recent)} steps failed in environment code, with reward 0",
        "read them with rollouts (which=worst; see each row's error), mend environment.py, env_test, env_push",
    )


def _truncated(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    share = _mean(recent, "rollouts/truncated_share")
    if share is None or share < 0.2:
        return None
    return Flag(
        "truncation",
        "problem" if share >= 0.5 else "warning",
        f"{share:.0%} of the rollouts of the last {len(recent)} steps were cut off at max_tokens or max_length",
        "raise max_tokens (and max_length), ask for shorter answers in the prompt, or set stop_sequences",
    )


def _uniform(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    share, reward = _mean(recent, "groups/uniform_share"), _mean(recent, "reward/mean")
    if share is None or share < 0.6:
        return None
    solved = (_mean(recent, "success/rate") or 0.0) > 0.8
    remedy = (
        "the tasks are solved: stop here, or train on harder ones"
        if solved
        else "make partial progress pay, use easier tasks, or raise group_size or temperature"
    )
    return Flag(
        "uniform_groups",
        "warning" if solved else "problem",
        f"in {share:.0%} of the groups of the last {len(recent)} steps all rollouts scored the same "
        f"(mean reward {reward or 0.0:.2f}): they teach nothing",
        remedy,
    )


def _flat(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    rewards = _column(history, "reward/mean")
    if len(rewards) < 20 or (_mean(recent, "success/rate") or 0.0) > 0.9:
        return None
    third = len(rewards) // 3
    change = fmean(rewards[-third:]) - fmean(rewards[:third])
    band = 1.96 * math.sqrt((pstdev(rewards[:third]) ** 2 + pstdev(rewards[-third:]) ** 2) / third)
    if change > band:
        return None
    falls = change < -band
    return Flag(
        "reward_falling" if falls else "reward_flat",
        "problem" if falls else "warning",
        f"mean reward of the last {third} steps less that of the first {third}: {change:+.3f} ± {band:.3f}",
        "lower learning_rate, or look for a reward that pays for the wrong thing"
        if falls
        else "look at rollouts for what is paid; raise learning_rate (LoRA often takes 1e-4 to 2e-4) or make partial "
        "progress pay",
    )


def _collapse(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    lengths = trend(_column(history, "tokens/completion_mean"))
    rewards = trend(_column(history, "reward/mean"))
    if not lengths or not rewards or lengths.last > 0.4 * lengths.first or rewards.last <= rewards.first:
        return None
    return Flag(
        "length_collapse",
        "warning",
        f"answers shrank from {lengths.first:.0f} to {lengths.last:.0f} tokens while the reward rose",
        "read the best rollouts: where they exploit the scorer, change the scorer; short answers may also be right",
    )


def _entropy(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    entropy, success = trend(_column(history, "entropy")), _mean(recent, "success/rate") or 0.0
    if not entropy or entropy.first <= 0 or entropy.last > 0.15 * entropy.first or success > 0.9:
        return None
    return Flag(
        "entropy_collapse",
        "warning",
        f"entropy fell from {entropy.first:.3f} to {entropy.last:.3f} at {success:.0%} success: little else is tried",
        "lower learning_rate, raise temperature, or add kl_penalty_coef=0.01",
    )


def _mismatch(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    ratio = _mean(recent, "is_ratio/mean")
    if ratio is None or abs(ratio - 1) < 0.2:
        return None
    return Flag(
        "policy_mismatch",
        "warning",
        f"the trainer's and the engine's probabilities differ: mean ratio {ratio:.2f} instead of about 1",
        "keep importance_sampling on and temperature at 1.0; lower learning_rate",
    )


def _still(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    norms = _column(recent, "grad_norm")
    if len(norms) < 3 or max(norms) > 1e-9:
        return None
    return Flag(
        "no_gradient",
        "problem",
        f"the gradient was 0 in each of the last {len(norms)} steps",
        "every group is uniform: change the reward or the tasks; see rollouts",
    )


def _overfit(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    losses = _column(history, "eval_loss")
    if len(losses) < 3 or losses[-1] <= 1.05 * min(losses):
        return None
    return Flag(
        "overfitting",
        "warning",
        f"the held-out loss rose from {min(losses):.3f} to {losses[-1]:.3f}",
        "use an earlier checkpoint, fewer epochs, or more data",
    )


_CHECKS: tuple[Callable[[Sequence[Metrics], Sequence[Metrics]], Flag | None], ...] = (
    _errors,
    _still,
    _uniform,
    _truncated,
    _flat,
    _collapse,
    _entropy,
    _mismatch,
    _overfit,
)
