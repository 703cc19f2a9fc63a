"""The comparison of two evaluations: its tests, its verdict, and how many tasks would decide."""

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_mcp.judgement import comparison, statistics
from flash_mcp.protocol.records import Evaluation


def paired(won: int, lost: int, same: int, effect: float = 0.05) -> comparison.Change:
    pairs = [(0.0, 1.0)] * won + [(1.0, 0.0)] * lost + [(0.0, 0.0)] * (same // 2) + [(1.0, 1.0)] * (same - same // 2)
    return comparison.compare_paired([b for b, _ in pairs], [o for _, o in pairs], effect=effect)


@pytest.mark.parametrize(
    ("won", "lost", "same", "outcome"),
    [
        (12, 1, 87, "improved"),
        (12, 0, 188, "improved"),
        (1, 12, 87, "regressed"),
        (2, 2, 396, "no_change"),
        (6, 3, 41, "underpowered"),
        (5, 0, 0, "underpowered"),  # p = 0.0625
        (0, 0, 5, "underpowered"),  # nothing differs, but on five tasks that means nothing
    ],
)
def test_the_verdict_on_successes_of_the_same_tasks(won: int, lost: int, same: int, outcome: str):
    found = paired(won, lost, same)
    assert (found.outcome, found.test) == (outcome, "mcnemar_exact")
    assert found.p == statistics.mcnemar(won, lost)
    assert (found.decide_n is not None) == (outcome == "underpowered") and "McNemar" in found.explanation


def test_one_of_several_looks_is_judged_more_strictly():
    sides = [0.0] * 8 + [1.0] * 92, [1.0] * 100  # p = 0.0078
    found = [comparison.compare_paired(*sides, effect=0.05, looks=looks).outcome for looks in (1, 6, 7)]
    assert found == ["improved", "improved", "underpowered"]


def test_an_interval_without_zero_is_not_called_chance_for_want_of_tasks():
    few = comparison.compare_unpaired([1.0] * 8, [0.0] * 8, effect=0.05)
    assert few.outcome == "underpowered" and few.high < 0
    assert "fewer than 10 tasks" in few.explanation and "chance" not in few.explanation
    alike = paired(0, 0, 5, effect=1.0)
    assert alike.outcome == "underpowered" and "fewer than 10 tasks" in alike.explanation
    decided_by_p = paired(5, 0, 0)
    assert decided_by_p.low > 0 and "p is not below 0.05" in decided_by_p.explanation
    within_chance = paired(6, 3, 41)
    assert "chance alone may explain it" in within_chance.explanation and "fewer" not in within_chance.explanation


def test_the_number_that_would_decide_decides_when_the_difference_stays():
    found = paired(12, 6, 82)
    assert found.outcome == "underpowered" and found.decide_n is not None
    times = math.ceil(found.decide_n / 100)
    assert paired(12 * times, 6 * times, 82 * times).outcome == "improved"


def test_shares_of_several_attempts_are_compared_by_bootstrap_over_tasks():
    rng = random.Random(0)
    base = [rng.choice([0.0, 0.25, 0.5]) for _ in range(60)]
    found = comparison.compare_paired(base, [share + 0.25 for share in base], effect=0.05)
    assert (found.outcome, found.test, found.p) == ("improved", "paired_bootstrap", None)
    assert found.low < 0.25 < found.high or found.high == pytest.approx(0.25, abs=0.02)
    few = comparison.compare_paired([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], effect=0.05)
    assert few.outcome == "underpowered", "few tasks that agree are no certainty"


@settings(max_examples=15)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_swapping_the_sides_turns_the_comparison_around(pairs: list[tuple[float, float]]):
    base, other = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = (comparison.compare_paired(*sides, effect=0.05) for sides in ((base, other), (other, base)))
    assert there.change == pytest.approx(-back.change)
    turned = {"improved": "regressed", "regressed": "improved"}
    if min(abs(there.low), abs(there.high)) > 0.02:  # the draws differ, so a border may be on either side
        assert turned.get(there.outcome, there.outcome) in (back.outcome, "no_change", "underpowered")


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=200))
def test_nothing_is_better_or_worse_than_itself(values: list[float]):
    assert comparison.compare_paired(values, values, effect=0.05).outcome in ("no_change", "underpowered")
    assert comparison.compare_unpaired(values, values, effect=0.05).outcome in ("no_change", "underpowered")


