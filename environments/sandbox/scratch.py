"""The temporary folders of environment code: FLASH_HOME/scratch/OWNER.NAME, one for each host.

    # locked until this process ends or `lock` is closed
    folder, lock = scratch_folder(owner, most, most_of_owner)
    remove(folder)

The locked folders are the environments that run now, so they also bound how many do. The kernel
releases the lock of a process that is killed.

Environment code may leave anything in them: folders nested thousands deep, folders without any
mode, links to other places."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from fnmatch import fnmatch
from pathlib import Path
from subprocess import DEVNULL

from environments.locks import try_lock
from environments.settings import machine_directory

MIN_AGE_S = 60.0  # the process that made a younger folder may not have locked it yet
GARBAGE = ".removed-"  # how a folder's name begins while it is removed, which may take minutes
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class BusyError(Exception):
    """As many folders are locked as may be. Says whose."""


def scratch_folder(owner: str, most: int, most_of_owner: int) -> tuple[Path, ExitStack]:
    """A private folder, locked until this process or the stack ends. In the background the folders
    of processes that are gone are removed.

    BusyError if `most` folders are locked, `most_of_owner` of them the owner's, or if another
    process counts them at this moment."""
    home = machine_directory() / "scratch"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    stack = ExitStack()
    with ExitStack() as counting:
        try:
            if not lock_folder(home, counting):
                raise BusyError("other environments start at this moment")
        except OSError:  # this file system has no locks: nobody counts and nobody sweeps
            return Path(tempfile.mkdtemp(prefix=f"{owner}.", dir=home)), stack
        owners: Counter[str] = Counter()
        for folder in home.iterdir():
            with suppress(OSError), ExitStack() as trying:
                if folder.name.startswith(GARBAGE) or lock_folder(folder, trying, shared=True):
                    continue
                owners[folder.name.partition(".")[0]] += 1
        if owners.total() >= most:
            by_count = sorted(owners.items(), key=lambda item: (-item[1], item[0]))
            held = ", ".join(f"{name} {count}" for name, count in by_count)
            raise BusyError(f"{owners.total()} environments run on this machine ({held})")
        if owners[owner] >= most_of_owner:
            raise BusyError(f"{owners[owner]} environments of {owner} run")
        folder = Path(tempfile.mkdtemp(prefix=f"{owner}.", dir=home))
        lock_folder(folder, stack)
    # After the count, which locks each folder for a moment: a sweep leaves locked folders alone.
    threading.Thread(target=sweep, args=(home,), daemon=True, name="scratch").start()
    return folder, stack


def lock_folder(folder: Path, stack: ExitStack, *, shared: bool = False) -> bool:
    """Lock a folder until this process or the stack ends; False if another process holds it.

    OSError if the file system has no locks."""
    descriptor = os.open(folder, FOLDER)
    stack.callback(os.close, descriptor)
    return try_lock(descriptor, shared=shared)


def sweep(home: Path, pattern: str = "*", min_age_s: float = MIN_AGE_S) -> None:
    """Remove our folders of such names and age that nobody has locked, as far as possible."""
    with suppress(OSError):
        for folder in home.iterdir():
            if not fnmatch(folder.name.removeprefix(GARBAGE), pattern):
                continue
            with suppress(OSError), ExitStack() as stack:
                status = folder.lstat()
                is_old = time.time() - status.st_mtime > min_age_s
                if is_old and status.st_uid == os.getuid() and lock_folder(folder, stack):
                    if not folder.name.startswith(GARBAGE):
                        folder = folder.rename(home / f"{GARBAGE}{folder.name}")
                    remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder and what is in it, as far as possible."""
    with suppress(OSError):
        # rm goes to any depth and follows no link, but needs the rights that folders may lack.
        if _fails("rm", "-rf", folder) and not folder.is_symlink():
            _fails("chmod", "-R", "u+rwx", folder)
            _fails("rm", "-rf", folder)


def _fails(*command: str | Path) -> bool:
    return subprocess.run(command, stdin=DEVNULL, stderr=DEVNULL, check=False).returncode != 0
