"""Tasks, made by calling an MCP server's tools with arguments drawn from their schemas. Calls that
fail, that return something else the second time, or that return much text, make no task."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from environments.adapters.mcp import McpError, McpServer, McpTimeout

VALUES: dict[str, list[Any]] = {}
"""What to draw for an argument of this name, such as {"city": ["Paris", "Rome"]}, where its schema
does not say enough."""
WORDS = """river stone cloud maple tiger lemon copper violet harbor pencil window garden silver
candle bridge pepper rocket saddle walnut meadow button ladder planet guitar""".split()  # noqa: SIM905
SIZES = {"train": 300, "eval": 100}
"""Each task takes two calls while the environment loads for the first time."""
FRUITLESS = 8
"""A tool is left out after so many calls without one that makes a task."""
MOST_TRIES = 4 * sum(SIZES.values())
MOST_CHARACTERS = 200
"""A tool's result that is longer is no answer to repeat."""


def make_rows(server: McpServer) -> list[dict[str, Any]]:
    source = random.Random(7)
    rows: dict[str, dict[str, Any]] = {}
    functions = [tool["function"] for tool in server.tools]
    tries: Counter[str] = Counter()
    failures: dict[str, str] = {}
    while functions and len(rows) < sum(SIZES.values()) and tries.total() < MOST_TRIES:
        function = source.choice(functions)
        name, arguments = function["name"], draw(function["parameters"], source)
        key = json.dumps([name, arguments], sort_keys=True)
        tries[name] += 1
        try:
            result = "" if key in rows else called(server, name, arguments)
        except McpError as error:
            failures[name] = f"{name}({json.dumps(arguments)}): {error}"
            result = ""
            if isinstance(error, McpTimeout):
                functions.remove(function)
                continue
        if result:
            says = function["description"].strip().split("\n")[0] or name
            row = {"tool": name, "arguments": arguments, "result": result}
            rows[key] = {"id": f"call-{len(rows):04}", "says": says, **row}
        elif tries[name] == FRUITLESS and all(row["tool"] != name for row in rows.values()):
            functions.remove(function)
    if not rows:
        what = "no call gave a result to ask for: say in VALUES of make_tasks.py what to draw"
        raise ValueError("; ".join([what, *failures.values()])[:1000])
    return list(rows.values())


def called(server: McpServer, name: str, arguments: dict[str, Any]) -> str:
    """The result of a call, if it is short and the same again. Raises McpError if it is not."""
    result = server.call(name, arguments).strip()
    if len(result) > MOST_CHARACTERS:
        raise McpError(f"its result has {len(result)} characters")
    if server.call(name, arguments).strip() != result:
        raise McpError("its result is another one the second time")
    return result


def draw(schema: dict[str, Any], source: random.Random, name: str = "") -> Any:
    """A value that fits a JSON schema."""
    choices = VALUES.get(name) or schema.get("enum") or schema.get("examples")
    if choices:
        return source.choice(choices)
    if options := [item for item in schema.get("anyOf", []) if item.get("type") != "null"]:
        return draw(options[0], source, name)
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", ())
        values: dict[str, Any] = {}
        for key, item in schema.get("properties", {}).items():
            if key in required or source.random() < 0.5:
                values[key] = draw(item, source, key)
        return values
    if kind == "array":
        items = schema.get("items", {})
        return [draw(items, source, name) for _ in range(source.randint(2, 4))]
    if kind in ("integer", "number"):
        return source.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 99)))
    if kind == "boolean":
        return source.random() < 0.5
    return " ".join(source.sample(WORDS, source.randint(2, 6)))
