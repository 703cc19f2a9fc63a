"""Files under one prefix, on a disk of this machine or in an object store.

Files are replaced whole and atomically: an object store cannot append. The credentials of an object
store come from its own variables (AWS_ACCESS_KEY_ID and so on), never from the folder or its URL.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.run_files import (
    MAX_BYTES,
    MAX_OBJECTS,
    MAX_ROLLOUTS_BYTES,
    MAX_SMALL_BYTES,
    Damaged,
    Json,
    Shape,
    decoded,
    is_below,
    read_local,
)

log = logging.getLogger(__name__)
RETRY_S = 600.0
READ_S = 10.0
"""A store that is reached answers within this time."""
RETRY_DELAY_S = (0.1, 15.0)
READ_BYTES = 8 << 20
_STRING_OR_OBJECT = re.compile(rb'"(?:[^"\\\n]++|\\[^\n])*+"?|[{\[\n]')
"""In JSON: a string, up to the end of its line at most, or what begins an object, list or line."""


def connect(url: str, retry_s: float, read_s: float | None = None) -> tuple[Any, str, bool]:
    """(the file system of a path or an fsspec URL, the path there, whether it is this machine's).
    The store answers each request within `read_s`, by default READ_S.

    FlashError(engine_missing) if packages for the URL are missing."""
    try:
        core: Any = fsspec.core  # untyped
        # Listings are never cached: other machines write there too.
        limits: Json = {}
        if retry_s < RETRY_S and url.startswith("s3://"):
            # S3's client waits for minutes where the store says nothing, and asks for the size of
            # each file before it reads it.
            times = {"connect_timeout": retry_s, "read_timeout": max(retry_s, read_s or READ_S)}
            retries = {"retries": {"max_attempts": 0}}
            limits = {"max_concurrency": 1, "config_kwargs": times | retries}
        filesystem, root = core.url_to_fs(url, use_listings_cache=False, **limits)
        if limits:
            filesystem.retries = 1  # s3fs repeats calls too
    except ImportError as error:
        fix = "install flash-mcp with the extra s3, or the fsspec package for that store"
        raise FlashError("engine_missing", f"{error}", folder=url, fix=fix) from error
    protocols: str | tuple[str, ...] = filesystem.protocol
    is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)
    # A disk that fails does so for good; a store comes back.
    retrying = filesystem if is_local else _Retrying(filesystem, retry_s)
    return retrying, root.rstrip("/"), is_local


def forget_stores() -> None:
    """Let storages that are opened later read the keys in the environment anew."""
    for kind in {*cast("dict[str, Any]", fsspec.registry).values()}:
        kind.clear_instance_cache()


def _has_too_many_objects(body: bytes) -> bool:
    """Whether JSON would take far more memory than it has bytes."""
    if sum(map(body.count, (b"{", b"[", b"\n"))) <= MAX_OBJECTS:
        return False
    # Some may be parts of texts. Looking takes as long as decoding, so files that are short enough
    # are spared it.
    quote = ord('"')
    starts = (body[match.start()] for match in _STRING_OR_OBJECT.finditer(body))
    return sum(start != quote for start in starts) > MAX_OBJECTS


class _Look(threading.local):
    """One look at all files of a store, by the thread that looks. The heartbeat's thread asks for
    the owner at the same time, and must not take a listing for the answer.
    """

    listing: dict[str, dict[str, Json]] | None = None
    """{folder: {name: entry}}, while it counts."""


class Storage:
    """The files under `url`, a local path or any fsspec URL. Names of files and folders are paths
    below it.

    While an object store is unreachable or refuses us, each call is retried for `retry_s`; then
    it raises FlashError(store_unreachable | store_refused). FlashError(engine_missing) if packages
    for the URL are missing.
    """

    def __init__(self, url: str | Path, *, retry_s: float = RETRY_S) -> None:
        self.url = str(url)
        self.filesystem, self.root, self.is_local = connect(self.url, retry_s)
        self.damaged: dict[str, str] = {}
        """Files that were found damaged when they were last read, and what is wrong with them."""
        self._look = _Look()

    def path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    def address(self, name: str) -> str:
        if self.is_local:
            return self.path(name)
        return f"{self.url.rstrip('/')}/{name}"

    # -- listing -----------------------------------------------------------------------------------

    @contextmanager
    def listed(self) -> Generator[None]:
        """Within, what an object store holds is what one listing of the whole folder shows: a
        request for each thousand files, instead of one for each question. Local disks are asked.
        """
        if self.is_local or self._look.listing is not None:
            yield
            return
        listing: dict[str, dict[str, Json]] = {}
        for name, entry in self._all_below().items():
            folder, _, file = name.rpartition("/")
            listing.setdefault(folder, {})[file] = entry
            while folder:
                above, _, own = folder.rpartition("/")
                listing.setdefault(above, {})[own] = {}
                folder = above
        self._look.listing = listing
        try:
            yield
        finally:
            self._look.listing = None

    def names(self, *parts: str) -> list[str]:
        if self._look.listing is not None:
            return list(self._look.listing.get("/".join(parts), {}))
        path = self.path(*parts)
        try:
            paths = cast("list[str]", self.filesystem.ls(path, detail=False, refresh=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def entries(self, folder: str) -> dict[str, Json]:
        """{name: what the file system says of it} of what a folder holds."""
        if self._look.listing is not None:
            return self._look.listing.get(folder, {})
        path = self.path(folder)
        try:
            entries = cast("list[Json]", self.filesystem.ls(path, detail=True, refresh=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: entry for entry in entries}

    def sizes(self, *parts: str) -> dict[str, int]:
        return {name: entry["size"] for name, entry in self._all_below(*parts).items()}

    def _all_below(self, *parts: str) -> dict[str, Json]:
        entries = cast("dict[str, Json]", self.filesystem.find(self.path(*parts), detail=True))
        start = len(self.root.lstrip("/")) + 1
        return {name.lstrip("/")[start:]: entry for name, entry in entries.items()}

    # -- reading -----------------------------------------------------------------------------------

    def read(self, name: str, max_bytes: int = MAX_BYTES) -> str | None:
        """A file's text; None if there is none, or it is damaged. OSError where a disk fails."""
        body = self._read_bytes(name, max_bytes)
        if body is None:
            return None
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            self.damaged[name] = str(error)
            return None

    def _read_bytes(self, name: str, max_bytes: int) -> bytes | None:
        self.damaged.pop(name, None)
        try:
            if self.is_local:
                body = read_local(Path(self.path(name)), max_bytes, root=self.root)
            else:
                body = self._read_remote(name, max_bytes)
            if _has_too_many_objects(body):
                raise Damaged(f"it has more than {MAX_OBJECTS} objects, lists and lines")
            return body
        except FileNotFoundError:
            return None
        except Damaged as error:
            self.damaged[name] = str(error)
            return None

    def _read_remote(self, name: str, max_bytes: int) -> bytes:
        try:
            body = cast(
                bytes, self.filesystem.cat_file(self.path(name), start=0, end=max_bytes + 1)
            )
        except REFUSALS:
            raise
        except OSError as error:
            if not _is_empty(error):
                raise
            body = b""  # an empty file has no range
        if len(body) > max_bytes:
            raise Damaged(f"it has more than {max_bytes} bytes")
        return body

    def _check_below(self, name: str) -> None:
        """FlashError(artifact_damaged) if a link leads the folder of a file elsewhere."""
        path = os.path.realpath(Path(self.path(name)).parent)
        if self.is_local and not is_below(f"{path}/", self.root):
            fix = "find out who can write to the storage, and remove the link"
            raise FlashError(
                "artifact_damaged", f"a link leads out of {self.url}", name=name, fix=fix
            )

    def read_json(self, name: str) -> Json | None:
        return self.read_object(dict[str, Any], name)

    def read_object(
        self, shape: type[Shape], name: str, *, max_bytes: int = MAX_BYTES, step: int | None = None
    ) -> Shape | None:
        """A file's JSON object; None if it is missing, damaged, or of another step than `step`."""
        text = self.read(name, max_bytes)
        if text is None:
            return None
        return self.decode(shape, name, text, step)

    def decode(
        self, shape: type[Shape], name: str, text: str, step: int | None = None
    ) -> Shape | None:
        """The JSON object in `text`, which a file holds; None if the file is damaged."""
        try:
            body = decoded(text, shape)
            if step is not None and (stated := cast(Json, body)["step"]) != step:
                raise Damaged(f"it is of step {stated}")
        except Damaged as error:
            self.damaged[name] = str(error)
            return None
        return body

    def read_lines(self, shape: type[Shape], name: str) -> Iterator[Shape]:
        """The JSON objects in the lines of a file; damaged lines are left out. The file is read at
        once. Each line is decoded when it is its turn: all of them may take far more memory.
        """
        return self._decoded_lines(shape, name, self._read_bytes(name, MAX_ROLLOUTS_BYTES) or b"")

    def _decoded_lines(self, shape: type[Shape], name: str, body: bytes) -> Iterator[Shape]:
        for number, line in enumerate(io.BytesIO(body), start=1):
            if line == b"\n":
                continue
            try:
                yield decoded(line.decode(), shape)
            except (Damaged, UnicodeDecodeError) as error:
                self.damaged[name] = f"line {number}: {error}"

    def read_tail(self, name: str, size_bytes: int) -> str:
        """The end of a file's text; empty if there is none that can be read."""
        path = self.path(name)
        try:
            if self.is_local:
                tail = read_local(Path(path), size_bytes, root=self.root, is_tail=True)
            else:
                tail: bytes = self.filesystem.cat_file(path, start=-size_bytes)[-size_bytes:]
        except (*REFUSALS, Damaged):
            return ""
        except OSError as error:
            if not (self.is_local or _is_empty(error)):
                raise
            return ""
        return tail.decode(errors="replace")

    def has(self, name: str) -> bool:
        """Whether there is a file of that name. A store is asked for the file itself, which is the
        cheapest request that it has.
        """
        if self.is_local:
            return self.filesystem.exists(self.path(name))
        try:
            self._read_remote(name, max_bytes=0)
        except FileNotFoundError:
            return False
        except Damaged:  # it is longer
            return True
        return True

    def digest(self, name: str) -> str | None:
        path = self.path(name)
        sha = hashlib.sha256()
        try:
            self._check_below(name)
            # In pieces: an adapter may be larger than the memory that is free.
            for start in range(0, size := self.filesystem.size(path), READ_BYTES):
                end = min(start + READ_BYTES, size)
                sha.update(self.filesystem.cat_file(path, start=start, end=end))
        except FileNotFoundError:
            return None
        return sha.hexdigest()

    # -- writing -----------------------------------------------------------------------------------

    def write(self, name: str, body: bytes, guard: Callable[[], None] = lambda: None) -> None:
        """Replace a file. `guard` runs as late as possible and raises if that is not allowed."""
        if not self.is_local:
            guard()
            self.filesystem.pipe_file(self.path(*name.split("/")), body)
            return
        self._check_below(name)
        target = Path(self.path(name))
        temporary = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(body)
                stream.flush()
                # After a power cut the new name must not have an empty file.
                os.fsync(stream.fileno())
            guard()
            # Rename, also over a folder that something made there: that keeps another name.
            try:
                temporary.replace(target)
            except IsADirectoryError:
                target.rename(target.with_name(f".{target.name}.{uuid4().hex}.folder"))
                temporary.replace(target)
        except OSError as error:
            raise disk_error(error, target) from error
        finally:
            temporary.unlink(missing_ok=True)

    def write_new(self, name: str, body: Json) -> bool:
        """Write a file unless it is there; whether this call wrote it. `body` must be unique: a
        call whose response was lost is retried, and then finds what it wrote itself.
        """
        path = self.path(name)
        try:
            if self.is_local:
                self._check_below(name)
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with Path(path).open("xb") as stream:
                    stream.write(dump(body))
            else:
                self.filesystem.pipe_file(path, dump(body), mode="create")
        except OSError as error:
            # The type of the refusal differs between stores.
            existing = None if self.is_local else self.read_json(name)
            if existing is None and not isinstance(error, FileExistsError):
                raise disk_error(error, Path(path).parent) from error
            return existing == body
        return True

    def put_files(self, folder: str, files: dict[str, Path]) -> None:
        """Copy local files into a folder, {name there: file}."""
        target = self.path(folder)
        if not self.is_local:
            for name, path in files.items():
                self.filesystem.put_file(str(path), f"{target}/{name}")
            return
        for name, path in files.items():
            self._check_below(f"{folder}/{name}")
            copy = Path(target, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        for entry in (*Path(target).rglob("*"), Path(target)):
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, *parts: str) -> None:
        """Delete a file, or a folder with all that it holds; without `parts` everything."""
        if parts:
            self._check_below("/".join(parts))
        with suppress(FileNotFoundError):
            self.filesystem.rm(self.path(*parts), recursive=True)

    def remove_files(self, names: Sequence[str]) -> None:
        """Delete files, many with one request. One that is gone already is no error."""
        for name in names:
            self._check_below(name)
        with suppress(FileNotFoundError):
            if names:
                self.filesystem.rm(list(map(self.path, names)))


def read_of_all(storages: Sequence[Storage], name: str) -> list[bytes | None]:
    """The file of that name in several folders of one store, all asked for at once.

    FlashError(store_unreachable | store_refused)."""
    if not storages:
        return []
    paths = [storage.path(name) for storage in storages]
    ends = [MAX_SMALL_BYTES + 1] * len(paths)
    bodies = storages[0].filesystem.cat_ranges(paths, [0] * len(paths), ends, on_error="return")
    contents: list[bytes | None] = []
    for path, body in zip(paths, bodies, strict=True):
        if isinstance(body, Exception) and (trouble := _trouble(path, body)):
            raise trouble
        if not isinstance(body, bytes) or len(body) > MAX_SMALL_BYTES:
            body = None
        contents.append(body)
    return contents


class _Retrying:
    """A remote file system. While it is unreachable, or refuses us, each call is retried with a
    growing delay: keys that have expired are replaced.
    """

    def __init__(self, filesystem: Any, retry_s: float) -> None:
        self._filesystem = filesystem
        self._retry_s = retry_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._filesystem, name)

        @functools.wraps(call)
        def retried(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            delay_s, most_s = RETRY_DELAY_S
            while True:
                try:
                    return call(*arguments, **options)
                except Exception as error:
                    trouble = _trouble(arguments[0], error)
                    if trouble is None:
                        raise
                    if time.monotonic() - began + delay_s > self._retry_s:
                        raise trouble from error
                    log.warning("%s %s is tried again: %s", name, arguments[0], error)
                # Not all workers at once: a store that comes back would be
                # overrun.
                time.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, most_s)

        return retried


