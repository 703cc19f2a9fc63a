"""Agents that are command lines."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from environments.process.host import EnvironmentFault, EnvironmentHost
from tests.folders import environment_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a namespace needs Linux"),
]
PROGRAMS = {
    "anthropic": """
        import json, os, pathlib, anthropic
        with anthropic.Anthropic() as client:
            said = client.messages.create(
                model=os.environ["MODEL"], max_tokens=9,
                messages=[{"role": "user", "content": "2 + 2?"}],
            )
        right = said.content[0].text == "4"
        reward = {"score": float(right), "success": right, "reason": os.environ["EXTRA"]}
        pathlib.Path(os.environ["FLASH_REWARD_FILE"]).write_text(json.dumps(reward))
    """,
    "openai": """
        import json, os, pathlib, openai
        with openai.OpenAI() as client:
            said = client.responses.create(model=os.environ["OPENAI_MODEL"], input="2 + 2?")
        reward = {"score": float(said.output_text == "4"), "reason": "x"}
        pathlib.Path("reward.json").write_text(json.dumps(reward))
    """,
    "fails": "import openai; openai.OpenAI().responses.create(model='policy', input='x'); 1 / 0",
    "hangs": """
        import openai, time
        openai.OpenAI().responses.create(model="policy", input="x")
        time.sleep(600)
    """,
}
SOURCE = """
import sys
from environments import EnvironmentCommand


class Sample(EnvironmentCommand):
    def __init__(self, programs):
        self.dataset = [TaskExample({}, each, id=f"t{n}") for n, each in enumerate(programs)]

    def command(self, example):
        return [sys.executable, "-c", example.input]

    def variables(self, example):
        return {"EXTRA": "told"}
"""


async def commands(folder: Path, name: str, **options: float) -> EnvironmentHost:
    returns = f"Sample([{textwrap.dedent(PROGRAMS[name])!r}])"
    environment_folder(folder, SOURCE, returns=returns)
    (folder / "environment.toml").write_text("endpoint = true\n")
    return await EnvironmentHost.start(folder, **options)


@pytest.mark.parametrize(("name", "reason"), [("anthropic", "told"), ("openai", "x")])
async def test_a_command_finds_the_model_in_its_variables(
    name: str, reason: str, tmp_path: Path
) -> None:
    async with await commands(tmp_path / "agent", name) as host:
        opening = await host.open("train", 0)
        assert opening.messages == [{"role": "user", "content": "2 + 2?"}]
        assert (await host.step(opening.episode, "4")).done
        score = await host.score(opening.episode)
    assert (score.reward, score.success, score.reason) == (1.0, True, reason)


async def test_a_command_that_writes_no_reward_fails_its_rollout(tmp_path: Path) -> None:
    async with await commands(tmp_path / "agent", "fails") as host:
        opening = await host.open("train", 0)
        with pytest.raises(EnvironmentFault, match="wrote no reward and ended with code 1"):
            await host.step(opening.episode, "4")


async def test_a_command_ends_with_its_rollout(tmp_path: Path) -> None:
    async with await commands(tmp_path / "agent", "hangs", timeout_s=20) as host:
        opening = await host.open("train", 0)
        running = children(b"time.sleep(600)")
        assert len(running) == 1
        await host.close(opening.episode)
        assert children(b"time.sleep(600)") == []


def children(said: bytes) -> list[str]:
    """The processes whose command line has these words."""
    found: list[str] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                line = Path(entry.path, "cmdline").read_bytes()
            except OSError:
                continue
            if said in line and b"pytest" not in line:
                found.append(entry.name)
    return found
