"""Episodes that draw from the global generators."""

import asyncio
import random
from pathlib import Path

import pytest

from environments.process.host import EnvironmentHost
from tests.folders import environment_folder

DRAWS = {
    "random": "random.randint(0, 10**9), random.gauss(0, 1), random.sample(range(99), 3)",
    "a name imported from random": "choice(range(10**9))",
    "random, seeded by each episode": "random.seed(example.id) or random.random()",
    "numpy": "numpy.random.randint(10**9), numpy.random.shuffle(list(range(9)))",
    "a name imported from numpy": "permutation(99)",
    "torch": "torch.rand(2), torch.empty(2).normal_(), torch.randperm(9), torch.initial_seed()",
}


async def play(host: EnvironmentHost, index: int) -> list[str]:
    """All that the environment says in an episode of three turns."""
    opening = await host.open("train", index)
    said = [str(opening.messages)]
    for _ in range(3):
        said.append(str((await host.step(opening.episode, "go on")).messages))
    return [*said, str((await host.score(opening.episode)).reward)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("drawn", DRAWS)
async def test_episodes_at_once_draw_what_they_draw_one_by_one(tmp_path: Path, drawn: str, kind: str) -> None:
    pytest.importorskip("numpy")
    source = f"""
    import numpy
    {"import torch" if drawn == "torch" else ""}
    from random import choice
    from numpy.random import permutation
    class Sample(Echo):
        {kind} start_episode(self, example):
            {"await asyncio.sleep(0.01)" if kind == "async def" else "time.sleep(0.01)"}
            return [{{"role": "user", "content": str(({DRAWS[drawn]}))}}]
        {kind} step_episode(self, example, messages, assistant_response):
            drawn = [str(({DRAWS[drawn]}))]
            {"await asyncio.sleep(0.01)" if kind == "async def" else "time.sleep(0.01)"}
            drawn.append(str(({DRAWS[drawn]})))
            return EnvironmentStepResult(done=False, messages=[{{"role": "user", "content": str(drawn)}}])
        def score_episode(self, example, episode): return RewardResult(random.random())
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        tasks = [0, 0, 1, 2, 0, 3, 1, 0]
        alone = [await play(host, task) for task in tasks]
        together = await asyncio.gather(*(play(host, task) for task in tasks))
        assert together == alone
        assert alone[0] == alone[1], "two rollouts of a task play one game"
        assert alone[0] != alone[2], "two tasks play different games"


async def test_what_load_environment_draws_is_no_episodes(tmp_path: Path) -> None:
    source = """
    random.seed(7)
    drawn = random.random()
    class Sample(Echo):
        def start_episode(self, example):
            random.seed(1)
            return [{"role": "user", "content": "go on"}]
        def score_episode(self, example, episode): return RewardResult(drawn)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        assert (await play(host, 0))[-1] == str(random.Random(7).random())
