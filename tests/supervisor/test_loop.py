"""The supervisor with real worker processes that speak the run-folder protocol, and are really killed and stopped."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flash_mcp import __version__
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.store import Store
from flash_mcp.supervisor import attempt as attempts
from flash_mcp.supervisor.attempt import Reader, Timeouts
from flash_mcp.supervisor.launch.base import Handle, JobStatus
from flash_mcp.supervisor.launch.local import LocalLauncher, ProcessRecord
from flash_mcp.supervisor.loop import Supervisor, supervise
from flash_mcp.supervisor.process import PYTHON, LockOwner, ensure_supervisor, is_supervised
from flash_mcp.supervisor.secrets import give
from flash_mcp.tools.shared.run_view import report_on
from tests.forked import fork_of
from tests.memory_launcher import MemoryLauncher
from tests.places import TESTS
from tests.scale.simulation import Simulation
from tests.waiting import wait_for
from tests.watch import is_running

pytestmark = pytest.mark.slow

WORKER = (sys.executable, str(TESTS / "scripted_worker.py"))
HASTE = Timeouts(
    poll_s=0.02, beat_stale_s=0.3, beat_silent_s=30.0, cancel_grace_s=1.0, leave_s=0.5, retry_delay_s=0.01,
    idle_exit_s=0.2,
)  # fmt: skip
TIMEOUT_S = 120.0


class Bench:
    """A state directory, a supervisor that is ticked by hand, and runs whose worker follows a script."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = Store(base)
        self.supervisor = self.new_supervisor()

    def new_supervisor(self, launcher: LocalLauncher | None = None, **timeouts: float) -> Supervisor:
        timing = Timeouts(**{**HASTE.__dict__, **timeouts})
        launcher = launcher or LocalLauncher(self.base / "attempts", gpus=[])
        return Supervisor(self.base, launcher=launcher, worker=WORKER, timeouts=timing)

    def train(self, script: dict[str, Any] | None = None, **fields: Any) -> Run:
        environment = self.store.add_environment(name="calc", digest="abcdef123456", path="/e", size_bytes=1)
        spec = RunSpec(environment="calc", environment_args=script or {}, **fields)
        nobody = {"client": ""}  # no client has variables to give
        return queue.enqueue(self.store, resolve(spec), environment, lineage=nobody)[0]

    def held(
        self,
        script: dict[str, Any] | None = None,
        *,
        at: int = 2,
        do: str = "hold",
        supervisor: Supervisor | None = None,
        **fields: Any,
    ) -> Run:
        """A run whose first attempt has come to step `at`, where it does what `do` names."""
        run = self.train({**(script or {}), "1": {"at": at, "do": do}}, **fields)
        self.until(lambda: self.step(run) == at, supervisor=supervisor)
        return run

    def until(self, condition: Callable[[], object], *, supervisor: Supervisor | None = None) -> None:
        """Tick until the condition holds, and once more: the store has by then what the condition saw in a folder."""
        tick = (supervisor or self.supervisor).tick
        wait_for(condition, TIMEOUT_S, tick=tick, evidence=lambda: [vars(run) for run in self.store.runs()])
        tick()

    def finish(self, run: Run, *, supervisor: Supervisor | None = None) -> Run:
        self.until(lambda: self.store.run(run.id).ended, supervisor=supervisor)
        return self.store.run(run.id)

    def pid(self, run: Run, attempt: int = 1) -> int:
        record = ProcessRecord.read(self.base / "attempts" / f"{run.id}-{attempt}")
        assert record
        return record.pid

    def worker(self, run: Run) -> int:
        """The process of the first attempt's worker, which has made a step: `pid`, or its fork."""
        return fork_of(self.pid(run))

    def kill(self, run: Run) -> None:
        """Kill the first attempt's worker; after that it writes nothing."""
        os.kill(self.worker(run), signal.SIGKILL)
        wait_for(lambda: not is_running(self.pid(run)))

    def step(self, run: Run, attempt: int = 1) -> int:
        """The step of the attempt's last beat; 0 before."""
        beat = RunFolder(run.folder).beat()
        return beat["step"] if beat and beat["epoch"] == attempt else 0

    def told(self, run: Run) -> list[tuple[int, str]]:
        """(attempt, what) of what the supervisor noted."""
        return [(event.epoch, event.name[5:]) for event in self.store.events(run.id, 99, ["attempt"])]

    def clean_up(self) -> None:
        launcher = LocalLauncher(self.base / "attempts", gpus=[])
        for record in (self.base / "attempts").glob("run-*"):
            launcher.cancel(Handle(record.name, ""))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.clean_up()


