"""The supervisor as a systemd user service, so that runs continue after a reboot by themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flash_mcp.cli.install import entry, settings_home
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home

LINGER = "`loginctl enable-linger` makes it start at boot, before you log in"
UNIT = """\
[Unit]
Description=flash-mcp: continues training runs and deployments
StartLimitIntervalSec=0

[Service]
ExecStart={command}
{environment}
# It exits with 0 when nothing is left to do, and with 1 while another supervisor runs.
Restart=on-failure
RestartSec=60
# Training goes on without its supervisor.
KillMode=process

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True)
class Service:
    path: Path
    changed: bool
    text: str


def install_service(name: str, *, write: bool) -> Service:
    """Write NAME-mcp.service, enable and start it. FlashError(invalid_argument) without systemd."""
    path, text = _unit(name), unit_text()
    changed = not path.exists() or path.read_text() != text
    if write:
        _check_systemd()
        if changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", path.name)
    return Service(path, changed, text)


def remove_service(name: str, *, write: bool) -> Service:
    """Stop and remove it. What the supervisor started goes on."""
    path = _unit(name)
    if not path.exists():
        return Service(path, changed=False, text="")
    text = path.read_text()
    if write:
        _check_systemd()
        _systemctl("disable", "--now", path.name)
        path.unlink()
        _systemctl("daemon-reload")
    return Service(path, changed=True, text=text)


def unit_text() -> str:
    """The unit. It names no secrets: a server or `flash-mcp wait` hands those over."""
    server = entry()
    words = [server["command"], *server["args"][:-1], "supervise"]
    variables = {**server.get("env", {}), "FLASH_HOME": str(home())}
    settings = [f"Environment={quoted(f'{name}={value}')}" for name, value in variables.items()]
    # systemd replaces variables in commands.
    command = " ".join(quoted(word).replace("$", "$$") for word in words)
    return UNIT.format(command=command, environment="\n".join(settings))


def quoted(text: str) -> str:
    r"""As systemd reads it: C escapes within quotes, and % doubled."""
    text = re.sub(r'(["\\])', r"\\\1", text).replace("%", "%%")
    return f'"{text.replace(chr(10), chr(92) + "n")}"'


def service_units() -> list[Path]:
    """The services that `install_service` wrote."""
    return sorted(_folder().glob("*-mcp.service"))


def _folder() -> Path:
    return settings_home() / "systemd" / "user"


def _unit(name: str) -> Path:
    return _folder() / f"{name}-mcp.service"


def _check_systemd() -> None:
    what = "there is no systemctl on this machine"
    if shutil.which("systemctl"):
        variables = _run("show-environment")
        if variables.returncode == 0:
            return
        what = f"systemd does not answer for this user: {variables.stderr.strip()}"
    fix = (
        "start `flash-mcp supervise` at boot in another way, such as a cron job with @reboot; "
        "--dry-run prints the unit"
    )
    raise FlashError("invalid_argument", what, client="service", fix=fix)


def _systemctl(*words: str) -> None:
    done = _run(*words)
    if done.returncode:
        what = f"systemctl --user {' '.join(words)} failed: {done.stderr.strip()}"
        fix = "correct that, and call it again"
        raise FlashError("invalid_argument", what, client="service", fix=fix)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemctl", "--user", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
