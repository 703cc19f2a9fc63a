"""A supervisor that holds the lock and does nothing, or is of another version."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.state.sqlite import sqlite3
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor import process
from flash_mcp.supervisor.process import LockOwner, ensure_supervisor, take_lock, unfit
from flash_mcp.tools.shared import machine
from flash_mcp.tools.shared.waiting import obstacle
from tests.places import ROOT
from tests.supervisor.test_ensure import end_supervisors, waiting_run
from tests.waiting import WAIT_S, wait_for
from tests.watch import is_running

__all__ = ["waiting_run"]
HOLD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from flash_mcp.supervisor.process import LockOwner, Ticker, take_lock
base = Path(sys.argv[1])
lock = take_lock(base)
replace(LockOwner.current(is_foreground=sys.argv[2] == "True"), version=sys.argv[3]).write(lock)
ticker = Ticker(base)
while True:
    ticker()
    time.sleep(0.05)
"""


@pytest.fixture
def holders(flash_home: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    flash_home.mkdir(exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for holder in started:
        holder.kill()
        holder.wait()


def hold(base: Path, holders: list[subprocess.Popen[bytes]], version: str, *, is_foreground: bool = False) -> LockOwner:
    """A process that holds the lock as a supervisor of that version does."""
    command = [sys.executable, "-c", HOLD, str(base), str(is_foreground), version]
    holders.append(subprocess.Popen(command, cwd=ROOT))
    wait_for(lambda: (found := LockOwner.read(base)) and found.silent_s(base) < 1 and found.boot)
    found = LockOwner.read(base)
    assert found
    return found


@pytest.mark.slow
def test_a_stopped_supervisor_is_told_and_replaced(flash_home: Path, waiting_run: Run, monkeypatch: pytest.MonkeyPatch):
    store = open_store()
    process.ensure_supervised(store)
    wait_for(lambda: LockOwner.read(flash_home))
    stopped = LockOwner.read(flash_home)
    assert stopped and not unfit(flash_home) and not ensure_supervisor(flash_home)
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setattr(process, "SILENT_S", 2.0)
    wait_for(lambda: unfit(flash_home))
    level, detail, fix = machine.supervisor()
    assert level == "problem" and f"pid {stopped.pid}" in detail and "supervise" in fix
    assert "has done nothing" in str(obstacle(store))
    process.ensure_supervised(store)
    assert not is_running(stopped.pid)
    wait_for(lambda: LockOwner.read(flash_home) not in (None, stopped))
    assert not unfit(flash_home) and machine.supervisor()[0] == "ok"
    end_supervisors(flash_home)


def test_one_that_ticks_is_no_silent_one_however_long_it_has_run(
    flash_home: Path, holders: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = hold(flash_home, holders, process.__version__)
    monkeypatch.setattr(process, "SILENT_S", 5.0)
    since = replace(holder, since=time.monotonic() - 1000)
    wait_for(lambda: since.silent_s(flash_home) < 5)
    assert not ensure_supervisor(flash_home)
    assert holders[0].poll() is None


@pytest.mark.slow
def test_one_whose_work_does_not_go_on_stops_ticking(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flash_home.mkdir()
    monkeypatch.setattr(process, "TICK_EVERY_S", 0.01)
    here = LockOwner.current()
    ticker = process.Ticker(flash_home)
    try:
        began = time.monotonic()
        wait_for(lambda: process._ticked(flash_home, here.pid) > began + 0.3)  # without a call
        monkeypatch.setattr(process, "LONGEST_TICK_S", 0.0)
        wait_for(lambda: here.silent_s(flash_home) > 0.5)
    finally:
        ticker.close()


def test_a_process_that_was_given_the_pid_of_a_silent_supervisor_is_left_alone(flash_home: Path) -> None:
    flash_home.mkdir()
    lock = take_lock(flash_home)
    assert lock
    with lock, subprocess.Popen(["/bin/sleep", "100"]) as other:
        ticks = process.started_ticks(other.pid)
        assert ticks
        here = replace(LockOwner.current(), pid=other.pid, since=0.0)
        for started in (ticks, ticks - 1):  # it holds no lock file; it started later
            replace(here, started_ticks=started).write(lock)
            found = unfit(flash_home)
            assert found and found.hangs and not found.may_be_killed
            assert not ensure_supervisor(flash_home)
            replace(here, started_ticks=started).kill(flash_home)
        assert other.poll() is None
        other.kill()


@pytest.mark.slow
def test_a_healthy_one_in_a_terminal_is_told_and_stays(flash_home: Path, holders: list[subprocess.Popen[bytes]]):
    holder = hold(flash_home, holders, "0.0.1", is_foreground=True)
    assert not ensure_supervisor(flash_home)
    level, detail, fix = machine.supervisor()
    assert (level, f"end process {holder.pid}" in fix) == ("warning", True)
    assert "version 0.0.1" in detail
    command = [sys.executable, "-m", "flash_mcp.cli", "supervise"]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 1 and "version 0.0.1" in second.stderr
    assert obstacle(open_store()) is None and holders[0].poll() is None


@pytest.mark.slow
def test_a_stopped_one_in_a_terminal_is_replaced(flash_home: Path, holders: list[subprocess.Popen[bytes]], monkeypatch):
    os.kill(hold(flash_home, holders, process.__version__, is_foreground=True).pid, signal.SIGSTOP)
    monkeypatch.setattr(process, "SILENT_S", 0.5)
    wait_for(lambda: unfit(flash_home))
    assert process.replace_unfit(flash_home)
    assert holders[0].wait(WAIT_S) == -signal.SIGKILL


def test_a_newer_one_is_told_and_stays(flash_home: Path, holders: list[subprocess.Popen[bytes]]) -> None:
    hold(flash_home, holders, "99.0")
    assert not ensure_supervisor(flash_home)
    level, detail, fix = machine.supervisor()
    assert (level, "version 99.0" in detail, "newer version" in fix) == ("warning", True, True)
    assert holders[0].poll() is None


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(flash_home: Path) -> None:
    store = open_store()
    store.close()
    with sqlite3.connect(store.path) as database:
        database.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('flash_mcp', 'from_the_future', '')"
        )
    database.close()
    before = store.path.read_bytes()
    with pytest.raises(FlashError, match="state_newer") as caught:
        Store(flash_home)
    assert caught.value.values["unknown"] == ["from_the_future"]
    assert "install that version or a newer one" in caught.value.fix
    assert store.path.read_bytes() == before
