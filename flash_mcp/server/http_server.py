"""Streamable HTTP for teams: MCP at /mcp behind tokens, uploads, health and metrics.

    serve(server, "0.0.0.0", 8765, Admission(authenticate=True))

Every request passes the `Gate` first, which checks its host, its token and its rate. It is then
handled on behalf of the token's owner (see `flash_mcp.state.owners`)."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import math
import shlex
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio
import uvicorn
from anyio.to_thread import run_sync
from mcp.server import MCPServer
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import (
    DEFAULT_MAX_REQUEST_BODY_SIZE,
    TransportSecurityMiddleware,
    TransportSecuritySettings,
)
from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from environments import doors
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import LOOPBACK, in_url
from flash_mcp.protocol.paths import home
from flash_mcp.server.connections import LimitedConfig
from flash_mcp.server.frames import CheckedPosts
from flash_mcp.server.uploads import Uploads, refusal_response
from flash_mcp.state import tokens
from flash_mcp.state.owners import (
    LOCAL,
    LOCAL_OWNER,
    NOBODY,
    Caller,
    Quotas,
    acting_as,
    caller,
    operator_settings,
)
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared import waiting

DOORS = doors.each("flash_mcp.routes")
"""Modules with ROUTES. Paths that match OWN_KEY need no token: `played` says whose run it is."""
UI: Any = DOORS.get("ui")
MCP_PATH = "/mcp"
NO_TOKEN = tokens.digest_of("")
SHOWN = ("mcp-session-id", "www-authenticate", "retry-after")
"""Headers of answers that a page of an admitted origin may read."""
PAGES = "/ui"
SHUTDOWN_S = 50
"""More than the 45 s that a call may take; calls that wait longer end when the server does."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """Whom a server admits."""

    authenticate: bool
    """Only who has a token."""
    on_loopback: bool = False
    """Whether tokens.LOCAL_TOKEN admits the machine's own user."""
    hosts: Sequence[str] = ()
    """Names by which it may be called, besides those of its address."""
    limits: Quotas = Quotas()  # noqa: RUF009  frozen
    code: str = ""
    """Of `Sessions`."""
    pages_at: str = ""
    """The only name by which pages are shown, if there is one."""
    origins: Sequence[str] = ()
    """Pages and programs that may call MCP from a browser, as their Origin header names them."""


