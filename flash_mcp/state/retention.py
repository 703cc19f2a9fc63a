"""What may be deleted to make room: what killed processes left, and the files of old runs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flash_mcp.judgement.comparison import compare_evaluations
from flash_mcp.protocol.paths import (
    datasets_dir,
    environments_dir,
    exports_dir,
    runs_dir,
    scratch_prefix,
)
from flash_mcp.protocol.records import ACTIVE, LIVE_DEPLOYMENT, Checkpoint, Evaluation, Run
from flash_mcp.protocol.spec import LOCAL_TARGET, RunSpec
from flash_mcp.state.database import marks
from flash_mcp.state.locks import deleting
from flash_mcp.state.removal import add_removed, elsewhere, empty_away, move_away, own, run_folders
from flash_mcp.state.runs import folder_of
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
    files that were being written, and temporary folders of runs and model servers that ended.

    Only those of this user, and only after a day without a change."""
    return filter(_is_leftover, _candidates(store))


def _is_leftover(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # another process was quicker to delete it
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > LEFTOVER_S


def _candidates(store: Store) -> Iterator[Path]:
    yield from store.base.glob("removed/*")
    yield from exports_dir(store.base).glob(".export-*")
    for root in (environments_dir(store.base), datasets_dir(store.base)):
        for pattern in (".staged-*", ".upload-*"):
            yield from root.glob(pattern)
            yield from root.glob(f"@*/{pattern}")
    temporary = Path(tempfile.gettempdir())
    for run in ended(store, after=time.time() - RECENT_S):
        if run.target != LOCAL_TARGET:
            continue
        folder = Path(run.folder)
        for path in (*folder.glob(".*"), *folder.glob("*/.*")):
            if TEMPORARY.fullmatch(path.name):
                yield path
        yield from temporary.glob(f"{scratch_prefix(run.folder)}*")
    for folder in runs_dir(store.base).glob("srv-*"):  # a model server beats in its own
        if _is_leftover(folder):
            yield from temporary.glob(f"{scratch_prefix(str(folder))}*")
            yield folder


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- checkpoints -----------------------------------------------------------------------------------


def prune_checkpoints(store: Store, run: Run) -> None:
    """Delete the checkpoints that `keep_checkpoints` does not keep.

    Kept are the newest, `keep_checkpoints` before it, the best, and those that a deployment, an
    evaluation or a warm start refers to. An attempt whose newest checkpoint is damaged resumes from
    the one before. Nothing is deleted while a backup is made: after the next checkpoint it is."""
    spec = run.spec
    if not isinstance(spec, RunSpec) or _is_kept_by_others(store, run):
        return
    if len(store.checkpoints(run.id)) <= 1 + spec.keep_checkpoints:
        return
    with deleting(store.base) as may_delete, store.transaction():
        if not may_delete:
            return
        saved = store.checkpoints(run.id)
        kept = {row.step for row in saved[-1 - spec.keep_checkpoints :]}
        # `status` and `deploy` recommend the best one.
        evaluations = [row for row in store.evals(run.id) if row.can_be_judged]
        kept.add(best_checkpoint(saved, evaluations).step)
        kept |= {step for run_id, step in referred(store, ()) if run_id == run.id}
        # Runs may have started from a folder by its path, or have it as their teacher.
        adapters = store.column("SELECT init_adapter FROM runs WHERE init_adapter IS NOT NULL")
        sql = "SELECT lineage FROM runs WHERE json_extract(lineage, '$.teacher') NOT NULL"
        adapters += [lineage["teacher"] for lineage in store.column(sql)]
        named = {adapter.get("path") for adapter in adapters}
        surplus = [row for row in saved if row.step not in kept and row.path not in named]
        folders: list[Path] = []
        for row in surplus:
            folders.append(Path(run.folder, "checkpoints", str(row.step)))
            sql = "DELETE FROM main.checkpoints WHERE run_id = ? AND step = ?"
            store.execute(sql, [run.id, row.step])
        move_away(store, own(store, folders))
    empty_away(store)
    if run.target != LOCAL_TARGET:
        stored = folder_of(run)
        # One that is killed here reads their rows again, and comes back.
        for row in surplus:
            stored.checkpoints.remove(row.step)


def _is_kept_by_others(store: Store, run: Run) -> bool:
    """Whether a run of this machine has its folder outside of the state directory."""
    return run.target == LOCAL_TARGET and elsewhere(store, run.folder) is not None


def best_checkpoint(saved: Sequence[Checkpoint], evaluations: Sequence[Evaluation]) -> Checkpoint:
    """The one with the highest success on held-out tasks; if none was evaluated, the one with the
    lowest held-out loss, or with the highest training reward. Among equals the newest.
    """
    success = {row.step: row.summary["success"] for row in evaluations}
    evaluated = [row for row in saved if row.step in success]
    if evaluated:
        return max(evaluated, key=lambda row: (success[row.step], row.step))
    for name, sign in (("eval_loss", -1), ("reward/mean", 1), ("loss", -1)):
        scores: dict[tuple[float, int], Checkpoint] = {}
        for row in saved:
            value = row.metrics.get(name)
            if value is not None:
                scores[sign * value, row.step] = row
        if scores:
            return scores[max(scores)]
    return saved[-1]


def better_than_newest(
    store: Store, run: Run, saved: Sequence[Checkpoint], evaluations: Sequence[Evaluation]
) -> tuple[int, str] | None:
    """The step of the best checkpoint, and how it compares, where both were measured alike, it is
    not the newest, and a paired test shows that it is better than that; after the end of a run also
    the best one that was measured, if the newest was not. The best of several equal ones is ahead
    by chance, so the test is at its level divided by their number.
    """
    if len(saved) < 2:
        return None
    best = best_checkpoint(saved, evaluations)
    newest = saved[-1]
    if best.step == newest.step:
        return None
    measured = {row.step: row for row in evaluations}
    success = {step: row.summary["success"] for step, row in measured.items()}
    if best.step in success and newest.step in success:
        pairs = store.pairs(run.id, [measured[newest.step], measured[best.step]])
        rivals = len(success.keys() & {row.step for row in saved}) - 1
        change = compare_evaluations(measured[newest.step], measured[best.step], pairs, rivals)
        if change.outcome != "improved":
            return None
        both = f"{success[best.step]:.3f} held-out success, {success[newest.step]:.3f}"
    elif best.step in success and run.ended is not None:
        own = f"{success[best.step]:.3f} held-out success"
        return best.step, f"checkpoint {best.step}: {own}; the newest, {newest.step}, has none"
    elif "eval_loss" in best.metrics and "eval_loss" in newest.metrics and not success:
        both = f"held-out loss {best.metrics['eval_loss']:.4g}, {newest.metrics['eval_loss']:.4g}"
    else:
        return None
    return best.step, f"checkpoint {best.step}: {both} at the newest, {newest.step}"


# -- the files of old runs -------------------------------------------------------------------------


def ended(store: Store, *, after: float = 0.0) -> list[Run]:
    """Runs that ended later than this and still have their files, the oldest first."""
    sql = f"""SELECT * FROM runs WHERE state NOT IN ({marks(ACTIVE)}) AND files_removed IS NULL
              AND ended > ? AND serves IS NULL ORDER BY ended, id"""
    return store.records(Run, sql, [*ACTIVE, after])


def referred(store: Store, states: Sequence[str] = LIVE_DEPLOYMENT) -> set[tuple[str, int | None]]:
    """(run, step) of every checkpoint that a deployment of these states serves, or that another run
    or evaluation with its files started from.
    """
    served = {(row.run_id, row.step) for row in store.deployments(states) if row.run_id}
    for place, column in (("$", "init_adapter"), ("$.teacher", "lineage")):
        sql = f"""SELECT json_extract({column}, '{place}.run_id') AS run_id,
                 json_extract({column}, '{place}.step') AS step
                 FROM runs WHERE run_id IS NOT NULL AND files_removed IS NULL"""
        served |= set(store.two_columns(sql))
    return served


def drop_files(store: Store, run_id: str, why: str) -> bool:
    """Delete a run's files and the rollouts of its training, unless it is active or referred to, or
    it ran here and its files lie outside of the state directory. Those on a target are deleted by
    the supervisor.

    Its row, metrics, evaluations and events stay, with an event that says why. Returns whether it
    was done."""
    with deleting(store.base) as may_delete, store.transaction():
        run = store.run(run_id)
        is_used = run_id in {item for item, _ in referred(store)}
        is_kept = run.state in ACTIVE or is_used or _is_kept_by_others(store, run)
        if is_kept or run.files_removed is not None or not may_delete:
            return False
        now = time.time()
        store.execute("UPDATE main.runs SET files_removed = ? WHERE id = ?", [now, run_id])
        sql = "DELETE FROM main.rollouts WHERE run_id = ? AND split = 'train'"
        store.execute(sql, [run_id])
        store.execute("DELETE FROM main.checkpoints WHERE run_id = ?", [run_id])
        event = {"time": now, "epoch": run.attempt, "kind": "warning", "message": why}
        store.put_event(run_id, "files-removed", event)
        add_removed(store, run)
        move_away(store, run_folders(store, run))
    empty_away(store)
    return True
