"""What befalls a state directory from outside: each is a clear state with a coded error, and nothing is lost by it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import queue
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor import secrets
from flash_mcp.supervisor.attempt import Reader
from flash_mcp.supervisor.loop import supervise
from flash_mcp.supervisor.process import LockOwner, ensure_supervisor
from flash_mcp.tools import status
from flash_mcp.tools.registry import TOOLS
from tests.damage import DAMAGES
from tests.grids import thinned
from tests.samples import finished_run, push_echo
from tests.supervisor.test_loop import HASTE, Bench, bench, start_supervisor
from tests.waiting import WAIT_S, wait_for
from tests.watch import is_running

pytestmark = pytest.mark.slow

__all__ = ["bench"]
DAY_S = 86_400.0


# -- a database that another program locks ---------------------------------------------------------


def test_a_supervisor_waits_while_another_program_locks_the_database(bench: Bench, monkeypatch, caplog):
    monkeypatch.setattr("flash_mcp.state.database.BUSY_TIMEOUT_S", 0.2)
    run = bench.train({"steps": 12, "1": {"at": 11, "do": "hold"}})
    thread = threading.Thread(target=bench.new_supervisor().run)
    thread.start()
    wait_for(lambda: bench.step(run) >= 2)
    code = """import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
other.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()"""
    command = [sys.executable, "-c", code, str(bench.store.path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin and other.stdout and other.stdout.readline()
    wait_for(lambda: bench.step(run) == 11 and "state_busy" in caplog.text)  # the worker does not even notice
    with pytest.raises(FlashError, match="state_busy"):
        Store(bench.base).add_environment(name="other", digest="0", path="/", size_bytes=0)
    other.communicate()
    Path(run.folder, "go").touch()
    thread.join(40)
    ended = bench.store.run(run.id)
    assert (ended.state, ended.attempt) == ("succeeded", 1)
    assert [row.step for row in bench.store.metrics(run.id)] == list(range(1, 13))


def test_a_supervisor_starts_while_another_program_locks_the_database(bench: Bench, monkeypatch, caplog):
    monkeypatch.setattr("flash_mcp.state.database.BUSY_TIMEOUT_S", 0.05)
    run = bench.train({"steps": 1})
    ended: list[bool] = []
    with bench.store.transaction():
        starting = threading.Thread(
            target=lambda: ended.append(supervise(bench.base, lambda _: bench.new_supervisor()))
        )
        starting.start()
        wait_for(lambda: "state_busy" in caplog.text)
    starting.join(40)
    assert ended == [True]
    assert bench.store.run(run.id).state == "succeeded"


def test_a_supervisor_takes_secrets_once_what_prevented_it_is_gone(bench: Bench, caplog: pytest.LogCaptureFixture):
    """A folder under the socket's name prevents it, as a full disk does."""
    (bench.base / secrets.NAME).mkdir()
    run = bench.train({"steps": 1}, secrets=["CALC_KEY_THAT_NOBODY_SET"])
    thread = threading.Thread(target=lambda: supervise(bench.base, lambda _: bench.new_supervisor()))
    thread.start()
    wait_for(lambda: "no secrets can be taken" in caplog.text)
    (bench.base / secrets.NAME).rmdir()
    assert secrets.give(bench.base, run.id, {"CALC_KEY_THAT_NOBODY_SET": "42"})
    thread.join(40)
    assert bench.store.run(run.id).state == "succeeded" and not (bench.base / secrets.NAME).exists()


# -- a clock that jumps ----------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_a_clock_that_jumps_neither_ends_nor_delays_a_run(bench: Bench, monkeypatch: pytest.MonkeyPatch, jump_s: float):
    real = time.time
    run = bench.train({"steps": 4, "1": {"at": 2, "do": "hold"}, "2": {"at": 3, "do": "hold"}})
    bench.until(lambda: bench.step(run) == 2)
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    for _ in range(10):
        bench.supervisor.tick()
    assert bench.store.run(run.id).attempt == 1 and is_running(bench.pid(run))
    monkeypatch.undo()  # and back, while the run waits for its second attempt
    bench.supervisor.launcher.cancel(bench.supervisor._attempts[run.id].handle)
    monkeypatch.setattr(time, "time", lambda: real() - jump_s)
    bench.until(lambda: bench.step(run, attempt=2) == 3)
    Path(run.folder, "go").touch()
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("succeeded", 2)
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3, 4]


def test_a_retry_is_not_put_off_by_a_clock_that_was_set_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.train()
    claimed = queue.claim(bench.store)
    assert claimed and queue.requeue(bench.store, run.id, 1, FlashError("worker_failed", "lost"), delay_s=30)
    assert queue.claim(bench.store) is None
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - DAY_S)
    again = queue.claim(bench.store)
    assert again and again.attempt == 2


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_a_cancelled_run_has_its_grace_whatever_the_clock_says(bench: Bench, monkeypatch, jump_s: float):
    run = bench.held(do="stall")
    queue.request_cancel(bench.store, run.id)
    real, began = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert bench.finish(run).state == "cancelled"
    assert time.monotonic() - began > HASTE.cancel_grace_s