def all_rows(store: Store, run_id: str) -> list[Any]:
    rollouts = [store.rollouts(run_id, split=split, order="index", limit=999) for split in ("train", "eval")]
    return [store.metrics(run_id), rollouts, store.evals(run_id), store.events(run_id, 999), store.checkpoints(run_id)]


# -- the ordinary life of a run --------------------------------------------------------------------


def test_a_run_goes_from_queued_to_succeeded_and_all_that_it_said_is_in_the_store(bench: Bench) -> None:
    run = bench.train({"steps": 5, "1": {"at": 3, "do": "hold"}})
    bench.until(lambda: bench.store.run(run.id).step == 3 and len(bench.store.metrics(run.id)) == 2)
    live = bench.store.run(run.id)
    assert (live.state, live.attempt, live.phase) == ("running", 1, "train")
    assert live.beat and live.progress and live.beat >= live.progress
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2]
    Path(run.folder, "go").touch()
    ended = bench.finish(run)
    assert (ended.state, ended.step, ended.error, ended.attempt) == ("succeeded", 5, None, 1)
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3, 4, 5]
    assert bench.store.rollout_count(run.id) == 15 and bench.store.rollout_count(run.id, split="eval") == 1
    assert [row.step for row in bench.store.checkpoints(run.id)] == [1, 2, 3, 4, 5]
    assert Path(bench.store.checkpoint(run.id).path, "adapter.bin").exists()
    assert bench.store.events(run.id, kinds=["phase"])[0].data == {"resumed": 0}
    assert bench.told(run) == [(1, "launched")] and not is_running(bench.pid(run))


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_files_that_a_disk_cannot_read_now_are_read_at_a_later_look_and_no_row_twice(
    error: int, bench: Bench, monkeypatch
) -> None:
    run = bench.train({"steps": 4})
    bench.finish(run)
    before = all_rows(bench.store, run.id)
    for table in ("metrics", "rollouts"):
        bench.store.execute(f"DELETE FROM main.{table} WHERE run_id = ?", [run.id])
    reader = Reader(bench.store, run.id, RunFolder(run.folder))
    opening = os.open

    def fail(path: Path, *arguments: Any, **options: Any) -> int:
        if str(path).endswith((".json", ".jsonl")):
            raise OSError(error, os.strerror(error), path)
        return opening(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        reader.read(now=True)
    assert not reader.folder.damaged and all_rows(bench.store, run.id) != before
    reader.read(now=True)
    assert all_rows(bench.store, run.id) == before

    assert before[0] and before[1][0] and before[2] and before[3] and before[4]
    for _ in range(2):
        Reader(bench.store, run.id, RunFolder(run.folder)).read(now=True)
    assert all_rows(bench.store, run.id) == before


def test_a_damaged_file_does_not_keep_the_rest_from_being_read_nor_the_run_from_ending(bench: Bench) -> None:
    run = bench.held({"steps": 3})
    Path(run.folder, "metrics", "2.1.json").write_text('{"step": 2, "epo')
    Path(run.folder, "rollouts", "9.1.jsonl").write_text('{"index": 0, "reward": null, "success": true}\n')
    for _ in range(3):
        bench.supervisor.tick()
    Path(run.folder, "go").touch()
    assert bench.finish(run).state == "succeeded"
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3]
    assert bench.store.rollout_steps(run.id) == [1, 2, 3]


