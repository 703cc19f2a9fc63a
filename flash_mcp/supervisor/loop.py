"""The supervisor: gives queued runs to workers, reads what they say into the store, replaces them
when they are lost.

    python -m flash_mcp.supervisor --home DIR

One per state directory: an operating-system lock on DIR/supervisor.lock decides. It keeps nothing
that it could not find again in the store, the run folders and the launcher, so it may be killed at
any point; the workers go on."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from environments import doors
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import LIVE_DEPLOYMENT
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import removal
from flash_mcp.state.store import Store
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.launch.base import Launcher, Target
from flash_mcp.supervisor.launch.local import LocalLauncher, wait_for
from flash_mcp.supervisor.maintenance import LocalMaintenance
from flash_mcp.supervisor.process import PYTHON, LockOwner, Ticker, take_lock
from flash_mcp.supervisor.reconciler import RunReconciler, is_of_the_machine
from flash_mcp.supervisor.secrets import Vault
from flash_mcp.supervisor.targets import LocalTarget, open_target

if TYPE_CHECKING:
    from flash_mcp.supervisor.model_servers import ModelServers
import threading

from flash_mcp.protocol.storage import forget_stores

log = logging.getLogger(__name__)

WORKER = (*PYTHON, "worker.main")
PROBE_TIMEOUT_S = 1.0
CLEAR_EVERY_S = 3600.0


class Supervisor(RunReconciler):
    """Looks after all of a state directory: itself after the runs of this machine, and after those
    of each other target on a thread. `tick` does whatever is due and returns; `run` ticks until
    nothing is left to do.
    """

    def __init__(
        self,
        base: Path,
        *,
        launcher: Launcher | None = None,
        worker: Sequence[str] = WORKER,
        timeouts: Timeouts | None = None,
        open_target: Callable[[Path, str], Target] = open_target,
    ) -> None:
        store = Store(base)
        target = LocalTarget(base, launcher or LocalLauncher(base / "attempts"), worker)
        super().__init__(store, target, Vault(base), timeouts or Timeouts())
        self.maintenance = LocalMaintenance(store, target)
        self._open_target = open_target
        self._threads: dict[str, TargetThread] = {}
        self._servers: ModelServers | None = None
        self._jobs = [*doors.each("flash_mcp.jobs").values()]
        self._clear_at = time.monotonic()

    def run(self) -> None:
        """Tick until there was nothing to do for `idle_exit_s`."""
        busy_at = time.monotonic()
        try:
            while True:
                self.alive()
                self.vault.open()
                is_busy = self._tick_unless_held_up()
                idle_s = self.timeouts.idle_exit_s
                if self.launcher.rest():
                    idle_s = max(idle_s, self.timeouts.warm_s)
                if self.maintain() or is_busy or self.vault.holds_exams:
                    busy_at = time.monotonic()
                elif time.monotonic() - busy_at >= idle_s:
                    return
                time.sleep(self.timeouts.poll_s)
        finally:
            self.vault.close()

    def _tick_unless_held_up(self) -> bool:
        """As `tick`, but waits out a locked database or a full disk: the folders keep all."""
        try:
            return self.tick()
        except FlashError as error:
            if error.code not in ("state_busy", "disk_full"):
                raise
            log.warning("%s", error)
            return True

    def tick(self) -> bool:
        """Whether there is anything to look after."""
        # First: a run has its row before its secrets and variables are given.
        clients = self.vault.clients()
        if existing := self.vault.run_ids():
            for ended in existing - {run.id for run in self.store.active_with_secrets()}:
                self.vault.forget(ended)
        targets = self.store.active_targets()
        if not targets:
            self.vault.forget_clients(clients)
        self.attend(self.store.taken_runs(LOCAL_TARGET))
        for jobs in self._jobs:
            jobs.advance_all(self.store)
        self._tend_elsewhere(set(targets))
        return self._serve() or bool(targets)

    def _tend_elsewhere(self, targets: set[str]) -> None:
        """Keep a thread for each of these targets: one that does not answer delays no other. Others
        get one while there is something to clear up, and once an hour to look.
        """
        targets |= removal.targets_to_clear(self.store)
        if time.monotonic() >= self._clear_at:
            self._clear_at = time.monotonic() + CLEAR_EVERY_S
            targets |= self.store.recent_targets()
        for name in targets - {LOCAL_TARGET}:
            if name not in self._threads or not self._threads[name].is_alive():
                poll_s = self.timeouts.remote_poll_s
                thread = TargetThread(self.store, name, self._reconciler_of, poll_s)
                self._threads[name] = thread
                thread.start()

    def _reconciler_of(self, name: str) -> RunReconciler:
        target = self._open_target(self.base, name)
        return RunReconciler(self.store, target, self.vault, self.timeouts)

    def _serve(self) -> bool:
        live = bool(self.store.deployments(LIVE_DEPLOYMENT))
        if not live and not self.store.active_servers():
            return False
        try:
            if self._servers is None:  # imported only if there is something to serve
                from flash_mcp.supervisor.model_servers import ModelServers  # noqa: PLC0415

                self._servers = ModelServers(self.store, self.base)
            self._servers.tick()
        except Exception:
            log.exception("trouble with deployments")
        return live


# -- one per state directory -----------------------------------------------------------------------


def supervise(
    base: Path, make: Callable[[Path], Supervisor], *, is_foreground: bool = False
) -> bool:
    """Be the state directory's supervisor until idle; False where another one is already."""
    while True:
        # Whoever only asks holds the lock for an instant.
        lock = wait_for(lambda: take_lock(base), PROBE_TIMEOUT_S)
        if lock is None:
            return False
        with lock:
            LockOwner.current(is_foreground=is_foreground).write(lock)
            ticker = Ticker(base)
            supervisor = _made(base, make, ticker)
            try:
                supervisor.run()
            finally:
                ticker.close()
        # Whoever enqueued while the lock was held saw it held and started no other.
        store = supervisor.store
        if not store.active_targets() and not store.deployments(LIVE_DEPLOYMENT):
            return True


