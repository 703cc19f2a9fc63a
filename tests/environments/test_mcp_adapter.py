"""MCP servers that greet, hang, refuse or end, and the tasks that are made of their tools."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from environments.adapters.mcp import McpError, McpServer, McpTimeout
from environments.faults import EnvironmentFault
from environments.process.host import EnvironmentHost
from environments.tools import ToolsEnded
from tests.places import CALCULATOR

FOLDER = CALCULATOR.parent / "mcp_server"
GREETING = 'print("server is ready")\nprint(12)\n'
STUCK = """
def multiply(left: int, right: int) -> str:
    import time
    time.sleep(3600)
"""


def server_of(folder: Path, source: str, timeout_s: float = 20.0) -> McpServer:
    (folder / "server.py").write_text(source)
    return McpServer(["python", "server.py"], folder, timeout_s)


@pytest.fixture
def source() -> str:
    return (FOLDER / "server.py").read_text()


@pytest.fixture
def make_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_tasks", FOLDER / "make_tasks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SIZES", {"train": 6, "eval": 2})
    yield module


def test_lines_that_are_no_messages_are_passed_over(tmp_path: Path, source: str) -> None:
    server = server_of(tmp_path, GREETING + source)
    assert server.call("multiply", {"left": 6, "right": 7}) == "42"
    with pytest.raises(McpError, match="missing 1 required"):
        server.call("multiply", {"left": 6})
    server.close()


@pytest.mark.slow
def test_a_tool_that_does_not_answer_fails_in_time(tmp_path: Path, source: str) -> None:
    stuck = source.replace("def multiply(left: int, right: int) -> str:\n", STUCK)
    server = server_of(tmp_path, stuck, timeout_s=5.0)
    with pytest.raises(McpTimeout, match=r"did not answer in 5 s.*no network"):
        server.call("multiply", {"left": 6, "right": 7})
    server.close()


def test_a_server_that_ends_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ToolsEnded, match="exit code 3"):
        server_of(tmp_path, "raise SystemExit(3)")


def test_a_server_that_ends_is_quoted_with_the_end_of_its_standard_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(ToolsEnded, match=r"exit code 1: ModuleNotFoundError: No module named 'no_such'\n.*\nTraceback"):
        server_of(tmp_path, "import no_such")
    filled = 'import sys\nsys.stderr.write("a line\\n" * 20_000)\n'
    server = server_of(tmp_path, filled + source.replace("return str(left * right)", "sys.exit('no more')"))
    with pytest.raises(ToolsEnded, match=r": no more\n") as caught:
        server.call("multiply", {"left": 6, "right": 7})
    assert len(str(caught.value)) < 1000
    server.close()


def test_where_no_call_makes_a_task_the_last_failure_of_each_tool_is_quoted(tmp_path, source, make_tasks: ModuleType):
    refusing = source.replace("(function,) = [", 'raise ValueError("no such city")\n        (function,) = [')
    server = server_of(tmp_path, refusing)
    with pytest.raises(ValueError, match=r"VALUES of make_tasks.py.*multiply\(\{.*no such city"):
        make_tasks.make_rows(server)
    server.close()


def test_a_tool_whose_results_change_makes_no_task(tmp_path: Path, source: str, make_tasks: ModuleType) -> None:
    changing = source.replace("return str(left * right)", "import time; return str(time.time_ns())")
    server = server_of(tmp_path, changing)
    assert {row["tool"] for row in make_tasks.make_rows(server)} == {"convert_length", "count_letters"}
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "timeout_s", "said"),
    [('sys.exit("no more")', 60, "no more"), ("__import__('time').sleep(3600)", 0.1, "did not answer in")],
)
async def test_a_rollout_fails_if_its_server_ends_or_hangs_and_not_if_a_call_cannot_be_computed(
    trouble: str, timeout_s: float, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tools"
    shutil.copytree(FOLDER, folder)
    source = (folder / "server.py").read_text()
    count = "return str(sum("
    (folder / "server.py").write_text(source.replace(count, f'if text == "end": {trouble}\n    {count}'))
    source = (folder / "environment.py").read_text()
    # Other calls have the time that they need.
    impatient = f'if arguments.get("text") == "end": self.server._timeout_s = {timeout_s}\n        '
    call = "result = self.server.call("
    (folder / "environment.py").write_text(source.replace(call, impatient + call))

    def calling(name: str, **arguments: Any) -> list[dict[str, Any]]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return [{"id": "call00000", "type": "function", "function": function}]

    async with await EnvironmentHost.start(folder, timeout_s=20) as host:
        episode = (await host.open("train", 0)).episode
        step = await host.step(episode, "", calling("convert_length", value=10**400, unit="km", to="m"))
        assert "too large" in step.messages[0]["content"]
        with pytest.raises(EnvironmentFault, match=said):
            await host.step(episode, "", calling("count_letters", text="end"))
