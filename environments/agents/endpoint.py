"""The API of a model that an agent calls, served inside the sandbox of its environment.

    endpoint = Endpoint(loop)                    # a server on 127.0.0.1 and a free port
    episode = AgentEpisode(agent, endpoint, call)
    messages = await episode.start_episode(example, "")     # what the agent asked first
    reply = await episode.step_episode(example, [*messages, turn], turn["content"])

Each request of the agent is a call, which waits for the model's turn. A call that continues the
conversation of an earlier one names it as its parent, so the calls of a rollout form a tree: an
agent may branch, begin anew, and ask several things at once. The model is reached through the pipe
of the environment's process, as in every other environment, and the sandbox needs no way out: the
server listens in a network namespace that holds nothing else.

A caller that plays one turn after the other (the gate) sees an environment of many turns. The
worker answers calls as they come (`next_call`, `answer_call`).

Only the standard library is used, because the interpreter may be the environment's own."""

# Any method of an environment may be `async def`.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import select
import socket
import socketserver
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from environments.agents.calls import ANSWER_ROLES, NO_USAGE, AgentCall, Usage, finite_float
from environments.agents.dialects import (
    DIALECTS,
    MODEL,
    Answer,
    ApiError,
    Asked,
    Event,
    count_tokens,
    invalid,
)
from environments.base import (
    ChatMessage,
    EnvironmentAgent,
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    RewardResult,
    TaskExample,
)
from environments.faults import EnvironmentFault
from environments.tools import as_object

Json = dict[str, Any]
COUNT_TOKENS = "/count_tokens"
"""Ends the path of a request that is only counted."""
MAX_BODY_BYTES = 2 << 20
"""On its way to the model a text may take three times as many bytes, and a reply of this process
has 8 MiB at most.
"""
MOST_DISCARDED_BYTES = 64 << 20
MOST_AT_ONCE = 8
"""Requests of one session that may wait at the same time. Each has a thread."""
LOOK_S = 0.5
"""How often a request that waits looks whether its client is still there."""
READ_TIMEOUT_S = 60.0
"""A connection on which half a request arrived is closed after so long."""


@dataclass
class _Call:
    """A request and what became of it."""

    request: AgentCall
    said: list[Any]
    """The essence of each message of its conversation, with the answer once there is one."""
    answer: asyncio.Future[Answer]
    waiting: int = 0
    """Clients that wait for the answer."""
    is_lost: bool = False
    """Whether the answer reached no client."""

    @property
    def is_answered(self) -> bool:
        return self.answer.done() and self.answer.exception() is None


@dataclass(eq=False)
class _Asking:
    """What a thread of the server does for one request."""

    answer: Future[Answer] | None = None

    @property
    def hands_over(self) -> bool:
        """Whether it will soon know if the answer reached its client."""
        return self.answer is None or self.answer.done()


