"""Whether one evaluation is better than another: a test that fits the data, a verdict, and how many
more tasks would decide.

    improved, regressed  more than chance explains
    no_change            if there is a change, it is smaller than `effect`
    underpowered         neither can be said; `decide_n` tasks (on each side, if unpaired) would
                         show a change of the size seen, or of `effect` if that is larger

The unit is the task, not the attempt, because attempts at one task are alike. Values are per task:
means over its attempts. Tasks that were made from one form are alike too: where they are of at
least FEWEST_KINDS kinds, it is the kinds that may have changed by chance. Fewer are too few to
say anything of other kinds, so the verdict is on these alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul, neg
from statistics import fmean
from typing import Annotated, Literal, TypeVar

from pydantic import PlainSerializer

from flash_mcp.judgement import health, statistics
from flash_mcp.judgement.health import Flag, Metrics
from flash_mcp.judgement.statistics import FEWEST_KINDS, Interval
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import Evaluation, Json
from flash_mcp.protocol.result_model import ResultModel, Rounded

Outcome = Literal["improved", "no_change", "regressed", "underpowered", "constant"]
Solved = tuple[float, float, str]
"""Of one task: success before and after, as 0 or 1, and its kind."""
Test = Literal["mcnemar_exact", "paired_bootstrap", "noise_band", "kind_flips"]

Value = TypeVar("Value")

MIN_CHANGE = 0.05
"""The smallest change of a success share that counts, unless the caller says otherwise."""
LEAST_TASKS = 10
"""With fewer tasks, no_change is never claimed."""
SIGNIFICANT = 0.05


class Change(ResultModel):
    """How much one metric differs: other - base."""

    outcome: Outcome
    change: Rounded
    low: Rounded
    high: Rounded
    test: Test
    p: Annotated[float, PlainSerializer(lambda p: float(f"{p:.3g}"), float)] | None = None
    decide_n: int | None = None
    explanation: str


class Verdict(ResultModel):
    """The newest held-out evaluation against the one before training."""

    outcome: Outcome | Literal["contaminated", "destroyed"]
    explanation: str


@dataclass(kw_only=True)
class _Measured:
    """What a test found; `spread` is the variance of one observation (see statistics.needed)."""

    test: Test
    change: float
    interval: Interval
    tasks: int
    """On the smaller side."""
    spread: float
    how: str
    p: float | None = None
    cost: float = 0.0
    """So many times the tasks are needed as of tasks that do not hang together; 0 where the kinds
    do not count."""

    def is_significant(self, looks: int) -> bool:
        if self.p is not None:
            return self.p < SIGNIFICANT / looks
        if self.test == "noise_band" and self.tasks < LEAST_TASKS:
            return False
        return self.interval.widened(statistics.z_of(SIGNIFICANT / looks)).excludes_zero()


def compare_paired(
    base: Sequence[float],
    other: Sequence[float],
    kinds: Sequence[str] = (),
    *,
    effect: float,
    looks: int = 1,
) -> Change:
    """Compare the same tasks: exact McNemar test if each value is 0 or 1, else a paired bootstrap;
    by flipping the signs of whole kinds where several tasks are of one. `kinds`: one a task, or
    none if all differ. `looks`: how many comparisons it is one of, any of which would be claimed;
    each is judged at so small a part of SIGNIFICANT (Bonferroni). ValueError for no tasks, or
    another number of them on each side.
    """
    differences = [after - before for before, after in zip(base, other, strict=True)]
    if not differences:
        raise ValueError("no tasks to compare")
    are_outcomes = _are_outcomes(base, other)
    measured = _mcnemar(differences) if are_outcomes else _bootstrap(differences, effect)
    measured = _across_kinds(measured, _deviations(differences), kinds)
    if measured.cost:
        measured.p = statistics.sign_flips(statistics.by_kind(differences, kinds))
        p = f"p = {measured.p:.3g}"
        if are_outcomes:
            p = f"{differences.count(1)} newly solved, {differences.count(-1)} no longer; {p}"
        measured.test = "kind_flips"
        measured.how = f"flipping the signs of whole kinds ({p}): the same {measured.how}"
    return _judged(measured, effect, looks)


def compare_unpaired(
    base: Sequence[float],
    other: Sequence[float],
    kinds: Sequence[str] = (),
    *,
    effect: float,
    looks: int = 1,
) -> Change:
    """Compare different tasks by the 95 % interval of the difference of their means; of shares it
    is Agresti and Caffo's, which has a width at 0 and 1 too. `kinds`: those of the tasks of base,
    then of other. ValueError for no tasks on a side.
    """
    if not base or not other:
        raise ValueError("no tasks to compare")
    parts = [*map(neg, _deviations(base)), *_deviations(other)]
    measured = _across_kinds(_noise_bands(base, other), parts, kinds)
    if measured.cost:
        measured.how = f"noise bands of different tasks, {measured.how}"
    return _judged(measured, effect, looks)


def _deviations(values: Sequence[float]) -> list[float]:
    """Each value's share of the deviation of the mean."""
    middle, count = fmean(values), len(values)
    return [(value - middle) / count for value in values]


