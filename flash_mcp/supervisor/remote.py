"""Targets beyond this machine, each looked after on a thread of its own.

Their engines and stores may not answer for minutes. Then only the runs of that target wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flash_mcp.protocol.storage import forget_stores
from flash_mcp.state.store import Store
from flash_mcp.supervisor.reconciler import RunReconciler

log = logging.getLogger(__name__)


class TargetThread(threading.Thread):
    """Looks after a target's runs until none is active, and clears up behind them."""

    def __init__(
        self, store: Store, name: str, reconciler_of: Callable[[str], RunReconciler], poll_s: float
    ) -> None:
        super().__init__(name=f"target {name}", daemon=True)
        self.store = store
        self.target = name
        self.reconciler_of = reconciler_of
        self.poll_s = poll_s
        self.stopped = threading.Event()
        self._reconciler: RunReconciler | None = None
        self._trouble = ""

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                try:
                    if not self._attend():
                        return
                    self._trouble = ""
                except Exception as error:  # an engine that does not answer, a locked database
                    if repr(error) != self._trouble:
                        log.warning("target %s: %r", self.target, error)
                    self._trouble = repr(error)
                self._renew_keys()
                self.stopped.wait(self.poll_s)
        finally:
            if self._reconciler:
                self._reconciler.close()
            self.store.close()

    def _renew_keys(self) -> None:
        """Begin again with the keys that a later shell has, if the store refuses those before."""
        reconciler = self._reconciler
        if reconciler is None or not reconciler.is_refused:
            return
        reconciler.is_refused = False
        if reconciler.vault.take_store_keys():
            log.warning("target %s: its store gets other keys", self.target)
            forget_stores()
            reconciler.close()
            self._reconciler = None

    def _attend(self) -> bool:
        """Whether anything is left to do."""
        self._reconciler = self._reconciler or self.reconciler_of(self.target)
        if self.target not in self.store.active_targets():
            self._reconciler.maintenance.clear()
            return False
        self._reconciler.attend(self.store.taken_runs(self.target))
        self._reconciler.maintain()
        return True