NO_KEYS = (
    "CredentialRetrievalError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
REFUSALS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


def _may_pass(error: Exception) -> bool:
    """Whether the store or the network failed; False if the store refused."""
    if isinstance(error, REFUSALS):
        return False
    if isinstance(error, OSError):
        # The request is wrong, or the disk is full: neither passes by itself.
        return error.errno not in (errno.EINVAL, errno.ENOSPC)
    # Errors of botocore, which may not be installed, have no base in the standard library.
    names = {base.__name__ for base in type(error).__mro__}
    return not names.isdisjoint(("ConnectionError", "HTTPClientError"))


def _is_empty(error: OSError) -> bool:
    """Whether an object store refused a part of a file because the file is empty."""
    return "InvalidRange" in str(error) or "not satisfiable" in str(error)


def _trouble(path: str, error: Exception) -> FlashError | None:
    """What is wrong with the store, if the error is not about the file alone."""
    is_refusal = isinstance(error, PermissionError) or "bucket does not exist" in str(error)
    # NO_KEYS: of botocore, which may not be installed
    if is_refusal or type(error).__name__ in NO_KEYS:
        fix = (
            "give this machine keys that may read and write there, and that have not expired, or "
            "name a bucket that exists; the run waits"
        )
        what = f"the run folder's store refuses: {error}"
        return FlashError("store_refused", what, path=path, fix=fix)
    if not _may_pass(error):
        return None
    variables = "its variables (AWS_ENDPOINT_URL, ...)"
    fix = f"check that the store answers and that {variables} are right; the run resumes"
    what = f"the run folder's store does not answer: {error}"
    return FlashError("store_unreachable", what, path=path, fix=fix)


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def dump(body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    # Lone surrogates, which an environment may write, have no UTF-8 form.
    return text.encode(errors="replace")


def this_process() -> Json:
    return {"host": socket.gethostname(), "pid": os.getpid()}
