"""The statistics against scipy, and against figures that were published."""

import importlib
import math
import random
import time
from itertools import product, starmap
from operator import mul
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_mcp.judgement import statistics


@pytest.fixture(scope="module")
def scipy_stats() -> Any:
    """It takes a second to import."""
    return importlib.import_module("scipy.stats")


@pytest.mark.slow
def test_the_interval_of_a_mean_is_scipys(scipy_stats: Any):
    values: list[float] = [0.2, 0.5, 0.9, 0.4, 0.6, 0.1, 0.8, 0.3]
    for count in range(2, statistics.MOST_MEASUREMENTS + 1):
        some = values[:count]
        theirs = scipy_stats.ttest_1samp(some, 0).confidence_interval(0.95)
        ours = statistics.mean_interval(some)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6)


def test_wilsons_interval_and_the_quantile_of_t_are_scipys(scipy_stats: Any):
    for successes, count in ((0, 1), (0, 10), (1, 10), (5, 10), (10, 10), (37, 200), (199, 200), (500, 1000)):
        theirs = scipy_stats.binomtest(successes, count).proportion_ci(method="wilson")
        ours = statistics.wilson(successes, count)
        assert (ours.low, ours.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    for freedom in (10, 11, 20, 100, 1000):
        assert statistics.t95(freedom) == pytest.approx(scipy_stats.t.ppf(0.975, freedom), abs=0.003)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_the_one_that_newcombe_printed(successes: int, count: int, low: float, high: float):
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    ours = statistics.wilson(successes, count)
    assert (round(ours.low, 4), round(ours.high, 4)) == (low, high)


def test_one_attempt_a_task_is_wilsons_interval():
    once = statistics.success_interval([[True]] * 30 + [[False]] * 70)
    assert once == statistics.wilson(30, 100)
    # Repeating an attempt that always comes out alike tells nothing new.
    often = statistics.success_interval([[True] * 8] * 30 + [[False] * 8] * 70)
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.02)


def test_attempts_that_scatter_within_their_task_narrow_the_interval():
    rng = random.Random(0)
    outcomes = [[rng.random() < 0.5 for _ in range(8)] for _ in range(100)]
    interval, independent = (statistics.success_interval(outcomes), statistics.wilson(sum(map(sum, outcomes)), 800))
    assert interval.high - interval.low == pytest.approx(independent.high - independent.low, rel=0.15)


def test_the_interval_of_clustered_attempts_holds_the_truth_95_times_of_100():
    rng, held = random.Random(1), 0
    for _ in range(400):  # tasks differ in difficulty: success rates uniform in 0..1, so the truth is 0.5
        rates = [rng.random() for _ in range(60)]
        interval = statistics.success_interval([[rng.random() < rate for _ in range(6)] for rate in rates])
        held += interval.low <= 0.5 <= interval.high
    assert 0.92 <= held / 400 <= 0.985


def test_no_attempts_say_nothing():
    assert statistics.success_interval([[], []]) == statistics.Interval(0.0, 1.0)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_success(scipy_stats: Any, case: tuple[int, int, int]):
    attempts, correct, k = case
    # Without a success: all k are drawn from the failures, which is hypergeometric.
    missed = scipy_stats.hypergeom(attempts, correct, k).pmf(0)
    assert statistics.pass_at_k(attempts, correct, k) == pytest.approx(1 - missed, abs=1e-9)


def test_pass_at_more_than_was_attempted_cannot_be_told():
    for k in (0, -1, 5):
        with pytest.raises(ValueError, match="4 attempts"):
            statistics.pass_at_k(4, 1, k)


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_the_exact_binomial_test_of_the_changed_pairs(scipy_stats: Any, won: int, lost: int):
    expected = scipy_stats.binomtest(won, won + lost, 0.5).pvalue if won + lost else 1.0
    assert statistics.mcnemar(won, lost) == pytest.approx(expected)


def test_mcnemars_test_of_thousands_of_changed_pairs_takes_no_minute():
    began = time.process_time()
    assert statistics.mcnemar(8000, 8000) == 1.0
    assert time.process_time() - began < 5


