"""Backup and restore of a state directory, while it is in use.

The database is copied by SQLite's online backup, the folders after it: by then they hold all that
the copy names, and what they hold beyond it is read in again. Models, logs and what belongs to
running processes are left out."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from gzip import BadGzipFile
from itertools import filterfalse
from pathlib import Path
from typing import IO

from environments import settings
from flash_mcp import __version__
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.node_code import unpack
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import targets
from flash_mcp.state.locks import backing_up
from flash_mcp.state.store import Store

FOLDERS = ("environments", "datasets", "runs")
SETTINGS = (settings.FILE, targets.FILE, targets.KEY_FILE)
"""Files that are restored where they are missing: a machine may have its own."""
LABEL = "backup.json"
DAMAGE = (
    tarfile.TarError, zlib.error, BadGzipFile, EOFError, FileNotFoundError, ValueError, KeyError,
    TypeError,
)  # fmt: skip
"""What reading a damaged archive raises."""


@dataclass(frozen=True)
class Summary:
    """What a backup holds. `damaged` are checkpoints that do not match their checksums, as
    RUN_ID/STEP. `left` are files of settings that were there already and stayed as they were.
    """

    file: str
    size_bytes: int
    runs: int
    environments: int
    saved: str
    damaged: list[str]
    left: list[str] = field(default_factory=list[str])


def backup(base: Path, file: Path) -> Summary:
    """Write the state directory to a tar archive (compressed where the name ends with gz), whole or
    not at all.

    FlashError(invalid_argument) where `file` exists, FlashError(disk_full | state_corrupt |
    state_busy)."""
    if file.exists():
        what = "that file exists already"
        raise FlashError("invalid_argument", what, file=file, fix="choose another name")
    part = file.with_name(f".{file.name}.part")
    try:
        with backing_up(base), tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            copy = Path(scratch, "flash.db")
            Store(base).copy_to(copy)
            now = time.time()
            part.unlink(missing_ok=True)
            # It holds what is private, and so is the state directory.
            part.touch(mode=0o600, exist_ok=False)
            about = {"version": __version__, "home": str(base), "time": now}
            with tarfile.open(part, "w:gz" if file.name.endswith("gz") else "w") as archive:
                label = json.dumps(about).encode()
                _add(archive, LABEL, io.BytesIO(label), len(label), now)
                _add(archive, "flash.db", copy.open("rb"), copy.stat().st_size, now)
                for path in _files(base):
                    # It may be replaced or swept meanwhile.
                    with suppress(FileNotFoundError), path.open("rb") as stream:
                        _add_file(archive, str(path.relative_to(base)), stream)
        part.replace(file)
    except FileNotFoundError as error:
        what = f"cannot write there: {error.strerror}"
        fix = "name a file in a folder that exists"
        raise FlashError("invalid_argument", what, file=file, fix=fix) from error
    except OSError as error:
        raise disk_error(error, file) from error
    finally:
        part.unlink(missing_ok=True)
    return _summary(base, file, now, damaged=[])


def restore(base: Path, file: Path) -> Summary:
    """Bring a backup into the state directory `base`, which has to be empty of runs and
    environments.

    Runs that had not ended go on, each with its next attempt, once a supervisor is there. Nothing
    is left in `base` where it fails: FlashError(invalid_argument | upload_invalid | state_corrupt |
    disk_full)."""
    taken = [name for name in ("flash.db", *FOLDERS) if (base / name).exists()]
    if taken:
        what = f"the state directory holds {', '.join(taken)} already"
        fix = "set FLASH_HOME to a new folder, or move these away"
        raise FlashError("invalid_argument", what, home=base, fix=fix)
    try:
        with tempfile.TemporaryDirectory(dir=base, prefix=".restore-") as scratch:
            staged = Path(scratch)
            saved = _extract(file, staged)
            store = Store(staged)
            store.check()
            store.close()
            left = [name for name in SETTINGS if (base / name).exists()]
            new = set(SETTINGS).difference(left)
            for name in (*new, *FOLDERS, "flash.db"):  # with the database the state is whole
                if (staged / name).exists():
                    (staged / name).rename(base / name)
    except OSError as error:
        raise disk_error(error, base) from error
    return replace(_summary(base, file, saved, _damaged(base)), left=left)


def _files(base: Path) -> Iterator[Path]:
    """What there is to save. Folders that are removed meanwhile are skipped, as by os.walk."""
    yield from (base / name for name in SETTINGS if (base / name).is_file())
    for folder in FOLDERS:
        for parent, below, names in os.walk(base / folder):
            # Names with a leading dot are being written: anywhere in a run, elsewhere where
            # versions' names stand.
            above = Path(parent).relative_to(base / folder).parts
            if folder == "runs" or all(name.startswith("@") for name in above):
                below[:] = filterfalse(_is_hidden, below)
                names = filterfalse(_is_hidden, names)
            below.sort()
            for name in sorted(names):
                path = Path(parent, name)
                if path.is_file() and not path.is_symlink():
                    yield path


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _add(
    archive: tarfile.TarFile, name: str, stream: IO[bytes], size: int, modified: float
) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(modified), 0o600
    with stream:
        archive.addfile(info, stream)


def _add_file(archive: tarfile.TarFile, name: str, stream: IO[bytes]) -> None:
    """Add an open file: if it is replaced meanwhile, the old contents are read."""
    info = archive.gettarinfo(arcname=name, fileobj=stream)
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.type = tarfile.REGTYPE  # not a link to another of the same inode
    archive.addfile(info, stream)


def _extract(file: Path, into: Path) -> float:
    """Unpack a backup. Returns when it was saved, as of time.time()."""
    try:
        with tarfile.open(file) as archive:
            unpack(archive, into)
        saved = float(json.loads((into / LABEL).read_text())["time"])
        (into / LABEL).unlink()
        if not (into / "flash.db").exists():
            raise FileNotFoundError("it holds no flash.db")
    except DAMAGE as error:
        what = f"that is no whole backup: {error}"
        fix = "name a file that `flash-mcp backup` wrote; a damaged one cannot be used"
        raise FlashError("upload_invalid", what, file=file, fix=fix) from error
    return saved


def _summary(base: Path, file: Path, saved: float, damaged: list[str]) -> Summary:
    store = Store(base)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(saved))
    runs, environments = sum(store.run_counts().values()), len(store.environments())
    return Summary(str(file), file.stat().st_size, runs, environments, when, damaged)


def _damaged(base: Path) -> list[str]:
    results: list[str] = []
    for path in sorted((base / "runs").glob("*")):
        folder = RunFolder(path)
        for step in folder.checkpoints.steps():
            try:
                folder.checkpoints.verify(step)
            except FlashError:
                results.append(f"{path.name}/{step}")
    return results
