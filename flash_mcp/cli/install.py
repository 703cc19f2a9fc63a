"""Adds this server to the configuration of a coding agent, by the agent's own command where it has
one and can be found.

Else the file is edited: everything else in it stays, comments included. It is replaced atomically.
Either way a copy of the old file is kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import LOOPBACK
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Json
from flash_mcp.tools.shared import playbook

PASSED_ON = ("FLASH_HOME", "FLASH_MODELS", "FLASH_DEVICE_LOCKS")
"""Variables that the entry sets, because agents start the server with their own environment."""
TOKEN = "FLASH_TOKEN"
"""The variable with the token of a server elsewhere: the words of a command are no place for it."""
COMMAND_S = 30.0
"""Time that an agent's own command has."""


@dataclass(frozen=True)
class Installed:
    """What was, or would be, written: `text` is the new file, `backup` a copy of the old one."""

    client: str
    path: Path
    changed: bool
    text: str
    backup: Path | None = None


def install(
    client: str,
    *,
    name: str = "flash",
    write: bool = True,
    ssh: str | None = None,
    url: str | None = None,
) -> Installed:
    """Add this server, or with `ssh` or `url` that of another machine, to the configuration of one
    of CLIENTS.

    FlashError(invalid_argument) if the file cannot be read, `name` is not a server name, `ssh` is
    not a HOST or HOST:COMMAND, or `url` is not the address of a server with a token."""
    check_name(name)
    if url is not None:
        server = entry_at(url, os.environ.get(TOKEN, ""))
    else:
        server = entry() if ssh is None else entry_over_ssh(ssh)
    agent = CLIENTS[client]
    path = Path(os.path.realpath(agent.locate()))  # keeps a link, as dotfile managers make one
    old = ""
    if path.exists():
        old = path.read_text(encoding="utf-8")
    try:
        new = agent.merged(old, name, server)
    except ValueError as error:
        fix = f"correct it, or add this server by hand: {agent.merged('', name, server)}"
        what = f"the file cannot be read, and was left as it is: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error
    changed = new != old
    if not write or not changed:
        return Installed(client, path, changed, new)
    backup = None
    if path.exists():
        backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
        shutil.copy2(path, backup)
    if not _added(agent, path, name, server):
        _replace(path, new)
    return Installed(client, path, changed, path.read_text(encoding="utf-8"), backup)


def install_skill(client: str, *, write: bool = True) -> Installed:
    """Write the skill that says when to use the tools. FlashError(invalid_argument) for a client
    that takes no skills.
    """
    locate = CLIENTS[client].skills
    if locate is None:
        takes = ", ".join(name for name, agent in CLIENTS.items() if agent.skills)
        fix = f"leave --skill out; these take one: {takes}"
        raise FlashError("invalid_argument", f"{client} reads no skill files", fix=fix)
    path = locate() / "train-a-model" / "SKILL.md"
    text = playbook.skill()
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    backup = None
    if write and old not in ("", text):
        backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
        shutil.copy2(path, backup)
    if write and old != text:
        _replace(path, text)
    return Installed(client, path, old != text, text, backup)


def _added(agent: Client, path: Path, name: str, server: Json) -> bool:
    """Whether the agent's own command has put the entry there. A server of the same name is left to
    the file's editor: commands refuse it, or ask.
    """
    # A command's words can be read by every user of the machine, and a token is secret.
    if agent.command is None or "url" in server:
        return False
    words = agent.command(name, agent.shape(server))
    if shutil.which(words[0]) is None:
        return False
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=True
        )
        text = path.read_text(encoding="utf-8")
        return agent.merged(text, name, server) == text
    return False


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


def entry_over_ssh(destination: str) -> Json:
    """How an agent starts the server of another machine, HOST or USER@HOST; the command there comes
    after a colon where it is not on the PATH.
    """
    host, _, command = destination.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9_][\w.@-]*", host):
        fix = "name it as ssh does: user@box, or user@box:/path/to/.venv/bin/flash-mcp"
        raise FlashError("invalid_argument", "that is no host", ssh=destination, fix=fix)
    start = f"{shlex.quote(command or 'flash-mcp')} serve"
    # An agent has no terminal for a password, and a dead connection must end the server there.
    options = ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30"]
    return {"command": "ssh", "args": [*options, host, start]}