class Session:
    """The calls of one rollout. Only the event loop uses it."""

    def __init__(
        self, max_calls: int, max_tokens: int | None = None, max_seconds: float | None = None
    ) -> None:
        self.key = f"sk-{secrets.token_hex(24)}"
        self.refusal: ApiError | None = None
        """What every further request is answered with, once the rollout is at a limit."""
        self.was_refused = False
        self.limit: ApiError | None = None
        """The limit of the rollout that a request met."""
        self.asked: asyncio.Queue[AgentCall] = asyncio.Queue()
        self.kept: dict[str, list[ChatMessage]] = {}
        """The conversation up to each reply of OpenAI's responses, by its id."""
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._started = time.monotonic()
        self._tokens = 0
        self._calls: list[_Call] = []
        self.asking: set[_Asking] = set()
        """Of the server's threads, until they know whether their answer reached its client."""

    async def ask(
        self, messages: list[ChatMessage], tools: list[Json], *, is_retry: bool
    ) -> Answer:
        """The model's answer to a request. Raises ApiError."""
        essences = [*map(_essence, messages)]
        await self._handed_over()
        call = self._repeated(essences, tools, is_retry=is_retry)
        if call is None:
            call = self._added(messages, essences, tools)
        call.waiting += 1
        call.is_lost = False
        try:
            return await asyncio.shield(call.answer)
        finally:
            call.waiting -= 1

    def _repeated(self, essences: list[Any], tools: list[Json], *, is_retry: bool) -> _Call | None:
        """The call that this request sends again: a client says so, or the one before it left."""
        size = len(essences)
        for call in reversed(self._calls):
            same = call.request.tools == tools and call.said[:size] == essences
            has_left = call.is_lost or not (call.waiting or call.answer.done())
            if same and len(call.said) == size + call.is_answered and (is_retry or has_left):
                return call
        return None

    def _added(self, messages: list[ChatMessage], essences: list[Any], tools: list[Json]) -> _Call:
        if self.refusal is not None:
            self.was_refused = True
            raise self.refusal
        if limit := self._limit():
            self.was_refused = True
            self.limit = limit
            raise limit
        if sum(not call.answer.done() for call in self._calls) >= MOST_AT_ONCE:
            what = f"{MOST_AT_ONCE} requests of this run wait already; send this one again later"
            raise ApiError(429, "rate_limit_exceeded", what, may_retry=True)
        parent = self._parent_of(messages, essences, tools)
        start = len(parent.said) if parent else 0
        number = parent.request.number if parent else None
        request = AgentCall(len(self._calls), number, messages[start:], tools)
        call = _Call(request, essences, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self.asked.put_nowait(request)
        return call

    def _limit(self) -> ApiError | None:
        """The limit that the run has reached."""
        seconds = time.monotonic() - self._started
        if len(self._calls) >= self._max_calls:
            return _at_most(self._max_calls)
        if self._max_tokens is not None and self._tokens >= self._max_tokens:
            what = f"the model has written the {self._max_tokens} tokens of this run"
            return ApiError(429, "insufficient_quota", what)
        if self._max_seconds is not None and seconds >= self._max_seconds:
            what = f"the {self._max_seconds:g} seconds of this run are over"
            return ApiError(429, "rate_limit_exceeded", what)
        return None

    def _parent_of(
        self, messages: list[ChatMessage], essences: list[Any], tools: list[Json]
    ) -> _Call | None:
        """The call whose conversation this one goes on with: the longest, and then the newest."""
        best = None
        for call in self._calls:
            start = len(call.said)
            if not call.is_answered or call.request.tools != tools or call.said != essences[:start]:
                continue
            added = messages[start:]
            # A template renders a turn of the model only as a part of the whole conversation.
            is_reply = bool(added) and all(item["role"] in ANSWER_ROLES for item in added)
            if is_reply and (best is None or start >= len(best.said)):
                best = call
        return best

    def answer(self, number: int, turn: ChatMessage, usage: Usage) -> None:
        """Answer a call that waits."""
        call = self._calls[number]
        if not call.answer.done():
            call.said = [*call.said, _essence(turn)]
            call.is_lost = not call.waiting
            self._tokens += usage.completion_tokens
            call.answer.set_result(Answer(turn, usage, number))

    def lose(self, number: int) -> None:
        """A client left as its answer came."""
        call = self._calls[number]
        call.is_lost = not call.waiting

    def fail(self, number: int, error: ApiError) -> None:
        """Answer a call that waits with this error."""
        call = self._calls[number]
        if not call.answer.done():
            self.was_refused = True
            call.answer.set_exception(error)
            call.answer.exception()  # read, in case that nobody waits any more

    def refuse(self, error: ApiError) -> None:
        """Answer the requests that wait, and all later ones, with this error."""
        self.refusal = error
        for call in self._calls:
            self.fail(call.request.number, error)

    @property
    def waiting(self) -> int:
        """The oldest call that has no answer."""
        return next(call.request.number for call in self._calls if not call.answer.done())

    async def has_lost(self) -> bool:
        """Whether an answer reached no client, and none asked for it again."""
        await self._handed_over()
        return any(call.is_lost for call in self._calls)

    async def _handed_over(self) -> None:
        """Wait until it is known of each answer whether it reached its client."""
        while any(item.hands_over for item in self.asking):  # noqa: ASYNC110  a thread's next line
            await asyncio.sleep(0.001)


def _at_most(calls: int) -> ApiError:
    return ApiError(429, "rate_limit_exceeded", f"this run may ask the model {calls} times")


# -- one episode -----------------------------------------------------------------------------------

Call = Callable[..., Coroutine[Any, Any, Any]]


class AgentEpisode(EnvironmentMultiTurn):
    """An EnvironmentAgent as an environment of many turns. Each rollout has a copy with a session.

    `call` runs a method of the agent: coroutines in the event loop, others in a thread."""

    def __init__(self, agent: EnvironmentAgent, endpoint: Endpoint, call: Call) -> None:
        self.dataset = agent.dataset
        self.eval_dataset = agent.eval_dataset
        self.max_score_concurrency = agent.max_score_concurrency
        self.usage = NO_USAGE
        """Of the turn that `step_episode` gets next."""
        self._agent = agent
        self._endpoint = endpoint
        self._call = call
        self._session = Session(agent.max_calls, agent.max_tokens, agent.max_seconds)
        self._running: asyncio.Task[Any] | None = None
        self._tools: list[Json] = []
        self._turns = 0

    async def new_episode(self, example: TaskExample) -> AgentEpisode:
        agent = await self._begin(self._agent.new_episode, example)
        if not isinstance(agent, EnvironmentAgent):
            what = f"new_episode must return an EnvironmentAgent, got {type(agent).__name__}"
            raise EnvironmentFault("environment_error", what)
        return AgentEpisode(agent, self._endpoint, self._call)

    async def start_episode(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        session = self._session
        self._endpoint.sessions[session.key] = session
        run = self._agent.run
        self._running = self._begin(run, example, self._endpoint.url, session.key, MODEL)
        call = await self.next_call()
        if call is None:
            what = "run returned without asking the model: there is nothing to train or evaluate"
            raise EnvironmentFault("environment_error", what)
        self._tools = call.tools
        return call.messages

    async def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        return await self._begin(self._agent.sft_completion, example)

    def max_episode_turns(self, example: TaskExample) -> int:
        return self._agent.max_calls

    def episode_tools(self, example: TaskExample) -> Sequence[Json]:
        return self._tools

    async def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        """Answer the oldest request. For a caller that plays one turn after the other, the next
        request is what the environment says.
        """
        self._turns += 1
        turn = messages[-1]
        self.answer_call(self._session.waiting, turn, self.usage)
        call = await self.next_call()
        if call is None:
            return EnvironmentStepResult(done=True)
        added = [message for message in call.messages if message["role"] in ANSWER_ROLES]
        return EnvironmentStepResult(False, added or [{"role": "user", "content": ""}])

    async def next_call(self) -> AgentCall | None:
        """The agent's next request; None once the agent has ended."""
        assert self._running is not None
        session = self._session
        asking = asyncio.ensure_future(session.asked.get())
        try:
            await asyncio.wait((asking, self._running), return_when=asyncio.FIRST_COMPLETED)
            if not self._running.done():
                return asking.result()
        finally:
            asking.cancel()
        if await session.has_lost():
            what = "an answer of the model did not reach the agent, which did not ask again"
            raise EnvironmentFault("lost_call", what)
        if not session.was_refused:
            self._running.result()
        return None

    def answer_call(self, number: int, turn: ChatMessage, usage: Usage) -> None:
        turn = dict(turn)
        if turn["content"] is not None:
            # The gate writes lone surrogates, which no API can send.
            turn["content"] = turn["content"].encode(errors="replace").decode()
        self._session.answer(number, turn, usage)

    def refuse_call(self, number: int, code: str, what: str) -> None:
        """Answer a request with an error of the caller's."""
        self._session.fail(number, ApiError(400, code, what, "messages"))

    @property
    def is_at_limit(self) -> bool:
        """Whether a request was refused because the rollout is at a limit."""
        return self._session.limit is not None

    async def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> Any:
        """What `run` returns. If the conversation is at a limit, the agent learns it as from any
        model's API; one that ends with an exception then has reward 0.
        """
        session = self._session
        assert self._running is not None
        what = "the conversation is longer than the model's context"
        error = ApiError(400, "context_length_exceeded", what, "messages")
        if self._turns >= self._agent.max_calls:
            error = _at_most(self._agent.max_calls)
        error = session.limit or error
        session.refuse(error)
        try:
            return await asyncio.shield(self._running)
        except EnvironmentFault as fault:
            if not session.was_refused:
                raise
            return RewardResult(0.0, success=False, reason=f"{error}, and {fault.what}")

    def score_group(self, example: TaskExample, episodes: Sequence[EnvironmentEpisode]) -> Any:
        return self._agent.score_group(example, episodes)

    async def close_episode(self) -> None:
        """End the agent. A thread cannot be ended: this call then lasts until the host gives it up,
        and starts another process for the episodes to come.
        """
        session = self._session
        self._endpoint.sessions.pop(session.key, None)
        session.refuse(ApiError(401, "invalid_api_key", "this rollout has ended"))
        running = self._running
        if running is None:
            return
        if inspect.iscoroutinefunction(self._agent.run):
            running.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # read, so that asyncio does not report it
        await self._begin(self._agent.close_episode)

    def _begin(self, method: Callable[..., Any], *args: Any) -> asyncio.Task[Any]:
        """Call a method of the agent, in a task of its own: `call` knows one method of each."""
        return asyncio.create_task(self._call(method, *args))


# -- messages that are the same --------------------------------------------------------------------


def _essence(message: ChatMessage) -> Any:
    """What makes two messages the same. Clients strip answers and write arguments anew."""
    text = message["content"] or ""
    if message["role"] != "assistant":
        return message["role"], text
    return text.strip(), [_call_essence(call["function"]) for call in message.get("tool_calls", ())]


def _call_essence(function: Json) -> tuple[str, Any]:
    arguments = function["arguments"]
    with suppress(ValueError):
        arguments = json.loads(arguments)
    return function["name"], arguments


# -- HTTP ------------------------------------------------------------------------------------------


class Endpoint:
    """The server. `sessions` are those of open episodes by their keys."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises OSError if this process may not listen."""
        self.sessions: dict[str, Session] = {}
        self.loop = loop
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128
    endpoint: Endpoint

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._serve(self._models)

    def do_POST(self) -> None:
        self._serve(self._ask)

    @property
    def _place(self) -> str:
        """The path below /v1. Clients add /v1 to a base_url that has it already."""
        path = self.path.partition("?")[0]
        while path.startswith("/v1/"):
            path = path.removeprefix("/v1")
        return path

    def _serve(self, serve: Callable[[bytes], None]) -> None:
        # An agent that forgets its clients would keep a thread for each of their connections.
        self.close_connection = True
        try:
            serve(self._body())
        except OSError:
            raise  # the client went away
        except Exception as raised:
            error = ApiError(500, "server_error", f"this request broke the server: {raised!r:.200}")
            if isinstance(raised, ApiError):
                error = raised
            else:
                traceback.print_exc()
            place = self._place.removesuffix(COUNT_TOKENS)
            dialect = DIALECTS.get(place, DIALECTS["/chat/completions"])
            self._send(error.status, dialect.error(error), may_retry=error.may_retry)

    def _models(self, body: bytes) -> None:
        self._session()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "flash-mcp"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        if self._place == "/models":
            self._send(200, {"object": "list", "data": [model], "has_more": False})
        elif self._place == f"/models/{MODEL}":
            self._send(200, model)
        else:
            raise self._unknown()

    def _ask(self, body: bytes) -> None:
        session = self._session()
        place = self._place.removesuffix(COUNT_TOKENS)
        dialect = DIALECTS.get(place)
        if dialect is None:
            raise self._unknown()
        try:
            request: Any = json.loads(body, parse_float=finite_float, parse_constant=finite_float)
        except (ValueError, RecursionError) as error:
            raise invalid("the body is not JSON") from error
        parsed = dialect.read(as_object(request), session.kept)
        if place != self._place:
            self._send(200, count_tokens(parsed))
            return
        is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"
        answer = self._answer(session, parsed, is_retry=is_retry)
        is_instructed = bool(parsed.body.get("instructions"))
        session.kept[parsed.identity] = [
            *parsed.messages[is_instructed:],
            answer.turn,
        ]
        if parsed.streams:
            self._stream(dialect.events(answer, parsed), dialect.ends_with)
        else:
            self._send(200, dialect.whole(answer, parsed))

    def _answer(self, session: Session, request: Asked, *, is_retry: bool) -> Answer:
        """The model's answer. If the client leaves before it comes, it may ask for it again."""
        loop = self.server.endpoint.loop
        asking = _Asking()
        loop.call_soon_threadsafe(session.asking.add, asking)
        try:
            answers = session.ask(request.messages, request.tools, is_retry=is_retry)
            asking.answer = asyncio.run_coroutine_threadsafe(answers, loop)
            answer = self._awaited(asking.answer)
            if self._has_left():
                loop.call_soon_threadsafe(session.lose, answer.call)
            return answer
        finally:
            loop.call_soon_threadsafe(session.asking.discard, asking)

    def _awaited(self, future: Future[Answer]) -> Answer:
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:
                if self._has_left():
                    future.cancel()
            except CancelledError as error:
                raise ApiError(401, "invalid_api_key", "this rollout has ended") from error

    def _has_left(self) -> bool:
        """Whether the client closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _session(self) -> Session:
        key_header = self.headers.get("Authorization") or self.headers.get("x-api-key", "")
        key = key_header.removeprefix("Bearer ").strip()
        session = self.server.endpoint.sessions.get(key)
        if session is None:
            raise ApiError(401, "invalid_api_key", "incorrect API key, or its rollout has ended")
        return session

    def _unknown(self) -> ApiError:
        what = f"there is no {self.command} {self.path[:80]}; POST goes to {', '.join(DIALECTS)}"
        return ApiError(404, "unknown_url", what)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            raise ApiError(411, "length_required", "send the body with a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self._discard(min(int(length), MOST_DISCARDED_BYTES))
            what = f"the request has {length:.20} bytes; the most are {MAX_BODY_BYTES:,}"
            raise ApiError(413, "request_too_large", what)
        return self.rfile.read(int(length))

    def _discard(self, size: int) -> None:
        """Read so much: many clients read no answer before they have sent everything."""
        while size > 0 and (read := self.rfile.read(min(size, 1 << 16))):
            size -= len(read)

    def _send(self, status: int, body: Json, *, may_retry: bool = False) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("x-should-retry", str(may_retry).lower())
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, events: Iterator[Event], ends_with: str | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for name, data in events:
            named = f"event: {name}\n" if name else ""
            self._chunk(f"{named}data: {json.dumps(data)}\n\n")
        if ends_with:
            self._chunk(f"data: {ends_with}\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        event = text.encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what user code prints goes to the log."""
