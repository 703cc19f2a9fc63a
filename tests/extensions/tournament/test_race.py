"""Races of arms that learn, simulated: how often the best is cut, what that costs, and what is claimed."""

from collections.abc import Mapping

import numpy as np
import pytest

from flash_mcp.extensions.tournament.standing import FINALISTS, ROUNDS, Race, Standing

ARMS = 8
Names = Mapping[int, Mapping[str, bool]]


def outcomes(solved: Mapping[int, int], tasks: int) -> Names:
    return {arm: {f"t{place}": place < count for place in range(tasks)} for arm, count in solved.items()}


def curves(draws: np.random.Generator) -> np.ndarray:
    """Success of each arm after each round: it rises to a ceiling of 0.3 to 0.95, each at its speed, so that the
    curves cross."""
    ceilings = draws.uniform(0.3, 0.95, ARMS)
    speeds = np.exp(draws.uniform(np.log(0.08), np.log(1.0), ARMS)) * 12 / ROUNDS
    return ceilings[:, None] * (1 - np.exp(-speeds[:, None] * np.arange(1, ROUNDS + 1)))


def races(tasks: int, count: int, *, final: int = 100) -> dict[str, float]:
    """So many simulated races: shares of races, and the cost as a share of training all arms to the end."""
    draws = np.random.default_rng(3)
    cost = cut = regret = 0.0
    for _ in range(count):
        success = curves(draws)
        best = int(success[:, -1].argmax())
        solved = draws.binomial(tasks, success)
        race = Race(ARMS)
        for number in range(1, ROUNDS):
            cost += len(race.left) / (ARMS * ROUNDS * count)
            race.add(number, outcomes({arm: int(solved[arm, number - 1]) for arm in race.left}, tasks))
        cost += len(race.left) / (ARMS * ROUNDS * count)
        cut += (best in race.out) / count
        ends = {arm: int(draws.binomial(final, success[arm, -1])) for arm in race.left}
        race.add(ROUNDS, outcomes(ends, final))
        regret += float(success[best, -1] - success[race.leader, -1]) / count
    return {"cost": cost, "best cut": cut, "regret": regret}


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [25, 50, 200])
def test_the_best_of_eight_crossing_arms_is_seldom_cut_at_about_half_the_cost(tasks: int) -> None:
    seen = races(tasks, 400)
    assert seen["best cut"] <= 0.1 and seen["cost"] <= 0.57, seen
    assert seen["regret"] <= 0.01, seen


def test_the_rule_for_fixed_policies_would_cut_the_best_of_them_more_often() -> None:
    """Its promise is about arms as they are in that round."""
    draws, cut = np.random.default_rng(3), 0
    for _ in range(150):
        success = curves(draws)
        standing = Standing(ARMS)
        for number in range(1, ROUNDS + 1):
            rows = draws.random((ARMS, 50)) < success[:, number - 1, None]
            names = [f"{number}/{place}" for place in range(50)]
            standing.add(number, {arm: dict(zip(names, rows[arm].tolist(), strict=True)) for arm in standing.left})
        cut += int(success[:, -1].argmax()) in standing.out
    assert cut / 150 > 0.1


def test_an_arm_that_is_behind_but_climbs_stays_and_one_that_stands_still_goes() -> None:
    race = Race(4)
    for number in range(1, 5):
        race.add(number, outcomes({0: 160, 1: 150, 2: 20, 3: 30 * number} if 2 in race.left else
                                  {0: 160, 1: 150, 3: 30 * number}, 200))  # fmt: skip
    assert race.out == {2: 2} and race.left == [0, 1, 3] and race.leader == 0
    assert race.line(3, ROUNDS, 0.0) > 0.8 > race.success(3) == 0.6
    for number in range(5, ROUNDS + 1):
        race.add(number, outcomes(dict.fromkeys(race.left, 0) | {0: 160}, 200))
    assert len(race.left) >= FINALISTS


def test_arms_that_solve_everything_are_not_cut_for_one_that_comes_to_them() -> None:
    """As four rates did that were played on the calculator, docs/tournament.md."""
    race = Race(4)
    for number, late in enumerate((2, 10, 18, 20, 23, 24, 25, 25, 25), start=1):
        race.add(number, outcomes({0: late, 1: 25, 2: 19 if number == 1 else 25, 3: 25}, 25))
    assert race.left == [0, 1, 2, 3] and race.line(0, ROUNDS, 0.0) == 1.0
    noise = Race(3)  # one that solves nothing yet stays while nobody leads by more than noise
    for number in (1, 2, 3):
        noise.add(number, outcomes({0: 0, 1: 1, 2: 0}, 25))
    assert noise.left == [0, 1, 2]


@pytest.mark.parametrize(("solved", "decided"), [((70, 40), True), ((52, 48), False), ((70, 69, 30), False)])
def test_a_winner_is_claimed_only_where_the_final_shows_it(solved: tuple[int, ...], decided: bool) -> None:
    race = Race(len(solved))
    race.add(ROUNDS, outcomes(dict(enumerate(solved)), 100))
    assert race.leader == 0 and race.is_decided == decided
    last = race.behind(len(solved) - 1)
    assert last and last.low < (solved[-1] - solved[0]) / 100 < last.high and race.behind(0) is None


def test_equal_finalists_are_hardly_ever_told_apart() -> None:
    draws, claims = np.random.default_rng(1), 0
    for _ in range(400):
        race = Race(3)
        rows = draws.random((3, 100)) < 0.6
        final = {arm: {str(place): bool(done) for place, done in enumerate(row)} for arm, row in enumerate(rows)}
        race.add(ROUNDS, final)
        claims += race.is_decided
    assert claims <= 0.05 * 400