# -- a machine that is paused ---------------------------------------------------------------------


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_pause_of_the_machine_is_no_silence_of_the_attempt(bench: Bench, monkeypatch, is_cancelled: bool):
    supervisor = bench.new_supervisor(cancel_grace_s=20.0)
    run = bench.held({"steps": 4}, supervisor=supervisor, stall_timeout_s=60.0)
    worker = bench.worker(run)
    os.kill(worker, signal.SIGSTOP)  # it wakes after the supervisor has, and hears of a cancel then
    if is_cancelled:
        queue.request_cancel(bench.store, run.id)
    supervisor.tick()
    real = time.monotonic
    monkeypatch.setattr("flash_mcp.supervisor.process.time.monotonic", lambda: real() + 130)
    for _ in range(3):
        supervisor.tick()
    os.kill(worker, signal.SIGCONT)
    Path(run.folder, "go").touch()
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt) == ("cancelled" if is_cancelled else "succeeded", 1)


def test_a_supervisor_and_a_worker_that_were_stopped_go_on(bench: Bench) -> None:
    run = bench.train({"steps": 4, "1": {"at": 2, "do": "hold"}})
    supervisor = start_supervisor(bench, beat_silent_s=4.0, max_gap_s=0.5)
    wait_for(lambda: bench.store.run(run.id).step == 2)
    for act in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (supervisor.pid, bench.worker(run)):
            os.kill(pid, act)
        if act == signal.SIGSTOP:
            time.sleep(6)  # longer than the supervisor waits for a silent attempt
    Path(run.folder, "go").touch()
    wait_for(lambda: bench.store.run(run.id).ended)
    ended = bench.store.run(run.id)
    assert (ended.state, ended.attempt) == ("succeeded", 1)
    assert supervisor.wait(WAIT_S) == 0


# -- damage on the disk ----------------------------------------------------------------------------


