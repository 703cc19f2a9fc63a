"""Outlines of JSON schemas: a line for each argument of a tool, with everything that a client must obey.

    steps: integer = 20, minimum=1  # Optimizer steps.

A required field has `!` after its name, and an object that allows no other fields has `{}` after its
type. Below a field stand, indented, the fields of an object, `[]` for the items of a list, `{*}` for
the values of a map, and `|` for each alternative. Of a result, whose fields tests/golden/results has in
use, the lines stand in one paragraph and without descriptions."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
SCHEMAS = ("inputSchema", "outputSchema")
NESTED = ("properties", "items", "anyOf", "additionalProperties", "required")


def tool_outline(tool: dict[str, Any]) -> str:
    """A tool as `tools/list` sends it."""
    parts = [tool["description"]]
    parts.append("\n".join(f"{key}: {_plain(tool[key])}" for key in sorted({*tool} - {"description", *SCHEMAS})))
    arguments, result = (tool.get(key, {}) for key in SCHEMAS)
    parts.append("\n".join([f"arguments{_facts(arguments)}", *outline(arguments)]))
    fields = [line.partition("  # ")[0].strip() for line in outline(result, depth=0)]
    parts.append(textwrap.fill(f"result{_facts(result)}; {'; '.join(fields)}", WIDTH, break_on_hyphens=False))
    return "\n\n".join(parts)


def outline(schema: Schema, depth: int = 1) -> Iterator[str]:
    """The lines of the fields below `schema`."""
    required = set(schema.get("required", []))
    for name, field in schema.get("properties", {}).items():
        mark = "!" if name in required else ""
        yield from _field(f"{name}{mark}", field, depth)
    for key, mark in (("items", "[]"), ("additionalProperties", "{*}")):
        if isinstance(schema.get(key), dict):
            yield from _field(mark, schema[key], depth)
    for choice in schema.get("anyOf", []):
        yield from _field("|", choice, depth)


def _field(name: str, schema: Schema, depth: int) -> Iterator[str]:
    text = " ".join(schema.get("description", "").split())
    comment = f"  # {text}" if text else ""
    yield f"{'  ' * depth}{name}{_facts(schema)}{comment}"
    yield from outline(schema, depth + 1)


def _facts(schema: Schema) -> str:
    """Type, default and limits: all of a schema but its description and what is nested in it."""
    facts = f": {schema.get('type', 'any')}"
    if schema.get("additionalProperties") is False:
        facts += " {}"
    if "default" in schema:
        facts += f" = {_plain(schema['default'])}"
    for key in sorted({*schema} - {"type", "default", "description", *NESTED}):
        facts += f", {key}={_plain(schema[key])}"
    return facts


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


WIDTH = 120


def pretty(body: Any, indent: str = "") -> str:
    """JSON in lines of at most WIDTH letters where it can be: what fits into one is in one, and short entries share
    one."""
    text = json.dumps(body, ensure_ascii=False)
    if not isinstance(body, dict | list) or len(indent + text) <= WIDTH:
        return text
    inner = f"{indent} "
    if isinstance(body, dict):
        entries = [f"{json.dumps(key)}: {pretty(value, inner)}" for key, value in body.items()]
    else:
        entries = [pretty(value, inner) for value in body]
    lines = [""]
    for entry in entries:
        line = f"{lines[-1]} {entry}," if lines[-1] else f"{inner}{entry},"
        if len(line) <= WIDTH and "\n" not in line:
            lines[-1] = line
        else:
            lines.append(f"{inner}{entry},")
            if "\n" in entry:
                lines.append("")
    opening, closing = "{}" if isinstance(body, dict) else "[]"
    inside = "\n".join(line for line in lines if line).removesuffix(",")
    return f"{opening}\n{inside}\n{indent}{closing}"
