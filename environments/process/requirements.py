"""An environment's own packages: one virtual environment for each set of requirements.

    python = await interpreter(folder, timeout_s=15)   # sys.executable if it requires nothing

FLASH_HOME/interpreters/DIGEST/ holds one. The digest covers the requirements and this Python. An
installer is a process, `python -m environments.process.requirements TARGET`, that holds a file
lock: if two processes want the same packages, one installs them and the other waits. The file
`ready` is written last and holds the installed versions. An installer goes on after its caller
timed out or died, so a later call finds more done.

A package's build runs its authors' code, so the installer runs in the sandbox
(environments.process.sandbox). It writes only to DIGEST/venv and DIGEST/tmp, which also holds its
cache; it reads installed programs and the settings of uv and pip; it has network. The server reads
and writes the other files in DIGEST, so a build must not be able to place a link there.

This module uses only the standard library and uv (without uv: venv and pip).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from environments.process import kernel, sandbox, warden
from environments.process.faults import EnvironmentFault
from environments.process.locks import lock as wait_for_lock
from environments.process.locks import try_lock
from environments.settings import load_settings, state_directory

FILE = "requirements.txt"
INSTALL_TIMEOUT_S = 3600.0
"""For one command of an installer. A worker waits for it, however long it takes."""
POLL_S = 0.1
PROGRESS_EVERY_S = 1.0
EVIDENCE_BYTES = 1200
REFERENCE = re.compile(r"-[rce]\b|--(requirement|constraint|editable)\b|\.{0,2}/|file:|.*@\s*file:")
"""Lines that refer to other files. The digest would not cover those."""
SDK = "freesolo"
SDK_REQUIREMENT = "freesolo>=0.4,<0.5"
SDK_IMPORT = re.compile(rb"^\s*(from|import)\s+freesolo\b", re.MULTILINE)
PASSED_ON = re.compile(r"PATH|LANG|USER|(UV|PIP|SSL|LC)_.+|.+_PROXY|.*_CA_BUNDLE", re.IGNORECASE)
"""Environment variables that an installer gets. A package's build must not get the secrets."""
SETTINGS = ("/etc/pip.conf", "/etc/uv")

