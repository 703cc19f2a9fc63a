"""A thousand runs under way on one target, by the real loop of the supervisor, its database and run folders. Only the
engine and the workers pretend: the engine takes its time for each job, and one process writes the heartbeats and steps
of all runs.

    scripts/scale simulation --runs 1000 --queued 10000"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.owners import Caller, Quotas, acting_as
from flash_mcp.state.targets import find_target, key_of, new_target, write_target
from flash_mcp.supervisor.launch.base import Handle, Launch
from flash_mcp.supervisor.loop import Supervisor, TargetThread
from flash_mcp.supervisor.targets import RemoteTarget
from flash_mcp.tools.shared.run_view import report_on
from tests.memory_launcher import MemoryLauncher
from tests.places import VOWELS

OWNERS = ("a", "b", "c", "d", "e")
BEAT_EVERY_S = 5.0
STEP_EVERY_S = 30.0
LOOK_S = 0.5


class Engine(MemoryLauncher):
    """Takes `submit_s` for each job, as sbatch on a busy cluster does."""

    submit_s = 0.5

    def submit(self, launch: Launch) -> Handle:
        threading.Event().wait(self.submit_s)
        return super().submit(launch)


def pretend(folders: str) -> None:
    """Be the worker of every run whose folder comes up: beat every 5 s, and make a step every 30."""
    # A thousand workers have as many disks, none of which delays the database's.
    os.fsync = lambda _: None
    writers: dict[str, tuple[RunWriter, float]] = {}
    while True:
        began = time.monotonic()
        for path in Path(folders).glob("*/job.json"):
            if path.parent.name not in writers:
                writers[path.parent.name] = (RunWriter(RunFolder(path.parent), 1), 0.0)
        for name, (writer, due) in writers.items():
            if (now := time.monotonic()) < due:
                continue
            step = int(now / STEP_EVERY_S)
            if not Path(writer.folder.path(f"metrics/{step}.1.json")).exists():
                writer.rollouts(step, [{"index": 0, "reward": 1.0, "success": True}])
                writer.metrics(step, {"loss": 1.0})
            writer.beat(step, "train", step)
            writers[name] = (writer, now + BEAT_EVERY_S)
        threading.Event().wait(max(0.05, 0.5 - (time.monotonic() - began)))


@dataclass
class Seen:
    submitted_s: float = 0.0  # until the last of the later runs had its job
    gap_s: float = 0.0  # the longest time for which the supervisor took in no heartbeat of a run
    tool_s: float = 0.0  # the longest that `status` took meanwhile
    cpu_share: float = 0.0  # processor time of the supervisor while all runs were under way, by the clock's
    ended: list[str] = field(default_factory=list[str])  # runs whose attempt was ended


class Simulation:
    def __init__(self, base: Path, runs: int, queued: int) -> None:
        self.runs = runs
        fields: dict[str, Any] = {"engine": "slurm", "storage": f"{base}/storage", "slots": runs}
        write_target(base, "lab", new_target(base, "lab", fields))
        settings = find_target(base, "lab")
        self.engine = Engine()
        lab = RemoteTarget("lab", settings, self.engine, key_of(base))
        self.supervisor = Supervisor(base, launcher=MemoryLauncher(), open_target=lambda *_: lab)
        self.store = self.supervisor.store
        self.folders = f"{base}/storage/run-folders"
        environment = self.store.add_environment(name="vowels", digest="abcdef123456", path=str(VOWELS), size_bytes=1)
        spec = resolve(RunSpec.model_validate({"environment": "vowels", "target": "lab"}))
        for owner in OWNERS:
            with acting_as(Caller(owner, limits=Quotas(queued_runs=10**6))), self.store.transaction():
                for _ in range((runs + queued) // len(OWNERS)):
                    queue.enqueue(self.store, spec, environment)

    def play(self, *, later: int, hold_s: float, timeout_s: float) -> Seen:
        """Start all runs but `later`, then those, and hold all for a while."""
        seen = Seen()
        with self._supervised():
            self.engine.capacity = self.runs - later
            self._until(lambda: self._count("running") == self.runs - later, timeout_s)
            self.engine.capacity = self.runs
            began = time.monotonic()
            self._until(lambda: len(self.engine.statuses) == self.runs, timeout_s)
            seen.submitted_s = time.monotonic() - began
            self._until(lambda: self._count("running") == self.runs, timeout_s)
            self._watch(seen, hold_s)
        sql = "SELECT id FROM main.runs WHERE attempt > 1 OR error IS NOT NULL OR ended IS NOT NULL"
        seen.ended = self.store.column(sql)
        return seen

    def _watch(self, seen: Seen, hold_s: float) -> None:
        began = looked = time.monotonic()
        began_cpu = time.process_time()
        newest: dict[str, tuple[float, float]] = {}
        while looked - began < hold_s:
            for run_id, beat in self.store.two_columns("SELECT id, beat FROM main.runs WHERE state = 'running'"):
                before, since = newest.get(run_id, (None, looked))
                if beat == before:
                    seen.gap_s = max(seen.gap_s, looked - since)
                else:
                    newest[run_id] = (beat, looked)
            asked = time.monotonic()
            report_on(self.store, next(iter(newest)))
            seen.tool_s = max(seen.tool_s, time.monotonic() - asked)
            threading.Event().wait(LOOK_S)
            looked = time.monotonic()
        seen.cpu_share = (time.process_time() - began_cpu) / (looked - began)

    @contextmanager
    def _supervised(self) -> Generator[None]:
        over = threading.Event()

        def alive() -> None:
            if over.is_set():
                raise SystemExit

        self.supervisor.alive = alive

        def supervise() -> None:
            with suppress(SystemExit):
                self.supervisor.run()
            self.store.close()  # this thread's connection

        loop = threading.Thread(target=supervise)
        # Started afresh: a copy of this process would have its threads' locks.
        workers = get_context("spawn").Process(target=pretend, args=(self.folders,), daemon=True)
        loop.start()
        workers.start()
        try:
            yield
        finally:
            over.set()
            loop.join()
            for thread in threading.enumerate():
                if isinstance(thread, TargetThread):
                    thread.stopped.set()
                    thread.join()
            workers.kill()
            workers.join()
            self.store.close()

    def _count(self, state: str) -> int:
        (count,) = self.store.column("SELECT count(*) FROM main.runs WHERE state = ?", [state])
        return count

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self._count("running")
            threading.Event().wait(LOOK_S)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/scale simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--later", type=int, default=300, help="of these, started once the others are under way")
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--hold-s", type=float, default=180.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(Path(folder), options.runs, options.queued)
        seen = simulation.play(later=options.later, hold_s=options.hold_s, timeout_s=1800)
    lines = [
        f"{options.runs} runs under way, {options.queued} in the queue",
        f"{options.later} were submitted in {seen.submitted_s:.0f} s",
        f"each was seen at least every {seen.gap_s:.1f} s",
        f"status took at most {seen.tool_s:.2f} s",
        f"the supervisor took {seen.cpu_share:.0%} of a processor",
        f"attempts that were ended: {len(seen.ended)}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(seen.ended) or seen.gap_s > 30 or seen.submitted_s > 300)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
