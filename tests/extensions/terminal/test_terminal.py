"""Agents in a terminal: Harbor's tasks in our sandbox, and in a container."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from environments.agents import harbor, terminal
from environments.base import DatasetError, UnsupportedError
from environments.checks.gate import check
from environments.checks.playing import GivenTurn, Played, Task, play
from environments.process.host import EnvironmentFault, EnvironmentHost
from tests.places import TERMINAL
from tests.waiting import WAIT_S

TASKS = TERMINAL / "tasks"
FIRST_LINE, LARGEST = TASKS / "train/first_line", TASKS / "eval/largest_file"
DOES_IT = "head -n 1 /app/poem.txt > /app/first.txt"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example, whose tasks a test changes."""
    return Path(shutil.copytree(TERMINAL, tmp_path / "terminal", ignore=shutil.ignore_patterns("__pycache__")))


def call(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"id": "c1", "type": "function", "function": function}


async def played(folder: Path, *commands: str, index: int = 1) -> Played:
    """The task first_line, or that of another index, by these commands."""
    turns = [GivenTurn("", [call(command)]) for command in commands]
    async with await EnvironmentHost.start(folder) as host:
        return await play(host, Task("train", index), [*turns, "It is done."], repeat=False)


# -- in our sandbox --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        ([DOES_IT], 1),
        (["cat /app/poem.txt", f"cd /tmp && {DOES_IT}", "ls"], 1),
        (["head -n 1 poem.txt > first.txt"], 1),
        (["tail -n 1 /app/poem.txt > /app/first.txt"], 0),
        (["mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"], 0),
        (["rm -rf /logs /tests; ln -s /app /logs; ln -s /app /tests; mkdir -p /app/verifier"], 0),
        (["mkdir -p ~/bin; (while true; do echo 1 > /logs/verifier/reward.txt; done) &"], 0),
    ],
)
async def test_the_tests_of_a_task_say_what_was_reached(commands: list[str], reward: int) -> None:
    result = await played(TERMINAL, *commands)
    assert (result.score.reward, result.score.success) == (reward, reward == 1)


@pytest.mark.slow
@pytest.mark.linux
async def test_what_the_model_sees_are_the_paths_of_the_image() -> None:
    result = await played(TERMINAL, "pwd; cat /app/missing; ls /app; env", "sleep 1; exit 3")
    said = "\n".join(str(message["content"]) for message in result.replies)
    assert "/app\ncat: /app/missing: No such file" in said and "poem.txt" in said and "[exit code 3]" in said
    assert "OPENAI" not in said


@pytest.mark.slow
@pytest.mark.linux
async def test_episodes_at_once_see_nothing_of_each_other() -> None:
    look = "find /app /tmp /logs /solution /tests -name 'left*'; cat /tmp/left"
    async with await EnvironmentHost.start(TERMINAL) as host:
        leaves = [GivenTurn("", [call("echo 7 > /app/left; echo 7 > /tmp/left; sleep 2")]), "Done."]
        looks = [GivenTurn("", [call(f"sleep 1; {look}")]), "Done."]
        both = [play(host, Task("train", 1), turns, repeat=False) for turns in (leaves, looks)]
        _, other = await asyncio.gather(*both)
        (after,) = [await play(host, Task("train", 1), looks, repeat=False)]
    for result in (other, after):
        assert "cat: /tmp/left: No such file" in str(result.replies) and "app/left" not in str(result.replies)


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("tests/test.sh", "echo broken", "the tests wrote no reward.*They printed: broken"),
        ("tests/test.sh", "echo much > /logs/verifier/reward.txt", "could not convert string to float"),
        ("tests/test.sh", "echo nan > /logs/verifier/reward.txt", "it is nan"),
        ("task.toml", "[verifier]\ntimeout_sec = 0.01", "TimeoutError: the tests took longer than 0.01 s"),
        ("task.toml", "[agent]\ntimeout_sec = 0.01", "TimeoutError: the agent took longer than 0.01 s"),
    ],
)
async def test_tests_that_cannot_say_drop_the_rollout(example: Path, file: str, text: str, says: str) -> None:
    (example / "tasks/train/first_line" / file).write_text(text)
    with pytest.raises(EnvironmentFault, match=f"(?s){says}"):
        await played(example, DOES_IT)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("task.toml", "[environment]\ngpus = 1", "task.toml asks for environment.gpus"),
        ("task.toml", "[environment]\nallow_internet = true", "asks for the network .*flash-mcp gateway"),
        ("task.toml", "[environment]\nworkdir = '/srv'", "its files are in /srv"),
        ("task.toml", "[[steps]]\nname = 'one'", "task.toml asks for steps"),
        ("task.toml", "[environment", "is no task"),
        ("instruction.md", None, "is no task"),
        ("tests/test.sh", None, "it has no tests/test.sh"),
        ("environment/Dockerfile", "FROM ubuntu:24.04", "its image needs `FROM ubuntu:24.04`"),
        ("environment/Dockerfile", "FROM python:3.12\nRUN apt-get update", "RUN apt-get update.*flash-mcp gateway"),
        ("environment/Dockerfile", "FROM python\nCOPY ../tests /app/", "COPY ../tests"),
        ("environment/Dockerfile", "FROM python\nCOPY missing.txt /app/", "COPY missing.txt"),
        ("environment/Dockerfile", "FROM python\nCOPY --from=other x /app/", "COPY --from=other"),
        ("environment/Dockerfile", "FROM python\nWORKDIR /srv/site", "its files are in /srv/site"),
        ("environment/Dockerfile", "FROM python\nCOPY poem.txt /etc/poem", "its files are in /etc/poem"),
    ],
)
def test_what_a_task_asks_for_and_cannot_have_is_named(example: Path, file: str, text: str | None, says: str) -> None:
    path = example / "tasks/train/first_line" / file
    path.write_text(text) if text is not None else path.unlink()
    with pytest.raises((DatasetError, UnsupportedError), match=f"first_line.*{says}"):
        harbor.load(example / "tasks")