# -- attempts that die, hang or give up ------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_goes_on_from_its_last_checkpoint(bench: Bench) -> None:
    run = bench.held({"steps": 5}, at=3)
    bench.kill(run)
    ended = bench.finish(run)
    assert (ended.state, ended.attempt, ended.step, ended.error) == ("succeeded", 2, 5, None)
    assert bench.told(run) == [(1, "launched"), (1, "lost"), (2, "launched")]
    lost = bench.store.events(run.id, kinds=["attempt"])[1]
    assert "killed by signal SIGKILL" in lost.message and lost.data["error"]["values"]["step"] == 3
    assert [event.data["resumed"] for event in bench.store.events(run.id, kinds=["phase"])] == [0, 2]
    assert [row.epoch for row in bench.store.metrics(run.id)] == [1, 1, 2, 2, 2]


def test_a_run_whose_attempts_all_die_fails_with_the_log_as_evidence(bench: Bench) -> None:
    cue = {"do": "die_at_start"}
    run = bench.train({"1": cue, "2": cue}, max_attempts=2)
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("failed", 2)
    assert ended.error and ended.error["code"] == "worker_failed"
    assert "no such module: torch" in ended.error["values"]["log"] and "exit code 1" in ended.error["what"]
    assert bench.told(run) == [(1, "launched"), (1, "lost"), (2, "launched"), (2, "lost")]
    result = RunFolder(run.folder).result()
    assert result and (result["state"], result["error"]["code"]) == ("failed", "worker_failed")


def test_a_worker_killed_while_memory_was_short_is_told_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if what is left here were next to nothing.
    monkeypatch.setattr("flash_mcp.supervisor.reconciler.SHORT_OF_MEMORY", 1.0)
    run = bench.finish(bench.train({"steps": 4, **{str(attempt): {"at": 2, "do": "kill"} for attempt in (1, 2, 3)}}))
    assert (run.state, run.error["code"]) == ("failed", "out_of_memory")
    assert "SIGKILL" in run.error["what"] and "GiB of the machine's memory were left" in run.error["what"]


def test_an_error_that_a_retry_may_cure_is_retried_and_kept_when_it_stays(bench: Bench) -> None:
    cured = bench.train({"1": {"at": 2, "do": "give_up"}})
    assert (bench.finish(cured).state, bench.store.run(cured.id).attempt) == ("succeeded", 2)
    cue = {"at": 1, "do": "give_up"}
    ended = bench.finish(bench.train({"1": cue, "2": cue}, max_attempts=2))
    assert (ended.state, ended.attempt) == ("failed", 2)
    assert ended.error and ended.error["code"] == "out_of_memory"

    ended = bench.finish(bench.train({"1": {"at": 2, "do": "fail"}}))
    assert (ended.state, ended.attempt, ended.step) == ("failed", 1, 2)
    assert ended.error and ended.error["code"] == "environment_error"


def test_a_worker_that_beats_but_does_not_move_is_replaced(bench: Bench) -> None:
    run = bench.held(do="stall", stall_timeout_s=60.0)
    stalled = bench.pid(run)
    bench.supervisor._attempts[run.id].progress_at -= 61
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("succeeded", 2)
    lost = bench.store.events(run.id, kinds=["attempt"])[1].data["error"]
    assert (lost["code"], lost["values"]["step"], lost["values"]["phase"]) == ("stalled", 2, "train")
    assert not is_running(stalled)


def test_a_worker_that_is_stopped_is_replaced(bench: Bench) -> None:
    run = bench.held()
    worker = bench.worker(run)
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(worker).status() == psutil.STATUS_STOPPED)
    bench.supervisor.tick()  # which takes in the last beat
    bench.supervisor._attempts[run.id].beat_at -= 31
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("succeeded", 2)
    assert "gave no sign" in bench.store.events(run.id, kinds=["attempt"])[1].message
    assert not is_running(bench.pid(run))
    wait_for(lambda: not is_running(worker))  # a fork ends with it


