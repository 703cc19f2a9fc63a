"""An environment's own packages: a virtual environment for each requirements.txt, installed once.

    python = await interpreter(folder, timeout_s=15)   # this very interpreter where the folder asks for no packages

FLASH_HOME/interpreters/DIGEST/ holds one; DIGEST is made from the requirements and this Python. An
installer is a process of its own, `python -m environments.process.requirements TARGET`, which holds
a file lock: of two that want the same packages one installs and the other waits for it. `ready` is
written last, and holds the versions that were installed. An installer goes on when whoever asked
for it is gone or out of time, so that asking again finds more done.

A package's build runs its authors' code, so what installs stands behind the walls of
environments.process.sandbox: it writes to DIGEST/venv and DIGEST/tmp alone, its cache too, reads
installed programs and the settings of uv and pip, and reaches the network. What lies beside them is
ours: whoever could plant a link there would have the server follow it.

Only the standard library is used here, and uv (or, where there is none, venv and pip).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from environments.process import sandbox, warden
from environments.process.faults import EnvironmentFault

FILE = "requirements.txt"
INSTALL_TIMEOUT_S = 3600.0
"""For one command of an installer; a worker waits for it, however long it takes."""
POLL_S = 0.1
TELL_EVERY_S = 1.0
EVIDENCE_BYTES = 1200
NO_REFERENCE = re.compile(
    r"-[rce]\b|--(requirement|constraint|editable)\b|\.{0,2}/|file:|.*@\s*file:"
)
"""Lines whose meaning lies in other files, which the digest would not cover."""
SDK = "freesolo"
SDK_REQUIREMENT = "freesolo>=0.4,<0.5"
SDK_IMPORT = re.compile(rb"^\s*(from|import)\s+freesolo\b", re.MULTILINE)
PASSED_ON = re.compile(r"PATH|LANG|USER|(UV|PIP|SSL|LC)_.+|.+_PROXY|.*_CA_BUNDLE", re.IGNORECASE)
"""Environment variables that an installer sees: no package's build code gets the server's secrets.
"""
SETTINGS = ("/etc/pip.conf", "/etc/uv")

Listener = Callable[[str], Awaitable[None]]
_installers: dict[Path, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
"""Installers that this process started, by target; another call joins one instead of starting a
second.
"""


def interpreters_dir() -> Path:
    """DIGEST/ of every set of requirements that was installed."""
    return (
        Path(os.environ.get("FLASH_HOME") or Path.home() / ".flash-mcp").expanduser().absolute()
        / "interpreters"
    )


def of_folder(folder: Path) -> list[str]:
    """The requirements of a folder, sorted: the lines of its requirements.txt, and the SDK that it
    was written for.

    A line that ends with a backslash goes on in the next. EnvironmentFault(requirements_failed) for
    lines that refer to other files."""
    path = folder / FILE
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    text, wanted = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in lines), set[str]()
    for found in re.finditer(r"(.*\\\n)*.*", text):
        line = found[0].replace("\\\n", "").strip()
        if NO_REFERENCE.match(line):
            number = text.count("\n", 0, found.start()) + 1
            what = f"{FILE} line {number}: {line!r:.100} refers to other files; name packages and versions"
            raise EnvironmentFault("requirements_failed", what)
        wanted |= {line} - {""}
    if _needs_sdk(folder, wanted):
        wanted.add(SDK_REQUIREMENT)
    return sorted(wanted)


def _needs_sdk(folder: Path, wanted: set[str]) -> bool:
    """Whether the folder's code imports the SDK, and neither its requirements nor this interpreter
    have it.
    """
    if any(re.match(rf"{SDK}\b", text) for text in wanted):
        return False
    if not wanted and importlib.util.find_spec(SDK) is not None:
        return False
    return any(SDK_IMPORT.search(path.read_bytes()) for path in folder.rglob("*.py"))


async def interpreter(
    folder: Path, *, timeout_s: float | None = None, on_progress: Listener | None = None
) -> Path:
    """The Python that has what the folder requires, installing it first where nobody did.

    `on_progress` is told what the installer says, at most once a second. Raises EnvironmentFault:
    requirements_failed with the end of what the resolver said, not_ready where it takes longer than
    `timeout_s` (it goes on all the same)."""
    wanted = of_folder(folder)
    if not wanted:
        return Path(sys.executable)
    target = interpreters_dir() / _digest(wanted)
    if not (target / "ready").is_file():
        try:
            process, log = _installers.get(target) or _start(target, wanted)
        except OSError as error:
            raise EnvironmentFault(
                "requirements_failed", f"cannot install into {target}: {error}"
            ) from error
        _installers[target] = process, log
        if not await _ended(process, log, timeout_s, on_progress):
            what = f"its packages ({', '.join(wanted):.200}) are still being installed: {_last_line(log)}"
            raise EnvironmentFault("not_ready", what)
        _installers.pop(target, None)
        if process.returncode:
            what = f"its packages ({', '.join(wanted):.200}) could not be installed:\n{_tail(log).strip()}"
            raise EnvironmentFault("requirements_failed", what)
    return _python(target)


def contract_path(python: Path) -> Path:
    """The folder from which `python` imports this package, and nothing else that lies beside it."""
    package = Path(__file__).parents[1]
    if python == Path(sys.executable):
        return package.parent
    folder = (
        interpreters_dir() / f"contract-{hashlib.sha256(str(package).encode()).hexdigest()[:16]}"
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        (folder / package.name).symlink_to(package)
    return folder


def prefix(python: Path) -> tuple[str, ...]:
    """The folder of what was installed for `python`. Others lie anywhere: above ~/bin/python is all
    of a home.
    """
    return (str(python.parents[1]),) if python.is_relative_to(interpreters_dir()) else ()


def _digest(wanted: list[str]) -> str:
    made_for = f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
    return hashlib.sha256("\n".join([made_for, *wanted]).encode()).hexdigest()[:16]


def _python(target: Path) -> Path:
    return target / "venv" / "bin" / "python"


def _scratch(target: Path) -> Path:
    """An installer's home, temporary folder and cache: what a build leaves in it reaches no other
    environment.
    """
    return target / "tmp"


def _config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _start(target: Path, wanted: list[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(target / FILE, "".join(f"{line}\n" for line in wanted))
    log = tempfile.TemporaryFile()  # noqa: SIM115  read until the installer ends
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "environments.process.requirements", str(target)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=target,
        env=_installers_environment(target),
        start_new_session=True,
    )
    return process, log


def _installers_environment(target: Path) -> dict[str, str]:
    scratch = str(_scratch(target))
    return {
        **{name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)},
        **dict.fromkeys(("HOME", "TMPDIR", "UV_CACHE_DIR", "PIP_CACHE_DIR"), scratch),
        "XDG_CONFIG_HOME": str(_config_dir()),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


async def _ended(
    process: subprocess.Popen[bytes],
    log: IO[bytes],
    timeout_s: float | None,
    on_progress: Listener | None,
) -> bool:
    """Wait for the installer; False where it did not end in time."""
    told, tell_at, deadline = (
        "",
        0.0,
        float("inf") if timeout_s is None else time.monotonic() + timeout_s,
    )
    while process.poll() is None and time.monotonic() < deadline:
        line = _last_line(log)
        if on_progress and line != told and time.monotonic() > tell_at:
            told, tell_at = line, time.monotonic() + TELL_EVERY_S
            await on_progress(f"installing the environment's packages: {line}")
        await asyncio.sleep(POLL_S)
    return process.poll() is not None


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), EVIDENCE_BYTES, max(0, size - EVIDENCE_BYTES)).decode(
        errors="replace"
    )


def _last_line(log: IO[bytes]) -> str:
    lines = [line.strip() for line in _tail(log).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "starting"


def _write(path: Path, text: str) -> None:
    """Write a file so that nobody sees half of it."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


