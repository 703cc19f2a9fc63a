"""targets.toml in FLASH_HOME: the places beyond this machine where runs may train.
docs/targets.md has its fields.

`flash-mcp target` writes it. The supervisor reads a target's table when its first run starts.
Values in it are seen by engines and their users: keys of a store belong into `env_file` on the
nodes."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import shlex
import tomllib
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from environments import doors
from environments.settings import read_small
from flash_mcp.protocol.artifacts import RUN_FOLDERS
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.spec import AUTO, LOCAL_TARGET, explain

FILE = "targets.toml"
KEY_FILE = "targets.key"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
HEADER = re.compile(r"\s*\[\s*([^].\s]+)\s*([].])")
"""How a table begins, its name, and what comes after it: a dot where it is a table below."""
RESERVED = (LOCAL_TARGET, AUTO)
ENGINES = "flash_mcp.targets"
"""The entry points of engines: subclasses of supervisor.launch.base.Launcher."""
STRICT = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Cards(BaseModel):
    """What a node gives an attempt to compute with."""

    model_config = STRICT

    name: str
    memory_gib: Annotated[float, Field(gt=0)]
    """Of one card; of the machine if it has none."""
    kind: Literal["gpu", "cpu"] = "gpu"
    count: Annotated[int, Field(ge=1)] = 1
    """Cards of a node."""

    def __str__(self) -> str:
        number = f"{self.count} x " if self.count > 1 else ""
        return f"{number}{self.name}, {self.memory_gib:g} GiB"


class TargetSettings(BaseModel):
    """One table of targets.toml."""

    model_config = STRICT

    engine: str
    """Who gives attempts a machine: slurm, ray, sky, or what another package brings."""
    storage: str
    """Where run folders and artifacts lie: a URL of a store, or the absolute path of a folder that
    the server and all nodes share."""
    setup: Literal["path", "image", "uv"] = "path"
    """How nodes get flash-mcp. path: `python` has it. image: so has that of a container, which
    `options` or the cluster start. uv: attempts bring the server's own version, and uv on the node
    installs it once, with the packages of [cpu] or [gpu]."""
    python: str = ""
    """Interpreter on the nodes; default python3, and with setup uv one that uv finds. It may be a
    command, such as `apptainer exec --nv flash.sif python3`."""
    models: Literal["node", "server"] = "node"
    """Who fetches base models of the catalog and the hub. server: it sends them as artifacts, once
    for each node's cache. So does `target add` where the node of its job does not reach the hub."""
    home: str | None = None
    """FLASH_HOME on the nodes; by default a folder of each node's own. It holds caches."""
    env: dict[str, str] = {}
    """Variables of the attempts. Other users of the engine may see them."""
    env_file: str | None = None
    """A shell file on the nodes that sets others, such as the keys of the store."""
    ssh: str = ""
    """Host that has the engine's commands; by default the server's machine."""
    nodes: list[IPv4Network] = []
    """Networks such as 10.1.0.0/16: model servers of nodes are reached nowhere else. By default
    only where the engine says that the node is."""
    options: list[str] = []
    """Arguments of sbatch. For a run with gpus=N, those that ask for GPUs ask for N."""
    owners: dict[str, list[str]] = {}
    """More of them for the runs of an owner, such as ["--account=vision", "--qos=low"]."""
    address: str = ""
    """URL of Ray's dashboard, such as http://head:8265, or of SkyPilot's API server."""
    token_file: str | None = None
    """File on the server's machine with the token of Ray's cluster, or of SkyPilot's API server."""
    resources: dict[str, bool | int | float | str] = {}
    """What an attempt takes of Ray's cluster: CPU, GPU, or the cluster's own; default one CPU. With
    SkyPilot the resources of a task: infra, use_spot, accelerators and others."""
    slots: Annotated[int, Field(ge=1, le=10_000)] = 8
    """GPUs of the attempts that are submitted at once; one without a GPU counts as one."""
    cache_gib: Annotated[float, Field(gt=0)] = 50.0
    """GiB of artifacts that a node keeps."""
    price_per_hour: Annotated[float | None, Field(gt=0)] = None
    """Price of an hour of one attempt, with each GPU."""
    cards: Cards | None = None
    """What its nodes have, for target="auto"; the job that proves the target finds it."""

    @field_validator("engine")
    @classmethod
    def _is_brought(cls, engine: str) -> str:
        doors.find(ENGINES, engine)
        return engine

    @field_validator("storage")
    @classmethod
    def _is_place(cls, storage: str) -> str:
        if not storage.startswith("/") and "://" not in storage:
            raise ValueError("name a URL such as s3://BUCKET/PREFIX, or an absolute path")
        if storage.startswith("file://"):
            return storage.removeprefix("file://").rstrip("/")
        return storage.rstrip("/")

    @field_validator("python")
    @classmethod
    def _is_command(cls, python: str) -> str:
        shlex.split(python)  # ValueError if a quotation does not end
        return python

    @field_validator("env")
    @classmethod
    def _are_names(cls, env: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in env if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
            raise ValueError(f"{wrong[0]!r} is no name of a variable")
        return env

    @model_validator(mode="after")
    def _suits_its_engine(self) -> Self:
        if self.setup == "uv" and len(shlex.split(self.python)) > 1:
            raise ValueError(
                "with setup = uv, python is an interpreter or a version, no command: quote a path "
                "that has spaces"
            )
        self.launcher.check(self)
        return self

    @property
    def launcher(self) -> Any:
        return doors.find(ENGINES, self.engine)

    def folder_of(self, run_id: str) -> str:
        """Where the run's folder lies. HOME/runs/ID is what a state directory's own folders are
        called: their paths move with it, and these must not.
        """
        return f"{self.storage}/{RUN_FOLDERS}/{run_id}"


def targets(base: Path) -> dict[str, TargetSettings]:
    path = base / FILE
    fix = f"correct {path}; docs/targets.md has its fields"
    try:
        document = tomllib.loads(read_small(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        what = f"{FILE} cannot be read: {error}"
        raise FlashError("targets_invalid", what, path=path, fix=fix) from error
    return {name: _settings(name, body, fix) for name, body in document.items()}


def find_target(base: Path, name: str) -> TargetSettings:
    existing = targets(base)
    if name in existing:
        return existing[name]
    what = f"there is no target {name!r}{did_you_mean(name, [*existing, LOCAL_TARGET])}"
    names = ", ".join([LOCAL_TARGET, *existing])
    fix = f"use one of: {names}; `flash-mcp target add` makes others"
    raise FlashError("unknown_target", what, target=name, fix=fix)


def tag_of(base: Path) -> str:
    """What an engine's jobs of this state directory are marked with. A copy of the directory
    elsewhere has another tag, so that neither ends the other's jobs.
    """
    where = f"{base.resolve()}".encode()
    return f"flash-mcp-{hmac.digest(key_of(base), where, 'sha256').hex()[:16]}"


def key_of(base: Path) -> bytes:
    """Random bytes that only this state directory has; the supervisor makes them."""
    path = base / KEY_FILE
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return bytes.fromhex(path.read_text())


def new_target(base: Path, name: str, fields: dict[str, Any]) -> TargetSettings:
    fix = "correct the option; see flash-mcp target add --help"
    settings = _settings(name, fields, fix)
    if name in targets(base):
        what = f"there is a target {name!r} already"
        fix = f"choose another name, or `flash-mcp target remove {name}` first"
        raise FlashError("invalid_argument", what, fix=fix)
    return settings


def write_target(base: Path, name: str, settings: TargetSettings) -> None:
    path = base / FILE
    before = f"{path.read_text().rstrip()}\n\n" if path.exists() else ""
    # TOML's texts, lists and numbers are written as in JSON
    lines = [f"[{name}]"]
    for field, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        lines.append(_line(field, value))
    write_private(path, before + "\n".join(lines) + "\n")


def note_cards(base: Path, name: str, cards: Cards) -> None:
    path = base / FILE
    line = _line("cards", cards.model_dump(exclude_defaults=True))
    lines = path.read_text().splitlines(keepends=True)
    for number, text in enumerate(lines):
        if _begun(text) == (name, "]"):
            lines[number] = f"{text.rstrip()}\n{line}\n"
    write_private(path, "".join(lines))


def remove_target(base: Path, name: str) -> None:
    find_target(base, name)
    path = base / FILE
    kept: list[str] = []
    is_kept = True
    for line in path.read_text().splitlines(keepends=True):
        if begun := _begun(line):
            is_kept = begun[0] != name
        if is_kept:
            kept.append(line)
    write_private(path, "".join(kept))


def _settings(name: str, body: Any, fix: str) -> TargetSettings:
    if not NAME.fullmatch(name) or name in RESERVED:
        what = f"{name!r} cannot be a target's name"
        fix = f"use small letters, digits and hyphens; {' and '.join(RESERVED)} are taken"
        raise FlashError("targets_invalid", what, target=name, fix=fix)
    if not isinstance(body, dict):
        what = f"{name} is no table"
        raise FlashError("targets_invalid", what, fix=f"write [{name}] above its values")
    try:
        return TargetSettings(**cast("dict[str, Any]", body))
    except ValidationError as error:
        raise FlashError("targets_invalid", f"{name}: {explain(error)}", fix=fix) from error


def _begun(line: str) -> tuple[str, str] | None:
    """The target whose table begins in this line of targets.toml, and what comes after its name."""
    header = HEADER.match(line)
    if header:
        return header[1].strip("\"'"), header[2]
    return None


def _toml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)  # TOML knows no surrogates
    # It wants these escaped, or we would take them for line ends.
    return re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _line(field: str, value: Any) -> str:
    if not isinstance(value, dict):
        return f"{field} = {_toml(value)}"
    table = cast("dict[str, str | float]", value)
    pairs = ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in table.items())
    return f"{field} = {{ {pairs} }}"
