"""Rollouts of a task that are scored together."""

from pathlib import Path

import pytest

from environments.process.host import EnvironmentHost
from tests.folders import ASK, environment_folder
from tests.virtual import FakeEngine, FakeHost, rolled, run_virtually
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, TalkLimits, task_groups
from worker.rollouts.task_choice import TaskPlace

RANKED = """
    class Sample(Addition):
        def step_episode(self, example, messages, assistant_response):
            if example.id == "t1" and len(assistant_response) % 2:
                raise ValueError("an odd answer")
            return super().step_episode(example, messages, assistant_response)
        def score_group(self, example, episodes):
            if example.id == "t2":
                return []
            texts = sorted(episode.response_text for episode in episodes)
            shares = [texts.index(episode.response_text) / len(texts) for episode in episodes]
            return [RewardResult(share, metrics=[RewardMetric("of", len(texts))]) for share in shares]
"""

AGENTS = """
class Sample(EnvironmentAgent):
    dataset = tasks()
    def run(self, example, base_url, api_key, model):
        if example.id == "t1":
            raise ValueError("it failed before it asked")
        said = asked(base_url, api_key, model, [{"role": "user", "content": example.input}])["content"]
        return RewardResult(-1.0, success=False, metadata={"said": said})
    async def score_group(self, example, episodes):
        texts = sorted(each.metadata["said"] for each in episodes)
        return [RewardResult(texts.index(each.metadata["said"]) / len(texts)) for each in episodes]
"""


async def roll(tasks: list[RolloutTask], host: FakeHost | EnvironmentHost) -> list[PlayedRollout]:
    told: list[PlayedRollout] = []
    rollouts = await rolled(tasks, host, FakeEngine(), TalkLimits(max_tokens=12, max_length=400), on_done=told.append)
    assert {r.task.index for r in told} == {task.index for task in tasks}
    return rollouts


def said(rollout: PlayedRollout) -> str:
    assert rollout.transcript
    return rollout.transcript.messages[-1]["content"]


@pytest.mark.slow
async def test_a_scorer_ranks_the_rollouts_of_a_group(tmp_path: Path) -> None:
    tasks = task_groups("train", map(TaskPlace, [0, 1, 2, 0]), 6, lambda example, index, attempt: index)
    async with await EnvironmentHost.start(environment_folder(tmp_path, RANKED)) as host:
        rollouts = await roll(tasks, host)
        alone = await roll([RolloutTask("train", 0, 0, 0, seed=5)], host)
    groups = [rollouts[at : at + 6] for at in range(0, 24, 6)]
    # The two groups of one task are two groups; the second one has rollouts that failed.
    for group, failed in zip(groups, (False, True, True, False), strict=True):
        good = [rollout for rollout in group if not rollout.error]
        assert (len(good) < 6) == failed
        texts = sorted(map(said, good))
        assert [r.reward for r in good] == [texts.index(said(r)) / len(texts) for r in good]
        assert all(r.metrics == {"of": len(texts)} for r in good)
        assert failed or len({r.reward for r in good}) > 2
    second = [rollout.error["what"] for rollout in groups[1] if rollout.error]
    assert 0 < len(second) < 5 and all("an odd answer" in what for what in second)
    for rollout in groups[2]:
        assert (rollout.finish, rollout.reward) == ("error", 0.0) and rollout.error
        assert rollout.error["code"] == "environment_error"
        assert "score_group must return a list of 6 RewardResults" in rollout.error["what"]
    assert (alone[0].reward, alone[0].metrics) == (0.0, {})  # by score_episode


@pytest.mark.slow
@pytest.mark.linux
async def test_a_scorer_ranks_the_runs_of_an_agent(tmp_path: Path) -> None:
    tasks = task_groups("train", map(TaskPlace, [0, 1]), 6, lambda example, index, attempt: index)
    folder = environment_folder(tmp_path, ASK + AGENTS, needs="endpoint = true")
    async with await EnvironmentHost.start(folder) as host:
        rollouts = await roll(tasks, host)
        alone = await roll([RolloutTask("train", 0, 0, 0, seed=5)], host)
    texts = sorted(map(said, rollouts[:6]))
    assert [r.reward for r in rollouts[:6]] == [texts.index(said(r)) / 6 for r in rollouts[:6]]
    assert len({r.reward for r in rollouts[:6]}) > 2
    assert all("failed before it asked" in r.error["what"] for r in rollouts[6:] if r.error)
    assert [r.finish for r in rollouts[6:]] == ["error"] * 6
    assert alone[0].reward == -1.0  # what `run` returned


def test_a_group_waits_for_its_last_and_for_no_other_group() -> None:
    """Examples 1 to 3 end after two to four turns. In group 1 every third rollout is of example
    3, and the others have to wait for it; group 0 has none."""

    def fault(call: str, example: int) -> str | None:
        return "environment_error" if (call, example) == ("step", 9) else None

    examples = [(1, 0), (1, 0), (1, 1), (3, 1), (9, 1), (1, 1), (9, 2), (1, 2)]
    tasks = [RolloutTask("train", example, group, index, seed=index) for index, (example, group) in enumerate(examples)]
    host = FakeHost(lambda: 0.1, fault, scores_groups=True)
    rollouts, _ = run_virtually(roll(tasks, host))
    # The number of turns of all that were scored together; one that is alone gets `score`.
    assert [r.reward for r in rollouts] == [4, 4, 8, 8, 0, 8, 0, 3]
    assert [bool(r.error) for r in rollouts] == [False] * 4 + [True, False, True, False]
    assert host.closed == set(host.opened)
    assert rollouts[2].seconds < rollouts[3].seconds  # its own time, not the wait
