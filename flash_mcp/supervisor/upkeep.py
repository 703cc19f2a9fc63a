"""Frees the disk beside the supervisor's other work, within what the operator allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from environments.settings import FILE, load_settings
from flash_mcp.protocol import recordings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import exports_dir, runs_dir
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import retention
from flash_mcp.state.disk import keep_reserve, size_of
from flash_mcp.state.removal import exports_of
from flash_mcp.state.retention import delete, drop_files, drop_optimizers, leftovers
from flash_mcp.state.store import Store

log = logging.getLogger(__name__)
EVERY_S = 3600.0
PIECES_S = 0.05
"""The supervisor does its other work in between."""
DAY_S = 86_400.0


class Upkeep:
    """Sweeps leftovers and applies the limits of settings.toml once an hour, a piece at a time."""

    def __init__(self, store: Store, alive: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._alive = alive
        self._pieces: Iterator[None] | None = None
        self._next_at = time.monotonic()
        self._sizes: dict[str, int] = {}
        """Bytes of the folders of ended runs, which do not grow."""

    def step(self) -> bool:
        """Do the next pieces; whether others follow at once."""
        if self._pieces is None:
            if time.monotonic() < self._next_at:
                return False
            self._pieces = self._all_pieces()
        until = time.monotonic() + PIECES_S
        try:
            while time.monotonic() < until:
                next(self._pieces)
        except StopIteration:
            pass
        except (FlashError, OSError, ValueError) as error:  # a full disk, a broken settings.toml
            log.warning("clearing the disk was put off: %s", error)
        else:
            return True
        self._pieces = None
        self._next_at = time.monotonic() + EVERY_S
        return False

    def _all_pieces(self) -> Iterator[None]:
        keep_reserve(self._store.base)
        yield
        for path in leftovers(self._store):
            log.info("deleting a leftover: %s", path)
            delete(path)
            yield
        settings = load_settings(self._store.base)
        recordings.prune_all(self._store.base, settings.serving.record_days)
        yield
        allowed = settings.disk
        for run in ended_here(self._store, before=time.time() - allowed.optimizer_days * DAY_S):
            if drop_optimizers(run):
                self._sizes.pop(run.id, None)
            yield
        dropped = False
        if allowed.run_days:
            why = f"it ended more than {allowed.run_days:g} days ago: run_days"
            for run in ended_here(self._store, before=time.time() - allowed.run_days * DAY_S):
                dropped |= self._drop(run, why)
                yield
        if allowed.total_gib:
            limit = allowed.total_gib * 2**30
            total = 0
            over = {run.id for run in ended_here(self._store)}
            for folder in _folders(self._store.base):
                total += self._size(folder, over)
                yield
            taken = f"{total / 2**30:.1f} of {allowed.total_gib:g} GiB"
            why = f"run folders and exports took {taken}: total_gib"
            for run in ended_here(self._store):
                if total <= limit:
                    break
                exports = exports_of(self._store, run.id)
                size = sum(self._size(item, over) for item in (Path(run.folder), *exports))
                if self._drop(run, why):
                    dropped = True
                    total -= size
                yield
        if dropped:
            self._store.shrink(alive=self._alive)

    def _drop(self, run: Run, why: str) -> bool:
        what = f"its files were removed, {why} in [disk] of {FILE}"
        if not drop_files(self._store, run.id, what):
            return False
        log.warning("%s: %s", run.id, what)
        return True

    def _size(self, folder: Path, over: Container[str]) -> int:
        existing = self._sizes.get(folder.name)
        if existing is None:
            existing = size_of(folder)
            if folder.name in over:
                self._sizes[folder.name] = existing
        return existing


def _folders(base: Path) -> list[Path]:
    """All run folders and exports."""
    return sorted([*runs_dir(base).glob("*"), *exports_dir(base).glob("*")])


def ended_here(store: Store, before: float | None = None) -> list[Run]:
    """Ended runs whose files are on this machine: those elsewhere are the janitor's."""
    return [run for run in retention.ended(store, before=before) if run.target == LOCAL_TARGET]
