"""The live pages below /ui, for a browser: what `status`, `rollouts`, `catalog` and `chat` show.

A browser signs in with a token; a cookie holds a session then. The buttons of a run's page call the
tools, for tokens that may write. A page is told by server-sent events that something changed, and
loads itself anew."""

from __future__ import annotations

import functools
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import parse_qs, urlencode

import anyio
from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from flash_mcp.extensions.pages import live
from flash_mcp.extensions.pages.report import html
from flash_mcp.protocol import extensions
from flash_mcp.protocol.errors import FlashError, as_flash_error
from flash_mcp.protocol.extensions import ExportKind
from flash_mcp.protocol.records import RunState
from flash_mcp.server.uploads import status_and_headers
from flash_mcp.state.owners import caller, refuse_reader
from flash_mcp.state.queue import Label, label
from flash_mcp.state.runs import RunKind, RunOrder
from flash_mcp.state.schema import RolloutOrder
from flash_mcp.state.store import open_store
from flash_mcp.tools.checkpoints import cancel, checkpoints
from flash_mcp.tools.deploy import chat, deploy, undeploy
from flash_mcp.tools.train import train

PATH = "/ui"
EVENTS = f"{PATH}/events"
SIGN_IN = f"{PATH}/sign-in"
SIGN_OUT = f"{PATH}/sign-out"
LOOK_S = 1.0
"""Seconds between two looks for changes."""
KEEP_ALIVE_S = 15.0
BOTH = ["GET", "POST"]
MAX_FORM_BYTES = 64 << 10
HEADERS = {"cache-control": "no-store", "x-frame-options": "DENY", "referrer-policy": "same-origin"}
"""With no-referrer, Chromium sends `Origin: null` with a form, which the gate refuses."""

Page = Callable[[Request], str]
SignIn = Callable[[str | None, str], str]
"""Starts a page session by a token's text, or by a code; FlashError(unauthenticated)."""


def routes() -> list[Route]:
    """Every page. Those that read files of the store run on a thread."""
    pages: dict[str, Page] = {
        "": _overview,
        "/together": lambda request: live.together(
            open_store(), EVENTS, request.query_params.getlist("run")
        ),
        "/datasets/{reference}": lambda request: live.dataset(request.path_params["reference"]),
        "/certificates/{reference}": lambda request: extensions.find(
            "flash_mcp.versions", "certificate"
        ).kept_page(open_store(), request.path_params["reference"]),
        "/runs/{run_id}": _run,
        "/runs/{run_id}/rollouts": _transcripts,
        "/runs/{run_id}/changes": _changes,
    }
    results = [Route(f"{PATH}{path}", _served(page)) for path, page in pages.items()]
    return [
        *(Route(path, _to_overview) for path in ("/", f"{PATH}/")),
        *results,
        *(Route(f"{PATH}/runs/{{run_id}}/{name}", act, methods=BOTH) for name in ACTIONS),
        Route(EVENTS, events),
        Route(SIGN_IN, _to_overview, methods=BOTH),
        Route(SIGN_OUT, sign_out, methods=["POST"]),
        Route(f"{PATH}/chat/{{deployment}}", talk, methods=BOTH),
        Route(f"{PATH}/{{rest:path}}", _served(_unknown)),
    ]


def is_page(path: str) -> bool:
    """Whether a browser shows what this path answers."""
    return path in ("/", PATH) or path.startswith(f"{PATH}/")


def _served(page: Page) -> Callable[[Request], Any]:
    async def serve(request: Request) -> Response:
        url = request.url
        run_id = request.path_params.get("run_id")
        try:
            text = await _pages(request).page(
                f"{url.path}?{url.query}", run_id, lambda: page(request)
            )
        except Exception as error:
            return _refusal(request, error)
        return HTMLResponse(text, headers=HEADERS)

    return serve


def _refusal(request: Request, error: Exception) -> Response:
    problem = as_flash_error(request.url.path, error)
    status, headers = status_and_headers(problem)
    return HTMLResponse(live.problem(problem), status, headers=HEADERS | headers)


