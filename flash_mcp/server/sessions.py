"""Page sessions: what a browser holds instead of a token.

A session is random, opens the pages alone, and is worth no more than the token it was started with:
the gate looks that up again with each request. Sessions end with the server."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

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
        """End the request's session, if it has one."""
        self._sessions.pop(request.cookies.get(_cookie(request), ""), None)

    def takes_code(self, code: str) -> bool:
        """Whether this is the code of the address that `flash-mcp ui` printed. Nobody else knows
        it, so that no link signs a visitor in as somebody else.
        """
        if not self._code or not hmac.compare_digest(code.encode(), self._code.encode()):
            return False
        self._code = ""
        return True


def keep_in_cookie(session: str, request: Request, answer: Response, path: str) -> None:
    """Give the browser the session. A browser that came by https never sends it by http."""
    origin = request.headers.get("origin", "")
    answer.set_cookie(
        _cookie(request),
        session,
        httponly=True,
        samesite="strict",
        path=path,
        secure=request.url.scheme == "https" or origin.startswith("https://"),
    )


def forget_cookie(request: Request, answer: Response, path: str) -> None:
    answer.delete_cookie(_cookie(request), path)


def _cookie(request: Request) -> str:
    """Cookies go to every port of a host: two servers need two names."""
    return f"flash_session_{request.scope['server'][1]}"
