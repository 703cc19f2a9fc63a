"""Runs on targets that are not this machine: what waits, what is preempted, and what freezes."""

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.run_files import Beat
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.sealing import TOKEN, Receiver
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.store import Store
from flash_mcp.state.targets import TargetSettings, find_target, key_of, new_target, write_target
from flash_mcp.supervisor import attempt as attempts
from flash_mcp.supervisor import reconciler
from flash_mcp.supervisor.attempt import Reader, Timeouts
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Target
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.reconciler import RunReconciler
from flash_mcp.supervisor.secrets import Vault
from flash_mcp.supervisor.targets import RemoteTarget
from flash_mcp.tools.shared import waiting
from flash_mcp.tools.shared.run_view import report_on
from flash_mcp.tools.training.plan import resume_run
from tests.memory_launcher import MemoryLauncher
from tests.waiting import wait_for
from worker import node

HASTE = Timeouts(poll_s=0.01, remote_poll_s=0.01, beat_stale_s=0.05, retry_delay_s=0.0, leave_s=0.1)
TIMEOUT_S = 120.0


class Engine(MemoryLauncher):
    """An engine that a test leads, with a queue: what is submitted waits."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[str] = []
        self.cancelled: list[Handle] = []
        self.answers = threading.Event()
        self.answers.set()

    def submit(self, launch: Launch) -> Handle:
        self.submitted.append(launch.key)
        self.statuses.setdefault(launch.key, JobStatus("pending", "Resources"))
        return Handle(launch.key, f"job {len(self.submitted)}")

    def cancel(self, handle: Handle) -> None:
        self.cancelled.append(handle)
        super().cancel(handle)

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        self.answers.wait()
        return super().poll(handles)


class Lab(Target):
    name = "lab"
    retry_s = 1.0
    look_s = TIMEOUT_S  # a look is over once all is done that it began

    def __init__(self) -> None:
        self.launcher = self.engine = Engine()

    def job(self, run: Run, variables: Mapping[str, str]) -> Json:
        return queue.job(run)

    def launch(self, run: Run, variables: Mapping[str, str]) -> Launch:
        return Launch(run.id, run.attempt, ["true"], {}, Path("unused"))


class Bench:
    """A state directory and the reconciler of a target, whose attempts the test plays."""

    def __init__(self, base: Path) -> None:
        self.store = Store(base)
        for name in ("lab", "near"):
            fields = {"engine": "slurm", "storage": f"{base.parent}/shared"}
            write_target(base, name, new_target(base, name, fields))
        self.lab = Lab()
        self.reconciler = self.new_reconciler()

    def new_reconciler(self) -> RunReconciler:
        return RunReconciler(self.store, self.lab, Vault(self.store.base), HASTE)

    def train(self, target: str = "lab", **fields: object) -> Run:
        environment = self.store.add_environment(name="calc", digest="abcdef123456", path="/e", size_bytes=1)
        spec = RunSpec.model_validate({"environment": "calc", "target": target, **fields})
        run, _ = queue.enqueue(self.store, resolve(spec), environment)
        return run

    def until(self, condition: Callable[[], object]) -> None:
        wait_for(condition, TIMEOUT_S, tick=self.tick, evidence=lambda: [vars(run) for run in self.store.runs()])

    def tick(self) -> None:
        self.reconciler.attend(self.store.taken_runs("lab"))

    def close(self) -> None:
        self.reconciler.close()
        self.store.close()

    def now(self, run: Run) -> Run:
        return self.store.run(run.id)

    def start(self, run: Run) -> RunWriter:
        """The engine has taken the newest attempt and gives it a machine, and it beats."""
        self.until(lambda: self.now(run).handle)
        attempt = self.now(run).attempt
        writer = RunWriter(RunFolder(run.folder), attempt)
        writer.beat(1, "train")
        self.lab.engine.statuses[f"{run.id}-{attempt}"] = JobStatus("alive")
        self.until(lambda: self.now(run).state == "running")
        return writer


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for module in (attempts, reconciler):
        monkeypatch.setattr(module, "STALE_S", 0.1)
    made = Bench(tmp_path / "home")
    yield made
    made.close()


def test_an_attempt_is_replaced_once_however_long_ago_its_run_was_read(bench: Bench) -> None:
    run = bench.train(max_attempts=5)
    bench.until(lambda: bench.now(run).pending_reason)
    bench.start(run)
    taken = bench.store.taken_runs("lab")
    bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("gone", "NODE_FAIL")
    bench.until(lambda: bench.now(run).state == "queued")
    bench.reconciler.attend(taken)  # the engine took long to answer, and a thread ended the attempt meanwhile
    assert RunFolder(run.folder).result() is None
    bench.until(lambda: bench.now(run).attempt == 2)
    bench.start(run)


@pytest.mark.slow
def test_a_run_that_waits_for_a_machine_burns_no_attempt_and_says_what_it_waits_for(bench: Bench) -> None:
    run = bench.train(stall_timeout_s=0.1, max_attempts=1)
    bench.until(lambda: bench.now(run).pending_reason)
    waiting = bench.now(run)
    assert (waiting.state, waiting.pending_reason) == ("starting", "Resources")
    attempt = bench.reconciler._attempts[run.id]
    bench.until(lambda: attempt.watched_s > 10 * 0.1)
    assert bench.now(run).attempt == 1
    bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("pending", "Priority")
    bench.until(lambda: bench.now(run).pending_reason == "Priority")
    waited_s = time.time() - waiting.created
    writer = bench.start(run)
    started = bench.now(run)
    assert started.pending_reason is None
    assert started.used_s < waited_s  # the time in the engine's queue is no work
    writer.commit_result("succeeded", 1)
    bench.until(lambda: bench.now(run).ended)
    assert bench.now(run).state == "succeeded"


def test_an_attempt_that_waits_too_long_is_submitted_anew_and_no_attempt_is_counted(bench: Bench) -> None:
    run = bench.train(max_attempts=1)
    bench.until(lambda: bench.now(run).pending_reason)
    attempt = bench.reconciler._attempts[run.id]
    assert attempt.pending_at is not None
    attempt.pending_at -= HASTE.pending_s
    bench.until(lambda: bench.now(run).attempt == 2)
    error = bench.now(run).error
    assert error and error["code"] == "preempted" and "Resources" in error["what"]


def test_a_run_that_waits_is_cancelled_without_the_time_that_a_worker_has_to_save(bench: Bench) -> None:
    run = bench.train()
    bench.until(lambda: bench.now(run).pending_reason)
    queue.request_cancel(bench.store, run.id, "not needed")
    bench.until(lambda: bench.now(run).ended)
    assert (bench.now(run).state, bench.now(run).pending_reason) == ("cancelled", None)
    assert bench.lab.engine.statuses[f"{run.id}-1"].state == "gone"


def test_preempted_attempts_do_not_count_and_crashes_do(bench: Bench) -> None:
    run = bench.train(max_attempts=2)
    for attempt in (1, 2, 3):
        bench.until(lambda attempt=attempt: bench.now(run).attempt == attempt)
        bench.start(run)
        bench.lab.engine.statuses[f"{run.id}-{attempt}"] = JobStatus("gone", "NODE_FAIL", is_preempted=True)
    bench.until(lambda: bench.now(run).attempt == 4)
    assert bench.now(run).preemptions == 3
    for attempt in (4, 5):
        bench.until(lambda attempt=attempt: bench.now(run).attempt == attempt)
        bench.until(lambda: bench.now(run).handle)
        bench.lab.engine.statuses[f"{run.id}-{attempt}"] = JobStatus("gone", "exit code 1")
    bench.until(lambda: bench.now(run).ended)
    error = bench.now(run).error
    assert (bench.now(run).state, bench.now(run).attempt) == ("failed", 5)
    assert error and error["code"] == "worker_failed"


def test_a_job_that_its_engine_starts_again_is_followed_under_its_new_number_and_kept(bench: Bench) -> None:
    run = bench.train(max_attempts=1)
    writer = bench.start(run)
    writer.commit_result("failed", 1, FlashError("preempted", "its machine is taken away"), retryable=True)
    writer.beat(1, "train")
    bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("pending", "Slurm: BeginTime")
    attempt = bench.reconciler._attempts[run.id]
    bench.until(lambda: attempt.left_at is not None)
    attempt.beat_at -= 100  # it has been silent for long
    bench.until(lambda: bench.now(run).pending_reason == "Slurm: BeginTime")
    again = RunWriter(RunFolder(run.folder), 2)
    again.beat(1, "train")
    bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("alive")
    bench.until(lambda: bench.now(run).attempt == 2)
    bench.until(lambda: bench.now(run).beat)
    after = bench.now(run)
    assert (after.state, after.preemptions, after.max_attempts, after.pending_reason) == ("running", 1, 2, None)
    assert bench.lab.engine.submitted == [f"{run.id}-1"] and not bench.lab.engine.cancelled
    bench.reconciler.maintenance.clear()
    # A later supervisor finds it by the engine's name for it.
    bench.reconciler = bench.new_reconciler()
    bench.until(lambda: bench.reconciler._attempts.get(run.id))
    bench.lab.engine.statuses[f"{run.id}-2"] = JobStatus("alive")
    again.commit_result("succeeded", 2)
    bench.lab.engine.statuses[f"{run.id}-2"] = JobStatus("gone")
    bench.until(lambda: bench.now(run).ended)
    assert bench.now(run).state == "succeeded"


@pytest.mark.parametrize("works", [True, False])
def test_time_in_which_nobody_looked_is_work_only_if_the_attempt_went_on(bench: Bench, works: bool) -> None:
    run = bench.train(max_hours=4.0)
    writer = bench.start(run)
    bench.reconciler.close()
    hours = 3.0 * 3600
    bench.store.execute("UPDATE main.runs SET beat = beat - ? WHERE id = ?", [hours, run.id])
    written = time.time() if works else time.time() - hours
    body = {**(writer.folder.beat() or {}), "time": written, "progress": 7}
    writer.folder.write("beat.json", json.dumps(body).encode())
    before_s = bench.now(run).used_s
    bench.reconciler = bench.new_reconciler()
    bench.until(lambda: bench.now(run).beat > time.time() - hours / 2)  # pyright: ignore[reportOptionalOperand]
    used_s = bench.now(run).used_s - before_s
    assert used_s == pytest.approx(hours if works else 0, abs=60)


def test_a_number_that_a_node_makes_up_is_not_followed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_PREEMPTIONS", 9)
    run = bench.train()
    RunWriter(bench.start(run).folder, 50).beat(2, "train")
    attempt = bench.reconciler._attempts[run.id]
    bench.until(lambda: (attempt.read_beat or {}).get("epoch") == 50)
    bench.tick()
    assert (bench.now(run).attempt, bench.now(run).step) == (1, 1)


def test_a_result_counts_though_nothing_else_of_its_folder_can_be_read(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    run = bench.train(max_attempts=1)
    writer = bench.start(run)
    monkeypatch.setattr(Reader, "read", fail)
    monkeypatch.setattr(bench.reconciler, "timeouts", replace(HASTE, trouble_s=0.1))
    writer.commit_result("succeeded", 1)
    bench.until(lambda: bench.now(run).ended)
    assert (bench.now(run).state, bench.now(run).error) == ("succeeded", None)


def test_a_run_that_is_cancelled_while_its_model_is_uploaded_is_not_submitted(bench: Bench, monkeypatch):
    def job(run: Run, variables: Mapping[str, str]) -> Json:
        queue.request_cancel(bench.store, run.id, "not needed")
        return queue.job(run)

    monkeypatch.setattr(bench.lab, "job", job)
    run = bench.train()
    bench.until(lambda: bench.now(run).ended)
    assert (bench.now(run).state, bench.lab.engine.submitted) == ("cancelled", [])


def test_a_storage_that_lets_two_attempts_claim_one_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path / "run")
    folder.create({"time": 0.0})
    monkeypatch.setattr(RunFolder, "write_new", lambda *_: True)
    with pytest.raises(SystemExit, match="no exclusive create"):
        node.probe(folder)


@pytest.mark.parametrize("shares_disk", [True, False], ids=["a quota", "a node's own disk"])
def test_a_full_disk_that_nobody_here_can_see_is_named_and_counts_as_an_attempt(bench: Bench, shares_disk: bool):
    bench.lab.shares_disk = shares_disk
    run = bench.train(max_attempts=2)
    full = FlashError("disk_full", "no space is left on the disk", host="node7", path="/scratch")
    if shares_disk:
        full = disk_error(OSError(errno.EDQUOT, "quota"), "/home")
        assert isinstance(full, FlashError) and "quota" in full.what
    for attempt in (1, 2):
        bench.until(lambda attempt=attempt: bench.now(run).attempt == attempt and bench.now(run).handle)
        bench.start(run).commit_result("failed", 1, full, retryable=True)
        bench.lab.engine.statuses[f"{run.id}-{attempt}"] = JobStatus("gone", "exit code 0")
    bench.until(lambda: bench.now(run).ended)
    error = bench.now(run).error
    assert (bench.now(run).state, bench.now(run).attempt) == ("failed", 2) and error
    assert (error["code"], error["values"]) == (full.code, full.to_dict()["values"])


@pytest.mark.slow
def test_a_run_whose_job_somebody_ended_is_held_until_its_owner_lets_it_go_on(bench: Bench, monkeypatch):
    run = bench.train(max_attempts=1)
    writer = bench.start(run)
    # What dies first may make the worker say something else.
    killed = FlashError("environment_error", "the environment's process ended: killed by SIGKILL")
    writer.commit_result("failed", 1, killed, retryable=True)
    attempt = bench.reconciler._attempts[run.id]
    bench.until(lambda: attempt.left_at is not None)
    assert bench.now(run).state == "running"
    by_hand = JobStatus("gone", "Slurm job 7: CANCELLED", is_preempted=True, is_by_hand=True)
    bench.lab.engine.statuses[f"{run.id}-1"] = by_hand
    bench.until(lambda: queue.is_held(bench.now(run)))
    for _ in range(3):
        bench.tick()
    assert bench.lab.engine.submitted == [f"{run.id}-1"]
    monkeypatch.setattr(waiting, "obstacle", lambda _: None)  # no supervisor's process runs here
    (why,) = waiting.obstacles(bench.store, bench.now(run))
    assert "Slurm job 7: CANCELLED" in why and f"train(resume='{run.id}')" in why
    # A later supervisor holds it too.
    bench.reconciler.close()
    bench.reconciler = bench.new_reconciler()
    bench.tick()
    assert queue.is_held(bench.now(run))
    assert resume_run(bench.store, run.id, None, fresh_optimizer=False).run.state == "queued"
    bench.until(lambda: bench.now(run).attempt == 2 and bench.now(run).handle)
    # What an earlier supervisor ended was nobody's decision.
    bench.lab.engine.statuses[f"{run.id}-2"] = by_hand
    bench.reconciler.close()
    bench.reconciler = bench.new_reconciler()
    bench.until(lambda: bench.now(run).attempt == 3)
    assert bench.now(run).preemptions == 1


def test_a_run_that_is_preempted_without_end_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_mcp.state.queue.MAX_PREEMPTIONS", 2)
    run = bench.train()
    gone = JobStatus("gone", "PREEMPTED", is_preempted=True)
    bench.lab.engine.statuses |= {f"{run.id}-{attempt}": gone for attempt in (1, 2, 3)}
    bench.until(lambda: bench.now(run).ended)
    assert (bench.now(run).state, bench.now(run).attempt) == ("failed", 3)


def test_an_attempt_that_ends_while_it_is_given_up_is_read_to_its_end(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    run = bench.train()
    writer = bench.start(run)
    read = Reader.read

    def read_too_early(reader: Reader, *, now: bool = False) -> bool:
        found = read(reader, now=now)
        if bench.lab.engine.cancelled and not writer.folder.result():
            writer.metrics(1, {"loss": 1.0})
            writer.commit_result("succeeded", 1)
        return found

    monkeypatch.setattr(Reader, "read", read_too_early)
    bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("gone", "CANCELLED", is_preempted=True)
    bench.until(lambda: bench.now(run).ended)
    assert bench.now(run).state == "succeeded" and [row.step for row in bench.store.metrics(run.id)] == [1]


def test_what_an_engine_took_is_not_submitted_again_by_the_next_supervisor(bench: Bench) -> None:
    run = bench.train()
    bench.until(lambda: bench.now(run).handle)
    assert bench.now(run).handle == "job 1"
    bench.reconciler = bench.new_reconciler()
    bench.until(lambda: bench.reconciler._attempts.get(run.id))
    assert bench.reconciler._attempts[run.id].handle == Handle(f"{run.id}-1", "job 1")
    assert bench.lab.engine.submitted == [f"{run.id}-1"]


def test_an_engine_that_does_not_answer_is_what_the_run_waits_for(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: Launch) -> Handle:
        raise FlashError("target_unreachable", "squeue does not answer")

    run = bench.train()
    with monkeypatch.context() as patch:
        patch.setattr(bench.lab.engine, "submit", refuse)
        bench.until(lambda: bench.now(run).pending_reason)
    assert "squeue does not answer" in str(bench.now(run).pending_reason)
    bench.until(lambda: bench.now(run).pending_reason == "Resources")
    assert bench.now(run).attempt == 1


def test_each_target_has_slots_and_a_queue_of_its_own(bench: Bench) -> None:
    here = bench.train("local")
    first, second = bench.train(), bench.train()
    bench.until(lambda: bench.now(first).handle)
    bench.tick()
    assert [bench.now(run).state for run in (here, first, second)] == [
        "queued", "starting", "queued"
    ]  # fmt: skip
    assert queue.queued_ahead(bench.store, bench.now(second)) == 0
    assert queue.queued_ahead(bench.store, bench.now(here)) == 0


def test_a_folder_that_does_not_answer_and_an_upload_that_takes_long_hold_up_no_other_run(bench: Bench, monkeypatch):
    bench.lab.engine.capacity = 4
    monkeypatch.setattr(bench.lab, "look_s", 0.01)
    slow, quick, later = bench.train(), bench.train(), bench.train()
    bench.until(lambda: all(bench.now(run).handle for run in (slow, quick, later)))
    answers, read, job = threading.Event(), Reader.read, bench.lab.job

    def read_late(reader: Reader, *, now: bool = False) -> bool:
        if reader.run_id == slow.id:
            answers.wait(TIMEOUT_S)
        return read(reader, now=now)

    def upload_late(run: Run, variables: Mapping[str, str]) -> Json:
        if run.id == large.id:
            answers.wait(TIMEOUT_S)
        return job(run, variables)

    monkeypatch.setattr(Reader, "read", read_late)
    monkeypatch.setattr(bench.lab, "job", upload_late)
    large = bench.train()
    for run in (slow, quick, later):
        writer = bench.start(run)
        writer.metrics(1, {"loss": 1.0})
        writer.commit_result("succeeded", 1)
        bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("gone")
    try:
        bench.until(lambda: bench.now(quick).ended and bench.now(later).ended)
        small = bench.train()
        bench.until(lambda: bench.now(small).handle)
        assert not bench.now(slow).ended and not bench.now(large).handle
    finally:
        answers.set()
    bench.until(lambda: bench.now(slow).ended and bench.now(large).handle)
    assert {bench.now(run).attempt for run in (slow, quick, later, large, small)} == {1}


def test_a_target_that_does_not_answer_delays_no_other(bench: Bench) -> None:
    near = Lab()
    near.name = "near"
    targets = {"lab": bench.lab, "near": near}
    local = Lab()
    local.name = "local"
    supervisor = Supervisor(
        bench.store.base, launcher=local.launcher, timeouts=HASTE, open_target=lambda _, name: targets[name]
    )
    runs = {name: bench.train(name) for name in ("lab", "near", "local")}

    def until(condition: Callable[[], object]) -> None:
        wait_for(condition, TIMEOUT_S, tick=supervisor.tick)

    try:
        until(lambda: all(bench.now(run).pending_reason for run in runs.values()))
        bench.lab.engine.answers.clear()
        for name in ("near", "local"):
            RunWriter(RunFolder(runs[name].folder), 1).commit_result("succeeded", 1)
        near.engine.statuses[f"{runs['near'].id}-1"] = JobStatus("gone")
        until(lambda: bench.now(runs["near"]).ended and bench.now(runs["local"]).ended)
        assert bench.now(runs["lab"]).state == "starting"
    finally:
        bench.lab.engine.answers.set()
    RunWriter(RunFolder(runs["lab"].folder), 1).commit_result("succeeded", 1)
    bench.lab.engine.statuses[f"{runs['lab'].id}-1"] = JobStatus("gone")
    until(lambda: bench.now(runs["lab"]).ended)


def test_what_the_engine_refuses_waits_in_its_own_words_and_counts_as_no_attempt(bench: Bench, monkeypatch):
    submit, refusals = bench.lab.engine.submit, list[float]()

    def refuse(_: Launch) -> Handle:
        refusals.append(time.monotonic())
        raise FlashError("target_refused", "sbatch refused: Requested partition is inactive")

    monkeypatch.setattr(bench.lab.engine, "submit", refuse)
    bench.reconciler.timeouts = replace(HASTE, trouble_s=0.1, refused_s=0.1)
    run = bench.train()
    bench.until(lambda: len(refusals) == 5)
    assert refusals[4] - refusals[0] >= 0.4
    waits = bench.now(run)
    assert (waits.state, waits.attempt) == ("starting", 1)
    assert waits.pending_reason == "sbatch refused: Requested partition is inactive"
    monkeypatch.setattr(bench.lab.engine, "submit", submit)
    bench.start(run)
    assert (bench.now(run).attempt, bench.now(run).pending_reason) == (1, None)


@pytest.mark.slow
def test_a_store_that_refuses_us_ends_no_attempt_and_the_run_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    bench.reconciler.timeouts = replace(HASTE, beat_silent_s=0.1, trouble_s=0.1)
    run = bench.train()
    writer = bench.start(run)

    def refuse(_: object) -> None:
        raise FlashError("store_refused", "the run folder's store refuses: Access Denied")

    folder = bench.reconciler._attempts[run.id].folder
    with monkeypatch.context() as patch:
        patch.setattr(folder, "is_local", False)  # else its heartbeat is read despite the refusal
        patch.setattr(bench.lab, "beat_every_s", 0.01)
        patch.setattr("flash_mcp.supervisor.reconciler.read_beats", refuse)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with pytest.raises(FlashError):
                bench.tick()
        assert "Access Denied" in str(bench.now(run).pending_reason)
        patch.setattr(waiting, "obstacle", lambda _: None)  # no supervisor's process runs here
        assert "Access Denied" in str(waiting.obstacles(bench.store, bench.now(run)))
    writer.beat(2, "train")
    bench.until(lambda: bench.now(run).step == 2)
    assert (bench.now(run).attempt, bench.now(run).pending_reason) == (1, None)
    assert bench.lab.engine.cancelled == []


@pytest.mark.slow
def test_time_in_which_the_store_cannot_be_read_is_no_silence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker writes its next heartbeat only some seconds after the store has come back."""
    bench.reconciler.timeouts = replace(HASTE, beat_silent_s=0.5)
    monkeypatch.setattr(bench.lab, "beat_every_s", 0.02)
    run = bench.train()
    writer = bench.start(run)
    attempt = bench.reconciler._attempts[run.id]
    monkeypatch.setattr(attempt.folder, "is_local", False)
    is_refused = True

    def read(folders: Sequence[RunFolder]) -> list[Beat | None]:
        if folders and is_refused:
            raise FlashError("store_refused", "the run folder's store refuses: ExpiredToken")
        return [writer.folder.beat() for _ in folders]

    monkeypatch.setattr("flash_mcp.supervisor.reconciler.read_beats", read)
    until = attempt.watched_s + 2.0
    while attempt.watched_s < until:
        with suppress(FlashError):
            bench.tick()
    is_refused = False
    asked_at = attempt.asked_at
    bench.until(lambda: attempt.asked_at > asked_at)  # it reads the old one
    bench.tick()
    assert bench.now(run).attempt == 1
    writer.beat(2, "train")
    bench.until(lambda: bench.now(run).step == 2)
    bench.until(lambda: bench.now(run).attempt == 2)  # it is silent now


