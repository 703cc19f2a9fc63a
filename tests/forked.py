"""Workers and processes of pytest-xdist that start with torch and vLLM imported: importing them takes
longer than most tests.

    python -m tests.forked NAME PARENT_PID

A server imports them once for a test run, and forks."""

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
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from uuid import uuid4

from environments.sandbox.kernel import die_with_parent
from tests.places import ROOT, TESTS
from tests.waiting import PATIENCE_S

VARIABLE = "FLASH_FORKS"
"""Names the server of this process and of those that it starts."""


def start_server() -> subprocess.Popen[bytes]:
    """Start the server, which ends with this process."""
    name = os.environ[VARIABLE] = uuid4().hex
    return subprocess.Popen([sys.executable, "-m", __name__, name, str(os.getpid())], cwd=ROOT)


def connect() -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    link = socket.socket(socket.AF_UNIX)
    while link.connect_ex(f"\0{os.environ[VARIABLE]}"):
        assert time.monotonic() < deadline, "no server forks workers"
        time.sleep(0.01)
    return link


class Forked:
    """As `subprocess.Popen` of `python ARGUMENTS` in a session of its own, whose output goes to the
    file `log`."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: dict[str, str], folder: Path | None = None
    ) -> None:
        if VARIABLE not in os.environ:
            start_server()
        request = {"arguments": [*arguments], "environment": environment, "folder": str(folder or Path.cwd())}
        self._link = connect()
        with Path(os.devnull).open() as null, log.open("ab") as output:
            streams = [null.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(self._link, [json.dumps(request).encode() + b"\n"], streams)
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
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def variables_of_workers() -> dict[str, str]:
    """Environment variables of processes whose workers are forked."""
    paths = [str(TESTS / "forked_site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


class _Fork(socketserver.BaseRequestHandler):
    """Forks what one process asks for, passes SIGTERM on, and says how it ended. It runs in a fork
    of the server."""

    def handle(self) -> None:
        self.server.socket.close()
        line, streams, *_ = socket.recv_fds(self.request, 2**20, 3)
        while not line.endswith(b"\n"):
            line += self.request.recv(2**20)
        request = json.loads(line)
        values = (request["arguments"], streams, request["environment"], request["folder"])
        process = get_context("fork").Process(target=_run, args=values)
        process.start()
        for stream in streams:
            os.close(stream)
        assert process.pid
        self.request.sendall(b"%16d" % process.pid)
        # Its number may be another process's once it has ended.
        threading.Thread(target=self._listen, args=[os.pidfd_open(process.pid)], daemon=True).start()
        process.join()
        with suppress(OSError):
            self.request.sendall(b"%16d" % process.exitcode)
            self.request.shutdown(socket.SHUT_RDWR)

    def _listen(self, process: int) -> None:
        with suppress(OSError):
            while self.request.recv(1):
                signal.pidfd_send_signal(process, signal.SIGTERM)
            signal.pidfd_send_signal(process, signal.SIGKILL)  # the one that asked has ended


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 1000
    request_queue_size = 100

    def process_request(self, request: socket.socket, client_address: str) -> None:
        import tests.forked_packages  # noqa: F401, PLC0415  for the first one

        super().process_request(request, client_address)


def _run(arguments: list[str], streams: list[int], environment: dict[str, str], folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  multiprocessing has closed it
    server = os.environ[VARIABLE]
    os.environ.clear()
    os.environ.update({VARIABLE: server, **environment})
    # A worker starts those of its other GPUs as it was started.
    sys.orig_argv = [sys.executable, *arguments]
    option, what, *others = arguments
    if option == "-m":
        sys.argv = [what, *others]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *others]
        exec(what, {"__name__": "__main__"})


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    with _Server(f"\0{sys.argv[1]}", _Fork) as server:
        server.serve_forever()