def test_a_worker_that_does_not_leave_after_its_result_is_ended(bench: Bench) -> None:
    run = bench.train({"1": {"at": 2, "do": "linger"}})
    assert bench.finish(run).state == "succeeded" and not is_running(bench.pid(run))


class Slanderer(LocalLauncher):
    """A machine that loses its network: `slandered` attempts are called gone while they run, and cannot be ended."""

    def __init__(self, base: Path) -> None:
        super().__init__(base / "attempts", gpus=["0", "1"])
        self.slandered: set[str] = set()

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        return {
            key: JobStatus("gone") if key in self.slandered else status for key, status in super().poll(handles).items()
        }

    def cancel(self, handle: Handle) -> None:
        if handle.key not in self.slandered:
            super().cancel(handle)


def test_a_worker_that_beats_is_believed_over_a_launcher_that_calls_it_gone(bench: Bench) -> None:
    launcher = Slanderer(bench.base)
    supervisor = bench.new_supervisor(launcher, beat_stale_s=60.0)
    run = bench.train({"steps": 4, "1": {"at": 2, "do": "hold"}})
    bench.until(lambda: bench.store.run(run.id).step == 2, supervisor=supervisor)
    launcher.slandered = {f"{run.id}-1"}
    attempt, folder = supervisor._attempts[run.id], RunFolder(run.folder)
    for _ in range(5):
        attempt.beat_at -= 100
        wait_for(lambda: folder.beat() != attempt.beat)
        supervisor.tick()
    Path(run.folder, "go").touch()
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt) == ("succeeded", 1)


def test_a_zombie_that_wakes_after_its_replacement_changes_nothing(bench: Bench) -> None:
    launcher = Slanderer(bench.base)
    supervisor = bench.new_supervisor(launcher)
    run = bench.train({"steps": 5, "1": {"at": 3, "do": "hold"}, "2": {"at": 4, "do": "hold"}})
    bench.until(lambda: bench.step(run) == 3, supervisor=supervisor)
    zombie = bench.worker(run)
    launcher.slandered = {f"{run.id}-1"}
    os.kill(zombie, signal.SIGSTOP)
    bench.until(
        lambda: bench.step(run, attempt=2) == 4 and len(bench.store.checkpoints(run.id)) == 3, supervisor=supervisor
    )
    supervisor._attempts[run.id].reader.read(now=True)
    before, checkpoints = (all_rows(bench.store, run.id), RunFolder(run.folder).checkpoints.steps())
    os.kill(zombie, signal.SIGCONT)
    bench.until(lambda: not is_running(zombie), supervisor=supervisor)
    assert "[fenced epoch=1 newest=2]" in RunFolder(run.folder).log_tail(1)
    for _ in range(10):
        supervisor.tick()
    assert all_rows(bench.store, run.id) == before
    assert RunFolder(run.folder).checkpoints.steps() == checkpoints == [1, 2, 3]
    assert bench.store.run(run.id).state == "running"
    Path(run.folder, "go").touch()
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 5)


