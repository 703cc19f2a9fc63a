"""Clears what nobody needs any more, beside the supervisor's other work: jobs whose attempt is
over, folders of removed runs, old files within what the operator allows, and leftovers."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from environments.settings import FILE, Settings, load_settings
from flash_mcp.protocol import recordings
from flash_mcp.protocol.artifacts import delete_run
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import exports_dir, runs_dir
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import retention
from flash_mcp.state.disk import keep_reserve, size_of
from flash_mcp.state.removal import due_folders, exports_of, postpone, was_deleted
from flash_mcp.state.retention import delete, drop_files, leftovers
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.base import Target

log = logging.getLogger(__name__)
JOBS_EVERY_S = 60.0
SWEEP_EVERY_S = 3600.0
MAX_JOBS = 4
"""Jobs that are ended at once: each may take its engine some seconds."""
MAX_FOLDERS = 20
"""Folders of removed runs that are deleted at once, with two requests or so each."""
LATE_S = 86_400.0
"""An attempt that was replaced does not write later than so long after the end of its run."""
DAY_S = 86_400.0


class Maintenance:
    """Clears a target, on a thread of its own."""

    def __init__(self, store: Store, target: Target) -> None:
        self.store = store
        self.target = target
        self._jobs_at = self._sweep_at = time.monotonic()
        self._without_optimizers: set[str] = set()
        """Runs whose folders hold no optimizer's state any more."""
        self._has_dropped = False
        """Whether this sweep removed rows, so that the database can shrink."""

    def step(self) -> None:
        """Do what is due. FlashError if engine or storage does not answer."""
        if time.monotonic() >= self._jobs_at:
            self._jobs_at = time.monotonic() + JOBS_EVERY_S
            # The engine's jobs of attempts that are over are ended. It is asked first: an attempt
            # that is submitted later is not in its list, which has the jobs of all its targets.
            if handles := self.target.launcher.under_way():
                live = self.store.live_attempts()
                over = [handle for handle in handles if live.isdisjoint((handle.key, handle.id))]
                for handle in over[:MAX_JOBS]:
                    log.warning("%s: ending job %s, which no run waits for", handle.key, handle.id)
                    self.target.launcher.cancel(handle)
            for place, looks in due_folders(self.store, self.target.name)[:MAX_FOLDERS]:
                retry_s = self.target.retry_s
                try:
                    delete_run(RunFolder(place, retry_s=retry_s), retry_s)
                except (OSError, FlashError) as error:
                    _raise_if_of_all(error)
                    log.warning("the folder of a removed run cannot be deleted: %s", error)
                    postpone(self.store, place)
                    continue
                was_deleted(self.store, place, looks)
                log.info("deleted the folder of a removed run: %s", place)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + JOBS_EVERY_S  # if it fails
            self._sweep(load_settings(self.store.base))
            self._sweep_at = time.monotonic() + SWEEP_EVERY_S

    def clear(self) -> None:
        """As `step`, with jobs and folders that may not be due."""
        self._jobs_at = time.monotonic()
        self.step()

    def _sweep(self, settings: Settings) -> None:
        for run in self._ended():
            try:
                age_s, allowed = time.time() - (run.ended or time.time()), settings.disk
                if allowed.run_days and age_s > allowed.run_days * DAY_S:
                    self._drop(run, f"it ended more than {allowed.run_days:g} days ago: run_days")
                elif age_s > allowed.optimizer_days * DAY_S:
                    if run.id not in self._without_optimizers:
                        folder_of(run).checkpoints.drop_optimizers()
                        self._without_optimizers.add(run.id)
                elif age_s < LATE_S and run.attempt > 1:
                    folder_of(run).drop_superseded()
            except (OSError, FlashError) as error:
                _raise_if_of_all(error)
                log.warning("%s: its files cannot be cleared: %s", run.id, error)

    def _ended(self) -> list[Run]:
        return [run for run in retention.ended(self.store) if run.target == self.target.name]

    def _drop(self, run: Run, why: str) -> bool:
        what = f"its files were removed, {why} in [disk] of {FILE}"
        if not drop_files(self.store, run.id, what):
            return False
        self._has_dropped = True
        log.warning("%s: %s", run.id, what)
        return True


def _raise_if_of_all(error: OSError | FlashError) -> None:
    """A store that is away ends the look; what is wrong in one folder does not."""
    if isinstance(error, FlashError) and error.code != "artifact_damaged":
        raise error


class LocalMaintenance(Maintenance):
    """Clears this machine: also leftovers of killed processes, and what is above `total_gib`."""

    def step(self) -> None:
        """As on a target. A full disk, or a settings.toml that is broken, puts it off."""
        try:
            super().step()
        except (FlashError, OSError, ValueError) as error:
            log.warning("clearing the disk was put off: %s", error)
            self._sweep_at = time.monotonic() + SWEEP_EVERY_S

    def _sweep(self, settings: Settings) -> None:
        base = self.store.base
        self._has_dropped = False
        keep_reserve(base)
        for path in leftovers(self.store):
            log.info("deleting a leftover: %s", path)
            delete(path)
        recordings.prune_all(base, settings.serving.record_days)
        super()._sweep(settings)
        if total_gib := settings.disk.total_gib:
            # The files of those that ended first are dropped until the rest fits.
            total_bytes = size_of(runs_dir(base)) + size_of(exports_dir(base))
            taken = f"{total_bytes / 2**30:.1f} of {total_gib:g} GiB"
            for run in self._ended():
                if total_bytes <= total_gib * 2**30:
                    break
                size = sum(map(size_of, (Path(run.folder), *exports_of(self.store, run.id))))
                if self._drop(run, f"run folders and exports took {taken}: total_gib"):
                    total_bytes -= size
        if self._has_dropped:
            self.store.shrink()
