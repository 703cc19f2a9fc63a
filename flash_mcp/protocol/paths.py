"""Where state lives: FLASH_HOME, by default ~/.flash-mcp."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from pathlib import Path

from environments.settings import state_directory

DATABASE = "flash.db"


class HomeError(OSError):
    """The state directory cannot be used."""


def home() -> Path:
    """The state directory; created if missing, readable by its owner only.

    One that holds a database need not be writable: it can be read. Raises HomeError if it cannot be
    created or used, or is no path from / or ~ on."""
    path, said = state_directory(), os.environ.get("FLASH_HOME") or "~"
    # The client starts servers in folders of its choice, and few fill in what they are given.
    if "${" in said or not said.startswith(("/", "~")):
        what = "a client has to fill in ${...}, and the path has to begin with / or ~"
        raise HomeError(errno.EINVAL, what, said)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise HomeError(error.errno, error.strerror, str(path)) from error
    needed = os.X_OK
    if not (path / DATABASE).is_file():
        needed |= os.W_OK
    if not os.access(path, needed):
        raise HomeError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def write_private(path: Path, content: str | bytes, scratch: Path | None = None) -> None:
    """Write a file whole or not at all, for this user alone. `scratch` is a folder of the same
    disk for the part that is not whole.
    """
    part = (scratch or path.parent) / f".{path.name}.{secrets.token_hex(4)}"
    part.touch(mode=0o600)
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def environments_dir(base: Path | None = None) -> Path:
    """NAME/DIGEST/ of every pushed environment."""
    return (base or home()) / "environments"


def runs_dir(base: Path) -> Path:
    """RUN_ID/, one run folder each."""
    return base / "runs"


def datasets_dir(base: Path | None = None) -> Path:
    """NAME/DIGEST/ of every curated dataset."""
    return (base or home()) / "datasets"


def exports_dir(base: Path) -> Path:
    """RUN_ID-STEP-FORMAT/ of every export that a tool call made, beside its lock and result."""
    return base / "exports"


def models_dir(base: Path | None = None) -> Path:
    """Base models ready for use. Several state directories can share it through FLASH_MODELS."""
    shared = os.environ.get("FLASH_MODELS")
    if shared:
        return Path(shared).expanduser().absolute()
    return (base or home()) / "models"


ANY_SCRATCH = f"flash-{'[0-9a-f]' * 12}-*"
"""The names of the temporary folders of all runs' attempts."""


def scratch_prefix(folder: str) -> str:
    """How the temporary folders of a run's attempts begin; `folder` is its run folder."""
    return f"flash-{hashlib.sha256(folder.encode()).hexdigest()[:12]}-"
