"""Telling coding agents of this server: their own configuration, changed only where it has to be.

What is there stays, comments included; the file is replaced at once or not at all, and a copy of
the old one is kept."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError

Json = dict[str, Any]
PASSED_ON = ("FLASH_HOME", "FLASH_MODELS")
"""Variables of this environment that the server needs as well, because agents start it with their
own.
"""


@dataclass(frozen=True)
class Installed:
    """What was, or would be, written. `backup` is the copy of what was there; `text` the whole new
    file.
    """

    client: str
    path: Path
    changed: bool
    text: str
    backup: Path | None = None


def install(client: str, *, name: str = "flash", write: bool = True) -> Installed:
    """Add this server to what one of CLIENTS reads. FlashError(invalid_argument) where the file is
    not understood.
    """
    locate, merge = CLIENTS[client]
    path = Path(os.path.realpath(locate()))  # a link to it, as dotfile managers make, stays one
    old = path.read_text() if path.exists() else ""
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        fix = "use letters of ASCII, digits, - and _"
        raise FlashError("invalid_argument", "that is no name of a server", name=name, fix=fix)
    try:
        new = merge(old, name, entry())
    except ValueError as error:
        fix = f"mend it, or add this server by hand: {merge('', name, entry())}"
        what = f"the file is not understood, and was left as it is: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error
    changed = new != old
    backup = _replace(path, new) if write and changed else None
    return Installed(client, path, changed, new, backup)


def entry() -> Json:
    """How to start this server: command, arguments, and variables of the environment."""
    script = Path(sys.executable).with_name("flash-mcp")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "flash_mcp.cli"]
    variables = {
        variable: os.environ[variable] for variable in PASSED_ON if os.environ.get(variable)
    }
    return {"command": command[0], "args": [*command[1:], "serve"]} | (
        {"env": variables} if variables else {}
    )


def _claude() -> Path:
    folder = os.environ.get("CLAUDE_CONFIG_DIR")
    return Path(folder) / ".claude.json" if folder else Path.home() / ".claude.json"


def _cursor() -> Path:
    return Path.home() / ".cursor" / "mcp.json"


def _codex() -> Path:
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex") / "config.toml"


def merge_json(old: str, name: str, server: Json) -> str:
    """`old` with `server` under mcpServers. ValueError where `old` is no JSON object."""
    settings: Any = json.loads(old) if old.strip() else {}
    servers: Any = settings.setdefault("mcpServers", {}) if isinstance(settings, dict) else None  # pyright: ignore
    if not isinstance(servers, dict):
        raise ValueError("mcpServers should be an object of an object")
    if servers.get(name) == server:  # pyright: ignore[reportUnknownMemberType]
        return old
    servers[name] = server
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def merge_toml(old: str, name: str, server: Json) -> str:
    """`old` with the table mcp_servers.NAME written anew at its end. ValueError where anything else
    would change.
    """
    before = tomllib.loads(old)
    if cast("Json", before.get("mcp_servers", {})).get(name) == server:
        return old
    table = re.compile(
        rf"^\[mcp_servers\.{re.escape(name)}(\..*)?\][^\n]*\n(?:(?!\[).*(?:\n|\Z))*", re.MULTILINE
    )
    rest = table.sub("", old).rstrip()
    new = (rest + "\n\n" if rest else "") + _table(f"mcp_servers.{name}", server)
    before.setdefault("mcp_servers", {})[name] = server
    if tomllib.loads(new) != before:
        raise ValueError(f"mcp_servers.{name} stands there in a way that cannot be replaced safely")
    return new


def _table(name: str, values: Json) -> str:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    tables = {key: cast(Json, value) for key, value in values.items() if isinstance(value, dict)}
    lines = [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in plain.items())]
    return (
        "\n".join(lines)
        + "\n"
        + "".join(f"\n{_table(f'{name}.{key}', value)}" for key, value in tables.items())
    )


def _replace(path: Path, text: str) -> Path | None:
    """Write `text` there at once, readable by whom it was before; the copy of what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    part.touch(mode=0o600)
    try:
        part.write_text(text)
        backup = None
        if path.exists():
            shutil.copymode(path, part)
            backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
            shutil.copy2(path, backup)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return backup


CLIENTS: dict[str, tuple[Callable[[], Path], Callable[[str, str, Json], str]]] = {
    "claude": (_claude, merge_json),
    "cursor": (_cursor, merge_json),
    "codex": (_codex, merge_toml),
}
