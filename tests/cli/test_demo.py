"""`flash-mcp demo --agent` on the tiny model, with a few steps: what it plays, prints and writes."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from mcp import Client
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from rich.console import Console

from flash_mcp.cli import demo
from flash_mcp.protocol.errors import FlashError
from tests.places import AGENT_CALCULATOR

pytestmark = pytest.mark.slow
SHORT = {"steps": 1, "batch_size": 1, "group_size": 2, "max_tokens": 4, "eval_examples": 2}


@pytest.mark.long
def test_the_demo_of_an_agent_goes_from_a_push_to_a_verdict(tiny_model: Path, tmp_path: Path, monkeypatch, capsys):
    folder = tmp_path / "templates" / "agent_calculator"
    shutil.copytree(AGENT_CALCULATOR.parent, folder)
    for config in folder.glob("configs/*.toml"):
        text = config.read_text().replace("[rollouts]", "[rollouts]\nmax_length = 2048")
        for name, value in SHORT.items():
            text = re.sub(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.MULTILINE)
        config.write_text(text)
    monkeypatch.setattr(demo, "TEMPLATES", folder.parent)
    written = tmp_path / "figures.json"
    assert demo.play(written, {"model": str(tiny_model)}, None, agent=True) == 0, capsys.readouterr()
    figures = json.loads(written.read_text())
    assert figures["tools_called"] == [
        "env_push", "env_test", "train", "status", "compare", "rollouts",
    ]  # fmt: skip
    assert figures["warm_up"].endswith("@1") and figures["heldout_warm"]["n"] == 2
    assert figures["heldout_base"]["tasks"] == figures["heldout_trained"]["tasks"] == 2
    printed = capsys.readouterr().out
    assert "passed tool_calls: " in printed and figures["verdict"] in printed
    assert f"flash-mcp status {figures['run_id']}" in printed


async def test_a_call_waits_while_packages_of_an_environment_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "AGAIN_S", 0.01)
    server = MCPServer("installing")
    tries: list[str] = []

    @server.tool()
    def train(environment: str) -> dict[str, int]:
        tries.append(environment)
        if environment == "broken" or len(tries) < 3:
            code = "requirements_failed" if environment == "broken" else "not_ready"
            raise ToolError(str(FlashError(code, "its packages are still being installed", environment=environment)))
        return {"tries": len(tries)}

    async with Client(server) as client:
        session = demo.DemoSession(client, Console(file=io.StringIO()))
        assert (await session.call("train", environment="slow"))["tries"] == 3
        with pytest.raises(FlashError, match="requirements_failed"):
            await session.call("train", environment="broken")
    assert tries == ["slow"] * 3 + ["broken"]
