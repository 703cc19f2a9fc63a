"""The Python client against real servers, over stdio and over HTTP."""

import re
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.client import Client
from flash_mcp.protocol.errors import FlashError
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.run_view import RunView
from flash_mcp.tools.status import Status
from tests.places import ROOT
from tests.samples import finished_run, push_echo, supervised
from tests.teams import team_server


def test_every_tool_is_a_method_with_its_arguments_and_documentation() -> None:
    for name, tool in TOOLS.items():
        method = getattr(Client, name)
        assert method.__wrapped__ is tool.function and method.__doc__ == tool.function.__doc__


@pytest.mark.slow
def test_over_stdio_results_have_their_types_and_refusals_their_codes(tmp_path: Path, flash_home: Path) -> None:
    run_id = finished_run(tmp_path).id
    with supervised(), Client() as client:
        report = client.status(run_id)
        assert isinstance(report, Status) and isinstance(report.run, RunView)
        assert report.run.verdict is not None and report.run.verdict.outcome == "improved"
        assert [row.step for row in client.checkpoints(run_id=run_id).checkpoints] == [20, 10]
        assert client.rollouts(run_id, which="worst", limit=1).total == 8
        planned = client.train(environment="echo", steps=3, validate_only=True)
        assert planned.values["steps"] == 3 and planned.run_id is None
        with pytest.raises(FlashError) as refused:
            client.status("run-none")
        assert refused.value.code == "unknown_run" and refused.value.fix
        with pytest.raises(FlashError) as refused:
            client.train(environment="echo", stepz=3)
        assert refused.value.code == "unknown_argument" and "'steps'" in refused.value.what
        health = client.catalog(kind="health").health or []
        assert {"supervisor", "disk", "queue"} <= {finding.name for finding in health}


def test_over_http_the_token_says_whose_client_it_is(tmp_path: Path, flash_home: Path) -> None:
    push_echo(tmp_path)
    with team_server() as team:
        with Client(f"{team.url}/mcp", team.token("alice")) as client:
            (who,) = client.catalog(kind="whoami").whoami or []
            assert who.name == "alice"
            with pytest.raises(FlashError, match=r"^\[local_only"):
                client.env_push(name="x", folder=tmp_path)  # a path, which JSON has not
        with pytest.raises(FlashError) as refused, Client(f"{team.url}/mcp", "flash_wrong"):
            pass
        assert refused.value.code == "unauthenticated"


@pytest.mark.slow
def test_the_example_in_the_readme_runs(tmp_path: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run ends as a worker would end it: training takes minutes."""
    (code,) = re.findall(r"```python\n(from flash_mcp.client.*?)```", (ROOT / "docs/use.md").read_text(), re.DOTALL)
    push_echo(tmp_path, name="calculator")
    finished = finished_run(tmp_path / "finished").id
    waited = Client.status

    def status(self: Client, run_id: str, **options: Any) -> Status:
        assert run_id != finished
        return waited(self, finished, **options)

    monkeypatch.setattr(Client, "status", status)
    with supervised():
        exec(code, {})


@pytest.mark.parametrize("value", ["plain", "with space", "a ] in it", "a] b", 'it\'s "a] b"', "it's", [1, 2], 3, None])
def test_an_error_is_read_back_from_its_text(value: Any) -> None:
    error = FlashError("unknown_run", "there is no run [x]: look", fix="call status. Fix: nothing", run_id=value)
    again = FlashError.from_text(str(error))
    assert (again.code, again.what) == ("unknown_run", "there is no run [x]: look.") and "call status" in again.fix
    assert FlashError.from_text("no such form").code == "internal"
