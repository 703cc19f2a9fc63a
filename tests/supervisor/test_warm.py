"""Attempts that start from a worker that waits: they have what fresh ones have, whatever happens to it."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from environments.settings import FILE
from flash_mcp.supervisor.launch import local, warm
from flash_mcp.supervisor.launch.base import Handle, Launch
from flash_mcp.supervisor.launch.local import LocalLauncher
from tests.places import ROOT
from tests.waiting import WAIT_S, wait_for
from tests.watch import is_running

PROGRAM = [sys.executable, "-P", str(ROOT / "tests" / "warm_program.py")]


@dataclass
class Bench:
    launcher: LocalLauncher
    base: Path
    count: int = 0

    def launch(self, *, code: str = "", **variables: str) -> Launch:
        """Another attempt, with secrets of its own."""
        self.count += 1
        folder = self.base / f"run-{self.count}"
        folder.mkdir()
        secrets = {"OWN": f"secret-{self.count}", "HF_TOKEN": f"token-{self.count}"}
        given = {**os.environ, **secrets, **variables}
        command = [*PROGRAM, warm.FRESH, str(folder), *filter(None, [code])]
        return Launch(f"run-{self.count}", 1, command, given, folder / "log", secrets=["OWN"])

    def facts(self, launch: Launch) -> dict[str, Any]:
        """What the attempt reports, once it was submitted. Another one can start afterwards."""
        handle = self.launcher.submit(launch)
        path = self.base / launch.run_id / "facts.json"
        wait_for(path.exists, evidence=lambda: (self.base / launch.run_id / "log").read_text())
        self.launcher.cancel(handle)
        return json.loads(path.read_text())

    def ready(self) -> int:
        """The process that waits, once its packages are imported."""
        assert self.launcher.rest()
        assert self.launcher.capacity == 0, "a run waits for it"
        wait_for(lambda: self.launcher.capacity)
        return self.pid

    @property
    def pid(self) -> int:
        assert self.launcher._warm._process
        return self.launcher._warm._process.pid


@pytest.fixture
def bench(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(warm, "LEAST_FREE_BYTES", 0)
    made = Bench(LocalLauncher(flash_home / "attempts", gpus=[]), flash_home)
    yield made
    for number in range(made.count):
        made.launcher.cancel(Handle(f"run-{number + 1}-1", ""))
    made.launcher._warm.close()


def test_an_attempt_from_a_warm_worker_has_what_a_fresh_one_has_and_nothing_of_another(bench: Bench) -> None:
    fresh = bench.facts(bench.launch())
    pid = bench.ready()
    assert "secret-" not in (variables := Path(f"/proc/{pid}/environ").read_text())
    assert "token-" not in variables
    warmed = bench.facts(bench.launch())
    assert warmed.pop("pid") == pid and "secret-1" not in json.dumps(warmed)
    assert "token-1" not in json.dumps(warmed)
    assert "secret-" not in warmed.pop("first_environ"), "it can be read in /proc"
    fresh = json.loads(re.sub(r"(run|secret|token)-1", r"\1-2", json.dumps(fresh)).replace(str(fresh["pid"]), str(pid)))
    del fresh["pid"], fresh["first_environ"]
    assert warmed == fresh


def test_its_end_is_told_and_its_output_is_in_the_log(bench: Bench) -> None:
    bench.facts(bench.launch())
    bench.ready()
    handle = bench.launcher.submit(launch := bench.launch(code="3"))
    wait_for(lambda: bench.launcher.poll([handle])[handle.key].state == "gone")
    assert bench.launcher.poll([handle])[handle.key].detail == "exit code 3"
    assert launch.log and launch.log.read_text() == "it reports\n"


def test_one_waits_once_for_each_attempt_while_no_other_is_under_way(bench: Bench) -> None:
    assert not bench.launcher.rest(), "nothing was started yet"
    first = bench.launcher.submit(bench.launch())
    assert not bench.launcher.rest(), "the machine is at work"
    bench.launcher.cancel(first)
    os.kill(bench.ready(), signal.SIGKILL)
    wait_for(lambda: not bench.launcher.rest())
    assert bench.launcher.capacity == 1


def touched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_changed_at", lambda: 0)


UNFIT: dict[str, Callable[[Bench, pytest.MonkeyPatch], Launch | None]] = {
    "killed": lambda bench, _: os.kill(bench.pid, signal.SIGKILL),
    "killed and seen": lambda bench, _: (os.kill(bench.pid, signal.SIGKILL), os.waitid(os.P_PID, bench.pid, 5))[2:],
    "stopped": lambda bench, _: os.kill(bench.pid, signal.SIGSTOP),
    "another variable": lambda bench, _: bench.launch(HF_HOME="/elsewhere"),
    "code changed": touched,
    "several processes": lambda bench, _: replace(bench.launch(), gpus=2),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_attempt_that_it_does_not_fit_starts_afresh(bench: Bench, monkeypatch: pytest.MonkeyPatch, case: str):
    bench.facts(bench.launch())
    pid = bench.ready()
    monkeypatch.setattr(local, "SIGNAL_TIMEOUT_S", 2.0 if case == "stopped" else WAIT_S)
    assert bench.facts(UNFIT[case](bench, monkeypatch) or bench.launch())["pid"] != pid
    assert is_running(pid) == (case == "several processes"), "it may serve the next attempt"


def test_it_is_left_alone_until_it_is_ready_and_ends_with_what_started_it(bench: Bench, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from flash_mcp.supervisor.launch import local, warm
from flash_mcp.supervisor.launch.base import Launch
warm.LEAST_FREE_BYTES = 0
launcher = local.LocalLauncher(Path({str(tmp_path / "attempts")!r}), gpus=[])
launcher._warm.expect(Launch("run-1", 1, [*{PROGRAM}, warm.FRESH], dict(os.environ), None))
launcher.rest()
if sys.argv[1] == "ready":
    while not launcher.capacity: pass
print(launcher._warm._process.pid, flush=True)
signal.pause()
"""
    for when in ("ready", "before"):
        with subprocess.Popen([sys.executable, "-c", code, when], stdout=subprocess.PIPE) as starter:
            assert starter.stdout
            pid = int(starter.stdout.readline())
            starter.kill()
        wait_for(lambda it=pid: not is_running(it))


def test_a_kill_at_any_moment_costs_time_only(bench: Bench) -> None:
    """Or the attempt, if it had begun: then its record says that it is gone, as of any that was killed."""
    chance = random.Random(0)
    bench.facts(bench.launch())
    for _ in range(8):
        assert bench.launcher.rest()
        killer = subprocess.Popen(["sh", "-c", f"sleep {chance.uniform(0, 0.6):.3f}; kill -9 {bench.pid}"])
        time.sleep(chance.uniform(0, 0.6))
        pid = bench.pid
        handle = bench.launcher.submit(launch := bench.launch())
        killer.wait()
        path = bench.base / launch.run_id / "facts.json"
        wait_for(lambda it=handle, path=path: path.exists() or bench.launcher.poll([it])[it.key].state == "gone")
        if bench.launcher.poll([handle])[handle.key].state == "gone":
            assert handle.id == str(pid)
        else:
            assert json.loads(path.read_text())["pid"] == int(handle.id)
        bench.launcher.cancel(handle)
        assert not is_running(pid)


@pytest.mark.parametrize("text", ["[workers]\nkeep_warm = false", "[workers"])
def test_none_is_kept_where_the_settings_say_so_or_cannot_be_read(bench: Bench, text: str) -> None:
    bench.facts(bench.launch())
    (bench.base / FILE).write_text(text)
    assert not bench.launcher.rest()
