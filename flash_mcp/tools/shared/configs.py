"""Config files of a run: TOML files, of which a later one wins, and the `.env` beside each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from pydantic import WithJsonSchema

from flash_mcp.protocol.errors import expanded
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.spec import read_toml

ConfigFiles = Annotated[
    str | list[str] | None, WithJsonSchema({"type": "array", "items": {"type": "string"}})
]
"""One file may stand alone; the schema names the one form that it needs."""


@dataclass(frozen=True)
class Configs:
    fields: Json
    files: dict[str, str]
    """{field: the last file that has it}"""
    env_files: list[str]
    """The files named .env, whose variables `secrets` may name; the last comes first."""


def read_configs(config: ConfigFiles) -> Configs:
    """The files' fields, `joined`. FlashError(invalid_argument) names the file."""
    paths = [config] if isinstance(config, str) else config or []
    fields: Json = {}
    files: dict[str, str] = {}
    variables: list[str] = []
    for name in paths:
        path = expanded(name)
        later = read_toml(path)
        if "seed" in later:
            fields.pop("seeds", None)
        fields = joined(fields, later)
        files |= dict.fromkeys(later, name)
        variables = [*env_files(path.parent), *variables]
    return Configs(fields, files, variables)


def joined(fields: Json, later: Json) -> Json:
    """Both; the later value where both have one. Tables, such as environment_args, are joined key
    by key.
    """
    result = dict(fields)
    for name, value in later.items():
        earlier = fields.get(name)
        if isinstance(earlier, dict) and isinstance(value, dict):
            value = joined(cast("Json", earlier), cast("Json", value))
        result[name] = value
    return result


def env_files(*folders: Path) -> list[str]:
    files = [folder.absolute() / ".env" for folder in folders]
    return [str(file) for file in files if file.is_file()]
