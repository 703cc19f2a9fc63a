"""Patterns for the strings of a JSON schema, where the engine's own rule lets too much pass."""

from __future__ import annotations

from typing import Any, cast

from environments.base import Json

ANY_CHARACTER = r"[\s\S]"
PATTERN_PART = 100
"""Characters of one repetition in a pattern. xgrammar fails at more than 128."""
LONGEST_PATTERN = 1000
"""Characters of the longest string that gets a pattern: a longer one would slow down each token."""


def with_valid_strings(schema: Json) -> Json:
    """The schema, or what holds schemas, with a pattern for each string of limited length.

    xgrammar lets such a string hold raw control characters, which no reader of JSON takes. A string
    that has a pattern may not."""
    try:
        return _with_patterns(schema)
    except RecursionError:  # nested that deeply, it is left to xgrammar
        return schema


def _with_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_patterns(part) for part in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast(Json, schema)
    result = {
        name: part if name in ("const", "enum") else _with_patterns(part)
        for name, part in fields.items()
    }
    if fields.get("type") == "string" and "pattern" not in fields:
        least, most = fields.get("minLength", 0), fields.get("maxLength", -1)
        if most == -1 and least in range(1, LONGEST_PATTERN + 1):
            result["pattern"] = f"^{_characters(int(least), int(least))}{ANY_CHARACTER}*$"
        elif most in range(LONGEST_PATTERN + 1) and least in range(int(most) + 1):
            result["pattern"] = f"^{_characters(int(least), int(most))}$"
    return result


def _characters(least: int, most: int) -> str:
    """A pattern of so many characters, in parts."""
    pattern = ""
    while most > 0:
        part = min(most, PATTERN_PART)
        sure = min(least, part)
        pattern += f"{ANY_CHARACTER}{{{sure},{part}}}"
        least, most = least - sure, most - part
    return pattern
