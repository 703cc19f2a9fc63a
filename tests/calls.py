"""Calls of tools as tests make them: in this process, and over a client."""

import ast
import re
from contextlib import suppress
from typing import Any

import pytest
from mcp import Client

from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.truncation import RESULT_CHARACTERS, to_text


async def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
    """A tool's result as it is sent, made in this process."""
    result = TOOLS[tool].function(**arguments)
    body = (await result if hasattr(result, "__await__") else result).model_dump(mode="json")
    assert len(to_text(body)) <= RESULT_CHARACTERS and list(body)[-1] == "next"
    return body


async def refused(tool: str, /, **arguments: Any) -> FlashError:
    """The error of a call in this process; it says what to do."""
    with pytest.raises(FlashError) as caught:
        await call(tool, **arguments)
    assert caught.value.fix
    return caught.value


async def call_over(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """A tool's result, whole."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None and len(to_text(result.structured_content)) <= RESULT_CHARACTERS
    assert "cut" not in result.structured_content
    return result.structured_content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    """The text of a tool error; its code is registered and it says what to do."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    text = result.content[0].text
    assert text[1:].partition("]")[0].partition(" ")[0] in CODES and "Fix: " in text
    return text


PIECE = re.compile(r" ?[A-Za-z]{1,5}|\d|[^\sA-Za-z\d]{1,2}|\s+")


def tokens(text: str) -> int:
    """About how many tokens a result costs: for results as JSON a little more than SmolLM2's tokenizer makes of
    them, whose vocabulary is small."""
    return len(PIECE.findall(text))


def named_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Every call of a tool that a `next` writes out: (tool, arguments)."""
    found: list[tuple[str, dict[str, Any]]] = []
    for start in re.finditer(rf"\b({'|'.join(TOOLS)})\(", text):
        ends = (at for at, letter in enumerate(text) if letter == ")" and at > start.start())
        for end in ends:
            with suppress(SyntaxError):
                found.append((start[1], _arguments(text[start.start() : end + 1])))
                break
    return found


def _arguments(call: str) -> dict[str, Any]:
    """SyntaxError if the call ends elsewhere. JSON's constants are allowed, as in the docs."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    constants = {"true": True, "false": False, "null": None}
    given: dict[str, Any] = {}
    for keyword in tree.keywords:
        if isinstance(keyword.value, ast.Name):
            given[str(keyword.arg)] = constants[keyword.value.id]
        else:
            given[str(keyword.arg)] = ast.literal_eval(keyword.value)
    return given