def _across_kinds(measured: _Measured, parts: Sequence[float], kinds: Sequence[str]) -> _Measured:
    """With the interval and the spread that hold if the tasks of a kind hang together, and a new
    `how` that begins with the tasks and their kinds. `parts`: see statistics.error_of_kinds.
    """
    number = len(set(kinds))
    if number == len(kinds) or number == 1:
        return measured
    if number < FEWEST_KINDS:
        return replace(measured, how=f"{measured.how}, for their {number} kinds of tasks alone")
    error = statistics.error_of_kinds(parts, kinds)
    alone = math.sqrt(sum(map(mul, parts, parts)))
    cost = max(1.0, (error / max(alone, 1e-300)) ** 2)
    low, high = measured.interval.low, measured.interval.high
    middle = (low + high) / 2
    half = max((high - low) / 2, statistics.t95(number - 1) * error)
    how = f"{len(kinds)} tasks of {number} kinds"
    if cost > 1:
        how += f", which tell as much as {max(round(len(kinds) / cost), 1)} unlike ones"
    interval = Interval(middle - half, middle + half)
    return replace(measured, interval=interval, spread=measured.spread * cost, how=how, cost=cost)


def compare_evaluations(
    base: Evaluation, trained: Evaluation, pairs: Sequence[Solved], looks: int = 1
) -> Change:
    if pairs:
        before, after, kinds = zip(*pairs, strict=True)
        change = compare_paired(before, after, kinds, effect=MIN_CHANGE, looks=looks)
    else:
        before, after = _successes(base.summary), _successes(trained.summary)
        change = compare_unpaired(before, after, effect=MIN_CHANGE, looks=looks)
    return discounted(change, trained)


def discounted(change: Change, trained: Evaluation) -> Change:
    """The change of success, which is no improvement if one constant answer does as well as what
    was trained, or if that gives one and the same answer to nearly all tasks. Where the constant
    solves nearly all tasks, they ask for a form: a model can learn it, and not do better.
    """
    summary = trained.summary
    asks_for_form = summary.get("constant_success", 0.0) >= health.COLLAPSED
    is_matched = _is_matched(summary) and not asks_for_form
    if change.outcome == "improved" and (is_matched or _has_collapsed(summary)):
        change.outcome = "constant"
    return change


def headroom(pairs: Sequence[Solved], attempts: int) -> str:
    """Whether training has used up what its first policy could do. `pairs`: for each task 1 if one
    of that policy's `attempts` solved it, else 0; and what the last policy reaches on it.
    """
    best, last, kinds = zip(*pairs, strict=True)
    change = compare_paired(last, best, kinds, effect=MIN_CHANGE)
    both = f"the best of {attempts} attempts of base solves {percent(fmean(best))}"
    both += f", other {percent(fmean(last))}"
    if change.outcome == "improved":
        meaning = "headroom: base can do what other does not do yet, so more steps may help"
    elif change.outcome == "underpowered":
        meaning = f"undecided: about {change.decide_n} tasks would tell headroom from ceiling"
    else:
        meaning = (
            "ceiling: other does all that base could; what is left needs other means than more "
            "reinforcement, as sft on better answers, a larger model, or easier tasks between"
        )
    return f"{meaning} ({both}; {change.explanation})"


def judge(
    evaluations: Sequence[Evaluation],
    pairs: Sequence[Solved],
    overlap: Json | None,
    is_active: bool,
) -> tuple[Change, Verdict] | None:
    """The change over a run's evaluations and the verdict; None unless there is one from before the
    training and another. The end of a run is one look. Before, whoever watches it stops at the look
    that pleases: the parts of SIGNIFICANT of all looks, 1/2, 1/6, 1/12 and so on, sum to 1.
    """
    number = len(evaluations) - 1
    if number < 1 or evaluations[0].step != 0:
        return None
    looks = number * (number + 1) if is_active else 1
    change = compare_evaluations(evaluations[0], evaluations[-1], pairs, looks)
    return change, verdict(change, overlap, evaluations[-1])


def verdict(change: Change, overlap: Json | None, trained: Evaluation) -> Verdict:
    """The verdict on a run. Held-out figures on trained tasks are no evidence of learning, and
    neither is a success that one constant answer reaches.
    """
    if overlap is None:
        explanation = change.explanation
        if doubt := against_constant(trained):
            explanation += f". BUT {doubt}: read rollouts"
        return Verdict(outcome=change.outcome, explanation=explanation)
    return Verdict(
        outcome="contaminated",
        explanation=f"CONTAMINATED: {health.contaminated(**overlap).evidence}. "
        f"Not to be trusted: {change.explanation}",
    )


