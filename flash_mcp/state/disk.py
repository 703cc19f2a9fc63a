"""How much of the disk things take."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from environments.settings import FILE
from flash_mcp.protocol import recordings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import (
    datasets_dir,
    environments_dir,
    exports_dir,
    models_dir,
    runs_dir,
)
from flash_mcp.state.owners import caller

LEAST_FREE_BYTES = 16 << 20
"""With less than this, a disk counts as full."""
LEAST_FREE_FILES = 64
"""If fewer files can be made, a disk counts as full whatever its free space."""
RESERVE = "reserve"
RESERVE_BYTES = 8 << 20
"""Space that is set aside for the removal of what fills the disk."""


def has_space(paths: Iterable[Path], size_bytes: int) -> bool:
    """Whether so much is free on the disk of each path, which need not exist."""
    for path in paths:
        place = path.absolute()
        while not place.exists():
            place = place.parent
        if free_bytes(place) < size_bytes:
            return False
    return True


def free_bytes(path: Path) -> int:
    """0 where the disk has no inodes left. One with `f_files` 0 has no limit of them."""
    disk = os.statvfs(path)
    if disk.f_files and disk.f_favail < LEAST_FREE_FILES:
        return 0
    return disk.f_bavail * disk.f_frsize


def keep_reserve(base: Path) -> None:
    """Set space aside that `spend_reserve` frees, if there is enough."""
    reserve = base / RESERVE
    if reserve.exists() or not has_space([base], LEAST_FREE_BYTES + 2 * RESERVE_BYTES):
        return
    try:
        with reserve.open("xb") as stream:
            os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)
    except OSError:  # another process was first, or took the space
        spend_reserve(base)


def spend_reserve(base: Path) -> None:
    """Free the space if the disk is full: SQLite needs some of it even to delete rows."""
    if not has_space([base], RESERVE_BYTES):
        (base / RESERVE).unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Bytes of a file or of all files below a folder; 0 if there is none. Files may vanish."""
    if folder.is_file():
        return folder.stat().st_size
    total = 0
    # A stack, not recursion: environment code may nest folders as deeply as it likes.
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # it is gone, or not ours to read
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def usage(base: Path) -> dict[str, int]:
    """Bytes of each kind of thing in a state directory, the largest first. Checkpoints are part of
    the runs. Models may lie elsewhere, and be shared.
    """
    runs = runs_dir(base)
    folders = {
        "runs": [runs],
        "checkpoints": runs.glob("*/checkpoints"),
        "models": [models_dir(base)],
        "interpreters": [base / "interpreters"],
        "environments": [environments_dir(base)],
        "datasets": [datasets_dir(base)],
        "exports": [exports_dir(base)],
        "recordings": [base / recordings.FOLDER],
        "the database": base.glob("flash.db*"),
        "scratch": [*base.glob("scratch*"), base / "removed", base / "adapters"],
    }
    taken = {name: sum(map(size_of, paths)) for name, paths in folders.items()}
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


def in_words(size: float) -> str:
    """A number of bytes for people: 438 kB, 12.3 MB, 4.5 GB."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    if size >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.0f} kB" if size >= 1e3 else f"{size:.0f} B"


def check_quota(what: str, stored: int, more: int, limit: int, key: str) -> None:
    """FlashError(quota_exceeded) if a caller over HTTP would store more than `limit` bytes of
    `what`; `key` is the setting of [disk] that decides.
    """
    if caller().is_local or stored + more <= limit:
        return
    message = f"your {what} take {stored:,} of {limit:,} bytes, and this one {more:,} more"
    fix = (
        f"store fewer or smaller {what}; the server's operator can remove versions, or raise"
        f" {key} in [disk] of {FILE}"
    )
    raise FlashError("quota_exceeded", message, stored=stored, limit=limit, fix=fix)