async def refused(request: Request, error: FlashError, start: SignIn) -> Response:
    if error.code != "unauthenticated":
        return _refusal(request, error)
    if request.url.path == "/":  # the cookie is not sent there
        return await _to_overview(request)
    return await sign_in(request, start)


def _unknown(request: Request) -> str:
    what = f"there is no page {request.url.path}"
    raise FlashError("unknown_page", what, fix=f"{PATH} leads to all pages")


def _events_of(run_id: str) -> str:
    return f"{EVENTS}?{urlencode({'run': run_id})}"


def _overview(request: Request) -> str:
    query = request.query_params
    listing = live.Listing(
        kind=_chosen(query.get("kind"), get_args(RunKind), "trainings"),
        state=_chosen(query.get("state"), get_args(RunState), None),
        contains=query.get("contains", "")[:200],
        order=_chosen(query.get("order"), get_args(RunOrder), "newest"),
        page=_number(query.get("page", "")) or 0,
    )
    return live.overview(open_store(), EVENTS, listing)


def _run(request: Request) -> str:
    run_id = request.path_params["run_id"]
    return html(open_store(), run_id, _events_of(run_id))


def _transcripts(request: Request) -> str:
    query = request.query_params
    wish = query.get("order", "worst")
    order = _chosen(wish, get_args(RolloutOrder), None)
    if order is None:
        raise FlashError("invalid_argument", "there is no such order", order=wish, fix="use worst")
    choice = live.Selection(
        split="eval" if query.get("split") == "eval" else "train",
        step=_number(query.get("step", "")),
        order=order,
        contains=query.get("contains", "")[:200],
        page=_number(query.get("page", "")) or 0,
    )
    return live.transcripts(open_store(), request.path_params["run_id"], choice)


def _changes(request: Request) -> str:
    page = _number(request.query_params.get("page", "")) or 0
    run_id = request.path_params["run_id"]
    return live.changes(open_store(), _events_of(run_id), run_id, page)


def _chosen(text: str | None, values: Sequence[Any], default: Any) -> Any:
    return text if text in values else default


def _number(text: str) -> int | None:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return None


# -- events ----------------------------------------------------------------------------------------


async def events(request: Request) -> Response:
    """A message whenever something changed: about one run, or about anything."""
    run_id = request.query_params.get("run")
    changes = _changes_of(_pages(request), run_id)
    return StreamingResponse(changes, media_type="text/event-stream", headers=HEADERS)


async def _changes_of(pages: SharedPages, run_id: str | None) -> AsyncIterator[str]:
    seen = await pages.mark(run_id)
    silent_s = 0.0
    yield ": connected\n\n"
    while True:
        await anyio.sleep(LOOK_S)
        silent_s += LOOK_S
        mark = await pages.mark(run_id)
        if mark != seen:
            yield "data: changed\n\n"
            seen = mark
            silent_s = 0.0
        elif silent_s >= KEEP_ALIVE_S:
            yield ": nothing new\n\n"
            silent_s = 0.0


def _pages(request: Request) -> SharedPages:
    return request.app.state.pages


# -- what the buttons of a run do ------------------------------------------------------------------

Form = dict[str, str]


async def act(request: Request) -> Response:
    """Do what a button of a run's page says; that page again, with what came of it."""
    run_id = request.path_params["run_id"]
    name = request.url.path.rpartition("/")[2]
    if request.method == "GET":  # the page loads itself anew
        return RedirectResponse(f"{PATH}/runs/{run_id}", 303)
    try:
        refuse_reader(f"the button {name!r}")
        notice = await ACTIONS[name](run_id, await _form(request))
        text = await run_sync(html, open_store(), run_id, _events_of(run_id), notice)
    except Exception as error:
        return _refusal(request, error)
    return HTMLResponse(text, headers=HEADERS)


async def _stop(run_id: str, form: Form) -> str:
    result = await cancel(run_id, form.get("reason", "")[:500], wait_s=0)
    if result.state == "cancelled":
        return "The run is cancelled."
    return f"The run was asked to stop: {result.next.partition(';')[0]}."


async def _deploy(run_id: str, form: Form) -> str:
    result = await deploy(run_id, _number(form.get("step", "")), wait_s=0)
    return f"Step {result.step} is being served as {result.deployment}: {result.state}."