def against_constant(evaluation: Evaluation, low: float | None = None) -> str:
    """In words, that the model is not clearly better than the best constant answer, or gives one
    answer to nearly all tasks; "" if neither is so. `low` is the lower end of the success's
    interval, by default that of as many independent attempts.
    """
    summary = evaluation.summary
    doubts: list[str] = []
    level = summary.get("constant_success")
    success = summary["success"]
    if low is None:
        low = statistics.wilson(round(success * summary["n"]), summary["n"]).low
    if level and low <= level:
        better = "is no better than" if _is_matched(summary) else "may be no better than"
        doubts.append(f"it {better} {constant_level(evaluation)}")
    if _has_collapsed(summary):
        share = summary["answers/common_share"]
        doubts.append(f"it gives one and the same answer to {percent(share)} of the tasks")
    return "; ".join(doubts)


def _is_matched(summary: Mapping[str, float]) -> bool:
    level = summary.get("constant_success")
    return bool(level) and summary["success"] <= level


def _has_collapsed(summary: Mapping[str, float]) -> bool:
    share = summary.get("answers/common_share", 0.0)
    return health.has_collapsed(share, summary.get("answers/common_success", 0.0))


def constant_level(evaluation: Evaluation) -> str:
    level = evaluation.summary["constant_success"]
    count = int(evaluation.summary["constant_n"])
    band = statistics.wilson(round(level * count), count)
    interval = f"{band.low:.2f} to {band.high:.2f}, {count} tasks"
    return f"{evaluation.constant_name}: {level:.2f} ({interval})"


