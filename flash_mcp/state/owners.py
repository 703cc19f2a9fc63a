"""Who calls: the local owner, who sees all, or the holder of a token, who sees what is theirs.

The caller is a context variable: whatever serves requests sets it, and the store looks at it (see
`Store`), so that no tool has to think of it. Where nobody set it, on stdio, on the command line, in
the supervisor and in workers, it is the local owner."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from environments.settings import LOCAL_OWNER
from flash_mcp.protocol.errors import FlashError

Access = Literal["write", "read", "metrics"]
"""write: every tool. read: those that change nothing. metrics: GET /metrics alone, for the whole
machine.
"""


@dataclass(frozen=True)
class Limits:
    """What one owner may take of the machine over HTTP."""

    requests_per_minute: int = 240
    queued_runs: int = 20
    environment_bytes: int = 2 << 30


@dataclass(frozen=True)
class Caller:
    """On whose behalf something is done. `secrets` are the server's environment variables that
    their code may see; None for all.
    """

    owner: str
    access: Access = "write"
    secrets: frozenset[str] | None = frozenset()
    limits: Limits = Limits()
    token_id: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether this is the local owner, who sees all and may name files of this machine."""
        return self.owner == LOCAL_OWNER


LOCAL = Caller(LOCAL_OWNER, secrets=None)
NOBODY = Caller("", access="metrics")
"""Owns nothing. What a server sets beforehand, so that a request whose caller got lost sees
nothing.
"""

_caller: ContextVar[Caller] = ContextVar("caller", default=LOCAL)


def caller() -> Caller:
    """On whose behalf this code runs."""
    return _caller.get()


@contextmanager
def acting_as(who: Caller) -> Generator[None, None, None]:
    """Make `who` the caller within, in this task and the tasks and threads that it starts."""
    token = _caller.set(who)
    try:
        yield
    finally:
        _caller.reset(token)


def refuse_reader(what: str, **values: object) -> None:
    """FlashError(not_permitted) for a caller who may only read; `what` would change something."""
    if caller().access != "write":
        fix = "use a token that was made without --read-only; nothing was done"
        raise FlashError(
            "not_permitted",
            f"this token reads only, and {what} changes something",
            fix=fix,
            **values,
        )


def refuse_server_side(what: str, **values: object) -> None:
    """FlashError(local_only) for a caller who is not on this machine; `what` they asked for, in
    words.
    """
    if not caller().is_local:
        fix = (
            "send contents instead: files={path: text} of env_push, or PUT /environments/NAME for"
            " an archive"
        )
        raise FlashError(
            "local_only",
            f"{what} of the server's machine cannot be named over HTTP",
            fix=fix,
            **values,
        )
