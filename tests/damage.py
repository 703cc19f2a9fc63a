"""Kinds of damage to a file of a run folder."""

import os
import re
from collections.abc import Callable
from pathlib import Path


def _into_a_folder(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def _into_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _into_a_huge_file(path: Path) -> None:
    os.truncate(path, 1 << 40)  # without blocks: it takes no space


def _with_nan(path: Path) -> None:
    path.write_text(re.sub(r":[0-9.]+", ":NaN", path.read_text()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "not UTF-8": lambda path: path.write_bytes(b'{"step": "\xff\xfe"}'),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]), "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)), "a list": lambda path: path.write_text("[1]"),
    "other fields": lambda path: path.write_text('{"step": "two", "epoch": [], "error": 7}'), "NaN": _with_nan,
    "a folder": _into_a_folder, "a pipe": _into_a_pipe, "huge": _into_a_huge_file,
}  # fmt: skip