class Gate:
    """ASGI middleware: admits requests, and makes their sender the caller, or raises FlashError."""

    def __init__(self, app: ASGIApp, admission: Admission, hosts: Sequence[str]) -> None:
        self.app = app
        self.authenticate = admission.authenticate
        self.on_loopback = admission.on_loopback
        self.limits = admission.limits
        self.settings = operator_settings(home()).server
        self.local = Caller(LOCAL_OWNER, secrets=frozenset(self.settings.secrets))
        self.origins = frozenset(admission.origins)
        self.pages_at = admission.pages_at
        self.security = TransportSecurityMiddleware(security_of(hosts, self.origins))
        self.sessions: Any = UI and UI.Sessions(admission.code)
        self.rate = Rate(self.limits.requests_per_minute)
        self.streams = Counter[str]()
        self.closing = anyio.Event()
        # Its own threads: calls that hang must not block the admission of others.
        self.threads = anyio.CapacityLimiter(4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        state = scope.setdefault("state", {})
        connection = state.get("connection")
        try:
            who = await self._admit(request)
            owner = None if who is NOBODY else who.owner
            path = request.url.path
            if door := opened_by_own_key(path):
                played = await run_sync(door.played, path, request.headers, limiter=self.threads)
                state["played"] = played
                owner = played and played[0].owner
            is_stream = self._is_stream(request)
            most = self.settings.streams_per_owner
            if is_stream and self.streams[who.owner] >= most:
                what = f"{most} streams of yours are open"
                fix = "close one; calls work without streams"
                raise FlashError("rate_limited", what, retry_after_s=5, fix=fix)
        except FlashError as error:
            if connection:
                connection.serves(None, request.client)
            answer = refusal_response(error)
            if is_page(request.url.path):
                answer = await UI.refused(request, error, self.sign_in)
            await answer(scope, receive, send)
            return
        state["caller"] = who
        if connection:
            connection.serves(owner, request.client, is_stream=is_stream)
        if who.token_id is not None:  # the SDK binds a session to it
            access = AccessToken(token="", client_id=who.token_id, scopes=[], subject=who.owner)
            scope["user"] = AuthenticatedUser(access)
        with acting_as(who):
            if not is_stream:
                await self.app(scope, receive, send)
                return
            self.streams[who.owner] += 1
            try:
                await self._until_closing(scope, receive, send)
            finally:
                self.streams[who.owner] -= 1

    def _is_stream(self, request: Request) -> bool:
        """Whether the client keeps the answer open for what will happen."""
        if request.url.path == MCP_PATH:
            listens = request.headers.get("mcp-method") == "subscriptions/listen"
            return listens or request.method == "GET"
        return UI is not None and request.url.path == UI.EVENTS

    async def _admit(self, request: Request) -> Caller:
        path = request.url.path
        # Probes have no token and may use any name. What clients look for under /.well-known before
        # they ask for a login is not there: the token comes from the server's operator.
        if path == "/healthz" or path.startswith("/.well-known/"):
            return NOBODY
        _check_origin(request, self.origins if path == MCP_PATH else ())
        if refused := await self.security.validate_request(request):
            fix = "use a known name of this server, or start it with --allow-host NAME"
            host, what = request.headers.get("host"), bytes(refused.body).decode()
            raise FlashError("host_refused", what, host=host, fix=fix)
        if is_page(path) and self.pages_at not in ("", request.url.hostname):
            what = "pages are shown at the name that `flash-mcp ui` printed, and at no other"
            fix = "open that address, whose sessions go to no other port of this machine"
            raise FlashError("host_refused", what, fix=fix)
        length = request.headers.get("content-length", "")
        limit = DEFAULT_MAX_REQUEST_BODY_SIZE
        too_large = length.isdecimal() and (len(length) > 12 or int(length) > limit)
        if too_large and not path.startswith("/environments/"):
            fix = "send large environments as a tar.gz: PUT /environments/NAME"
            what = f"the body has more than {limit:,} bytes"
            raise FlashError("too_large", what, bytes=length, fix=fix)
        authorization = request.headers.get("authorization", "")
        kind, _, text = authorization.partition(" ")
        digest = tokens.digest_of(text.strip() if kind.lower() == "bearer" else "")
        if is_page(path) and not authorization:
            # A browser sends no header of ours. Pages change nothing but by POST, whose Origin is
            # checked above, and the cookie is not sent from other sites.
            digest = self.sessions.token_of(request)
        if opened_by_own_key(path):
            return NOBODY
        if self.authenticate and digest in ("", NO_TOKEN):
            raise self._unauthenticated()
        who = await run_sync(self._caller_of, digest, limiter=self.threads)
        if wait_s := self.rate.wait_s(who):
            fix = f"try again in {wait_s} s"
            what = f"more than {self.limits.requests_per_minute} requests a minute"
            raise FlashError("rate_limited", what, retry_after_s=wait_s, fix=fix)
        if who.access == "metrics" and path != "/metrics":
            what = "this token opens /metrics only"
            raise FlashError("not_permitted", what, fix="use another token")
        return who

    def sign_in(self, token: str | None, code: str) -> str:
        """A page session, by a token or the code of `flash-mcp ui`. FlashError(unauthenticated)."""
        digest = tokens.digest_of((token or "").strip())
        if token is None and self.on_loopback and self.sessions.takes_code(code):
            with acting_as(LOCAL):
                digest = tokens.digest_of(tokens.local_token(open_store().base))
        self._caller_of(digest)
        return self.sessions.start(digest)

    def _caller_of(self, token_digest: str) -> Caller:
        if not self.authenticate:
            return self.local
        with acting_as(LOCAL):
            store = open_store()
            if self.on_loopback:
                local = tokens.digest_of(tokens.local_token(store.base))
                if hmac.compare_digest(local, token_digest):
                    return dataclasses.replace(self.local, token_id=tokens.LOCAL_TOKEN)
            token = tokens.find(store, token_digest)
        if token is None:
            raise self._unauthenticated()
        granted = frozenset(token["secrets"])
        return Caller(token["owner"], token["access"], granted, self.limits, token["id"])

    def _unauthenticated(self) -> FlashError:
        makes = "`flash-mcp token create NAME` on the server's machine makes one"
        if self.on_loopback:
            makes = f"{home() / tokens.LOCAL_TOKEN} holds that of the machine's own user"
        fix = f"send `Authorization: Bearer TOKEN`; {makes}"
        what = "there is no valid bearer token in the request"
        return FlashError("unauthenticated", what, fix=fix)

    async def _until_closing(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a stream that a client keeps open for notifications; it ends with the server."""
        unfinished = False

        async def note(message: Message) -> None:
            nonlocal unfinished
            unfinished = bool(message.get("more_body")) or message["type"] == "http.response.start"
            await send(message)

        async def end() -> None:
            await self.closing.wait()
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(end)
            await self.app(scope, receive, note)
            group.cancel_scope.cancel()
        if unfinished:
            with contextlib.suppress(Exception):
                await send({"type": "http.response.body", "body": b""})


def is_page(path: str) -> bool:
    """Whether a browser shows what this path answers."""
    return UI is not None and UI.is_page(path)


def opened_by_own_key(path: str) -> Any:
    """The module whose paths a key of their own opens, if this is one."""
    for door in DOORS.values():
        if hasattr(door, "OWN_KEY") and door.OWN_KEY.match(path):
            return door
    return None


class Rate:
    """Limits the requests per minute of each token: a bucket for one minute that fills evenly."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._buckets: dict[str | None, tuple[float, float]] = {}

    def wait_s(self, who: Caller) -> int:
        """Count a request and return 0; or, over the limit, the seconds until one is allowed."""
        if who.is_local:
            return 0
        now = time.monotonic()
        left, then = self._buckets.get(who.token_id, (self.per_minute, now))
        left = min(self.per_minute, left + (now - then) * self.per_minute / 60)
        if left < 1:
            return math.ceil((1 - left) * 60 / self.per_minute)
        self._buckets[who.token_id] = (left - 1, now)
        return 0


def _check_origin(request: Request, admitted: Collection[str]) -> None:
    """FlashError(origin_refused) for what a page of another server or port sends."""
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    try:
        is_ours = not origin or urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # it is no URL
        is_ours = False
    if not is_ours and origin not in admitted:
        what = f"a page of {origin:.200} sent this request to {host:.200}"
        fix = (
            f"start the server with --allow-origin {shlex.quote(origin or '')[:200]} if what "
            f"calls {MCP_PATH} is yours; open pages at this server's own address; a proxy has to "
            "pass on the Host header with its port"
        )
        raise FlashError("origin_refused", what, fix=fix)


def security_of(hosts: Iterable[str], more: Iterable[str] = ()) -> TransportSecuritySettings:
    """The Host and Origin headers to admit: of these names, with and without a port, and `more`
    origins.
    """
    allowed: list[str] = []
    origins = [*more]
    for name in hosts:
        allowed += (name, f"{name}:*")
    for name in allowed:
        origins += (f"http://{name}", f"https://{name}")
    return TransportSecuritySettings(allowed_hosts=allowed, allowed_origins=origins)


def names_of(host: str) -> list[str]:
    names = {*LOOPBACK, socket.gethostname(), host}
    if host in ("0.0.0.0", "::"):
        with contextlib.suppress(OSError):
            names |= {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    return sorted(map(in_url, names))


# -- other routes ----------------------------------------------------------------------------------


async def healthz(request: Request) -> Response:
    """200 if the database can be read, else 503."""
    try:
        with anyio.fail_after(5):
            await run_sync(open_store().query, "SELECT 1", abandon_on_cancel=True)
    except Exception:
        return PlainTextResponse("unavailable\n", 503)
    return PlainTextResponse("ok\n")


async def nowhere(request: Request) -> Response:
    """404 for a path that nothing serves, such as that of the older SSE transport."""
    what = f"nothing is at {request.url.path:.200}"
    return PlainTextResponse(
        f"{what}: MCP's Streamable HTTP is at {MCP_PATH}, pages at {PAGES}\n", 404
    )


async def metrics(request: Request) -> Response:
    """Counts for Prometheus: the caller's; with a metrics token, those of the whole machine."""
    with acting_as(LOCAL if caller().access == "metrics" else caller()):
        text = await run_sync(_counts)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _counts() -> str:
    store = open_store()
    lines: list[str] = []
    deployments = Counter(row.state for row in store.deployments())
    for table, counts in (("runs", store.run_counts()), ("deployments", deployments)):
        lines.append(f"# TYPE flash_{table} gauge")
        for state, count in sorted(counts.items()):
            lines.append(f'flash_{table}{{state="{state}"}} {count}')
    query = "SELECT count(*) AS versions, coalesce(sum(size_bytes), 0) AS bytes FROM environments"
    stored = store.query(query)[0]
    for name in ("versions", "bytes"):
        lines.append(f"# TYPE flash_environment_{name} gauge")
        lines.append(f"flash_environment_{name} {stored[name]}")
    return "\n".join([*lines, ""])


# -- the server ------------------------------------------------------------------------------------


def application(server: MCPServer[Any], host: str, admission: Admission) -> Gate:
    hosts = [*names_of(host), *admission.hosts]
    security = security_of(hosts, admission.origins)
    app: Starlette = server.streamable_http_app(
        streamable_http_path=MCP_PATH, transport_security=security, host=hosts[0]
    )
    app.router.routes += [
        Route("/healthz", healthz),
        Route("/metrics", metrics),
        Route("/environments/{name}", Uploads().put, methods=["PUT"]),
        *(route for door in DOORS.values() for route in door.ROUTES),
        Route("/{path:path}", nowhere, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    if UI:
        app.state.pages = UI.SharedPages()
    gate = Gate(CheckedPosts(app, MCP_PATH), admission, hosts)
    app.state.sessions = gate.sessions
    return gate


class HttpServer(uvicorn.Server):
    """uvicorn that closes open streams when it ends, and lets running calls finish."""

    def __init__(self, gate: Gate, host: str, port: int) -> None:
        self.gate = gate
        waiting.closing.clear()
        # It would cut off the streams that answer calls.
        AppStatus.disable_automatic_graceful_drain()
        app: ASGIApp = gate
        if gate.origins:  # what a browser asks before it lets a page call, which has no token
            app = CORSMiddleware(
                gate, [*gate.origins], ["GET", "POST", "DELETE"], ["*"], expose_headers=SHOWN
            )
        config = LimitedConfig(
            app,
            host,
            port,
            gate.settings,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gate.closing.set()
        waiting.closing.set()
        await super().shutdown(sockets)


def serve(server: MCPServer[Any], host: str, port: int, admission: Admission) -> None:
    """Serve until SIGTERM or SIGINT, and then for SHUTDOWN_S."""
    gate = application(server, host, admission)
    with acting_as(NOBODY if admission.authenticate else LOCAL):
        HttpServer(gate, host, port).run()
