"""Workers that start with their packages imported, which take most of the seconds of a short run.

A server, which is a process of its own, imports them once and forks for each worker."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.waiting import PATIENCE_S

start = multiprocessing.get_context("forkserver")
"""How a process is started. One that was forked forks by itself: see tests/forked_packages.py."""
start.set_forkserver_preload([__name__ + "_packages"])


class Forked:
    """As `subprocess.Popen` of `python ARGUMENTS` in a session of its own, whose output goes to the
    file `log`."""

    def __init__(
        self, arguments: list[str], log: Path, environment: dict[str, str], folder: Path | None = None
    ) -> None:
        values = (arguments, log, environment, folder or Path.cwd())
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


@contextmanager
def forked(code: str, log: Path, **variables: str) -> Generator[None]:
    """Run Python code in another process beside the block. It has to end with 0."""
    log.touch()
    process = Forked(["-c", code], log, {**os.environ, **variables})
    try:
        yield
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


class _Fork(socketserver.StreamRequestHandler):
    """Forks what one process asks for, passes SIGTERM on, and says how it ended."""

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        process = Forked(asked["arguments"], Path(asked["log"]), asked["environment"], Path(asked["folder"]))
        threading.Thread(target=self._listen, args=[process]).start()
        self._answer(process.wait())

    def _answer(self, code: int) -> None:
        with suppress(OSError):
            self.request.sendall(str(code).encode())
            self.request.shutdown(socket.SHUT_RDWR)

    def _listen(self, process: Forked) -> None:
        with suppress(OSError):
            while self.request.recv(1):
                process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGKILL)  # the one that asked has ended


class _Forks(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # a worker that outlives its test is the reaper's
    block_on_close = False


@contextmanager
def serve_forks(folder: Path) -> Generator[dict[str, str]]:
    """Environment variables of processes whose workers start with their packages imported."""
    address = folder / "forks"
    with _Forks(str(address), _Fork) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            paths = [str(Path(__file__).with_name("forked_site")), *filter(None, [os.environ.get("PYTHONPATH")])]
            yield {"FLASH_FORKS": str(address), "PYTHONPATH": os.pathsep.join(paths)}
        finally:
            server.shutdown()


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