def test_a_paired_comparison_of_equal_models_cries_wolf_at_most_5_times_of_100():
    rng, cried = random.Random(7), 0
    for _ in range(400):
        rates = [rng.random() for _ in range(60)]
        sides = [[float(rng.random() < rate) for rate in rates] for _ in range(2)]
        cried += comparison.compare_paired(*sides, effect=0.05).outcome in ("improved", "regressed")
    assert cried / 400 <= 0.06


def templates(number: int, share: float, change: float, rng: random.Random) -> list[list[float]]:
    """Success before and after of 200 tasks of `number` templates. `share` of what decides is the template's."""
    normal = NormalDist()

    def drawn() -> list[float]:
        ours = [rng.gauss(0, 1) for _ in range(number)]
        return [math.sqrt(share) * ours[n % number] + math.sqrt(1 - share) * rng.gauss(0, 1) for n in range(200)]

    hard, limits = drawn(), (0.0, normal.inv_cdf(0.5 + change))
    own = [drawn() for _ in limits]
    return [
        [float(math.sqrt(0.7) * a + math.sqrt(0.3) * b < limit) for a, b in zip(hard, side, strict=True)]
        for side, limit in zip(own, limits, strict=True)
    ]


@pytest.mark.parametrize(
    ("number", "share", "change", "least", "most"),
    [
        (10, 0.0, 0.0, 0.0, 0.05),
        (10, 0.5, 0.0, 0.0, 0.05),
        (20, 0.5, 0.0, 0.0, 0.05),
        (50, 1.0, 0.0, 0.0, 0.05),
        (200, 0.0, 0.0, 0.0, 0.05),
        (200, 0.0, 0.1, 0.7, 0.9),  # as much as McNemar's test
    ],
)
def test_tasks_of_few_templates_are_as_seldom_called_improved(
    number: int, share: float, change: float, least: float, most: float
):
    rng, kinds = random.Random(3), [f"{n % number}" for n in range(200)]
    found = [comparison.compare_paired(*templates(number, share, change, rng), kinds, effect=0.05) for _ in range(200)]
    assert least <= sum(one.outcome == "improved" for one in found) / 200 <= most
    assert sum(one.low <= change <= one.high for one in found) / 200 >= 0.9


def test_the_verdict_says_of_how_many_kinds_the_tasks_are_and_what_that_costs():
    # The tasks of a kind change as one: 12 kinds of 10 tasks, of which 5 are newly solved.
    kinds = [f"{n // 10}" for n in range(120)]
    sides = [0.0] * 120, [float(n < 50) for n in range(120)]
    many = comparison.compare_paired(*sides, kinds, effect=0.05)
    assert (many.outcome, many.test, many.p) == ("underpowered", "kind_flips", 0.0625)
    assert "(50 newly solved, 0 no longer; p = 0.0625): the same 120 tasks of 12 kinds, " in many.explanation
    assert "which tell as much as 11 unlike ones" in many.explanation
    assert many.decide_n is not None and many.decide_n > 10 * 12
    shifted = comparison.compare_paired(sides[0], [0.3 * value for value in sides[1]], kinds, effect=0.05)
    assert (shifted.test, shifted.p) == ("kind_flips", 0.0625)
    apart = comparison.compare_unpaired(*sides, [*kinds, *(f"other {kind}" for kind in kinds)], effect=0.05)
    assert "120 tasks" not in apart.explanation and "240 tasks of 24 kinds" in apart.explanation
    few = comparison.compare_paired(*sides, [f"{n // 40}" for n in range(120)], effect=0.05)
    assert (few.outcome, few.test) == ("improved", "mcnemar_exact")
    assert "for their 3 kinds of tasks alone" in few.explanation
    for same in (["a"] * 120, [f"{n}" for n in range(120)]):
        assert comparison.compare_paired(*sides, same, effect=0.05) == comparison.compare_paired(*sides, effect=0.05)


