"""Faults of a cluster at random moments of many runs."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import psutil

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.supervisor.process import LockOwner
from flash_mcp.tools.shared.run_view import report_on
from tests.crash import defects_of, seen_in
from tests.scale.rehearsal import Rehearsal
from tests.slurm import Cluster as Slurm

KINDS = ("worker", "wrapper", "minder", "node", "controller", "supervisor", "link", "store", "cancel", "disk",
         "keys", "slow", "lag", "drain")  # fmt: skip
ONLY_SLURM = ("drain",)
NAMES = {
    "slurm": {"minder": "slurmstepd", "node": "slurmd", "controller": "slurmctld"},
    "ray": {"minder": "job supervisor", "node": "raylet", "controller": "gcs_server"},
}
"""What an engine calls the process that starts an attempt, a node's daemon, and its head."""
SHOWN = {
    "worker": "worker killed",
    "wrapper": "wrapper killed",
    "minder": "{} killed",
    "node": "{} killed, started again after 15 s",
    "controller": "{} killed, started again after 15 s",
    "supervisor": "supervisor killed",
    "link": "link of a node cut for 40 s",
    "store": "store frozen for 60 s",
    "cancel": "job cancelled behind our back, and let go on",
    "disk": "disk of the nodes full for 20 s",
    "keys": "keys of the store expired for 240 s",
    "slow": "store at 200 kB/s for 60 s",
    "lag": "lists of the store 10 s late for 60 s",
    "drain": "nodes drained for 40 s",
}
TARGETS = ("quick", "near")  # they share a cluster, and each has runs
STEPS = 15
PAUSE_S = 4.0  # the longest between the end of a fault and the next
DOWN_S = 15.0
CUT_S = 40.0
FROZEN_S = 60.0
FULL_S = 20.0
EXPIRED_S = 240.0
BYTES_PER_S = 200_000.0
LAG_S = 10.0
MOST_TOOL_S = 2.0  # no tool may take longer, whatever a target does
OUTLIVE_S = 120.0  # how long a process may need to see that its attempt was replaced


def shown(engine: str, kind: str) -> str:
    return SHOWN[kind].format(NAMES[engine].get(kind, ""))


@dataclass
class Strike:
    kind: str
    pause_s: float
    struck: bool = False


def plan(engine: str, seed: int, number: int) -> list[Strike]:
    """So many faults, of each kind about as many, in random order."""
    chance = random.Random(seed)
    possible = [kind for kind in KINDS if engine == "slurm" or kind not in ONLY_SLURM]
    kinds = [possible[place % len(possible)] for place in range(number)]
    chance.shuffle(kinds)
    return [Strike(kind, round(chance.uniform(0, PAUSE_S), 2)) for kind in kinds]


class Strikes(threading.Thread):
    """Strikes as planned, each while a run is under way, and spread over all runs."""

    def __init__(
        self, rehearsal: Rehearsal, faults: list[Strike], runs: int, seed: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="strikes", daemon=True)
        self.rehearsal = rehearsal
        self.faults = faults
        self.runs = runs
        self.ended = 0
        """Runs that have ended."""
        self.chance = random.Random(seed)
        self.say = say
        self.over = threading.Event()
        self._down_until = 0.0

    def run(self) -> None:
        for place, fault in enumerate(self.faults):
            while self.ended < place * self.runs // len(self.faults) - 1:
                if self.over.wait(0.2):
                    break
            self.over.wait(fault.pause_s)
            while not fault.struck and not self.over.is_set():
                try:
                    fault.struck = self._strike(fault.kind)
                except (psutil.Error, LookupError, OSError, httpx.TransportError):
                    # It has just ended, or what would do it is down.
                    fault.struck = False
                self.over.wait(0.2)
        self.rehearsal.store.close()

    def mend(self) -> None:
        """Start again what was killed, once it was down for long enough, and let runs go on whose jobs were
        cancelled."""
        if time.monotonic() >= self._down_until:
            self.rehearsal.cluster.mend()
        for run in self.rehearsal.store.runs(limit=1000):
            if queue.is_held(run):
                queue.release(self.rehearsal.store, run.id)

    def _strike(self, kind: str) -> bool:
        """Whether there was a victim."""
        taken = [run for target in TARGETS for run in self.rehearsal.store.taken_runs(target)]
        running = [run for run in taken if run.state == "running" and run.handle]
        if not running or time.monotonic() < self._down_until:
            return False
        run = self.chance.choice(running)
        acts: dict[str, Callable[[Run], None]] = {
            "worker": lambda run: self.rehearsal.processes("worker.main", run)[0].kill(),
            "wrapper": lambda run: self.rehearsal.processes("worker.node", run)[0].kill(),
            "minder": lambda run: self._minder(run).kill(),
            "node": lambda _: self._kill_node(),
            "controller": lambda _: self._kill_controller(),
            "supervisor": lambda _: self._kill_supervisor(),
            "link": lambda _: self._cut(),
            "store": lambda _: self._freeze(),
            "cancel": self.rehearsal.end_behind_our_back,
            "disk": lambda _: self._fill(),
            "keys": lambda _: self._spoil("expired", 1.0, EXPIRED_S),
            "slow": lambda _: self._spoil("rate", BYTES_PER_S, FROZEN_S),
            "lag": lambda _: self._spoil("lag", LAG_S, FROZEN_S),
            "drain": lambda _: self._drain(),
        }
        step = self.rehearsal.store.run(run.id).step
        acts[kind](run)
        self.say(f"{run.id} at step {step}: {shown(self.rehearsal.engine, kind)}")
        return True

    def _minder(self, run: Run) -> psutil.Process:
        """The engine's process that started the attempt. LookupError if there is none."""
        for process in self.rehearsal.processes("worker.node", run)[0].parents():
            words = process.cmdline()
            if process.name() == "slurmstepd" or (words and words[0].startswith("ray::")):
                return process
        raise LookupError("the attempt has no minder")

    def _kill_node(self) -> None:
        cluster = self.rehearsal.cluster
        self._down_until = time.monotonic() + DOWN_S
        if isinstance(cluster, Slurm):
            cluster.kill(self.chance.choice(list(self.rehearsal.network.addresses)))
        else:
            cluster.daemon_of("other", "raylet").kill()

    def _kill_controller(self) -> None:
        cluster = self.rehearsal.cluster
        self._down_until = time.monotonic() + DOWN_S
        if isinstance(cluster, Slurm):
            cluster.kill("slurmctld")
        else:
            cluster.daemon_of("head", "gcs_server").kill()

    def _kill_supervisor(self) -> None:
        holder = LockOwner.read(self.rehearsal.home)
        if holder is None or not holder.is_supervisor_of(self.rehearsal.home):
            raise LookupError("no supervisor runs")
        holder.kill(self.rehearsal.home)

    def _cut(self) -> None:
        with self.rehearsal.network.cut(self.chance.choice(list(self.rehearsal.network.addresses))):
            self.over.wait(CUT_S)

    def _freeze(self) -> None:
        with self.rehearsal.objects.frozen():
            self.over.wait(FROZEN_S)

    def _spoil(self, kind: str, value: float, seconds: float) -> None:
        with self.rehearsal.objects.faulty(kind, value):
            self.over.wait(seconds)

    def _fill(self) -> None:
        with self.rehearsal.full_disk():
            self.over.wait(FULL_S)

    def _drain(self) -> None:
        nodes = ["scontrol", "update", f"NodeName={','.join(self.rehearsal.network.addresses)}"]
        subprocess.run([*nodes, "State=DRAIN", "Reason=maintenance"], check=True, timeout=30)
        self.over.wait(CUT_S)
        subprocess.run([*nodes, "State=RESUME"], check=True, timeout=30)


