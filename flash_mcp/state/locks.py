"""Locks of files in the state directory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from environments import locks
from flash_mcp.protocol.errors import FlashError

BACKUP = "backup.lock"
"""Whoever copies the state directory holds a shared lock of it (docs/reliability.md)."""
DELETE_S = 0.2
"""Seconds to wait for another process that deletes."""


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock the file until it is closed; False if another process holds it.

    FlashError(locks_unsupported) if the file system has no locks."""
    try:
        return locks.try_lock(file, shared=shared)
    except OSError as error:
        raise _unsupported(file, error) from error


def lock(file: IO[Any], timeout_s: float) -> bool:
    """As `try_lock`, after a wait of up to `timeout_s`."""
    try:
        return locks.lock(file, timeout_s)
    except OSError as error:
        raise _unsupported(file, error) from error


@contextmanager
def deleting(base: Path) -> Generator[bool]:
    """Whether files that the database names may be deleted: no backup is under way. None begins
    within.
    """
    with (base / BACKUP).open("a") as file:
        yield lock(file, DELETE_S)


def _unsupported(file: IO[Any], error: OSError) -> FlashError:
    what = f"the file system of the state directory refuses file locks ({error.strerror})"
    fix = (
        "set FLASH_HOME to a folder on a local disk, or mount the file system with locks "
        "(NFS: run lockd; Lustre: the option flock)"
    )
    return FlashError("locks_unsupported", what, path=file.name, fix=fix)
