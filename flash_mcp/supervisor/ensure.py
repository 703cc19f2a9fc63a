"""Keeps a supervisor running while there is work.

Tools that change something call `ensure_supervised`. A server also calls it every few seconds on
a thread (`supervised`), so that `status` starts no process for an agent that only polls."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import LIVE_DEPLOYMENT
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.owners import LOCAL, acting_as
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor import secrets
from flash_mcp.supervisor.process import LockOwner, ensure_supervisor

log = logging.getLogger(__name__)

EVERY_S = 3.0
MAX_DELAY_S = 60.0
"""The longest pause after attempts that failed."""


def ensure_supervised(store: Store) -> None:
    """Start the supervisor if a run is active or a deployment is live, and give it the secrets that
    active runs lack and this process's environment has, the variables that the runs of this process
    use, and its keys of the targets' stores.

    It covers the whole state directory, not only the caller's runs. FlashError(internal) if no
    supervisor keeps running.
    """
    with acting_as(LOCAL):
        if store.is_read_only:
            return
        targets = store.active_targets()
        if not targets and not store.deployments(LIVE_DEPLOYMENT):
            return
        ensure_supervisor(store.base)
        for run in store.active_with_secrets():
            secrets.hand_over(store.base, run)
        if surroundings.IN_USE.is_set():
            holder = LockOwner.read(store.base)
            is_elsewhere = holder is not None and holder.pid != os.getpid()
            secrets.give_surroundings(store.base, secrets.TIMEOUT_S if is_elsewhere else 0.0)
        if targets - {LOCAL_TARGET}:
            secrets.offer_store_keys(store.base)


@contextmanager
def supervised(every_s: float = EVERY_S) -> Generator[None, None, None]:
    """Call `ensure_supervised` every few seconds within, on a daemon thread."""
    stop = threading.Event()
    threading.Thread(
        target=_ensure_until, args=(stop, every_s), name="supervised", daemon=True
    ).start()
    try:
        yield
    finally:
        stop.set()


def _ensure_until(stop: threading.Event, every_s: float) -> None:
    delay_s = every_s
    trouble = ""
    while not stop.wait(delay_s):
        try:
            ensure_supervised(open_store())
        except Exception as error:
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            if repr(error) != trouble:
                is_foreseen = isinstance(error, FlashError)
                log.error("no supervisor could be started: %s", error, exc_info=not is_foreseen)
            trouble = repr(error)
        else:
            delay_s = every_s
            trouble = ""
