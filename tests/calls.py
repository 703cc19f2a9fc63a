"""Calls of tools over a client, as tests make them."""

from __future__ import annotations

from typing import Any

from mcp import Client

from flash_mcp.protocol.errors import CODES


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    """The text of a tool error; its code is registered and it says what to do."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    text = result.content[0].text
    assert text[1:].partition("]")[0].partition(" ")[0] in CODES
    assert "Fix: " in text
    return text
