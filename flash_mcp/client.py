"""A typed client of the tools for Python programs, over stdio, or over HTTP with a token.

    with Client() as client:
        run = client.train(environment="calculator", steps=20)
        report = client.status(run.run_id, until="end")

A method takes its tool's arguments and returns its tool's result. A refusal is a FlashError with
its code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2
import mcp
from anyio.from_thread import start_blocking_portal
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent
from pydantic_core import to_jsonable_python

from flash_mcp.protocol.errors import FlashError, first_of
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.surroundings import is_direct, use_proxies
from flash_mcp.tools import registry
from flash_mcp.tools.shared.tool_base import Result

P = ParamSpec("P")
R = TypeVar("R", bound=Result)
TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""A call that waits reports progress every few seconds."""


def _method(function: Callable[P, Awaitable[R] | R]) -> Callable[Concatenate[Client, P], R]:
    tool = registry.TOOLS[function.__name__]

    @functools.wraps(function)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = {**dict(zip(tool.signature.parameters, args, strict=False)), **kwargs}
        return tool.signature.return_annotation.model_validate(self.call(tool.name, arguments))

    return call


class Client:
    """`url` and `token` are those of `flash-mcp serve --http`; without a url, the client starts a
    server of its own on this machine, with this process's environment."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self.url = url
        self.token = token or os.environ.get("FLASH_TOKEN", "")

    def __enter__(self) -> Self:
        """FlashError if the server refuses the token, httpx2's error if none answers."""
        try:
            with ExitStack() as stack:
                self._portal = stack.enter_context(start_blocking_portal())
                session = self._portal.wrap_async_context_manager(self._connected())
                self._session = stack.enter_context(session)
                self._stack = stack.pop_all()
        except Exception as error:
            cause = first_of(error)
            if isinstance(cause, mcp.MCPError):
                cause = FlashError.from_text(str(cause))
            raise cause from error
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[mcp.Client]:
        if self.url is None:
            words = ["-m", "flash_mcp.cli", "serve"]
            environment = dict(os.environ)
            own = mcp.StdioServerParameters(command=sys.executable, args=words, env=environment)
            async with mcp.Client(own) as session:
                yield session
            return
        use_proxies()
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        async with (
            httpx2.AsyncClient(
                headers=headers, timeout=TIMEOUT, trust_env=not is_direct(self.url)
            ) as http,
            mcp.Client(streamable_http_client(self.url, http_client=http)) as session,
        ):
            yield session

    def call(self, tool: str, arguments: Json) -> Any:
        """The structured result of a tool by its name. FlashError if it refuses."""
        sent = to_jsonable_python(arguments)
        try:
            result = self._portal.call(self._call, tool, sent)
        except mcp.MCPError as error:  # a request that the server does not let through
            raise FlashError.from_text(str(error)) from error
        if result.is_error:
            texts = [block.text for block in result.content if isinstance(block, TextContent)]
            raise FlashError.from_text("\n".join(texts))
        return result.structured_content

    async def _call(self, tool: str, arguments: Json) -> mcp.types.CallToolResult:
        return await self._session.call_tool(tool, arguments, progress_callback=_ignored)

    catalog = _method(registry.catalog)
    env_setup = _method(registry.env_setup)
    env_test = _method(registry.env_test)
    env_push = _method(registry.env_push)
    train = _method(registry.train)
    cancel = _method(registry.cancel)
    checkpoints = _method(registry.checkpoints)
    status = _method(registry.status)
    rollouts = _method(registry.rollouts)
    evaluate = _method(registry.evaluate)
    compare = _method(registry.compare)
    curate = _method(registry.curate)
    deploy = _method(registry.deploy)
    undeploy = _method(registry.undeploy)
    chat = _method(registry.chat)


for _name, _tool in registry.TOOLS.items():
    if not hasattr(Client, _name):  # it lies behind a door
        setattr(Client, _name, _method(_tool.function))


async def _ignored(progress: float, total: float | None, message: str | None) -> None:
    """A caller that takes progress may wait for up to an hour in `status(until=...)`."""
