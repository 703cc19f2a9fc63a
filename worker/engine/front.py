"""A proxy for vLLM's OpenAI server: the only routes that it answers, each behind a key.

vLLM asks for its key under /v1 and a few other prefixes only. Routes beside them swap adapters
(/adapters) and answer chats (/invocations) for any local user. This ASGI middleware
(`--middleware worker.engine.front.Front`) is given every request first:

- GET /health needs no key.
- Users' routes need VLLM_API_KEY.
- Adapters are loaded and unloaded with FLASH_ADMIN_KEY, which only the supervisor has. It also asks
  with it whether the server computes, and since when no user has asked for anything (/v1/idle).
- Users may ask how long nobody has used or watched it. A node ends a server that nobody wants.
- There is nothing else.

Chats of users are recorded where `deploy` was asked for that (worker/engine/recorder.py).
When the server starts, it also limits how long the model's chat template may take."""

from __future__ import annotations

import hmac
import os
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from environments.settings import state_directory
from worker.engine.recorder import ROUTES, Recorder
from worker.rollouts.rendering import limit_templates

Routes = frozenset[tuple[str, str]]

HEALTH = ("GET", "/health")
USER_ROUTES: Routes = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/version"),
        ("GET", "/metrics"),
    }
)
ADMIN_ROUTES: Routes = frozenset(
    {
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
    }
)
IDLE = ("GET", "/v1/idle")


class Front:
    """ASGI middleware. Its refusals have the shape of OpenAI's errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.user_key = os.environ["VLLM_API_KEY"]
        self.admin_key = os.environ["FLASH_ADMIN_KEY"]
        self.recorder = Recorder(state_directory())
        self.under_way = 0
        self.used_at = time.monotonic()
        self.watched_at = time.monotonic()
        """When the supervisor asked for something last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            limit_templates()
            engine: Any = scope["app"].state.engine_client
            await engine.collective_rpc("close_listening_ports")
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        route = (scope["method"], scope["path"])
        key = _key(scope)
        if route == HEALTH:
            await self.app(scope, receive, send)
        elif _equal(key, self.admin_key):
            self.watched_at = time.monotonic()
            if route in ADMIN_ROUTES:
                await self.app(self._as_user(scope), receive, send)
            elif route == IDLE:
                await self._tell_idle(scope, receive, send)
            else:
                await _refusal(route, 404)(scope, receive, send)
        elif not _equal(key, self.user_key):
            await _refusal(route, 401)(scope, receive, send)
        elif route == IDLE:
            await self._tell_idle(scope, receive, send)
        elif route in USER_ROUTES:
            await self._use(self._as_user(scope), receive, send)
        else:
            await _refusal(route, 404)(scope, receive, send)

    async def _use(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a user. Only what computes counts as use: monitors read /metrics for ever."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        self.under_way += 1
        try:
            if (scope["method"], scope["path"]) in ROUTES:
                await self.recorder.serve(self.app, scope, receive, send)
            else:
                await self.app(scope, receive, send)
        finally:
            self.under_way -= 1
            self.used_at = time.monotonic()

    async def _tell_idle(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = time.monotonic()
        idle_s = 0.0 if self.under_way else now - self.used_at
        response = {"idle_s": idle_s, "unwatched_s": now - self.watched_at}
        await JSONResponse(response)(scope, receive, send)

    def _as_user(self, scope: Scope) -> Scope:
        """The request with the key that vLLM itself asks for."""
        others = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
        key = (b"authorization", f"Bearer {self.user_key}".encode())
        return {**scope, "headers": [*others, key]}


def _key(scope: Scope) -> str:
    """The key of a request, as clients of OpenAI's or of Anthropic's API send it."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _equal(arguments: str, key: str) -> bool:
    # As bytes: compare_digest refuses texts that are not ASCII.
    return hmac.compare_digest(arguments.encode(), key.encode())


def _refusal(route: tuple[str, str], status: int) -> JSONResponse:
    message = f"There is no route {route[0]} {route[1]}."
    code = "unknown_url"
    headers: dict[str, str] = {}
    if status == 401:
        message = (
            "Incorrect or missing API key. Send `Authorization: Bearer KEY`; the key is `api_key` "
            "in the api_key_file that deploy returns."
        )
        code = "invalid_api_key"
        headers["www-authenticate"] = "Bearer"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)