def shared(base: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Ids of tasks on both sides, in order; none if they are under half of the smaller side."""
    both = [task for task in base if task in other]
    if 2 * len(both) >= min(len(base), len(other)):
        return both
    return []


def _mcnemar(differences: Sequence[float]) -> _Measured:
    count = len(differences)
    change = fmean(differences)
    won = differences.count(1)
    lost = differences.count(-1)
    p = statistics.mcnemar(won, lost)
    # One change each way is added to the interval (Bonett and Price 2012). Without them, few tasks
    # that happen to agree would claim to be free of noise.
    middle = (won - lost) / (count + 2)
    changed = (won + lost + 2) / (count + 2)
    half = statistics.Z95 * math.sqrt(max(changed - middle**2, 0.0) / (count + 2))
    gone = f"{won} newly solved, {lost} no longer"
    return _Measured(
        test="mcnemar_exact",
        change=change,
        # Shares differ by 1 at most.
        interval=Interval(max(middle - half, -1.0), min(middle + half, 1.0)),
        tasks=count,
        spread=changed - change**2,
        how=f"exact McNemar test on the same {count} tasks ({gone}; p = {p:.3g})",
        p=p,
    )


def _bootstrap(differences: Sequence[float], effect: float) -> _Measured:
    count = len(differences)
    # One difference each way is added, for the same reason as in McNemar's interval.
    largest = max(effect, *map(abs, differences))
    smoothed = [*differences, largest, -largest]
    interval = statistics.bootstrap_mean(smoothed)
    draws = f"{statistics.RESAMPLES} resamples, seed 0"
    if len(smoothed) > statistics.MOST_RESAMPLED:
        draws = "normal interval, as there are so many"
    return _Measured(
        test="paired_bootstrap",
        change=fmean(differences),
        interval=interval,
        tasks=count,
        spread=statistics.spread(smoothed),
        how=f"paired bootstrap over the same {count} tasks ({draws})",
    )


def _noise_bands(base: Sequence[float], other: Sequence[float]) -> _Measured:
    change = fmean(other) - fmean(base)
    if _are_outcomes(base, other):
        # One success and one failure are added to each side (Agresti and Caffo 2000): a share of
        # exactly 0 or 1 would otherwise claim to be free of noise.
        shares = [(sum(side) + 1) / (len(side) + 2) for side in (base, other)]
        counts = [len(base) + 2, len(other) + 2]
        spreads = [share * (1 - share) for share in shares]
        middle = shares[1] - shares[0]
        most = 1.0  # shares differ by 1 at most
    else:
        counts = [len(base), len(other)]
        spreads = [statistics.spread(base), statistics.spread(other)]
        middle = change
        most = math.inf
    errors = [spread / count for spread, count in zip(spreads, counts, strict=True)]
    half = statistics.Z95 * math.sqrt(sum(errors))
    interval = Interval(max(middle - half, -most), min(middle + half, most))
    tasks = min(len(base), len(other))
    return _Measured(
        test="noise_band",
        change=change,
        interval=interval,
        tasks=tasks,
        spread=sum(spreads),
        how=f"noise bands of {len(base)} and {len(other)} different tasks",
    )


def _judged(measured: _Measured, effect: float, looks: int) -> Change:
    change = measured.change
    interval = measured.interval
    enough = measured.tasks >= LEAST_TASKS
    decide_n: int | None = None
    if measured.is_significant(looks):
        outcome: Outcome = "improved" if change > 0 else "regressed"
        meaning = "more than chance explains"
    elif interval.within(effect) and enough:
        outcome = "no_change"
        meaning = f"if there is a change, it is smaller than {effect:g}"
    else:
        outcome = "underpowered"
        aim, z = max(abs(change), effect), statistics.z_of(SIGNIFICANT / looks)
        decide_n = max(statistics.needed(measured.spread, aim, z), LEAST_TASKS)
        side = " on each side" if measured.test == "noise_band" else ""
        reason = "chance alone may explain it"
        if looks > 1 and measured.is_significant(1):
            reason = f"{reason} among so many comparisons"
        elif measured.p is not None and interval.excludes_zero():
            reason = f"p is not below {SIGNIFICANT}, so {reason}"
        elif not enough and (interval.excludes_zero() or interval.within(effect)):
            reason = f"fewer than {LEAST_TASKS} tasks are too few to say"
        meaning = f"{reason}; about {decide_n} tasks{side} would tell a change of {aim:.2g}"
    band = f"95 % interval {interval.low:+.3f} to {interval.high:+.3f}"
    how = measured.how
    if looks > 1:
        how += f", judged at {SIGNIFICANT:g} / {looks}"
    return Change(
        outcome=outcome,
        change=change,
        low=interval.low,
        high=interval.high,
        test=measured.test,
        p=measured.p,
        decide_n=decide_n,
        explanation=f"{change:+.3f}, {band}, by {how}: {meaning}",
    )


def _are_outcomes(base: Sequence[float], other: Sequence[float]) -> bool:
    return all(value in (0, 1) for value in (*base, *other))


def _successes(summary: Json) -> list[float]:
    """One value an example, 1 for each that succeeded."""
    count = int(summary["n"])
    solved = round(summary["success"] * count)
    return [1.0] * solved + [0.0] * (count - solved)


# -- the environments of a mixture, each by itself -------------------------------------------------
# The run's own metrics and summaries are over all its environments. Those of one stand beside them,
# with its name and a colon before theirs.


def own(name: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Those of one environment, under the names that a run on it alone gives them."""
    prefix = f"{name}:"
    mine: dict[str, Value] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            mine[key.removeprefix(prefix)] = value
    return mine


def flags_of_parts(
    names: Iterable[str], history: Sequence[Metrics], raised: Sequence[Flag]
) -> list[Flag]:
    """Single environments' flags that are not `raised` for the run, by kind; the gravest first."""
    flags: dict[str, Flag] = {}
    reported = {flag.name for flag in raised}
    for name in names:
        for flag in health.flags([own(name, row) | {"step": row["step"]} for row in history]):
            if flag.name in reported:
                continue
            flag.evidence = f"{name}: {flag.evidence}"
            if first := flags.get(flag.name):
                first.evidence += f"; {flag.evidence}"
            else:
                flags[flag.name] = flag
    return sorted(flags.values(), key=lambda flag: flag.severity != "problem")


def evaluations_of_part(name: str, evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """The environment's part of each evaluation, as far as it can be judged."""
    parts: list[Evaluation] = []
    for row in evaluations:
        part = replace(row, summary=own(name, row.summary), constant=None)
        if part.summary.get("n"):
            parts.append(part)
    return parts


def line_of_part(
    part: Json,
    share: float,
    history: Sequence[Metrics],
    evaluations: Sequence[Evaluation],
    pairs: Sequence[Solved],
    is_active: bool,
) -> str:
    """One environment in words; `share` is that of the groups, evaluations are its own."""
    text = f"{part['name']} ({percent(share)} of the groups)"
    if success := health.trend(health.Steps(history).column(f"{part['name']}:success/rate")):
        text += f", success in training {success.first:.2f} -> {success.last:.2f}"
    judged = judge(evaluations, pairs, part.get("overlap"), is_active)
    if judged:
        verdict = judged[1]
        first, last = evaluations[0].summary["success"], evaluations[-1].summary["success"]
        text += f"; held out {verdict.outcome}, {first:.2f} -> {last:.2f}: {verdict.explanation}"
    elif evaluations:
        newest = evaluations[-1]
        text += f"; held out {newest.summary['success']:.2f} of {newest.summary['n']:g}"
        text += f" at step {newest.step}"
    return text
