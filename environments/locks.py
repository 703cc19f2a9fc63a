"""Locks of open files: the only module that calls flock, and knows what to do where it is missing.

The kernel frees a lock when the last process that holds the file open ends. It imports nothing of
ours: flash_mcp/protocol/node_code.py takes its text to machines that have none of our code."""

from __future__ import annotations

import errno
import fcntl
import math
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What flock fails with on a file system without it, such as Lustre or NFS without lockd."""
POLL_S = 0.05


def try_lock(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock the whole file; False if another open file holds it.

    OSError if the file system has no locks. Where flock is missing, the file must be open for
    writing, or for reading if the lock is shared."""
    try:
        _apply(file, "SH" if shared else "EX")
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX allows both
        return False
    return True


def lock(file: IO[Any] | int, timeout_s: float = math.inf, *, shared: bool = False) -> bool:
    """Wait for the lock; False if another open file still holds it after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(file, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def make_once(file: int, exists: Callable[[], bool], make: Callable[[], None]) -> None:
    """Make what does not exist. Afterwards the shared lock of `file` is held, as by all who use it.

    Only making needs the lock alone. Between the two, others may make or clear it."""
    lock(file, shared=True)
    while not exists():
        # Two that kept their shared locks would wait for each other.
        _apply(file, "UN")
        lock(file)
        if not exists():
            make()
        lock(file, shared=True)


@contextmanager
def part_of(folder: Path) -> Generator[Path]:
    """A new folder beside `folder` to write into or to remove; it is gone afterwards.

    The caller holds the folder's lock, so older ones are of processes that were killed."""
    remove_parts(folder)
    with tempfile.TemporaryDirectory(prefix=_part(folder), dir=folder.parent) as part:
        yield Path(part)


def remove_parts(folder: Path) -> None:
    """Remove what processes left that were killed in `part_of`. The caller holds the lock."""
    for part in folder.parent.glob(f"{_part(folder)}*"):
        shutil.rmtree(part, ignore_errors=True)


def _part(folder: Path) -> str:
    return f".{folder.name}.part-"


def _apply(file: IO[Any] | int, kind: Literal["SH", "EX", "UN"]) -> None:
    """flock without waiting, or where it is missing a byte-range lock of the open file. Unlike a
    plain one, that does not end when the process closes another descriptor of the same file."""
    try:
        fcntl.flock(file, getattr(fcntl, f"LOCK_{kind}") | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_FLOCK or not hasattr(fcntl, "F_OFD_SETLK"):
            raise
        range_kind = {"SH": fcntl.F_RDLCK, "EX": fcntl.F_WRLCK, "UN": fcntl.F_UNLCK}[kind]
        # struct flock: type, whence, start, length (0: to the end), pid
        whole = struct.pack("hhqqi0q", range_kind, 0, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
