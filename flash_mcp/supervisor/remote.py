"""Targets beyond this machine, each looked after on a thread of its own.

Their engines and stores may not answer for minutes. Then only the runs of that target wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from flash_mcp.state.store import Store
from flash_mcp.supervisor.reconciler import RunReconciler

log = logging.getLogger(__name__)


class RemoteTargets:
    """The threads. `reconciler_of` makes a target's reconciler."""

    def __init__(
        self, store: Store, reconciler_of: Callable[[str], RunReconciler], poll_s: float
    ) -> None:
        self.store = store
        self.reconciler_of = reconciler_of
        self.poll_s = poll_s
        self._threads: dict[str, TargetThread] = {}

    def tend(self, names: Collection[str]) -> None:
        """See that a thread looks after each of these targets."""
        for name in names:
            thread = self._threads.get(name)
            if thread is None or not thread.is_alive():
                self._threads[name] = TargetThread(self, name)
                self._threads[name].start()


class TargetThread(threading.Thread):
    """Looks after a target's runs until none is active, and clears up behind them."""

    def __init__(self, targets: RemoteTargets, name: str) -> None:
        super().__init__(name=f"target {name}", daemon=True)
        self.targets = targets
        self.target = name
        self.stopped = threading.Event()
        self._reconciler: RunReconciler | None = None
        self._trouble = ""

    def run(self) -> None:
        store = self.targets.store
        try:
            while not self.stopped.is_set():
                try:
                    if not self._attend(store):
                        return
                    self._trouble = ""
                except Exception as error:  # an engine that does not answer, a locked database
                    if repr(error) != self._trouble:
                        log.warning("target %s: %r", self.target, error)
                    self._trouble = repr(error)
                self.stopped.wait(self.targets.poll_s)
        finally:
            if self._reconciler:
                self._reconciler.close()
            store.close()

    def _attend(self, store: Store) -> bool:
        """Whether anything is left to do."""
        self._reconciler = self._reconciler or self.targets.reconciler_of(self.target)
        if self.target not in store.active_targets():
            return self._reconciler.maintenance.clear()
        self._reconciler.attend(store.taken_runs(self.target))
        self._reconciler.maintain()
        return True
