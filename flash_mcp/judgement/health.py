"""What a run's numbers mean: trends, noise bands, a verdict, and warning signs with their remedy.

Pure functions of numbers, so that every sentence an agent reads can be tested.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Literal

from flash_mcp.judgement.statistics import mcnemar

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
    "too_hard",
    "too_easy",
    "reward_without_success",
    "reward_follows_length",
    "repeated_outputs",
    "policy_spike",
    "contaminated_split",
]

BARS = "▁▂▃▄▅▆▇█"
WINDOW = 10
"""Steps that a flag looks at: the newest so many."""
LONG = 20
"""Values of which the first and the last third have a noise worth the name."""


@dataclass(frozen=True)
class Trend:
    """`first` and `last` are means over the first and last `width` values; `spark` is the whole as
    tiny bars.
    """

    first: float
    last: float
    best: float
    width: int
    spark: str


@dataclass(frozen=True)
class Verdict:
    """`change` = trained - base, in success share; `low` to `high` is where the true change lies 95
    times of 100.
    """

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
    """None for no values. The ends are averaged over a fifth of the values, at least 1 and at most
    10.
    """
    if not values:
        return None
    width = min(10, max(1, len(values) // 5))
    return Trend(
        fmean(values[:width]), fmean(values[-width:]), max(values), width, sparkline(values)
    )


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """At most `width` bars between the least and the greatest value; flat values are flat bars."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def noise_band(share: float, count: int) -> float:
    """Half-width of the 95 % interval of a share measured on `count` examples: 1.96 sqrt(p (1 - p)
    / N).
    """
    return 1.96 * math.sqrt(max(share * (1 - share), 0.0) / count) if count else 1.0


def compare(base: tuple[float, int], trained: tuple[float, int]) -> Verdict:
    """Verdict on two (success share, examples) that were measured on different examples.

    One success and one failure are added to each side first (Agresti and Caffo 2000): a share of
    exactly 0 or 1 would otherwise claim to be free of noise."""
    shares = [(share * count + 1) / (count + 2) for share, count in (base, trained)]
    counts = [base[1] + 2, trained[1] + 2]
    band = 1.96 * math.sqrt(
        sum(share * (1 - share) / count for share, count in zip(shares, counts, strict=True))
    )
    return _judged(
        trained[0] - base[0], shares[1] - shares[0], band, f"{base[1]} and {trained[1]} examples"
    )


def compare_pairs(pairs: Sequence[tuple[bool, bool]]) -> Verdict:
    """Verdict on (base succeeded, trained succeeded) of the same examples.

    Only examples whose outcome changed carry information. For the interval one change each way is
    added for the same reason as above (Agresti and Min 2005); McNemar's exact test decides."""
    won = sum(trained and not base for base, trained in pairs)
    lost = sum(base and not trained for base, trained in pairs)
    count = len(pairs) + 2
    middle = (won - lost) / count
    band = 1.96 * math.sqrt(max((won + lost + 2) / count - middle**2, 0.0) / count)
    detail = f"the same {len(pairs)} examples ({won} newly solved, {lost} no longer)"
    return _judged(
        (won - lost) / max(len(pairs), 1),
        middle,
        band,
        detail,
        significant=mcnemar(won, lost) < 0.05,
    )


def _judged(
    change: float, middle: float, band: float, detail: str, *, significant: bool = True
) -> Verdict:
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
    return Verdict(
        outcome, change, low, high, f"{change:+.3f} on {detail}, {interval}: {words[outcome]}"
    )


def flags(history: Sequence[Metrics]) -> list[Flag]:
    """Warning signs in a run's metrics, one mapping a step in order of steps; the gravest first.

    Where the mappings hold their `step` too, the evidence says which steps it is from.
    """
    recent = history[-WINDOW:]
    found = [check(history, recent) for check in _CHECKS] if len(history) >= 3 else []
    return gravest_first(flag for flag in found if flag)


def gravest_first(found: Iterable[Flag]) -> list[Flag]:
    return sorted(found, key=lambda flag: flag.severity != "problem")


