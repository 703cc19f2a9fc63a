"""Statistics of evaluations as pure functions: intervals, pass@k, whether two differ."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from statistics import NormalDist, fmean, quantiles, variance

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
Z90 = 1.2815515655446004
Z80 = 0.8416212335729143
"""One-sided 90 and 80 % quantiles; 80 % is the usual power of a study."""
CHANCE_GAIN = 0.02
"""The share of unsolved tasks that a model that learns something else solves later."""
T95 = (
    12.7062047364,
    4.3026527297,
    3.1824463053,
    2.7764451052,
    2.5705818356,
    2.4469118511,
    2.3646242516,
)
"""Two-sided 95 % quantiles of Student's t with 1, 2, 3 and more degrees of freedom."""
MOST_MEASUREMENTS = len(T95) + 1
"""That `mean_interval` takes."""
FEWEST_KINDS = 6
"""Fewer kinds of tasks cannot be significant: 5 that all rise have p = 0.06."""
RESAMPLES = 5000
MOST_RESAMPLED = 1000
FINEST = 5000
"""Parts of the sum of all sizes, to which `sign_flips` rounds."""
MOST_PARTS = 16
"""Of 1, in which it is exact: means of up to so many attempts."""
ALPHA = 0.05
"""Of what may be looked at again and again: the chance of a wrong claim at any look."""
LARGEST_LOG = 600.0
"""exp() of more would overflow."""
BETS = tuple(step / 20 for step in range(1, 20))
"""Shares of the largest bet, over which `difference` takes the mean."""
HALVINGS = 12
"""Of the range in which `difference` looks for each end."""


@dataclass(frozen=True)
class Interval:
    """Where the true value lies 95 times of 100."""

    low: float
    high: float

    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def within(self, bound: float) -> bool:
        """Whether all of it lies between -bound and bound."""
        return -bound <= self.low and self.high <= bound

    def widened(self, z: float) -> Interval:
        """With the two-sided normal quantile `z` in place of that of 95 %."""
        middle = (self.low + self.high) / 2
        half = (self.high - self.low) / 2 * z / Z95
        return Interval(middle - half, middle + half)


