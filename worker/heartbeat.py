"""The attempt's heartbeat. It reports that the attempt is alive and receives cancel requests."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunWriter
from worker.process import sample_cards

log = logging.getLogger("worker")
BEAT_EVERY_S = 2.0
BEAT_TO_STORE_EVERY_S = 6.0
"""Each heartbeat to an object store is two requests, and every second one looks for a cancel."""
BEATS_PER_SAMPLE = 5
"""Each sample of how busy the cards are starts nvidia-smi."""


class Cancelled(Exception):
    """The control plane asked the run to end."""


class Heartbeat(threading.Thread):
    """Writes a heartbeat every few seconds and sets `cancelled` once a cancel is requested."""

    def __init__(self, writer: RunWriter) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.writer = writer
        self.step = 0
        self.steps: int | None = None
        """The number of steps of the run, once it is known."""
        self.phase = "start"
        self.progress = 0
        self.elsewhere: Callable[[], int] = lambda: 0
        """The progress of the attempt's other processes."""
        self._of = 0
        self._done = 0
        """How often this phase advanced by work."""
        self._entered = time.monotonic()
        self.cancelled = threading.Event()
        """The worker is to save and end."""
        self.is_preempted = False
        """It is to end because its machine is taken away: another attempt goes on."""
        self._stopped = threading.Event()
        self._every_s = BEAT_EVERY_S if writer.folder.is_local else BEAT_TO_STORE_EVERY_S

    @property
    def shown(self) -> str:
        """The phase; with its share and the time left at its pace if its work is counted."""
        if not self._of:
            return self.phase
        done = min(self._done, self._of)
        text = f"{self.phase} {done}/{self._of}"
        if not done:
            return text
        left_s = (time.monotonic() - self._entered) * (self._of - done) / done
        return f"{text}, {left_s:.0f} s left"

    def enter(self, phase: str, step: int | None = None, *, of: int = 0) -> None:
        """Note what happens now; raises Cancelled after a cancel. `of` is how often the phase will
        call `advance`, if that is known.
        """
        if step is not None:
            self.step = step  # also if the run ends here: this step is made, and will be saved
        if self.cancelled.is_set():
            raise Cancelled
        if phase != self.phase:
            log.info("step %s: %s", self.step, phase)
        self.phase = phase
        self._of = of
        self._done = 0
        self._entered = time.monotonic()

    def preempt(self) -> None:
        """Let the worker save and end, for another attempt to go on."""
        self.is_preempted = True
        self.cancelled.set()

    def advance(self, *, by_work: bool = True) -> None:
        """Count progress within a step, so that a long step is not taken for a stall. A wait that
        is sure to end counts too, but is no share of the phase's work.
        """
        self.progress += 1
        self._done += by_work

    def run(self) -> None:
        is_last = looks_for_cancel = False
        beats = 0
        while not is_last:
            # Short runs too say how many steps they had.
            is_last = self._stopped.wait(self._every_s)
            try:
                beats += 1
                if beats % BEATS_PER_SAMPLE == 0:
                    sample_cards()
                progress = self.progress + self.elsewhere()
                self.writer.beat(self.step, self.shown, progress, self.steps)
                looks_for_cancel = self.writer.folder.is_local or not looks_for_cancel
                if looks_for_cancel and self.writer.folder.is_cancelled():
                    self.cancelled.set()
            except FlashError as error:
                if error.code == "fenced":
                    log.error("%s", error)
                    # A newer attempt trains: nothing that this one holds may be written.
                    os._exit(3)
                log.warning("%s", error)
            except Exception as error:
                # Whatever a store's client raises: without heartbeats another attempt would start.
                log.warning("the run folder cannot be written: %s: %s", type(error).__name__, error)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
