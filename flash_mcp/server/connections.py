"""Connections that send too slowly, or are too many, end: they must not stop the HTTP server.

uvicorn waits for ever for the rest of a request's headers or body, and takes connections until the
process has no file descriptor left."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from environments.settings import ServerSettings

HEADER_TIMEOUT_S = 10.0
"""For the headers of a request, from the connection's first moment or the next one's first byte."""
IDLE_TIMEOUT_S = 75
"""Between two requests: longer than clients and proxies keep a connection. A client that sends at
the moment at which the server closes gets no answer, and cannot know whether its call was made."""
BODY_TIMEOUT_S = 30.0
"""For the body of a request, and longer for one that arrives at MIN_BODY_RATE."""
MIN_BODY_RATE = 1024.0
"""Bytes a second."""
STRANGER_BODY_S = 10.0
"""For the body of a request of nobody knows whom, answered or not."""
STRANGER_BODY_BYTES = 64 << 10
WARN_EVERY_S = 60.0
"""Between two log lines of one text about bad requests."""


class FewWarnings(logging.Filter):
    """Strangers cause warnings at no cost: of each text one a minute passes, with the number of
    those that were left out since the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text, now = str(record.msg), time.monotonic()
        if now < self._passed_at.get(text, -math.inf) + WARN_EVERY_S:
            self._left_out[text] += 1
            return False
        self._passed_at[text] = now
        if count := self._left_out.pop(text, 0):
            record.msg = f"{text} ({count} more before)"
        return True


FEW_WARNINGS = FewWarnings()


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, with limits of connections."""

    def __init__(self, app: Any, host: str, port: int, limits: ServerSettings, **more: Any) -> None:
        # No web sockets: nothing here speaks them, and an upgrade would pass by the limits.
        super().__init__(
            app,
            host,
            port,
            http=LimitedProtocol,
            ws="none",
            timeout_keep_alive=IDLE_TIMEOUT_S,
            # By default uvicorn believes every program of this machine.
            proxy_headers=bool(limits.proxies),
            forwarded_allow_ips=list(limits.proxies),
            **more,
        )
        logging.getLogger("uvicorn.error").addFilter(FEW_WARNINGS)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Calls that are under way need files too.
        self.most_connections = min(limits.connections, files // 2)
        self.most_per_address = limits.connections_per_address


class LimitedProtocol(H11Protocol):
    """One connection. The client owes headers, then the body, and then nothing until the answer is
    sent and its next request begins. What it owes has a deadline.

    h11 also limits the size of headers, which uvicorn's other parser takes without end.
    """

    config: LimitedConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owed: tuple[str, object] | None = None
        self._since = 0.0
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        self.owner: str | None = None
        """Whose the last request was; None if nobody knows."""
        self._stranger: object = None
        """The cycle of a request that was found to be nobody's."""
        self.address = ""
        """The client's, as far as it is known."""
        self._is_stream = False
        self.app_state = {**self.app_state, "connection": self}

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.opened = self.loop.time()
        self.address = self.client[0] if self.client else ""
        self._make_room()
        self._expect()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._expect(len(data))
        is_body = self._owed is not None and self._owed[0] == "body"
        if is_body and self._is_strangers() and self._received > STRANGER_BODY_BYTES:
            self._end("413 Content Too Large", f"the body exceeds {STRANGER_BODY_BYTES} bytes")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def serves(
        self, owner: str | None, client: Sequence[Any] | None = None, *, is_stream: bool = False
    ) -> None:
        """The request under way is this owner's; None if nobody knows whose. `client` is its
        address and port, which for what comes through a believed proxy are not the peer's.
        """
        self.owner, self._is_stream = owner, is_stream
        self._stranger = self.cycle if owner is None else None
        if client and client[0] != self.address:
            self.address = client[0]
            self._make_room()

    def _is_strangers(self) -> bool:
        return self._stranger is not None and self._stranger is self.cycle

    def waits_for_headers(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    # -- too many ----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """At a limit, end the connection that is needed least; if all are needed, refuse this one.

        The oldest of a stranger goes first, whatever it does: many that send slowly keep out nobody
        who says at once who it is. Those of an address count only among strangers: all clients of
        a proxy may have the same.
        """
        protocols = cast("set[LimitedProtocol]", self.connections)
        others: list[LimitedProtocol] = []
        for item in protocols:
            if item is not self and not item.transport.is_closing():
                others.append(item)
        strangers = [item for item in others if item.owner is None]
        neighbours = [item for item in strangers if item.address == self.address]
        if len(neighbours) >= self.config.most_per_address:
            self._end_one([neighbours])
        elif len(others) >= self.config.most_connections and strangers:
            self._end_one([strangers])
        elif len(others) >= self.config.most_connections:
            sizes = Counter(item.owner for item in others if item.owner is not None)
            largest, size = max(sizes.items(), key=lambda entry: entry[1], default=("", 0))
            own = [item for item in others if item.owner == largest]
            # No owner's streams hold up another owner. Whose stream ends opens it again.
            streams = [item for item in own if item._is_stream] if size > 1 else []
            self._end_one([_idle(own), _idle(others), streams])

    def _end_one(self, choices: Sequence[Sequence[LimitedProtocol]]) -> None:
        """End the oldest connection of the first choice that has any; without one, this one."""
        for crowd in choices:
            if crowd:
                min(crowd, key=lambda item: item.opened).transport.abort()
                return
        self._end("503 Service Unavailable", "too many connections")

    # -- too slow ----------------------------------------------------------------------------------

    def _expect(self, came: int = 0) -> None:
        """Note what the client owes now, and start its time. `came` bytes may begin it."""
        owed = None
        if not self.transport.is_closing():
            if self.conn.their_state is h11.SEND_BODY:  # also after an answer
                owed = ("body", self.cycle)
            elif self.waits_for_headers():
                is_first = cast("RequestResponseCycle | None", self.cycle) is None
                has_begun = is_first or self.conn.trailing_data[0]
                owed = ("headers", self.cycle) if has_begun else None
        if owed == self._owed:
            return
        self._owed = owed
        self._since = self.loop.time()
        self._received = came
        self._stop_timer()
        if owed:
            body_s = min(BODY_TIMEOUT_S, STRANGER_BODY_S)
            self._start_timer(HEADER_TIMEOUT_S if owed[0] == "headers" else body_s)

    def _late(self) -> None:
        if self._owed and self._owed[0] == "body":
            allowed = BODY_TIMEOUT_S + self._received / MIN_BODY_RATE
            if self._is_strangers():
                allowed = STRANGER_BODY_S
            elif self.flow.read_paused or self.cycle.waiting_for_100_continue:
                # The server itself holds it up.
                self._start_timer(BODY_TIMEOUT_S)
                return
            left = allowed - (self.loop.time() - self._since)
            if left > 0:
                self._start_timer(left)
                return
        self._end("408 Request Timeout", "the request did not arrive in time")

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _end(self, status: str, why: str) -> None:
        """Close, with an answer unless one has begun."""
        is_between = self._owed is None or self._owed[0] == "headers"
        if is_between or not self.cycle.response_started:
            head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(why) + 1}\r\n\r\n{why}\n".encode())
        self.transport.close()


def _idle(crowd: Iterable[LimitedProtocol]) -> list[LimitedProtocol]:
    return [item for item in crowd if item.waits_for_headers()]
