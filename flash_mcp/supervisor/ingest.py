"""What run folders say, read into the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from flash_mcp.protocol.run_files import Damaged
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.store import Store

log = logging.getLogger(__name__)

Body = TypeVar("Body")
Name = TypeVar("Name", int, str)
FILES_PER_COMMIT = 64  # few enough to let other writers in between


class Reader:
    """Reads a run folder into the store, each version of a file once; again changes nothing."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        folder: RunFolder,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.run_id, self.folder = store, run_id, folder
        self._seen: dict[tuple[str, int | str], str] = {}
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

        def put_metrics(step: int) -> None:
            store.put_metrics(run_id, _found(folder.metrics(step)))

        def put_rollouts(step: int) -> None:
            store.put_rollouts(run_id, "train", step, folder.rollouts(step))

        def put_evaluation(step: int) -> None:
            store.put_evaluation(run_id, _found(folder.evaluation(step)))

        def put_event(name: str) -> None:
            store.put_event(run_id, name, _found(folder.event(name)))

        def put_checkpoint(step: int) -> None:
            if manifest := folder.checkpoints.manifest(step):
                store.put_checkpoint(run_id, manifest, manifest["path"])

        self._take("metrics", folder.metric_steps(), put_metrics)
        self._take("rollouts", folder.rollout_steps(), put_rollouts)
        self._take("evals", folder.eval_steps(), put_evaluation)
        self._take("events", dict.fromkeys(folder.event_names(), ""), put_event)
        has_saved = self._take("checkpoints", folder.checkpoints.versions(), put_checkpoint)
        ended = time.monotonic()
        self._next_at = ended + 20 * (ended - started)
        return has_saved

    def _take(self, kind: str, versions: Mapping[Name, str], put: Callable[[Name], None]) -> bool:
        news = [
            name for name, version in versions.items() if self._seen.get((kind, name)) != version
        ]
        for start in range(0, len(news), FILES_PER_COMMIT):
            names = news[start : start + FILES_PER_COMMIT]
            self._alive()
            with self.store.transaction():
                for name in names:
                    try:
                        put(name)
                        self.folder.damaged.pop(f"{kind}/{name}", None)
                    except Damaged:  # the folder has noted what is wrong
                        continue
                    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                        # A damaged file must not keep the run from ending.
                        log.warning("%s: %s %s is damaged: %r", self.run_id, kind, name, error)
                        self.folder.damaged.setdefault(f"{kind}/{name}", repr(error))
            self._seen.update({(kind, name): versions[name] for name in names})
        return bool(news)


def _found(body: Body | None) -> Body:
    if body is None:
        raise Damaged("it is gone or cannot be read")
    return body
