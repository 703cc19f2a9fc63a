"""Unpack an uploaded tar.gz: only regular files below one folder, within limits."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import BinaryIO

import anyio
from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from flash_mcp.protocol.errors import FlashError, as_flash_error, disk_error
from flash_mcp.protocol.paths import environments_dir
from flash_mcp.state.owners import caller, refuse_reader
from flash_mcp.state.versions import (
    IGNORED_FILES,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_TOTAL_BYTES,
    check_name,
    check_path,
    folder_files,
    owner_dir,
    refusal,
)
from flash_mcp.tools.environments import EnvPush, publish

MAX_ARCHIVE_BYTES = MAX_TOTAL_BYTES
"""Of the compressed archive."""
MAX_MEMBERS = 4 * MAX_FILES
"""Includes folders and ignored files."""
MAX_UNPACKED_BYTES = MAX_TOTAL_BYTES + (16 << 20)
"""Includes headers and padding."""
MAX_HEADER_BYTES = 64 << 10


DAMAGE = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, RecursionError, ValueError)
"""What the standard library raises for a damaged archive."""


def unpack(archive: BinaryIO, folder: Path) -> None:
    """Write the files of a tar.gz below `folder`, which is empty.

    FlashError(upload_invalid) for paths outside the folder, links, devices, sparse files,
    duplicates, damage, and files that are too large or too many. `folder` then holds some of the
    files."""
    stream = _Bounded(fileobj=archive)
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
            for number, member in enumerate(tar):
                if number >= MAX_MEMBERS:
                    fix = "leave out what the environment does not read"
                    what = f"the archive has more than {MAX_MEMBERS} members"
                    raise FlashError("upload_invalid", what, fix=fix)
                _unpack_member(tar, member, folder)
        while stream.read(1 << 20):  # to the end: gzip's checksum comes last
            pass
    except DAMAGE as error:
        fix = "make it with `tar -C FOLDER -czf FILE .` and send it again"
        what = f"that is no whole tar.gz: {error}; nothing was pushed"
        raise FlashError("upload_invalid", what, fix=fix) from error


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    path = member.name.removeprefix("./")
    if member.isdir():
        return  # files create their folders
    if IGNORED_FILES.fullmatch(Path(path).name):
        return  # a .env does not even reach the disk
    check_path(path)
    if not member.isreg() or member.issparse():
        what = "is a link, a device or a sparse file"
        raise refusal(path, what, "replace it by a regular file")
    if member.size > MAX_FILE_BYTES:
        fix = f"keep each file within {MAX_FILE_BYTES >> 20} MiB"
        raise refusal(path, f"has {member.size:,} bytes", fix)
    source = tar.extractfile(member)
    assert source is not None
    try:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("xb") as target:
            shutil.copyfileobj(source, target)
    except (FileExistsError, NotADirectoryError) as error:
        what = "is in the archive twice, or both as a file and as a folder"
        raise refusal(path, what, "keep one") from error


class _Bounded(gzip.GzipFile):
    """A stream that fails once it exceeds the limit, so an archive bomb is never held in memory."""

    left = MAX_UNPACKED_BYTES

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.left -= len(data)
        if self.left < 0:
            fix = f"keep all files within {MAX_TOTAL_BYTES >> 20} MiB"
            what = "the archive unpacks to more than is allowed; nothing was pushed"
            raise FlashError("upload_invalid", what, fix=fix)
        return data


class _Member(tarfile.TarInfo):
    """A member without long headers: tarfile would read one of any length into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        is_known = self.type in (*tarfile.SUPPORTED_TYPES, *_HEADERS)
        if not is_known or self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"member {self.name!r:.200} is of an unknown kind")
        if self.type in _HEADERS and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header is too long")
        return super()._proc_member(tar)  # pyright: ignore


_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


UPLOAD_TIMEOUT_S = 600.0


STATUS = {
    "unauthenticated": 401,
    "not_permitted": 403,
    "host_refused": 421,
    "origin_refused": 403,
    "too_large": 413,
    "rate_limited": 429,
    "quota_exceeded": 429,
    "disk_full": 507,
    "state_busy": 503,
    "internal": 500,
}
"""HTTP status of an error code; 404 for those of unknown things, 400 for all others."""


def status_and_headers(error: FlashError) -> tuple[int, dict[str, str]]:
    otherwise = 404 if error.code.startswith("unknown_") else 400
    headers: dict[str, str] = {}
    if error.code == "unauthenticated":
        headers["www-authenticate"] = 'Bearer error="invalid_token"'
    if "retry_after_s" in error.values:
        headers["retry-after"] = str(error.values["retry_after_s"])
    return STATUS.get(error.code, otherwise), headers


def refusal_response(error: FlashError) -> Response:
    """The error as an HTTP response, with a JSON-RPC error that MCP clients show."""
    status, headers = status_and_headers(error)
    details = {"code": -32000, "message": str(error), "data": error.to_dict()}
    body = {"jsonrpc": "2.0", "id": None, "error": details}
    return JSONResponse(body, status, headers)


class Uploads:
    """PUT /environments/NAME with a tar.gz as the body: env_push for large environments.

    The checks and the result are those of env_push; ?load=false publishes without loading. Each
    owner can have one upload at a time."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()

    async def put(self, request: Request) -> Response:
        owner = caller().owner
        name = str(request.path_params["name"])
        if owner in self._under_way:
            what = "another upload of yours is running"
            error = FlashError("rate_limited", what, retry_after_s=5, fix="send one at a time")
            return refusal_response(error)
        self._under_way.add(owner)
        try:
            pushed = await _receive(request, name)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return refusal_response(as_flash_error("upload", error))
        finally:
            self._under_way.discard(owner)
        return JSONResponse(pushed.model_dump(), 201 if pushed.created else 200)


async def _receive(request: Request, name: str) -> EnvPush:
    check_name(name)
    refuse_reader("an upload")
    load = request.query_params.get("load", "true")
    if load not in ("true", "false"):
        raise FlashError(
            "invalid_argument", f"load is true or false (got {load!r:.100})", fix="leave it out"
        )
    root = owner_dir(environments_dir())
    try:
        root.mkdir(parents=True, exist_ok=True)
        unpacked = tempfile.TemporaryDirectory(
            prefix=".upload-", dir=root, ignore_cleanup_errors=True
        )
        with tempfile.TemporaryFile(dir=root) as archive, unpacked as folder:
            size = 0
            with anyio.move_on_after(UPLOAD_TIMEOUT_S) as scope:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > MAX_ARCHIVE_BYTES:
                        fix = f"keep the archive within {MAX_ARCHIVE_BYTES >> 20} MiB"
                        what = f"the archive has more than {MAX_ARCHIVE_BYTES:,} bytes"
                        raise FlashError("too_large", what, fix=fix)
                    await run_sync(archive.write, chunk)
            if scope.cancelled_caught:
                fix = "send it over a faster connection, or make it smaller"
                what = f"it did not arrive within {UPLOAD_TIMEOUT_S:.0f} s"
                raise FlashError("upload_invalid", what, fix=fix)
            archive.seek(0)
            await run_sync(unpack, archive, Path(folder))
            files = await run_sync(folder_files, Path(folder))
            return await publish(name, files, load=load == "true")
    except OSError as error:
        raise disk_error(error, root) from error
