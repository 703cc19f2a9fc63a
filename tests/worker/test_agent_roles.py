"""Calls of an agent in several roles: which are trained, which the base model answers, and what is kept of each."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from environments.process.host import EnvironmentHost
from tests.folders import ASK, environment_folder
from tests.virtual import FakeEngine, rolled
from worker.rollouts.scheduler import RolloutTask, TalkLimits
from worker.rollouts.turns import Completion, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.linux]
ROLES = """
class Sample(EnvironmentAgent):
    dataset = [TaskExample({}, "x", id="t")]
    def run(self, example, base_url, api_key, model):
        def ask(name, *before, **headers):
            messages = [*before, {"role": "user", "content": name}]
            return [*messages, asked(base_url, api_key, name, messages, **headers)]
        heard = [
            ask(model),
            ask("planner"),
            ask("judge:untrained"),
            ask("gpt-5", x_flash_role="critic", x_flash_train="false"),
            ask("base"),
        ]
        ask(model, *heard[0])
        refused = ask("x", x_flash_train="perhaps")
        return RewardResult(1.0, reason=json.dumps([talk[-1].get("content") for talk in heard] + [refused[-1]["code"]]))
"""


class Recorder(FakeEngine):
    """Keeps what it was asked and what it answered. `lacks_base` refuses to ask the base model."""

    def __init__(self, *, lacks_base: bool = False) -> None:
        super().__init__()
        self.lacks_base = lacks_base
        self.asked: list[tuple[list[int], list[int], bool]] = []

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if sampling.is_base and self.lacks_base:
            raise ValueError("it is gone")
        super().submit(request_id, prompt_ids, sampling)
        answer: Completion = self.wanted[request_id]
        self.asked.append((list(prompt_ids), answer.token_ids, sampling.is_base))


async def played(folder: Path, engine: Recorder):
    environment_folder(folder, ASK + ROLES, needs="endpoint = true")
    async with await EnvironmentHost.start(folder) as host:
        (rollout,) = await rolled([RolloutTask("train", 0, 0, 0, 0)], host, engine, TalkLimits(6, 400))
    return rollout


async def test_roles_say_what_is_trained_and_who_answers(tmp_path: Path) -> None:
    engine = Recorder()
    rollout = await played(tmp_path, engine)
    record = rollout.record(1)
    roles = {"": True, "planner": True, "judge": False, "critic": False, "base": False}
    assert [(call["role"], call["trained"]) for call in record.calls] == [*roles.items(), ("", True)]
    assert [is_base for _, _, is_base in engine.asked] == [False, False, False, False, True, False]
    assert [call["parent"] for call in record.calls] == [None, None, None, None, None, 0]
    trained = sum(len(answer) for at, (_, answer, _) in enumerate(engine.asked) if at in (0, 1, 5))
    assert sum(rollout.transcript.mask) == record.completion_tokens == trained
    assert sum(rollout.transcript.policies.values()) == 0, "a fake engine names no policy"
    conversations = [talk.messages[0]["content"] for talk in record.conversations]
    assert sorted(conversations) == ["planner", "policy"]
    assert record.refusals == {"invalid_value: x-flash-train must be true or false, got 'perhaps'": 1}


async def test_the_token_ids_of_each_call_are_those_that_the_engine_saw(tmp_path: Path) -> None:
    engine = Recorder()
    record = (await played(tmp_path, engine)).record(1)
    assert len(record.calls) == len(engine.asked) == 6
    for call, (prompt, answer, _) in zip(record.calls, engine.asked, strict=True):
        assert record.token_ids(call) == (prompt, answer)
        assert (call["prompt_tokens"], call["completion_tokens"]) == (len(prompt), len(answer))


async def test_a_base_model_that_is_gone_is_refused_with_the_reason(tmp_path: Path) -> None:
    rollout = await played(tmp_path, Recorder(lacks_base=True))
    assert [call["role"] for call in rollout.record(1).calls] == ["", "planner", "judge", "critic", ""]
    assert rollout.reward == 1.0 and rollout.error is None and str(rollout.reason).endswith('null, "invalid_value"]')
