"""What arrives as JSON-RPC: each request gets an answer, also one that is none by the protocol.

The SDK drops what it cannot read over stdio, and takes a request with a wrong id for a notification
over HTTP: its sender would wait for ever. `StdioFrames` and `CheckedPosts` stand before it."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

import anyio
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE
from mcp_types import INVALID_REQUEST, PARSE_ERROR, jsonrpc_message_adapter
from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash_mcp.tools.shared.tool_base import CALL_TIMEOUT_S

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ID = re.compile(r'"id"\s*:\s*("[^"\\]{0,200}"|-?\d{1,18})\s*[,}]')
"""An id in what is no JSON, such as a message that was cut."""

Answer = dict[str, Any]


class Refused(Exception):
    """What is no message of the protocol, with the `answers` to send instead."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers


def _refusal(code: int, what: str, *ids: Any) -> Refused:
    error = {"code": code, "message": what}
    return Refused([{"jsonrpc": "2.0", "id": identity, "error": error} for identity in ids])


def _doubled(identity: Any) -> Refused:
    what = f"Invalid Request: a request with the id {identity!r} is under way"
    return _refusal(INVALID_REQUEST, what, identity)


def checked(text: str) -> tuple[str, dict[str, Any]]:
    """A message as JSON that the SDK reads, with U+FFFD for each half of a character, and parsed.
    Refused, if it is none.
    """
    text = text.removeprefix("\ufeff").strip()
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"Parse error: this cannot be read as JSON: {error}"
        match = ID.search(text[:10_000])
        raise _refusal(PARSE_ERROR, what, match and json.loads(match[1])) from error
    if isinstance(message, list):
        what = "Invalid Request: MCP has no batches: send each message on its own"
        ids: list[Any] = []
        for item in cast("list[Any]", message):
            if isinstance(item, dict) and "id" in item:
                ids.append(item["id"])
        raise _refusal(INVALID_REQUEST, what, *ids or [None])
    if not isinstance(message, dict):
        raise _refusal(INVALID_REQUEST, "Invalid Request: a message is a JSON object", None)
    fields = cast("dict[str, Any]", message)
    identity = fields.get("id")
    is_id = isinstance(identity, (str, int)) and not isinstance(identity, bool)
    is_error = "error" in fields and "method" not in fields  # which may have no id
    if "id" in fields and not is_id and not is_error:
        what = f"Invalid Request: id is a text or a whole number, not {json.dumps(identity):.100}"
        raise _refusal(INVALID_REQUEST, what, identity if isinstance(identity, float) else None)
    shown = json.dumps(fields, ensure_ascii=False)
    if LONE_SURROGATE.search(shown):
        text = LONE_SURROGATE.sub("\ufffd", shown)
        fields = json.loads(text)
    try:
        jsonrpc_message_adapter.validate_json(text, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":  # NaN, or nested deeper than the SDK reads
            what = f"Parse error: this cannot be read as JSON: {first['msg']}"
            raise _refusal(PARSE_ERROR, what, identity) from error
        place = ".".join(str(part) for part in first["loc"] if part in fields) or "the message"
        what = f"Invalid Request: {place}: {first['msg']}"
        raise _refusal(INVALID_REQUEST, what, identity) from error
    return text, fields


class StdioFrames:
    """The standard streams as `stdio_server` reads and writes them: what is no message is answered
    at once, and the input ends when every request that came has been answered.
    """

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self.stdin = anyio.wrap_file(stdin)
        self.stdout = anyio.wrap_file(stdout)
        self.wire = stdout.fileno()
        self.open: set[str | int] = set()
        """The ids of requests that have no answer yet."""
        self.writing = anyio.Lock()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for line in self.stdin:
            if not line.strip("\ufeff \t\r\n"):
                continue
            try:
                text, fields = checked(line)
                self._note(fields)
            except Refused as refused:
                for answer in refused.answers:
                    await self._send(json.dumps(answer) + "\n")
            else:
                yield text
        with anyio.move_on_after(CALL_TIMEOUT_S):
            while self.open and not self._is_unread():  # noqa: ASYNC110  no event tells of the latter
                await anyio.sleep(0.02)

    def _note(self, fields: dict[str, Any]) -> None:
        identity, method = fields.get("id"), fields.get("method")
        if method == "notifications/cancelled":  # such a request gets no answer
            params: dict[str, Any] = fields.get("params") or {}
            self.open.discard(params.get("requestId"))
        # An answer of the client has no method, and a subscription is answered when it ends.
        if identity is None or method in (None, "subscriptions/listen"):
            return
        if identity in self.open:
            raise _doubled(identity)
        self.open.add(identity)

    def _is_unread(self) -> bool:
        wire = select.poll()
        wire.register(self.wire, 0)
        return bool(wire.poll(0))

    async def write(self, text: str) -> None:
        fields = json.loads(text)
        await self._send(text)
        if "method" not in fields:
            self.open.discard(fields.get("id"))

    async def _send(self, text: str) -> None:
        async with self.writing:
            await self.stdout.write(text)
            await self.stdout.flush()

    async def flush(self) -> None:
        """Nothing is left to write."""


@asynccontextmanager
async def checked_stdio() -> AsyncGenerator[Any]:
    """The SDK's streams over standard input and output, with `StdioFrames` before them. As the SDK
    does, what else is printed goes to stderr meanwhile.
    """
    wires = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        # Left open: a thread may still read when this ends, and must not get another file's number.
        stdin = os.fdopen(wires[0], encoding="utf-8", errors="replace", closefd=False)
        stdout = os.fdopen(wires[1], "w", encoding="utf-8", closefd=False)
        frames = cast("Any", StdioFrames(stdin, stdout))
        async with stdio_server(frames, frames) as streams:
            yield streams
    finally:
        sys.stdout.flush()
        os.dup2(wires[0], 0)
        os.dup2(wires[1], 1)


class CheckedPosts:
    """ASGI middleware: answers 400 to a POST to `path` that is no message of the protocol."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self.app = app
        self.path = path
        self.open: set[tuple[str, Any]] = set()
        """The sessions and ids of requests that have no answer yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if not is_post or scope["path"] != self.path or not _is_json(scope):
            await self.app(scope, receive, send)
            return
        body = b""
        messages: list[Message] = []
        while len(body) <= DEFAULT_MAX_REQUEST_BODY_SIZE:
            messages.append(await receive())
            body += messages[-1].get("body", b"")
            if not messages[-1].get("more_body"):
                break
        else:  # too large, which the SDK refuses
            await self.app(scope, _replay(messages, receive), send)
            return
        if messages[-1]["type"] == "http.disconnect":
            return
        session = dict(scope["headers"]).get(b"mcp-session-id", b"").decode(errors="replace")
        try:
            text, fields = checked(body.decode(errors="replace"))
            key = (session, fields.get("id"))
            is_request = "method" in fields and key[1] is not None and bool(session)
            if is_request and key in self.open:
                raise _doubled(key[1])
        except Refused as refused:
            shown = refused.answers if len(refused.answers) > 1 else refused.answers[0]
            await JSONResponse(shown, 400)(scope, receive, send)
            return
        if is_request:
            self.open.add(key)
        body = text.encode()
        lengths = [(b"content-length", str(len(body)).encode())]
        kept = [header for header in scope["headers"] if header[0] not in SIZES]
        try:
            message = {"type": "http.request", "body": body, "more_body": False}
            await self.app({**scope, "headers": kept + lengths}, _replay([message], receive), send)
        finally:
            if is_request:
                self.open.discard(key)


def _is_json(scope: Scope) -> bool:
    """Whether the body is said to be JSON; the SDK refuses others."""
    return b"json" in dict(scope["headers"]).get(b"content-type", b"").lower()


SIZES = (b"content-length", b"transfer-encoding")


def _replay(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def replayed() -> Message:
        for message in left:
            return message
        return await receive()

    return replayed
