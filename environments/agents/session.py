"""The calls of one rollout: which request continues which, which one is sent again, and its limits.

session = Session(max_calls=8)
calls = session.ask(client, request.messages, request.tools, request.options)
answer = await calls[0].answer
client.is_sent = calls[0].is_sent = True    # the answer was written to the client
calls[0].leave(client)                      # the connection has ended
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from environments.agents.calls import ANSWER_ROLES, NO_OPTIONS, AgentCall, CallOptions, Usage
from environments.agents.dialects import ApiError, TurnToSend
from environments.base import ChatMessage, Json

MOST_AT_ONCE = 8  # requests of one session that may wait at the same time
ESTABLISHED = 1  # the state of a connection (TCP_INFO) that both ends hold open
MOST_KINDS = 20  # kinds of refusals that are told apart


Asks = tuple[list[Any], list[Json], CallOptions]
"""What makes two requests the same: the essence of each message, the tools and the options."""


class Peer:
    """The other end of a connection, as the kernel knows it: the event loop may learn later."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.streams = False
        self.is_sent = False
        """Whether it has been sent its answers."""
        self._reader = reader
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._was_reset = False

    @property
    def has_left(self) -> bool:
        if self._reader.at_eof() or self._reader.exception():
            return True
        with suppress(OSError):  # it is closed
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            return info[0] != ESTABLISHED
        return True

    @property
    def left_unread(self) -> bool:
        """Whether it left before reading all; never of a stream, whose end many do not read."""
        with suppress(OSError):
            # Reading the error clears it.
            self._was_reset |= self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return not self.streams and (self._was_reset or self._reader.exception() is not None)

    @property
    def is_waiting(self) -> bool:
        return not self.is_sent and not self.has_left

    @property
    def is_read(self) -> bool:
        return self.is_sent and not self.left_unread


@dataclass(eq=False)
class SessionCall:
    request: AgentCall
    messages: list[ChatMessage]  # all of its conversation, without the answer
    asks: Asks
    said: list[Any]
    """The essence of each message of its conversation, with the answer once there is one."""
    answer: asyncio.Future[TurnToSend]
    clients: list[Peer] = field(default_factory=list[Peer])  # those whose connections are open
    is_sent: bool = False  # whether the answer was written to a client
    is_read: bool = False  # whether a client that has ended its connection had read it

    @property
    def is_answered(self) -> bool:
        return self.answer.done() and self.answer.exception() is None

    @property
    def is_waiting(self) -> bool:
        return any(client.is_waiting for client in self.clients)

    @property
    def is_abandoned(self) -> bool:
        """Whether its clients left without the answer."""
        is_read = self.is_read or any(client.is_read for client in self.clients)
        has_failed = self.answer.done() and self.answer.exception() is not None
        return not self.is_waiting and not is_read and not has_failed

    def leave(self, client: Peer) -> None:
        self.clients.remove(client)
        self.is_read |= client.is_read


