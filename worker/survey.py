"""A look at many tasks before anything is learnt from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from environments.host import EnvironmentFault
from flash_mcp.errors import FlashError

T = TypeVar("T")
log = logging.getLogger("worker")


async def survey(
    split: str, count: int, look: Callable[[int], Awaitable[T]], *, max_error_share: float, advance: Callable[[], None]
) -> list[T]:
    """What `look` makes of the first `count` tasks of a split, in order, but for those that the environment failed.

    FlashError where it failed more than `max_error_share` of them, or all. `advance` is called after each look.
    """
    faults: dict[int, EnvironmentFault] = {}

    async def one(index: int) -> list[T]:
        try:
            return [await look(index)]
        except EnvironmentFault as fault:
            log.warning("%s task %s: [%s] %s", split, index, fault.code, fault.what)
            faults[index] = fault
            return []
        finally:
            advance()

    async with asyncio.TaskGroup() as group:
        looks = [group.create_task(one(index)) for index in range(count)]
    if faults and (len(faults) > max_error_share * count or len(faults) == count):
        first = min(faults)
        raise FlashError(
            faults[first].code,
            f"{len(faults)} of {count} {split} tasks failed in environment code; the first, number {first}: "
            f"{faults[first].what}",
            max_error_share=max_error_share,
            fix="run env_test on the environment, mend it and push it again",
        )
    return [found for task in looks for found in task.result()]
