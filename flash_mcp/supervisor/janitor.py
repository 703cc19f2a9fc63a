"""Clears what nobody waits for on a target: jobs whose attempt is over, folders of removed runs,
and what attempts that were replaced left in run folders."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from environments.settings import FILE, load_settings
from flash_mcp.protocol.artifacts import delete_run
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.removed_folders import due_folders, was_deleted
from flash_mcp.state.retention import drop_files, drop_optimizers, ended
from flash_mcp.state.runs import folder_of
from flash_mcp.state.serving import job_key
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.base import Target

log = logging.getLogger(__name__)
EVERY_S = 60.0
FOLDERS_EVERY_S = 3600.0
"""Between two looks at the folders of ended runs."""
MAX_JOBS = 4
"""Jobs that are ended at once: each may take its engine some seconds."""
MAX_FOLDERS = 20
"""Folders that are looked at at once, with two requests or so each."""
LATE_S = 86_400.0
"""An attempt that was replaced does not write later than so long after the end of its run."""
DAY_S = 86_400.0


class Janitor:
    """Clears a target, on the thread that looks after its runs."""

    def __init__(self, store: Store, target: Target) -> None:
        self.store = store
        self.target = target
        self._next_at = time.monotonic()
        self._folders_at = time.monotonic()
        self._work: Iterator[Callable[[], None]] = iter(())
        self._without_optimizers: set[str] = set()
        """Runs whose folders hold no optimizer's state any more."""

    def step(self) -> None:
        """Do what is due. FlashError where the engine or the storage does not answer."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + EVERY_S
            self.clear()

    def clear(self) -> bool:
        """Do a part of all that there is to do, whether it is due or not; whether more is left."""
        self._end_jobs()
        for folder in due_folders(self.store, self.target.name)[:MAX_FOLDERS]:
            patience_s = self.target.patience_s
            delete_run(RunFolder(folder.place, patience_s=patience_s), patience_s)
            was_deleted(self.store, folder)
            log.info("deleted the folder of a removed run: %s", folder.place)
        if time.monotonic() >= self._folders_at:
            self._folders_at = time.monotonic() + FOLDERS_EVERY_S
            self._work = self._ended_runs()
        done = 0
        for act in islice(self._work, MAX_FOLDERS):
            act()
            done += 1
        return done == MAX_FOLDERS

    def _end_jobs(self) -> None:
        """End the engine's jobs of attempts that are over. It is asked first: an attempt that is
        submitted later is not in its list. Its list has the jobs of all targets on that engine.
        """
        handles = self.target.launcher.under_way()
        if not handles:
            return
        live = self.store.live_attempts()
        live |= {job_key(row) for row in self.store.deployments(LIVE_DEPLOYMENT)}
        over = [handle for handle in handles if handle.key not in live]
        for handle in over[:MAX_JOBS]:
            log.warning("%s: ending job %s, which no run waits for", handle.key, handle.id)
            self.target.launcher.cancel(handle)

    def _ended_runs(self) -> Iterator[Callable[[], None]]:
        """What is to be done in the folders of ended runs, within what the operator allows."""
        allowed = load_settings(self.store.base).disk
        for run in ended(self.store):
            if run.target != self.target.name or run.ended is None:
                continue
            age_s = time.time() - run.ended
            if allowed.run_days and age_s > allowed.run_days * DAY_S:
                yield partial(self._drop_files, run, allowed.run_days)
            elif age_s > allowed.optimizer_days * DAY_S and run.id not in self._without_optimizers:
                yield partial(self._drop_optimizers, run)
            elif age_s < LATE_S and run.attempt > 1:
                yield folder_of(run).drop_superseded

    def _drop_files(self, run: Run, days: float) -> None:
        why = f"it ended more than {days:g} days ago: run_days in [disk] of {FILE}"
        if drop_files(self.store, run.id, f"its files were removed, {why}"):
            log.warning("%s: its files are removed: %s", run.id, why)

    def _drop_optimizers(self, run: Run) -> None:
        drop_optimizers(run)
        self._without_optimizers.add(run.id)
