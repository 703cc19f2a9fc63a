"""Processes that start with their packages imported: importing them takes longer than most tests.

    python -m tests.forked NAME PARENT_PID PACKAGES

A server imports tests.forked_PACKAGES once for a test run, and forks. There are two servers. `workers`
has torch and vLLM; it forks workers and the processes of pytest-xdist. `small` has neither; it forks
flash-mcp's commands, supervisors, and workers that are scripts. PYTHONPATH names tests/forked_site,
which makes a fork of each such process that a test or the product starts."""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from shutil import which
from uuid import uuid4

import psutil

from environments.sandbox.kernel import die_with_parent
from flash_mcp.state import database
from tests.forked_site import forked_start
from tests.places import ROOT
from tests.waiting import WAIT_S

VARIABLE = "FLASH_FORKS"  # names the servers of this process and of those that it starts, and what confines them


def start_servers(*packages: str) -> list[subprocess.Popen[bytes]]:
    """Start the servers of these packages, which end with this process."""
    name = uuid4().hex
    if not which("nvidia-smi"):  # CUDA may not be used in a fork
        folders = [str(Path(forked_start.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.environ[VARIABLE] = f"{name} {forked_start.confinement()}"
    command = [sys.executable, "-m", __name__, name, str(os.getpid())]
    return [subprocess.Popen([*command, each], cwd=ROOT) for each in packages]


def fork_of(pid: int) -> int:
    """The fork that does what the process `pid` was started for, or `pid` if it does that itself."""
    forks = (process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == f"for {pid}")
    return next(forks, pid)


class Forked:
    """As `subprocess.Popen` of `python ARGUMENTS` in a session of its own, whose output goes to the file `log`."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: dict[str, str], folder: Path | None = None):
        if VARIABLE not in os.environ:
            start_servers("workers", "small")
        with Path(os.devnull).open() as null, log.open("ab") as output:
            streams = [null.fileno(), output.fileno(), output.fileno()]
            self._link = forked_start.request_fork("workers", [*arguments], environment, folder, streams)
        self.pid = int(self._link.recv(16, socket.MSG_WAITALL))
        self._code: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._link], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout_s or 0)
            self._code = int(self._link.recv(16, socket.MSG_WAITALL) or -signal.SIGKILL)
            self._link.close()
        return self._code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

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
        assert process.wait(WAIT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


class _Fork(socketserver.BaseRequestHandler):
    """Forks what one process asks for, passes signals on, and says how it ended. It runs in a fork of the server."""

    _has_ended = False

    def handle(self) -> None:
        self.server.socket.close()
        line, streams, *_ = socket.recv_fds(self.request, 2**20, 3)
        while not line.endswith(b"\n"):
            line += self.request.recv(2**20)
        request = json.loads(line)
        process = get_context("fork").Process(target=_run, args=(streams,), kwargs=request)
        process.start()
        for stream in streams:
            os.close(stream)
        assert process.pid
        self.request.sendall(b"%16d" % process.pid)
        # Its number may be another process's once it has ended.
        descriptor = os.pidfd_open(process.pid)
        threading.Thread(target=self._listen, args=[process.pid, descriptor], daemon=True).start()
        process.join()
        self._has_ended = True
        with suppress(OSError):
            self.request.sendall(b"%16d" % process.exitcode)
            self.request.shutdown(socket.SHUT_RDWR)

    def _listen(self, pid: int, descriptor: int) -> None:
        with suppress(OSError):
            while number := self.request.recv(1):
                signal.pidfd_send_signal(descriptor, number[0])
            if not self._has_ended:  # its starter was killed: a launcher kills the whole group
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 1000
    request_queue_size = 100

    def process_request(self, request: socket.socket, client_address: str) -> None:
        import_module(f"tests.forked_{sys.argv[3]}")  # for the first one
        super().process_request(request, client_address)


def _run(streams: list[int], arguments: list[str], environment: dict[str, str], folder: str, starter: int) -> None:
    Path("/proc/self/comm").write_text(f"for {starter}")
    os.setsid()
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  multiprocessing has closed it
    server = os.environ[VARIABLE]
    os.environ.clear()
    os.environ.update({VARIABLE: server, **environment})
    if "PYTEST_CURRENT_TEST" in environment:  # what a test starts waits for the disk no more than the test does
        os.fsync = lambda descriptor: None
        database.SYNCHRONOUS = "OFF"
    # A worker starts those of its other GPUs as it was started.
    sys.orig_argv = [sys.executable, *arguments]
    match arguments:
        case ["-m", module, *others]:
            sys.argv = [module, *others]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *others]:
            sys.argv = ["-c", *others]
            exec(code, {"__name__": "__main__"})
        case [script, *_]:
            sys.argv = arguments
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    with _Server(f"\0{sys.argv[1]} {sys.argv[3]}", _Fork) as server:
        server.serve_forever()
