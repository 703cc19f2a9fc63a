"""The supervisor as a process: one for each state directory, started when it is needed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home

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

    It is detached: it outlives the caller. One that was killed while it started is started again.
    Raises FlashError(internal) where none stays."""
    base = base or home()
    if is_supervised(base):
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
