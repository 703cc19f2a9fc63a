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

Chats of users are recorded where `deploy` was asked for that (worker/extensions/recording.py).
When the server starts, it also limits how long the model's chat template may take."""

from __future__ import annotations

import hmac
import json
import os
import shutil
import time
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import httpx
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from environments import doors
from environments.settings import state_directory
from worker.adapter import WEIGHTS, named_as, with_noise
from worker.model_files import ModelFiles
from worker.process import MODEL_FOLDER
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
        ("POST", "/v1/ratings"),
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
LOAD = ("POST", "/v1/load_lora_adapter")
UNLOAD = ("POST", "/v1/unload_lora_adapter")
PROMPT = "7 plus 7 is 14, and twice 14 is more than"
ANSWER_S = 600.0
TRIED = "flash-tried"
"""What the copy of an adapter with noise is called while it is tried."""


class Front:
    """ASGI middleware. Its refusals have the shape of OpenAI's errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.user_key = os.environ["VLLM_API_KEY"]
        self.admin_key = os.environ["FLASH_ADMIN_KEY"]
        door = doors.each("flash_mcp.recorders").get("chats")
        self.recorder = door and door.Recorder(state_directory())
        self.under_way = 0
        self.used_at = time.monotonic()
        self.watched_at = time.monotonic()
        """When the supervisor asked for something last."""

    @cached_property
    def base(self) -> ModelFiles:
        return ModelFiles(Path(os.environ[MODEL_FOLDER]))

    @cached_property
    def copies(self) -> Path:
        """Adapters whose layers have other names than in their own folders. They lie in TMPDIR also
        if its disk is full: Python would take another folder, where they would stay.
        """
        return Path(mkdtemp(prefix="adapters-", dir=os.environ.get("TMPDIR")))

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
        # As clients of OpenAI's or of Anthropic's API send it
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if route == HEALTH:
            await self.app(scope, receive, send)
        elif _equal(key, self.admin_key):
            self.watched_at = time.monotonic()
            if route == LOAD:
                await self._load(self._as_user(scope), receive, send)
            elif route == UNLOAD:
                scope = self._as_user(scope)
                body = await _body_of(scope, receive)
                await _passed_on(await self._unload(scope, body))(scope, receive, send)
            elif route in ADMIN_ROUTES:
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
            if self.recorder and (scope["method"], scope["path"]) in self.recorder.routes:
                await self.recorder.serve(self.app, scope, receive, send)
            else:
                await self.app(scope, receive, send)
        finally:
            self.under_way -= 1
            self.used_at = time.monotonic()

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load an adapter under the names that the base model's files have. Before, a copy with
        noise in it is tried: vLLM passes over layers that it does not recognize."""
        body = await _body_of(scope, receive)
        adapter = Path(body.get("lora_path", ""))
        if (adapter / WEIGHTS).is_file():
            if not await self._has_effect(scope, adapter):
                message = "The adapter has no effect: none of its layers was recognized."
                error = {"message": message, "type": "invalid_request_error", "code": None}
                await JSONResponse({"error": error}, 400)(scope, receive, send)
                return
            named = await run_in_threadpool(self._named, body["lora_name"], adapter)
            body["lora_path"] = str(named)
        await _passed_on(await self._ask(scope, LOAD, body))(scope, receive, send)

    async def _unload(self, scope: Scope, body: dict[str, Any]) -> httpx.Response:
        """Unload an adapter, and remove its copy, which nothing reads any more."""
        response = await self._ask(scope, UNLOAD, body)
        if response.is_success:
            copy = self.copies / body["lora_name"]
            await run_in_threadpool(shutil.rmtree, copy, ignore_errors=True)
        return response

    async def _has_effect(self, scope: Scope, adapter: Path) -> bool:
        """Whether noise in the adapter changes what the model says; True if it cannot be loaded,
        which vLLM explains better."""
        with TemporaryDirectory() as scratch:
            noise = await run_in_threadpool(with_noise, adapter, Path(scratch))
            tried = await run_in_threadpool(self._named, TRIED, noise)
            loaded = await self._ask(scope, LOAD, {"lora_name": TRIED, "lora_path": str(tried)})
            if not loaded.is_success:
                return True
            said = await self._greedy(scope, TRIED)
            await self._unload(scope, {"lora_name": TRIED})
        return said != await self._greedy(scope, None)

    def _named(self, name: str, adapter: Path) -> Path:
        """The adapter as vLLM can load it; kept, since vLLM may read it again."""
        return named_as(self.base, adapter, self.copies / name)

    async def _greedy(self, scope: Scope, model: str | None) -> Any:
        """Tokens and log-probabilities that a model says; None is the base model."""
        if model is None:
            listed = await self._ask(scope, ("GET", "/v1/models"))
            model = next(row["id"] for row in listed.json()["data"] if not row.get("parent"))
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        answer = (await self._ask(scope, ("POST", "/v1/completions"), body)).json()
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    async def _ask(self, scope: Scope, route: tuple[str, str], body: Any = None) -> httpx.Response:
        """vLLM's answer to a request of this proxy itself."""
        transport = httpx.ASGITransport(app=partial(_within, self.app, scope))
        key = {"Authorization": f"Bearer {self.user_key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.request(*route, json=body, headers=key, timeout=ANSWER_S)

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


async def _within(app: ASGIApp, outer: Scope, scope: Scope, receive: Receive, send: Send) -> None:
    """Ask `app` within the application of another request."""
    shared = {name: outer[name] for name in ("app", "state") if name in outer}
    await app({**scope, **shared}, receive, send)


async def _body_of(scope: Scope, receive: Receive) -> dict[str, Any]:
    return json.loads(await Request(scope, receive).body() or b"{}")


def _passed_on(response: httpx.Response) -> Response:
    return Response(response.content, response.status_code, media_type="application/json")


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