def _made(base: Path, make: Callable[[Path], Supervisor], ticker: Ticker) -> Supervisor:
    """The supervisor, as soon as the machine has room for it."""
    while True:
        ticker()
        try:
            supervisor = make(base)
            supervisor.alive = ticker
        except (FlashError, OSError) as error:
            if not is_of_the_machine(error):
                raise
            log.warning("%s", error)
            time.sleep(1)
        else:
            return supervisor


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flash_mcp.supervisor",
        description="Looks after the runs of a state directory.",
    )
    parser.add_argument(
        "--home", type=Path, default=None, help="state directory (default: FLASH_HOME)"
    )
    parser.add_argument("--idle-exit-s", type=float, help="leave after so long idle")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    for chatty in ("httpx", "botocore", "aiobotocore"):  # a line for each look at a target
        logging.getLogger(chatty).setLevel(logging.WARNING)
    idle_s: float | None = arguments.idle_exit_s
    timeouts = Timeouts() if idle_s is None else Timeouts(idle_exit_s=idle_s, warm_s=idle_s)
    supervise(arguments.home or home(), lambda base: Supervisor(base, timeouts=timeouts))


# -- targets beyond this machine, each looked after on a thread of its own -------------------------
# Their engines and stores may not answer for minutes. Then only the runs of that target wait.


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
                reconciler = self._reconciler
                if reconciler and reconciler.is_refused:
                    # Begin again with the keys that a later shell has, if there are any
                    reconciler.is_refused = False
                    if reconciler.vault.take_store_keys():
                        log.warning("target %s: its store gets other keys", self.target)
                        forget_stores()
                        reconciler.close()
                        self._reconciler = None
                self.stopped.wait(self.poll_s)
        finally:
            if self._reconciler:
                self._reconciler.close()
            self.store.close()

    def _attend(self) -> bool:
        self._reconciler = self._reconciler or self.reconciler_of(self.target)
        if self.target not in self.store.active_targets():
            self._reconciler.maintenance.clear()
            return False
        self._reconciler.attend(self.store.taken_runs(self.target))
        self._reconciler.maintain()
        return True
