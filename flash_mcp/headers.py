"""ASGI middleware for request headers."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrimmedHeaders:
    """Takes the blanks around header values off, as RFC 9110 section 5.5 asks: httptools leaves those at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}
        await self.app(scope, receive, send)
