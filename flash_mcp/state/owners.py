"""The caller: the local owner, who sees everything, or the holder of a token, who sees their own.

The caller is a context variable. The HTTP server sets it for each request, and the database
connections read it, so tools need not handle owners. It defaults to the local owner: on stdio, on
the command line, in the supervisor and in workers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from environments.settings import FILE, LOCAL_OWNER, Settings, load_settings
from flash_mcp.protocol.errors import FlashError

Access = Literal["write", "read", "metrics"]
"""write: every tool. read: those that change nothing. metrics: GET /metrics of the machine."""


@dataclass(frozen=True)
class Quotas:
    """What one owner may take of the machine over HTTP."""

    requests_per_minute: int = 240
    queued_runs: int = 20
    environment_bytes: int = 2 << 30
    deployments: int = 8
    """That are not over."""
    chats: int = 4
    """That wait for their answers."""


@dataclass(frozen=True)
class Caller:
    """The owner that code acts for. `secrets` are the server's environment variables that their
    environment code may read; None for all.
    """

    owner: str
    access: Access = "write"
    secrets: frozenset[str] | None = frozenset()
    limits: Quotas = Quotas()
    token_id: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether this is the local owner, who sees all and may name files of this machine."""
        return self.owner == LOCAL_OWNER


LOCAL = Caller(LOCAL_OWNER, secrets=None)
NOBODY = Caller("", access="metrics")
"""Owns nothing: the caller until the server has identified the request's own."""

_caller: ContextVar[Caller] = ContextVar("caller", default=LOCAL)


def caller() -> Caller:
    return _caller.get()


@contextmanager
def acting_as(who: Caller) -> Generator[None, None, None]:
    """Make `who` the caller in this block, and in the tasks and threads that it starts."""
    token = _caller.set(who)
    try:
        yield
    finally:
        _caller.reset(token)


def refuse_reader(what: str, **values: Any) -> None:
    """Raise FlashError(not_permitted) for a caller with read access only. `what` names the
    operation."""
    if caller().access != "write":
        what = f"this token reads only, and {what} changes something"
        fix = "use a token that was made without --read-only; nothing was done"
        raise FlashError("not_permitted", what, fix=fix, **values)


SENT_INSTEAD = (
    "send contents instead: files={path: text} of env_push, or an archive by PUT /environments/NAME"
)


def refuse_server_side(what: str, fix: str = SENT_INSTEAD, **values: Any) -> None:
    """FlashError(local_only) for a caller who is not on this machine; `what` they asked for, in
    words, and in `fix` how they get it from elsewhere.
    """
    if not caller().is_local:
        what = f"{what} of the server's machine cannot be named over HTTP"
        raise FlashError("local_only", what, fix=fix, **values)


# -- settings.toml, with an error that says who can correct it -------------------------------------


def operator_settings(base: Path) -> Settings:
    try:
        return load_settings(base)
    except ValueError as error:
        raise settings_error(base, error) from error


def settings_error(base: Path, why: Exception) -> FlashError:
    what = f"the settings of this server cannot be used: {why}"
    fix = f"the server's operator corrects {base / FILE}"
    return FlashError("invalid_argument", what, fix=fix)
