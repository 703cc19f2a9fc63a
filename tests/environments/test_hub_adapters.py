"""Objects of other packages as environments: what load_environment may return besides ours.

The tests with the packages themselves need what `scripts/hubs --only PACKAGE` installs."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcp import Client

from environments.adapters import adapted, inspect_tasks, prompt_text, tasks_of
from environments.base import UnsupportedError
from environments.faults import EnvironmentFault
from environments.process import requirements
from environments.process.host import EnvironmentHost
from flash_mcp.server.mcp_server import server
from tests import hubs
from tests.calls import refusal


def question(row: Any) -> str:
    return str(row["question"])


def test_rows_become_tasks_that_are_in_one_split_only() -> None:
    held_out = [{"question": "1 + 1", "number": 0}, {"question": "1 + 1", "number": 1}]
    rows = [{"question": "1 + 1", "number": 5}, {"question": "2 + 2", "number": 6}]
    train, evaluation = tasks_of(rows, held_out, question, {"number"})
    assert [task.input for task in train] == ["2 + 2"] and [task.record for task in evaluation] == [held_out[0]]
    again, _ = tasks_of([{**rows[1], "number": 0}], held_out, question, {"number"})
    assert [task.id for task in again] == [task.id for task in train]


def test_the_completion_of_a_row_is_its_gold_answer() -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": "2", "tool_calls": None, "tool_call_id": "call00000"},
    ]
    rows = [{"question": "a", "completion": "2"}, {"question": "b", "completion": messages}, {"question": "c"}]
    tasks, _ = tasks_of(rows, [{"question": "4 + 4"}], question)
    gold = [{name: value for name, value in message.items() if value is not None} for message in messages]
    assert [task.output for task in tasks] == ["2", gold, None]


def test_a_task_of_inspect_without_openai_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ModuleNotFoundError, match="openai"):
        inspect_tasks.adapt(SimpleNamespace(dataset=[], solver=None, sandbox=None))


@pytest.mark.parametrize(
    ("module", "members", "why"),
    [
        ("openreward.environments", {}, "classes of openreward have no adapter: write an EnvironmentMultiTurn"),
        ("verifiers.legacy", {"run_rollout": None}, "ToolEnv is an environment of verifiers before 0.4: write it as"),
    ],
)
def test_what_has_no_adapter_is_refused_by_name(module: str, members: dict[str, Any], why: str) -> None:
    kind = type("ToolEnv", (), {"__module__": module, **members})
    with pytest.raises(UnsupportedError, match=why):
        adapted(kind())


def test_prompts_with_images_are_refused_as_that() -> None:
    text = {"type": "text", "text": "What is it?"}
    assert prompt_text({"prompt": [{"role": "user", "content": [text]}]})
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(UnsupportedError, match="content of type image_url"):
        prompt_text({"prompt": [{"role": "user", "content": [text, image]}]})


@pytest.mark.parametrize("given", ["rows", "held_out"])
def test_every_fifth_row_is_held_out_if_there_is_one_split(given: str) -> None:
    rows = [{"question": f"{n} + 1"} for n in range(10)]
    splits = {"rows": [], "held_out": [], given: rows}
    train, evaluation = tasks_of(splits["rows"], splits["held_out"], question)
    assert [task.input for task in evaluation] == ["4 + 1", "9 + 1"] and len(train) == 8


def test_tasks_that_open_alike_have_questions_of_their_own() -> None:
    rows = [{"question": "Guess a word.", "answer": word} for word in ("crane", "stone")]
    train, evaluation = tasks_of(rows, [{**rows[0], "answer": "plant"}], question)
    asked = [task.input for task in (*train, *evaluation)]
    assert [text.partition("\n")[0] for text in asked[:2]] == ["Guess a word."] * 2 and len({*asked}) == 3


CANNOT_RUN = {
    'raise __import__("environments.base").base.UnsupportedError("SandboxEnv of verifiers needs a container")':
        ("[environment_unsupported", "| SandboxEnv of verifiers needs a container"),
    # The words are those of datasets 5.2, which has no class of its own for a download.
    """assert __import__("os").environ["HF_HUB_OFFLINE"] == "1"
    raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)")""":
        ("[environment_network", "network = true"),
}  # fmt: skip


@pytest.mark.parametrize("body", CANNOT_RUN)
async def test_what_cannot_run_here_is_refused_when_it_is_pushed(tmp_path: Path, body: str) -> None:
    (tmp_path / "environment.py").write_text(f"def load_environment():\n    {body}\n")
    async with Client(server) as client:
        text = await refusal(client, "env_push", name="boxed", folder=str(tmp_path))
    code, said = CANNOT_RUN[body]
    assert text.startswith(code) and said in text


GAME = """
from environments.adapters import trl
class Game:
    \"\"\"As TRL takes it in environment_factory.\"\"\"
    def reset(self, secret, **row):
        self.secret, self.guesses = secret, 0
        return f" It is below {secret + 3}."
    def guess(self, number: int) -> str:
        \"\"\"Guess the number.

        Args:
            number: The guess.
        \"\"\"
        self.guesses += 1
        if number < 0:
            raise ValueError("not negative")
        self.found = number == self.secret
        return "right" if self.found else "wrong"
    def _hidden(self) -> str:
        return ""
    def get_reward(self):
        return float(getattr(self, "found", False))
def brief(prompts, completions, environments, secret, **kwargs):
    assert prompts[0][-1]["content"].endswith(f"below {secret[0] + 3}.")
    assert [message["role"] for message in completions[0]][0] == "assistant"
    return [0.5 if environments[0].guesses < 2 else 0.0]
def not_here(completions, **kwargs):
    return [None]
def load_environment(factory=""):
    rows = [{"prompt": f"Guess number {n}.", "secret": n} for n in range(10)]
    return trl.load(eval(factory) if factory else Game, rows, [brief, not_here])
"""