def entry_at(url: str, token: str) -> Json:
    """How an agent reaches a server that listens, with one of its tokens."""
    address = urlsplit(url)
    is_near = address.hostname in LOOPBACK
    if not address.hostname or address.scheme not in ("http", "https"):
        fix = "name it as https://box/mcp"
        raise FlashError("invalid_argument", "that is no address of a server", url=url, fix=fix)
    if address.scheme == "http" and not is_near:
        fix = "use https, or `ssh -L 8765:127.0.0.1:8765 user@box` and http://127.0.0.1:8765/mcp"
        what = "http shows the token to everybody on the way"
        raise FlashError("invalid_argument", what, url=url, fix=fix)
    if not re.fullmatch(r"[!-~]+", token):
        fix = "put one there: `flash-mcp token create NAME` on the server's machine makes it"
        raise FlashError("invalid_argument", f"{TOKEN} holds no token", url=url, fix=fix)
    if address.path in ("", "/"):
        url = f"{url.rstrip('/')}/mcp"
    return {"url": url, "headers": {"Authorization": f"Bearer {token}"}}


def _claude() -> Path:
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home()) / ".claude.json"


def _codex() -> Path:
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex") / "config.toml"


def _opencode() -> Path:
    folder = settings_home() / "opencode"
    commented = folder / "opencode.jsonc"
    if commented.exists():
        return commented
    return folder / "opencode.json"


def _vscode() -> Path:
    folder = settings_home()
    if sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    return folder / "Code" / "User" / "mcp.json"


def settings_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _as_opencode(server: Json) -> Json:
    results: Json = {"type": "local", "command": [server["command"], *server["args"]]}
    if "env" in server:
        results["environment"] = server["env"]
    return results


def _typed(kind: str) -> Callable[[Json], Json]:
    return lambda server: {"type": kind, **server}


def _renamed(server: Json, *, url: str = "url", headers: str = "headers") -> Json:
    return {url: server["url"], headers: server["headers"]}


STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
STRING_OR_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def read_json(text: str) -> Any:
    """JSON in which editors also allow comments and a comma after the last item."""
    for ignored in (STRING_OR_COMMENT, STRING_OR_LAST_COMMA):
        text = ignored.sub(lambda item: item[1] or "", text)
    if text.strip():
        return json.loads(text)
    return {}


def merge_json(old: str, key: str, name: str, server: Json) -> str:
    """`old` with `server` as KEY.NAME. ValueError if either is no object, or loses comments."""
    settings = read_json(old)
    if not isinstance(settings, dict):
        raise ValueError("it should be a JSON object")
    servers: Any = cast("Json", settings).setdefault(key, {})
    if not isinstance(servers, dict):
        raise ValueError(f"{key} should be a JSON object")
    if cast("Json", servers).get(name) == server:
        return old
    is_new = name not in servers
    servers[name] = server
    with suppress(ValueError):
        if old.strip():
            json.loads(old)
        return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    new = _inserted(old, key, name, server) if is_new else old
    if read_json(new) != settings:
        raise ValueError(f"its comments would be lost with another {key}.{name}")
    return new


def _inserted(old: str, key: str, name: str, server: Json) -> str:
    """A text with comments, with `server` as the first of the object KEY."""
    item = f"{json.dumps(name)}: {json.dumps(server)}"
    opening = re.search(rf'"{key}"\s*:\s*{{', old)
    if opening is None:
        item = f'"{key}": {{{item}}}'
        opening = re.search("{", old)
        assert opening is not None  # it holds an object
    return f"{old[: opening.end()]}\n  {item},{old[opening.end() :]}"


