import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from worker.event_loop import AsyncRunner


def test_a_coroutine_runs_beside_and_what_it_asks_for_on_the_thread_that_waits() -> None:
    async def threads() -> tuple[int, int]:
        return threading.get_ident(), await runner.call_waiting(threading.get_ident)

    with AsyncRunner() as runner:
        beside, waiting = runner.run(threads())
    assert beside != waiting == threading.get_ident()


def test_errors_of_both_sides_reach_whoever_waits_for_them() -> None:
    async def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            await runner.call_waiting(lambda: 1 / 0)
        raise KeyError("its own")

    with AsyncRunner() as runner:
        with pytest.raises(KeyError, match="its own"):
            runner.run(fails())
        assert runner.run(asyncio.sleep(0, "and it goes on")) == "and it goes on"


def test_stop_cancels_what_runs_and_the_next_one_runs() -> None:
    stop, cancelled = threading.Event(), threading.Event()

    async def endless() -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)  # twice the time after which `run` looks again
            cancelled.set()

    with AsyncRunner() as runner:
        with pytest.raises(CancelledError):
            runner.run(endless(), stop=stop)
        assert cancelled.is_set(), "it cleans up first"
        assert runner.run(asyncio.sleep(0, "next"), stop=threading.Event()) == "next"


def test_ctrl_c_is_the_waiting_threads_and_does_not_end_the_loop() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    async def asks() -> None:
        await runner.call_waiting(interrupted)

    with AsyncRunner() as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run(asks())
        assert runner.run(asyncio.sleep(0, "next")) == "next"
