"""Tool calls that a model may write without solving a task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from environments.base import Json
from environments.checks.playing import Turn
from environments.tools import as_list, as_object, call_id

CALL_ID = call_id(0)
UNPARSED = '<tool_call>\n{"name": '
"""What is left of a call that does not parse: text."""
UNKNOWN_TOOL = "no_such_tool"
ODD_VALUES: dict[str, Any] = {
    "string": "",
    "integer": -1,
    "number": 1e300,
    "boolean": False,
    "array": [],
    "object": {},
    "null": None,
}
"""A value of each JSON type that a careless tool trips over."""


def bad_turns(tools: Sequence[Json]) -> list[str]:
    """Turns with calls that do not parse, of no tool, with wrong arguments, or with odd ones."""
    turns: list[str] = [UNPARSED, _turn(UNKNOWN_TOOL, "{}")]
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        odd = _odd_value(function["parameters"])
        turns += [_turn(name, text) for text in ("{}", "[1]", "{", '{"no_such_argument": 1}')]
        turns.append(_turn(name, json.dumps(odd)))
    return turns


def _turn(name: str, arguments: str) -> Turn:
    function = {"name": name, "arguments": arguments}
    return Turn("", [{"id": CALL_ID, "type": "function", "function": function}])


def _odd_value(schema: Any) -> Any:
    """A value that fits the schema; None if the schema does not say what fits."""
    rules = as_object(schema)
    if allowed := as_list(rules.get("enum")):
        return allowed[-1]
    if options := as_list(rules.get("anyOf")):
        return _odd_value(options[0])
    if properties := as_object(rules.get("properties")):
        return {name: _odd_value(item) for name, item in properties.items()}
    kind = rules.get("type")
    return ODD_VALUES.get(kind) if isinstance(kind, str) else None