async def _undeploy(run_id: str, form: Form) -> str:
    result = await undeploy(form.get("deployment", ""), wait_s=0)
    return f"{result.deployment}: {result.state}."


async def _export(run_id: str, form: Form) -> str:
    kind = _chosen(form.get("kind"), get_args(ExportKind), "merged")
    result = (await checkpoints(run_id, kind, form.get("push_to") or None)).export
    assert result is not None  # it was asked for
    where = result.pushed or result.folder
    return f"The export is {result.state}: {where}."


async def _again(run_id: str, form: Form) -> str:
    run = open_store().run(run_id)
    given: dict[str, Any] = {"environment": run.environment_reference}
    for name, value in run.spec.model_dump().items():
        if name not in given and run.sources.get(name) not in ("recipe", "default"):
            given[name] = value
    kinds: dict[str, Callable[[str], float]] = {"steps": int, "learning_rate": float, "seed": int}
    for name, kind in kinds.items():
        if text := form.get(name):
            try:
                given[name] = kind(text)
            except ValueError as error:
                fix = "write it in digits"
                raise FlashError("invalid_argument", "that is no number", fix=fix) from error
    result = await train(**given)
    return f"{result.run_id} is {result.state}: the list of runs has it."


async def _note(run_id: str, form: Form) -> str:
    words = Label(form.get("name", "")[:100], form.get("note", "")[:2000])
    store = open_store()
    await run_sync(label, store, store.run(run_id), words)
    return "The note is kept."


ACTIONS: dict[str, Callable[[str, Form], Awaitable[str]]] = {
    "stop": _stop,
    "deploy": _deploy,
    "undeploy": _undeploy,
    "export": _export,
    "again": _again,
    "note": _note,
}


# -- chat ------------------------------------------------------------------------------------------


async def talk(request: Request) -> Response:
    deployment = request.path_params["deployment"]
    try:
        page = functools.partial(live.talk, open_store(), deployment)
        if request.method == "POST":
            page = await _answered(deployment, await _form(request))
        text = await run_sync(page)
    except Exception as error:
        return _refusal(request, error)
    return HTMLResponse(text, headers=HEADERS)


async def _answered(deployment: str, form: Form) -> Callable[[], str]:
    message = form.get("message", "")
    result = await chat(deployment, message, raw="raw" in form, side_by_side="both" in form)
    answers = {deployment: result.adapter.text}
    if result.base:
        answers["base model"] = result.base.text
    options = {"opening": result.opening, "raw": "raw" in form}
    return functools.partial(live.talk, open_store(), deployment, message, answers, **options)


