"""What the supervisor knows of an attempt that it looks after, and how long it waits for what."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from flash_mcp.protocol.checkpoints import LATEST
from flash_mcp.protocol.run_files import Beat, Damaged
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.base import Handle, JobStatus

# -- what run folders say, read into the store -----------------------------------------------------

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


STALE_S = 15.0
"""An attempt without a new heartbeat for so long may have ended."""


@dataclass(frozen=True)
class Timeouts:
    """How long the supervisor waits for what, in seconds."""

    poll_s: float = 0.5
    beat_stale_s: float = 10.0
    """Without a new beat for so long, an attempt that the launcher calls gone is."""
    beat_silent_s: float = 120.0
    """Without a new beat for so long, an attempt hangs, even though the launcher calls it alive."""
    cancel_grace_s: float = 120.0
    """What a worker has to save and end before it is killed, besides the time of two steps."""
    leave_s: float = 10.0
    """What a worker has to leave after its result, before it is killed."""
    retry_delay_s: float = 1.0
    """Before the second attempt; doubled before each further one, up to a minute."""
    idle_exit_s: float = 60.0
    warm_s: float = 600.0
    """As idle_exit_s, while a worker is kept ready."""
    max_gap_s: float = 5.0
    """A longer time between two looks at an attempt counts as so long."""
    trouble_s: float = 60.0
    """Trouble with an attempt that lasts so long ends it."""
    pending_s: float = 7 * 86_400.0
    """An attempt that waited so long for a machine is submitted anew."""
    refused_s: float = 10.0
    """Before an attempt that the engine refused is submitted again."""
    remote_poll_s: float = 2.0
    """Between two looks at a target that is not this machine."""


@dataclass
class Attempt:
    """What is known of an attempt beyond its row.

    Its times are seconds for which this process has watched it: machines disagree about the time,
    and a pause of the whole machine is no silence of the attempt.
    """

    number: int
    folder: RunFolder
    handle: Handle
    reader: Reader
    beat: Beat | None = None
    watched_s: float = 0.0
    looked_at: float = field(default_factory=time.monotonic)
    """When `watched_s` was counted, by this process's clock."""
    is_beat_read: bool = False
    """Whether `read_beat` was read since `observe`."""
    asked_at: float = 0.0
    """When its heartbeat was last read."""
    beat_at: float = 0.0
    progress_at: float = 0.0
    seen_at: float | None = None
    """When its newest heartbeat was taken in, by this process's clock, which stands still while the
    machine sleeps."""
    worked_s: float | None = None
    """Between its two newest heartbeats; None if only one was seen."""
    damaged: set[str] = field(default_factory=set[str])
    """Damaged files that were reported."""
    is_short_of_space: bool = False
    """The disk was full since the last beat."""
    waited_s: float = 0.0
    """When it last waited for a machine."""
    pending_at: float | None = None
    """Since when it waits for a machine."""
    could_be_read: bool = True
    """Whether the store answered when it was last asked for the heartbeat."""
    read_beat: Beat | None = None
    """The heartbeat as it was read last."""
    beat_due_at: float = 0.0
    """When its heartbeat is to be asked for again, by this process's clock."""
    read_at: float | None = None
    """When its folder was last read."""
    writes_read: int | None = None
    """How many files it had written by then."""
    has_secrets: bool = False
    """They were sealed for it; of an attempt on another machine."""
    was_under_way: bool = False
    """The engine had it when this supervisor asked: an earlier one did not end it."""
    left_at: float | None = None
    """When its machine was first said to be taken away."""
    cancelled_at: float | None = None
    result_at: float | None = None

    def look(self, max_gap_s: float) -> None:
        """Count the time since the last look, at most `max_gap_s`: this process may have slept."""
        now = time.monotonic()
        self.watched_s += min(now - self.looked_at, max_gap_s)
        self.looked_at = now

    def has_news(self, status: JobStatus, read_every_s: float) -> bool:
        """Whether its folder is to be read: looking at one elsewhere costs requests."""
        if self.read_at is None or self.result_at is not None or status.state == "gone":
            return True
        silent_s = self.watched_s - self.read_at
        if silent_s >= read_every_s:
            return True
        if self.beat is None:
            return False
        is_stale = self.watched_s - self.beat_at > STALE_S and silent_s > STALE_S
        return self.beat["writes"] != self.writes_read or is_stale

    def take(self, beat: Beat | None) -> None:
        """Keep beat.json as it was just read. While it could not be, the attempt was not silent."""
        if not self.could_be_read:
            unread_s = self.watched_s - self.asked_at
            self.beat_at += unread_s
            self.progress_at += unread_s
            self.could_be_read = True
        self.read_beat, self.is_beat_read = beat, True

    def restart(self, number: int) -> None:
        """The engine started its job again, as attempt `number`."""
        self.number = number
        self.beat = self.pending_at = self.left_at = self.writes_read = self.seen_at = None
        self.has_secrets = False
        self.hold_clocks()

    def hold_clocks(self) -> None:
        """It waits for a machine: that is neither silence nor a stall."""
        self.beat_at = self.progress_at = self.asked_at = self.waited_s = self.watched_s

    def observe(self) -> tuple[bool, bool]:
        """Take in `read_beat`: (it is a new one of this attempt, something moved)."""
        beat = self.read_beat
        if self.is_beat_read:
            self.asked_at, self.is_beat_read = self.watched_s, False
        if beat is None or beat["epoch"] != self.number or beat == self.beat:
            return False, False
        before = self.beat or {}
        moved = any(beat.get(name) != before.get(name) for name in ("step", "phase", "progress"))
        now = time.monotonic()
        self.worked_s = None if self.seen_at is None else now - self.seen_at
        self.seen_at = now
        self.beat, self.beat_at = beat, self.watched_s
        self.is_short_of_space = False
        if moved:
            self.progress_at = self.beat_at
        return True, moved


@dataclass
class Trouble:
    """What kept the supervisor from looking after an attempt, and since when."""

    attempt: int
    since: float
    last: str = ""
    again_at: float = 0.0
    """When an attempt that the engine refused is submitted again."""
