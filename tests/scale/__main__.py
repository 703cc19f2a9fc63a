"""Sets up a cluster of two nodes on this machine, shows that training on it is safe, tears it down.

    scripts/scale slurm [--only checks|faults|overhead] [--runs 40] [--faults 30] [--seed 0]
    scripts/scale simulation [--runs 1000] [--queued 10000]

The checks are a user's commands; the nodes see nothing of FLASH_HOME, and the storage is moto's S3.
The faults hit 40 runs of a stand-in for training, whose state is a chain of hashes: a step that was
left out, made twice, or begun from a torn file shows. All time-outs are the product's own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flash_mcp.supervisor import process
from tests.scale import checks, rehearsal, simulation
from tests.scale.overhead import measure
from tests.scale.rehearsal import ENGINES, Rehearsal
from tests.scale.strikes import TARGETS, Runs, Strikes, plan, shown

PARTS = ("checks", "overhead", "faults")
FAULTS_S = 3 * 3600.0
EVERY_S = 1.0


@dataclass
class Row:
    """One line of the table."""

    what: str
    seconds: float
    seen: str = ""
    defects: list[str] = field(default_factory=list[str])


class Session:
    """Runs the parts, with a bar for each, and collects the table's rows."""

    def __init__(self, engine: str, console: Console) -> None:
        self.engine = engine
        self.console = console
        self.rows: list[Row] = []
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console)

    def act(self, what: str, act: Callable[[], str]) -> None:
        """Do it; what fails is a defect, and the rest goes on."""
        began = time.monotonic()
        row = Row(what, 0.0)
        try:
            row.seen = act()
        except Exception as error:
            self.say(traceback.format_exc())
            row.defects.append(f"{type(error).__name__}: {error}"[:1000])
        row.seconds = round(time.monotonic() - began, 1)
        self.rows.append(row)
        self.say(f"{what}: {row.seconds:.0f} s {row.seen}")

    def say(self, line: str) -> None:
        now = time.strftime("%H:%M:%S")
        self.console.print(f"{now} {line}", markup=False, highlight=False)

    def check(self, made: Rehearsal) -> None:
        made.make_model()
        steps = list(checks.Checks(made).all())
        bar = self.progress.add_task("checks", total=len(steps))
        for what, act in steps:
            self.act(what, act)
            self.progress.advance(bar)

    def cost(self, made: Rehearsal) -> None:
        made.make_model()
        made.add_target("side")
        targets = ("local", "side")
        bar = self.progress.add_task("overhead", total=len(targets))
        for target in targets:
            self.act(f"a run, {target}", lambda target=target: _words(made, target))
            self.progress.advance(bar)

    def strike(self, made: Rehearsal, number: int, faults: int, seed: int) -> None:
        """Runs under random faults, until all have ended: so many, or more while faults are left."""
        began = time.monotonic()
        for target in TARGETS:
            made.add_target(target, quick=True)
        runs = Runs(made, number)
        strikes = Strikes(made, plan(self.engine, seed, faults), number, seed, self.say)
        ended_bar = self.progress.add_task("runs under faults", total=number)
        struck_bar = self.progress.add_task("faults", total=faults)
        strikes.start()
        while time.monotonic() - began < FAULTS_S:
            strikes.mend()
            runs.use_tools()
            ended = strikes.ended = runs.note_ended()
            self.progress.update(ended_bar, completed=ended)
            struck = sum(fault.struck for fault in strikes.faults)
            self.progress.update(struck_bar, completed=struck)
            if ended == len(runs.ids):
                if struck == faults:
                    break
                runs.add()
            time.sleep(EVERY_S)
        strikes.over.set()
        strikes.join(30)
        found = runs.defects()
        for name, wrong in found.items():
            self.say(f"{name}: {wrong}")
        for kind, count in Counter(each.kind for each in strikes.faults if each.struck).items():
            self.rows.append(Row(shown(self.engine, kind), 0.0, f"{count}"))
        row = Row(f"{len(runs.ids)} runs under these faults", round(time.monotonic() - began, 1))
        row.seen = f"{ended} ended, {runs.attempts()} attempts, {len(found)} with defects"
        row.seen += f", tools within {runs.tool_s:.2f} s"
        row.defects = [f"{name}: {'; '.join(wrong)}" for name, wrong in found.items()]
        self.rows.append(row)

    def table(self) -> Table:
        shown = Table("what", "seconds", "seen", "defects", title=f"scripts/scale {self.engine}")
        for row in self.rows:
            seconds = f"{row.seconds:.0f}" if row.seconds else ""
            shown.add_row(row.what, seconds, row.seen, str(len(row.defects)))
        return shown


def _words(made: Rehearsal, target: str) -> str:
    cost = measure(made, target)
    words = f"{cost.first_step_s:.1f} s to the first step, {cost.step_s:.2f} s a step"
    if cost.step_requests is not None:
        words += f", {cost.step_requests:.1f} requests a step, {cost.idle_requests} an idle minute"
    return words


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["simulation"]:
        return simulation.main(words[1:])
    parser = argparse.ArgumentParser(
        prog="scripts/scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--only", choices=PARTS, action="append", help="may be repeated")
    parser.add_argument("--runs", type=int, default=40, metavar="N", help="under faults")
    parser.add_argument("--faults", type=int, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE too")
    given = parser.parse_args(words)
    if reason := rehearsal.missing(given.engine):
        parser.exit(2, f"no rehearsal: {reason}\n")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console(width=None if sys.stdout.isatty() else 160)
    session = Session(given.engine, console)
    parts = given.only or PARTS
    with session.progress, rehearsal.running(given.engine) as made, process.supervised():
        if "checks" in parts:
            session.check(made)
        if "overhead" in parts:
            session.cost(made)
        if "faults" in parts:
            session.strike(made, given.runs, given.faults, given.seed)
        session.act("remove", lambda: checks.removed(made))
    console.print(session.table())
    if given.json:
        rows = [asdict(row) for row in session.rows]
        given.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))
    return int(any(row.defects for row in session.rows))


if __name__ == "__main__":
    sys.exit(main())