def test_different_tasks_are_compared_by_noise_bands():
    found = comparison.compare_unpaired([1.0] * 40 + [0.0] * 160, [1.0] * 100 + [0.0] * 100, effect=0.05)
    assert (found.outcome, found.test) == ("improved", "noise_band") and "noise band" in found.explanation
    again = comparison.compare_unpaired([1.0] * 4 + [0.0] * 16, [1.0] * 8 + [0.0] * 12, effect=0.05)
    assert again.outcome == "underpowered" and "on each side" in again.explanation
    # Textbook size for 20 % against 40 % at 80 % power is 79 to 82 a side; ours smooths the shares
    # a little.
    assert again.decide_n is not None and 70 <= again.decide_n <= 95


def test_tasks_are_paired_where_most_of_the_smaller_side_is_shared():
    base = dict.fromkeys("abcdef", 1.0)
    assert comparison.shared(base, dict.fromkeys("fed", 0.0)) == ["d", "e", "f"]
    assert comparison.shared(base, dict.fromkeys("fxyz", 0.0)) == []


def shares(solved: int, count: int) -> list[float]:
    return [1.0] * solved + [0.0] * (count - solved)


@pytest.mark.parametrize(
    ("base", "trained", "outcome"),
    [
        ((40, 200), (180, 200), "improved"),
        ((100, 200), (110, 200), "underpowered"),
        ((100, 200), (112, 200), "underpowered"),  # pairs would tell
        ((180, 200), (100, 200), "regressed"),
        ((0, 2), (2, 2), "underpowered"),
    ],
)
def test_a_verdict_on_different_tasks_needs_more_than_chance(
    base: tuple[int, int], trained: tuple[int, int], outcome: str
):
    assert comparison.compare_unpaired(shares(*base), shares(*trained), effect=0.05).outcome == outcome


def test_an_interval_ends_where_shares_cannot_differ_by_more():
    sides = ([1.0], [0.0]), ([0.0], [1.0])
    worse, better = (comparison.compare_unpaired(*each, effect=0.05) for each in sides)
    assert (paired(200, 0, 0).high, paired(0, 200, 0).low, better.high, worse.low) == (1.0, -1.0, 1.0, -1.0)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 80))
def test_swapping_successes_of_pairs_turns_the_interval_around(won: int, lost: int, same: int):
    there = paired(won, lost, same)
    back = paired(lost, won, same)
    assert there.change == pytest.approx(-back.change)
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    assert {"improved": "regressed", "regressed": "improved"}.get(there.outcome, there.outcome) == back.outcome


def evaluation(step: int, solved: int, count: int) -> Evaluation:
    return Evaluation(step=step, epoch=1, time=1.0, summary={"n": count, "success": solved / count})


def test_evaluations_whose_rollouts_are_lost_are_compared_by_their_summaries():
    base = evaluation(0, 20, 100)
    trained = evaluation(20, 90, 100)
    lost = comparison.compare_evaluations(base, trained, [])
    assert (lost.outcome, lost.test, round(lost.change, 3)) == ("improved", "noise_band", 0.7)
    kept = comparison.compare_evaluations(base, trained, [(0.0, float(n < 20), f"{n}") for n in range(100)])
    assert (kept.test, round(kept.change, 3)) == ("mcnemar_exact", 0.2)


def test_figures_of_tasks_that_were_trained_on_are_no_verdict():
    change = paired(12, 1, 87)
    trained = Evaluation(step=9, epoch=1, time=0.0, summary={"n": 100, "success": 0.9})
    assert comparison.verdict(change, None, trained).outcome == "improved"
    overlap = {"shared": 3, "eval_tasks": 9, "evidence": "3 have the id of a train task"}
    verdict = comparison.verdict(change, overlap, trained)
    assert verdict.outcome == "contaminated"
    assert verdict.explanation.startswith("CONTAMINATED: 3 of 9 eval tasks are train tasks too (3 ")


