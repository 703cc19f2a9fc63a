"""What may be deleted to make room: what killed processes left, and the files of old runs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flash_mcp.protocol.paths import datasets_dir, environments_dir, scratch_prefix
from flash_mcp.protocol.records import ACTIVE, LIVE_DEPLOYMENT, Run
from flash_mcp.state.database import marks
from flash_mcp.state.removal import empty_away, move_away, run_folders
from flash_mcp.state.store import Store

LEFTOVER_S = 86_400.0
"""An unfinished push, upload or write is over long before."""
RECENT_S = 30 * 86_400.0
"""Runs that ended longer ago were swept before."""
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")
"""How the run folder names a file that it is writing."""


# -- leftovers -------------------------------------------------------------------------------------


def leftovers(store: Store) -> Iterator[Path]:
    """Files and folders that processes left when they were killed: staged pushes, partial uploads,
    files that were being written, and temporary folders of runs that ended.

    Only those of this user, and only after a day without a change."""
    before = time.time() - LEFTOVER_S
    for path in _candidates(store):
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_uid == os.getuid() and status.st_mtime < before:
            yield path


def _candidates(store: Store) -> Iterator[Path]:
    yield from store.base.glob("removed/*")
    yield from store.base.glob(".restore-*")
    for root in (environments_dir(store.base), datasets_dir(store.base)):
        for pattern in (".staged-*", ".upload-*"):
            yield from root.glob(pattern)
            yield from root.glob(f"@*/{pattern}")
    temporary = Path(tempfile.gettempdir())
    for run in ended(store, after=time.time() - RECENT_S):
        folder = Path(run.folder)
        for path in (*folder.glob(".*"), *folder.glob("*/.*")):
            if TEMPORARY.fullmatch(path.name):
                yield path
        yield from temporary.glob(f"{scratch_prefix(run.folder)}*")


def delete(path: Path) -> None:
    """Delete a file or a folder with all that it holds."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- the files of old runs -------------------------------------------------------------------------


def ended(store: Store, *, before: float | None = None, after: float = 0.0) -> list[Run]:
    """Runs that ended in this time and still have their files, the oldest first."""
    sql = f"""SELECT * FROM runs WHERE state NOT IN ({marks(ACTIVE)}) AND files_removed IS NULL
              AND ended > ? AND ended <= ? ORDER BY ended, id"""
    until = time.time() if before is None else before
    return [Run.of(row) for row in store.query(sql, [*ACTIVE, after, until])]


def referred(store: Store) -> set[tuple[str, int | None]]:
    """(run, step) of every checkpoint that is served or that another run or evaluation started
    from, as long as that one has its files.
    """
    found = {(row.run_id, row.step) for row in store.deployments(LIVE_DEPLOYMENT) if row.run_id}
    sql = """SELECT json_extract(init_adapter, '$.run_id') AS run_id,
             json_extract(init_adapter, '$.step') AS step
             FROM runs WHERE run_id IS NOT NULL AND files_removed IS NULL"""
    return found | {(row["run_id"], row["step"]) for row in store.query(sql)}


def drop_files(store: Store, run_id: str, why: str) -> bool:
    """Delete a run's files and the rollouts of its training, unless it is active or referred to.

    Its row, metrics, evaluations and events stay, with an event that says why. Returns whether it
    was done."""
    with store.transaction():
        run = store.run(run_id)
        is_used = run_id in {each for each, _ in referred(store)}
        if run.state in ACTIVE or run.files_removed is not None or is_used:
            return False
        now = time.time()
        store.execute("UPDATE main.runs SET files_removed = ? WHERE id = ?", [now, run_id])
        sql = "DELETE FROM main.rollouts WHERE run_id = ? AND split = 'train'"
        store.execute(sql, [run_id])
        store.execute("DELETE FROM main.checkpoints WHERE run_id = ?", [run_id])
        event = {"time": now, "epoch": run.attempt, "kind": "warning", "message": why}
        store.put_event(run_id, "files-removed", event)
        move_away(store, run_folders(store, run))
    empty_away(store)
    return True
