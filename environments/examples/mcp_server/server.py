"""A small MCP server over standard input and output, with the standard library alone. Put your own
server in its place, and name it in SERVER of environment.py."""

import json
import sys
from typing import Any

METERS = {"m": 1.0, "km": 1000.0, "mile": 1609.344, "foot": 0.3048}
UNIT = {"type": "string", "enum": list(METERS)}
WHOLE = {"type": "integer", "minimum": 2, "maximum": 999}
TEXT = {"type": "string"}


def multiply(left: int, right: int) -> str:
    return str(left * right)


def convert_length(value: int, unit: str, to: str) -> str:
    return f"{value * METERS[unit] / METERS[to]:.4g} {to}"


def count_letters(text: str) -> str:
    return str(sum(map(str.isalpha, text)))


TOOLS = {
    multiply: ("Multiply two numbers.", {"left": WHOLE, "right": WHOLE}),
    convert_length: ("Convert a length.", {"value": WHOLE, "unit": UNIT, "to": UNIT}),
    count_letters: ("Count the letters of a text.", {"text": TEXT}),
}


def listed() -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for function, (description, properties) in TOOLS.items():
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        name = function.__name__
        tools.append({"name": name, "description": description, "inputSchema": schema})
    return tools


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        (function,) = [tool for tool in TOOLS if tool.__name__ == name]
        return {"content": [{"type": "text", "text": function(**arguments)}]}
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        server = {"name": "lengths", "version": "1"}
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    return {"tools": listed()} if method == "tools/list" else called(**parameters)


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        reply = {"jsonrpc": "2.0", "id": request["id"], "result": result}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
