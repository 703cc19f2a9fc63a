"""env_test(replay=...): the stored rollouts of a run, scored by another version of its environment."""

from pathlib import Path
from typing import Any

import pytest

from flash_mcp.state.store import open_store
from flash_mcp.tools import environments
from flash_mcp.tools.shared import replaying
from tests.calls import call, refused
from tests.folders import environment_folder
from tests.samples import started_run

SUMS = "class Sample(Addition):\n"
GENEROUS = (
    SUMS
    + """
    def score_response(self, example, response_text):
        right = example.output in (response_text or "")
        return RewardResult(score=float(right), success=right, reason="the number is in it")
"""
)
STRICT = (
    SUMS
    + """
    def score_response(self, example, response_text):
        return RewardResult(score=0.0, success=False)
"""
)
FAULTY = (
    SUMS
    + """
    def score_response(self, example, response_text):
        if "is" in response_text:
            raise ValueError("no words")
        return super().score_response(example, response_text)
"""
)
OTHER_TASKS = (
    SUMS
    + """
    def __init__(self):
        self.dataset, self.eval_dataset = tasks(3), tasks(4, first=100)
"""
)
OTHER_PROMPT = (
    SUMS
    + """
    def build_prompt_messages(self, example):
        return [{"role": "user", "content": "Please: " + example.input}]
"""
)
BY_GROUPS = (
    SUMS
    + """
    def score_group(self, example, episodes):
        lengths = [len(episode.response_text) for episode in episodes]
        return [RewardResult(score=float(length == min(lengths)), success=False) for length in lengths]
"""
)


def row(index: int, task: int, said: list[dict[str, Any]], reward: float, finish: str = "done") -> dict[str, Any]:
    prompt = {"role": "user", "content": f"Add {task} and {task + 1}."}
    turns = sum(message["role"] == "assistant" for message in said)
    outcome = {"reward": reward, "success": reward > 0.5, "turns": turns, "finish": finish}
    return {
        "step": 1,
        "index": index,
        "group": index // 2,
        "task_id": f"t{task}",
        "messages": [prompt, *said],
        **outcome,
    }


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def run_id(tmp_path: Path, flash_home: Path) -> str:
    """Six tasks of two rollouts: one has the bare sum, the other says it in words, which was no success."""
    run, _ = started_run(tmp_path / "echo")
    rows: list[dict[str, Any]] = []
    for task in range(6):
        rows.append(row(2 * task, task, [answer(str(2 * task + 1))], 1.0))
        rows.append(row(2 * task + 1, task, [answer(f"It is {2 * task + 1}!")], 0.0))
    open_store().put_rollouts(run.id, "train", 1, rows)
    return run.id


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SUMS + "    pass\n", {"played": 12, "moved": 0, "newly": 0, "teach": 6, "no_longer_teach": 0}),
        (GENEROUS, {"played": 12, "moved": 6, "newly": 6, "no_longer": 0, "teach": 0, "no_longer_teach": 6}),
        (STRICT, {"moved": 6, "no_longer": 6, "teach": 0}),
        (FAULTY, {"played": 6, "groups": 0}),
        (OTHER_TASKS, {"played": 6, "gone": 6, "groups": 3, "taught": 3, "teach": 3}),
        (OTHER_PROMPT, {"played": 12, "other_way": 12, "moved": 0}),
        (BY_GROUPS, {"played": 12, "no_longer": 6, "moved": 0, "teach": 6}),
    ],
    ids=["same", "generous", "strict", "faulty", "other tasks", "other prompt", "by groups"],
)
async def test_stored_rollouts_are_scored_by_the_new_version(
    tmp_path: Path, run_id: str, source: str, expected: dict[str, Any]
) -> None:
    result = await call("env_test", folder=str(environment_folder(tmp_path / "new", source)), replay=run_id)
    found = result["replay"]
    assert {name: found.get(name) for name in expected} == expected, found
    assert found["of"] == 12 and found["before"]["success"] == (1.0 if source == FAULTY else 0.5)
    assert "env_push" in result["next"] or source not in (SUMS, OTHER_TASKS)
    if source == GENEROUS:
        assert found["now"] == {"reward": 1.0, "success": 1.0}
        assert len(found["now_successes"]) == 3 and found["now_successes"][0]["text"] == "It is 1!"
        assert found["now_successes"][0]["reason"] == "the number is in it"
        assert "no group would teach" in result["next"]
    if source == FAULTY:
        assert found["faulty"].startswith("6, the first:") and "no words" in found["faulty"]
    if source == STRICT:
        assert found["now_failures"][0]["success"] == [True, False]


async def test_a_conversation_whose_environment_answers_otherwise_is_counted_apart(tmp_path: Path, flash_home: Path):
    run, _ = started_run(tmp_path / "echo")

    def replied(*texts: str) -> list[dict[str, Any]]:
        return [turn for text in texts for turn in (answer("a"), {"role": "user", "content": text})]

    rows = [
        row(0, 0, [*replied("a!", "a!"), answer("a")], 0.5, "max_turns"),
        row(1, 0, [*replied("a?", "a!"), answer("a")], 0.5, "max_turns"),
        row(2, 1, [answer("a")], 0.5, "length"),
        row(3, 1, [answer("a")], 0.5),
    ]
    open_store().put_rollouts(run.id, "train", 1, rows)
    folder = environment_folder(tmp_path / "new", "class Sample(Echo):\n    pass\n")
    found = (await call("env_test", folder=str(folder), replay=run.id))["replay"]
    assert (found["played"], found["other_way"], found["moved"]) == (4, 2, 0)


async def test_the_newest_rollouts_are_played(tmp_path: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replaying, "MOST", 4)
    run, _ = started_run(tmp_path / "echo")
    rows = [row(index, index, [answer(str(2 * index + 1))], 0.0) for index in range(6)]
    open_store().put_rollouts(run.id, "train", 1, rows)
    folder = environment_folder(tmp_path / "new", GENEROUS)
    found = (await call("env_test", folder=str(folder), replay=run.id))["replay"]
    assert (found["of"], found["played"], found["newly"]) == (6, 4, 4)
    monkeypatch.setattr(environments, "longest_wait_s", lambda: 0.0)
    result = await call("env_test", folder=str(folder), replay=run.id)
    assert result["replay"]["late"] == 4 and "before 4 rollouts were played" in result["cut"]


async def test_what_cannot_be_played_again_is_refused(tmp_path: Path, flash_home: Path) -> None:
    run, _ = started_run(tmp_path / "echo")
    folder = str(environment_folder(tmp_path / "new", GENEROUS))
    assert "has no rollouts" in (await refused("env_test", folder=folder, replay=run.id)).what
    failed = {**row(0, 0, [answer("1")], 0.0), "error": {"code": "environment_error"}}
    open_store().put_rollouts(run.id, "train", 1, [failed, row(1, 0, [answer("1")], 0.0)])
    found = (await call("env_test", folder=folder, replay=run.id))["replay"]
    assert (found["of"], found["played"], found["failed_before"]) == (2, 1, 1)
    called = {**row(0, 0, [answer("1")], 0.0), "calls": [{"conversation": 0}]}
    open_store().put_rollouts(run.id, "train", 1, [called])
    assert "agent's program" in (await refused("env_test", folder=folder, replay=run.id)).what
    assert (await refused("env_test", folder=folder, replay="run-none")).code == "unknown_run"
