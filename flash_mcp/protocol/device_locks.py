"""Which state directory uses which GPU, so that two on one machine never share a card.

    FOLDER/flash-mcp-DEVICE.lock    held for an instant, by the process that looks and takes
    FOLDER/flash-mcp-DEVICE.HOME    held by each process of that state directory that uses the card

The kernel frees a file when its holders have ended, however they ended. Users share the folder, so
files are opened without following links, and nothing is believed that another user wrote. The
processes of one state directory may share a card: its supervisor gives each attempt one of its own.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import stat
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from environments.locks import lock, try_lock
from flash_mcp.protocol.errors import FlashError

SHARED_FOLDERS = ("/run/lock", "/tmp")
PREFIX = "flash-mcp-"
GUARD = "lock"
LOCK_TIMEOUT_S = 5.0
MAX_PATH_BYTES = 4096


def lock_folder() -> Path | None:
    """FLASH_DEVICE_LOCKS, or the first folder that every user of the machine may write to."""
    if named := os.environ.get("FLASH_DEVICE_LOCKS"):
        return Path(named)
    for path in map(Path, SHARED_FOLDERS):
        with suppress(OSError):
            status = path.stat()
            is_shared = status.st_mode & stat.S_ISVTX and status.st_mode & stat.S_IWOTH
            if status.st_uid == 0 and is_shared:
                return path
    return None


def take(device: str, home: Path) -> int | None:
    """A descriptor whose holders use the card for this state directory; None where no folder is
    shared. FlashError(not_ready) if another state directory uses the card."""
    folder = lock_folder()
    if folder is None:
        return None
    try:
        with _guarded(folder, device):
            if others := users(device, home):
                raise _taken(f"{device} is used by {', '.join(others)}")
            path = folder / _name(device, home)
            with _opened(path, os.O_CREAT | os.O_RDWR) as descriptor:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    raise OSError(f"{path} belongs to another user")
                os.fchmod(descriptor, 0o644)
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, os.fsencode(os.path.realpath(home)), 0)
                # Someone who only looks holds it for an instant.
                if not lock(descriptor, LOCK_TIMEOUT_S, shared=True):
                    raise OSError(f"another process holds {path}")
                return os.dup(descriptor)
    except OSError as error:
        raise _taken(f"its lock in {folder} cannot be taken: {error}", device=device) from error


def users(device: str, home: Path) -> list[str]:
    """Other state directories that use the card, as far as this user may know."""
    folder = lock_folder()
    results: list[str] = []
    if folder is None:
        return results
    prefix = f"{PREFIX}{_safe(device)}."
    own = {_name(device, home), f"{prefix}{GUARD}"}
    for path in sorted(folder.glob(f"{prefix}*")):
        if path.name not in own:
            # Unreadable, removed meanwhile or no regular file: nobody can hold it as we do.
            with suppress(OSError), _opened(path) as descriptor:
                if try_lock(descriptor):
                    continue
                owner = os.fstat(descriptor).st_uid
                whose = f"a state directory of user {owner}"
                if owner == os.geteuid():
                    state = os.fsdecode(os.pread(descriptor, MAX_PATH_BYTES, 0))
                    whose = f"the state directory {state}"
                else:
                    with suppress(KeyError):
                        whose = f"a state directory of user {pwd.getpwuid(owner).pw_name}"
                results.append(whose)
    return results


def _taken(what: str, **values: Any) -> FlashError:
    fix = "wait until it is free, or end the runs and deployments there"
    return FlashError("not_ready", what, fix=fix, **values)


def _safe(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", device)[:100]


def _name(device: str, home: Path) -> str:
    place = hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()[:16]
    return f"{PREFIX}{_safe(device)}.{os.geteuid()}-{place}"


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Generator[int]:
    """A regular file; OSError for anything else. A FIFO does not block."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        yield descriptor


@contextmanager
def _guarded(folder: Path, device: str) -> Generator[None]:
    """Alone among those who look and take."""
    path = folder / f"{PREFIX}{_safe(device)}.{GUARD}"
    # Two steps: O_CREAT on another user's file is refused in a folder with the sticky bit.
    with suppress(FileExistsError), _opened(path, os.O_CREAT | os.O_EXCL | os.O_RDWR) as descriptor:
        os.fchmod(descriptor, 0o644)  # whatever the umask
    with _opened(path) as descriptor:
        if not lock(descriptor, LOCK_TIMEOUT_S):
            raise OSError(f"another process holds {path}")
        yield
