"""How often the judgement is wrong where the truth is known: simulated outcomes, the product's own
functions. `python -m bench.judgement` prints the tables of docs/judgement.md.

A task is solved where a normal variable is below a limit: 70 % of its variance is the task's, which
all policies share, the rest is the policy's own. Of both, `icc` is what the tasks of a template
share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from statistics import NormalDist
from typing import Any

import numpy as np

from flash_mcp.extensions.tournament.standing import Standing, round_size
from flash_mcp.judgement import comparison, health, statistics
from flash_mcp.protocol.records import Evaluation
from flash_mcp.tools.training import run_time

TASKS = 200
SHARED = 0.7
PROFILES = {"the default model": 0.33, "a model of 1.7B": 0.6}
"""The share of the regression split that a model solves."""
Row = tuple[str, str, float, float, float]
"""Claim, setting, what was measured, and the least and the most that it may be."""


def outcomes(
    rng: Any, chances: list[float], tasks: int = TASKS, templates: int = 0, icc: float = 0.0
) -> Any:
    """1 where policy p solves task t, (P, T). `chances` of success are (P)."""

    def part(policies: int) -> Any:
        own_PT = rng.standard_normal((policies, tasks))
        if not templates:
            return own_PT
        shared_PT = rng.standard_normal((policies, templates))[:, np.arange(tasks) % templates]
        return math.sqrt(icc) * shared_PT + math.sqrt(1 - icc) * own_PT

    limits = np.array([[NormalDist().inv_cdf(chance)] for chance in chances])
    drawn = math.sqrt(SHARED) * part(1) + math.sqrt(1 - SHARED) * part(len(chances))
    return (drawn < limits).astype(float)


def kinds_of(tasks: int, templates: int) -> list[str]:
    return [f"{task % (templates or tasks)}" for task in range(tasks)]


def share(count: int, trial: Callable[[], bool]) -> float:
    return sum(trial() for _ in range(count)) / count


def table(count: int = 400) -> Iterator[Row]:
    """`count`: simulations of a row."""
    rng = np.random.default_rng(7)

    def change(gain: float, tasks: int, templates: int, icc: float) -> comparison.Change:
        before, after = outcomes(rng, [0.5, 0.5 + gain], tasks, templates, icc).tolist()
        kinds = kinds_of(tasks, templates)
        return comparison.compare_paired(before, after, kinds, effect=comparison.MIN_CHANGE)

    def improved(*setting: Any) -> bool:
        return change(*setting).outcome == "improved"

    def holds(gain: float, *setting: Any) -> bool:
        one = change(gain, *setting)
        return one.low <= gain <= one.high

    for tasks in (20, 50, 200, 1000):
        setting = f"{tasks} tasks, no effect"
        yield "false improved", setting, share(count, lambda t=tasks: improved(0, t, 0, 0)), 0, 0.05
    for templates in (10, 20, 50):
        for icc in (0.0, 0.5, 1.0):
            case = (0.0, TASKS, templates, icc)
            setting = f"{TASKS} tasks of {templates} templates, icc {icc:g}"
            yield "false improved", setting, share(count, lambda c=case: improved(*c)), 0, 0.05
            yield "interval holds", setting, share(count, lambda c=case: holds(*c)), 0.92, 1
    for templates, icc, least in ((0, 0.0, 0.72), (50, 0.0, 0.7), (50, 0.5, 0.3), (10, 0.5, 0.05)):
        case = (0.1, TASKS, templates, icc)
        setting = f"{templates or 'no'} templates, icc {icc:g}, 0.5 to 0.6"
        yield "power", setting, share(count, lambda c=case: improved(*c)), least, 1
    yield from choices(rng, count)
    yield from tournaments(rng, count // 4)
    yield "interval over 5 seeds holds", "on these tasks", share(count, lambda: seeds(rng)), 0.92, 1
    yield from elsewhere(np.random.default_rng(1), count)
    yield from coverage(np.random.default_rng(2), count)
    for steps in (50, 200):
        falling = share(count, lambda s=steps: falls(rng, s))
        yield "reward_falling at some step", f"{steps} steps, steady reward", falling, 0, 0.05


def choices(rng: Any, count: int) -> Iterator[Row]:
    """What is picked from several evaluations, or watched."""

    def evaluations(number: int) -> tuple[list[Evaluation], Any]:
        solved = outcomes(rng, [0.5] * number)
        rows: list[Evaluation] = []
        for step, values in enumerate(solved):
            summary = {"n": TASKS, "success": float(values.mean())}
            rows.append(Evaluation(step=step, epoch=0, time=0.0, summary=summary))
        return rows, solved

    def pairs(solved: Any, first: int, last: int) -> list[comparison.Solved]:
        return [
            *zip(solved[first].tolist(), solved[last].tolist(), kinds_of(TASKS, 0), strict=True)
        ]

    def watched() -> bool:
        rows, solved = evaluations(21)
        for last in range(1, 21):
            judged = comparison.judge(rows[: last + 1], pairs(solved, 0, last), None, last < 20)
            if judged and last < 20 and judged[0].outcome == "improved":
                return True
        return False

    def picked(number: int, first: int) -> bool:
        """Whether the best of `number` is better than evaluation `first`."""
        rows, solved = evaluations(number + 1)
        best = 1 + int(solved[1:].mean(1).argmax())
        found = comparison.compare_evaluations(
            rows[first], rows[best], pairs(solved, first % len(rows), best), number
        )
        return found.outcome == "improved"

    yield "false improved", "at some of 19 looks at a run under way", share(count, watched), 0, 0.05
    for number in (8, 20):
        name = f"best of {number} equal checkpoints"
        yield (
            "false improved",
            f"{name}, against the start",
            share(count, lambda n=number: picked(n, 0)),
            0,
            0.05,
        )
        yield (
            "named best",
            f"{name}, against the newest",
            share(count, lambda n=number: picked(n, -1)),
            0,
            0.05,
        )


def tournaments(rng: Any, count: int) -> Iterator[Row]:
    def ended(chances: list[float], templates: int, icc: float, tasks: int = 600) -> Standing:
        solved = outcomes(rng, chances, tasks, templates, icc).astype(bool)
        order = rng.permutation(tasks)
        kinds = kinds_of(tasks, templates)
        standing, used, number = Standing(len(chances)), 0, 0
        while used < tasks and len(standing.left) > 1:
            size, number = round_size(used, tasks), number + 1
            chosen = order[used : used + size].tolist()
            results = {arm: {f"{t}": bool(solved[arm, t]) for t in chosen} for arm in standing.left}
            of_kind = {f"{t}": kinds[t] for t in chosen}
            standing.add(number, results, of_kind if templates else None)
            used += size
        return standing

    for templates, icc in ((0, 0.0), (10, 0.5), (50, 0.5), (50, 1.0)):
        setting = f"4 equal arms, {templates or 'no'} templates, icc {icc:g}"
        lost = share(count, lambda t=templates, i=icc: bool(ended([0.5] * 4, t, i).out))
        yield "some arm eliminated", setting, lost, 0, 0.075
    for templates, icc in ((0, 0.0), (50, 0.2)):
        setting = f"0.65 against 0.5, {templates or 'no'} templates, icc {icc:g}"
        won = share(count, lambda t=templates, i=icc: ended([0.65, 0.5, 0.5], t, i).left == [0])
        yield "best arm found", setting, won, 0.8, 1


def seeds(rng: Any) -> bool:
    """Whether the interval of 5 seeds holds the mean over all seeds on these tasks."""
    levels_T = NormalDist().inv_cdf(0.5) - math.sqrt(SHARED) * rng.standard_normal(TASKS)
    spread = math.sqrt(1 - SHARED + 0.15**2)
    truth = float(np.mean([NormalDist().cdf(level / spread) for level in levels_T]))
    shares: list[float] = []
    for shift in rng.normal(0, 0.15, 5):
        own_T = math.sqrt(1 - SHARED) * rng.standard_normal(TASKS)
        shares.append(float((own_T < levels_T + shift).mean()))
    interval = statistics.mean_interval(shares)
    return interval.low <= truth <= interval.high


def elsewhere(rng: Any, count: int) -> Iterator[Row]:
    """Tasks of other kinds before and after: half of what the model solved is lost and 3 % of the
    rest won, or a tenth of all outcomes change to no effect.
    """

    def outcome(tasks: int, solved: float, lost: float, won: float) -> str:
        before = rng.random(tasks) < solved
        after = rng.random(tasks) < np.where(before, 1 - lost, won)
        pair = (before.astype(float).tolist(), after.astype(float).tolist())
        return comparison.compare_paired(*pair, effect=comparison.MIN_CHANGE).outcome

    for tasks in (run_time.FEWEST_REGRESSION_TASKS, run_time.REGRESSION_TASKS):
        for name, solved in PROFILES.items():
            setting = f"{tasks} tasks, {name}: {100 * solved:.0f} % solved"
            forgot = (tasks, solved, 0.5, 0.03)
            seen = share(count, lambda c=forgot: outcome(*c) == "regressed")
            yield "half forgotten is seen", setting, seen, 0.9, 1
            same = (tasks, solved, 0.05 / solved, 0.05 / (1 - solved))
            false = share(3 * count, lambda c=same: outcome(*c) == "regressed")
            yield "false worse elsewhere", setting, false, 0, 0.02


def coverage(rng: Any, count: int) -> Iterator[Row]:
    """Whether 95 % intervals hold the truth where tasks are unlike each other."""

    def one(tasks: int, chance: float) -> bool:
        band = statistics.wilson(int(rng.binomial(tasks, chance)), tasks)
        return band.low <= chance <= band.high

    def several(tasks: int, chance: float) -> bool:
        """Four attempts at each task; tasks are hard or easy."""
        chances = rng.beta(1.2 * chance, 1.2 * (1 - chance), tasks)
        band = statistics.success_interval((rng.random((4, tasks)) < chances).T.tolist())
        return band.low <= chance <= band.high

    def unpaired(tasks: int, chance: float) -> bool:
        sides = [(rng.random(tasks) < chance + gain).astype(float).tolist() for gain in (0, 0.1)]
        change = comparison.compare_unpaired(*sides, effect=comparison.MIN_CHANGE)
        return change.low <= 0.1 <= change.high

    ways = {"a success": one, "4 attempts a task": several, "unlike tasks, +0.1": unpaired}
    for name, holds in ways.items():
        for tasks, chance in ((20, 0.1), (50, 0.5), (200, 0.1), (200, 0.5)):
            setting = f"{name}: {tasks} tasks, {100 * chance:.0f} % solved"
            yield (
                "interval holds",
                setting,
                share(count, lambda h=holds, t=tasks, c=chance: h(t, c)),
                0.9,
                1,
            )


def falls(rng: Any, steps: int) -> bool:
    history = [{"step": s, "reward/mean": 0.5 + rng.normal(0, 0.1)} for s in range(steps)]
    looks = [health.Steps(history[:end]) for end in range(health.LONG, steps + 1)]
    return any(health.reward_falling(look, look.recent()) for look in looks)


def markdown(rows: Iterable[Row]) -> str:
    """One table a claim."""
    tables: dict[str, list[str]] = {}
    for claim, setting, measured, least, most in rows:
        bound = f"at most {100 * most:g} %" if most < 1 else f"at least {100 * least:g} %"
        line = f"| {setting} | {100 * measured:.1f} % | {bound} |"
        tables.setdefault(claim, []).append(line)
    head = "| where | measured | bound |\n|---|---|---|"
    return "\n\n".join(f"**{claim}**\n\n{head}\n" + "\n".join(tables[claim]) for claim in tables)


def main() -> None:
    sys.stdout.write(f"{markdown(table())}\n")


if __name__ == "__main__":
    main()
