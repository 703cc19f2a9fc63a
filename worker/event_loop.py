"""An event loop beside a synchronous program."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")
CLEANUP_S = 20.0
"""An environment may be slow to close, and after a cancel the run must be saved before its grace
period ends.
"""


class AsyncRunner:
    """Runs coroutines on its own thread, and the functions that they pass to `call_waiting` on the
    thread that waits in `run`.

    The engine must step on the thread that trains: a second thread would bring a second OpenMP
    team, and two teams on the same cores made decode steps 1.5 times slower."""

    def __enter__(self) -> AsyncRunner:
        self._loop = asyncio.new_event_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        forever = self._loop.run_forever
        self._thread = threading.Thread(target=forever, name="event-loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], *, stop: threading.Event | None = None) -> T:
        """The coroutine's result; meanwhile this thread serves `call_waiting`.

        Once `stop` is set the coroutine is cancelled, and CancelledError is raised when it has
        cleaned up, or after CLEANUP_S."""
        task = asyncio.run_coroutine_threadsafe(self._begin(coroutine), self._loop).result()
        deadline = math.inf  # of its cleanup
        while True:
            try:
                call = self._calls.get(timeout=0.25 if stop else None)
            except queue.Empty:
                call = None
            # None may also be the end of an earlier task, whose `run` Ctrl-C interrupted.
            if call is None and task.done():
                if task.cancelled() or (deadline < math.inf and task.exception()):
                    raise CancelledError
                return task.result()
            if call:
                call()
            # Cancel only once: a second cancel would interrupt the cleanup.
            if stop and stop.is_set() and deadline == math.inf:
                deadline = time.monotonic() + CLEANUP_S
                self._loop.call_soon_threadsafe(task.cancel)
            if time.monotonic() > deadline:
                raise CancelledError

    async def _begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._calls.put(None))
        return task

    async def call_waiting(self, function: Callable[[], T]) -> T:
        """Inside the loop: run `function` on the thread that waits in `run`."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)
            except BaseException:
                # Ctrl-C belongs to this thread. In the loop it would end the loop, and `run` would
                # wait forever.
                result.cancel()
                raise

        self._calls.put(call)
        return await asyncio.wrap_future(result)
