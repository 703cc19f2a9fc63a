"""Calls of tools, as results and errors name them, written as the commands that make them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from typing import Any

POSITIONAL: dict[str, tuple[str, ...]] = {
    "chat": ("message",),
    "compare": ("base", "other"),
    "env_push": ("folder",),
    "env_setup": ("folder",),
    "env_test": ("folder",),
    "evaluate": ("environment",),
    "status": ("run_id",),
    "tournament": ("environment",),
    "train": ("config",),
    "undeploy": ("deployment",),
}
"""The arguments that read better without their names; for other tools the required one."""
CONSTANTS = ("true", "false", "null")
WORDS = re.compile(r"=(\w+(?: \w+)+)(?=[,)])")
"""A value in words, such as `base=its run_id`."""


def in_shell(text: str) -> str:
    """The text with each call of a tool written as a shell command between backticks."""
    from flash_mcp.tools.registry import TOOLS  # noqa: PLC0415

    starts = re.compile(rf"\b({'|'.join(TOOLS)})\(")
    done = ""
    while start := starts.search(text):
        call = _call_at(text, start.start())
        command = _command(TOOLS[start[1]].required, start[1], call)
        if command is None:
            call = command = start[0]
        done += text[: start.start()] + command
        text = text[start.start() + len(call) :]
    return done + text


def _call_at(text: str, start: int) -> str:
    """The call that begins there; empty if it never ends."""
    for end, letter in enumerate(text[start:], start + 1):
        if letter == ")" and _parsed(text[start:end]):
            return text[start:end]
    return ""


def _parsed(call: str) -> ast.Call | None:
    call = WORDS.sub(lambda item: "=" + item[1].replace(" ", "_"), call)
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError:
        return None
    if isinstance(tree, ast.Call):
        return tree
    return None


def _command(required: list[str], tool: str, call: str) -> str | None:
    """None if `call` is empty, or an argument is no literal or has no name."""
    tree = _parsed(call)
    if tree is None or tree.args:
        return None
    try:
        arguments: dict[str, str] = {}
        for keyword in tree.keywords:
            name = str(keyword.arg)
            arguments[name] = _value(name, keyword.value)
    except ValueError:
        return None
    words = ["flash-mcp", tool.replace("_", "-")]
    for name in POSITIONAL.get(tool, required):
        if name not in arguments or arguments[name].startswith("-"):
            break
        words.append(arguments.pop(name))
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value in ("true", "false"):
            words.append(f"--{flag}" if value == "true" else f"--no-{flag}")
        elif value != "null":
            words += [f"--{flag}", value]
    return f"`{' '.join(words)}`"


def _value(name: str, node: ast.expr) -> str:
    """The word of the command. ValueError if it is no literal."""
    if isinstance(node, ast.Name):
        if node.id in CONSTANTS:
            return node.id
        return node.id.upper()
    value: Any = ast.literal_eval(node)
    if value is ...:
        return name.upper()
    if isinstance(value, str):
        return shlex.quote(f"@{value}" if value.startswith("@") else value)
    return shlex.quote(json.dumps(value))