@pytest.mark.slow
def test_an_attempt_whose_heartbeat_is_seldom_read_is_not_silent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of them, each heartbeat is asked for every few minutes."""
    monkeypatch.setattr(bench.lab, "beats_per_s", 1.0, raising=False)
    bench.reconciler.timeouts = replace(HASTE, beat_silent_s=0.2)
    run = bench.train()
    writer = bench.start(run)
    writer.beat(2, "train")
    bench.until(lambda: bench.now(run).step == 2)
    writer.beat(3, "train")
    bench.until(lambda: bench.now(run).step == 3)
    assert bench.now(run).attempt == 1
    bench.until(lambda: bench.now(run).attempt == 2)  # it is silent now


def test_status_its_log_and_cancel_ask_no_store_for_a_run_elsewhere(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The store may not answer; what they need is in the database."""
    run, waiting = bench.train(), bench.train()
    writer = bench.start(run)
    writer.folder.put_log(1, b"step 1: train")
    writer.event("phase", "it prints")
    writer.beat(1, "train")
    bench.until(lambda: bench.store.log(run.id))
    monkeypatch.setattr("flash_mcp.protocol.storage.connect", lambda *_: pytest.fail("the store was asked"))
    view = report_on(bench.store, run.id, detailed=True).view
    assert (view.target, view.log_tail) == ("lab", "step 1: train")
    assert report_on(bench.store, waiting.id).view.queued_ahead == 0
    for each in (run, waiting):
        assert queue.request_cancel(bench.store, each.id).cancel_requested


