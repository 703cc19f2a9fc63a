"""Which of several fixed policies (prompts, checkpoints, models, decoding) is best: a tournament
that may be looked at after every round. Pure functions of outcomes.

All arms attempt the same tasks, and each round takes tasks that no earlier round used. Only tasks
that one arm solved and the other did not count. `evidence` of them is an e-process (the mixture
sign test), and so is a mean of e-processes: the chance that the best arm is ever eliminated is at
most `alpha`, whatever the number of arms and of looks (Ville's inequality). An arm is eliminated
once the mean over its rivals reaches 1/alpha. A winner is claimed only when one arm is left.

Where tasks hang together, kinds of tasks take their place: a kind counts for the arm that solved
more of its tasks in all rounds. What a later round adds to a kind is no new toss, so the bound
holds at each look and not by itself at all of them; with OF_KINDS times as much evidence, one of
four equal arms was eliminated in at most 3 % of simulated tournaments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from statistics import fmean

from flash_mcp.judgement import comparison
from flash_mcp.judgement.comparison import Change
from flash_mcp.judgement.statistics import ALPHA, FEWEST_KINDS, LARGEST_LOG, Interval, difference

FIRST_ROUND = 25
"""Tasks of the first round."""
OF_KINDS = 2
"""So many times the evidence is needed of kinds of tasks."""

Outcomes = Mapping[str, bool]
"""Success by task id. Attempts that failed in environment code are left out."""


def round_size(used: int, total: int) -> int:
    """Tasks of the next round. Rounds grow: each costs every arm the start of a model."""
    return min(max(FIRST_ROUND, used // 2), total - used)


@cache
def evidence(wins: int, losses: int) -> float:
    """The logarithm of the evidence that an arm is better than another, from the tasks that it
    alone solved and those that the other alone solved.

    E = 2^(m+1) B(w+1, l+1) P(Bin(m+1, 1/2) <= w): the likelihood ratio of a coin that shows wins
    more often than not, with a uniform prior, to a fair one. Computed in whole numbers."""
    tosses = wins + losses + 1
    term = 1
    tail = 1
    for number in range(wins):
        term = term * (tosses - number) // (number + 1)
        tail += term
    return math.log(tail) - math.log(tosses * math.comb(tosses - 1, wins))


@dataclass
class Standing:
    """Where a tournament is after some rounds. Arms are numbered from 0."""

    arms: int
    alpha: float = ALPHA
    out: dict[int, int] = field(default_factory=dict[int, int])
    """{eliminated arm: the round that did it}, rounds counted from 1."""
    wins: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    """{(b, a): tasks that b alone solved}"""
    ties: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    """{(b, a): tasks that both solved, or neither}"""
    solved: Counter[int] = field(default_factory=Counter[int])
    attempted: Counter[int] = field(default_factory=Counter[int])
    kinds: dict[str, str] = field(default_factory=dict[str, str])
    """Kind by task, of tasks whose kind is known."""
    net: Counter[tuple[int, int, str]] = field(default_factory=Counter[tuple[int, int, str]])
    """{(b, a, kind): tasks of the kind that b alone solved, less those that a alone solved}"""
    sizes: Counter[tuple[int, int, str]] = field(default_factory=Counter[tuple[int, int, str]])
    """{(b, a, kind): tasks of the kind that both attempted}"""

    @property
    def left(self) -> list[int]:
        return [arm for arm in range(self.arms) if arm not in self.out]

    @property
    def leader(self) -> int:
        """The arm that is left with the highest success; the first of equal ones."""
        return max(self.left, key=self.success)

    def success(self, arm: int) -> float:
        return self.solved[arm] / max(self.attempted[arm], 1)

    def against(self, arm: int) -> float:
        """The evidence that some rival is better than this arm: it goes at 1/alpha."""
        ratios: list[float] = []
        kinds = self.counted_kinds
        for rival in range(self.arms):
            if rival == arm:
                continue
            wins, losses, least = self.wins[rival, arm], self.wins[arm, rival], 1
            if kinds:
                least = OF_KINDS
                wins = sum(self.net[rival, arm, kind] > 0 for kind in kinds)
                losses = sum(self.net[arm, rival, kind] > 0 for kind in kinds)
            ratios.append(math.exp(min(evidence(wins, losses), LARGEST_LOG)) / least)
        return fmean(ratios)

    @property
    def counted_kinds(self) -> set[str]:
        """The kinds that count in the place of tasks; none where there are too few, or each task is
        of its own.
        """
        kinds = {*self.kinds.values()}
        if FEWEST_KINDS <= len(kinds) < len(self.kinds):
            return kinds
        return set()

    @property
    def is_decided(self) -> bool:
        return len(self.left) == 1

    def behind(self, arm: int) -> Interval | None:
        leader = self.leader
        if arm == leader:
            return None
        counts = self.wins[arm, leader], self.wins[leader, arm], self.ties[arm, leader]
        cost = self._cost(arm, leader)
        wins, losses, ties = (count / cost for count in counts)
        return difference(wins, losses, ties, self.alpha)

    def _cost(self, arm: int, rival: int) -> float:
        """So many times the tasks are needed as of tasks that do not hang together."""
        wins, losses = self.wins[arm, rival], self.wins[rival, arm]
        count = max(wins + losses + self.ties[arm, rival], 1)
        mean = (wins - losses) / count
        alone = wins + losses - count * mean**2
        together = 0.0
        for kind in self.counted_kinds:
            key = (arm, rival, kind)
            together += (self.net[key] - mean * self.sizes[key]) ** 2
        return max(together / max(alone, 1.0), 1.0)

    def add(
        self, number: int, outcomes: Mapping[int, Outcomes], kinds: Mapping[str, str] | None = None
    ) -> None:
        """Count round `number`, by arm, and eliminate. The leader stays. `kinds`: by task."""
        self.kinds.update(kinds or {})
        solved: dict[int, set[str]] = {}
        for arm, tasks in outcomes.items():
            solved[arm] = {task for task, is_solved in tasks.items() if is_solved}
            self.solved[arm] += len(solved[arm])
            self.attempted[arm] += len(tasks)
        for arm, rival in permutations(outcomes, 2):
            shared = outcomes[arm].keys() & outcomes[rival].keys()
            differ = shared & (solved[arm] ^ solved[rival])
            self.wins[arm, rival] += len(differ & solved[arm])
            self.ties[arm, rival] += len(shared) - len(differ)
            for task in shared & self.kinds.keys():
                key = (arm, rival, self.kinds[task])
                self.sizes[key] += 1
                self.net[key] += outcomes[arm][task] - outcomes[rival][task]
        leader = self.leader
        for arm in self.left:
            if arm != leader and self.against(arm) >= 1 / self.alpha:
                self.out[arm] = number


# Which of several ways to train is best at a budget: a race. Its arms are trained in rounds, and
# after each round they attempt the same tasks. Pure functions of outcomes
#
# Learning curves cross, so no test can promise from today's leader who leads at the end. An arm is
# cut only if it will hardly come to where the leader is now: the line through its rounds, extended
# to the last one at half its slope, ends below the leader, noise allowed for. Half, because success
# flattens as it rises. At least two arms are trained to the end. They are judged once, on tasks
# that no round used. tests/judgement/test_race.py simulates how often the best arm is cut.

ROUNDS = 10
FIRST_CUT = 2
"""The first round that may cut: a line needs two points."""
PACE = 0.5
"""The share of its slope with which a line goes on after the newest round."""
CAUTION = 0.4
"""Standard errors by which a line is taken to end higher, and the leader to be lower."""
FINALISTS = 2
LEAST_TASKS = 25
"""Of a round."""
Curve = list[tuple[int, int]]
"""(tasks solved, tasks attempted) in each round."""


@dataclass
class Race(Standing):
    """Where a race is after some rounds. `out` has the arms that were cut, or failed."""

    rounds: int = ROUNDS
    curves: dict[int, Curve] = field(default_factory=dict[int, Curve])
    final: dict[int, Outcomes] = field(default_factory=dict[int, Outcomes])
    """On the tasks that were held back."""

    def success(self, arm: int) -> float:
        """In the final, else in the newest round."""
        if arm in self.final:
            return fmean(self.final[arm].values() or [0.0])
        solved, attempted = self.curves.get(arm, [(0, 1)])[-1]
        return solved / max(attempted, 1)

    def add(
        self, number: int, outcomes: Mapping[int, Outcomes], kinds: Mapping[str, str] | None = None
    ) -> None:
        """Count round `number`, by arm, and cut; the last one is the final."""
        self.kinds.update(kinds or {})
        for arm, tasks in outcomes.items():
            self.attempted[arm] += len(tasks)
            self.curves.setdefault(arm, []).append((sum(tasks.values()), len(tasks)))
        if number == self.rounds:
            self.final.update(outcomes)
        elif number >= FIRST_CUT:
            ahead = max(self.line(arm, number, -CAUTION) for arm in self.left)
            ends = {arm: self.line(arm, self.rounds, CAUTION) for arm in self.left}
            for arm in sorted(ends, key=ends.__getitem__)[:-FINALISTS]:
                if ends[arm] < ahead:
                    self.out[arm] = number

    def line(self, arm: int, number: int, errors: float) -> float:
        """The least-squares line through an arm's rounds, at round `number`, plus so many standard
        errors. After the newest round it goes on at PACE, and never down.
        """
        curve = self.curves[arm]
        count = len(curve)
        middle = (count + 1) / 2
        width = count * (count * count - 1) / 12
        shares: list[float] = []
        slope = spread = 0.0
        for place, (solved, attempted) in enumerate(curve, start=1):
            shares.append(solved / max(attempted, 1))
            slope += (place - middle) * shares[-1] / width
            # One success and one failure are added: a share of 0 would claim to be free of noise.
            share = (solved + 1) / (attempted + 2)
            spread += share * (1 - share) / max(attempted, 1) / count
        ahead = PACE * max(slope, 0.0) * (number - count)
        error = math.sqrt(spread * (1 / count + (number - middle) ** 2 / width))
        # A line through a curve that has flattened runs past 1, which no arm can pass.
        value = min(1.0, fmean(shares) + slope * (count - middle) + ahead)
        return value + errors * error

    def behind(self, arm: int) -> Interval | None:
        change = self._change(arm)
        return change and Interval(change.low, change.high)

    @property
    def is_decided(self) -> bool:
        """Whether the leader is better than each other finalist: by McNemar's exact test, at alpha
        divided by the number of pairs.
        """
        pairs = math.comb(len(self.final), 2)
        changes = [self._change(arm) for arm in self.final if arm != self.leader]
        return bool(changes) and all(
            change and change.p is not None and change.p <= self.alpha / pairs for change in changes
        )

    def _change(self, arm: int) -> Change | None:
        leader = self.final.get(self.leader, {})
        tasks = [task for task in self.final.get(arm, {}) if task in leader]
        if arm == self.leader or not tasks:
            return None
        best = [float(leader[task]) for task in tasks]
        own = [float(self.final[arm][task]) for task in tasks]
        kinds = [self.kinds.get(task, task) for task in tasks]
        return comparison.compare_paired(best, own, kinds, effect=comparison.MIN_CHANGE)
