"""What the files of a run folder hold, and the check that they do.

A file that is damaged (cut off, overwritten, of another type) counts as absent: `RunFolder` notes
what is wrong with it, and nobody has to expect anything but these shapes."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from functools import cache
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from environments.base import Json as Json
from flash_mcp.protocol.errors import FlashError, encodable
from flash_mcp.protocol.spec import Precision

MAX_BYTES = 64 << 20
"""The longest file that is read, but for those that hold rollouts."""
MAX_ROLLOUTS_BYTES = 2 << 30
MAX_SMALL_BYTES = 1 << 20
"""The longest heartbeat, and the longest configuration of an adapter."""
MAX_OBJECTS = 1 << 24
"""The most objects, lists and lines of a file: an empty one takes far more memory than bytes."""

MAY_PASS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOMEM, errno.EMFILE,
    errno.ENFILE,
)  # fmt: skip
"""Errors of a file system that say nothing about the file: it may be read later."""

MAX_NAME = 255
MAX_FILES = 1000
"""The most files of a checkpoint."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_NUMBER = re.compile(r"[0-9]{1,15}")


def plain_name(name: str) -> str:
    """A relative path of plain parts, which leads nowhere but below its folder. ValueError."""
    if len(name) > MAX_NAME or not all(map(_PART.fullmatch, name.split("/"))):
        raise ValueError("it is no plain relative name")
    return name


def number(name: str) -> int | None:
    """The number that a file's or folder's name is; None if it is none that we write."""
    if _NUMBER.fullmatch(name):
        return int(name)
    return None