def test_secrets_are_sealed_for_an_attempt_that_asks_and_a_supervisor_without_them_says_so(bench: Bench, monkeypatch):
    settings = find_target(bench.store.base, "lab")
    lab = RemoteTarget("lab", settings, bench.lab.launcher, key_of(bench.store.base))
    monkeypatch.setattr(bench.lab, "seal", lab.seal)
    monkeypatch.setenv("PLANTED_KEY", "planted")
    run = bench.train(secrets=["PLANTED_KEY"])
    bench.until(lambda: bench.now(run).handle)
    launch = lab.launch(bench.now(run), {"PLANTED_KEY": "planted"})
    assert "planted" not in f"{launch}"
    receiver = Receiver(f"{run.id}-1", launch.environment[TOKEN])

    bench.reconciler = bench.new_reconciler()  # a later supervisor, which was not given the value
    with monkeypatch.context() as patch:
        patch.delenv("PLANTED_KEY")
        writer = bench.start(run)
        writer.offer(receiver.offer)
        writer.beat(0, "secrets")
        bench.until(lambda: bench.now(run).phase == "secrets")
        bench.tick()
        assert writer.take_sealed() is None
        patch.setattr(waiting, "obstacle", lambda _: None)  # no supervisor's process runs here
        assert "secret_missing" in str(waiting.obstacles(bench.store, bench.now(run)))
    writer.beat(0, "secrets", 1)
    bench.until(Path(run.folder, "sealed", "1").exists)
    sealed = writer.take_sealed()
    assert sealed and receiver.open(sealed) == {"PLANTED_KEY": "planted"}
    bench.tick()
    assert not [name for name in RunFolder(run.folder).sizes() if name.startswith(("key", "seal"))]


