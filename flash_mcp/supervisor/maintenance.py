"""Clears what nobody needs any more, beside the supervisor's other work: jobs whose attempt is
over, folders of removed runs, old files within what the operator allows, and leftovers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path

from environments.settings import FILE, DiskSettings, load_settings
from flash_mcp.protocol import recordings
from flash_mcp.protocol.artifacts import delete_run
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import exports_dir, runs_dir
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import retention
from flash_mcp.state.disk import keep_reserve, size_of
from flash_mcp.state.removal import exports_of
from flash_mcp.state.removed_folders import due_folders, was_deleted
from flash_mcp.state.retention import delete, drop_files, leftovers
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.base import Target

log = logging.getLogger(__name__)
JOBS_EVERY_S = 60.0
SWEEP_EVERY_S = 3600.0
PIECES_S = 0.05
"""A sweep goes on for so long at once: the supervisor does its other work in between."""
MAX_JOBS = 4
"""Jobs that are ended at once: each may take its engine some seconds."""
MAX_FOLDERS = 20
"""Folders of removed runs that are deleted at once, with two requests or so each."""
LATE_S = 86_400.0
"""An attempt that was replaced does not write later than so long after the end of its run."""
DAY_S = 86_400.0


class Maintenance:
    """Clears a target, on the thread that looks after its runs."""

    def __init__(
        self, store: Store, target: Target, alive: Callable[[], None] = lambda: None
    ) -> None:
        self.store = store
        self.target = target
        self.alive = alive
        self._jobs_at = self._sweep_at = time.monotonic()
        self._pieces: Iterator[Callable[[], object]] | None = None
        self._without_optimizers: set[str] = set()
        """Runs whose folders hold no optimizer's state any more."""

    def step(self) -> bool:
        """Do what is due; whether more follows. FlashError if engine or storage does not answer."""
        if time.monotonic() >= self._jobs_at:
            self._jobs_at = time.monotonic() + JOBS_EVERY_S
            self._end_jobs()
            self._delete_folders()
        return self._sweep()

    def clear(self) -> bool:
        """As `step`, with jobs and folders that may not be due."""
        self._jobs_at = time.monotonic()
        return self.step()

    def _end_jobs(self) -> None:
        """End the engine's jobs of attempts that are over. It is asked first: an attempt that is
        submitted later is not in its list. Its list has the jobs of all targets on that engine.
        """
        handles = self.target.launcher.under_way()
        if not handles:
            return
        live = self.store.live_attempts()
        over = [handle for handle in handles if live.isdisjoint((handle.key, handle.id))]
        for handle in over[:MAX_JOBS]:
            log.warning("%s: ending job %s, which no run waits for", handle.key, handle.id)
            self.target.launcher.cancel(handle)

    def _delete_folders(self) -> None:
        for place, looks in due_folders(self.store, self.target.name)[:MAX_FOLDERS]:
            patience_s = self.target.patience_s
            delete_run(RunFolder(place, patience_s=patience_s), patience_s)
            was_deleted(self.store, place, looks)
            log.info("deleted the folder of a removed run: %s", place)

    def _sweep(self) -> bool:
        """Do the next pieces of the sweep, at least one; whether others follow at once."""
        began = time.monotonic()
        if began < self._sweep_at:
            return False
        self._pieces = self._pieces or self._all_pieces()
        self._sweep_at = began + JOBS_EVERY_S  # the piece after one that fails
        for act in self._pieces:
            act()
            if time.monotonic() - began >= PIECES_S:
                self._sweep_at = began
                return True
        self._pieces = None
        self._sweep_at = began + SWEEP_EVERY_S
        return False

    def _all_pieces(self) -> Iterator[Callable[[], object]]:
        allowed = load_settings(self.store.base).disk
        for run in self._ended():
            yield partial(self._clear_ended, run, allowed)

    def _ended(self) -> list[Run]:
        return [run for run in retention.ended(self.store) if run.target == self.target.name]

    def _clear_ended(self, run: Run, allowed: DiskSettings) -> None:
        """Delete what the operator lets no ended run keep for so long."""
        age_s = time.time() - (run.ended or time.time())
        if allowed.run_days and age_s > allowed.run_days * DAY_S:
            self._drop(run, f"it ended more than {allowed.run_days:g} days ago: run_days")
        elif age_s > allowed.optimizer_days * DAY_S and run.id not in self._without_optimizers:
            self._drop_optimizers(run)
        elif age_s < LATE_S and run.attempt > 1:
            folder_of(run).drop_superseded()

    def _drop_optimizers(self, run: Run) -> None:
        folder_of(run).checkpoints.drop_optimizers()
        self._without_optimizers.add(run.id)

    def _drop(self, run: Run, why: str) -> bool:
        what = f"its files were removed, {why} in [disk] of {FILE}"
        if not drop_files(self.store, run.id, what):
            return False
        log.warning("%s: %s", run.id, what)
        return True


