"""Workers that start with their packages imported, which take most of the seconds of a short run.

A server, which is a process of its own, imports them once and forks for each worker."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

start = multiprocessing.get_context("forkserver")
"""How a process is started. One that was forked forks by itself: see tests/forked_packages.py."""
start.set_forkserver_preload([__name__ + "_packages"])


class Forked:
    """As `subprocess.Popen` of `python ARGUMENTS` in a session of its own, whose output goes to the
    file `log`."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        values = (arguments, log, environment, Path.cwd())
        self._process: BaseProcess = start.Process(target=_run, args=values)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_forked(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -P ...` with all output in its `stderr`."""
    with tempfile.NamedTemporaryFile() as log:
        code = Forked([*command[2:]], Path(log.name), dict(os.environ)).wait()
        return subprocess.CompletedProcess(command, code, "", Path(log.name).read_text())


class ForkedOutput:
    """As `with subprocess.Popen` of `python -P ...`: once it has ended, all its output is `stdout`."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        ended = run_forked(command)
        self.stdout = ended.stderr.splitlines(keepends=True)
        self.returncode = ended.returncode

    def __enter__(self) -> ForkedOutput:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _run(arguments: list[str], log: Path, environment: dict[str, str], folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    # A worker starts those of its other GPUs as it was started.
    sys.orig_argv = [sys.executable, *arguments]
    option, what, *others = arguments
    if option == "-m":
        sys.argv = [what, *others]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *others]
        exec(what, {"__name__": "__main__"})