def test_a_run_of_several_cards_waits_for_them_and_is_not_overtaken(bench: Bench, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FLASH_DEVICE_LOCKS", str(tmp_path))
    supervisor = bench.new_supervisor(LocalLauncher(bench.base / "attempts", gpus=["a", "b"]))
    first = bench.train({"steps": 2, "1": {"at": 1, "do": "hold"}})
    bench.until(lambda: bench.step(first) == 1, supervisor=supervisor)
    wide, narrow = bench.train(gpus=2), bench.train()
    for _ in range(3):
        supervisor.tick()
    assert [bench.store.run(run.id).state for run in (wide, narrow)] == ["queued", "queued"]
    Path(first.folder, "go").touch()
    bench.until(lambda: bench.store.run(wide.id).attempt == 1, supervisor=supervisor)
    record = ProcessRecord.read(bench.base / "attempts" / f"{wide.id}-1")
    assert record and set(record.slots) == {0, 1}
    assert bench.finish(narrow, supervisor=supervisor).state == "succeeded"


def test_a_run_whose_secret_is_missing_waits_and_lets_others_pass(bench: Bench) -> None:
    run = bench.train(secrets=["CALC_KEY_THAT_NOBODY_SET"])
    assert bench.finish(bench.train()).state == "succeeded"
    assert (bench.store.run(run.id).state, bench.store.run(run.id).attempt) == ("queued", 0)
    bench.supervisor.vault.open()
    with closing(bench.supervisor.vault):
        assert give(bench.base, run.id, {"CALC_KEY_THAT_NOBODY_SET": "42"})
        assert bench.finish(run).state == "succeeded"


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_run_whose_secret_was_lost_while_it_ran_is_found_or_waits_without_its_slot(
    bench: Bench, was_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor ended, and the secret with it; its worker lives, or ended too, as when the machine restarts."""
    monkeypatch.setenv("CALC_KEY", "42")
    run = bench.train({"steps": 3, "1": {"at": 2, "do": "hold"}}, secrets=["CALC_KEY"])
    other = bench.train()
    bench.until(lambda: bench.step(run) == 2)
    monkeypatch.delenv("CALC_KEY")
    if was_killed:
        bench.kill(run)
    later = bench.new_supervisor()
    if was_killed:
        assert bench.finish(other, supervisor=later).state == "succeeded"
        assert bench.store.run(run.id).state == "queued"
        assert queue.request_cancel(bench.store, run.id).state == "cancelled"
    else:
        later.tick()
        Path(run.folder, "go").touch()
        ended = bench.finish(run, supervisor=later)
        assert (ended.state, ended.attempt) == ("succeeded", 1)


def test_secrets_are_forgotten_when_a_run_ends_in_the_queue(bench: Bench) -> None:
    run = bench.train(secrets=["CALC_KEY_THAT_NOBODY_SET", "ANOTHER"])
    bench.supervisor.vault.open()
    with closing(bench.supervisor.vault):
        assert give(bench.base, run.id, {"ANOTHER": "42"})
        bench.supervisor.tick()
        assert bench.supervisor.vault.run_ids() == {run.id}
        queue.request_cancel(bench.store, run.id)
        bench.supervisor.tick()
        assert not bench.supervisor.vault.run_ids()


@pytest.mark.parametrize("left", ["", "0 boot", "0 boot 17 (sh) R", "x y z"])
def test_what_a_power_cut_left_of_an_attempts_record_holds_nobody_up(bench: Bench, left: str) -> None:
    run = bench.train()
    for name in ("run-before00-1", f"{run.id}-1"):
        (bench.base / "attempts" / name).write_text(left)
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("succeeded", 2)


def test_trouble_that_keeps_an_attempt_from_starting_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.train()
    with monkeypatch.context() as broken:
        broken.setattr(bench.supervisor.launcher, "submit", lambda _: 1 / 0)
        for _ in range(3):
            bench.supervisor.tick()
    (event,) = bench.store.events(run.id, 9, ["warning"])
    assert "trouble with attempt 1, and tried again: ZeroDivisionError" in event.message
    assert bench.finish(run).state == "succeeded"


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["max_hours", "max_cost"])
def test_a_run_that_has_used_up_its_budget_saves_and_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch, budget: str):
    (bench.base / "settings.toml").write_text("[cost]\nprice_per_hour = 1.0\n")
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.ahead, ahead=0.0)
    monkeypatch.setattr(attempts, "time", clock)
    supervisor = bench.new_supervisor(cancel_grace_s=30.0)
    run = bench.held(supervisor=supervisor, **{budget: 1.5})
    clock.ahead = 3600.0
    bench.until(lambda: bench.store.run(run.id).used_s >= 3600, supervisor=supervisor)
    assert bench.store.run(run.id).cancel_requested is None
    clock.ahead = 7200.0
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.step, ended.error) == ("cancelled", 2, None)
    assert (ended.cancel_reason or "").startswith(f"{budget}=1.5 is used up")
    assert bench.store.checkpoint(run.id).step == 2


def test_a_running_run_saves_and_ends_as_cancelled_and_goes_on_when_it_is_resumed(bench: Bench) -> None:
    supervisor = bench.new_supervisor(cancel_grace_s=30.0)
    run = bench.held(supervisor=supervisor, steps=4)
    queue.request_cancel(bench.store, run.id, "enough")
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.step, ended.error) == ("cancelled", 2, None)
    assert bench.store.checkpoint(run.id).step == 2 and not is_running(bench.pid(run))
    again = queue.resume(bench.store, ended, RunFolder(run.folder), 4, "")
    assert (again.state, again.cancel_reason) == ("queued", None)
    ended = bench.finish(run)
    assert (ended.state, ended.step, ended.error) == ("succeeded", 4, None)
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 3, 4]
    # One attempt by the worker, one that only ended the first for good, one that went on.
    assert ended.attempt == 3


def test_a_hung_run_is_killed_after_its_grace_and_ends_as_cancelled(bench: Bench) -> None:
    run = bench.held(do="stall")
    requested = queue.request_cancel(bench.store, run.id).cancel_requested
    ended = bench.finish(run)
    assert (ended.state, ended.step, ended.attempt, ended.error) == ("cancelled", 2, 1, None)
    assert requested and ended.ended and ended.ended - requested > HASTE.cancel_grace_s
    assert bench.store.lost_steps(ended) == 1
    view = report_on(bench.store, run.id).view
    assert view.warnings and view.warnings[0].startswith("1 step was lost")
    assert not is_running(bench.pid(run))
    result = RunFolder(run.folder).result()
    assert result and result["state"] == "cancelled"


def test_the_grace_after_a_cancel_covers_two_of_the_runs_own_steps(bench: Bench) -> None:
    """Steps of 290 s would not end within 120 s."""
    run = bench.held(do="stall")
    bench.store.put_metrics(run.id, {"step": 2, "epoch": 1, "time": 0.0, "metrics": {"time/step_s": 1.5}})
    requested = queue.request_cancel(bench.store, run.id).cancel_requested
    ended = bench.finish(run)
    assert requested and ended.ended and ended.ended - requested > HASTE.cancel_grace_s + 3.0
    assert "did not end within 4 s of the cancel" in bench.store.events(run.id, kinds=["attempt"])[1].message


def test_a_run_that_dies_while_cancelling_ends_as_cancelled_and_is_not_retried(bench: Bench) -> None:
    run = bench.held(do="stall")
    queue.request_cancel(bench.store, run.id)
    bench.kill(run)
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("cancelled", 1)


# -- supervisors that die --------------------------------------------------------------------------

SUPERVISE = f"""
import logging, sys
from pathlib import Path
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.loop import Supervisor, supervise
logging.basicConfig(level=logging.INFO)
import json
base = Path(sys.argv[1])
timeouts = Timeouts(**{{**{HASTE.__dict__!r}, **json.loads(sys.argv[2])}})
launcher = LocalLauncher(base / "attempts", gpus=[])
supervise(base, lambda base: Supervisor(base, launcher=launcher, worker={WORKER!r}, timeouts=timeouts))
"""


def start_supervisor(bench: Bench, **timeouts: float) -> subprocess.Popen[bytes]:
    with (bench.base / "supervisor.log").open("ab") as log:
        command = [sys.executable, "-c", SUPERVISE, str(bench.base), json.dumps(timeouts)]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def test_a_new_supervisor_goes_on_where_a_killed_one_was(bench: Bench) -> None:
    run = bench.train({"steps": 5, "1": {"at": 3, "do": "hold"}})
    first = start_supervisor(bench)
    wait_for(lambda: bench.step(run) == 3)
    first.kill()
    first.wait()
    worker = bench.pid(run)
    assert is_running(worker)
    second = start_supervisor(bench)
    Path(run.folder, "go").touch()
    wait_for(lambda: bench.store.run(run.id).ended)
    ended = bench.store.run(run.id)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 1, 5)
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3, 4, 5] and bench.pid(run) == worker
    assert second.wait(timeout=TIMEOUT_S) == 0  # it leaves when idle


@pytest.mark.parametrize("died", [True, False])
def test_what_a_worker_did_while_nobody_watched_is_found_and_it_is_replaced_if_it_died(bench: Bench, died: bool):
    run = bench.train({"steps": 4, "1": {"at": 2, "do": "hold"}})
    first = start_supervisor(bench)
    wait_for(lambda: bench.step(run) == 2)
    first.kill()
    first.wait()
    if died:
        bench.kill(run)
    else:
        Path(run.folder, "go").touch()
        wait_for(lambda: not is_running(bench.pid(run)))
    assert bench.store.run(run.id).state in ("starting", "running")
    ended = bench.finish(run)
    assert (ended.state, ended.attempt, len(bench.store.metrics(run.id))) == ("succeeded", 1 + died, 4)


def test_supervisors_killed_at_any_point_lose_and_repeat_nothing(bench: Bench) -> None:
    """Kills at moments spread over a supervisor's life: every run ends once, with every step's rows, and no attempt
    that began is made again unless it was killed."""
    runs = [
        bench.train({"steps": 3, "1": {"at": 2, "do": "kill"} if number % 2 else {}}, max_attempts=9)
        for number in range(4)
    ]

    def progress() -> int:
        return sum(bench.step(run, bench.store.run(run.id).attempt) for run in runs)

    delay_s, kills = 0.1, 0
    while bench.store.active_runs():
        before = progress()
        child = start_supervisor(bench)
        wait_for(lambda child=child: is_supervised(bench.base) or child.poll() is not None)
        try:
            child.wait(timeout=delay_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            kills += 1
        # On a busy machine a supervisor needs longer before there is more to lose.
        delay_s = 0.1 + (kills * 0.137) % 0.8 if progress() > before else delay_s * 1.5
    for number, run in enumerate(runs):
        ended = bench.finish(run)
        assert (ended.state, ended.step) == ("succeeded", 3), ended.error
        begun = {event.epoch for event in bench.store.events(run.id, 99, ["phase"])}
        assert len(begun) == 1 + (number % 2 and 1 in begun), bench.told(run)
        assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3]
        assert bench.store.rollout_count(run.id) == 9 and not is_running(bench.pid(run, ended.attempt))
    assert kills >= 3


@pytest.mark.parametrize("point", ["claimed", "submitted", "result", "requeue", "end"])
def test_a_supervisor_that_dies_between_two_writes_is_made_up_for_by_the_next(bench: Bench, monkeypatch, point: str):
    class Death(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Death

    cut = {
        "claimed": "flash_mcp.supervisor.reconciler.RunFolder.create",
        "submitted": "flash_mcp.supervisor.loop.Supervisor._note",
        "requeue": "flash_mcp.state.queue.requeue",
    }.get(point, "flash_mcp.state.queue.finish")
    cue = {"requeue": {"at": 2, "do": "kill"}, "end": {"do": "die_at_start"}}.get(point, {})
    run = bench.train({"steps": 3, "1": cue}, max_attempts=1 if point == "end" else 2)
    with monkeypatch.context() as patch:
        patch.setattr(cut, die)
        with pytest.raises(Death):
            bench.finish(run)
    assert bench.store.run(run.id).ended is None
    ended = bench.finish(run, supervisor=bench.new_supervisor())
    expected = {"requeue": ("succeeded", 2), "end": ("failed", 1)}.get(point, ("succeeded", 1))
    assert (ended.state, ended.attempt) == expected


# -- alone per state directory ---------------------------------------------------------------------


def test_a_supervisor_stays_longer_while_a_worker_is_kept_ready(bench: Bench) -> None:
    looks = iter([True] * 5)
    launcher = MemoryLauncher({})
    launcher.rest = lambda: next(looks, False)
    Supervisor(bench.base, launcher=launcher, timeouts=Timeouts(poll_s=0.001, idle_exit_s=0.0)).run()
    assert next(looks, None) is None


def test_a_second_supervisor_leaves_at_once(bench: Bench) -> None:
    run = bench.train({"1": {"at": 2, "do": "hold"}})
    first = start_supervisor(bench)
    wait_for(lambda: bench.step(run) == 2)
    assert is_supervised(bench.base)
    assert supervise(bench.base, lambda base: pytest.fail("two supervisors")) is False
    assert not ensure_supervisor(bench.base)
    Path(run.folder, "go").touch()
    assert first.wait(timeout=TIMEOUT_S) == 0
    assert not is_supervised(bench.base)


def test_a_run_enqueued_while_the_supervisor_was_leaving_is_not_forgotten(bench: Bench) -> None:
    made: list[Supervisor] = []

    class Leaver(Supervisor):
        def run(self) -> None:
            super().run()
            if len(made) == 1:
                bench.train({"steps": 1})
                assert not ensure_supervisor(bench.base)  # it still holds the lock: nobody else is started

    def make(base: Path) -> Supervisor:
        launcher = LocalLauncher(base / "attempts", gpus=[])
        made.append(Leaver(base, launcher=launcher, worker=WORKER, timeouts=HASTE))
        return made[-1]

    assert supervise(bench.base, make) and [run.state for run in bench.store.runs()] == ["succeeded"]
    assert len(made) == 2


def test_many_callers_start_one_supervisor_that_is_detached(bench: Bench) -> None:
    code = """
import pathlib, sys
from flash_mcp.supervisor import process
process.START_TIMEOUT_S = 60
process.ensure_supervisor(pathlib.Path(sys.argv[1]))
"""
    callers = [subprocess.Popen([sys.executable, "-c", code, str(bench.base)]) for _ in range(4)]
    assert [caller.wait(timeout=TIMEOUT_S) for caller in callers] == [0] * 4
    # The lock is held a moment before it says by whom.
    wait_for(lambda: len(supervisors(bench.base)) == 1 and LockOwner.read(bench.base))
    (survivor,) = supervisors(bench.base)
    try:
        holder = LockOwner.read(bench.base)
        assert holder and (holder.pid, holder.version) == (survivor.pid, __version__)
        assert is_supervised(bench.base)
        assert os.getsid(survivor.pid) != os.getsid(0)
    finally:
        survivor.kill()
    wait_for(lambda: not is_supervised(bench.base))


def supervisors(base: Path) -> list[psutil.Process]:
    arguments = [*PYTHON[1:], "flash_mcp.supervisor", "--home", str(base)]
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if (process.info["cmdline"] or [])[1:] == arguments]


def test_a_supervisor_that_cannot_start_is_an_error_that_names_its_log(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flash_mcp.supervisor.process.START_TIMEOUT_S", 0.5)
    monkeypatch.setattr("flash_mcp.supervisor.process.PYTHON", ("/no/such/python",))
    with pytest.raises(FlashError, match=r"supervisor\.log"):
        ensure_supervisor(bench.base)
    wait_for(lambda: "/no/such/python" in (bench.base / "supervisor.log").read_text())


@pytest.mark.slow
def test_all_runs_are_submitted_and_seen_and_no_attempt_is_ended_while_many_wait(tmp_path: Path) -> None:
    runs, queued = 40, 500
    simulation = Simulation(tmp_path, runs, queued)
    simulation.engine.submit_s = 0.2
    seen = simulation.play(later=20, hold_s=12.0, timeout_s=240)
    assert not seen.ended
    # All but the test's own haste is the product's: each beats every 5 s and is silent after 120.
    assert 0 < seen.gap_s < 120
    assert simulation.store.column("SELECT count(*) FROM runs WHERE state = 'queued'") == [queued]
    assert all(simulation.store.column("SELECT step FROM runs WHERE state = 'running'"))
    simulation.store.close()