def test_an_owners_jobs_get_the_owners_arguments_and_python_may_be_a_command(bench: Bench) -> None:
    fields = find_target(bench.store.base, "lab").model_dump()
    python = "apptainer exec --nv '/shared/my flash.sif' python3"
    settings = TargetSettings(**{**fields, "owners": {"local": ["--account=vision", "--qos=low"]}, "python": python})
    run = bench.train(slurm={"qos": "high", "time": "8:00:00"})
    launch = RemoteTarget("lab", settings, bench.lab.launcher, b"key").launch(run, {})
    # Of two, sbatch takes the later.
    assert launch.options == ["--qos=high", "--time=8:00:00", "--account=vision", "--qos=low"]
    assert launch.command[:7] == ["apptainer", "exec", "--nv", "/shared/my flash.sif", "python3", "-P", "-m"]
    with pytest.raises(ValueError, match="Ray does not take them"):
        TargetSettings(**{**fields, "engine": "ray", "address": "http://head:8265", "owners": {"local": ["--x"]}})


def test_the_next_runs_of_an_owner_wait_while_those_of_a_day_have_cost_the_limit(bench: Bench, monkeypatch):
    monkeypatch.setattr(waiting, "obstacle", lambda _: None)  # no supervisor's process runs here
    settings = '[cost]\nprice_per_hour = 2.0\ncurrency = "EUR"\nowner_per_day = 3.0\n'
    (bench.store.base / "settings.toml").write_text(settings)
    spent = bench.train("local")
    columns = "state = 'succeeded', started = 1, used_s = 5400, ended"
    sql = f"UPDATE runs SET {columns} = ? WHERE id = ?"
    bench.store.execute(sql, [time.time() - 60, spent.id])
    run = bench.train()
    bench.tick()
    assert bench.now(run).state == "queued"
    (why,) = waiting.obstacles(bench.store, bench.now(run))
    assert "quota_exceeded" in why and "3 EUR within 24 hours" in why

    bench.store.execute(sql, [time.time() - 90_000, spent.id])
    assert waiting.obstacles(bench.store, bench.now(run)) == []
    bench.until(lambda: bench.now(run).handle)