Port = Annotated[int, Field(ge=1024, lt=65536)]
IPv4 = Annotated[str, AfterValidator(lambda text: str(IPv4Address(text)))]
RelativeName = Annotated[str, AfterValidator(plain_name)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ShortDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Text = Annotated[str, Field(max_length=100_000)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = int | float
Numbers = dict[str, Number | None]


class Damaged(ValueError):
    """The file cannot be used; the message says why."""


class File(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")  # type: ignore[misc]


class Beat(File):
    """beat.json"""

    epoch: Count
    time: NotRequired[Number]
    """When it was written, by the clock of its machine."""
    step: Count
    phase: str
    progress: NotRequired[Count]
    steps: NotRequired[Count | None]
    writes: Count
    """Files that the attempt has written."""
    held_bytes: NotRequired[Count]
    available_bytes: NotRequired[Count]


class ErrorBody(File):
    """FlashError.to_dict()"""

    code: str
    what: str
    fix: str
    values: dict[str, Any]


class RunResult(File):
    """result.N.json"""

    epoch: Count
    time: Number
    state: Literal["succeeded", "failed", "cancelled", "lost"]
    step: Count
    error: ErrorBody | None
    retryable: NotRequired[bool]


class FinalResult(RunResult):
    """A result that ends the run."""

    state: Literal["succeeded", "failed", "cancelled"]  # type: ignore[misc]


class MetricsFile(File):
    """metrics/STEP.N.json"""

    epoch: Count
    time: Number
    step: Count
    metrics: Numbers


class RolloutLine(File):
    """A line of rollouts/STEP.N.jsonl"""

    reward: NotRequired[Number]
    success: NotRequired[bool]
    index: NotRequired[Count]
    error: NotRequired[dict[str, Any] | None]


class AttemptLine(File):
    """A line of evals/STEP/EPOCH-N"""

    index: Count


class EvaluationFile(File):
    """evals/STEP.N.json"""

    epoch: Count
    time: Number
    step: Count
    summary: Numbers
    rollouts: list[dict[str, Any]]


class EventFile(File):
    """events/EPOCH-N.json"""

    epoch: Count
    time: Number
    kind: str
    message: str


class ManifestFile(File):
    """checkpoints/STEP/EPOCH-N/MANIFEST.json"""

    step: Count
    epoch: Count
    time: Number
    digest: ShortDigest
    """Of `files`."""
    files: Annotated[dict[RelativeName, Digest], Field(max_length=MAX_FILES)]
    size_bytes: Count
    optimizer_bytes: Count
    """Bytes of OPTIMIZER, a part of size_bytes. A checkpoint loses it once a newer one is saved."""
    metrics: Numbers


class Manifest(ManifestFile):
    path: str
    """The folder of the files."""


class AdapterConfig(File):
    """adapter_config.json, of which PEFT reads much more."""


class KeyFile(File):
    """keys/N.json"""

    public: Digest
    mac: Digest


class ListeningFile(File):
    """listening.N.json"""

    addresses: Annotated[list[IPv4], Field(max_length=100)]
    port: Port
    certificate: Text
    adapter: Text
    precision: Precision | None
    mac: Digest


GATEWAY_BASE_URL = "x-flash-base-url"
"""The header by which the HTTP server tells a gateway the address that its client knows."""


class GatewayFile(File):
    """gateway.N.json"""

    ports: Annotated[list[Port], Field(min_length=1, max_length=100)]
    """One for each rank that makes rollouts."""
    key: Digest


class ProbeFile(File):
    """probe.json"""

    host: Text
    version: Text
    """Of flash-mcp."""
    devices: list[Text]
    missing: list[Text]
    """Packages of the worker that are not installed."""
    cards: dict[str, Any]
    """The fields of Cards."""
    clock_s: Number
    """How much later it was there when the job started than here when it was submitted."""
    reaches_hub: NotRequired[bool]
    free_gib: NotRequired[Number]
    """On the disk of its temporary files."""
    list_lag_s: NotRequired[Number]
    """After what the node had written, a list of the storage showed it here."""


class StoredJob(File):
    """What the server reads of job.json once others may have written to it."""

    environment: NotRequired[dict[str, Any]]
    init_adapter: NotRequired[dict[str, Any] | None]
    teacher: NotRequired[dict[str, Any] | None]
    dataset: NotRequired[dict[str, Any] | None]
    code: NotRequired[dict[str, Any] | None]
    model: NotRequired[str]


Shape = TypeVar("Shape")


def decoded(text: str, shape: type[Shape]) -> Shape:
    """The JSON object in `text`; Damaged if it is none, or not of that shape."""
    try:
        body = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Damaged(f"it holds a {type(body).__name__}, not an object")
    if "\\ud" in text:  # lone surrogates have no UTF-8 form: no database takes them
        body = encodable(body)
    try:
        _adapter(shape).validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise Damaged(f"{name}: {first['msg']}") from error
    return cast(Shape, body)  # not what pydantic returns: that has other keys first


def read_local(path: Path, max_bytes: int, *, root: str = "", is_tail: bool = False) -> bytes:
    """A file's content; of a larger one its end, with `is_tail`. FileNotFoundError, OSError of
    MAY_PASS, or Damaged if it cannot be read, is too large, or does not lie below `root`: others
    may make links there.

    Opening a named pipe would wait for a writer; this does not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Damaged("it is no regular file")
            opened = Path(f"/proc/self/fd/{descriptor}").readlink()
            if root and not is_below(str(opened), root):
                raise Damaged("a link leads out of its folder")
            if is_tail:
                stream.seek(max(0, status.st_size - max_bytes))
            elif status.st_size > max_bytes:
                raise Damaged(f"it has {status.st_size} bytes, more than {max_bytes}")
            return stream.read(min(max_bytes, status.st_size))  # it allocates so many at once
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in MAY_PASS:
            raise
        raise Damaged(f"it cannot be read: {error.strerror or error}") from error


def is_below(path: str, root: str) -> bool:
    """Whether the path, which has no links, is one below `root`, which may have some."""
    return path.startswith(f"{os.path.realpath(root)}/")


@cache
def _adapter(shape: type[Shape]) -> TypeAdapter[Shape]:
    return TypeAdapter(shape)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


# -- reading adapters in PEFT format ---------------------------------------------------------------

MAX_RANK = 4096


def read_adapter_config(adapter: Path, *needed: str) -> Json:
    """The adapter_config.json of an adapter's folder. FlashError(unknown_checkpoint) if it cannot
    be read, or if one of the `needed` fields is not a number from 1 to MAX_RANK in it.
    """
    try:
        text = read_local(adapter / "adapter_config.json", MAX_SMALL_BYTES).decode()
        config = cast(Json, decoded(text, AdapterConfig))
        for name in needed:
            value = config[name]
            # A bool is an int too.
            if type(value) is not int or not 0 < value <= MAX_RANK:
                raise ValueError(f"{name} is {value!r:.40}")
    except (OSError, ValueError, KeyError) as error:
        raise FlashError(
            "unknown_checkpoint",
            f"no adapter is there: {error}",
            folder=adapter,
            fix="name a run, a run's checkpoint as RUN_ID@STEP, or a folder with a PEFT adapter; "
            "checkpoints lists a run's",
        ) from error
    return config
