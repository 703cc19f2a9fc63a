"""Adds this server to the configuration of a coding agent.

Everything else in the file stays, comments included. The file is replaced atomically, and a copy of
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
PASSED_ON = ("FLASH_HOME", "FLASH_MODELS", "FLASH_DEVICE_LOCKS")
"""Variables that the entry sets, because agents start the server with their own environment."""


@dataclass(frozen=True)
class Installed:
    """What was, or would be, written: `text` is the new file, `backup` a copy of the old one."""

    client: str
    path: Path
    changed: bool
    text: str
    backup: Path | None = None


def install(client: str, *, name: str = "flash", write: bool = True) -> Installed:
    """Add this server to the configuration of one of CLIENTS.

    FlashError(invalid_argument) if the file cannot be read or `name` is not a server name."""
    check_name(name)
    locate, merge = CLIENTS[client]
    path = Path(os.path.realpath(locate()))  # keeps a link to it, as dotfile managers make one
    old = path.read_text() if path.exists() else ""
    try:
        new = merge(old, name, entry())
    except ValueError as error:
        fix = f"correct it, or add this server by hand: {merge('', name, entry())}"
        what = f"the file cannot be read, and was left as it is: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error
    changed = new != old
    backup = _replace(path, new) if write and changed else None
    return Installed(client, path, changed, new, backup)


def check_name(name: str) -> None:
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        fix = "use ASCII letters, digits, - and _"
        raise FlashError("invalid_argument", "that is no name of a server", name=name, fix=fix)


def entry() -> Json:
    """How an agent starts this server: command, arguments and environment variables."""
    script = Path(sys.executable).with_name("flash-mcp")
    server: Json = {"command": sys.executable, "args": ["-m", "flash_mcp.cli", "serve"]}
    if script.exists():
        server = {"command": str(script), "args": ["serve"]}
    variables = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    if variables:
        server["env"] = variables
    return server


def _claude() -> Path:
    folder = os.environ.get("CLAUDE_CONFIG_DIR")
    return Path(folder) / ".claude.json" if folder else Path.home() / ".claude.json"


def _cursor() -> Path:
    return Path.home() / ".cursor" / "mcp.json"


def _codex() -> Path:
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex") / "config.toml"


def merge_json(old: str, name: str, server: Json) -> str:
    """`old` with `server` under mcpServers. ValueError if either is no JSON object."""
    settings: Any = json.loads(old) if old.strip() else {}
    if not isinstance(settings, dict):
        raise ValueError("it should be a JSON object")
    servers: Any = cast("Json", settings).setdefault("mcpServers", {})
    if not isinstance(servers, dict):
        raise ValueError("mcpServers should be a JSON object")
    if cast("Json", servers).get(name) == server:
        return old
    servers[name] = server
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def merge_toml(old: str, name: str, server: Json) -> str:
    """`old` with the table mcp_servers.NAME replaced, at its end. ValueError if anything else would
    change.
    """
    before = tomllib.loads(old)
    if cast("Json", before.get("mcp_servers", {})).get(name) == server:
        return old
    header = rf"^\[mcp_servers\.{re.escape(name)}(\..*)?\][^\n]*\n"
    lines_until_the_next_table = r"(?:(?!\[).*(?:\n|\Z))*"
    rest = re.sub(header + lines_until_the_next_table, "", old, flags=re.MULTILINE).rstrip()
    new = (rest + "\n\n" if rest else "") + _table(f"mcp_servers.{name}", server)
    before.setdefault("mcp_servers", {})[name] = server
    if tomllib.loads(new) != before:
        raise ValueError(f"mcp_servers.{name} is written in a way that cannot be replaced safely")
    return new


def _table(name: str, values: Json) -> str:
    """A TOML table; tables in it come after its values."""
    text = f"[{name}]\n"
    tables = ""
    for key, value in values.items():
        if isinstance(value, dict):
            tables += f"\n{_table(f'{name}.{key}', cast(Json, value))}"
        else:
            text += f"{key} = {json.dumps(value)}\n"
    return text + tables


def _replace(path: Path, text: str) -> Path | None:
    """Write `text` atomically, with the permissions of the old file; the copy of the old file."""
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
