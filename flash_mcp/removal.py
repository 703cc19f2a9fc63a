"""Take away runs, versions of environments and datasets that nobody wants any more, and nothing that others stand on.

    remove(store, "run-2f9k1c8d")          # Removed("run", "run-2f9k1c8d", 12_345_678)
    remove(store, "calculator@3f2a9c")     # a version of an environment, or of a dataset

Rows and files go together: the files are moved away in the transaction that deletes the rows. Whoever is killed in
between has lost nothing of another's, and calls again. For the machine's own user, who sees everything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from flash_mcp import datasets
from flash_mcp.errors import FlashError
from flash_mcp.runfolder import disk_error
from flash_mcp.store import ACTIVE, LIVE_DEPLOYMENT, Store

OF_A_RUN = ("metrics", "rollouts", "evals", "events", "checkpoints", "deployments")
"""Tables whose rows name their run in run_id."""


@dataclass(frozen=True)
class Removed:
    """What is gone, or would be."""

    kind: Literal["run", "environment", "dataset"]
    reference: str
    freed_bytes: int


@dataclass(frozen=True)
class _Found:
    kind: Literal["run", "environment", "dataset"]
    reference: str
    folders: list[Path]
    deletions: list[tuple[str, list[Any]]]


def remove(store: Store, reference: str, *, dry_run: bool = False) -> Removed:
    """Remove a run (RUN_ID), or a version of an environment or dataset (NAME@DIGEST); with `dry_run`, only look.

    FlashError(in_use | unknown_run | unknown_environment | disk_full).
    """
    away = store.base / "removed"
    with store.transaction():
        found = _find(store, reference)
        freed = sum(file.stat().st_size for folder in found.folders for file in folder.rglob("*") if file.is_file())
        if not dry_run:
            for sql, values in found.deletions:
                store.execute(sql, values)
            _move(found.folders, away)
    if not dry_run:
        shutil.rmtree(away, ignore_errors=True)  # what one that was killed left there too
    return Removed(found.kind, found.reference, freed)


def _move(folders: Iterable[Path], away: Path) -> None:
    try:
        away.mkdir(exist_ok=True)
        for folder in folders:
            folder.rename(away / uuid4().hex)
    except OSError as error:
        raise disk_error(error, away) from error


def _find(store: Store, reference: str) -> _Found:
    if "@" not in reference:
        return _run(store, reference)
    try:
        path = datasets.locate(reference, store.base)
    except FlashError:
        return _environment(store, reference)
    return _dataset(store, path)


def _run(store: Store, run_id: str) -> _Found:
    run = store.run(run_id)
    if run["state"] in ACTIVE:
        raise _in_use(run_id, f"it is {run['state']}", f"flash-mcp cancel {run_id} ends it")
    if served := [row["id"] for row in store.deployments(LIVE_DEPLOYMENT) if row["run_id"] == run_id]:
        raise _in_use(run_id, f"{served[0]} serves it", f"flash-mcp undeploy {served[0]} ends that")
    starts = [row["id"] for row in store.active_runs() if (row["init_adapter"] or {}).get("run_id") == run_id]
    if starts:
        raise _in_use(run_id, f"{starts[0]} starts from its adapter", "wait for its end, or cancel it")
    folders = [Path(run["folder"]), *(store.base / "attempts").glob(f"{run_id}-*")]
    deletions = [(f"DELETE FROM {table} WHERE run_id = ?", [run_id]) for table in OF_A_RUN]
    deletions.append(("DELETE FROM runs WHERE id = ?", [run_id]))
    return _Found("run", run_id, _own(store, folders), deletions)


def _environment(store: Store, reference: str) -> _Found:
    row = store.environment(reference)
    whole, path = f"{row['name']}@{row['digest']}", Path(row["path"])
    _check_unused(whole, store.query("SELECT id FROM runs WHERE environment_path = ?", [row["path"]]))
    values = [row["owner"], row["name"], row["digest"]]
    sql = "DELETE FROM environments WHERE owner = ? AND name = ? AND digest = ?"
    return _Found("environment", whole, _own(store, [path]), [(sql, values)])


def _dataset(store: Store, path: Path) -> _Found:
    whole = f"{path.parent.name}@{path.name}"
    _check_unused(whole, store.query("SELECT id FROM runs WHERE json_extract(dataset, '$.path') = ?", [str(path)]))
    return _Found("dataset", whole, [path], [])


def _own(store: Store, folders: Iterable[Path]) -> list[Path]:
    """Those that lie in the state directory: whatever a row names, nothing else is removed."""
    return [folder for folder in folders if folder.is_relative_to(store.base) and folder.exists()]


def _check_unused(reference: str, runs: Iterable[dict[str, Any]]) -> None:
    """A run says what it was made from as long as it is there."""
    ids = [str(row["id"]) for row in runs]
    if ids:
        more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
        raise _in_use(reference, f"{len(ids)} runs were made from it", f"remove {' '.join(ids[:5])}{more} before")


def _in_use(reference: str, why: str, fix: str) -> FlashError:
    return FlashError("in_use", f"{reference} was not removed: {why}", fix=fix)