class LocalMaintenance(Maintenance):
    """Clears this machine: also leftovers of killed processes, and what is above `total_gib`."""

    def __init__(
        self, store: Store, target: Target, alive: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(store, target, alive)
        self._sizes: dict[str, int] = {}
        """Bytes of the folders of ended runs, which do not grow."""
        self._total_bytes = 0
        """Of all run folders and exports."""
        self._has_dropped = False
        """Whether this sweep removed rows, so that the database can shrink."""

    def step(self) -> bool:
        """As on a target. A full disk, or a settings.toml that is broken, puts it off."""
        try:
            return super().step()
        except (FlashError, OSError, ValueError) as error:
            log.warning("clearing the disk was put off: %s", error)
            self._pieces = None
            self._sweep_at = time.monotonic() + SWEEP_EVERY_S
            return False

    def _all_pieces(self) -> Iterator[Callable[[], object]]:
        base = self.store.base
        self._has_dropped = False
        yield partial(keep_reserve, base)
        for path in leftovers(self.store):
            log.info("deleting a leftover: %s", path)
            yield partial(delete, path)
        settings = load_settings(base)
        yield partial(recordings.prune_all, base, settings.serving.record_days)
        yield from super()._all_pieces()
        if settings.disk.total_gib:
            yield from self._making_room(settings.disk.total_gib)
        if self._has_dropped:
            yield partial(self.store.shrink, alive=self.alive)

    def _making_room(self, total_gib: float) -> Iterator[Callable[[], object]]:
        """Drop the files of runs, those that ended first, until the rest fits."""
        self._total_bytes = 0
        runs = self._ended()
        over = {run.id for run in runs}
        base = self.store.base
        for folder in sorted([*runs_dir(base).glob("*"), *exports_dir(base).glob("*")]):
            yield partial(self._add_size, folder, over)
        taken = f"{self._total_bytes / 2**30:.1f} of {total_gib:g} GiB"
        why = f"run folders and exports took {taken}: total_gib"
        for run in runs:
            if self._total_bytes <= total_gib * 2**30:
                return
            yield partial(self._drop_with_exports, run, why, over)

    def _add_size(self, folder: Path, over: Container[str]) -> None:
        self._total_bytes += self._size(folder, over)

    def _drop_with_exports(self, run: Run, why: str, over: Container[str]) -> None:
        folders = (Path(run.folder), *exports_of(self.store, run.id))
        size = sum(self._size(folder, over) for folder in folders)
        if self._drop(run, why):
            self._total_bytes -= size

    def _drop_optimizers(self, run: Run) -> None:
        super()._drop_optimizers(run)
        self._sizes.pop(run.id, None)

    def _drop(self, run: Run, why: str) -> bool:
        is_dropped = super()._drop(run, why)
        self._has_dropped |= is_dropped
        return is_dropped

    def _size(self, folder: Path, over: Container[str]) -> int:
        existing = self._sizes.get(folder.name)
        if existing is None:
            existing = size_of(folder)
            if folder.name in over:
                self._sizes[folder.name] = existing
        return existing
