"""Locks of open files. The kernel frees one when the last process that holds the file open ends."""

from __future__ import annotations

import errno
import fcntl
import struct
import time
from typing import IO

NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What flock fails with on a file system without it, such as Lustre or NFS without lockd."""
POLL_S = 0.05


def try_lock(file: IO[str] | int, *, shared: bool = False) -> bool:
    """Lock the whole file; False if another open file holds it.

    OSError if the file system has no locks. The file must be open for writing where flock is
    missing, unless the lock is shared."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_FLOCK or not hasattr(fcntl, "F_OFD_SETLK"):
            raise
        return _try_range_lock(file, shared)
    return True


def lock(file: IO[str] | int, timeout_s: float, *, shared: bool = False) -> bool:
    """Wait for the lock; False if another open file still holds it after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(file, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _try_range_lock(file: IO[str] | int, shared: bool) -> bool:
    """A byte-range lock of the open file. Unlike a plain one, it does not end when the process
    closes another descriptor of the same file."""
    # struct flock: type, whence, start, length (0: to the end), pid
    whole = struct.pack("hhqqi0q", fcntl.F_RDLCK if shared else fcntl.F_WRLCK, 0, 0, 0, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX allows both
        return False
    return True
