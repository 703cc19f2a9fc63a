import asyncio
from typing import Any

from uvicorn.server import ServerState

from environments.settings import ServerSettings
from flash_mcp.server.connections import LimitedConfig, LimitedProtocol


async def test_blanks_around_header_values_are_gone_and_those_inside_stay():
    """RFC 9110 section 5.5. The SDK compares such values with the body of the request."""
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = LimitedConfig(app, "127.0.0.1", 0, ServerSettings(), lifespan="off")
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: LimitedProtocol(config, state, {}), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nmcp-name: \t catalog \t \r\nuser-agent:a b\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert seen == [(b"host", b"h"), (b"mcp-name", b"catalog"), (b"user-agent", b"a b")]
