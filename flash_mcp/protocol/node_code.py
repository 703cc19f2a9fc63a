"""Puts the server's version of flash-mcp on a node, and becomes a module of it there. It uses the
standard library, and fsspec for a store: nothing of ours is on the node yet but the lock module,
whose text `program` brings.

    python -c PROGRAM ORDER MODULE ARGUMENT ...

ORDER is what `Order` is, as JSON. Attempts of a node share HOME/code/NAME: the first one installs,
under a lock, and others wait. A file READY says that it is whole."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NoReturn, TypedDict

from environments import locks

READY = "ready"
KEPT_S = 7 * 86_400.0
"""Installations that were not used for so long are removed."""
TAIL = 4000


class Order(TypedDict):
    """What to install."""

    archive: str
    """Path or URL of an archive with the wheel and files of pins."""
    digest: str
    """The archive's sha256."""
    log: str
    """Path or URL of the file that is told what went wrong."""


PROGRAM = """
import sys, types
package, module = types.ModuleType("environments"), types.ModuleType("environments.locks")
exec({locks!r}, vars(module))
package.locks = module
sys.modules |= {{package.__name__: package, module.__name__: module}}
exec({main!r})
"""


def program() -> str:
    """The text of a program that does what this module does where nothing of ours is installed."""
    texts = {"locks": Path(locks.__file__).read_text(), "main": Path(__file__).read_text()}
    return PROGRAM.format(**texts)


def main() -> NoReturn:
    order: Order = json.loads(sys.argv[1])
    try:
        command = _command(order)
    except Exception as error:
        said = f"flash-mcp could not be installed on this node: {error}"
        if isinstance(error, subprocess.CalledProcessError):
            said += f"\n{error.stdout}"
        # Tell whoever reads this attempt's log, as far as that works
        try:
            with _opened(order["log"], "wb") as stream:
                stream.write(said[-TAIL:].encode())
        except Exception as error:
            sys.stderr.write(f"the log cannot be stored: {error!r}\n")
        sys.exit(said)
    os.execv(command[0], [*command, "-m", *sys.argv[2:]])


def use_own_home() -> None:
    """FLASH_HOME of this node, unless the target gives one. Nodes may share that: caches lie in a
    part of it for each.
    """
    os.environ["FLASH_MACHINE"] = socket.gethostname()
    if "FLASH_HOME" not in os.environ:
        home = Path(tempfile.gettempdir(), f"flash-mcp-{os.getuid()}")
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.getuid():
            sys.exit(f"{home} belongs to somebody else: give the target a home")
        os.environ["FLASH_HOME"] = str(home)


def _command(order: Order) -> list[str]:
    use_own_home()
    extra = "gpu" if shutil.which("nvidia-smi") else "cpu"
    caches = Path(os.environ["FLASH_HOME"], "machines", os.environ["FLASH_MACHINE"])
    folder = caches / "code" / f"{order['digest'][:16]}-{extra}"
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Never closed: it is held until the module has ended.
    lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    os.set_inheritable(lock, True)

    def install() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with _opened(order["archive"], "rb") as stream:
            body = stream.read()
        if hashlib.sha256(body).hexdigest() != order["digest"]:
            raise ValueError(f"{order['archive']} does not match its checksum")
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            unpack(archive, folder)
        # An environment with the wheel and all that it needs, by uv
        wheel = next(folder.glob("*.whl"))
        _uv("venv", "--python", sys.executable, str(folder / "venv"))
        python = ["--python", str(folder / "venv" / "bin" / "python")]
        options = ["--overrides", str(folder / "overrides.txt")]
        if (pins := folder / f"constraints-{extra}.txt").exists():
            options += ["--constraints", str(pins)]
        if extra == "cpu" and "UV_FIND_LINKS" not in os.environ:
            os.environ.setdefault("UV_TORCH_BACKEND", "cpu")
        requested = f"flash-mcp[{extra},s3] @ {wheel.as_uri()}"
        _uv("pip", "install", "--compile-bytecode", *python, *options, requested)
        (folder / READY).touch()

    locks.make_once(lock, (folder / READY).exists, install)
    os.utime(folder.with_suffix(".lock"))
    _clear(folder)
    return [str(folder / "venv" / "bin" / "python"), "-P"]


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the files of an archive of ours below `folder`. tarfile.TarError if it holds something
    else, or a path that leads elsewhere. Python has its own filters only since 3.11.4.
    """
    root = folder.resolve()
    for member in archive:
        path = (root / member.name).resolve()
        source = archive.extractfile(member) if member.isreg() else None
        if source is None or root not in path.parents:
            raise tarfile.ExtractError(f"{member.name!r:.200} is no file of this archive")
        path.parent.mkdir(parents=True, exist_ok=True)
        with source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
        path.chmod(member.mode & 0o755 | 0o600)
        os.utime(path, (member.mtime, member.mtime))


def _uv(*arguments: str) -> None:
    places = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    uv = os.environ.get("UV") or shutil.which("uv", path=places)
    if uv is None:
        raise FileNotFoundError(f"there is no uv in {places}")
    # Its own settings, and no pyproject.toml of a folder above.
    command = [uv, *arguments, "--quiet", "--no-config"]
    subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _clear(used: Path) -> None:
    for path in used.parent.glob("*.lock"):
        folder = path.with_suffix("")
        if folder == used or time.time() - path.stat().st_mtime < KEPT_S:
            continue
        with path.open("a") as lock:
            if locks.try_lock(lock):
                (folder / READY).unlink(missing_ok=True)  # first: half of it is not whole
                shutil.rmtree(folder, ignore_errors=True)


def _opened(place: str, mode: str) -> IO[bytes]:
    if "://" not in place:
        return Path(place).open(mode)  # pyright: ignore[reportReturnType]
    fsspec: Any = importlib.import_module("fsspec")
    return fsspec.open(place, mode).open()


if __name__ == "__main__":
    main()
