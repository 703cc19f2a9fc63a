from __future__ import annotations

from typing import Any

import pytest

from flash_mcp.server.mcp_server import TrimmedHeaders


@pytest.mark.anyio
async def test_blanks_around_header_values_are_gone_and_those_inside_stay():
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": "http", "headers": [(b"mcp-name", b" \tcatalog  "), (b"user-agent", b"a b")]}
    await TrimmedHeaders(app)(scope, None, None)
    await TrimmedHeaders(app)({"type": "lifespan"}, None, None)
    assert seen == [
        {"type": "http", "headers": [(b"mcp-name", b"catalog"), (b"user-agent", b"a b")]},
        {"type": "lifespan"},
    ]
