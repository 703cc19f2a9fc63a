"""Folders of runs and deployments in the storage of targets that are to be deleted.

A folder is named here in the transaction that removes its run: whoever is killed before it is
deleted leaves the rest to the supervisor. It is looked at again later, for an attempt that was
thought to be gone may have written an object since."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flash_mcp.state.store import Store

AGAIN_AFTER_S = (3600.0, 86_400.0)
"""From each look at a removed folder to the next one."""


@dataclass(frozen=True)
class RemovedFolder:
    """A folder whose run was removed, and how often it was deleted."""

    place: str
    looks: int


def add_removed(store: Store, place: str, target: str) -> None:
    """Name a folder. For a run's, the caller is in the transaction that removes the run."""
    columns = "(place, target, looks, due)"
    sql = f"INSERT OR REPLACE INTO main.removed_folders {columns} VALUES (?, ?, 0, ?)"
    store.execute(sql, [place, target, time.time()])


def due_folders(store: Store, target: str) -> list[RemovedFolder]:
    """Those of the target that are to be deleted now, the longest due first."""
    sql = "SELECT place, looks FROM removed_folders WHERE target = ? AND due <= ? ORDER BY due"
    return [RemovedFolder(**row) for row in store.query(sql, [target, time.time()])]


def was_deleted(store: Store, folder: RemovedFolder) -> None:
    """Look at the folder again later, or forget it after the last look."""
    if folder.looks == len(AGAIN_AFTER_S):
        store.execute("DELETE FROM main.removed_folders WHERE place = ?", [folder.place])
        return
    sql = "UPDATE main.removed_folders SET looks = looks + 1, due = ? WHERE place = ?"
    due = time.time() + AGAIN_AFTER_S[folder.looks]
    store.execute(sql, [due, folder.place])


def targets_to_clear(store: Store) -> set[str]:
    """Targets with a folder that is to be deleted now."""
    sql = "SELECT DISTINCT target FROM removed_folders WHERE due <= ?"
    return set(store.column(sql, [time.time()]))
