"""Which tasks a step tries, and that an attempt which resumes tries what an undisturbed one would."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.attempts import Attempt, held, make_run
from tests.worker.test_mixture import tried
from worker.rollouts.task_choice import BELIEFS, FLOOR, REFILLS, TaskChoice, usefulness


@pytest.mark.parametrize(
    ("a", "b", "chance"), [(1, 1, 7 / 9), (5, 5, 0.96), (1, 9, 0.47), (9, 1, 0.47), (0.5, 20, 0.16)]
)
def test_the_chance_that_a_group_of_eight_teaches(a: float, b: float, chance: float) -> None:
    """By hand for Beta(1, 1): 1 - 2/9; the others as in the design."""
    assert usefulness(a, b, 8) == pytest.approx(chance, abs=1e-9 if a == b == 1 else 0.005)


def test_the_chance_is_that_of_groups_that_are_drawn() -> None:
    rng = random.Random(0)
    mixed = sum(
        0 < sum(rng.random() < rate for _ in range(4)) < 4 for rate in (rng.betavariate(2, 5) for _ in range(20_000))
    )
    assert usefulness(2, 5, 4) == pytest.approx(mixed / 20_000, abs=0.01)


def choice_of(total: int, outcomes: dict[int, list[float]]) -> TaskChoice:
    choice = TaskChoice(total, 4, seed=0)
    for task, rewards in outcomes.items():
        for _ in range(6):
            choice.learn(task, rewards, taught=len(set(rewards)) > 1)
    return choice


@pytest.mark.parametrize("fine", [False, True])
def test_tasks_that_teach_nothing_are_drawn_by_the_floor_alone(fine: bool) -> None:
    some, none, every = ([0.2, 1.0, 0.2, 1.0], [0.2] * 4, [1.0] * 4) if fine else ([0.0, 1.0] * 2, [0.0] * 4, [1.0] * 4)
    choice = choice_of(30, {task: (some, none, every)[task % 3] for task in range(30)})
    drawn = Counter(task % 3 for step in range(3000) for task in choice.draw(step, 1))
    for kind in (1, 2):  # a third of the floor's draws each, and a little that is still believed of them
        assert FLOOR / 3 - 0.02 < drawn[kind] / 3000 < FLOOR / 3 + 0.06
    assert len(set(choice.draw(1, 30))) == 30, "without replacement"
    assert set(choice.draw(1, 20, without=range(10))) == set(range(10, 30))
    assert len(choice.draw(1, 70)) == 70, "more than there are"


def test_a_belief_forgets_and_never_ends_at_nothing() -> None:
    choice = choice_of(2, {0: [1.0] * 4})
    for _ in range(5000):
        choice.learn(0, [1.0] * 4, taught=False)
    choice.learn(1, [], taught=False)
    assert choice.draw(1, 2, turn=1) and choice._solved.keys() == {0}
    for _ in range(6):
        choice.learn(0, [0.0, 1.0, 0.0, 1.0], taught=True)
    assert usefulness(*choice._solved[0], 4) > 0.7, "a task that was solved may be of use again"


def test_beliefs_are_read_back_exactly(tmp_path: Path) -> None:
    choice = choice_of(9, {task: [task / 9, 1.0, 0.0] for task in range(5)})
    choice.save(tmp_path)
    again = TaskChoice(9, 4, seed=0)
    again.load(tmp_path)
    assert vars(again) == vars(choice)
    fresh = TaskChoice(9, 4, seed=0)
    fresh.load(tmp_path / "nowhere")
    assert vars(fresh) == vars(TaskChoice(9, 4, seed=0))


FIELDS = {"steps": 4, "group_size": 4, "max_tokens": 8, "task_sampling": "useful"}
BINARY = """
def score_episode(self, example, episode):
    text = "".join(message["content"] for message in episode.messages if message["role"] == "assistant")
    return RewardResult(float(int(example.id[1:]) % 6 == 1 and sum(letter in "aeiouAEIOU" for letter in text) % 2))
Vowels.score_episode = score_episode
"""
"""One task in six is solved by chance, the others never."""


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_tries_the_tasks_that_an_undisturbed_one_tries(tiny_model: Path, tmp_path: Path) -> None:
    environment, flag = held(tmp_path / "held", saved=tmp_path / "run" / "checkpoints" / "2")
    with (environment / "environment.py").open("a") as file:
        file.write(BINARY)
    flag.unlink()
    whole = make_run(tmp_path / "whole", tiny_model, environment=environment, **FIELDS)
    Attempt(whole, one_by_one=True).ended()
    flag.touch()
    run = make_run(tmp_path / "run", tiny_model, environment=environment, env_timeout_s=600, **FIELDS)
    with Attempt(run, one_by_one=True) as first:
        first.wait_until(lambda: 2 in run.checkpoints.steps())
    assert not list(run.rollouts(3))
    flag.unlink()
    Attempt(run, 2, one_by_one=True).ended()
    refilled = 0
    for step in (1, 2, 3, 4):
        assert tried(run, step) == tried(whole, step)
        metrics = run.metrics(step)["metrics"]
        assert len(tried(run, step)) == 4 * metrics["groups/tried"] >= 4 * 4
        refilled += metrics["groups/tried"] > 4
        rows = list(run.rollouts(step))
        teaching = [any(row["advantage"] for row in rows[at : at + 4]) for at in range(0, len(rows), 4)]
        assert not any(teaching[4:]), "the trained groups come first"
        assert sum(teaching) == metrics["groups/useful"]
        assert any(teaching) or len(teaching) == 4 * (1 + REFILLS)
        assert len({row["index"] for row in rows}) == len(rows)
    assert refilled
    ends = [json.loads((Path(of.checkpoints.manifest(4)["path"]) / BELIEFS).read_text()) for of in (run, whole)]
    assert ends[0] == ends[1]
    trained = "adapter_model.safetensors"
    assert run.checkpoints.manifest(4)["files"][trained] == whole.checkpoints.manifest(4)["files"][trained]


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_try_the_tasks_of_one(tiny_model: Path, tmp_path: Path) -> None:
    """Also in the rounds that refill their step."""
    environment, flag = held(tmp_path / "held")
    flag.unlink()
    with (environment / "environment.py").open("a") as file:
        file.write(BINARY)
    both: list[list[tuple[str, float]]] = []
    for gpus in (1, 2):
        fields = {**FIELDS, "steps": 1, "gpus": gpus, "environment": environment}
        run = make_run(tmp_path / f"of-{gpus}", tiny_model, **fields)
        Attempt(run, one_by_one=True, CUDA_VISIBLE_DEVICES="").ended()
        both.append(tried(run, 1))
    assert sorted(both[0]) == sorted(both[1]) and len(both[0]) > 16
