"""The suites and agents of scripts/test-clients, and servers for them to talk to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.ports import is_answered
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv" / "clients"
PROGRAMS = INSTALLED / "node_modules" / ".bin"
INSPECTOR = PROGRAMS / "mcp-inspector"
START_TIMEOUT_S = 60
SERVE = (str(Path(sys.executable).with_name("flash-mcp")), "serve")


def needs(program: Path) -> pytest.MarkDecorator:
    """Skip where scripts/test-clients has not installed a program."""
    return pytest.mark.skipif(not program.exists(), reason=f"scripts/test-clients installs {program.name}")


def node_path() -> dict[str, str]:
    """PATH with the node of scripts/test-clients first."""
    return {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"}


def run(command, *, timeout_s=120, environment=None, cwd=ROOT) -> subprocess.CompletedProcess[str]:
    """A client's command with its output, and nothing to read; its processes end with it."""
    environment = {**os.environ, **node_path()} if environment is None else environment
    with subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def server_environment() -> dict[str, str]:
    """What the server needs of ours: clients start it with little of their own."""
    names = ("FLASH_HOME", "FLASH_MODELS", "PATH", "HOME")
    return {name: os.environ[name] for name in names if name in os.environ}


def each(option: str, values: Iterable[str]) -> list[str]:
    """`option` before each of `values`."""
    return [word for value in values for word in (option, value)]


def inspect(*words: str) -> subprocess.CompletedProcess[str]:
    """What the inspector makes of our server on its stdin and stdout."""
    variables = each("-e", [f"{name}={value}" for name, value in server_environment().items()])
    return run([INSPECTOR, "--cli", *SERVE, *variables, *words, "--format", "json"])


@contextmanager
def listening(command: Sequence[str], port: int, folder: Path) -> Generator[str]:
    """A server's process with its state in `folder`, once it listens on `port` of loopback; its address."""
    log, environment = folder / "log", {**os.environ, "FLASH_HOME": str(folder / "home")}
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream) as process,
    ):
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_answered(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(WAIT_S)
