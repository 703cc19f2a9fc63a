"""Tasks that an environment generates are kept with its version, so that each load has the same.

    rows = kept.rows(name, generate)    # in the environment's process, while it loads

`generate` runs only if the version has no rows of that name. The process cannot write into the
version's folder. The server asks it for what `generate` made (`made`) when it publishes the version
or loads it before a run, and writes it there (`keep`).

A file holds one row a line, as a Python literal. Literals hold tuples, and dicts whose keys are no
strings, and reading them runs no code."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = ".kept"
"""Folder of the files, in a version's folder. It is no part of the version's digest."""
MAX_BYTES = 32 << 20
"""Size of all that is kept with a version. Rows that do not fit are generated at every load."""
MAX_NAMES = 16

_version: Path | None = None
_generated: dict[str, Sequence[Any]] = {}


def use(folder: Path) -> None:
    """Read from the version in `folder` from here on."""
    global _version
    _version = folder


def rows(name: str, generate: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """The rows that the version keeps under `name`, else what `generate` makes.

    Raises ValueError if the file is damaged."""
    with contextlib.suppress(FileNotFoundError):
        if _version is not None:
            path = _version / FOLDER / name
            lines = path.read_text("ascii").splitlines()
            try:
                return list(map(ast.literal_eval, lines))
            except (ValueError, SyntaxError) as error:
                what = f"the kept tasks in {path} are damaged"
                raise ValueError(f"{what}; remove this file to generate them again") from error
    rows = generate()
    if len(_generated) < MAX_NAMES:
        _generated[name] = rows
    return rows


def name_of(*arguments: Any) -> str:
    """A name for the rows that these arguments make. Equal literals have equal names."""
    return hashlib.sha256(ascii(arguments).encode()).hexdigest()[:16]


def is_name(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{16}", text) is not None


def names() -> list[str]:
    """Under what names rows were generated."""
    return list(_generated)


def text_of(name: str) -> str:
    """The text of the generated rows; "" if it is too long, or if a row has no equal literal."""
    lines: list[str] = []
    size = 0
    for row in _generated[name]:
        line = ascii(row)
        size += len(line) + 1
        if size > MAX_BYTES or not _is_literal(line, row):
            return ""
        lines.append(f"{line}\n")
    return "".join(lines)


def keep(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the texts of rows, by name, into the version in `folder`. Files that exist stay.

    Raises OSError."""
    if not texts:
        return
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    room = MAX_BYTES - sum(path.stat().st_size for path in target.iterdir())
    for name, text in texts.items():
        room -= len(text)
        if room < 0:
            return
        # Whole, unless another process wrote it
        with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=target, prefix=".") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o444)
            with contextlib.suppress(FileExistsError):
                os.link(file.name, target / name)


def _is_literal(line: str, row: Any) -> bool:
    # Deep nesting exhausts the parser.
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(line) == row
    return False
