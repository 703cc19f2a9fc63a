"""Remove runs, versions of environments and datasets, exports, and nothing that others depend on.

    remove(store, "run-2f9k1c8d")            # Removed("run", "run-2f9k1c8d", "local", 12_345_678)
    remove(store, "calculator@3f2a9c")       # a version of an environment, or of a dataset
    remove(store, "alice/calculator@3f2a9c") # another owner's
    remove(store, "run-2f9k1c8d-24-merged")  # an export; a run's exports go with it, too

Rows and files go together: the transaction that deletes the rows also moves the files away. If the
process is killed in between, the same call finishes the removal. Only the local owner, who sees
everything, may call it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from flash_mcp.protocol import recordings
from flash_mcp.protocol.artifacts import delete_run
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.paths import exports_dir
from flash_mcp.protocol.records import ACTIVE, ENDED, LIVE_DEPLOYMENT, Run
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import datasets
from flash_mcp.state.database import marks
from flash_mcp.state.disk import size_of
from flash_mcp.state.locks import deleting
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.runs import REMOTE_RETRY_S, folder_of
from flash_mcp.state.store import Store

OF_A_RUN = ("metrics", "rollouts", "evals", "events", "checkpoints", "deployments", "logs")
"""Tables whose rows name their run in run_id."""
Kind = Literal["run", "environment", "dataset", "export"]


@dataclass(frozen=True)
class Removed:
    kind: Kind
    reference: str
    owner: str
    freed_bytes: int
    used_by: list[str]
    """Ended runs and evaluations that started from it. They stay, and still name it."""
    elsewhere: str | None = None
    """Where its files stay: only those in the state directory are removed."""


@dataclass(frozen=True)
class _Item:
    kind: Kind
    reference: str
    owner: str
    folders: list[Path]
    deletions: list[tuple[str, list[Any]]]
    used_by: list[str] = field(default_factory=list[str])
    elsewhere: str | None = None
    on_target: Run | None = None
    """A run whose folder lies in the storage of a target."""


@dataclass(frozen=True)
class _Version:
    kind: Literal["environment", "dataset"]
    owner: str
    name: str
    digest: str
    path: Path

    @property
    def reference(self) -> str:
        """Under which `remove` takes it."""
        owner = "" if self.owner == LOCAL_OWNER else f"{self.owner}/"
        return f"{owner}{self.name}@{self.digest}"


def remove(store: Store, reference: str, *, dry_run: bool = False) -> Removed:
    """Remove a run (RUN_ID), a version of an environment or dataset, or an export; with `dry_run`,
    only look.

    A version is the local owner's as NAME@DIGEST, another's as OWNER/NAME@DIGEST; six characters of
    the digest do. A run on a target is removed from its storage too; what other runs need stays
    there. FlashError(in_use | unknown_run | unknown_environment | unknown_dataset | disk_full
    | store_unreachable)."""
    with deleting(store.base) as may_delete, store.transaction():
        if not (may_delete or dry_run):
            raise _in_use(reference, "a backup is being made", "repeat it after the backup")
        owner, _, version = reference.rpartition("/")
        name, at, digest = version.partition("@")
        versions = _versions(store, name)
        if not at and not versions:
            result = _export(store, reference) or _run(store, reference)
        else:
            if not versions:
                store.environment(version)  # there is none: what it raises names the nearest
            mine = [item for item in versions if item.owner == (owner or LOCAL_OWNER)]
            results = [item for item in mine if len(digest) >= 6 and item.digest.startswith(digest)]
            if len(results) != 1:
                code = f"unknown_{(mine or versions)[0].kind}"
                existing = ", ".join(item.reference for item in (mine or versions)[:5])
                what = f"{reference!r} is not one version"
                raise FlashError(code, what, fix=f"name the version: {existing}")
            result = _version(store, results[0])
        stored = result.on_target and folder_of(result.on_target)
        if stored and not dry_run:
            stored.newest_epoch()  # a store that does not answer keeps the row
        freed = sum(map(size_of, result.folders))
        if not dry_run:
            for sql, values in result.deletions:
                store.execute(sql, values)
            # The rows first: one that stays would name files that are gone.
            move_away(store, result.folders)
            if result.on_target:
                add_removed(store, result.on_target)
    if not dry_run:
        empty_away(store)
        if stored:
            delete_run(stored, REMOTE_RETRY_S)
    return Removed(
        result.kind, result.reference, result.owner, freed, result.used_by, result.elsewhere
    )


def ended_runs(
    store: Store, *, older_than_s: float | None = None, only_failed: bool = False
) -> list[str]:
    states = ("failed",) if only_failed else ENDED
    before = time.time() - (older_than_s or 0.0)
    sql = f"""SELECT id FROM runs WHERE state IN ({marks(states)}) AND ended <= ? AND serves IS NULL
              ORDER BY ended, id"""
    return store.column(sql, [*states, before])


def move_away(store: Store, folders: Iterable[Path]) -> None:
    """Move folders to where `empty_away` deletes them: a folder is moved whole or not at all."""
    away = store.base / "removed"
    try:
        away.mkdir(exist_ok=True)
        for folder in folders:
            folder.rename(away / uuid4().hex)
    except OSError as error:
        raise disk_error(error, away) from error


def empty_away(store: Store) -> None:
    """Delete what was moved away, also by a process that was killed before it did."""
    shutil.rmtree(store.base / "removed", ignore_errors=True)


def _versions(store: Store, name: str) -> list[_Version]:
    """Those of every owner, the local one's first."""
    results: list[_Version] = []
    for row in store.environments():
        if row.name == name:
            results.append(_Version("environment", row.owner, name, row.digest, Path(row.path)))
    for owner, path in datasets.everyones(store.base):
        if path.parent.name == name:
            results.append(_Version("dataset", owner, name, path.name, path))
    return sorted(results, key=lambda version: version.owner != LOCAL_OWNER)