@pytest.fixture
def game(tmp_path: Path) -> Path:
    folder = tmp_path / "game"
    folder.mkdir()
    (folder / "environment.py").write_text(GAME)
    return folder


async def test_a_class_for_trl_is_played_by_its_methods_and_rewards(game: Path) -> None:
    async with await EnvironmentHost.start(game) as host:
        assert host.splits == {"train": 8, "eval": 2}
        opening, other = [await host.open("train", 3) for _ in range(2)]
        assert opening.messages == [{"role": "user", "content": "Guess number 3. It is below 6."}]
        (tool,) = opening.tools
        assert tool["function"]["name"] == "guess" and tool["function"]["description"] == "Guess the number."
        for number, answer in ((-1, "Error: not negative"), (3, "right")):
            step = await host.step(opening.episode, "", call("guess", f'{{"number": {number}}}'))
            assert step.messages[0]["content"] == answer
        assert (await host.step(opening.episode, "It was 3.")).done
        won = await host.score(opening.episode)
        assert (won.reward, won.success) == (1.0, True) and won.metrics == {"brief": 0.0, "Game": 1.0}
        assert (await host.step(other.episode, "I give up.")).done
        lost = await host.score(other.episode)
        assert (lost.reward, lost.success) == (0.5, False), "each episode has its own object"


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("type('Still', (), {})", "Still has no method reset"),
        ("type('Slow', (Game,), {'wait': async_one})", "must be a function that is not async"),
    ],
)
async def test_a_class_that_cannot_be_played_is_refused(game: Path, factory: str, why: str) -> None:
    with (game / "environment.py").open("a") as source:
        source.write("\n\nasync def async_one(self):\n    return 1\n")
    with pytest.raises(EnvironmentFault, match=why) as caught:
        await EnvironmentHost.start(game, args={"factory": factory})
    assert caught.value.code == "environment_unsupported"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The folder of a hub's environments; skips where scripts/hubs has not installed it."""
    monkeypatch.setattr(requirements, "interpreters_dir", lambda: hubs.HOME / "interpreters")

    def folder(name: str) -> Path:
        folder = hubs.FOLDERS / name
        if not hubs.is_installed(folder):
            pytest.skip(f"scripts/hubs --only {name} installs what this test needs")
        return folder

    return folder


def call(name: str, arguments: str) -> list[dict[str, Any]]:
    body = {"name": name, "arguments": arguments}
    return [{"id": "call00000", "type": "function", "function": body}]


@pytest.mark.slow
async def test_a_sample_of_inspect_is_scored_by_inspect(installed: Callable[[str], Path]) -> None:
    args = {"name": "agent_threat_bench.agent_threat_bench_memory_poison"}
    async with await EnvironmentHost.start(installed("inspect"), args=args, timeout_s=120.0) as host:
        opening = await host.open("train", 0)
        assert [message["role"] for message in opening.messages] == ["system", "user"]
        assert "memory_read" in [tool["function"]["name"] for tool in opening.tools]
        assert (await host.step(opening.episode, "I do not know.")).done
        score = await host.score(opening.episode)
        scorer = "agent_threat_bench_scorer"
        assert score.metrics == {f"{scorer}.utility": 0.0, f"{scorer}.security": 1.0}
        assert (score.reward, score.success) == (0.5, False)


@pytest.mark.slow
async def test_a_taskset_of_verifiers_is_played_by_an_agent(installed: Callable[[str], Path]) -> None:
    async with await EnvironmentHost.start(installed("verifiers"), args={"name": "one agent"}) as host:
        opening = await host.open("train", 0)
        assert [message["role"] for message in opening.messages] == ["system", "user"] and opening.tools == []
        (sum_,) = re.findall(r"[-+\d ]*\d", opening.messages[-1]["content"])
        assert (await host.step(opening.episode, f"{eval(sum_)}")).done
        right = await host.score(opening.episode)
        assert (right.reward, right.success, right.reason) == (1.0, True, "agent_completed")
        assert right.metrics["right"] == 1.0
        opening = await host.open("train", 0)
        assert (await host.step(opening.episode, "no idea")).done
        wrong = await host.score(opening.episode)
        assert (wrong.reward, wrong.metrics["length"]) == (0.0, 7.0)


@pytest.mark.slow
async def test_a_shell_of_verifiers_runs_in_the_environment(installed: Callable[[str], Path]) -> None:
    args = {"name": "one agent with a shell"}
    async with await EnvironmentHost.start(installed("verifiers"), args=args) as host:
        opening = await host.open("train", 0)
        assert [tool["function"]["name"] for tool in opening.tools] == ["bash", "edit"]
        step = await host.step(opening.episode, "", call("bash", '{"command": "echo $((6 * 7))"}'))
        assert [(each["role"], each["content"]) for each in step.messages] == [("tool", "42\n")]
        assert (await host.step(opening.episode, "It is 42.")).done
        assert (await host.score(opening.episode)).metrics["length"] == 9.0


@pytest.mark.slow
async def test_an_environment_of_openenv_is_a_taskset_of_verifiers(installed: Callable[[str], Path]) -> None:
    """All of it is of the two packages: the taskset, the server, and the environment."""
    async with await EnvironmentHost.start(installed("verifiers"), args={"name": "openenv echo"}) as host:
        opening = await host.open("train", 0)
        assert "Echo environment ready!" in opening.messages[0]["content"]
        step = await host.step(opening.episode, "hello there")
        assert '"message_length": 11' in step.messages[0]["content"]
        assert (await host.step(opening.episode, "bye")).done
        assert (await host.score(opening.episode)).metrics["openenv_reward"] == pytest.approx(1.4)
