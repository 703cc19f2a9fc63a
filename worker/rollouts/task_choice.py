"""Which tasks a step tries: all in passes, or those whose groups are likely to teach.

A group teaches if its advantages are not all 0. Where every reward is 0 or 1, a task's solve rate
is believed to be Beta(a, b), and the chance that a group of G teaches is

    u(a, b) = 1 - B(a+G, b) / B(a, b) - B(a, b+G) / B(a, b)

with Euler's beta function. Where rewards are finer, Beta(a, b) is the belief on that chance itself,
and u = a / (a + b). After a group, a <- 0.7 a + successes and b <- 0.7 b + failures: the policy
moves. A step draws different tasks, by weights 0.8 u / (sum of u) + 0.2 / (number of tasks)."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

FORGETTING = 0.7
FLOOR = 0.2
"""The share of the draws in which all tasks are alike."""
LEAST = 1e-3
"""Of a belief's parameters, which forgetting brings near 0."""
REFILLS = 2
"""Rounds of a step in which other tasks are tried, where none of its groups taught anything. Adam's
step is about as long with one group that teaches as with four, so no other step is worth more."""
BELIEFS = "task_beliefs.json"
"""The file of a checkpoint that keeps them."""
CYCLE = 5040
"""Examples after which the order of a mixture's environments begins anew: a multiple of 1 to 10, so
that it has their ratio exactly, if these are small whole numbers."""


class Source(NamedTuple):
    """An environment of a run."""

    total: int
    """Its train tasks."""
    ratio: float = 1.0


class TaskPlace(NamedTuple):
    number: int
    """Its place in the split."""
    environment: str = ""
    """Its environment's name in a mixture."""


def examples_of(step: int, count: int, sources: Mapping[str, Source], seed: int) -> list[TaskPlace]:
    """The `count` examples of step 1, 2, ...: those of each source pass through its tasks again and
    again, each time in another order.

    They depend on the step alone, so an attempt that resumes draws what the one before would
    have."""
    names = list(sources)
    shares = _shares(tuple(source.ratio for source in sources.values()))
    counts = Counter(number for number, _ in shares)
    examples: list[TaskPlace] = []
    for place in range((step - 1) * count, step * count):
        cycle, at = divmod(place, CYCLE)
        number, before = shares[at]
        total = sources[names[number]].total
        epoch, rest = divmod(cycle * counts[number] + before, total)
        examples.append(TaskPlace(_order(epoch, total, seed)[rest], names[number]))
    return examples


@cache
def _shares(ratios: tuple[float, ...]) -> list[tuple[int, int]]:
    """For each place of a cycle, whose it is, and how many places of that source came before. The
    next place is that of the source which is furthest behind its ratio (Sainte-Laguë).
    """
    counts = [0] * len(ratios)
    places: list[tuple[int, int]] = []
    for _ in range(CYCLE):
        number = min(range(len(ratios)), key=lambda item: (counts[item] + 0.5) / ratios[item])
        places.append((number, counts[number]))
        counts[number] += 1
    return places


@lru_cache(maxsize=16)
def _order(epoch: int, total: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(total), total)


def usefulness(a: float, b: float, size: int) -> float:
    """The chance that a group of `size` is not all right or all wrong, if the solve rate is
    Beta(a, b)."""

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    whole = log_beta(a, b)
    return 1 - math.exp(log_beta(a + size, b) - whole) - math.exp(log_beta(a, b + size) - whole)


class TaskChoice:
    """Beliefs about the `total` tasks of a split, and the draws from them."""

    def __init__(self, total: int, size: int, seed: int) -> None:
        self._total = total
        self._size = size
        self._seed = seed
        self._is_binary = True
        """Whether every reward so far was 0 or 1."""
        self._solved: dict[int, list[float]] = {}
        self._taught: dict[int, list[float]] = {}

    def draw(
        self, step: int, count: int, *, turn: int = 0, without: Collection[int] = ()
    ) -> list[int]:
        """`count` different tasks for a step, or for round `turn` of its refills; those of
        `without` only where there are no others."""
        beliefs = self._solved if self._is_binary else self._taught
        weights = [self._chance(1.0, 1.0)] * self._total
        for task, (a, b) in beliefs.items():
            weights[task] = self._chance(a, b)
        mean = math.fsum(weights) / self._total
        rng = random.Random(f"{self._seed}/{step}/{turn}")
        # The least of -log(u) / w are a weighted draw without replacement (Efraimidis 2006).
        places: list[tuple[bool, float, int]] = []
        for task, weight in enumerate(weights):
            share = (1 - FLOOR) * weight / mean + FLOOR if mean else 1.0
            places.append((task in without, -math.log(1 - rng.random()) / share, task))
        drawn = [task for *_, task in sorted(places)]
        return [drawn[place % self._total] for place in range(count)]

    def _chance(self, a: float, b: float) -> float:
        return usefulness(a, b, self._size) if self._is_binary else a / (a + b)

    def learn(self, task: int, rewards: Sequence[float], *, taught: bool) -> None:
        """The rewards of a group, without those of rollouts that the environment failed."""
        if not rewards:
            return
        self._is_binary &= set(rewards) <= {0.0, 1.0}
        right = sum(reward >= 1 for reward in rewards)
        _count(self._solved, task, right, len(rewards) - right)
        _count(self._taught, task, taught, not taught)

    def save(self, folder: Path) -> None:
        state = [self._is_binary, self._solved, self._taught]
        (folder / BELIEFS).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """What `save` wrote there; nothing is known yet if it did not."""
        if not (path := folder / BELIEFS).is_file():
            return
        self._is_binary, solved, taught = json.loads(path.read_text())
        self._solved = {int(task): pair for task, pair in solved.items()}
        self._taught = {int(task): pair for task, pair in taught.items()}


def _count(beliefs: dict[int, list[float]], task: int, wins: float, losses: float) -> None:
    a, b = beliefs.get(task, (1.0, 1.0))
    beliefs[task] = [max(FORGETTING * a + wins, LEAST), max(FORGETTING * b + losses, LEAST)]
