"""Many runs of several owners on a few targets, by a simulated clock: who gets how much, who waits
how long, and how long the supervisor takes for a look.

    python -m bench.fairness --runs 10000 --cards 1000

Owners a to e keep their runs queued from the start; f brings one now and then. The engine is a
launcher in memory and no worker runs, so a look is what the database and the queue take."""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.owners import Caller, Quotas, acting_as
from flash_mcp.state.store import Store
from flash_mcp.state.targets import new_target, write_target
from flash_mcp.supervisor.reconciler import CLAIM_S

TARGETS: tuple[str, ...] = ("big", "middle", "small")
SHARES = (0.5, 0.3, 0.2)
"""Of the cards, and of the runs."""
OWNERS: tuple[str, ...] = ("a", "b", "c", "d", "e")
RARE = "f"
RUN_S = (600.0, 6000.0)
LOOK_S = 2.0
"""From one look at a target to the next, by the simulated clock."""


@dataclass
class Found:
    """Card seconds of each owner while all had runs queued, the waits of `RARE`, and the seconds
    that looks at a target took: all, and those of the processor.
    """

    used: Counter[str] = field(default_factory=Counter[str])
    waits_s: list[float] = field(default_factory=list[float])
    looks_s: list[float] = field(default_factory=list[float])
    looks_cpu_s: list[float] = field(default_factory=list[float])
    ended: int = 0


class Simulation:
    """The queue of a state directory, whose runs take their time by a clock that is set."""

    def __init__(self, base: Path, runs: int, cards: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.now = 1e9
        self.store = Store(base)
        self.environment = self.store.add_environment(
            name="calc", digest="abcdef123456", path="/e", size_bytes=1
        )
        self.room: dict[str, int] = {}
        for name, share in zip(TARGETS, SHARES, strict=True):
            self.room[name] = round(cards * share)
        self.under_way: list[tuple[float, str, Run]] = []
        self.found = Found()
        for name in TARGETS:
            fields = {"engine": "slurm", "storage": f"{base}/storage"}
            write_target(base, name, new_target(base, name, fields))
        self.queued: Counter[str] = Counter()
        """Queued runs of each owner."""
        for owner in OWNERS:  # not in turn: the first owner brings all of theirs first
            self.enqueue(owner, self.chance.choices(TARGETS, SHARES, k=runs // len(OWNERS)))

    def enqueue(self, owner: str, targets: Sequence[str]) -> None:
        """A run for each of the targets."""
        caller = Caller(owner, limits=Quotas(queued_runs=10**6))
        with acting_as(caller), self.store.transaction():
            for target in targets:
                spec = RunSpec.model_validate({"environment": "calc", "target": target})
                queue.enqueue(self.store, resolve(spec), self.environment)
        self.queued[owner] += len(targets)

    def run(self) -> Found:
        """Until no run is left."""
        while self.under_way or self.queued.total():
            if self.queued.total() and self.chance.random() < 0.05:
                self.enqueue(RARE, [self.chance.choice(TARGETS)])
            self._end_those_due()
            for target in TARGETS:
                began = time.monotonic()
                began_cpu = time.thread_time()
                self._start(target, counts=all(self.queued[owner] for owner in OWNERS))
                self.found.looks_s.append(time.monotonic() - began)
                self.found.looks_cpu_s.append(time.thread_time() - began_cpu)
            next_end = self.under_way[0][0] if self.under_way else self.now
            is_cut_short = max(self.found.looks_s[-len(TARGETS) :]) >= CLAIM_S
            self.now += LOOK_S if is_cut_short else max(LOOK_S, next_end - self.now)
        return self.found

    def _start(self, target: str, *, counts: bool) -> None:
        """As the supervisor does in a look."""
        self.store.active_targets()
        self.store.taken_runs(target)
        until = time.monotonic() + CLAIM_S
        while self.room[target] and time.monotonic() < until:
            run = queue.claim(self.store, target=target)
            if run is None:
                return
            self.room[target] -= 1
            self.queued[run.owner] -= 1
            length_s = self.chance.uniform(*RUN_S)
            heapq.heappush(self.under_way, (self.now + length_s, run.id, run))
            if counts:
                self.found.used[run.owner] += round(length_s)
            if run.owner == RARE:
                self.found.waits_s.append(self.now - run.created)

    def _end_those_due(self) -> None:
        while self.under_way and self.under_way[0][0] <= self.now:
            _, _, run = heapq.heappop(self.under_way)
            assert queue.finish(self.store, run.id, run.attempt, "succeeded")
            used = "UPDATE runs SET used_s = ended - started WHERE id = ?"
            self.store.execute(used, [run.id])
            self.room[run.target] += 1
            self.found.ended += 1


def simulate(base: Path, runs: int, cards: int) -> Found:
    """Play `runs` runs on so many cards."""
    clock = SimpleNamespace(time=lambda: 1e9)
    with patch.object(queue, "time", clock):
        simulation = Simulation(base, runs, cards)
        clock.time = lambda: simulation.now
        return simulation.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--cards", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=None, help="where the database lies")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = simulate(Path(folder), arguments.runs, arguments.cards)
    looks = sorted(found.looks_s)
    shares = {owner: round(seconds / 3600) for owner, seconds in sorted(found.used.items())}
    lines = [
        f"{found.ended} runs ended; card hours while all had runs queued: {shares}",
        f"the rare owner's {len(found.waits_s)} runs waited {max(found.waits_s):.0f} s at most",
        f"{len(looks)} looks: median {looks[len(looks) // 2]:.4f} s, longest {looks[-1]:.3f} s,"
        f" by the processor's clock {max(found.looks_cpu_s):.3f} s",
        f"{time.process_time():.0f} s of processor time",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
