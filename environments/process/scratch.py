"""The temporary folders of environment code: FLASH_HOME/scratch/NAME, one for each host.

    folder, lock = scratch_folder()     # locked until this process ends or `lock` is closed
    remove(folder)

Environment code may leave anything in them: folders nested thousands deep, folders without any
mode, links to other places. Removing them opens every folder by descriptor, follows no link, and
does not recurse."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from environments.settings import state_directory

MIN_AGE_S = 60.0
"""The process that made a younger folder may not have locked it yet."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def scratch_folder() -> tuple[Path, ExitStack]:
    """A private folder, locked until this process or the stack ends. In the background the folders
    of processes that are gone are removed.
    """
    home = state_directory() / "scratch"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    threading.Thread(target=_sweep, args=(home,), daemon=True, name="scratch").start()
    folder = Path(tempfile.mkdtemp(prefix="", dir=home))
    stack = ExitStack()
    with suppress(OSError):  # without locks nobody sweeps
        _lock(folder, stack)
    return folder, stack


def _lock(folder: Path, stack: ExitStack) -> None:
    descriptor = os.open(folder, FOLDER)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sweep(home: Path) -> None:
    """Remove our own folders that nobody has locked. What cannot be removed stays."""
    with suppress(OSError):
        for folder in home.iterdir():
            with suppress(OSError), ExitStack() as stack:
                status = folder.lstat()
                is_old = time.time() - status.st_mtime > MIN_AGE_S
                if is_old and status.st_uid == os.getuid():
                    _lock(folder, stack)
                    remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder and what is in it, as far as possible.

    It takes two descriptors at any depth: the folders in a folder move up to the top before it is
    removed. Each opened descriptor names one folder for good, whatever takes its place."""
    with suppress(OSError):
        top = _opened(str(folder))
        try:
            _empty(top)
        finally:
            os.close(top)
        folder.rmdir()


def _empty(top: int) -> None:
    moved = secrets.token_hex(8)  # no name in there begins so
    number = 0
    waiting = os.listdir(top)
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            if _unlinked(name, top):
                continue
            folder = _opened(name, top)
            try:
                for inner in os.listdir(folder):  # noqa: PTH208
                    if _unlinked(inner, folder):
                        continue
                    os.close(_opened(inner, folder))  # only a writable folder can be moved
                    number += 1
                    new = f"{moved}-{number}"
                    os.rename(inner, new, src_dir_fd=folder, dst_dir_fd=top)
                    waiting.append(new)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _unlinked(name: str, parent: int) -> bool:
    """Remove what is no folder. False for a folder."""
    try:
        os.unlink(name, dir_fd=parent)
    except (IsADirectoryError, PermissionError):  # macOS refuses folders so
        return False
    return True


def _opened(name: str, parent: int | None = None) -> int:
    """A descriptor of a folder that we may change. OSError for a link."""
    try:
        folder = os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:
        if not hasattr(os, "O_PATH"):
            os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        else:
            place = os.open(name, FOLDER | os.O_PATH, dir_fd=parent)
            try:
                Path(f"/proc/self/fd/{place}").chmod(0o700)
            finally:
                os.close(place)
        folder = os.open(name, FOLDER, dir_fd=parent)
    with suppress(PermissionError):  # another user's; root's rights may be enough
        os.fchmod(folder, 0o700)
    return folder
