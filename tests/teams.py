"""A server for teams in this process, over real HTTP, and clients with tokens."""

import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from flash_mcp.server.http_server import Admission, HttpServer, application
from flash_mcp.server.mcp_server import build_server
from flash_mcp.state import tokens
from flash_mcp.state.owners import NOBODY, Access, Quotas, acting_as
from flash_mcp.state.store import open_store
from tests.waiting import WAIT_S, wait_for


@dataclass
class Team:
    """Where a server is, and whom it lets in."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(self, owner: str, access: Access = "write", **options: Any) -> str:
        return tokens.create(open_store(), owner, access, **options)[1]

    def http(self, token: str | None = None, **headers: str) -> httpx.Client:
        """A plain HTTP client with a token."""
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=60, verify=False)

    @asynccontextmanager
    async def client(self, token: str, mode: str = "auto") -> AsyncGenerator[Client]:
        """An MCP client with a token."""
        headers = {"authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60, verify=False) as http,
            Client(streamable_http_client(f"{self.url}/mcp", http_client=http), mode=mode) as client,
        ):
            yield client


@contextmanager
def team_server(
    limits: Quotas | None = None, *, authenticate: bool = True, origins: Sequence[str] = ()
) -> Generator[Team]:
    admission = Admission(authenticate, limits=limits or Quotas(requests_per_minute=1_000_000), origins=origins)
    server = HttpServer(application(build_server(), "127.0.0.1", admission), "127.0.0.1", 0)

    def run() -> None:
        with acting_as(NOBODY):
            server.run()

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive())
    assert thread.is_alive()
    try:
        yield Team(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def text_of(result: CallToolResult) -> str:
    assert result.content[0].type == "text"
    return result.content[0].text


def code_of(text: str) -> str:
    return text.removeprefix("[").partition("]")[0].partition(" ")[0]