Listener = Callable[[str], Awaitable[None]]
_installers: dict[Path, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
"""Installers that this process started, by target. A second call joins one instead of starting
another.
"""


def interpreters_dir() -> Path:
    """Holds a folder DIGEST for every installed set of requirements."""
    return state_directory() / "interpreters"


def of_folder(folder: Path) -> list[str]:
    """The sorted requirements of a folder: the lines of its requirements.txt, and the freesolo SDK
    if its code was written for that.

    A line that ends with a backslash continues on the next line. Raises
    EnvironmentFault(requirements_failed) for a line that refers to other files."""
    path = folder / FILE
    text = path.read_text(errors="replace") if path.is_file() else ""
    text = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    wanted: set[str] = set()
    for found in re.finditer(r"(.*\\\n)*.*", text):
        line = found[0].replace("\\\n", "").strip()
        if REFERENCE.match(line):
            number = text.count("\n", 0, found.start()) + 1
            what = f"{FILE} line {number}: {line!r:.100} refers to other files"
            raise EnvironmentFault("requirements_failed", f"{what}; name packages and versions")
        if line:
            wanted.add(line)
    if _needs_sdk(folder, wanted):
        wanted.add(SDK_REQUIREMENT)
    return sorted(wanted)


def _needs_sdk(folder: Path, wanted: set[str]) -> bool:
    """Whether the folder's code imports the SDK, which neither its requirements nor this
    interpreter have.
    """
    if any(re.match(rf"{SDK}\b", text) for text in wanted):
        return False
    if not wanted and importlib.util.find_spec(SDK) is not None:
        return False
    return any(SDK_IMPORT.search(path.read_bytes()) for path in folder.rglob("*.py"))


async def interpreter(
    folder: Path, *, timeout_s: float | None = None, on_progress: Listener | None = None
) -> Path:
    """The Python that has what the folder requires. Installs it first if necessary.

    `on_progress` gets the installer's last line, at most once a second. Raises EnvironmentFault:
    requirements_failed with the end of the resolver's output, or not_ready after `timeout_s` (the
    installer goes on)."""
    wanted = of_folder(folder)
    if not wanted:
        return Path(sys.executable)
    target = interpreters_dir() / _digest(wanted)
    if not (target / "ready").is_file():
        packages = f"its packages ({', '.join(wanted):.200})"
        try:
            process, log = _installers.get(target) or _start(target, wanted)
        except OSError as error:
            what = f"cannot install into {target}: {error}"
            raise EnvironmentFault("requirements_failed", what) from error
        _installers[target] = process, log
        if not await _ended(process, log, timeout_s, on_progress):
            what = f"{packages} are still being installed: {_last_line(log)}"
            raise EnvironmentFault("not_ready", what)
        _installers.pop(target, None)
        if process.returncode:
            what = f"{packages} could not be installed:\n{_tail(log).strip()}"
            raise EnvironmentFault("requirements_failed", what)
    return _python(target)


def contract_path(python: Path) -> Path:
    """The folder from which `python` imports this package and nothing else."""
    package = Path(__file__).parents[1]
    if python == Path(sys.executable):
        return package.parent
    digest = hashlib.sha256(str(package).encode()).hexdigest()[:16]
    folder = interpreters_dir() / f"contract-{digest}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        (folder / package.name).symlink_to(package)
    return folder


def prefix(python: Path) -> tuple[str, ...]:
    """The virtual environment of `python` if it is one of ours. Another Python may be anywhere:
    two folders above ~/bin/python is the home directory.
    """
    return (str(python.parents[1]),) if python.is_relative_to(interpreters_dir()) else ()


def _digest(wanted: list[str]) -> str:
    made_for = f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
    return hashlib.sha256("\n".join([made_for, *wanted]).encode()).hexdigest()[:16]


def _python(target: Path) -> Path:
    return target / "venv" / "bin" / "python"


def _scratch(target: Path) -> Path:
    """An installer's home, temporary folder and cache, so that no build affects another one."""
    return target / "tmp"


def _config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _start(target: Path, wanted: list[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(target / FILE, "\n".join(wanted) + "\n")
    log = tempfile.TemporaryFile()  # noqa: SIM115  read until the installer ends
    process = subprocess.Popen(
        (sys.executable, "-P", "-m", "environments.process.requirements", target),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=target,
        env=_installers_environment(target),
        start_new_session=True,
    )
    weakref.finalize(process, log.close)  # once the last of those who wait for it has read its end
    return process, log


def _installers_environment(target: Path) -> dict[str, str]:
    passed_on = {name: text for name, text in os.environ.items() if PASSED_ON.fullmatch(name)}
    scratch = ("HOME", "TMPDIR", "UV_CACHE_DIR", "PIP_CACHE_DIR")
    return {
        **passed_on,
        **dict.fromkeys(scratch, str(_scratch(target))),
        "XDG_CONFIG_HOME": str(_config_dir()),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


async def _ended(
    process: subprocess.Popen[bytes],
    log: IO[bytes],
    timeout_s: float | None,
    on_progress: Listener | None,
) -> bool:
    """Wait for the installer. False if it did not end in time."""
    deadline = float("inf")
    if timeout_s is not None:
        deadline = time.monotonic() + timeout_s
    reported = ""
    next_report = 0.0
    while process.poll() is None and time.monotonic() < deadline:
        line = _last_line(log)
        if on_progress and line != reported and time.monotonic() > next_report:
            reported = line
            next_report = time.monotonic() + PROGRESS_EVERY_S
            await on_progress(f"installing the environment's packages: {line}")
        await asyncio.sleep(POLL_S)
    return process.poll() is not None


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    tail = os.pread(log.fileno(), EVIDENCE_BYTES, max(0, size - EVIDENCE_BYTES))
    return tail.decode(errors="replace")


def _last_line(log: IO[bytes]) -> str:
    for line in reversed(_tail(log).splitlines()):
        if line.strip():
            return line.strip()[:200]
    return "starting"


def _write(path: Path, text: str) -> None:
    """Write a file in one step: no reader sees half of it."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


# -- the installer ---------------------------------------------------------------------------------


def _confine(target: Path) -> None:
    """Confine this process to the sandbox of an installer. The folders that it writes to exist."""
    readable = [*SETTINGS, str(_config_dir() / "pip"), str(_config_dir() / "uv")]
    if uv := _uv():
        readable.append(uv)
    for name, value in os.environ.items():
        if re.match("UV|PIP|SSL", name) and value.startswith("/"):
            readable.append(value)
    operator = load_settings(target.parent.parent)
    bounds = sandbox.Bounds(
        folder=str(target),
        scratch=str(target),
        written=(str(target / "venv"), str(_scratch(target))),
        hidden=str(target.parent.parent),
        needs={"network": True},
        without_file_protection=operator.environments.without_file_protection,
        readable=tuple(readable),
    )
    warden.enclose(bounds)  # the warden ends the processes that a build leaves behind


def _uv() -> str | None:
    path = os.environ.get("PATH", os.defpath)
    return shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{path}")


def install(target: Path) -> str:
    """Install TARGET/requirements.txt into TARGET/venv, an empty folder. Returns the installed
    versions. Raises CalledProcessError if a command fails.
    """
    python = str(_python(target))
    wanted = str(target / FILE)
    if uv := _uv():
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(target / "venv"))
        _run(uv, "pip", "install", "--compile-bytecode", "--python", python, "-r", wanted)
        return _run(uv, "pip", "freeze", "--python", python, capture=True)
    _run(sys.executable, "-m", "venv", str(target / "venv"))
    _run(python, "-m", "pip", "install", "--disable-pip-version-check", "-r", wanted)
    return _run(python, "-m", "pip", "freeze", capture=True)


def _run(*command: str, capture: bool = False) -> str:
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, text=True, stdout=stdout)
    return done.stdout or ""


def _install_confined(target: Path, versions: IO[str], parent_pid: int) -> None:
    """Runs in a fork of the installer. The sandbox forbids opening `versions`, so it is open."""
    kernel.die_with_parent(parent_pid, by=signal.SIGTERM)
    _confine(target)
    try:
        versions.write(install(target))
        versions.flush()
    except subprocess.CalledProcessError:  # the command printed what was wrong
        raise
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise


def main() -> None:
    target = Path(sys.argv[1])
    with (target / "lock").open("a") as lock:
        if not try_lock(lock):
            sys.stderr.write("another process installs the same packages; waiting for it\n")
            wait_for_lock(lock, math.inf)
        if (target / "ready").is_file():
            return
        venv = target / "venv"
        scratch = _scratch(target)
        for folder in (venv, scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
        with (target / "versions").open("w") as versions:
            install_confined = partial(_install_confined, target, versions, os.getpid())
            is_done = kernel.works_in_a_fork(install_confined)
        if is_done:
            (target / "versions").replace(target / "ready")
        else:
            shutil.rmtree(venv, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
        (target / "versions").unlink(missing_ok=True)
        sys.exit(not is_done)


if __name__ == "__main__":
    main()