@dataclass(eq=False)
class AgentSession:
    """The calls of one rollout. Only the event loop uses it."""

    max_calls: int
    max_tokens: int | None = None
    max_seconds: float | None = None
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(24)}")

    def __post_init__(self) -> None:
        self.refusal: ApiError | None = None
        """What every further request is answered with, once the rollout is at a limit."""
        self.was_refused = False
        self.limit: ApiError | None = None
        """The limit of the rollout that a request met."""
        self.refusals: Counter[str] = Counter()
        """What the API refused or left out, by what it was."""
        self.last_refusal = ""
        """The newest of them, in words."""
        self.requests: asyncio.Queue[AgentCall] = asyncio.Queue()
        self.kept: dict[str, list[ChatMessage]] = {}
        """The conversation up to each reply of OpenAI's responses, by its id."""
        self.connections = 0
        self._started = time.monotonic()
        self._tokens = 0
        self._calls: list[SessionCall] = []

    def ask(
        self,
        client: Peer,
        messages: list[ChatMessage],
        tools: list[Json],
        options: CallOptions = NO_OPTIONS,
        *,
        choices: int = 1,
        is_retry: bool = False,
    ) -> list[SessionCall]:
        """The calls that answer a request, one for each of its `choices`. Raises ApiError.

        A request that is sent again joins the call of the first, whose clients have left. While
        they wait, an equal request is a second sample."""
        asks = [*map(_essence, messages)], tools, options
        calls: list[SessionCall] = []
        try:
            for _ in range(choices):
                call = self._sent_before(asks, calls, is_retry=is_retry)
                call = call or self._added(messages, asks)
                call.clients.append(client)
                calls.append(call)
        except ApiError:
            for call in calls:
                call.leave(client)
            raise
        return calls

    def _sent_before(
        self, asks: Asks, taken: Collection[SessionCall], *, is_retry: bool
    ) -> SessionCall | None:
        """The call that this request sends again: one whose clients left without an answer, or, if
        the client says that it tries again, the last one that was answered.
        """
        same = [call for call in self._calls if call not in taken and call.asks == asks]
        for call in same:
            if call.is_abandoned:
                return call
        answered = [call for call in same if call.is_answered and not call.is_waiting]
        return answered[-1] if is_retry and answered else None

    def _added(self, messages: list[ChatMessage], asks: Asks) -> SessionCall:
        if self.refusal is None:
            self.limit = self._limit()
        if error := self.refusal or self.limit:
            self.was_refused = True
            raise error
        if sum(not call.answer.done() for call in self._calls) >= MOST_AT_ONCE:
            what = f"{MOST_AT_ONCE} requests of this run wait already; send this one again later"
            raise ApiError(429, "rate_limit_exceeded", what, may_retry=True)
        essences, tools, options = asks
        parent = self._parent_of(messages, essences, tools)
        start = len(parent.said) if parent else 0
        number = parent.request.number if parent else None
        request = AgentCall(len(self._calls), number, messages[start:], tools, options)
        answer = asyncio.get_running_loop().create_future()
        call = SessionCall(request, messages, asks, essences, answer)
        self._calls.append(call)
        self.requests.put_nowait(request)
        return call

    def _limit(self) -> ApiError | None:
        seconds = time.monotonic() - self._started
        if len(self._calls) >= self.max_calls:
            return at_most(self.max_calls)
        if self.max_tokens is not None and self._tokens >= self.max_tokens:
            what = f"the model has written the {self.max_tokens} tokens of this run"
            return ApiError(429, "insufficient_quota", what)
        if self.max_seconds is not None and seconds >= self.max_seconds:
            what = f"the {self.max_seconds:g} seconds of this run are over"
            return ApiError(429, "rate_limit_exceeded", what)
        return None

    def _parent_of(
        self, messages: list[ChatMessage], essences: list[Any], tools: list[Json]
    ) -> SessionCall | None:
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
        call = self._calls[number]
        if call.answer.done():
            return
        essence = _essence(turn)
        if usage.stopped_by is not None:
            # The model also wrote the stop sequence, which no client sends back: what follows is
            # rendered anew from the client's messages, as another server would do it.
            essence = (essence, usage.stopped_by)
        call.said = [*call.said, essence]
        self._tokens += usage.completion_tokens
        call.answer.set_result(TurnToSend(turn, usage))

    def fail(self, number: int, error: ApiError) -> None:
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

    def messages(self, number: int) -> list[ChatMessage]:
        return self._calls[number].messages

    def count_refusal(self, what: str) -> None:
        if what in self.refusals or len(self.refusals) < MOST_KINDS:
            self.refusals[what] += 1

    @property
    def oldest_unanswered(self) -> int:
        return next(call.request.number for call in self._calls if not call.answer.done())

    @property
    def has_lost(self) -> bool:
        """Whether an answer was written to no client, and its request was not repeated."""
        return any(map(self._is_lost, self._calls))

    def _is_lost(self, call: SessionCall) -> bool:
        if not call.is_answered or call.is_sent or call.is_waiting:
            return False
        # An equal request that came while this one's client lived has an answer of its own.
        later = self._calls[call.request.number + 1 :]
        return not any(other.is_sent and other.asks == call.asks for other in later)


def at_most(calls: int) -> ApiError:
    return ApiError(429, "rate_limit_exceeded", f"this run may ask the model {calls} times")


# -- messages that are the same --------------------------------------------------------------------


def _essence(message: ChatMessage) -> Any:
    """What makes two messages the same. Clients strip answers and write arguments anew."""
    text = message["content"] or ""
    if message["role"] != "assistant":
        return message["role"], text
    calls: list[tuple[str, Any]] = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        with suppress(ValueError):
            arguments = json.loads(arguments)
        calls.append((call["function"]["name"], arguments))
    return text.strip(), calls
