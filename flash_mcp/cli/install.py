"""Adds this server to a coding agent by the agent's own command. Where it has none, or it cannot be
found, the entry is printed, to be added by hand."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import LOOPBACK
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Json
from flash_mcp.tools.shared import playbook

PASSED_ON = ("FLASH_HOME", "FLASH_MODELS", "FLASH_DEVICE_LOCKS")
"""Variables that the entry sets, as it does `surroundings` that hold no password: agents start the
server with their own environment."""
TOKEN = "FLASH_TOKEN"
"""The variable with the token of a server elsewhere: the words of a command are no place for it."""
COMMAND_S = 30.0
"""Time that an agent's own command has."""


@dataclass(frozen=True)
class Installed:
    client: str
    path: Path
    """The client's configuration, or the skill."""
    text: str
    """The entry as the configuration has it, or the skill."""
    done: bool
    """Whether it was written, by the client's own command or by us; else `text` is to be added."""
    backup: Path | None = None


def install(
    client: str,
    *,
    name: str = "flash",
    write: bool = True,
    ssh: str | None = None,
    url: str | None = None,
) -> Installed:
    """Add this server, or with `ssh` or `url` that of another machine, to one of CLIENTS.

    FlashError(invalid_argument) if the client's own command refuses it, `name` is not a server
    name, `ssh` is not a HOST or HOST:COMMAND, or `url` is not the address of a server with a token.
    """
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        fix = "use ASCII letters, digits, - and _"
        raise FlashError("invalid_argument", "that is no name of a server", name=name, fix=fix)
    agent = CLIENTS[client]
    if url is not None:
        shaped = agent.remote(entry_at(url, os.environ.get(TOKEN, "")))
    elif ssh is not None:
        shaped = agent.shape(entry_over_ssh(ssh))
    else:
        shaped = agent.shape(entry())
    path = agent.locate()
    if path.suffix == ".toml":
        text = _table(f"{agent.key}.{name}", shaped)
    else:
        text = json.dumps({agent.key: {name: shaped}}, indent=2, ensure_ascii=False) + "\n"
    # A command's words can be read by every user of the machine, and a token is secret.
    words: list[str] = []
    if write and agent.command and url is None:
        words = agent.command(name, shaped)
    if not words or shutil.which(words[0]) is None:
        return Installed(client, path, text, done=False)
    try:
        subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_S,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        what = f"`{shlex.join(words[:3])}` failed: {said}".strip()
        fix = f"correct that, or add this to {path} by hand: {text}"
        raise FlashError("invalid_argument", what, client=client, fix=fix) from error
    return Installed(client, path, text, done=True)


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
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, text)
    return Installed(client, path, text, write, backup)


def entry() -> Json:
    script = Path(sys.executable).with_name("flash-mcp")
    server: Json = {"command": sys.executable, "args": ["-m", "flash_mcp.cli", "serve"]}
    if script.exists():
        server = {"command": str(script), "args": ["serve"]}
    variables = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    secret = secrets_left_out()
    for name, value in surroundings.of(os.environ).items():
        if name not in secret:
            variables[name] = value
    if variables:
        server["env"] = variables
    return server


def secrets_left_out() -> list[str]:
    """Variables that an entry does not set: every program of the user may read its file."""
    own = surroundings.of(os.environ)
    return sorted(name for name, value in own.items() if surroundings.is_secret(name, value))


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
class CodingAgent:
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


CLIENTS = {
    "claude": CodingAgent(
        _claude,
        shape=_typed("stdio"),
        command=_by_claude,
        remote=_typed("http"),
        skills=lambda: (
            Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "skills"
        ),
    ),
    "cursor": CodingAgent(
        lambda: Path.home() / ".cursor" / "mcp.json",
        skills=lambda: Path.home() / ".cursor" / "skills",
    ),
    "codex": CodingAgent(
        _codex,
        "mcp_servers",
        command=_by_codex,
        remote=partial(_renamed, headers="http_headers"),
        skills=lambda: _codex().parent / "skills",
    ),
    "opencode": CodingAgent(
        lambda: settings_home() / "opencode" / "opencode.json",
        "mcp",
        _as_opencode,
        remote=_typed("remote"),
        skills=lambda: settings_home() / "opencode" / "skills",
    ),
    "vscode": CodingAgent(
        _vscode,
        "servers",
        _typed("stdio"),
        command=_by_vscode,
        remote=_typed("http"),
        skills=lambda: Path.home() / ".copilot" / "skills",
    ),
    "windsurf": CodingAgent(
        lambda: Path.home() / ".codeium" / "windsurf" / "mcp_config.json",
        remote=partial(_renamed, url="serverUrl"),
    ),
    "zed": CodingAgent(lambda: settings_home() / "zed" / "settings.json", "context_servers"),
    "gemini": CodingAgent(
        lambda: Path.home() / ".gemini" / "settings.json",
        command=_by_gemini,
        remote=partial(_renamed, url="httpUrl"),
        skills=lambda: Path.home() / ".gemini" / "skills",
    ),
}
