"""How tests wait for what other processes and threads do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 500.0
"""The bound of a wait. It only ends a test that hangs: a machine with many times as much to do as it
has cores must not reach it."""


def wait_for(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, pause_s: float = 0.01) -> Any:
    """The condition's value, once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(pause_s)
    return value


async def until(condition: Callable[[], object]) -> None:
    """As `wait_for`, while the event loop goes on."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  other processes are waited for
            await asyncio.sleep(0.01)