def test_the_folders_of_an_image_are_led_to_those_of_an_episode() -> None:
    root = Path("/scratch/one")
    led = {
        "cat /app/a > /tmp/b": "cat /scratch/one/app/a > /scratch/one/tmp/b",
        "/app": "/scratch/one/app",
        'x="/tests"; ls ./app /app-2 /usr/app': 'x="/scratch/one/tests"; ls ./app /app-2 /usr/app',
        "/application": "/application",
        "curl http://app/logs": "curl http://app/logs",
    }
    assert {text: terminal.inward(text, root) for text in led} == led


@pytest.mark.long
@pytest.mark.linux
async def test_the_example_passes_the_gate() -> None:
    report = await check(TERMINAL, deadline_s=600)
    assert report.passed, [each for each in report.probes if each.passed is False]


# -- the loop --------------------------------------------------------------------------------------


def test_a_long_session_goes_on_in_a_new_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "COMPACT_CHARACTERS", 1000)
    asked: list[list[dict[str, Any]]] = []

    def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        asked.append(list(messages))
        if len(asked) == 4:
            raise terminal.ModelRefused('{"error": {"code": "context_length_exceeded"}}')
        if len(asked) == 6:
            raise terminal.ModelRefused('{"error": {"code": "rate_limit_exceeded"}}')
        return {"role": "assistant", "tool_calls": [call(f"step {len(asked)}"), call("") | {"id": "c2"}]}

    terminal.solve("Do it.", lambda command: f"{command} {'.' * 150}", ask)
    assert [len(messages) for messages in asked] == [2, 5, 8, 3, 3, 6]
    assert all(messages[:2] == asked[0] for messages in asked)
    assert "$ step 1" in asked[3][2]["content"] and "$ step 3" in asked[4][2]["content"]


def test_a_call_that_is_none_is_answered() -> None:
    answers = [{"tool_calls": [{"id": "1", "function": {"arguments": given}}]} for given in ("[", '{"cmd": 1}', "7")]
    said: list[dict[str, Any]] = []

    def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        said[:] = messages
        return answers.pop(0) if answers else {"content": "Done."}

    terminal.solve("Do it.", str.upper, ask)
    assert [each["content"] for each in said if each.get("role") == "tool"] == [
        'error: call bash with {"command": TEXT}'
    ] * 3


# -- in a container --------------------------------------------------------------------------------

IMAGE = "localhost/plain:1"  # A Python with bash, where a machine has one for its docker or podman
ENGINE = f"""#!{sys.executable}
# The words that are used of docker and podman. A container is a folder.
import os, subprocess, sys, tempfile
from pathlib import Path
from environments.agents.harbor import _copy
from environments.agents.terminal import inward

word, *words = sys.argv[1:]
if word == "run":
    root = Path(tempfile.mkdtemp())
    _copy(Path({str(LARGEST)!r}) / "environment", root / "app", root)
    print(root)
elif word == "cp":
    source, to = (part.partition(":")[0] + part.partition(":")[2] for part in words)
    _copy(Path(source), Path(to), Path(words[1].partition(":")[0]))
elif word == "exec":
    at = next(at for at, part in enumerate(words) if not part.startswith("--env="))
    root = Path(words[at])
    done = subprocess.run([inward(part, root) for part in words[at + 1 :]], cwd=root / "app")
    sys.exit(done.returncode)
"""


class Model(BaseHTTPRequestHandler):
    """Asks for one command, and is content with what it printed."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message: dict[str, Any] = {"role": "assistant", "content": "It is done."}
        if asked["messages"][-1]["role"] == "user":
            message["tool_calls"] = [call("ls -S /app/parts | head -n 1 > /app/largest.txt")]
        body = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize("engine", ["a stand-in", "docker", "podman"])
def test_a_container_plays_a_task_and_its_tests(engine: str, example: Path, tmp_path: Path) -> None:
    """As `flash-mcp gateway` starts it. Real engines where they are and have the image."""
    if engine == "a stand-in":
        engine = str(tmp_path / "engine")
        Path(engine).write_text(ENGINE)
        Path(engine).chmod(0o755)
    elif not shutil.which(engine) or subprocess.run([engine, "image", "exists", IMAGE], check=False).returncode:
        pytest.skip(f"there is no {engine} with {IMAGE}")
    else:
        (example / "tasks/eval/largest_file/environment/Dockerfile").write_text(
            f"FROM {IMAGE}\nWORKDIR /app\nCOPY . /app/\n"
        )
    reward = tmp_path / "reward.json"
    command = [sys.executable, "-m", "environments.agents.harbor", engine, str(example / "tasks")]
    task = json.dumps({"task_id": "largest_file", "split": "eval", "messages": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k", "MODEL": "m", "FLASH_REWARD_FILE": str(reward)}
        subprocess.run(command, input=task, text=True, check=True, timeout=WAIT_S, env={**os.environ, **variables})
        server.shutdown()
    assert json.loads(reward.read_text()) == {"score": 1.0, "success": True}