async def _form(request: Request) -> Form:
    """The fields of a form. One that is too large, or does not arrive, counts as empty."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM_BYTES:
                return {}
    except ClientDisconnect:
        return {}
    fields = parse_qs(body.decode(errors="replace"), keep_blank_values=True)
    # Browsers end the lines of a text as Windows does.
    return {name: values[0].replace("\r\n", "\n") for name, values in fields.items()}


# -- signing in ------------------------------------------------------------------------------------


async def sign_in(request: Request, start: SignIn) -> Response:
    """The answer to a request without a valid session: a form; or a session, by what the form or
    the address that `flash-mcp ui` printed holds.
    """
    token, code = None, request.query_params.get("code", "")
    if request.url.path == SIGN_IN and request.method == "POST":
        token = (await _form(request)).get("token", "")
    if token is None and not code:
        return HTMLResponse(live.sign_in(), 401, headers=HEADERS)
    try:
        session = await run_sync(start, token, code)
    except FlashError as error:
        return HTMLResponse(live.sign_in(error.what), 401, headers=HEADERS)
    answer = RedirectResponse(PATH, 303, headers=HEADERS)
    # A browser that came by https never sends it by http.
    origin = request.headers.get("origin", "")
    answer.set_cookie(
        _cookie(request),
        session,
        httponly=True,
        samesite="strict",
        path=PATH,
        secure=request.url.scheme == "https" or origin.startswith("https://"),
    )
    return answer


async def sign_out(request: Request) -> Response:
    request.app.state.sessions.end(request)
    answer = HTMLResponse(live.sign_in(), headers=HEADERS)
    answer.delete_cookie(_cookie(request), PATH)
    return answer


async def _to_overview(request: Request) -> Response:
    return RedirectResponse(PATH, 303)


# -- page sessions: what a browser holds instead of a token ----------------------------------------
# A session is random, opens the pages alone, and is worth no more than the token it was started
# with: the gate looks that up again with each request. Sessions end with the server.

SESSION_S = 12 * 3600.0
SESSIONS_PER_TOKEN = 20
"""A further one ends the oldest."""


@dataclass(frozen=True)
class _Session:
    token_digest: str
    ends: float


class Sessions:
    def __init__(self, code: str = "") -> None:
        """`code` signs the machine's own user in, once: see `takes_code`."""
        self._sessions: dict[str, _Session] = {}
        self._code = code

    def start(self, token_digest: str) -> str:
        now = time.monotonic()
        self._sessions = {
            name: session for name, session in self._sessions.items() if session.ends > now
        }
        own: list[str] = []
        for name, session in self._sessions.items():
            if session.token_digest == token_digest:
                own.append(name)
        for oldest in own[: max(0, len(own) - SESSIONS_PER_TOKEN + 1)]:
            del self._sessions[oldest]
        name = secrets.token_urlsafe(32)
        self._sessions[name] = _Session(token_digest, now + SESSION_S)
        return name

    def token_of(self, request: Request) -> str:
        """The digest of the token of the request's session; empty without one."""
        session = self._sessions.get(request.cookies.get(_cookie(request), ""))
        if session and session.ends > time.monotonic():
            return session.token_digest
        return ""

    def end(self, request: Request) -> None:
        self._sessions.pop(request.cookies.get(_cookie(request), ""), None)

    def takes_code(self, code: str) -> bool:
        """Whether this is the code of the address that `flash-mcp ui` printed. Nobody else knows
        it, so that no link signs a visitor in as somebody else.
        """
        if not self._code or not hmac.compare_digest(code.encode(), self._code.encode()):
            return False
        self._code = ""
        return True


def _cookie(request: Request) -> str:
    """Cookies go to every port of a host: two servers need two names."""
    return f"flash_session_{request.scope['server'][1]}"


# -- pages that many browsers show at once: each is rendered once for a change and an owner --------

MARK_S = 0.5
"""Of streams. A look for changes is shared by those who ask within this time."""
PAGE_S = 15.0
"""A page is rendered anew after this time though nothing changed: it shows how long runs take."""
MOST = 256
"""Pages and marks that are kept."""


@dataclass
class _Shared:
    """A value, and the lock of who makes it."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    mark: Any = None
    value: Any = None
    made_at: float = float("-inf")


class SharedPages:
    """The pages of one server. Owners share nothing."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[str, ...], _Shared] = OrderedDict()

    async def mark(self, run_id: str | None, max_age_s: float = MARK_S) -> object:
        """What differs once something about a run changed, or about anything of the caller's."""
        requested_at = time.monotonic()
        shared = self._of("mark", run_id or "")
        async with shared.lock:
            if requested_at - shared.made_at > max_age_s:
                began = time.monotonic()
                shared.value = await run_sync(lambda: open_store().change_mark(run_id))
                shared.made_at = began
            return shared.value

    async def page(self, address: str, run_id: str | None, render: Callable[[], str]) -> bytes:
        shared = self._of("page", address)
        # No older than the request: a page has to show what was there before it was opened.
        mark = await self.mark(run_id, max_age_s=0.0)
        async with shared.lock:
            is_old = time.monotonic() - shared.made_at > PAGE_S
            if is_old or shared.mark != mark:
                # What changes meanwhile has another mark.
                text = await run_sync(render)
                shared.value = text.encode()
                shared.mark, shared.made_at = mark, time.monotonic()
            return shared.value

    def _of(self, *key: str) -> _Shared:
        # A token that only reads is shown no buttons.
        name = (caller().owner, caller().access, *key)
        shared = self._values.setdefault(name, _Shared())
        self._values.move_to_end(name)
        if len(self._values) > MOST:
            self._values.popitem(last=False)
        return shared


ROUTES = routes()