class Runs:
    """Quick runs on the target, and what each had committed when it ended."""

    def __init__(self, rehearsal: Rehearsal, number: int) -> None:
        self.rehearsal = rehearsal
        self.store = rehearsal.store
        self.ids: list[str] = []
        for _ in range(number):
            self.add()
        self.committed: dict[str, list[object]] = {}
        self.tool_s = 0.0
        """The longest that a tool took: to list runs, to show one, and to note something on it."""

    def add(self) -> None:
        """One more, on the next target."""
        spec = {"environment": "vowels", "steps": STEPS, "save_every": 1, "keep_checkpoints": 100,
                "max_attempts": 20, "target": TARGETS[len(self.ids) % len(TARGETS)]}  # fmt: skip
        resolved = resolve(RunSpec.model_validate(spec))
        self.ids.append(queue.enqueue(self.store, resolved, self.store.environment("vowels"))[0].id)

    def use_tools(self) -> None:
        began = time.monotonic()
        self.store.runs()
        run = report_on(self.store, self.ids[0]).view
        queue.label(self.store, self.store.run(run.run_id), queue.Label(note=f"at {began:.0f}"))
        self.tool_s = max(self.tool_s, time.monotonic() - began)

    def note_ended(self) -> int:
        """Keep what runs that have ended since left; how many have ended."""
        for run in self.store.runs(limit=len(self.ids)):
            if run.ended and run.id in self.ids and run.id not in self.committed:
                self.committed[run.id] = seen_in(RunFolder(run.folder))
        return len(self.committed)

    def defects(self) -> dict[str, list[str]]:
        """{run: what is wrong with it}, of runs where something is."""
        processes = self.rehearsal.processes
        deadline = time.monotonic() + OUTLIVE_S
        while (left := processes("worker.main")) and time.monotonic() < deadline:
            time.sleep(0.5)
        found = {"processes": [f"outlived its run: {process.cmdline()}" for process in left]}
        if self.tool_s > MOST_TOOL_S:
            found["tools"] = [f"one took {self.tool_s:.1f} s"]
        for run_id in self.ids:
            run = self.store.run(run_id)
            if run.ended is None:
                found[run_id] = [f"has not ended: {run.state}, attempt {run.attempt}, {run.error}"]
                continue
            found[run_id] = defects_of(self.store, run, STEPS, is_quick=True)
            for event in self.store.events(run_id):
                if (event.data.get("error") or {}).get("code") == "stalled":
                    found[run_id].append(f"an attempt was ended that worked: {event.message}")
            committed = self.committed.get(run_id)  # none of one that ended after the last look
            if committed is not None and seen_in(RunFolder(run.folder)) != committed:
                found[run_id].append("its folder changed after its end")
            epochs = [row.epoch for row in self.store.metrics(run_id)]
            if epochs != sorted(epochs):
                found[run_id].append(f"attempts of its steps: {epochs}")
        return {name: wrong for name, wrong in found.items() if wrong}

    def attempts(self) -> int:
        return sum(self.store.run(run_id).attempt for run_id in self.ids)
