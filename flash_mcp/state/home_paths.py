"""Paths in the database. Those below the state directory are relative, so that it can be moved.

A stored path begins with HERE in place of the state directory. HERE differs from "./", so a user's
own "./data" in environment_args is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.records import Json

HERE = ".//"
PATH_COLUMNS = {
    "runs": ("folder", "environment_path", "init_adapter", "dataset", "spec", "lineage"),
    "checkpoints": ("path",),
    "environments": ("path",),
    "deployments": ("adapter_path",),
    "tournaments": ("spec",),
}
NAMES = frozenset[str]().union(*PATH_COLUMNS.values())


def to_stored(base: Path, value: Any) -> Any:
    """`value` with HERE for the state directory at the beginning of every text in it."""
    return moved(value, f"{base}/", HERE)


def from_stored(base: Path, value: Any) -> Any:
    """The inverse of `to_stored`, in a state directory that may have moved since."""
    return moved(value, HERE, f"{base}/")


def moved(value: Any, old: str, new: str) -> Any:
    """`value` with `new` for `old` at the beginning of every text in it."""
    if isinstance(value, str):
        if value.startswith(old):
            return new + value.removeprefix(old)
        return value
    if isinstance(value, dict):
        return {name: moved(item, old, new) for name, item in cast("Json", value).items()}
    if isinstance(value, list | tuple):
        return [moved(item, old, new) for item in cast("list[Any]", value)]
    return value
