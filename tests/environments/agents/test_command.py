"""Agents that are command lines."""

import errno
import os
import textwrap
from pathlib import Path

import pytest

from environments.process.host import EnvironmentFault, EnvironmentHost
from tests.folders import environment_folder
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.linux]
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
        import openai, subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(607)"])
        openai.OpenAI().responses.create(model="policy", input="x")
        time.sleep(607)
    """,
    "begins all that it may": """
        import openai, os, time
        refused = 0
        while not refused:
            try:
                if not os.fork():
                    try:
                        os.setsid()
                        os.fork() or time.sleep(607)
                    finally:
                        os._exit(0)
            except BlockingIOError as error:
                refused = error.errno
        openai.OpenAI().responses.create(model="policy", input=str(refused))
        open("reward.json", "w").write('{"score": 1.0}')
    """,
    "begins some": """
        import openai, subprocess
        for _ in range(25):
            subprocess.Popen(["sleep", "607"])
        openai.OpenAI().responses.create(model="policy", input="x")
        open("reward.json", "w").write('{"score": 1.0}')
    """,
    "prints": """
        import openai
        openai.OpenAI().responses.create(model="policy", input="x")
        print("printed")
    """,
    "is killed": """
        import openai, os
        openai.OpenAI().responses.create(model="policy", input="x")
        print("so far", flush=True)
        os.kill(os.getpid(), 9)
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


async def commands(folder: Path, name: str, source: str = "", **options: float) -> EnvironmentHost:
    returns = f"Sample([{textwrap.dedent(PROGRAMS[name])!r}])"
    environment_folder(folder, SOURCE + textwrap.dedent(source), returns=returns, needs="endpoint = true")
    return await EnvironmentHost.start(folder, **options)


@pytest.mark.parametrize(("name", "reason"), [("anthropic", "told"), ("openai", "x")])
async def test_a_command_finds_the_model_in_its_variables(name: str, reason: str, tmp_path: Path) -> None:
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
        assert len(children(b"time.sleep(607)")) == 3, "its launcher names it too"
        await host.close(opening.episode)
        await until(lambda: not children(b"time.sleep(607)"))


@pytest.mark.hostile("resources")
async def test_a_program_leaves_processes_to_others_and_none_behind(tmp_path: Path) -> None:
    sources = ", ".join(repr(textwrap.dedent(PROGRAMS[name])) for name in ("begins all that it may", "begins some"))
    needs = "endpoint = true\nprocesses = 200"
    folder = environment_folder(tmp_path / "agent", SOURCE, returns=f"Sample([{sources}])", needs=needs)
    async with await EnvironmentHost.start(folder) as host:
        greedy = await host.open("train", 0)
        assert greedy.messages[-1]["content"] == str(errno.EAGAIN)
        modest = [await host.open("train", 1) for _ in range(3)]
        for opening in (greedy, *modest):
            assert (await host.step(opening.episode, "4")).done and (await host.score(opening.episode)).reward == 1
        assert not children(b"refused = 0") and not children(b"sleep\x00607")


@pytest.mark.parametrize(
    ("name", "command", "expected"),
    [
        ("is killed", "", "killed by SIGKILL. It printed: so far"),
        ("prints", "['no-such-program']", "there is no program 'no-such-program'"),
        ("prints", "[no_program()]", "Exec format error"),
    ],
)
async def test_a_command_that_is_killed_or_does_not_start_has_no_reward(name, command, expected, tmp_path):
    source = """
        import tempfile
        def no_program():
            path = os.path.join(tempfile.gettempdir(), "no-program")
            with open(path, "w") as file:
                file.write("no program")
            os.chmod(path, 0o700)
            return path
        class Sample(Sample):
            def reward(self, example, ended):
                return RewardResult(0.0)
    """
    if command:
        source += f"""
            def command(self, example):
                return {command}
    """
    async with await commands(tmp_path / "agent", name, source=source) as host:
        with pytest.raises(EnvironmentFault, match=expected) as caught:
            await host.step((await host.open("train", 0)).episode, "4")
        assert caught.value.code in ("environment_error", "environment_access")


def children(said: bytes) -> list[str]:
    """The processes whose command line has these words, which no other test's has."""
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
