"""Tournaments, simulated: who is eliminated, what is claimed, and what it costs."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist, fmean

import numpy as np
import pytest

from flash_mcp.extensions.tournament.standing import FIRST_ROUND, Standing, evidence, round_size
from flash_mcp.judgement.statistics import ALPHA, difference

CORRELATION = 0.5  # how much of a task's difficulty all arms share


def tournaments(success: Sequence[float], tasks: int, count: int, templates: int = 0) -> tuple[list[Standing], float]:
    """So many simulated tournaments, and their cost: the share of all arms' attempts at all tasks. Half of what
    decides is the template's, if there are any."""
    draws, arms = np.random.default_rng(0), len(success)
    bounds = np.array([NormalDist().inv_cdf(share) for share in success])
    ended: list[Standing] = []
    spent = 0
    for _ in range(count):
        shared, own = draws.standard_normal((tasks, 1)), draws.standard_normal((tasks, arms))
        kinds = draws.integers(templates or 1, size=tasks)
        if templates:
            parts = (draws.standard_normal((templates, width))[kinds] for width in (1, arms))
            shared, own = ((part + alone) / math.sqrt(2) for part, alone in zip(parts, (shared, own), strict=True))
        solved = math.sqrt(CORRELATION) * shared + math.sqrt(1 - CORRELATION) * own < bounds
        result, used, number = Standing(arms), 0, 0
        while used < tasks and len(result.left) > 1:
            size, number = round_size(used, tasks), number + 1
            rows = solved[used : used + size]
            spent += size * len(result.left)
            names = [f"task-{used + place}" for place in range(size)]
            outcomes = {arm: dict(zip(names, rows[:, arm].tolist(), strict=True)) for arm in result.left}
            of_round = dict(zip(names, map(str, kinds[used : used + size]), strict=True))
            result.add(number, outcomes, of_round if templates else {})
            used += size
        ended.append(result)
    return ended, spent / (arms * tasks * count)


@pytest.mark.slow
def test_no_arm_of_equal_ones_is_eliminated_more_often_than_alpha_and_none_is_claimed() -> None:
    ended, _ = tournaments([0.5] * 8, 200, 1000)
    assert max(Counter(arm for result in ended for arm in result.out).values()) <= ALPHA * 1000
    assert all(len(result.left) > 1 for result in ended)


@pytest.mark.parametrize("templates", [10, 20, 50])
def test_no_arm_of_equal_ones_is_eliminated_because_of_a_few_templates(templates: int) -> None:
    ended, _ = tournaments([0.5] * 4, 400, 60, templates)
    assert sum(bool(result.out) for result in ended) <= 0.05 * 60
    intervals = [result.behind(arm) for result in ended for arm in result.left]
    assert fmean(band.low <= 0 <= band.high for band in intervals if band) >= 0.95


def test_an_arm_that_is_worse_on_nearly_all_templates_is_eliminated() -> None:
    ended, _ = tournaments([0.9, 0.5], 400, 40, 50)
    assert fmean(1 in result.out for result in ended) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("success", "tasks", "count", "decided", "cost"),
    [
        ([0.7, *[0.5] * 7], 600, 1000, 0.99, 0.3),
        ([0.6, *[0.5] * 7], 2000, 300, 0.99, 0.3),
        ([0.6, *[0.5] * 7], 200, 300, 0.0, 1.0),
        ([0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35], 600, 300, 0.0, 0.6),
    ],
)
def test_the_best_of_eight_is_hardly_ever_eliminated_and_no_other_is_ever_claimed(
    success: list[float], tasks: int, count: int, decided: float, cost: float
) -> None:
    ended, spent = tournaments(success, tasks, count)
    claimed = [result.leader for result in ended if len(result.left) == 1]
    assert sum(0 in result.out for result in ended) <= ALPHA * count
    assert set(claimed) <= {0} and len(claimed) >= decided * count
    assert spent <= cost


