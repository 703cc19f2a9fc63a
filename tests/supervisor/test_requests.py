"""What runs on a target cost in requests to its store, and that a store that says nothing holds up nobody else."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.state import queue
from flash_mcp.state.targets import new_target, remove_target, write_target
from flash_mcp.supervisor.launch.base import JobStatus
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.targets import RemoteTarget
from flash_mcp.tools.shared import waiting
from flash_mcp.tools.shared.run_view import report_on
from tests.protocol.test_run_folder import BUCKET, ObjectStore, adapter, object_store
from tests.supervisor.test_targets import HASTE, Bench, Lab
from tests.waiting import wait_for
from worker.heartbeat import Heartbeat

pytestmark = pytest.mark.slow
RUNS = 3
s3 = object_store


@pytest.fixture
def bench(s3: ObjectStore, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "home")
    remove_target(made.store.base, "lab")
    fields = {"engine": "slurm", "storage": f"s3://{BUCKET}/{tmp_path.name}"}
    write_target(made.store.base, "lab", new_target(made.store.base, "lab", fields))
    made.lab.retry_s = 30.0  # a busy machine is no store that is away
    made.lab.beat_every_s = 0.2
    yield made
    made.close()


def started(bench: Bench, number: int = RUNS) -> tuple[list[Run], list[RunWriter]]:
    bench.lab.engine.capacity = number
    runs = [bench.train() for _ in range(number)]
    bench.until(lambda: all(bench.now(run).handle for run in runs))
    return runs, [bench.start(run) for run in runs]


def cost(s3: ObjectStore, bench: Bench) -> int:
    """Requests of one look at all runs."""
    for attempt in bench.reconciler._attempts.values():
        attempt.beat_due_at = 0.0
    before = s3.requests()
    bench.tick()
    return s3.requests() - before


def make_step(writer: RunWriter, step: int, tmp_path: Path, *, saves: bool = False) -> None:
    writer.metrics(step, {"loss": 1.0})
    writer.rollouts(step, [{"index": 0, "reward": 1.0, "success": True}])
    if saves:
        writer.commit_checkpoint(step, adapter(tmp_path), {})
    writer.beat(step, "train", step)


def test_a_look_at_a_run_costs_one_request_and_a_step_a_few_however_long_the_run_is(
    s3: ObjectStore, bench: Bench, tmp_path: Path
) -> None:
    runs, writers = started(bench)
    cost(s3, bench)
    assert cost(s3, bench) == RUNS
    found: list[tuple[int, int, int]] = []
    for step in range(1, 9):
        before = s3.requests()
        make_step(writers[0], step, tmp_path)
        made = s3.requests() - before
        look = cost(s3, bench)
        saving = s3.requests()
        make_step(writers[0], step, tmp_path, saves=True)
        saving = s3.requests() - saving
        cost(s3, bench)
        found.append((made, look - RUNS, saving))
    assert [row.step for row in bench.store.metrics(runs[0].id)] == list(range(1, 9))
    # A busy machine now and then adds a request: the least of some steps is what it costs.
    made, look, saving = (min(costs) for costs in zip(*found[2:5], strict=True))
    assert (made, look, saving) == tuple(min(costs) for costs in zip(*found[5:], strict=True)), found
    print(f"step: {made} by the worker, {look} by the supervisor; saving {saving - made} more")  # noqa: T201
    assert min(cost(s3, bench) for _ in range(3)) == RUNS


def test_a_run_with_a_step_a_minute_costs_at_most_7_requests_in_10_seconds(s3: ObjectStore, bench: Bench) -> None:
    (run, *_), (writer, *_) = started(bench)
    for _ in range(2):
        cost(s3, bench)
    heartbeat, beats = Heartbeat(writer), 10
    pace_s, heartbeat._every_s = heartbeat._every_s, 0.01
    before = s3.requests()
    made: list[int] = []
    with patch.object(writer, "beat", lambda *of: (made.append(1), RunWriter.beat(writer, *of))):
        heartbeat.start()
        wait_for(lambda: len(made) >= beats)
        heartbeat.stop()
    # A busy machine now and then adds a request to one of them.
    node = 60 / pace_s * ((s3.requests() - before) // len(made))
    reads: list[int] = []
    steps: list[int] = []
    for step in range(1, 5):
        bench.reconciler._attempts[run.id].read_at = -100.0
        reads.append(cost(s3, bench) - RUNS)
        before = s3.requests()
        writer.metrics(step, {"loss": 1.0})
        writer.rollouts(step, [{"index": 0, "reward": 1.0, "success": True}])
        written = s3.requests() - before
        writer.beat(step, "train", step)
        steps.append(written + cost(s3, bench) - RUNS)
    looks = 60 / RemoteTarget.beat_every_s
    read, step = min(reads), min(steps)
    a_second = (node + looks + read + step) / 60
    print(f"a minute: {node:.1f} by the node, {looks + read:.1f} by the supervisor; a step {step}")  # noqa: T201
    assert a_second <= 0.7


def test_a_look_at_many_runs_with_news_in_a_slow_store_ends_soon(s3: ObjectStore, bench: Bench, tmp_path: Path) -> None:
    number, delay_s = 5, 0.03
    runs, writers = started(bench, number)
    cost(s3, bench)
    for writer in writers:
        make_step(writer, 1, tmp_path)
    s3.delay(delay_s)
    began = time.monotonic()
    cost(s3, bench)
    print(f"a look at {number} runs: {time.monotonic() - began:.2f} s")  # noqa: T201
    bench.until(lambda: all(bench.store.metrics(run.id) for run in runs))
    print(f"all were read after {time.monotonic() - began:.2f} s")  # noqa: T201
    s3.delay(0)


OFFER = "from pathlib import Path; from flash_mcp.supervisor import secrets; secrets.offer_store_keys(Path({!r}))"


def test_keys_that_a_later_shell_has_are_used_once_the_store_refuses_those_before(
    s3: ObjectStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "obstacle", lambda _: None)  # no supervisor's process runs here
    key = "AWS_ACCESS_KEY_ID"
    monkeypatch.setenv(key, os.environ[key])  # it is that of before again after the test
    bench.lab.retry_s = 1.0
    (run,), (writer,) = started(bench, 1)
    local = Lab()
    local.name = "local"
    supervisor = Supervisor(bench.store.base, launcher=local.launcher, timeouts=HASTE, open_target=lambda *_: bench.lab)
    supervisor.vault.open()

    def until(condition: Callable[[], object]) -> None:
        wait_for(condition, tick=supervisor.tick, evidence=lambda: vars(bench.now(run)))

    def offer(value: str) -> None:
        shell = {**os.environ, key: value}
        subprocess.run([sys.executable, "-c", OFFER.format(str(bench.store.base))], env=shell, check=True)

    try:
        until(lambda: supervisor.vault._new_keys or offer("key-of-a-later-shell"))
        with s3.faulty("expired", 2.0):
            until(lambda: os.environ[key] == "key-of-a-later-shell" and bench.now(run).pending_reason is None)
            writer.folder = RunFolder(run.folder)  # as one with new keys of its own
            writer.beat(2, "train")
            until(lambda: bench.now(run).step == 2)
            assert (bench.now(run).attempt, bench.now(run).pending_reason) == (1, None)
        # Those that were refused are not taken again, and nothing else is refused now.
        offer("key-of-the-test")
        assert not supervisor.vault.take_store_keys()
        with s3.faulty("expired"):
            until(lambda: "refuses" in str(bench.now(run).pending_reason))
            for _ in range(20):  # also between two looks at its heartbeat
                supervisor.tick()
                assert " s ago" in str(report_on(bench.store, run.id).view.pending_reason)
        until(lambda: bench.now(run).pending_reason is None)
    finally:
        supervisor.vault.close()
    assert (bench.now(run).attempt, bench.lab.engine.cancelled) == (1, [])


def test_a_store_that_says_nothing_holds_up_no_run_elsewhere_and_no_tool(s3: ObjectStore, bench: Bench) -> None:
    local = Lab()
    local.name = "local"
    runs, _ = started(bench)
    here = bench.train("local")
    supervisor = Supervisor(bench.store.base, launcher=local.launcher, timeouts=HASTE, open_target=lambda *_: bench.lab)

    def until(condition: Callable[[], object]) -> float:
        """Seconds until then."""
        began = time.monotonic()
        wait_for(condition, 60, tick=supervisor.tick)
        return time.monotonic() - began

    def overdue_s() -> float:
        """For how long the target's thread did not ask for heartbeats that it should have."""
        reconciler = supervisor._threads["lab"]._reconciler
        attempts = list(reconciler._attempts.values()) if reconciler else []
        if len(attempts) < RUNS or not all(each.read_beat for each in attempts):
            return -1.0
        return time.monotonic() - max(each.beat_due_at for each in attempts)

    until(lambda: bench.now(here).handle and overdue_s() > -1)
    with s3.frozen():
        until(lambda: overdue_s() > 1)
        RunWriter(RunFolder(here.folder), 1).commit_result("succeeded", 1)
        local.engine.statuses[f"{here.id}-1"] = JobStatus("gone")
        ended_s = until(lambda: bench.now(here).ended)
        began = time.monotonic()
        assert report_on(bench.store, runs[0].id, detailed=True).view.state == "running"
        status_s = time.monotonic() - began
        began = time.monotonic()
        assert queue.request_cancel(bench.store, runs[0].id).cancel_requested
        cancel_s = time.monotonic() - began
    print(f"ended {ended_s:.2f} s, status {status_s:.3f} s, cancel {cancel_s:.3f} s")  # noqa: T201
    assert max(ended_s, status_s, cancel_s) < 30  # far below a store's time-outs
    until(lambda: RunFolder(runs[0].folder).is_cancelled())
    assert {bench.now(run).attempt for run in runs} == {1}