def wilson(successes: float, count: float) -> Interval:
    """Wilson's score interval of a share (1927), with a width at 0 and at 1, and between them; 0 to
    1 for no trials. `count` may be an effective size, so neither has to be whole.
    """
    if count <= 0:
        return Interval(0.0, 1.0)
    share = successes / count
    z2 = Z95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    # Rounding must not put the share itself outside.
    return Interval(max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's interval of a mean of 2 to MOST_MEASUREMENTS independent measurements."""
    middle = fmean(values)
    half = t95(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Interval(middle - half, middle + half)


def z_of(level: float) -> float:
    return NormalDist().inv_cdf(1 - level / 2)


def t95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t, to 0.006 (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    first = (Z95**3 + Z95) / 4
    second = (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / 96
    return Z95 + first / freedom + second / freedom**2


def success_interval(outcomes: Sequence[Sequence[bool]]) -> Interval:
    """Wilson's interval of the success rate of tasks that were each attempted once or several
    times.

    `outcomes[t]` are the attempts at task t, or at all tasks of kind t. They are alike, so they
    count as fewer: as the size that a sample of independent attempts with the same standard error
    would have, never less than the number of tasks or kinds."""
    tasks = list(filter(None, outcomes))
    count = sum(map(len, tasks))
    if not tasks:
        return wilson(0, 0)
    share = sum(map(sum, tasks)) / count
    if count > len(tasks):
        # Variance of a ratio estimator: tasks are the sampling unit, and may have lost attempts to
        # errors.
        squares = sum((sum(task) - share * len(task)) ** 2 for task in tasks)
        error2 = squares * len(tasks) / max(len(tasks) - 1, 1) / count**2
        independent = 0.0
        if error2 > 0:
            independent = share * (1 - share) / error2
        count = min(max(independent, float(len(tasks))), float(count))
    return wilson(share * count, count)


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """The chance that one of k attempts succeeds, 1 - C(n-c, k) / C(n, k), unbiased (Chen et al.
    2021). ValueError unless 1 <= k <= attempts.
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} cannot be told from {attempts} attempts")
    return 1.0 - math.comb(attempts - correct, k) / math.comb(attempts, k)


def mcnemar(won: int, lost: int) -> float:
    """Two-sided p of McNemar's exact test. Only pairs that changed count: `won` from failure to
    success, `lost` the other way; either way is as likely under no change.
    """
    changed = won + lost
    term = tail = 1
    for number in range(min(won, lost)):
        term = term * (changed - number) // (number + 1)  # the next binomial coefficient
        tail += term
    return min(1.0, 2 * tail / 2**changed)


def visible_loss(tasks: int, solved: float) -> float:
    """The smallest share of the `solved` ones of these tasks whose loss McNemar's test finds 90
    times of 100; 1 if it would find none. A few of the others are solved by chance.
    """
    gained = CHANCE_GAIN * (tasks - solved)
    for part in range(1, 100):
        lost = part / 100 * solved
        if lost - gained >= (Z95 + Z90) * math.sqrt(lost + gained):
            return part / 100
    return 1.0


def by_kind(values: Sequence[float], kinds: Sequence[str]) -> list[float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for value, kind in zip(values, kinds, strict=True):
        sums[kind] += value
    return [*sums.values()]


def sign_flips(sums: Sequence[float]) -> float:
    """Two-sided p of the total of `sums` if each could as well have the other sign. Exact for
    multiples of 1/MOST_PARTS or of larger parts (McNemar's test, where all are 1 or -1), to
    1/FINEST of all sizes for others, and by the normal approximation for more than MOST_RESAMPLED.
    """
    moved = list(filter(None, sums))
    if len(moved) > MOST_RESAMPLED:
        return math.erfc(abs(sum(moved)) / math.sqrt(2 * sum(map(mul, moved, moved))))
    total = sum(map(abs, moved))
    scale = FINEST / max(total, 1e-300)
    rounded = math.isqrt(len(moved)) + 1  # equal totals may differ by so much
    for parts in range(MOST_PARTS, 0, -1):
        distances = (abs(value * parts - round(value * parts)) for value in moved)
        if total * parts <= FINEST and max(distances, default=0.0) < 1e-9:
            scale, rounded = parts, 0
    steps = [round(value * scale) for value in moved]
    # In how many ways the sizes of those that rise sum to 0, 1, 2 and so on, side by side in one
    # integer. A size is added by one shift.
    width = len(moved) // 8 + 1
    ways = 1
    for step in steps:
        ways += ways << 8 * width * abs(step)
    tail = (sum(map(abs, steps)) - abs(sum(steps)) + rounded) // 2
    low = ways & ((1 << 8 * width * (tail + 1)) - 1)
    written = low.to_bytes(width * (tail + 1), "little")
    count = 0
    for at in range(0, len(written), width):
        count += int.from_bytes(written[at : at + width], "little")
    return min(1.0, 2 * count / 2 ** len(moved))


def error_of_kinds(parts: Sequence[float], kinds: Sequence[str]) -> float:
    """Standard error of a mean whose tasks hang together within their kinds. `parts` are the tasks'
    shares of its deviation: (value - mean) / count.
    """
    sums = by_kind(parts, kinds)
    return math.sqrt(len(sums) / (len(sums) - 1) * sum(value**2 for value in sums))


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Percentile bootstrap interval of a mean, always by the same draws; of more than
    MOST_RESAMPLED values the normal interval, which is alike and quick.
    """
    count = len(values)
    if count > MOST_RESAMPLED:
        middle, half = fmean(values), Z95 * math.sqrt(variance(values) / count)
        return Interval(middle - half, middle + half)
    rng = random.Random(0)
    means = [sum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES)]
    cuts = quantiles(means, n=40, method="inclusive")
    return Interval(cuts[0], cuts[-1])


def needed(spread: float, change: float, z: float = Z95) -> int:
    """Observations that tell a `change` from none 80 times of 100, at the level of the two-sided
    normal quantile `z`. `spread` is the
    variance of one observation: of a pair's difference, or where unpaired the sum of both sides'.
    """
    return math.ceil((z + Z80) ** 2 * spread / change**2)


def spread(values: Sequence[float]) -> float:
    """Sample variance; 0 for fewer than two values."""
    if len(values) > 1:
        return variance(values)
    return 0.0


def difference(wins: float, losses: float, ties: float, alpha: float = ALPHA) -> Interval:
    """An interval of the difference of two arms' success, which holds at every look at once: all
    differences against which no mean of fixed bets has won 1/alpha times its stake.
    """
    middle = 0.999 * (wins - losses) / max(wins + losses + ties, 1)
    ends: list[float] = []
    for outside in (-1.0, 1.0):
        inside = middle
        for _ in range(HALVINGS):
            between = (inside + outside) / 2
            # What the bets against this difference have won, as a multiple of the stake
            results: list[float] = []
            for share in BETS:
                for bet in (share / (1 + between), -share / (1 - between)):
                    log = wins * math.log1p(bet * (1 - between))
                    log += ties * math.log1p(-bet * between)
                    log += losses * math.log1p(-bet * (1 + between))
                    results.append(math.exp(min(log, LARGEST_LOG)))
            if fmean(results) < 1 / alpha:
                inside = between
            else:
                outside = between
        ends.append(outside)
    return Interval(*ends)
