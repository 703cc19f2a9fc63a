"""Paths in the database. Those below the state directory are relative, so that it can be moved.

A stored path begins with HERE in place of the state directory. HERE is itself a relative path, so a
supervisor of an older version, whose working directory is the state directory, can use it
unchanged. It differs from "./", so a user's own "./data" in environment_args is left alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.records import Json
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.sqlite import Database

HERE = ".//"
PATH_COLUMNS = {
    "runs": ("folder", "environment_path", "init_adapter", "dataset", "spec"),
    "checkpoints": ("path",),
    "environments": ("path",),
    "deployments": ("adapter_path",),
}
NAMES = frozenset(name for names in PATH_COLUMNS.values() for name in names)


def to_stored(base: Path, value: Any) -> Any:
    """`value` with HERE for the state directory at the beginning of every text in it."""
    return moved(value, f"{base}/", HERE)


def from_stored(base: Path, value: Any) -> Any:
    """The inverse of `to_stored`, in a state directory that may have moved since."""
    return moved(value, HERE, f"{base}/")


def moved(value: Any, old: str, new: str) -> Any:
    """`value` with `new` for `old` at the beginning of every text in it."""
    if isinstance(value, str):
        return new + value.removeprefix(old) if value.startswith(old) else value
    if isinstance(value, dict):
        return {name: moved(each, old, new) for name, each in cast("Json", value).items()}
    if isinstance(value, list | tuple):
        return [moved(each, old, new) for each in cast("list[Any]", value)]
    return value


def make_relative(db: Database, base: Path | None = None) -> None:
    """Rewrite what versions before this one stored: absolute paths, in the state directory `base`
    and in the one where the database was written."""
    homes = {base, *_homes(db)}
    for table, columns in PATH_COLUMNS.items():
        for row in _rows(db, f"SELECT rowid AS place, {', '.join(columns)} FROM main.{table}"):
            for column in columns:
                stored = row[column]
                changed = stored
                for home in filter(None, homes):
                    changed = _relative_text(home, changed)
                if changed != stored:
                    sql = f"UPDATE main.{table} SET {column} = ? WHERE rowid = ?"
                    db.conn.execute(sql, [changed, row["place"]])


def _relative_text(home: Path, text: str | None) -> str | None:
    """A column as it is stored: a path, or JSON with paths in it."""
    if text is None or not text.startswith("{"):
        return to_stored(home, text)
    return json.dumps(to_stored(home, json.loads(text)), ensure_ascii=False, separators=(",", ":"))


def _homes(db: Database) -> set[Path]:
    """The state directories that absolute paths name: by the folders of runs, HOME/runs/ID, or, if
    there are none, by those of environments, HOME/environments/[@OWNER/]NAME/DIGEST."""
    runs = _rows(db, "SELECT folder AS path, '/runs/' || id AS below FROM main.runs")
    sql = f"""SELECT path, '/environments/' || CASE WHEN owner = '{LOCAL_OWNER}' THEN ''
              ELSE '@' || owner || '/' END || name || '/' || digest AS below
              FROM main.environments"""
    for rows in (runs, _rows(db, sql)):
        homes = {_before(row["path"], row["below"]) for row in rows} - {""}
        if homes:
            return {Path(home) for home in homes}
    return set()


def _before(path: str, below: str) -> str:
    return path.removesuffix(below) if path.startswith("/") and path.endswith(below) else ""


def _rows(db: Database, sql: str) -> list[Json]:
    return list(cast("Iterable[Json]", db.query(sql)))  # pyright: ignore[reportUnknownMemberType]
