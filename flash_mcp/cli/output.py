"""Printing results. Control characters in what models, environments and files wrote are made
visible, because a terminal would obey them."""

from __future__ import annotations

import json
import logging
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

from environments.untrusted_text import visible
from flash_mcp.protocol.errors import FlashError

CELL_CHARACTERS = 60
"""Rows with longer values are shown as lists, not as a table."""
UNESCAPED = re.compile("[\x7f-\x9f]")
"""Control characters that JSON leaves as they are."""


class VisibleFormatter(logging.Formatter):
    """Log lines without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def say(text: str) -> None:
    sys.stdout.write(f"{visible(text)}\n")


def to_json(body: Any, **options: Any) -> str:
    """JSON that reads back as `body`, and in which `visible` finds nothing to replace."""
    return UNESCAPED.sub(lambda item: f"\\u{ord(item[0]):04x}", json.dumps(body, **options))


def answer(arguments: Namespace, body: Any, text: str | None = None, **options: Any) -> None:
    """Print `body` as JSON with --json, else `text`, by default what `render` makes of it."""
    if text is None:
        text = "\n".join(render(body))
    say(to_json(body, default=str, **options) if arguments.json else text)


def render(body: dict[str, Any], indent: str = "") -> list[str]:
    """A result for people: one line per value, flat objects as tables, long texts as blocks."""
    lines: list[str] = []
    inner = indent + "  "
    for name, value in body.items():
        if isinstance(value, dict):
            block = render(cast("dict[str, Any]", value), inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            block = render_all(cast("list[dict[str, Any]]", value), inner)
        elif isinstance(value, list) and not all(map(_is_short, cast("list[Any]", value))):
            block = [f"{inner}- {item}" for item in cast("list[Any]", value)]
        elif isinstance(value, str) and "\n" in value:
            block = [f"{inner}{line}" for line in value.splitlines()]
        else:
            lines.append(f"{indent}{name}: {_plain(value)}")
            continue
        lines += [f"{indent}{name}:", *block]
    return lines


def render_all(rows: list[dict[str, Any]], indent: str) -> list[str]:
    """A conversation or rows with long values as lists, other rows as a table."""
    if "content" in rows[0]:
        rows = [{row["role"]: row["content"]} for row in rows]
    elif all(_is_short(value) for row in rows for value in row.values()):
        return _table(rows, indent)
    lines: list[str] = []
    for row in rows:
        rendered = render(row, indent + "  ")
        if rendered:
            lines += [f"{indent}- {rendered[0].strip()}", *rendered[1:]]
    return lines


def _is_short(value: Any) -> bool:
    return not isinstance(value, (dict, list)) and len(str(value)) <= CELL_CHARACTERS


def _table(rows: list[dict[str, Any]], indent: str) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names]
    for row in rows:
        cells.append([_plain(row.get(name)) for name in names])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[str] = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append(f"{indent}{'  '.join(padded)}".rstrip())
    return lines


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[Any]", value))) or "-"
    return str(value)


def write_file(path: Path, text: str) -> None:
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        fix = "choose a file that you may write with --to"
        what = f"cannot write there: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error
