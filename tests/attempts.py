"""Worker attempts as real processes over a real run folder."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from tests import forked
from tests.places import VOWELS


def make_run(
    folder: Path, model: Path, *, environment: Path = VOWELS, job: dict[str, Any] | None = None, **fields: Any
) -> RunFolder:
    """A run folder with a job of a few quick steps."""
    quick = {"steps": 5, "batch_size": 4, "group_size": 8, "max_tokens": 16, "max_length": 256, "lora_rank": 8,
             "lora_alpha": 16, "learning_rate": 0.01, "save_every": 1}  # fmt: skip
    given = {name: value for name, value in {**quick, **fields}.items() if value is not None}
    resolved = resolve(RunSpec(environment=environment.name, model=str(model), **given))
    run = RunFolder(folder)
    run.create(
        {
            "run_id": folder.name, "spec": resolved.spec.model_dump(), "sources": resolved.sources,
            "environment": {"name": environment.name, "digest": "0", "path": str(environment)},
            "model": str(model), "init_adapter": None, "created": time.time(), **(job or {}),
        }
    )  # fmt: skip
    return run


def events_of(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    events = [run.event(name) or {} for name in run.event_names()]
    return [event for event in events if event["kind"] == kind]


def messages_of(run: RunFolder, kind: str) -> list[str]:
    return [event["message"] for event in events_of(run, kind)]


def vowels(folder: Path, old: str = "", new: str = "", *, more: str = "") -> Path:
    """The environment of vowels with `new` in the place of `old`, and `more` at its end."""
    folder.mkdir()
    (folder / "environment.py").write_text((VOWELS / "environment.py").read_text().replace(old, new) + more)
    return folder


HELD = """
import itertools, pathlib, time
class Held(Vowels):
    opened = itertools.count(1)
    def start_episode(self, example):
        number = next(self.opened)
        while pathlib.Path({flag!r}).exists() and (number > float("{after}") or pathlib.Path({saved!r}).exists()):
            time.sleep(0.02)
        return super().start_episode(example)
def load_environment(train=12, held_out=5, question="Write"):
    return Held(train, held_out, question)
"""


def held(folder: Path, *, after: float = math.inf, saved: Path | None = None) -> tuple[Path, Path]:
    """An environment whose episodes wait as long as a file exists, and that file: those after the first `after`, or
    those that begin when the checkpoint `saved` is there."""
    flag = folder / "flag"  # in the folder, for the environment sees nothing beside it
    vowels(folder, more=HELD.format(after=after, flag=str(flag), saved=str(saved or "/nowhere")))
    flag.touch()
    return folder, flag


ONE_BY_ONE = """
from worker import main
main.prepare_process()
from worker.session import Session
Session._sequences = 1
main.main()
"""


class Attempt:
    """`python -m worker.main` as a child of the test.

    With `one_by_one` its engine advances one conversation at a time: bit for bit the same whenever
    replies arrive. A `fresh` one imports its packages itself, for tests of what it imports, how
    much memory it has, or of variables that packages read when they are imported."""

    program = ""
    """Python code that calls the worker, if not the worker itself."""

    def __init__(
        self, run: RunFolder, number: int = 1, *, one_by_one: bool = False, fresh: bool = False, **variables: str
    ) -> None:
        code = ONE_BY_ONE if one_by_one else self.program
        program = ["-c", code] if code else ["-m", "worker.main"]
        arguments = [*program, run.url, "--attempt", str(number)]
        # Environments of tests wait for what stands in the run's folder.
        environment = {**os.environ, "FLASH_READABLE": run.path(""), **variables}
        self.run = run
        self.log_path = Path(run.path(f"log.{number}"))
        self.process: forked.Forked | subprocess.Popen[bytes]
        with self.log_path.open("wb") as log:
            if fresh:
                environment.pop(forked.VARIABLE, None)
                self.process = subprocess.Popen(
                    [sys.executable, *arguments],
                    stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=environment,
                )  # fmt: skip
            else:
                self.process = forked.Forked(arguments, self.log_path, environment)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float = 600) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not in time:\n{self.log_path.read_text()[-4000:]}") from None

    def ended(self) -> dict[str, Any] | None:
        """The run's result, once the attempt has ended by itself with the exit code 0."""
        with self:
            assert self.wait() == 0, self.log_path.read_text()
        return self.run.result()

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 600) -> None:
        """Bounded; fails at once when the attempt ends first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.02)
