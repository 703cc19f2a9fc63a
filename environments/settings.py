"""settings.toml in FLASH_HOME: what the operator of this machine allows.

    [environments]
    network = ["search", "alice/browser"]
    without_file_protection = false

Only a person or program that may write to FLASH_HOME can change it: no tool does. It is read anew
whenever a value is needed, so a change holds for the next process that starts."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

FILE = "settings.toml"
MAX_BYTES = 1 << 20  # the size of a file that is read whole
LOCAL_OWNER = "local"
KINDS: dict[Any, str] = {tuple: "a list of texts", str: "a text", bool: "true or false"}


def state_directory() -> Path:
    """FLASH_HOME."""
    return Path(os.environ.get("FLASH_HOME") or "~/.flash-mcp").expanduser().absolute()


def machine_directory() -> Path:
    """The part of FLASH_HOME that belongs to this machine, where machines may share FLASH_HOME: a
    target's nodes. FLASH_MACHINE names it.
    """
    machine = os.environ.get("FLASH_MACHINE")
    return state_directory() / "machines" / machine if machine else state_directory()


@dataclass(frozen=True)
class EnvironmentSettings:
    """What environment code may have."""

    network: tuple[str, ...] = ()
    """Environments that get the network if their environment.toml asks for it: NAME, OWNER/NAME
    for another owner's, or "*" for all."""
    without_file_protection: bool = False
    """Run environment code also where the kernel cannot keep it from this user's files."""

    memory_gib: float = 0.0
    """GiB of memory that one environment may ask for; by default half of the machine's."""
    processes: int = 4096  # processes and threads that one environment may ask for
    file_gib: float = 64.0  # GiB of one file that an environment may ask for
    at_once: int = 0
    """Environments that run at the same time on this machine; by default one for each GiB of its
    memory, and at least 16."""
    at_once_per_owner: int = 8  # the same, for each owner over HTTP

    @property
    def most_memory_gib(self) -> float:
        return self.memory_gib or _machine_gib() / 2

    @property
    def most_at_once(self) -> int:
        return self.at_once or max(16, int(_machine_gib()))

    def most_of(self, owner: str) -> int:
        if owner == LOCAL_OWNER:
            return self.most_at_once
        return min(self.most_at_once, self.at_once_per_owner)

    def grants_network(self, identity: str) -> bool:
        return "*" in self.network or identity in self.network

    build_from_source: tuple[str, ...] = ()
    """Packages of a requirements.txt that may be built if they have no wheel, or "*" for all. A
    build runs code of the package's authors."""
    interpreters_gib: float = 20.0  # disk for the packages of all environments together


@dataclass(frozen=True)
class DiskSettings:
    """How much of the disk runs and owners may take. A default of 0 is no limit.

    A number in the file is above 0."""

    optimizer_days: float = 30.0
    """Days after its end in which a run keeps its optimizer's state, which only training on exactly
    where it stopped needs."""
    run_days: float = 0.0
    """Days after its end in which a run keeps its files: checkpoints, logs, rollouts of its
    training."""
    total_gib: float = 0.0
    """GiB that all run folders may take. Beyond it the runs that ended first lose their files."""
    uploads_gib: float = 0.0
    """GiB of environments that an owner over HTTP may store; by default serve's
    --environment-mib."""
    datasets_gib: float = 2.0  # GiB of datasets that an owner over HTTP may store
    exports_gib: float = 64.0  # GiB of exports that an owner over HTTP may store


@dataclass(frozen=True)
class ServerSettings:
    """What `flash-mcp serve --http` may take and give. It reads this once, at its start."""

    connections: int = 512
    """Open connections. At most half of the files that the process may open."""
    connections_per_address: int = 128
    """Open connections from one address on which no request with a token came yet."""
    streams_per_owner: int = 128
    """Answers that an owner's clients keep open, to be told what happens."""
    proxies: tuple[str, ...] = ()
    """Addresses of reverse proxies whose X-Forwarded-Proto and X-Forwarded-For are believed."""
    secrets: tuple[str, ...] = ()
    """Variables of the server's environment that the machine's own user may name as secrets over
    HTTP. The tokens of other owners say which ones those may name."""


