"""What models, environments and files of others wrote, on its way to a terminal or a page."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pydantic import BaseModel


_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


def visible(text: str) -> str:
    """The text with a sign for every control character but tab and line end: a terminal would obey
    them, to set its title, fill the clipboard or write over what stands there.
    """
    return text.translate(_PICTURES).encode("utf-8", "replace").decode()


UNESCAPED = re.compile("[\x7f-\x9f]")
"""Control characters that JSON leaves as they are."""


class VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def say(text: str) -> None:
    sys.stdout.write(f"{visible(text)}\n")


def to_json(body: Any, **options: Any) -> str:
    """JSON that reads back as `body`, and in which `visible` finds nothing to replace."""
    return UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(body, **options))


def show(result: BaseModel, as_json: bool) -> None:
    body = result.model_dump(mode="json")
    say(to_json(body, ensure_ascii=False) if as_json else "\n".join(render(body)))


def render(body: dict[str, Any], indent: str = "") -> list[str]:
    """A result for people: a line a value, lists of flat objects as tables, long texts as blocks."""
    lines: list[str] = []
    for name, value in body.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *render(cast("dict[str, Any]", value), indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [
                f"{indent}{name}:",
                *render_all(cast("list[dict[str, Any]]", value), indent + "  "),
            ]
        elif isinstance(value, str) and "\n" in value:
            lines += [f"{indent}{name}:", *(f"{indent}  {line}" for line in value.splitlines())]
        else:
            lines.append(f"{indent}{name}: {_plain(value)}")
    return lines


def render_all(rows: list[dict[str, Any]], indent: str) -> list[str]:
    if "content" in rows[0]:  # a conversation
        return [
            line
            for row in rows
            for line in _with_bullet(render({row["role"]: row["content"]}, indent + "  "), indent)
        ]
    if any(
        isinstance(value, (dict, list)) or len(str(value)) > 60
        for row in rows
        for value in row.values()
    ):
        return [line for row in rows for line in _with_bullet(render(row, indent + "  "), indent)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_plain(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return [
        indent
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _with_bullet(lines: list[str], indent: str) -> list[str]:
    return [f"{indent}- {lines[0].strip()}", *lines[1:]] if lines else []


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[Any]", value))) or "-"
    return str(value)
