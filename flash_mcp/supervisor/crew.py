"""Threads that do what may take long for a target's runs, so that no run waits for another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from flash_mcp.state.store import Store

log = logging.getLogger(__name__)


class Crew:
    """Does one thing at a time for each key. Without threads it is done at once."""

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, "crew") if threads else None
        self._under_way: dict[str, Future[None]] = {}

    def is_free(self, key: str) -> bool:
        return key not in self._under_way or self._under_way[key].done()

    def do(self, key: str, act: Callable[[], object]) -> None:
        if self._pool:
            self._under_way[key] = self._pool.submit(self._do, key, act)
        else:
            act()

    def _do(self, key: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            log.warning("%s: %r", key, error)
        finally:
            self._store.close()  # this thread's connection

    def wait(self, seconds: float) -> None:
        """Until all is done, but no longer."""
        wait(self._under_way.values(), seconds)
        self._under_way = {key: job for key, job in self._under_way.items() if not job.done()}

    def close(self) -> None:
        """Start nothing more. What is under way is not waited for: it may never end."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