def test_a_damaged_database_is_named_and_the_runs_can_be_read_from_their_folders(flash_home: Path, tmp_path: Path):
    run = finished_run(tmp_path)
    store = open_store()
    store.query("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    with store.path.open("r+b") as stream:
        size = stream.seek(0, 2)
        for page in range(1, size // 4096):
            stream.seek(page * 4096)
            stream.write(b"\xa5" * 4096)
    damaged = Store.__new__(Store)
    with pytest.raises(FlashError, match="state_corrupt") as caught:
        damaged.__init__(flash_home)
        status.report_on(damaged, run.id)
    assert "flash-mcp recover" in caught.value.fix
    with pytest.raises(FlashError, match="state_corrupt"):
        store.check()
    # The folders hold it all: a new database takes it in.
    fresh = Store(tmp_path / "fresh")
    Reader(fresh, run.id, RunFolder(run.folder)).read(now=True)
    assert len(fresh.metrics(run.id)) == 20 and [row.step for row in fresh.checkpoints(run.id)] == [10, 20]


def test_a_damaged_checkpoint_is_passed_over_by_the_next_attempt_and_refused_by_deploy(bench: Bench) -> None:
    from flash_mcp.state.serving import request  # noqa: PLC0415

    script = {"steps": 6, "1": {"at": 5, "do": "hold"}, "2": {"at": 5, "do": "hold"}}
    run = bench.train(script, keep_checkpoints=9)
    bench.until(lambda: bench.step(run) == 5 and len(bench.store.checkpoints(run.id)) == 4)
    folder = RunFolder(run.folder)
    Path(folder.checkpoints.verify(4)["path"], "adapter.bin").write_bytes(b"\0" * 64)
    with pytest.raises(FlashError, match="checkpoint_corrupt"):
        request(bench.store, run.id, step=4)
    bench.supervisor.launcher.cancel(bench.supervisor._attempts[run.id].handle)

    def resumed() -> list[int]:  # a beat is seen before what was written ahead of it is read in
        return [event.data["resumed"] for event in bench.store.events(run.id, kinds=["phase"])]

    bench.until(lambda: bench.step(run, attempt=2) == 5 and len(resumed()) == 2)
    assert resumed() == [0, 3]
    Path(run.folder, "go").touch()
    assert bench.finish(run).state == "succeeded"
    assert [folder.checkpoints.verify(step)["step"] for step in range(1, 7)] == list(range(1, 7))


# -- a supervisor that does not start --------------------------------------------------------------


def test_a_supervisor_that_is_killed_while_it_starts_is_started_again(bench: Bench, tmp_path: Path, monkeypatch):
    script = f'if mkdir {tmp_path}/once; then kill -9 $$; fi 2>/dev/null; exec "{sys.executable}" -P -m "$@"'
    monkeypatch.setattr("flash_mcp.supervisor.process.PYTHON", ("/bin/sh", "-c", script, "sh"))
    monkeypatch.setattr("flash_mcp.supervisor.process.START_TIMEOUT_S", 5.0)
    monkeypatch.setattr("flash_mcp.supervisor.process.STARTS", 8)
    assert ensure_supervisor(bench.base)
    wait_for(lambda: LockOwner.read(bench.base))
    holder = LockOwner.read(bench.base)
    assert holder
    os.kill(holder.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(holder.pid))


def test_train_returns_its_run_even_where_no_supervisor_can_be_started(flash_home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("flash_mcp.supervisor.process.START_TIMEOUT_S", 0.2)
    monkeypatch.setattr("flash_mcp.supervisor.process.PYTHON", ("/no/such/python",))
    push_echo(tmp_path / "echo")
    answer = asyncio.run(TOOLS["train"].function(environment="echo"))
    assert (answer.state, answer.created) == ("queued", True)
    assert "supervisor.log" in answer.next and answer.run_id in answer.next
    assert [run.id for run in open_store().runs()] == [answer.run_id]


FILES = {
    "beat.json": "beat.json", "job.json": "job.json", "metrics": "metrics/1.1.json", "rollouts": "rollouts/1.1.jsonl",
    "events": "events/0001-000000.json", "manifest": "checkpoints/2/1-2/MANIFEST.json",
}  # fmt: skip


def warnings_of(bench: Bench, run: Run) -> list[str]:
    return [event.message for event in bench.store.events(run.id, 99, ["warning"])]


@pytest.mark.parametrize(("file", "damage"), thinned([*FILES], [*DAMAGES]))
def test_a_damaged_file_counts_as_absent_and_the_next_attempt_ends_the_run(bench: Bench, file: str, damage: str):
    name = FILES[file]
    run = bench.train({"steps": 4, "1": {"at": 3, "do": "hold"}})
    bench.supervisor.tick()
    wait_for(lambda: bench.step(run) == 3)
    bench.kill(run)
    DAMAGES[damage](Path(run.folder, name))
    Path(run.folder, "go").touch()
    ended = bench.finish(run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 4)
    steps = [row.step for row in bench.store.metrics(run.id)]
    assert steps == ([2, 3, 4] if name == FILES["metrics"] else [1, 2, 3, 4])
    assert [row.step for row in bench.store.checkpoints(run.id)] == [1, 2, 3, 4]
    is_written_again = name in ("job.json", FILES["manifest"])
    told = any(name in warning for warning in warnings_of(bench, run))
    assert told or is_written_again or (name, damage) == (FILES["rollouts"], "empty")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_written_anew_and_a_cancelled_run_with_a_damaged_beat_ends(bench: Bench, damage: str):
    run = bench.train({"steps": 2})
    bench.supervisor.tick()
    wait_for(lambda: RunFolder(run.folder).result())
    wait_for(lambda: not is_running(bench.pid(run)))
    DAMAGES[damage](Path(run.folder, "result.1.json"))
    ended = bench.finish(run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 2)
    assert any("result.1.json is damaged" in warning for warning in warnings_of(bench, run))
    run = bench.held()
    os.kill(bench.worker(run), signal.SIGSTOP)
    DAMAGES[damage](Path(run.folder, "beat.json"))
    queue.request_cancel(bench.store, run.id)
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("cancelled", 1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_run_whose_folder_cannot_be_made_fails_with_the_evidence_and_lets_others_pass(
    bench: Bench, is_cancelled: bool
) -> None:
    supervisor = bench.new_supervisor(trouble_s=0.2)
    run, other = bench.train(max_attempts=2), bench.train({"steps": 1})
    Path(run.folder).parent.mkdir()
    Path(run.folder).write_text("a file in its place")
    supervisor.tick()
    if is_cancelled:
        queue.request_cancel(bench.store, run.id)
    ended = bench.finish(run, supervisor=supervisor)
    if is_cancelled:
        assert (ended.state, ended.attempt, ended.error) == ("cancelled", 1, None)
    else:
        assert (ended.state, ended.attempt) == ("failed", 2)
        assert ended.error and "trouble with attempt 2 that did not pass" in ended.error["what"]
        assert run.folder in ended.error["what"]
    assert bench.finish(other, supervisor=supervisor).state == "succeeded"


def test_trouble_that_does_not_pass_replaces_the_attempt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = bench.new_supervisor(trouble_s=0.2)
    run = bench.held({"steps": 3}, supervisor=supervisor)
    monkeypatch.setattr(supervisor._attempts[run.id].folder, "beat", lambda: 1 / 0)
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt) == ("succeeded", 2)
    lost = bench.store.events(run.id, 99, ["attempt"])[1]
    assert lost.name == "0001-lost" and "ZeroDivisionError" in lost.message


def test_a_full_disk_is_no_trouble_of_an_attempt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = bench.new_supervisor(trouble_s=0.0)
    run = bench.train({"steps": 1})
    full = OSError(28, "No space left on device")

    def no_space(_: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(supervisor.launcher, "submit", no_space)
        for _ in range(5):
            supervisor.tick()
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt) == ("succeeded", 1)