# -- the installer ---------------------------------------------------------------------------------


def _confine(target: Path) -> None:
    """Put up the walls around this process; what it may write to is there."""
    named = (
        value
        for name, value in os.environ.items()
        if re.match("UV|PIP|SSL", name) and value.startswith("/")
    )
    bounds = sandbox.Bounds(
        folder=str(target),
        scratch=str(target),
        written=(str(target / "venv"), str(_scratch(target))),
        hidden=str(target.parent.parent),
        needs={"network": True},
        readable=(
            *filter(None, (_uv(), *SETTINGS)),
            *(str(_config_dir() / tool) for tool in ("pip", "uv")),
            *named,
        ),
    )
    warden.enclose(bounds)  # the warden ends what a build leaves running


def _uv() -> str | None:
    return shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    )


def install(target: Path) -> str:
    """Make TARGET/venv, an empty folder, hold TARGET/requirements.txt: the versions.
    CalledProcessError if it fails.
    """
    python, wanted = str(_python(target)), str(target / FILE)
    if uv := _uv():
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(target / "venv"))
        _run(uv, "pip", "install", "--compile-bytecode", "--python", python, "-r", wanted)
        return _run(uv, "pip", "freeze", "--python", python, capture=True)
    _run(sys.executable, "-m", "venv", str(target / "venv"))
    _run(python, "-m", "pip", "install", "--disable-pip-version-check", "-r", wanted)
    return _run(python, "-m", "pip", "freeze", capture=True)


def _run(*command: str, capture: bool = False) -> str:
    done = subprocess.run(
        command,
        check=True,
        timeout=INSTALL_TIMEOUT_S,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout or ""


def _install_confined(target: Path, versions: IO[str], parent_pid: int) -> None:
    """What a fork of the installer does; it reaches `versions` though it could not open that file."""
    sandbox.die_with_parent(parent_pid, by=signal.SIGTERM)
    _confine(target)
    try:
        versions.write(install(target))
        versions.flush()
    except subprocess.CalledProcessError:  # said what was wrong by itself
        raise
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise


def main() -> None:
    target = Path(sys.argv[1])
    with (target / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("another process installs the same packages; waiting for it\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "ready").is_file():
            return
        folders = target / "venv", _scratch(target)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
        with (target / "versions").open("w") as versions:
            is_done = sandbox.works_in_a_fork(
                partial(_install_confined, target, versions, os.getpid())
            )
        if is_done:
            (target / "versions").replace(target / "ready")
        for folder in folders[is_done:]:
            shutil.rmtree(folder, ignore_errors=True)
        (target / "versions").unlink(missing_ok=True)
        sys.exit(not is_done)


if __name__ == "__main__":
    main()