def _run(store: Store, run_id: str) -> _Item:
    run = store.run(run_id)
    if run.state in ACTIVE:
        raise _in_use(run_id, f"it is {run.state}", f"flash-mcp cancel {run_id} ends it")
    for row in store.deployments(LIVE_DEPLOYMENT):
        if row.run_id == run_id:
            raise _in_use(run_id, f"{row.id} serves it", f"flash-mcp undeploy {row.id} ends that")
    # A run that has not begun still reads the adapter.
    for row in store.active_runs():
        adapters = (row.init_adapter, row.lineage.get("teacher"))
        if any(adapter.get("run_id") == run_id for adapter in filter(None, adapters)):
            what = f"{row.id} needs its adapter"
            raise _in_use(run_id, what, "wait for its end, or cancel it")
    sql = """SELECT id FROM runs WHERE json_extract(init_adapter, '$.run_id') = ?1
             OR json_extract(lineage, '$.teacher.run_id') = ?1 ORDER BY created"""
    used_by = store.column(sql, [run_id])
    deletions = [(f"DELETE FROM {table} WHERE run_id = ?", [run_id]) for table in OF_A_RUN]
    deletions.append(("DELETE FROM runs WHERE id = ?", [run_id]))
    folders = [*run_folders(store, run), *(store.base / "adapters").glob(f"{run_id}-*")]
    for row in store.deployments():
        recorded = store.base / recordings.FOLDER / row.id
        if row.run_id == run_id and recorded.exists():
            folders.append(recorded)
    result = _Item("run", run_id, run.owner, folders, deletions, used_by)
    if run.target != LOCAL_TARGET:
        return replace(result, on_target=run)
    return replace(result, elsewhere=elsewhere(store, run.folder))


def run_folders(store: Store, run: Run) -> list[Path]:
    attempts = (store.base / "attempts").glob(f"{run.id}-*")
    return own(store, [Path(run.folder), *attempts, *exports_of(store, run.id)])


def exports_of(store: Store, run_id: str) -> list[Path]:
    return list(exports_dir(store.base).glob(f"{run_id}-*"))


def _export(store: Store, name: str) -> _Item | None:
    """The export whose folder has this name. That of an export under way is not there yet."""
    for folder in exports_dir(store.base).glob("*/"):
        if folder.name == name:
            result, lock = folder.with_name(f"{name}.json"), folder.with_name(f"{name}.lock")
            return _Item("export", name, LOCAL_OWNER, own(store, [folder, result, lock]), [])
    return None


