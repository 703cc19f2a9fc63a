"""Reads many tasks of the environment before training."""

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
PREFLIGHT_TASKS = 256
RESUMED_TASKS = 8
"""Tasks that an attempt reads before training: the first attempt, and one that resumes."""


async def survey(
    split: str,
    count: int,
    look: Callable[[int], Awaitable[T]],
    *,
    max_error_share: float,
    advance: Callable[[], None],
) -> list[T]:
    """The results of `look` on the first `count` tasks of a split, in order, without the tasks that
    the environment failed.

    FlashError if it failed more than `max_error_share` of them, or all. `advance` is called after
    each task."""
    faults: dict[int, EnvironmentFault] = {}

    async def one(index: int) -> list[T]:
        try:
            return [await look(index)]
        except EnvironmentFault as fault:
            log.warning("%s task %s: [%s] %s", split, index, fault.code, fault.shown)
            faults[index] = fault
            return []
        finally:
            advance()

    async with asyncio.TaskGroup() as group:
        looks = [group.create_task(one(index)) for index in range(count)]
    if faults and (len(faults) > max_error_share * count or len(faults) == count):
        first = min(faults)
        raise FlashError.of_fault(
            faults[first],
            about=f"{len(faults)} of {count} {split} tasks failed in environment code; the first, "
            f"number {first}: ",
            max_error_share=max_error_share,
            fix="run env_test on the environment, fix it and push it again",
        )
    return [result for task in looks for result in task.result()]


async def preflight(
    host: EnvironmentHost, template: ChatTemplate, max_length: int, tasks: int, **watched: Any
) -> None:
    """Open the first tasks. `watched` and errors are those of `survey`.

    FlashError(prompt_too_long) if a prompt leaves no room for an answer.
    """
    if not host.splits.get("train"):
        fix = "give environment.dataset at least one TaskExample"
        raise FlashError("dataset_invalid", "the environment's train split is empty", fix=fix)

    async def look(index: int) -> None:
        opening = await host.open("train", index)
        await host.close(opening.episode)
        tokens = len(Transcript(template, opening.messages, opening.tools))
        if tokens >= max_length:
            raise FlashError(
                "prompt_too_long",
                "a prompt leaves no room for an answer",
                task=opening.task_id,
                tokens=tokens,
                max_length=max_length,
                fix="shorten the task's prompt, or raise max_length up to the model's context",
            )

    await survey("train", min(host.splits["train"], tasks), look, **watched)
