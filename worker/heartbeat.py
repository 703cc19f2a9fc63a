"""The attempt's pulse: it says that the attempt lives, and hears when it shall end."""

from __future__ import annotations

import logging
import os
import threading

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunWriter

log = logging.getLogger("worker")
BEAT_EVERY_S = 2.0


class Cancelled(Exception):
    """The control plane asked the run to end."""


class Pulse(threading.Thread):
    """Says every two seconds that the attempt lives, and hears what the control plane wants."""

    def __init__(self, writer: RunWriter) -> None:
        super().__init__(name="pulse", daemon=True)
        self.writer, self.step, self.phase, self.progress = writer, 0, "start", 0
        self.steps: int | None = None
        """How many there will be, once that is known."""
        self.cancelled, self._stopped = threading.Event(), threading.Event()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note what happens now; raises Cancelled where a cancel came."""
        if self.cancelled.is_set():
            raise Cancelled
        if phase != self.phase:
            log.info("step %s: %s", self.step if step is None else step, phase)
        self.phase, self.step = phase, self.step if step is None else step

    def advance(self) -> None:
        """Count something done within a step, so that a long one is not taken for a stall."""
        self.progress += 1

    def run(self) -> None:
        while not self._stopped.wait(BEAT_EVERY_S):
            try:
                self.writer.beat(self.step, self.phase, self.progress, self.steps)
                if self.writer.folder.is_cancelled():
                    self.cancelled.set()
            except FlashError as error:
                if error.code == "fenced":
                    log.error("%s", error)
                    os._exit(
                        3
                    )  # a newer attempt trains on: nothing that this one holds may be written
                log.warning("%s", error)
            except Exception as error:  # whatever a store's client raises: without a beat another attempt would start
                log.warning("the run folder cannot be written: %s: %s", type(error).__name__, error)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