def _version(store: Store, item: _Version) -> _Item:
    stored = store.encode("path", item.path)
    if item.kind == "dataset":
        sql = "SELECT id FROM runs WHERE json_extract(dataset, '$.path') = ?"
        _check_unused(item.reference, store.column(sql, [stored]))
        return _Item("dataset", item.reference, item.owner, [item.path], [])
    sql = """SELECT id FROM runs WHERE environment_path = ?1 OR EXISTS (
             SELECT 1 FROM json_each(lineage, '$.mixture')
             WHERE json_extract(value, '$.path') = ?1)"""
    _check_unused(item.reference, store.column(sql, [stored]))
    values = [item.owner, item.name, item.digest]
    deletion = ("DELETE FROM environments WHERE owner = ? AND name = ? AND digest = ?", values)
    folders, outside = own(store, [item.path]), elsewhere(store, item.path)
    return _Item("environment", item.reference, item.owner, folders, [deletion], elsewhere=outside)


def own(store: Store, folders: Iterable[Path]) -> list[Path]:
    """Those that exist in the state directory: nothing else is removed, whatever a row names."""
    return [folder for folder in folders if folder.is_relative_to(store.base) and folder.exists()]


def elsewhere(store: Store, path: str | Path) -> str | None:
    """The path or URL, if it is not in the state directory: another machine may use what is there,
    and nothing there is deleted.
    """
    if Path(path).is_relative_to(store.base):
        return None
    return str(path)


def _check_unused(reference: str, ids: Sequence[str]) -> None:
    """A run says what it was made from as long as it is there."""
    if ids:
        more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
        fix = f"remove {' '.join(ids[:5])}{more} before"
        raise _in_use(reference, f"{len(ids)} runs were made from it", fix)


def _in_use(reference: str, why: str, fix: str) -> FlashError:
    return FlashError("in_use", f"{reference} was not removed: {why}", fix=fix)


# -- folders of runs and deployments in the storage of targets that are to be deleted --------------
# A folder is named here in the transaction that removes its run: whoever is killed before it is
# deleted leaves the rest to the supervisor. It is looked at again later, for an attempt that was
# thought to be gone may have written an object since.

AGAIN_AFTER_S = (3600.0, 86_400.0)
"""From each look at a removed folder to the next one."""


def add_removed(store: Store, run: Run) -> None:
    """Name the folder of a run that is removed, or of a server that ended, if a target has it. For
    a run's, the caller is in the transaction that removes the run."""
    if run.target == LOCAL_TARGET:
        return
    columns = "(place, target, looks, due)"
    sql = f"INSERT OR REPLACE INTO main.removed_folders {columns} VALUES (?, ?, 0, ?)"
    store.execute(sql, [run.folder, run.target, time.time()])


def due_folders(store: Store, target: str) -> list[tuple[str, int]]:
    """(place, times deleted before) of the target's that are to be deleted now, the longest due
    first."""
    sql = "SELECT place, looks FROM removed_folders WHERE target = ? AND due <= ? ORDER BY due"
    return store.two_columns(sql, [target, time.time()])


def was_deleted(store: Store, place: str, looks: int) -> None:
    """Look at the folder again later, or forget it after the last look."""
    if looks == len(AGAIN_AFTER_S):
        store.execute("DELETE FROM main.removed_folders WHERE place = ?", [place])
        return
    sql = "UPDATE main.removed_folders SET looks = looks + 1, due = ? WHERE place = ?"
    store.execute(sql, [time.time() + AGAIN_AFTER_S[looks], place])


def postpone(store: Store, place: str) -> None:
    """Try again later to delete a folder that cannot be deleted now."""
    sql = "UPDATE main.removed_folders SET due = ? WHERE place = ?"
    store.execute(sql, [time.time() + AGAIN_AFTER_S[0], place])


def targets_to_clear(store: Store) -> set[str]:
    """Targets with a folder that is to be deleted now."""
    sql = "SELECT DISTINCT target FROM removed_folders WHERE due <= ?"
    return set(store.column(sql, [time.time()]))
