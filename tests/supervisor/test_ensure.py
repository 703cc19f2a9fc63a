"""A supervisor that was killed is started again while agents only read."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flash_mcp import __version__
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import process, secrets
from flash_mcp.supervisor.process import LockOwner, is_supervised
from tests.places import ROOT
from tests.ports import free_port
from tests.samples import finished_run, queued_run
from tests.supervisor.test_loop import supervisors
from tests.waiting import WAIT_S, wait_for


@pytest.fixture
def waiting_run(flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run that no supervisor can claim: nobody has its second secret."""
    for name in ("KNOWN_KEY", "UNKNOWN_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield queued_run(tmp_path / "environment", secrets=["KNOWN_KEY", "UNKNOWN_KEY"])
    end_supervisors(flash_home)


def end_supervisors(base: Path) -> None:
    for one in supervisors(base):
        one.kill()
    wait_for(lambda: not is_supervised(base))


@pytest.mark.slow
def test_it_starts_what_was_killed_and_hands_secrets_over(flash_home: Path, waiting_run: Run, monkeypatch):
    with process.supervised(every_s=0.05):
        wait_for(lambda: is_supervised(flash_home))
        end_supervisors(flash_home)
        wait_for(lambda: is_supervised(flash_home))
        monkeypatch.setenv("KNOWN_KEY", "value")
        names = waiting_run.spec.secrets
        wait_for(lambda: secrets.lacking(flash_home, waiting_run.id, names) == ["UNKNOWN_KEY"])


def test_it_starts_nothing_where_nothing_is_to_be_done(flash_home: Path, tmp_path: Path) -> None:
    finished_run(tmp_path)
    process.ensure_supervised(open_store())
    assert not is_supervised(flash_home) and not (flash_home / "supervisor.log").exists()


def test_it_goes_on_after_trouble_and_tells_it_once(waiting_run: Run, monkeypatch, caplog: pytest.LogCaptureFixture):
    tried: list[Path] = []

    def fail(base: Path) -> bool:
        tried.append(base)
        raise FlashError("internal", "the supervisor did not start")

    monkeypatch.setattr(process, "ensure_supervisor", fail)
    with process.supervised(every_s=0.01):
        wait_for(lambda: len(tried) >= 3)
    assert caplog.text.count("no supervisor could be started: [internal] the supervisor did not start") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_server_starts_one_without_being_asked(flash_home: Path, waiting_run: Run, transport: str) -> None:
    command = [sys.executable, "-m", "flash_mcp.cli", "serve"]
    if transport == "http":
        command += ["--http", "--port", str(free_port())]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as server:
        wait_for(lambda: is_supervised(flash_home))
        server.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["wait {}", "logs {} --follow", "gateway {} -- true"])
def test_waiting_for_a_run_starts_one(flash_home: Path, waiting_run: Run, tmp_path: Path, words: str) -> None:
    (tmp_path / "environment" / "environment.toml").write_text("gateway = true\n")
    command = [sys.executable, "-m", "flash_mcp.cli", *words.format(waiting_run.id).split()]
    with subprocess.Popen(command, cwd=ROOT) as waiting:
        wait_for(lambda: is_supervised(flash_home))
        waiting.terminate()


def test_a_process_that_is_not_the_supervisor_is_left_alone(flash_home: Path) -> None:
    """The lock names the process of an old version, whose number is another program's by now."""
    flash_home.mkdir()
    with subprocess.Popen(["/bin/sleep", "100"]) as other, (flash_home / process.LOCK).open("a+") as held:
        LockOwner(other.pid).write(held)
        lock = process.take_lock(flash_home)
        assert lock
        with lock:
            assert is_supervised(flash_home) and not process.ensure_supervisor(flash_home)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(("version", "is_older"), [("", True), ("0.0.9", True), (__version__, False), ("99.0", False)])
def test_only_an_older_version_is_replaced(version: str, is_older: bool) -> None:
    assert LockOwner(1, version).is_older() == is_older


STARTER = """
import os, subprocess, sys, threading
from flash_mcp.supervisor.process import PYTHON

def start():
    command = [*PYTHON, "flash_mcp.supervisor.tied", str(os.getpid()), "sleep", "1000"]
    print(subprocess.Popen(command).pid, flush=True)
    threading.Event().wait()

threading.Thread(target=start).start()
"""


def test_a_program_ends_with_the_process_whose_thread_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        program = psutil.Process(int(starter.stdout.readline()))
        wait_for(lambda: program.cmdline() == ["sleep", "1000"])
        starter.kill()
        program.wait(WAIT_S)
