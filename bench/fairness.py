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
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.owners import Caller, Limits, acting_as
from flash_mcp.state.store import Store
from flash_mcp.state.targets import new_target, write_target
from flash_mcp.supervisor.loop import CLAIM_S

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
    """Card seconds of each owner while all had runs queued, the longest waits of `RARE`, and the
    seconds that looks at a target took.
    """

    used: Counter[str] = field(default_factory=Counter[str])
    waits_s: list[float] = field(default_factory=list[float])
    looks_s: list[float] = field(default_factory=list[float])
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
        for number in range(runs):
            target = self.chance.choices(TARGETS, SHARES)[0]
            # Not in turn: the first owner brings all of theirs first.
            self.enqueue(OWNERS[number * len(OWNERS) // runs], target)

    def enqueue(self, owner: str, target: str) -> None:
        spec = RunSpec.model_validate({"environment": "calc", "target": target})
        with acting_as(Caller(owner, limits=Limits(queued_runs=10**6))):
            queue.enqueue(self.store, resolve(spec), self.environment)

    def run(self) -> Found:
        """Until no run is left."""
        while self.store.active_targets():
            queued = {row["owner"] for row in self.store.query(OWNERS_QUEUED)}
            if queued and self.chance.random() < 0.05:
                self.enqueue(RARE, self.chance.choice(TARGETS))
            self._end_those_due()
            for target in TARGETS:
                began = time.monotonic()
                self._start(target, counts=queued >= set(OWNERS))
                self.found.looks_s.append(time.monotonic() - began)
            next_end = self.under_way[0][0] if self.under_way else self.now
            is_cut_short = max(self.found.looks_s[-len(TARGETS) :]) >= CLAIM_S
            self.now += LOOK_S if is_cut_short else max(LOOK_S, next_end - self.now)
        return self.found

    def _start(self, target: str, *, counts: bool) -> None:
        """As the supervisor does in a look."""
        self.store.taken_runs(target)
        until = time.monotonic() + CLAIM_S
        while self.room[target] and time.monotonic() < until:
            run = queue.claim(self.store, target=target)
            if run is None:
                return
            self.room[target] -= 1
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
            self.room[run.target] += 1
            self.found.ended += 1


OWNERS_QUEUED = """
    SELECT DISTINCT owner FROM main.runs INDEXED BY runs_queued WHERE state = 'queued'"""


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
        f"a look: median {looks[len(looks) // 2]:.3f} s, longest {looks[-1]:.3f} s",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
