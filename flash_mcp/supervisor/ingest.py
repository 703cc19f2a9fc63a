"""What run folders say, read into the store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from flash_mcp.protocol.checkpoints import LATEST
from flash_mcp.protocol.run_files import Damaged
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.store import Store

log = logging.getLogger(__name__)

Body = TypeVar("Body")
Name = TypeVar("Name", int, str)
Put = Callable[[], None]
FILES_PER_COMMIT = 8  # few enough to let other writers in between
MOST_FILES = 1000
"""Of a kind are read of each run, or one for each of its steps: a node may leave any number."""


class Reader:
    """Reads a run folder into the store, each version of a file once; again changes nothing."""

    def __init__(
        self, store: Store, run_id: str, folder: RunFolder, alive: Callable[[], None] = lambda: None
    ) -> None:
        self.store, self.run_id, self.folder = store, run_id, folder
        self._seen: dict[tuple[str, int | str], str | None] = {}
        """The version that was read last; None if the disk failed then."""
        self._next_at = 0.0
        self._alive = alive

    def read(self, *, now: bool = False) -> bool:
        """Take in what is new; whether a checkpoint was. Unless `now`, looking costs at most a
        twentieth of the time: folders may be large.
        """
        started = time.monotonic()
        if not now and started < self._next_at:
            return False
        folder, store, run_id = self.folder, self.store, self.run_id

        def metrics(step: int) -> Put:
            return partial(store.put_metrics, run_id, _existing(folder.metrics(step)))

        def rollouts(step: int) -> Put:
            return partial(store.put_rollouts, run_id, "train", step, folder.rollouts(step))

        def evaluation(step: int) -> Put:
            return partial(store.put_evaluation, run_id, _existing(folder.evaluation(step)))

        def event(name: str) -> Put:
            return partial(store.put_event, run_id, name, _existing(folder.event(name)))

        def checkpoint(step: int) -> Put:
            manifest = _existing(folder.checkpoints.manifest(step))
            return partial(store.put_checkpoint, run_id, manifest, manifest["path"])

        self._take("metrics", folder.metric_steps(), metrics)
        self._take("rollouts", folder.rollout_steps(), rollouts)
        self._take("evals", folder.eval_steps(), evaluation)
        self._take("events", dict.fromkeys(folder.event_names(), ""), event)
        has_saved = self._take("checkpoints", folder.checkpoints.versions(), checkpoint)
        if has_saved and folder.is_local:
            # Make `latest` in the run's folder lead to the newest checkpoint that the database has
            newest = self.store.checkpoints(self.run_id)[-1:]
            link = Path(self.folder.path(LATEST))
            with suppress(OSError):  # a file system without links
                for row in newest:
                    part = link.with_name(".latest")
                    part.unlink(missing_ok=True)
                    part.symlink_to(os.path.relpath(row.path, link.parent))
                    part.replace(link)
        ended = time.monotonic()
        self._next_at = ended + 20 * (ended - started)
        return has_saved

    def _take(self, kind: str, versions: Mapping[Name, str], fetch: Callable[[Name], Put]) -> bool:
        names = [*versions]
        if len(names) > MOST_FILES:
            sql = "SELECT max(coalesce(steps, 0) + 1, ?) FROM main.runs WHERE id = ?"
            names = names[: max([MOST_FILES, *self.store.column(sql, [MOST_FILES, self.run_id])])]
        if unread := len(versions) - len(names):
            what = f"{unread} files more than a run of so many steps has: they are not read"
            self.folder.damaged.setdefault(kind, what)
        news = [name for name in names if self._seen.get((kind, name)) != versions[name]]
        # Files with rollouts may need much memory.
        count = 1 if kind in ("rollouts", "evals") else FILES_PER_COMMIT
        for start in range(0, len(news), count):
            self._alive()
            puts: dict[Name, Put] = {}
            for name in news[start : start + count]:
                try:
                    puts[name] = fetch(name)
                except Damaged:  # the folder has noted what is wrong
                    self._seen[kind, name] = versions[name]
                except OSError as error:
                    if (kind, name) not in self._seen:
                        log.warning("%s: %s %s is read later: %r", self.run_id, kind, name, error)
                    self._seen[kind, name] = None
            # Only now: while a store is slow, others write to the database.
            with self.store.transaction():
                for name, put in puts.items():
                    try:
                        put()
                        self.folder.damaged.pop(f"{kind}/{name}", None)
                    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                        # A damaged file must not keep the run from ending.
                        log.warning("%s: %s %s is damaged: %r", self.run_id, kind, name, error)
                        self.folder.damaged.setdefault(f"{kind}/{name}", repr(error))
            self._seen.update({(kind, name): versions[name] for name in puts})
        return bool(news)


def _existing(body: Body | None) -> Body:
    if body is None:
        raise Damaged("it is gone or cannot be read")
    return body