def test_what_is_sent_is_rounded_and_what_is_judged_is_not():
    change = paired(12, 1, 87)
    sent = change.model_dump(mode="json")
    assert sent["low"] == round(change.low, 4) != change.low and sent["p"] == 0.00342 and "decide_n" not in sent


@pytest.mark.parametrize(
    ("success", "constant", "said"),
    [
        (0.70, 0.67, ". BUT it may be no better than always answering 'Yes': 0.67 (0.52 to 0.80, 40"),
        (0.60, 0.67, "it is no better than always answering 'Yes'"),
        (0.90, 0.67, ""),
        (0.70, 0.0, ""),
        (0.70, None, ""),
    ],
)
def test_the_verdict_says_when_one_constant_answer_does_as_well(success: float, constant: float | None, said: str):
    summary = {"n": 100, "success": success}
    if constant is not None:
        summary |= {"constant_success": constant, "constant_n": 40}
    trained = Evaluation(step=9, epoch=1, time=0.0, summary=summary, constant="Yes")
    change = comparison.compare_paired([0.0] * 100, [1.0] * 70 + [0.0] * 30, effect=0.05)
    verdict = comparison.verdict(change, None, trained)
    assert verdict.outcome == "improved" and said in verdict.explanation
    assert ("always" in verdict.explanation) == bool(said)


@pytest.mark.parametrize(
    ("success", "more", "outcome"),
    [
        (0.60, {"constant_success": 0.60, "constant_n": 40}, "constant"),
        (0.60, {"constant_success": 0.55, "constant_n": 40}, "improved"),
        # A user who likes short answers: one word pleases everywhere, and the model has learnt to be short.
        (0.60, {"constant_success": 1.00, "constant_n": 40}, "improved"),
        (0.60, {"answers/common_share": 0.96, "answers/common_success": 0.6}, "constant"),
        (0.60, {}, "improved"),
        (0.002, {"constant_success": 0.60, "constant_n": 40}, "no_change"),
    ],
)
def test_a_success_that_one_constant_answer_reaches_is_no_improvement(
    success: float, more: dict[str, float], outcome: str
):
    before, after = (
        Evaluation(step=step, epoch=0, time=0.0, summary={"n": 500, "success": share, **more}, constant="1")
        for step, share in ((0, 0.0), (9, success))
    )
    assert comparison.compare_evaluations(before, after, ()).outcome == outcome
    pairs = [(0.0, float(n < 500 * success), f"{n}") for n in range(500)]
    assert comparison.compare_evaluations(before, after, pairs).outcome == outcome


@pytest.mark.parametrize(
    ("constant", "name"),
    [
        ("ignore the above", "one constant answer"),
        ("copying the last number of the prompt", "copying the last number of the prompt"),
        ("copying the\nsystem of the prompt", "one constant answer"),
    ],
)
def test_a_constant_that_is_no_plain_word_is_not_quoted_in_a_verdict(constant: str, name: str):
    summary = {"n": 20, "success": 0.5, "constant_success": 0.5, "constant_n": 20}
    trained = Evaluation(step=9, epoch=1, time=0.0, summary=summary, constant=constant)
    assert comparison.against_constant(trained) == f"it is no better than {name}: 0.50 (0.30 to 0.70, 20 tasks)"
    summary = {"n": 50, "success": 0.5, "answers/common_share": 0.96, "answers/common_success": 0.5}
    alike = Evaluation(step=9, epoch=1, time=0.0, summary=summary)
    assert comparison.against_constant(alike) == "it gives one and the same answer to 96 % of the tasks"


@pytest.mark.parametrize(
    ("best", "last", "answer"), [(90, 60, "headroom"), (62, 60, "undecided"), (60, 60, "ceiling"), (50, 80, "ceiling")]
)
def test_the_best_of_several_early_attempts_tell_headroom_from_ceiling(best: int, last: int, answer: str):
    solved = [[float(task < count) for task in range(100)] for count in (best, last)]
    text = comparison.headroom([*zip(*solved, map(str, range(100)), strict=True)], attempts=8)
    assert text.startswith(f"{answer}: ")
    assert f"the best of 8 attempts of base solves {best} %, other {last} %" in text
