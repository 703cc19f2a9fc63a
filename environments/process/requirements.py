"""An environment's own packages: one virtual environment for each set of requirements.

    python = await interpreter(folder, timeout_s=15)   # sys.executable if it requires nothing

FLASH_HOME/interpreters/DIGEST/ holds one. The digest covers the requirements and this Python. An
installer is a process, `python -m environments.process.requirements TARGET`, that holds a file
lock: if two processes want the same packages, one installs them and the other waits. The file
`ready` is written last and holds the installed versions. An installer goes on after its caller
timed out or died, so a later call finds more done.

The installer runs in the sandbox (environments.sandbox.confinement), in up to three steps:

1. wheels are downloaded and unpacked. This runs no foreign code; only this step has the passwords
   of package indexes.
2. Packages without a wheel are built, if settings.toml allows it. A build runs its authors' code,
   with network but without any password.
3. What was installed is compiled and listed, without network.

It writes only to DIGEST/venv and DIGEST/tmp, which also holds its cache, and reads installed
programs and the settings of uv. If we are root, these two folders belong to a user that no
other process has, and the steps run as that user, who reads what root may read and writes nothing
else. The server reads and writes the other files in DIGEST, so a build must not be able to place a
link there.

Before an installation the interpreters that were not used for the longest time are removed, down to
`interpreters_gib` of settings.toml. A host holds a lock on the one that it uses."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
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
import tomllib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from environments.adapters import SDK, imports_sdk
from environments.faults import REASONING_GYM_BUILDS, EnvironmentFault
from environments.locks import lock as wait_for_lock
from environments.locks import try_lock
from environments.sandbox import kernel, namespaces, scratch, warden
from environments.sandbox.needs import PYTHON, Bounds, Needs
from environments.settings import load_settings, machine_directory, read_small, state_directory
from environments.untrusted_text import visible

FILE = "requirements.txt"
PROJECT_FILE = "pyproject.toml"
OWN_PACKAGE = "flash-mcp"
INSTALL_TIMEOUT_S = 3600.0
"""For one command of an installer. A worker waits for it, however long it takes."""
POLL_S = 0.1
PROGRESS_EVERY_S = 1.0
EVIDENCE_BYTES = 1200
REFERENCE = re.compile(r"-[rce]\b|--(requirement|constraint|editable)\b|\.{0,2}/|file:|.*@\s*file:")
"""Lines that refer to other files. The digest would not cover those."""
OPTION = re.compile(
    r"-(?!(i|f|-index-url|-extra-index-url|-find-links|-no-index|-pre|-require-hashes)\b)"
)
"""Lines with any other option. Some of them allow builds."""
VARIABLE = re.compile(r"\$\{")
"""uv would put the password of an index here, perhaps into another host's address."""
SDK_REQUIREMENT = "freesolo>=0.4,<0.5"
REASONING_GYM = ["cellpylib==2.4.0", "pycosat==0.6.6", "reasoning-gym==0.1.25", "zss==1.2.0"]
"""What `reasoning-gym:DATASET` requires. These versions are this package's choice and no
environment's, so those that have no wheel are built without the operator's leave.
"""
PASSED_ON = re.compile(r"PATH|LANG|USER|(UV|SSL|LC)_.+|.+_PROXY|.*_CA_BUNDLE", re.IGNORECASE)
"""Environment variables that an installer gets."""
UPLOADS = re.compile(r"UV_PUBLISH_.*", re.IGNORECASE)  # those that it never gets
CREDENTIAL_NAME = re.compile(
    r"user(name)?\b|password|token|keyring|client[-_]?(cert|key)|auth|credential", re.IGNORECASE
)
CREDENTIAL = re.compile(rf"://[^/\s]*@|^\s*[\w.-]*({CREDENTIAL_NAME.pattern})", re.I | re.M)
"""Text that no build may see: a password in an address, or a setting that holds one."""
WHEELS_ONLY = ("--only-binary", ":all:")

