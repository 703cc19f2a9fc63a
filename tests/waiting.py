"""How tests wait for what other processes and threads do."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 500.0
"""The bound of a wait. It only ends a test that hangs: a machine with many times as much to do as it
has cores must not reach it."""


def wait_for(condition, timeout_s=WAIT_S, *, tick=lambda: None, evidence=lambda: "") -> Any:
    """The condition's value, once it is true, with a `tick` after each look. A failure shows the `evidence`."""
    began = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s} s: {evidence()}"
        tick()
        time.sleep(pause_s(waited_s))
    return value


def pause_s(waited_s: float) -> float:
    """The seconds until the next look. Looking costs what is waited for the processor."""
    return min(0.05, max(0.005, waited_s / 20))


async def until(condition: Callable[[], object]) -> None:
    """As `wait_for`, while the event loop goes on."""
    began = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  other processes are waited for
            await asyncio.sleep(pause_s(time.monotonic() - began))