@dataclass(frozen=True)
class ServingSettings:
    """How long deployments live."""

    idle_minutes: float = 60.0
    """Minutes without a request to its server after which a deployment ends; deploy may set
    others."""
    record_mib: float = 64.0  # MiB of requests that deploy(record=true) keeps for each deployment
    record_days: float = 30.0  # days after which a recorded request is deleted
    record_redact: tuple[str, ...] = ("mail", "card", "key")
    """What is replaced in recorded texts: mail addresses, numbers of cards, keys of services, and
    regular expressions of the operator's."""


@dataclass(frozen=True)
class CostSettings:
    """What the work of runs costs."""

    price_per_hour: float = 0.0  # price of an hour in which a run works; by default none is shown
    currency: str = ""  # what stands after a price, such as EUR
    owner_per_day: float = 0.0
    """What an owner's runs, and deployments on targets, may cost within 24 hours before the next
    ones wait or are refused; by default there is no limit."""


@dataclass(frozen=True)
class WorkerSettings:
    """Processes that train and evaluate on this machine."""

    keep_warm: bool = True
    """While nothing runs, keep a worker whose packages are imported, for the next run."""


@dataclass(frozen=True)
class Settings:
    """The whole file. A section or value that is left out has its default."""

    environments: EnvironmentSettings = EnvironmentSettings()
    disk: DiskSettings = DiskSettings()
    server: ServerSettings = ServerSettings()
    serving: ServingSettings = ServingSettings()
    cost: CostSettings = CostSettings()
    workers: WorkerSettings = WorkerSettings()


def _machine_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def identity(owner: str, name: str) -> str:
    """How this file names an owner's environment: NAME, or OWNER/NAME for one of others."""
    return name if owner == LOCAL_OWNER else f"{owner}/{name}"


def load_settings(home: Path | None = None) -> Settings:
    """Read the file. ValueError names what is wrong in a file that cannot be used."""
    return read_toml(Settings, (home or state_directory()) / FILE)


def read_toml(kind: type[T], path: Path) -> T:
    """A dataclass of tables, texts, lists of texts, numbers and switches from a TOML file; its
    defaults if there is no such file. ValueError names what is wrong in a file that cannot be used.
    """
    import tomllib  # noqa: PLC0415  the processes of the sandbox do without it

    try:
        document = tomllib.loads(read_small(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        document = {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    return _fill(kind, document, path.name)


def read_small(path: Path) -> bytes:
    """A file of at most MAX_BYTES. OSError for a pipe or device, whose reading may not end."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"it has more than {MAX_BYTES:,} bytes")
    return content


def _fill(kind: type[T], document: dict[str, Any], where: str) -> T:
    defaults = {field.name: field.default for field in fields(kind)}
    if unknown := ", ".join(sorted(set(document) - set(defaults))):
        raise ValueError(f"{where} has unknown keys {unknown}; it may have: {', '.join(defaults)}")
    values = {
        name: _checked(value, defaults[name], f"{where}: {name}")
        for name, value in document.items()
    }
    return kind(**values)


def _checked(value: object, default: Any, where: str) -> Any:
    """The value if it is of the default's kind."""
    if is_dataclass(default) and not isinstance(default, type) and isinstance(value, dict):
        return _fill(type(default), cast("dict[str, Any]", value), where)
    kind = cast("Any", type(default))
    if kind is tuple and isinstance(value, list):
        texts = cast("list[object]", value)
        if all(isinstance(text, str) for text in texts):
            return tuple(texts)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    # A bool is an int too. Infinity and NaN are no limits.
    is_number = isinstance(value, kind | int) and not isinstance(value, bool)
    if kind in (int, float) and is_number and 0 < cast("float", value) < math.inf:
        return cast("float", value)
    what = "a table" if is_dataclass(default) else KINDS.get(kind, "a number above 0")
    raise ValueError(f"{where} must be {what}, got {value!r:.80}")