def contaminated(shared: int, eval_tasks: int, evidence: str) -> Flag:
    """The flag of a run of whose `eval_tasks` tasks `shared` are train tasks too."""
    return Flag(
        "contaminated_split",
        "problem",
        f"{shared} of {eval_tasks} eval tasks are train tasks too ({evidence}): held-out figures measure memory",
        "take them out of one of the splits, env_test it, env_push it and train again; trust no held-out figure of "
        "this run",
    )


def outlook(history: Sequence[Metrics], found: Sequence[Flag], verdict: str | None = None) -> str:
    """One line on whether the run is worth continuing, and why: yes, doubtful, no, or too early to
    say.
    """
    graver = next((flag for flag in found if flag.severity == "problem"), None)
    if graver and verdict == "improved":
        return f"doubtful: the held-out success rose, but {graver.name}: {graver.evidence}"
    if graver:
        return f"no: {graver.name}: {graver.evidence}"
    if len(history) < 3:
        return f"too early to say: {len(history)} of the 3 steps that warning signs need"
    if verdict == "regressed":
        return "no: the held-out success fell; an earlier checkpoint may be better"
    recent = history[-WINDOW:]
    success = _mean(recent, "success/rate")
    if success is not None and success > 0.9:
        return (
            f"no need: solved, success {success:.0%} in {_steps(recent)}; harder tasks, or the end"
        )
    doubt = next((flag for flag in found if flag.name in _DOUBTS), None)
    if doubt:
        return f"doubtful: {doubt.name}: {doubt.evidence}"
    name, sign = ("reward/mean", 1) if _column(history, "reward/mean") else ("loss", -1)
    moved = trend(values := _column(history, name))
    if moved is None:
        return "too early to say: nothing was measured yet"
    said = f"{name.partition('/')[0]} went from {moved.first:.3g} to {moved.last:.3g} over {_steps(history)}"
    if sign * (moved.last - moved.first) <= 0:
        return f"doubtful: {said}"
    if len(values) < LONG and not _is_monotone(values):
        return f"too early to say: {said}, which chance alone may explain"
    return f"yes: {said}" + (f"; mind {', '.join(flag.name for flag in found)}" if found else "")


def _is_monotone(values: Sequence[float]) -> bool:
    """Whether they rise, or fall, more than chance explains: Mann's test of Kendall's S (1945), at
    5 %.

    Four values or fewer never do.
    """
    count = len(values)
    rises = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
    return abs(rises) - 1 > 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def _steps(history: Sequence[Metrics]) -> str:
    """Which steps these are."""
    first, last = history[0].get("step"), history[-1].get("step")
    return (
        f"the last {len(history)} steps"
        if first is None or last is None
        else f"steps {first:g} to {last:g}"
    )


def _column(history: Sequence[Metrics], name: str) -> list[float]:
    return [
        value
        for metrics in history
        if (value := metrics.get(name)) is not None and math.isfinite(value)
    ]


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
        f"{share:.0%} of the rollouts of {_steps(recent)} failed in environment code: nothing is learnt from them",
        "read them with rollouts (which=worst; see each row's error), mend environment.py, env_test, env_push",
    )


