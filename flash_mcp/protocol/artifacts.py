"""Folders that a run needs on a node: its environment, dataset, adapter and model.

    STORAGE/artifacts/DIGEST.tar         each once, named by the sha256 of the archive
    STORAGE/artifacts/users/DIGEST/RUN   an empty file: the run needs it

The control plane stores them before it submits an attempt. The attempt fetches what its node does
not have into CACHE/DIGEST. A folder in the cache is whole, and is not removed while a process of
that node uses it.

job.json names them as `artifact:DIGEST` where a run on the server's machine has a path."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from environments.locks import make_once, part_of, remove_parts, try_lock
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.node_code import unpack
from flash_mcp.protocol.run_files import Json, StoredJob
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.storage import connect, sha256_of

MARK = "artifact:"
ARTIFACT = re.compile(r"artifact:[0-9a-f]{64}")
RUN_FOLDERS = "run-folders"
"""The folder of a storage that holds those of its runs."""
UPLOAD_S = 120.0
"""A store answers within this time once it has all of a part of an archive."""
_UPLOADS: dict[tuple[str, Path], threading.Lock] = {}
"""Held while a folder is stored in a storage."""
_IN_USE: dict[Path, int] = {}
"""File descriptors of lock files: the kernel lets go of them when the process ends."""


class Artifacts:
    """The artifacts of a storage; `retry_s` as of RunFolder."""

    def __init__(self, storage: str, *, retry_s: float) -> None:
        self.url = f"{storage}/artifacts"
        self._fs, self._root, self._is_local = connect(self.url, retry_s)
        self._known: dict[Path, tuple[str, str]] = {}
        """(fingerprint, digest) of folders that were stored."""
        self._retry_s = retry_s

    def put(self, folder: Path, run_id: str) -> str:
        """Store a folder for a run unless it is there; its digest. Runs that need the same one wait
        for one upload, also those of another target.
        """
        with _UPLOADS.setdefault((self.url, folder), threading.Lock()):
            return self._put(folder, run_id)

    def _put(self, folder: Path, run_id: str) -> str:
        # Changes when a file of the folder does
        results: list[Any] = []
        for path in sorted(_files(folder)):
            status = path.stat()
            results.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
        fingerprint = hashlib.sha256(repr(results).encode()).hexdigest()
        existing = self._known.get(folder)
        if existing and existing[0] == fingerprint:
            self._name_user(existing[1], run_id)
            if self._fs.exists(self._path(existing[1])):
                return existing[1]
        with tempfile.TemporaryDirectory(prefix="flash-artifact-") as scratch:
            archive = Path(scratch, "archive.tar")
            pack(folder, archive)
            digest = sha256_of(archive)
            self._name_user(digest, run_id)  # first: what a run needs is not removed
            if not self._fs.exists(self._path(digest)):
                self._upload(archive, self._path(digest))
        self._known[folder] = (fingerprint, digest)
        return digest

    def url_of(self, digest: str) -> str:
        return f"{self.url}/{digest}.tar"

    def release(self, digest: str, run_id: str) -> None:
        """The run is removed: delete the artifact unless another run needs it. A run that starts to
        need it in this moment stores it again with its next attempt.
        """
        users = f"{self._root}/users/{digest}"
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{users}/{run_id}")
        try:
            others = self._fs.ls(users, detail=False, refresh=True)
        except FileNotFoundError:
            others = []
        if others:
            return
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(digest))
        if self._is_local:
            with suppress(OSError):
                Path(users).rmdir()

    def _name_user(self, digest: str, run_id: str) -> None:
        mark = f"{self._root}/users/{digest}/{run_id}"
        if self._is_local:
            Path(mark).parent.mkdir(parents=True, exist_ok=True)
        self._fs.pipe_file(mark, b"")

    def _upload(self, archive: Path, path: str) -> None:
        """Whole or not at all: object stores replace whole objects, disks rename."""
        if not self._is_local:
            # A store may think about a large object for longer than about a question.
            connect(self.url, self._retry_s, UPLOAD_S)[0].put_file(str(archive), path)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            shutil.copyfile(archive, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def fetch(self, digest: str, cache: Path) -> Path:
        """The folder, in the cache; it stays there until this process ends.

        FlashError(artifact_damaged) if what is stored is missing or does not match its digest."""
        if not ARTIFACT.fullmatch(f"{MARK}{digest}"):
            what = f"the job names the artifact {digest!r:.100}"
            raise FlashError("artifact_damaged", what, storage=self.url, fix="start the run again")
        target = cache / digest
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with ExitStack() as opened:
            lock = _IN_USE.get(target)
            if lock is None:
                lock = os.open(target.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
                opened.callback(os.close, lock)
            make_once(lock, target.is_dir, lambda: self._make(digest, target))
            os.utime(target)
            opened.pop_all()
        _IN_USE[target] = lock
        return target

    def _make(self, digest: str, target: Path) -> None:
        with part_of(target) as scratch:
            archive = scratch / "archive.tar"
            fix = "start the run again: its files are stored anew; the storage may lose files"
            try:
                self._fs.get_file(self._path(digest), str(archive))
            except FileNotFoundError as error:
                what = f"the storage has no artifact {digest}"
                raise FlashError("artifact_damaged", what, storage=self.url, fix=fix) from error
            if sha256_of(archive) != digest:
                what = f"artifact {digest} does not match its checksum"
                raise FlashError("artifact_damaged", what, storage=self.url, fix=fix)
            folder = scratch / "folder"
            with tarfile.open(archive) as tar:
                unpack(tar, folder)
            archive.unlink()
            folder.rename(target)

    def _path(self, digest: str) -> str:
        return f"{self._root}/{digest}.tar"


def pack(folder: Path, archive: Path) -> None:
    """Write a folder as an archive whose bytes depend on its files' names, content and execute
    permission alone. Links are followed.
    """
    with tarfile.open(archive, "w", dereference=True, format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(_files(folder)):
            info = tar.gettarinfo(str(path), str(path.relative_to(folder)))
            info.mtime = info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mode = 0o755 if info.mode & 0o100 else 0o644
            info.type, info.linkname = tarfile.REGTYPE, ""  # not a second name of a file before
            info.size = path.stat().st_size
            with path.open("rb") as stream:
                tar.addfile(info, stream)


def trim(cache: Path, limit_bytes: float) -> None:
    """Remove the folders that were used least lately until the others fit, but none in use, and
    what killed processes left."""
    for path in cache.glob("*.lock"):
        with path.open("a") as lock:
            if try_lock(lock):
                remove_parts(path.with_suffix(""))
    sizes: dict[Path, int] = {}
    for path in cache.glob("[!.]*/"):
        sizes[path] = sum(file.stat().st_size for file in _files(path))
    total = sum(sizes.values())
    for folder in sorted(sizes, key=lambda path: path.stat().st_mtime):
        if total <= limit_bytes:
            return
        with folder.with_suffix(".lock").open("a") as lock:
            if try_lock(lock):
                with part_of(folder) as part:
                    folder.rename(part / "folder")  # a folder that is half removed has no digest
                total -= sizes[folder]


PARTS = ("environment", "init_adapter", "teacher", "dataset", "regression", "code")
"""The parts of a job whose `path` is a folder. `model` is one too, if it is a path."""


def packed(job: Json, artifacts: Artifacts) -> Json:
    """The job with every folder of this machine stored and named by its digest."""

    def stored(path: str) -> str:
        return MARK + artifacts.put(Path(path), job["run_id"])

    return _replaced(job, lambda text: text.startswith("/"), stored)


def placed(job: Json, artifacts: Artifacts, cache: Path) -> Json:
    """The inverse on a node: every artifact fetched and named by its folder, but the code's."""

    def fetched(name: str) -> str:
        return str(artifacts.fetch(name.removeprefix(MARK), cache))

    needed = {part: body for part, body in job.items() if part != "code"}
    return _replaced(needed, lambda text: text.startswith(MARK), fetched)


def delete_run(folder: RunFolder, retry_s: float) -> None:
    """Delete a run's folder, and what only this run needed. Calling it again does the rest."""
    storage, _, run_id = folder.url.rstrip("/").rpartition(f"/{RUN_FOLDERS}/")
    job = folder.read_object(StoredJob, "job.json") or {}
    paths = [cast("Json", job.get(part) or {}).get("path") for part in PARTS]
    # Others may have written to the job since: it says neither whose artifacts they are nor where.
    digests = [
        name.removeprefix(MARK)
        for name in (*paths, job.get("model"))
        if isinstance(name, str) and ARTIFACT.fullmatch(name)
    ]
    if storage and digests:
        artifacts = Artifacts(storage, retry_s=retry_s)
        for digest in digests:
            artifacts.release(digest, run_id)
    folder.remove()


def _replaced(job: Json, applies: Callable[[str], bool], act: Callable[[str], str]) -> Json:
    changed = dict(job)
    for part in PARTS:
        body = cast("Json | None", job.get(part))
        if body and applies(body["path"]):
            changed[part] = {**body, "path": act(body["path"])}
    if applies(job["model"]):
        model = act(job["model"])
        changed |= {"model": model, "spec": {**job["spec"], "model": model}}
    return changed


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
