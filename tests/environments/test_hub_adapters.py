"""Objects of other packages as environments: what load_environment may return besides ours.

The tests with the packages themselves need what `scripts/hubs --only verifiers` installs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from environments.adapters import tasks_of
from environments.process import requirements
from environments.process.host import EnvironmentHost
from flash_mcp.server.mcp_server import server
from tests import hubs
from tests.calls import refusal

pytestmark = pytest.mark.anyio


def question(row: Any) -> str:
    return str(row["question"])


def test_rows_become_tasks_that_are_in_one_split_only() -> None:
    held_out = [{"question": "1 + 1", "number": 0}, {"question": "1 + 1", "number": 1}]
    rows = [{"question": "1 + 1", "number": 5}, {"question": "2 + 2", "number": 6}]
    train, evaluation = tasks_of(rows, held_out, question, {"number"})
    assert [task.input for task in train] == ["2 + 2"]
    assert [task.record for task in evaluation] == [held_out[0]]
    again, _ = tasks_of([{**rows[1], "number": 0}], held_out, question, {"number"})
    assert [task.id for task in again] == [task.id for task in train]


@pytest.mark.parametrize("given", ["rows", "held_out"])
def test_every_fifth_row_is_held_out_if_there_is_one_split(given: str) -> None:
    rows = [{"question": f"{n} + 1"} for n in range(10)]
    splits = {"rows": [], "held_out": [], given: rows}
    train, evaluation = tasks_of(splits["rows"], splits["held_out"], question)
    assert [task.input for task in evaluation] == ["4 + 1", "9 + 1"]
    assert len(train) == 8


def test_tasks_that_open_alike_have_questions_of_their_own() -> None:
    rows = [{"question": "Guess a word.", "answer": word} for word in ("crane", "stone")]
    train, evaluation = tasks_of(rows, [{**rows[0], "answer": "plant"}], question)
    asked = [task.input for task in (*train, *evaluation)]
    assert [text.partition("\n")[0] for text in asked[:2]] == ["Guess a word."] * 2
    assert len({*asked}) == 3


async def test_what_cannot_run_here_is_refused_when_it_is_pushed(tmp_path: Path) -> None:
    source = """
        from environments.base import UnsupportedError

        def load_environment():
            raise UnsupportedError("SandboxEnv of verifiers needs a container")
    """
    (tmp_path / "environment.py").write_text(textwrap.dedent(source))
    async with Client(server) as client:
        text = await refusal(client, "env_push", name="boxed", folder=str(tmp_path))
    assert text.startswith("[environment_unsupported")
    assert "| SandboxEnv of verifiers needs a container" in text


# -- the packages ----------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The folder of a hub's environments; skips where scripts/hubs has not installed it."""
    monkeypatch.setattr(requirements, "interpreters_dir", lambda: hubs.HOME / "interpreters")

    def folder(name: str) -> Path:
        folder = hubs.FOLDERS / name
        if not requirements.is_installed(folder):
            pytest.skip(f"scripts/hubs --only {name} installs what this test needs")
        return folder

    return folder


def call(name: str, arguments: str) -> list[dict[str, Any]]:
    body = {"name": name, "arguments": arguments}
    return [{"id": "call00000", "type": "function", "function": body}]


@pytest.mark.slow
async def test_a_rubric_of_verifiers_scores_what_its_tools_led_to(
    installed: Callable[[str], Path],
) -> None:
    args = {"name": "ToolEnv chain_sum"}
    async with await EnvironmentHost.start(installed("verifiers"), args=args) as host:
        assert host.splits == {"train": 359, "eval": 93}  # those that differ
        opening = await host.open("train", 0)
        assert opening.max_turns == 4
        assert [tool["function"]["name"] for tool in opening.tools] == ["add", "subtract"]
        step = await host.step(opening.episode, "", call("add", '{"a": 20, "b": 3}'))
        assert [(each["role"], each["content"]) for each in step.messages] == [("tool", "23")]
        assert (await host.step(opening.episode, "It is 23.")).done
        wrong = await host.score(opening.episode)
        assert (wrong.reward, wrong.success, wrong.reason) == (0.2, False, "no_tools_called")
        assert wrong.metrics["total_tool_calls"] == 1.0
        opening = await host.open("train", 0)
        (sum_,) = re.findall(r"[-+\d ]*\d", opening.messages[-1]["content"])
        assert (await host.step(opening.episode, f"\\boxed{{{eval(sum_)}}}")).done
        right = await host.score(opening.episode)
        assert (right.reward, right.success) == (1.0, True)
