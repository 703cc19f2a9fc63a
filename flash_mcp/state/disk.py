"""How much of the disk things take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def size_of(folder: Path) -> int:
    """Bytes of the files below `folder`; 0 if it does not exist. Files may vanish meanwhile."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
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
            try:
                yield entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue


def in_words(size: float) -> str:
    """A number of bytes for people: 12.3 MB, 4.5 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
