"""Unpacking a tar.gz that a stranger sent: regular files below one folder, within bounds, and nothing else."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO

from flash_mcp.environments import MAX_FILE_BYTES, MAX_FILES, MAX_TOTAL_BYTES, check_path, refusal
from flash_mcp.errors import FlashError

MAX_ARCHIVE_BYTES = MAX_TOTAL_BYTES
"""Of the archive itself, compressed."""
MAX_MEMBERS = 4 * MAX_FILES
"""Folders and ignored files count as well."""
MAX_UNPACKED_BYTES = MAX_TOTAL_BYTES + (16 << 20)
"""With headers and padding."""
MAX_HEADER_BYTES = 64 << 10


def unpack(archive: BinaryIO, folder: Path) -> None:
    """Write the files of a tar.gz below `folder`, which is empty.

    FlashError(upload_invalid) for paths that leave the folder, links, devices, sparse files, files given twice, damage,
    and whatever is larger or more than may be; `folder` holds a part of the files then.
    """
    stream = _Bounded(fileobj=archive)
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
            for number, member in enumerate(tar):
                if number >= MAX_MEMBERS:
                    fix = "leave out what the environment does not read"
                    raise FlashError("upload_invalid", f"the archive has more than {MAX_MEMBERS} members", fix=fix)
                _unpack_member(tar, member, folder)
        while stream.read(1 << 20):  # to the end, where gzip's checksum stands
            pass
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, RecursionError, ValueError) as error:
        fix = "make it with `tar -C FOLDER -czf FILE .` and send it again"
        raise FlashError("upload_invalid", f"that is no whole tar.gz: {error}; nothing was pushed", fix=fix) from error


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    path = member.name.removeprefix("./")
    if member.isdir():
        return  # files make the folders that they lie in
    check_path(path)
    if not member.isreg() or member.issparse():
        raise refusal(path, "is a link, a device or a sparse file", "put a regular file in its place")
    if member.size > MAX_FILE_BYTES:
        raise refusal(path, f"has {member.size:,} bytes", f"keep each file within {MAX_FILE_BYTES >> 20} MiB")
    source = tar.extractfile(member)
    assert source is not None
    try:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("xb") as target:
            shutil.copyfileobj(source, target)
    except (FileExistsError, NotADirectoryError) as error:
        raise refusal(path, "is in the archive twice, or both as a file and as a folder", "keep one") from error


class _Bounded(gzip.GzipFile):
    """A stream that ends in an error once more was read than may be: what a bomb unpacks to is never held."""

    left = MAX_UNPACKED_BYTES

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.left -= len(data)
        if self.left < 0:
            fix = f"keep all files within {MAX_TOTAL_BYTES >> 20} MiB"
            raise FlashError(
                "upload_invalid", "the archive unpacks to more than is allowed; nothing was pushed", fix=fix
            )
        return data


class _Member(tarfile.TarInfo):
    """Without long headers: tarfile would read one of any length into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in (*tarfile.SUPPORTED_TYPES, *_HEADERS) or self.type == tarfile.GNUTYPE_SPARSE:
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
