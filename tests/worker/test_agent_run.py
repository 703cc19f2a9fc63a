"""A training run of an agent that uses the `openai` package: the tiny model and the real engine."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.run_folder import RunFolder
from tests.attempts import Attempt, make_run
from tests.places import AGENT_VOWELS


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("agent") / "run"
    run = make_run(folder, tiny_model, environment=AGENT_VOWELS, eval_before=True, eval_after=True)
    with Attempt(run) as attempt:
        assert attempt.wait() == 0, attempt.log_path.read_text()
    return run


def rewards(run: RunFolder, step: int) -> list[float]:
    rows: list[Any] = run.rollouts(step)
    assert not any(row["error"] for row in rows), rows
    return [row["reward"] for row in rows]


def test_an_agent_learns_what_its_reward_pays_for(run: RunFolder) -> None:
    first, last = statistics.mean(rewards(run, 1)), statistics.mean(rewards(run, 5))
    assert last > 1.5 * first, (first, last)
    before, after = (run.evaluation(step)["summary"] for step in (0, 5))
    assert before["n"] == after["n"] == 5 and after["reward_mean"] > before["reward_mean"]


def test_its_rollouts_are_the_conversations_that_it_had(run: RunFolder) -> None:
    for row in run.rollouts(1):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert row["messages"][0]["content"].startswith("Write ")
        assert row["turns"] == 2 and row["finish"] == "done"
