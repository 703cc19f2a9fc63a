"""Which of several ways to train is best at a budget: a race. Its arms are trained in rounds, and
after each round they attempt the same tasks. Pure functions of outcomes.

Learning curves cross, so no test can promise from today's leader who leads at the end. An arm is
cut only if it will hardly come to where the leader is now: the line through its rounds, extended to
the last one at half its slope, ends below the leader, noise allowed for. Half, because success
flattens as it rises. At least two arms are trained to the end. They are judged once, on tasks that
no round used. tests/judgement/test_race.py simulates how often the best arm is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from flash_mcp.judgement import comparison
from flash_mcp.judgement.comparison import Change
from flash_mcp.judgement.statistics import Interval
from flash_mcp.judgement.tournament import Outcomes, Standing

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
        """The 95 % interval of the arm's success in the final less the leader's."""
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