def _truncated(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    share = _mean(recent, "rollouts/truncated_share")
    if share is None or share < 0.2:
        return None
    return Flag(
        "truncation",
        "problem" if share >= 0.5 else "warning",
        f"{share:.0%} of the rollouts of {_steps(recent)} were cut off at max_tokens or max_length",
        "train with a greater max_tokens (and max_length) or stop_sequences, or ask for shorter answers in the prompt",
    )


def _uniform(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    share, reward = _mean(recent, "groups/uniform_share"), _mean(recent, "reward/mean")
    if share is None or share < 0.6:
        return None
    right, zero = (
        _mean(recent, "groups/solved_share") or 0.0,
        _mean(recent, "groups/zero_share") or 0.0,
    )
    solved = _is_solved(recent) or right > share / 2
    if solved:
        remedy = "the tasks are solved: stop here, or train on harder ones"
    elif zero > 0.5:
        remedy = "nothing is ever paid: let the scorer pay for partial progress, use easier tasks, or train sft first"
    else:
        remedy = "make partial progress pay, use easier tasks, or train with a greater group_size or temperature"
    return Flag(
        "uniform_groups",
        "problem" if share >= 0.95 and not solved else "warning",
        f"in {share:.0%} of the groups of {_steps(recent)} all rollouts scored the same (mean reward "
        f"{reward or 0.0:.2f}; all zero in {zero:.0%}, all right in {right:.0%}): they teach nothing",
        remedy,
    )


def _is_solved(recent: Sequence[Metrics]) -> bool:
    return (_mean(recent, "success/rate") or 0.0) > 0.8


def _hard(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    unsolved = _mean(recent, "groups/unsolved_share")
    if len(recent) < WINDOW or unsolved is None or unsolved < 0.8 or _uniform(history, recent):
        return None
    return Flag(
        "too_hard",
        "warning",
        f"in {unsolved:.0%} of the groups of {_steps(recent)} no rollout succeeded, in {_middle(recent):.0%} some did: "
        "success itself is hardly ever compared",
        "train on easier tasks first, on sft gold answers first, or with a greater group_size",
    )


def _easy(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    solved = _mean(recent, "groups/solved_share")
    if len(recent) < WINDOW or solved is None or solved < 0.8 or _uniform(history, recent):
        return None
    return Flag(
        "too_easy",
        "warning",
        f"in {solved:.0%} of the groups of {_steps(recent)} every rollout succeeded, in {_middle(recent):.0%} only "
        "some did",
        "stop here, or train on harder tasks: what is left to learn is in the reward's other parts",
    )


def _middle(recent: Sequence[Metrics]) -> float:
    """Share of groups in which some rollouts succeeded and some did not: those that teach success."""
    return max(
        0.0,
        1
        - (_mean(recent, "groups/solved_share") or 0.0)
        - (_mean(recent, "groups/unsolved_share") or 0.0),
    )


def _change(values: Sequence[float]) -> tuple[float, float] | None:
    """(mean of the last third less that of the first, half-width of its noise); None for fewer than
    LONG values.
    """
    if len(values) < LONG:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    return fmean(last) - fmean(first), 1.96 * math.sqrt(
        (pstdev(first) ** 2 + pstdev(last) ** 2) / third
    )


def _flat(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    found = _change(_column(history, "reward/mean"))
    if found is None or (_mean(recent, "success/rate") or 0.0) > 0.9:
        return None
    change, band = found
    if change > band:
        return None
    falls = change < -band
    return Flag(
        "reward_falling" if falls else "reward_flat",
        "problem" if falls else "warning",
        f"mean reward of the last third of {_steps(history)} less that of the first: {change:+.3f} ± {band:.3f}",
        "lower learning_rate, or look for a reward that pays for the wrong thing"
        if falls
        else "look at rollouts for what is paid; raise learning_rate (LoRA often takes 1e-4 to 2e-4) or make partial "
        "progress pay",
    )


def _unearned(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    reward, success = (
        _change(_column(history, "reward/mean")),
        _change(_column(history, "success/rate")),
    )
    share = _mean(recent, "success/rate") or 0.0
    if (
        reward is None
        or success is None
        or reward[0] <= max(reward[1], 0.02)
        or success[0] > success[1]
        or share > 0.9
    ):
        return None
    return Flag(
        "reward_without_success",
        "problem" if success[0] < -success[1] else "warning",
        f"from the first to the last third of {_steps(history)} the reward changed by {reward[0]:+.3f} ± "
        f"{reward[1]:.3f}, "
        f"success by {success[0]:+.3f} ± {success[1]:.3f}, to {share:.0%}",
        "read rollouts (which=best): what is paid that is no success? Pay less for it in the scorer, env_test, "
        "env_push, train again",
    )


def _collapse(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    lengths = trend(_column(history, "tokens/completion_mean"))
    rewards = trend(_column(history, "reward/mean"))
    if not lengths or not rewards or len(history) < WINDOW:
        return None
    if lengths.last > 0.5 * lengths.first or rewards.last < rewards.first + 0.02:
        return None
    success = trend(_column(history, "success/rate"))
    earned = success is not None and success.last > success.first + 0.1
    # A success that is never false is none: as a rule the environment does not judge it apart from
    # the score.
    held = (
        success is not None and 0.3 < success.last < 0.999 and success.last >= success.first - 0.05
    )
    told = f", success from {success.first:.0%} to {success.last:.0%}" if success else ""
    return Flag(
        "length_collapse",
        "warning" if earned or held else "problem",
        f"answers shrank from {lengths.first:.0f} to {lengths.last:.0f} tokens over {_steps(history)} while the reward "
        f"rose from {rewards.first:.3f} to {rewards.last:.3f}{told}",
        "read rollouts (which=best): where they exploit the scorer, change the scorer and env_push; short answers may "
        "also be right",
    )


def _length(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    found = _column(recent, "tokens/reward_correlation")
    if len(found) < 5 or abs(fmean(found)) < 0.7:
        return None
    longer = fmean(found) > 0
    return Flag(
        "reward_follows_length",
        "warning",
        f"among rollouts of one prompt with the same success, {'longer' if longer else 'shorter'} ones are paid more: "
        f"correlation {fmean(found):+.2f} in {len(found)} of {_steps(recent)}",
        "read rollouts (which=best) and look at what the scorer counts; take length out of it, unless it is the goal",
    )


def _repeated(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    share, success = _mean(recent, "rollouts/repeated_share"), _mean(recent, "success/rate") or 0.0
    # Answers of a few tokens repeat by themselves.
    if (
        share is None
        or share < 0.75
        or success > 0.7
        or (_mean(recent, "tokens/completion_mean") or 0.0) < 8
    ):
        return None
    return Flag(
        "repeated_outputs",
        "warning",
        f"{share:.0%} of the rollouts of {_steps(recent)} repeat another of their group word for word, at "
        f"{success:.0%} success: nothing new is tried",
        "train with a higher temperature or a lower learning_rate from an earlier checkpoint (init_from_adapter)",
    )


def _spike(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    for name, least in (("kl", 0.5), ("sampling_kl", 0.05), ("is_ratio/clipped_share", 0.05)):
        values = _column(recent, name)
        if len(values) < 5 or max(values) < max(least, 5 * median(values)):
            continue
        at = next(metrics.get("step") for metrics in recent if metrics.get(name) == max(values))
        where = f"in one of {_steps(recent)}" if at is None else f"at step {at:g}"
        return Flag(
            "policy_spike",
            "warning",
            f"{name} jumped to {max(values):.3g} {where}; the median of {_steps(recent)} is {median(values):.3g}",
            "train with a lower learning_rate or max_grad_norm; if the reward fell too, go on from the checkpoint "
            "before it (init_from_adapter=RUN_ID@STEP)",
        )
    return None


def _entropy(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    entropy, success = trend(_column(history, "entropy")), _mean(recent, "success/rate")
    if success is None:  # sft is there to make one answer sure
        return None
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
        "with top_p below 1 that is so by itself, the engine's being of the nucleus alone: set top_p=1; else keep "
        "importance_sampling on and lower learning_rate",
    )


def _still(history: Sequence[Metrics], recent: Sequence[Metrics]) -> Flag | None:
    norms = _column(recent, "grad_norm")
    if len(norms) < 3 or max(norms) > 1e-9 or _is_solved(recent):
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


_DOUBTS: frozenset[FlagName] = frozenset(
    {
        "reward_flat",
        "reward_without_success",
        "reward_follows_length",
        "length_collapse",
        "entropy_collapse",
        "repeated_outputs",
        "too_hard",
        "too_easy",
        "overfitting",
    }
)
"""Warnings with which going on is doubtful; with the others it is worth it while the numbers move.
"""

_CHECKS: tuple[Callable[[Sequence[Metrics], Sequence[Metrics]], Flag | None], ...] = (
    _errors,
    _still,
    _uniform,
    _hard,
    _easy,
    _truncated,
    _flat,
    _unearned,
    _collapse,
    _length,
    _entropy,
    _repeated,
    _mismatch,
    _spike,
    _overfit,
)