def merge_toml(old: str, name: str, server: Json) -> str:
    """`old` with the table mcp_servers.NAME anew, at its end. The comments of the earlier table
    stay where they were. ValueError if more would change.
    """
    before = tomllib.loads(old)
    if cast("Json", before.get("mcp_servers", {})).get(name) == server:
        return old
    header = rf"^\[mcp_servers\.{re.escape(name)}(\..*)?\][^\n]*\n"
    lines_until_the_next_table = r"(?:(?!\[).*(?:\n|\Z))*"
    earlier = re.compile(header + lines_until_the_next_table, re.MULTILINE)
    rest = earlier.sub(lambda table: _comments(table[0]), old).rstrip()
    new = (rest + "\n\n" if rest else "") + _table(f"mcp_servers.{name}", server)
    before.setdefault("mcp_servers", {})[name] = server
    if tomllib.loads(new) != before:
        raise ValueError(f"mcp_servers.{name} is written in a way that cannot be replaced safely")
    return new


TOML_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'|(#[^\n]*)")


def _comments(text: str) -> str:
    """The comments of a text in TOML, each on a line."""
    comments = [item[1] for item in TOML_STRING_OR_COMMENT.finditer(text) if item[1]]
    return "".join(f"{comment}\n" for comment in comments)


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


def _replace(path: Path, text: str) -> None:
    """Write `text` atomically, with the permissions of the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    write_private(path, text)
    path.chmod(mode)


def _by_claude(name: str, server: Json) -> list[str]:
    return ["claude", "mcp", "add-json", "--scope", "user", name, json.dumps(server)]


def _by_codex(name: str, server: Json) -> list[str]:
    start = [server["command"], *server["args"]]
    return ["codex", "mcp", "add", *_variables(server), name, "--", *start]


def _by_gemini(name: str, server: Json) -> list[str]:
    command = ["gemini", "mcp", "add", "--scope=user", *_variables(server), name]
    return [*command, server["command"], "--", *server["args"]]


def _by_vscode(name: str, server: Json) -> list[str]:
    return ["code", "--add-mcp", json.dumps({"name": name, **server})]


def _variables(server: Json) -> list[str]:
    return [f"--env={key}={value}" for key, value in server.get("env", {}).items()]


@dataclass(frozen=True)
class Client:
    """A coding agent: where its configuration is, under which key, and how an entry is written."""

    locate: Callable[[], Path]
    key: str = "mcpServers"
    shape: Callable[[Json], Json] = dict
    command: Callable[[str, Json], list[str]] | None = None
    """The agent's own command that adds a server of this name."""
    remote: Callable[[Json], Json] = dict
    """How a server is written that listens elsewhere."""
    skills: Callable[[], Path] | None = None
    """The folder of its skills, each a folder with SKILL.md."""

    def merged(self, old: str, name: str, server: Json) -> str:
        """`old` with this server. ValueError where that cannot be done safely."""
        server = self.remote(server) if "url" in server else self.shape(server)
        if self.locate().suffix == ".toml":
            return merge_toml(old, name, server)
        return merge_json(old, self.key, name, server)


CLIENTS = {
    "claude": Client(
        _claude,
        shape=_typed("stdio"),
        command=_by_claude,
        remote=_typed("http"),
        skills=lambda: (
            Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "skills"
        ),
    ),
    "cursor": Client(
        lambda: Path.home() / ".cursor" / "mcp.json",
        skills=lambda: Path.home() / ".cursor" / "skills",
    ),
    "codex": Client(
        _codex,
        "mcp_servers",
        command=_by_codex,
        remote=partial(_renamed, headers="http_headers"),
        skills=lambda: _codex().parent / "skills",
    ),
    "opencode": Client(
        _opencode,
        "mcp",
        _as_opencode,
        remote=_typed("remote"),
        skills=lambda: _opencode().parent / "skills",
    ),
    "vscode": Client(
        _vscode,
        "servers",
        _typed("stdio"),
        command=_by_vscode,
        remote=_typed("http"),
        skills=lambda: Path.home() / ".copilot" / "skills",
    ),
    "windsurf": Client(
        lambda: Path.home() / ".codeium" / "windsurf" / "mcp_config.json",
        remote=partial(_renamed, url="serverUrl"),
    ),
    "zed": Client(lambda: settings_home() / "zed" / "settings.json", "context_servers"),
    "gemini": Client(
        lambda: Path.home() / ".gemini" / "settings.json",
        command=_by_gemini,
        remote=partial(_renamed, url="httpUrl"),
        skills=lambda: Path.home() / ".gemini" / "skills",
    ),
}
