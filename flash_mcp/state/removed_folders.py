"""Folders of runs and deployments in the storage of targets that are to be deleted.

A folder is named here in the transaction that removes its run: whoever is killed before it is
deleted leaves the rest to the supervisor. It is looked at again later, for an attempt that was
thought to be gone may have written an object since."""

from __future__ import annotations

import time

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.store import Store

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
