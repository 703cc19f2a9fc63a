"""A look at many tasks before anything is learnt from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from environments.process.host import EnvironmentFault, EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from worker.rollouts.transcript import ChatTemplate, Transcript

T = TypeVar("T")
log = logging.getLogger("worker")


async def survey(
    split: str,
    count: int,
    look: Callable[[int], Awaitable[T]],
    *,
    max_error_share: float,
    advance: Callable[[], None],
) -> list[T]:
    """What `look` makes of the first `count` tasks of a split, in order, but for those that the
    environment failed.

    FlashError where it failed more than `max_error_share` of them, or all. `advance` is called
    after each look."""
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


PREFLIGHT_TASKS, RESUMED_TASKS = 256, 8
"""Tasks that are looked at before training: by the first attempt, and by one that goes on where
another stopped.
"""


async def _preflight(
    host: EnvironmentHost, template: ChatTemplate, max_length: int, tasks: int, **watched: Any
) -> tuple[int, int]:
    """(tokens of the longest prompt, most turns) of the first tasks; `watched` as of `survey`,
    whose errors it raises.

    FlashError(prompt_too_long) where one leaves no room for an answer.
    """
    if not host.splits.get("train"):
        raise FlashError(
            "dataset_invalid",
            "the environment's train split is empty",
            fix="give environment.dataset at least one TaskExample",
        )

    async def look(index: int) -> tuple[int, int]:
        opening = await host.open("train", index)
        await host.close(opening.episode)
        tokens = len(Transcript(template, opening.messages))
        if tokens >= max_length:
            raise FlashError(
                "prompt_too_long",
                "a prompt leaves no room for an answer",
                task=opening.task_id,
                tokens=tokens,
                max_length=max_length,
                fix="shorten the task's prompt, or raise max_length up to the model's context",
            )
        return tokens, opening.max_turns

    prompts, turns = zip(
        *await survey("train", min(host.splits["train"], tasks), look, **watched), strict=True
    )
    return max(prompts), max(turns)
