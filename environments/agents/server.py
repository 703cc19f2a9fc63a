"""The HTTP server that agents call: it reads requests, finds the session of their key, and writes
the model's answers.

It runs in the event loop of the environment's process, without a thread for each connection. A
connection whose request is not whole yet belongs to nobody, so there is a bound on these: one
program that opens thousands of them does not keep the requests of others out."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from environments.agents.anthropic import Messages
from environments.agents.calls import finite_json
from environments.agents.chat_completions import ChatCompletions
from environments.agents.dialects import (
    MODEL,
    ApiError,
    ApiRequest,
    Dialect,
    Event,
    TurnToSend,
    count_tokens,
    in_role,
    invalid,
)
from environments.agents.responses import Responses
from environments.agents.session import AgentSession, Peer, SessionCall
from environments.base import Json
from environments.tools import as_object

DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/responses": Responses(),
    "/messages": Messages(),
}
COUNT_TOKENS = "/count_tokens"  # ends the path of a request that is only counted
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 2 << 20
"""On its way to the model a text may take three times as many bytes, and a reply of this process
has 8 MiB at most.
"""
MOST_DISCARDED_BYTES = 64 << 20
LENGTH = re.compile("[0-9]{1,18}")
MOST_UNREAD = 256
"""Connections whose request is not whole yet. The oldest is closed for a new one."""
MOST_CONNECTIONS = 32  # requests of one session that are served at the same time
READ_TIMEOUT_S = 60.0
"""A connection is closed if its request is not whole, or its answer not read, after so long."""
MOST_SEEN_OFF = 256
SEE_OFF_S = 5.0  # how long a client may take to close a connection whose answer it has been sent
COMMENT_EVERY_S = 5.0
"""How often a stream that waits for the model sends a comment: clients time out on silence."""
UNCOUNTED = ("invalid_api_key", "context_length_exceeded", "rate_limit_exceeded")
"""Refusals that say something else than that a wish of the agent is not served."""
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


class Endpoint:
    """The server. `sessions` are those of open episodes by their keys."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        port: int = 0,
        exchange: Callable[..., Exchange] | None = None,
    ) -> None:
        """OSError if the port is not to be had. `exchange` makes an Exchange of a connection."""
        self.sessions: dict[str, AgentSession] = {}
        self._exchange = exchange or Exchange
        listening = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._unread: dict[asyncio.StreamWriter, None] = {}
        self._seen_off: set[Exchange] = set()
        serving = asyncio.start_server(self._serve, sock=listening, limit=MAX_HEAD_BYTES)
        self._starting = loop.create_task(serving)

    async def aclose(self) -> None:
        """Listen no more. Connections end with the event loop."""
        (await self._starting).close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request and close: an agent that forgets its clients would keep connections."""
        self._unread[writer] = None
        if len(self._unread) > MOST_UNREAD:
            oldest = next(iter(self._unread))
            del self._unread[oldest]
            oldest.transport.abort()
        exchange = self._exchange(self.sessions, reader, writer)
        try:
            # A client that went away, or does not go on, is no error.
            with suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await exchange.read()
                self._unread.pop(writer, None)
                await exchange.serve()
                if exchange.calls and len(self._seen_off) < MOST_SEEN_OFF:
                    self._seen_off.add(exchange)
                    await exchange.see_off()
        finally:
            self._seen_off.discard(exchange)
            self._unread.pop(writer, None)
            for call in exchange.calls:
                call.leave(exchange.client)
            writer.close()


@dataclass(eq=False)
class Exchange:
    _sessions: dict[str, AgentSession]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    def __post_init__(self) -> None:
        self._method, self._target = "GET", "/"
        self._headers: dict[str, str] = {}
        """Their names are in lower case."""
        self._content = b""
        self._refusal: ApiError | None = None
        """Why the request cannot be read."""
        self.client = Peer(self._reader, self._writer)
        self._streams = False
        """Whether the head of a stream has been sent."""
        self.calls: list[SessionCall] = []
        """Those that answer this request."""
        self._id = f"req_{secrets.token_hex(12)}"

    async def read(self) -> None:
        """Read the request. EOFError if the client leaves before it is whole."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            self._method, self._target, _ = lines[0].split(" ")
        except (asyncio.LimitOverrunError, ValueError):
            self._refusal = ApiError(400, "invalid_value", "this is no request of HTTP")
            return
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self._headers[name.strip().lower()] = value.strip()
        length = self._headers.get("content-length", "0")
        if "transfer-encoding" in self._headers or not LENGTH.fullmatch(length):
            what = "send the body with a Content-Length"
            self._refusal = ApiError(411, "length_required", what)
            return
        if self._headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if int(length) > MAX_BODY_BYTES:
            # Many clients read no answer before they have sent everything.
            left = min(int(length), MOST_DISCARDED_BYTES)
            while left > 0 and (read := await self._reader.read(min(left, 1 << 16))):
                left -= len(read)
            what = f"the request has {length:.20} bytes; the most are {MAX_BODY_BYTES:,}"
            self._refusal = ApiError(413, "request_too_large", what)
            return
        self._content = await self._reader.readexactly(int(length))

    @property
    def _path(self) -> str:
        """The path below /v1. Clients add /v1 to a base_url that has it already."""
        path = self._target.partition("?")[0]
        while path.startswith("/v1/"):
            path = path.removeprefix("/v1")
        return path

    async def serve(self) -> None:
        headers = self._headers
        key = headers.get("authorization") or headers.get("x-api-key", "")
        session = self._sessions.get(key.removeprefix("Bearer ").strip())
        if session is not None:
            session.connections += 1
        try:
            if self._refusal is not None:
                raise self._refusal
            if session is None:
                what = "incorrect API key, or its rollout has ended"
                raise ApiError(401, "invalid_api_key", what)
            if session.connections > MOST_CONNECTIONS:
                what = f"{MOST_CONNECTIONS} requests of this run are served already"
                raise ApiError(429, "rate_limit_exceeded", what, may_retry=True)
            if self._method == "POST":
                await self._ask(session)
            else:
                await self._models()
        except ApiError as error:
            if session is not None and error.code not in UNCOUNTED:
                session.count_refusal(f"{error.code}: {error.param or error}"[:200])
                session.last_refusal = f"{error.code}: {error}"[:300]
            await self._fail(error)
        except OSError:
            raise  # the client went away
        except Exception as raised:
            traceback.print_exc()
            what = f"this request broke the server: {raised!r:.200}"
            await self._fail(ApiError(500, "server_error", what))
        finally:
            if session is not None:
                session.connections -= 1

    async def _fail(self, error: ApiError) -> None:
        dialect = self._dialect or DIALECTS["/chat/completions"]
        if self._streams:
            self._events([dialect.error_event(error, self._id)])
            await self._end_stream()
        else:
            body = dialect.error(error, self._id)
            await self._send(error.status, body, may_retry=error.may_retry)

    @property
    def _dialect(self) -> Dialect | None:
        return DIALECTS.get(self._path.removesuffix(COUNT_TOKENS))

    async def _models(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "flash-mcp"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        path = self._path
        if path == "/models":
            await self._send(200, {"object": "list", "data": [model], "has_more": False})
        elif path == f"/models/{MODEL}":
            await self._send(200, model)
        else:
            raise self._unknown()

    def _unknown(self) -> ApiError:
        request = f"{self._method} {self._target[:80]}"
        what = f"there is no {request}; POST goes to {', '.join(DIALECTS)}"
        return ApiError(404, "unknown_url", what)

    async def _ask(self, session: AgentSession) -> None:
        dialect = self._dialect
        if dialect is None:
            raise self._unknown()
        is_counted = self._path.endswith(COUNT_TOKENS)
        request = dialect.read(self._body(), session.kept, is_counted=is_counted)
        if is_counted:
            await self._send(200, count_tokens(request))
            return
        for kind in request.left_out:
            session.count_refusal(f"left out: the tool {kind}")
        self.client.streams = request.streams
        self.calls = session.ask(
            self.client,
            request.messages,
            request.tools,
            in_role(request, self._headers),
            choices=request.choices,
            is_retry=self._headers.get("x-stainless-retry-count", "0") != "0",
        )
        answers = await self._awaited(request)
        is_instructed = bool(request.body.get("instructions"))
        turn = answers[0].turn
        session.kept[request.identity] = [*request.messages[is_instructed:], turn]
        if self.client.has_left:
            raise ConnectionError("the client left")
        if request.streams:
            self._begin_stream()
            self._events(dialect.events(answers, request))
            if dialect.ends_with:
                self._chunk(f"data: {dialect.ends_with}\n\n")
            await self._end_stream()
        else:
            await self._send(200, dialect.whole(answers, request))
        self.client.is_sent = True
        for call in self.calls:
            call.is_sent = True

    def _body(self) -> Json:
        try:
            parsed = finite_json(self._content)
        except (ValueError, RecursionError) as error:
            raise invalid("the body is not JSON") from error
        return as_object(parsed)

    async def see_off(self) -> None:
        """Wait until the client closes: a reset says that it left unread what it was sent."""
        self._writer.write_eof()
        async with asyncio.timeout(SEE_OFF_S):
            while await self._reader.read(1 << 16):
                pass

    async def _awaited(self, request: ApiRequest) -> list[TurnToSend]:
        """The model's answers. ConnectionError if the client leaves before: it may ask again."""
        answers = [call.answer for call in self.calls]
        pending = set(answers)
        leaving = asyncio.ensure_future(self._reader.read(1))
        try:
            while pending:
                done, _ = await asyncio.wait(
                    (leaving, *pending),
                    timeout=COMMENT_EVERY_S if request.streams else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                pending -= done
                if leaving in done:
                    if leaving.exception() or not leaving.result():
                        raise ConnectionError("the client left")
                    # More bytes than the request has: they are of no interest.
                    leaving = asyncio.ensure_future(self._reader.read(1 << 16))
                if not done:
                    self._begin_stream()
                    self._chunk(": the model has not answered yet\n\n")
            return [answer.result() for answer in answers]
        finally:
            leaving.cancel()
            await asyncio.wait((leaving,))  # only one may read at a time

    # -- writing -----------------------------------------------------------------------------------

    async def _send(self, status: int, body: Json, *, may_retry: bool = False) -> None:
        content = json.dumps(body).encode()
        self._head(
            status,
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                "x-should-retry": str(may_retry).lower(),
            },
        )
        self._writer.write(content)
        await self._drain()

    def _head(self, status: int, headers: dict[str, str]) -> None:
        headers |= {"Connection": "close", "x-request-id": self._id, "request-id": self._id}
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def _begin_stream(self) -> None:
        if self._streams:
            return
        self._streams = True
        self._head(
            200,
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "Transfer-Encoding": "chunked",
            },
        )

    def _events(self, events: Iterable[Event]) -> None:
        for name, data in events:
            named = f"event: {name}\n" if name else ""
            self._chunk(f"{named}data: {json.dumps(data)}\n\n")

    def _chunk(self, text: str) -> None:
        event = text.encode()
        self._writer.write(b"%x\r\n%b\r\n" % (len(event), event))

    async def _end_stream(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._drain()

    async def _drain(self) -> None:
        """Wait until everything is sent. OSError if the client left."""
        self._writer.transport.set_write_buffer_limits(0)
        async with asyncio.timeout(READ_TIMEOUT_S):
            await self._writer.drain()
        if self._writer.is_closing() or self.client.left_unread:
            raise ConnectionError("the client left")
