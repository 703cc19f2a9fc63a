"""Bearer tokens: made and revoked on the server's machine, shown once, kept as a hash.

A token belongs to an owner, and an owner may have several: what they made outlives a token that
expired or was lost."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict, cast

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import write_private
from flash_mcp.state.owners import LOCAL_OWNER, Access
from flash_mcp.state.store import Store
from flash_mcp.state.versions import NAME, NAME_RULE

PREFIX = "flash_"
"""So that scanners for leaked secrets can know one when they see it."""
USED_EVERY_S = 60.0
LOCAL_TOKEN = "http-token"
"""The file in FLASH_HOME with the token of the machine's own user. A server on loopback takes it:
without a token, every program and every user of the machine could act as this user.
"""


class Token(TypedDict):
    """What is kept of a token. Times are unix seconds; `used` is exact to a minute."""

    id: str
    owner: str
    access: Access
    secrets: list[str]
    created: float
    expires: float | None
    used: float | None
    revoked: float | None


_COLUMNS = ", ".join(Token.__annotations__)


def create(
    store: Store,
    owner: str,
    access: Access = "write",
    *,
    expires_days: float | None = None,
    secret_names: Sequence[str] = (),
) -> tuple[Token, str]:
    """A new token and its text, which cannot be shown again. FlashError(invalid_argument)."""
    if not NAME.fullmatch(owner) or owner == LOCAL_OWNER:
        fix = f"an owner is {NAME_RULE}, and not {LOCAL_OWNER!r}, which is the machine's own user"
        raise FlashError("invalid_argument", f"a token cannot be for {owner!r:.100}", fix=fix)
    if expires_days is not None and not 0 < expires_days <= 36_500:
        what = "a token lives for more than 0 and at most 36500 days"
        fix = "leave --expires-days out for a token that never expires"
        raise FlashError("invalid_argument", what, days=expires_days, fix=fix)
    text, now = PREFIX + secrets.token_urlsafe(32), time.time()
    token = Token(
        id=f"tok-{secrets.token_hex(4)}",
        owner=owner,
        access=access,
        secrets=list(secret_names),
        created=now,
        expires=now + expires_days * 86_400 if expires_days is not None else None,
        used=None,
        revoked=None,
    )
    store.insert("tokens", {**token, "hash": digest_of(text)})
    return token, text


def list_tokens(store: Store) -> list[Token]:
    return cast("list[Token]", store.query(f"SELECT {_COLUMNS} FROM tokens ORDER BY created"))


def revoke(store: Store, reference: str) -> list[Token]:
    now = time.time()
    valid = "(id = ? OR owner = ?) AND revoked IS NULL AND (expires IS NULL OR expires > ?)"
    values = [reference, reference, now]
    with store.transaction():
        rows = store.query(f"SELECT {_COLUMNS} FROM tokens WHERE {valid}", values)
        store.execute(f"UPDATE main.tokens SET revoked = ? WHERE {valid}", [now, *values])
    if not rows:
        what = f"no valid token has the id or the owner {reference!r:.100}"
        fix = "flash-mcp token list shows ids and owners"
        raise FlashError("invalid_argument", what, fix=fix)
    return cast("list[Token]", rows)


def find(store: Store, digest: str) -> Token | None:
    now = time.time()
    # 256 random bits need no slow hash; looking the hash up tells a timer nothing about the text.
    sql = f"""SELECT {_COLUMNS} FROM tokens
              WHERE hash = ? AND revoked IS NULL AND (expires IS NULL OR expires > ?)"""
    rows = cast("list[Token]", store.query(sql, [digest, now]))
    if rows and (rows[0]["used"] or 0.0) < now - USED_EVERY_S:
        # A full disk or a locked database lets reads through, at once.
        with suppress(FlashError), store.transaction(wait_s=0):
            store.execute("UPDATE main.tokens SET used = ? WHERE id = ?", [now, rows[0]["id"]])
    return next(iter(rows), None)


def local_token(base: Path) -> str:
    """The text of LOCAL_TOKEN, a new one if there is none. FlashError(invalid_argument) if it
    cannot be read.
    """
    path = base / LOCAL_TOKEN
    try:
        with suppress(FileNotFoundError):
            text = path.read_text(errors="replace").strip()
            if text.startswith(PREFIX):
                return text
        write_private(path, f"{PREFIX}{secrets.token_urlsafe(32)}\n")
        return path.read_text().strip()
    except (PermissionError, IsADirectoryError) as error:
        what = f"the token of the machine's own user cannot be read: {error.strerror}"
        fix = f"make {path} a file of this user, or remove it: the server writes a new one"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error


def digest_of(text: str) -> str:
    """What is kept of a token's text."""
    return hashlib.sha256(text.encode()).hexdigest()