Listener = Callable[[str], Awaitable[None]]
_installers: dict[Path, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
"""Installers that this process started, by target: a second call joins the first."""


def interpreters_dir() -> Path:
    """Holds a folder DIGEST for every installed set of requirements."""
    return machine_directory() / "interpreters"


def of_folder(folder: Path) -> list[str]:
    """The sorted requirements of a folder: the lines of its requirements.txt, or without that file
    the dependencies of its pyproject.toml; and the freesolo SDK if its code was written for that.

    A line that ends with a backslash continues on the next line. Raises
    EnvironmentFault(requirements_failed) for a line that refers to other files."""
    name = FILE
    text = ""
    try:
        if (folder / FILE).exists():
            text = read_small(folder / FILE).decode(errors="replace")
        elif (folder / PROJECT_FILE).exists():
            name = PROJECT_FILE
            text = "\n".join(_dependencies(folder / PROJECT_FILE))
    except OSError as error:
        what = f"{name} cannot be read: {error}"
        raise EnvironmentFault("requirements_failed", what) from error
    text = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    requested: set[str] = set()
    for item in re.finditer(r"(.*\\\n)*.*", text):
        line = item[0].replace("\\\n", "").strip()
        trouble = ""
        if REFERENCE.match(line):
            trouble = "refers to other files"
        elif OPTION.match(line) or VARIABLE.search(line):
            trouble = "has an option or a variable that is not allowed"
        if trouble:
            number = text.count("\n", 0, item.start()) + 1
            what = f"{name} line {number}: {line!r:.100} {trouble}; name packages and versions"
            raise EnvironmentFault("requirements_failed", what, is_foreign=True)
        if line:
            requested.add(line)
    # The code imports the SDK, and neither its requirements nor this Python have it.
    has_sdk = any(re.match(rf"{SDK}\b", line) for line in requested)
    if not requested and importlib.util.find_spec(SDK) is not None:
        has_sdk = True
    if not has_sdk and imports_sdk(folder):
        requested.add(SDK_REQUIREMENT)
    return sorted(requested)


def _dependencies(project: Path) -> list[str]:
    """`dependencies` of a pyproject.toml, without this package, which every interpreter has.

    Raises OSError, and EnvironmentFault(requirements_failed) if the file is no such TOML."""
    try:
        table = tomllib.loads(read_small(project).decode()).get("project", {})
        lines = [str(line) for line in table.get("dependencies", [])]
    except (ValueError, AttributeError, TypeError) as error:
        what = f"{project.name} cannot be read: {error}"
        raise EnvironmentFault("requirements_failed", what, is_foreign=True) from error
    return [line for line in lines if _normal(_name(line)) != OWN_PACKAGE]


async def interpreter(
    folder: Path, *, timeout_s: float | None = None, on_progress: Listener | None = None
) -> Path:
    """The Python that has what the folder requires. Installs it first if necessary.

    `on_progress` gets the installer's last line, at most once a second. Raises EnvironmentFault:
    requirements_failed with the end of the resolver's output, or not_ready after `timeout_s` (the
    installer goes on)."""
    requested = of_folder(folder)
    if not requested:
        return Path(sys.executable)
    target = interpreters_dir() / _digest(requested)
    if not (target / "ready").is_file():
        packages = f"its packages ({', '.join(requested):.200})"
        try:
            process, log = _installers.get(target) or _start(target, requested)
        except OSError as error:
            what = f"cannot install into {target}: {error}"
            raise EnvironmentFault("requirements_failed", what) from error
        _installers[target] = process, log
        if not await _ended(process, log, timeout_s, on_progress):
            what = f"{packages} are still being installed: {_last_line(log)}"
            raise EnvironmentFault("not_ready", what, is_foreign=True)
        _installers.pop(target, None)
        if process.returncode:
            of_whom = os.environ.get("FLASH_VARIABLES_OF", "")  # in an attempt of a run
            used = f" with the index settings of {of_whom}" if of_whom else ""
            what = f"{packages} could not be installed{used}:\n{_tail(log).strip()}"
            raise EnvironmentFault("requirements_failed", what, is_foreign=True)
    return _python(target)


def contract_path(python: Path) -> Path:
    """The folder from which `python` imports this package and nothing else."""
    package = Path(__file__).parents[1]
    # Where the state directory lies beside the package, listing that folder would show its names.
    if python == Path(sys.executable) and not state_directory().is_relative_to(package.parent):
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


def _digest(requested: list[str]) -> str:
    made_for = f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
    return hashlib.sha256("\n".join([made_for, *requested]).encode()).hexdigest()[:16]


def _python(target: Path) -> Path:
    return target / "venv" / "bin" / "python"


def _temporary(target: Path) -> Path:
    """An installer's home, temporary folder and cache, so that no build affects another one."""
    return target / "tmp"


def _config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _start(target: Path, requested: list[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = target / f".{FILE}.{os.getpid()}"
    new.write_text("\n".join(requested) + "\n")
    new.replace(target / FILE)  # no reader sees half of it
    log = tempfile.TemporaryFile()  # noqa: SIM115  read until the installer ends
    # Not in its environment, which builds could read: only the step that runs none reads this file.
    with tempfile.TemporaryFile("w+") as credentials:
        json.dump(_variables(secret=True), credentials)
        credentials.flush()
        process = subprocess.Popen(
            (*PYTHON, "environments.process.requirements", target),
            stdin=credentials,
            stdout=log,
            stderr=log,
            cwd=target,
            env={
                **_variables(secret=False),
                **dict.fromkeys(("HOME", "TMPDIR", "UV_CACHE_DIR"), str(_temporary(target))),
                "XDG_CONFIG_HOME": str(_config_dir()),
                "FLASH_HOME": str(state_directory()),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            start_new_session=True,
        )
    weakref.finalize(process, log.close)  # once the last of those who wait for it has read its end
    return process, log


def _variables(*, secret: bool) -> dict[str, str]:
    """The settings of uv and the network that hold a password, or those that hold none."""
    results: dict[str, str] = {}
    for name, text in os.environ.items():
        if PASSED_ON.fullmatch(name) and not UPLOADS.fullmatch(name):
            is_setting = name.upper() not in ("PATH", "LANG", "USER")
            is_secret = is_setting and bool(CREDENTIAL_NAME.search(name) or CREDENTIAL.search(text))
            if is_secret == secret:
                results[name] = text
    return results


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
            await on_progress(f"installing the environment's packages: {visible(line)}")
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


# -- the installer ---------------------------------------------------------------------------------


def _confine(target: Path, *, network: bool, user: int | None) -> None:
    """Confine this process as an installer. The folders that it writes to exist, as `user`'s."""
    readable = [_uv()]
    if os.environ.get("UV_NO_CONFIG") != "1":
        readable += _settings()
    for name, value in os.environ.items():
        if re.match("UV|SSL", name) and value.startswith("/"):
            readable.append(value)
    operator = load_settings()
    bounds = Bounds(
        folder=str(target),
        scratch=str(target),
        written=(str(target / "venv"), str(_temporary(target))),
        user=user,
        hidden=str(state_directory()),
        needs=Needs(network=network),
        without_file_protection=operator.environments.without_file_protection,
        readable=tuple(readable),
    )
    warden.enclose(bounds)  # the warden ends the processes that a build leaves behind


def _settings() -> list[str]:
    """The settings files of uv, as far as they exist."""
    places = ["/etc/uv", str(_config_dir() / "uv"), os.environ.get("UV_CONFIG_FILE", "")]
    results: list[str] = []
    for place in map(Path, filter(None, places)):
        files = place.rglob("*") if place.is_dir() else (place,)
        results += [str(path) for path in files if path.is_file()]
    return results


def _hide_credentials() -> None:
    """Leave uv without the settings files if any of them holds a password."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for path in _settings():
        with suppress(OSError):
            if CREDENTIAL.search(Path(path).read_text(errors="replace")):
                os.environ.pop("UV_CONFIG_FILE", None)
                os.environ["UV_NO_CONFIG"] = "1"
                return


def _uv() -> str:
    path = os.environ.get("PATH", os.defpath)
    return shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{path}") or "uv"


def install_wheels(target: Path, lines: str) -> None:
    """Install the requirements in the file `lines` into TARGET/venv, made anew. Runs no code of
    packages: a virtual environment's Python does so as soon as it starts (.pth files).

    Raises CalledProcessError if a command fails, as the other two steps do."""
    for left in (target / "venv").iterdir():
        if left.is_dir() and not left.is_symlink():
            scratch.remove(left)
        else:
            left.unlink()
    _run(_uv(), "venv", "--quiet", "--python", sys.executable, str(target / "venv"))
    _install(target, lines, *WHEELS_ONLY)


def build(target: Path, names: Sequence[str]) -> None:
    """Install what the wheels left out; the packages with these names are built from source."""
    options = []
    if "*" not in names:
        options = [*WHEELS_ONLY, *(f"--no-binary={name}" for name in names)]
    _install(target, str(target / FILE), *options)


def _install(target: Path, lines: str, *options: str) -> None:
    python = str(_python(target))
    _run(_uv(), "pip", "install", "--python", python, *options, "-r", lines)


def finish(target: Path) -> str:
    """Compile what was installed. Returns the installed versions."""
    compile_all = (sys.executable, "-I", "-m", "compileall", "-q", "-j", "0")
    # A package may hold files for another Python, which do not compile.
    subprocess.run((*compile_all, str(target / "venv" / "lib")), stdout=subprocess.DEVNULL)
    return _run(_uv(), "pip", "freeze", "--python", str(_python(target)), capture=True)


def _run(*command: str, capture: bool = False) -> str:
    stdout = subprocess.PIPE if capture else None
    # uv reads the pyproject.toml of every folder above its own, and the sandbox refuses that.
    done = subprocess.run(
        command, check=True, timeout=INSTALL_TIMEOUT_S, text=True, stdout=stdout, cwd="/"
    )
    return done.stdout or ""


def _steps(target: Path, versions: IO[str]) -> bool:
    """Whether all steps succeeded. The sandbox forbids opening `versions`, so it is open."""
    user = None
    with suppress(OSError):
        if os.getuid() == 0:  # a user that no process has, with the folders that steps write to
            unused = namespaces.exclusive_uid()
            for folder in (target / "venv", _temporary(target)):
                os.chown(folder, unused, unused)
            user = unused  # only now: where the folders cannot be its own, it could write nothing
    installer = os.getpid()

    def done(step: Callable[[], object], *, with_passwords: bool, network: bool = True) -> bool:
        def in_sandbox() -> None:
            kernel.die_with_parent(installer, by=signal.SIGTERM)
            try:
                if with_passwords:
                    # What `_start` wrote to this process's input
                    size = os.fstat(0).st_size
                    if size:
                        os.environ.update(json.loads(os.pread(0, size, 0)))
                else:
                    _hide_credentials()
                _confine(target, network=network, user=user)
                step()
            except subprocess.CalledProcessError:  # the command printed what was wrong
                raise
            except Exception as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                raise

        return kernel.works_in_a_fork(in_sandbox)

    def list_versions() -> None:
        versions.write(finish(target))
        versions.flush()

    is_done = done(partial(install_wheels, target, str(target / FILE)), with_passwords=True)
    names = may_build(target)
    if not is_done and names:
        sys.stderr.write(f"building from source: {', '.join(names)}\n")
        # A file with the requirements that are not to be built
        path = _temporary(target) / "wheels.txt"
        built = {_normal(name) for name in names}
        lines = (target / FILE).read_text().splitlines()
        kept = [line for line in lines if "*" not in names and _normal(_name(line)) not in built]
        path.write_text("\n".join(kept) + "\n")
        others = str(path)
        # This fails if one of them requires a package without a wheel; the build installs all then.
        done(partial(install_wheels, target, others), with_passwords=True)
        is_done = done(partial(build, target, names), with_passwords=False)
    return is_done and done(list_versions, with_passwords=False, network=False)


def may_build(target: Path) -> tuple[str, ...]:
    """Names of the packages that may be built from source."""
    allowed = load_settings().environments.build_from_source
    if (target / FILE).read_text().splitlines() == REASONING_GYM:
        return (*allowed, *REASONING_GYM_BUILDS)
    return allowed


def _name(line: str) -> str:
    match = re.match(r"[\w.-]+", line)
    return match[0] if match else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# -- room on the disk ------------------------------------------------------------------------------


def hold(python: Path) -> IO[str] | None:
    """Keep an interpreter from being removed until the returned file is closed; None if it is not
    one of ours. Raises EnvironmentFault(not_ready) if it has just been removed.
    """
    if not prefix(python):
        return None
    target = python.parents[2]
    used = (target / "used").open("a+")
    with suppress(OSError):  # a file system without locks
        wait_for_lock(used, math.inf, shared=True)
    if not (target / "ready").is_file():
        used.close()
        raise EnvironmentFault("not_ready", "the environment's packages were just removed")
    os.utime(target / "used")
    return used


def _installed(folder: Path) -> list[Path]:
    """The interpreters in a folder, the one that was not used for the longest time first."""
    results: dict[Path, float] = {}
    for ready in folder.glob("*/ready"):
        with suppress(OSError):
            used = ready.with_name("used")
            results[ready.parent] = (used if used.exists() else ready).stat().st_mtime
    return sorted(results, key=results.__getitem__)


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += Path(place, name).lstat().st_blocks * 512
    return total


def _make_room(target: Path) -> str:
    """Remove interpreters until the others fit. Returns why there is no room, or ""."""
    gib = load_settings().environments.interpreters_gib
    sizes = {item: _bytes_in(item) for item in _installed(target.parent)}
    held = sum(sizes.values())
    for item, size in sizes.items():
        if held >= gib * 2**30 and _is_removed(item):
            held -= size
    if held < gib * 2**30:
        return ""
    return (
        f"packages of environments in use take {held / 2**30:.1f} GiB, and settings.toml allows "
        f"{gib:g} GiB: [environments] interpreters_gib\n"
    )


def _is_removed(target: Path) -> bool:
    """Remove an interpreter that nobody uses or installs."""
    lock_file, used_file = target / "lock", target / "used"
    # OSError: a file system without locks.
    with suppress(OSError), lock_file.open("a") as lock, used_file.open("a") as used:
        if try_lock(lock) and try_lock(used):
            (target / "ready").unlink(missing_ok=True)
            scratch.remove(target / "venv")
            return True
    return False


def main() -> None:
    target = Path(sys.argv[1])
    with (target / "lock").open("a") as lock:
        if not try_lock(lock):
            sys.stderr.write("another process installs the same packages; waiting for it\n")
            wait_for_lock(lock, math.inf)
        if (target / "ready").is_file():
            return
        if why := _make_room(target):
            sys.exit(why)
        venv = target / "venv"
        temporary = _temporary(target)
        for folder in (venv, temporary):
            scratch.remove(folder)
            folder.mkdir(exist_ok=True)
        with (target / "versions").open("w") as versions:
            is_done = _steps(target, versions)
        if is_done:
            (target / "versions").replace(target / "ready")
        else:
            scratch.remove(venv)
        scratch.remove(temporary)
        (target / "versions").unlink(missing_ok=True)
        sys.exit(not is_done)


if __name__ == "__main__":
    main()