@given(st.lists(st.integers(-9, 9), max_size=9), st.sampled_from([1.0, 1 / 6, 0.37]))
def test_sign_flips_are_all_ways_in_which_the_signs_could_be(sums: list[int], unit: float):
    ways = [abs(sum(starmap(mul, zip(sums, signs, strict=True)))) for signs in product((1, -1), repeat=len(sums))]
    expected = fmean(way >= abs(sum(sums)) for way in ways)
    assert statistics.sign_flips([value * unit for value in sums]) == pytest.approx(expected)


def test_sign_flips_of_single_tasks_are_mcnemars_test_also_of_thousands():
    assert statistics.sign_flips([1.0] * 30 + [-1.0] * 14 + [0.0] * 9) == pytest.approx(statistics.mcnemar(30, 14))
    few, many = (statistics.sign_flips([3.0, -1.0] * count + [2.0] * 30) for count in (485, 486))
    assert few == pytest.approx(many, rel=0.05)  # exact, and by the normal distribution


def test_the_interval_of_a_mean_of_thousands_of_values_is_the_normal_one(scipy_stats: Any):
    rng = random.Random(2)
    values = [rng.random() for _ in range(2000)]
    theirs = scipy_stats.norm.interval(0.95, fmean(values), scipy_stats.sem(values))
    ours = statistics.bootstrap_mean(values)
    assert (ours.low, ours.high) == pytest.approx(theirs)
    resampled = statistics.bootstrap_mean(values[:1000])
    theirs = scipy_stats.norm.interval(0.95, fmean(values[:1000]), scipy_stats.sem(values[:1000]))
    assert (resampled.low, resampled.high) == pytest.approx(theirs, abs=0.002)


@settings(max_examples=8)
@given(st.lists(st.floats(-1, 1), min_size=20, max_size=40), st.integers(0, 5))
def test_the_bootstrap_interval_is_scipys_but_for_the_draws(scipy_stats: Any, values: list[float], seed: int):
    theirs = scipy_stats.bootstrap(
        (values,), lambda x, axis: x.mean(axis=axis), n_resamples=5000, method="percentile", rng=seed
    ).bootstrap_distribution
    ours = statistics.bootstrap_mean(values)
    assert ours == statistics.bootstrap_mean(values)
    # The draws differ, and few distinct values make few distinct means: a quantile of one may be
    # the next mean of the other. So ours has to lie between nearby quantiles of theirs, as 0.010
    # and 0.040 for 0.025.
    least, low, high, most = np.quantile(theirs, [0.010, 0.040, 0.960, 0.990])
    assert least - 1e-9 <= ours.low <= low + 1e-9 and high - 1e-9 <= ours.high <= most + 1e-9


def test_the_size_that_is_needed_has_the_power_that_was_promised():
    spread, change = 0.25, 0.1
    count, rng, seen = statistics.needed(spread, change), random.Random(3), 0
    for _ in range(400):
        values = [rng.gauss(change, math.sqrt(spread)) for _ in range(count)]
        seen += fmean(values) > statistics.Z95 * math.sqrt(statistics.spread(values) / count)
    assert 0.74 <= seen / 400 <= 0.86


@pytest.mark.parametrize(("tasks", "solved", "loss"), [(120, 40, 0.5), (311, 59, 0.5), (120, 96, 0.2), (311, 249, 0.1)])
def test_a_visible_loss_is_found_nine_times_of_ten(tasks: int, solved: int, loss: float) -> None:
    draw, found = random.Random(0), 0
    assert 0.05 < statistics.visible_loss(tasks, solved) <= loss
    share = statistics.visible_loss(tasks, solved)
    for _ in range(400):
        lost = sum(draw.random() < share for _ in range(solved))
        won = sum(draw.random() < statistics.CHANCE_GAIN for _ in range(tasks - solved))
        found += lost > won and statistics.mcnemar(won, lost) < 0.05
    assert 0.8 <= found / 400 < 0.97
    assert statistics.visible_loss(tasks, 0) == 1.0
