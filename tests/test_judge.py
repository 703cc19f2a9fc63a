from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_mcp import judge

HEALTHY: dict[str, float | None] = {
    "reward/mean": 0.5,
    "success/rate": 0.5,
    "groups/uniform_share": 0.1,
    "rollouts/truncated_share": 0.0,
    "rollouts/error_share": 0.0,
    "tokens/completion_mean": 40.0,
    "entropy": 1.0,
    "grad_norm": 0.5,
    "is_ratio/mean": 1.0,
}


def history(steps: int = 12, **columns: list[float]) -> list[dict[str, float | None]]:
    return [{**HEALTHY, **{name: values[step] for name, values in columns.items()}} for step in range(steps)]


def names(metrics: list[dict[str, float | None]]) -> list[str]:
    return [flag.name for flag in judge.flags(metrics)]


def rising(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


def test_a_trend_averages_a_fifth_of_the_values_at_each_end():
    found = judge.trend([0.0] * 5 + [1.0] * 5)
    assert found is not None
    assert (found.first, found.last, found.best, found.width) == (0.0, 1.0, 1.0, 2)


def test_no_values_have_no_trend():
    assert judge.trend([]) is None


def test_a_sparkline_goes_from_the_least_to_the_greatest_value():
    assert judge.sparkline([0, 1]) == "▁█"
    assert judge.sparkline([5, 5, 5]) == "▁▁▁"
    assert judge.sparkline([]) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_a_sparkline_never_has_more_bars_than_asked_for(values: list[float], width: int):
    assert len(judge.sparkline(values, width)) == min(width, len(values))


def test_the_noise_band_is_the_normal_interval_of_a_share():
    assert judge.noise_band(0.5, 100) == pytest.approx(0.098)
    assert judge.noise_band(1.0, 100) == 0.0
    assert judge.noise_band(0.5, 0) == 1.0


@pytest.mark.parametrize(
    ("base", "trained", "outcome"),
    [
        ((0.2, 200), (0.9, 200), "improved"),
        ((0.5, 200), (0.55, 200), "no_change"),
        ((0.9, 200), (0.5, 200), "regressed"),
        ((0.0, 2), (1.0, 2), "no_change"),
    ],
)
def test_a_verdict_needs_more_than_chance(base: tuple[float, int], trained: tuple[float, int], outcome: str):
    assert judge.compare(base, trained).outcome == outcome


def test_pairs_tell_a_change_that_separate_samples_of_that_size_cannot():
    pairs = [(True, True)] * 100 + [(False, True)] * 12 + [(False, False)] * 88
    assert judge.compare_pairs(pairs).outcome == "improved"
    assert judge.compare((100 / 200, 200), (112 / 200, 200)).outcome == "no_change"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_swapping_the_sides_of_the_pairs_turns_the_verdict_around(pairs: list[tuple[bool, bool]]):
    there, back = judge.compare_pairs(pairs), judge.compare_pairs([(trained, base) for base, trained in pairs])
    assert there.change == -back.change
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    assert {there.outcome, back.outcome} in ({"no_change"}, {"improved", "regressed"})


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_model_is_never_better_or_worse_than_itself(outcomes: list[bool]):
    assert judge.compare_pairs([(outcome, outcome) for outcome in outcomes]).outcome == "no_change"


def test_a_healthy_run_has_no_flags():
    assert names(history(30, **{"reward/mean": rising(0.2, 0.8, 30)})) == []


@pytest.mark.parametrize(
    ("flag", "steps", "columns"),
    [
        ("environment_errors", 5, {"rollouts/error_share": [0.3] * 5}),
        ("truncation", 5, {"rollouts/truncated_share": [0.4] * 5}),
        ("uniform_groups", 5, {"groups/uniform_share": [0.9] * 5}),
        ("no_gradient", 5, {"grad_norm": [0.0] * 5}),
        ("policy_mismatch", 5, {"is_ratio/mean": [0.5] * 5}),
        ("reward_flat", 30, {"reward/mean": [0.3 + 0.05 * (-1) ** step for step in range(30)]}),
        ("reward_falling", 30, {"reward/mean": rising(0.8, 0.2, 30)}),
        ("entropy_collapse", 30, {"entropy": rising(1.0, 0.01, 30), "reward/mean": rising(0.1, 0.4, 30)}),
        (
            "length_collapse",
            30,
            {"tokens/completion_mean": rising(100, 5, 30), "reward/mean": rising(0.1, 0.9, 30)},
        ),
        ("overfitting", 5, {"eval_loss": [2.0, 1.5, 1.4, 1.6, 1.9]}),
    ],
)
def test_each_warning_sign_is_raised_alone_with_its_numbers_and_a_remedy(
    flag: str, steps: int, columns: dict[str, list[float]]
):
    found = judge.flags(history(steps, **columns))
    assert [each.name for each in found] == [flag]
    assert any(character.isdigit() for character in found[0].evidence)
    assert found[0].remedy


def test_uniform_groups_of_solved_tasks_are_no_problem_but_the_end():
    solved = history(5, **{"groups/uniform_share": [0.9] * 5, "success/rate": [0.95] * 5})
    assert [(flag.severity, "solved" in flag.remedy) for flag in judge.flags(solved)] == [("warning", True)]


def test_problems_stand_before_warnings():
    both = history(5, **{"rollouts/truncated_share": [0.3] * 5, "rollouts/error_share": [0.5] * 5})
    assert [flag.severity for flag in judge.flags(both)] == ["problem", "warning"]


def test_missing_and_undefined_numbers_raise_no_flag():
    assert names([dict.fromkeys(HEALTHY)] * 40) == []
    assert names([dict.fromkeys(HEALTHY, math.nan)] * 40) == []
