"""What an environment holds back for evaluation, by asking it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from environments.process.host import EnvironmentFault, EnvironmentHost
from flash_mcp.judgement.curation import HeldOut, prompt_digest

MAX_OPENED = 1000
OPENING_TIMEOUT_S = 15.0


async def read_held_out(host: EnvironmentHost) -> HeldOut:
    """Ask a loaded environment. Raises EnvironmentFault if it cannot list its tasks. Prompts are
    those of the tasks that open in time: environments may be slow.
    """
    train = await host.tasks("train")
    held_out = await host.tasks("eval")
    counter = Counter(question for _, question in held_out)
    prompts: list[str] = []

    async def look(index: int) -> None:
        with suppress(EnvironmentFault):  # a task that cannot be opened cannot be trained on either
            opening = await host.open("eval", index)
            prompts.append(prompt_digest(opening.messages))
            await host.close(opening.episode)

    with suppress(TimeoutError):
        async with asyncio.timeout(OPENING_TIMEOUT_S), asyncio.TaskGroup() as group:
            for index in range(min(len(held_out), MAX_OPENED)):
                group.create_task(look(index))
    return HeldOut(
        ids=frozenset(task_id for task_id, _ in held_out),
        questions=frozenset(question for question, times in counter.items() if times == 1),
        prompts=frozenset(prompts),
        train_questions=dict(train),
        opened=len(prompts),
        total=len(held_out),
    )
