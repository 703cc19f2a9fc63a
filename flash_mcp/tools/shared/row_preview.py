"""Rows of a dataset as text, with what is learnt of them marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from flash_mcp.protocol.records import Json, text_of
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.tools.shared.truncation import shorten

CHARACTERS_PER_TOKEN = 3.5
"""For English text in common vocabularies; the server has no tokenizer."""
SHOWN_CHARACTERS = 600
"""Of each row that is shown."""


class Preview(ResultModel):
    """Rows to learn. Each answer to learn stands between [[ and ]]; the model's chat template puts
    its own marks around the messages.
    """

    rows: int
    tokens_about: dict[str, int]
    cut: int | None = None
    typical: str
    shortest: str
    longest: str


def preview_of(rows: Sequence[Json], max_length: int | None = None) -> Preview | None:
    """None without rows."""
    order = sorted(rows, key=_tokens)
    if not order:
        return None
    sizes = list(map(_tokens, order))
    most = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    cut = None
    if max_length:
        cut = sum(size > max_length for size in sizes) or None
    return Preview(
        rows=len(order),
        tokens_about={"median": round(median(sizes)), "p95": most, "longest": sizes[-1]},
        cut=cut,
        typical=_shown(order[len(order) // 2]),
        shortest=_shown(order[0]),
        longest=_shown(order[-1]),
    )


def _tokens(row: Json) -> int:
    characters = sum(len(text_of(message)) for message in row["messages"])
    if row.get("tools"):
        characters += len(json.dumps(row["tools"]))
    return round(characters / CHARACTERS_PER_TOKEN)


def _shown(row: Json) -> str:
    lines: list[str] = []
    room = SHOWN_CHARACTERS // len(row["messages"]) + 40
    for place, message in enumerate(row["messages"]):
        text = shorten(text_of(message), room)
        learnt = message["role"] == "assistant" and place >= row["prompt_messages"]
        is_learnt = learnt and message.get("weight") != 0
        if is_learnt:
            text = f"[[{text}]]"
        lines.append(f"{message['role']}: {text}")
    return shorten("\n".join(lines), 2 * SHOWN_CHARACTERS)
