"""Many agents at once, each a program of its own, and SIGKILL in the middle of their sessions."""

import json
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.process.host import EnvironmentHost
from tests.attempts import Attempt, make_run
from tests.environments.agents.test_programs import CLIENT
from tests.folders import environment_folder
from tests.virtual import FakeEngine, rolled
from tests.waiting import wait_for
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, TalkLimits
from worker.rollouts.turns import Completion, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.linux]
SESSIONS = 32
CALLS = 3
SOURCE = """
import sys
from environments import EnvironmentCommand
class Sample(EnvironmentCommand):
    dataset = [TaskExample({}, f"question {n}", id=f"t{n}") for n in range(64)]
    def command(self, example):
        return [sys.executable, f"{os.path.dirname(__file__)}/agent.py", example.input]
"""
PROGRAM = (
    CLIENT
    + f"""
heard = []
last = {{}}
for number in range({CALLS}):
    status, answer = ask(input=f"{{sys.argv[1]}}, {{number}}", **last)
    assert status == 200, answer
    heard.append(answer["output"][0]["content"][0]["text"])
    last = {{"previous_response_id": answer["id"]}}
end(reason=json.dumps(heard))
"""
)


@dataclass
class Striking(FakeEngine):
    """Does something at the turns with these numbers, and decodes none before so many have come."""

    strikes: dict[int, Callable[[], None]] = field(default_factory=dict)
    pending_reason: int = 0
    turns: int = 0

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        super().submit(request_id, prompt_ids, sampling)
        self.turns += 1
        self.strikes.get(self.turns, lambda: None)()

    def step(self) -> list[tuple[str, Completion]]:
        return super().step() if self.turns >= self.pending_reason else []


@asynccontextmanager
async def programs(folder: Path) -> AsyncGenerator[EnvironmentHost]:
    environment_folder(folder, SOURCE, needs="endpoint = true\nprocesses = 1000")
    (folder / "agent.py").write_text(PROGRAM)
    async with await EnvironmentHost.start(folder, timeout_s=120) as host:
        yield host


async def rollouts_of(host: EnvironmentHost, engine: FakeEngine, first: int = 0) -> list[PlayedRollout]:
    tasks = [RolloutTask("train", first + n, n, n, n) for n in range(SESSIONS)]
    return await rolled(tasks, host, engine, TalkLimits(max_tokens=8, max_length=400))


def heard(rollout: PlayedRollout) -> bool:
    """Whether the agent asked its own question and heard what the model said to it. Raises if it heard anything
    else."""
    if rollout.error:
        return False
    assert rollout.transcript
    messages = rollout.transcript.messages
    number = rollout.task.example
    asked = [each["content"] for each in messages if each["role"] == "user"]
    assert asked == [f"question {number}, {call}" for call in range(CALLS)]
    said = [each["content"] for each in messages if each["role"] == "assistant"]
    assert json.loads(rollout.reason or "") == said and rollout.reward == 1 and rollout.turns == CALLS
    return True


def agents(folder: Path) -> list[psutil.Process]:
    """The agents that run now."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if str(folder / "agent.py") in words[:2]:
            found.append(process)
    return found


async def test_as_many_sessions_at_once_keep_to_themselves_though_some_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    rng = random.Random(4)
    killed: set[int] = set()

    def kill() -> None:
        process = rng.choice(agents(folder))
        killed.add(int(process.cmdline()[2].split()[1]))
        process.kill()

    async with programs(folder) as host:
        engine = Striking(pending_reason=SESSIONS)
        undisturbed = await rollouts_of(host, engine)
        assert all(map(heard, undisturbed)), [each.error for each in undisturbed]
        assert engine.turns == SESSIONS * CALLS and max(engine.batches) == SESSIONS
        moments = rng.sample(range(1, SESSIONS * 2), 8)
        disturbed = await rollouts_of(host, Striking(strikes=dict.fromkeys(moments, kill)))
        assert {each.task.example for each in disturbed if not heard(each)} == killed
        errors = [each.error["what"] for each in disturbed if each.error]
        assert all("killed by SIGKILL" in error for error in errors), errors
        assert agents(folder) == []


@pytest.mark.long
async def test_when_the_process_that_serves_the_model_is_killed_its_sessions_fail_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    async with programs(folder) as host:
        [first] = psutil.Process(host._children[-1]._transport.get_pid()).children()
        [server] = first.children()
        rollouts = await rollouts_of(host, Striking(strikes={SESSIONS + 3: server.kill}))
        lost = [each for each in rollouts if not heard(each)]
        assert lost and all(each.error["code"] == "environment_error" for each in lost if each.error)
        assert agents(folder) == [], "no agent outlives the process that serves its model"
        assert all(map(heard, await rollouts_of(host, FakeEngine(), first=SESSIONS)))


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_no_agent_and_the_next_attempt_ends_the_run(tiny_model: Path, tmp_path: Path):
    folder = environment_folder(tmp_path / "agents", SOURCE, needs="endpoint = true")
    (folder / "agent.py").write_text(PROGRAM)
    quick = {"steps": 2, "batch_size": 2, "group_size": 4, "max_tokens": 8, "max_length": 400}
    run = make_run(tmp_path / "run", tiny_model, environment=folder, **quick)
    with Attempt(run) as attempt:
        attempt.wait_until(lambda: run.rollout_steps() and agents(folder))
    wait_for(lambda: not agents(folder))
    Attempt(run, 2).ended()
    assert [*run.rollout_steps()] == [1, 2]
    for step in run.rollout_steps():
        rows: list[Any] = list(run.rollouts(step))
        assert [(row["error"], row["turns"], row["reward"]) for row in rows] == [(None, CALLS, 1)] * 8