def test_evidence_is_the_mean_likelihood_ratio_over_coins_that_favour_wins() -> None:
    for wins, losses in ((0, 0), (3, 1), (1, 6), (40, 22)):
        coins = np.linspace(0.5, 1, 200_001)
        with np.errstate(divide="ignore"):
            ratios = np.exp(wins * np.log(2 * coins) + losses * np.log(np.maximum(2 * (1 - coins), 1e-300)))
        assert math.exp(evidence(wins, losses)) == pytest.approx(np.trapezoid(ratios, coins) * 2, rel=1e-3)
        # Both directions together are the two-sided beta-binomial mixture, 2^m B(w+1, l+1).
        whole = (wins + losses) * math.log(2) + math.lgamma(wins + 1) + math.lgamma(losses + 1)
        whole -= math.lgamma(wins + losses + 2)
        both = np.logaddexp(evidence(wins, losses), evidence(losses, wins))
        assert both - math.log(2) == pytest.approx(whole, abs=1e-9)
    assert evidence(5, 5) < 0 < evidence(30, 5) < evidence(3000, 5)


def test_evidence_for_an_equal_arm_reaches_its_bound_more_seldom_than_alpha() -> None:
    steps = np.random.default_rng(1).integers(0, 2, (1000, 400))
    wins = steps.cumsum(axis=1)
    reached = 0
    for row in wins.tolist():
        reached += any(evidence(won, place - won) >= math.log(1 / ALPHA) for place, won in enumerate(row, start=1))
    assert reached <= ALPHA * 1000


@pytest.mark.slow
def test_the_interval_of_a_difference_holds_at_every_look() -> None:
    draws, missed = np.random.default_rng(2), 0
    for _ in range(300):
        first, second = draws.random(400) < 0.6, draws.random(400) < 0.45
        counts = [(first & ~second)[:seen].sum() for seen in (25, 50, 100, 200, 400)]
        losses = [(~first & second)[:seen].sum() for seen in (25, 50, 100, 200, 400)]
        intervals = [
            difference(int(won), int(lost), int(seen - won - lost))
            for won, lost, seen in zip(counts, losses, (25, 50, 100, 200, 400), strict=True)
        ]
        missed += any(not item.low - 0.005 <= 0.15 <= item.high + 0.005 for item in intervals)
    assert missed <= ALPHA * 300
    widths = [(item := difference(2 * n, n, 7 * n)).high - item.low for n in (5, 50, 500)]
    assert widths[0] > widths[1] > widths[2] > 0.05
    assert difference(0, 0, 0).low < -0.99


def test_rounds_use_up_the_tasks_and_grow() -> None:
    used, sizes = 0, list[int]()
    while used < 600:
        sizes.append(round_size(used, 600))
        used += sizes[-1]
    assert used == 600 and sizes[0] == FIRST_ROUND and sizes[:-1] == sorted(sizes[:-1]) and len(sizes) < 11


def test_a_standing_pairs_tasks_by_id_and_leaves_out_what_one_side_lacks() -> None:
    result = Standing(2)
    result.add(1, {0: {"a": True, "b": True, "c": False}, 1: {"a": False, "b": True, "d": True}})
    assert (result.wins[0, 1], result.wins[1, 0], result.ties[0, 1]) == (1, 0, 1)
    assert (result.success(0), result.success(1)) == (2 / 3, 2 / 3)
    assert result.left == [0, 1] and result.leader == 0
    assert result.against(1) == pytest.approx(math.exp(evidence(1, 0)))


def test_what_was_eliminated_stays_out_and_its_evidence_stays() -> None:
    first = {f"t{n}": True for n in range(25)}
    last = dict.fromkeys(first, False)
    result = Standing(3)
    result.add(1, {0: first, 1: last, 2: first})
    result.add(2, {0: {"x": False}, 2: {"x": True}})
    assert result.out == {1: 1} and result.left == [0, 2]
    assert result.against(1) == pytest.approx(fmean([math.exp(evidence(25, 0))] * 2))
    assert result.leader == 2 and result.attempted[1] == 25
