"""Keep results within 8,000 characters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError

RESULT_CHARACTERS = 8_000
LEAST_CHARACTERS = 50
"""`shorten` makes no text of so few characters shorter."""


def to_text(body: Any) -> str:
    """Compact JSON, as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def unwrapped(text: str) -> str:
    """`text` with each paragraph on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def utc(moment: float) -> str:
    """A time of time.time() in UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(moment))


def shorten(text: str, limit: int) -> str:
    """`text` within `limit` characters: its start and end, and how much was cut between them."""
    if len(text) <= limit:
        return text
    kept = max(limit - 40, 20)
    head = kept * 2 // 3
    # The tail goes on in the last line of the head: a mark at its beginning holds for both.
    start = text[:head].rstrip("\n")
    return f"{start} …[{len(text) - kept} characters cut]… {text[len(text) - (kept - head) :]}"


def json_characters(text: str) -> int:
    """Its characters as JSON, where line ends and quotes take two."""
    return len(to_text(text)) - 2


def shorten_as_json(text: str, limit: int) -> str:
    """`text` within `limit` characters of JSON."""
    cost = json_characters(text)
    if cost <= limit:
        return text
    return shorten(text, limit * len(text) // cost)


def without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """The values but None, [] and {}."""
    return {name: value for name, value in values.items() if value not in (None, [], {})}


def error_text(error: dict[str, Any] | None, limit: int) -> str | None:
    """`[code] what happened` of FlashError.to_dict(), within `limit` characters."""
    if error is None:
        return None
    return shorten(f"[{error['code']}] {FlashError.from_dict(error).account}", limit)


def fit(body: dict[str, Any], limit: int) -> dict[str, Any]:
    """`body` as JSON within `limit` characters, a guard for tools that return too much: halves the
    longest text or list until the result fits, and says so under `cut`.
    """
    if len(to_text(body)) <= limit:
        return body
    body = cast("dict[str, Any]", json.loads(to_text(body)))
    note = (
        "this result was too long: long texts and lists were shortened; "
        "narrow the call, or use its cursor"
    )
    if earlier := body.get("cut"):
        note = f"{earlier}; {note}"
    body["cut"] = note
    if "next" in body:
        body["next"] = body.pop("next")  # stays last
    while len(to_text(body)) > limit and (candidates := list(_cuttable(body))):
        _, _, holder, key = max(candidates, key=lambda candidate: candidate[:2])
        value = holder[key]
        half = len(value) // 2
        holder[key] = shorten(value, half) if isinstance(value, str) else value[:half]
    return body


def _cuttable(holder: Any) -> Iterable[tuple[bool, int, Any, Any]]:
    """(is plain, size, container, key) of long texts and lists. Lists of objects are cut last."""
    items: Iterable[tuple[Any, Any]] = enumerate(cast("list[Any]", holder))
    if isinstance(holder, dict):
        items = cast("dict[str, Any]", holder).items()
    for key, value in items:
        size = len(to_text(value))
        if isinstance(value, list):
            nested = any(isinstance(item, (dict, list)) for item in cast("list[Any]", value))
            if len(cast("list[Any]", value)) > 1 and (nested or size > 100):
                yield not nested, size, holder, key
        elif isinstance(value, str) and size > 100 and len(value) > LEAST_CHARACTERS:
            yield True, size, holder, key
        if isinstance(value, (dict, list)):
            yield from _cuttable(value)
