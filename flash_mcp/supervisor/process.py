"""The supervisor as a process: one for each state directory, started when it is needed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypeVar

import psutil

from flash_mcp import __version__
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home

log = logging.getLogger(__name__)
Found = TypeVar("Found")

LOCK = "supervisor.lock"
LOG = "supervisor.log"
# -P: the working directory is the state directory, whose folder `environments` is no package.
PYTHON = (sys.executable, "-P", "-m")
START_TIMEOUT_S = 10.0
STARTS = 2
MAX_LOG_BYTES = 10_000_000


def ensure_supervisor(base: Path | None = None) -> bool:
    """Start a supervisor for the state directory unless one is there; whether one was started.

    One of an older version is asked to end and replaced; what it started goes on. A supervisor is
    detached: it outlives the caller. One that was killed while it started is started again. Raises
    FlashError(internal) where none stays."""
    base = base or home()
    if is_supervised(base) and not _end_older(base):
        return False
    log_path = base / LOG
    for _ in range(STARTS):
        _start_detached(base, log_path)
        if wait_for(lambda: is_supervised(base), START_TIMEOUT_S):
            return True
    raise FlashError(
        "internal", "the supervisor did not start", log=log_path, fix=f"read the end of {log_path}"
    )


def _start_detached(base: Path, log_path: Path) -> None:
    is_long = log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES
    with log_path.open("wb" if is_long else "ab") as stream:
        # The shell ends at once: the supervisor is nobody's child, and no zombie of the caller's
        # when it leaves.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *PYTHON, "flash_mcp.supervisor", "--home", str(base)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=base,
            start_new_session=True,
            check=True,
        )


@dataclass(frozen=True)
class Holder:
    """Who wrote supervisor.lock last: as JSON, or, before there were versions, as a bare pid."""

    pid: int
    version: str = ""

    @classmethod
    def read(cls, base: Path) -> Holder | None:
        try:
            text = (base / LOCK).read_text()
            if text.strip().isdecimal():
                return cls(int(text))
            told = json.loads(text)
            return cls(int(told["pid"]), str(told["version"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(self, stream: IO[str]) -> None:
        """Into the lock file, by whoever holds the lock."""
        stream.truncate(0)
        stream.write(f"{json.dumps(asdict(self))}\n")
        stream.flush()

    def is_older(self) -> bool:
        """Than this code. A newer one stays: two versions in use would replace each other's."""
        return _numbers(self.version) < _numbers(__version__)

    def is_supervisor_of(self, base: Path) -> bool:
        """Whether that process is one that `ensure_supervisor` started: a pid may be reused."""
        try:
            process = psutil.Process(self.pid)
            if process.uids().real != os.getuid():
                return False
            command = process.cmdline()
            files = [file.path for file in process.open_files()]
        except psutil.Error:
            return False
        is_named = "flash_mcp.supervisor" in command and str(base) in command
        return is_named and os.path.realpath(base / LOCK) in files


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _end_older(base: Path) -> bool:
    """Ask a supervisor of an older version to end; whether the lock is free now."""
    holder = Holder.read(base)
    if holder is None or not holder.is_older() or not holder.is_supervisor_of(base):
        return False
    log.warning("replacing the supervisor of version %s", holder.version or "unknown")
    with suppress(ProcessLookupError):
        os.kill(holder.pid, signal.SIGTERM)
    return bool(wait_for(lambda: not is_supervised(base), START_TIMEOUT_S))


def is_supervised(base: Path) -> bool:
    """Whether a supervisor holds the state directory's lock. Looking changes no file."""
    try:
        with (base / LOCK).open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look as well
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def take_lock(base: Path) -> IO[str] | None:
    stream = (base / LOCK).open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def wait_for(attempt: Callable[[], Found | None], timeout_s: float) -> Found | None:
    deadline = time.monotonic() + timeout_s
    while not (found := attempt()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found or None
