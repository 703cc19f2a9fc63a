"""Stored conversations, played again in another version of their environment: what would it have
paid? The model's turns are those that were sampled, so nothing is generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from environments.base import ChatMessage
from environments.checks.playing import Conversation, GivenTurn, Task, together
from environments.faults import EnvironmentFault
from environments.process.host import Ended, EnvironmentHost, Score
from environments.tools import text_of

AT_ONCE = 8  # groups


@dataclass(frozen=True)
class StoredConversation:
    """A conversation as it was stored."""

    split: str
    task_id: str
    group: tuple[int, int]
    """Attempts of one group are scored together, where the environment scores groups."""
    messages: Sequence[ChatMessage]
    prompt: int  # how many of the messages came before the model's first turn
    is_cut: bool  # it ended for want of tokens or turns


@dataclass(frozen=True)
class Replayed:
    """What became of an attempt. Without a score it could not be played, and `why` is the cause;
    beside a score, `why` is how the conversation went another way.
    """

    score: Score | None
    why: str = ""


GONE = "the task is gone"


async def replay(
    host: EnvironmentHost, attempts: Sequence[StoredConversation], deadline: float
) -> dict[int, Replayed]:
    """What each attempt earns now, by its place in `attempts`. Those for which there was no time
    until `deadline` (of time.monotonic) are left out.
    """
    places: dict[tuple[str, str], int] = {}
    for split in {attempt.split for attempt in attempts}:
        for index, (task_id, _) in enumerate(await host.tasks(split)):
            places[split, task_id] = index
    groups: dict[tuple[int, int], list[int]] = {}
    results: dict[int, Replayed] = {}
    for number, attempt in enumerate(attempts):
        if (attempt.split, attempt.task_id) in places:
            groups.setdefault(attempt.group, []).append(number)
        else:
            results[number] = Replayed(None, GONE)
    slots = asyncio.Semaphore(AT_ONCE)

    async def play_one(numbers: list[int]) -> None:
        async with slots:
            if time.monotonic() > deadline:
                return
            chosen = [attempts[number] for number in numbers]
            tasks = [Task(item.split, places[item.split, item.task_id]) for item in chosen]
            played = await _play_group(host, tasks, chosen)
            results.update(zip(numbers, played, strict=True))

    await together(map(play_one, groups.values()))
    return results


async def _play_group(
    host: EnvironmentHost, tasks: Sequence[Task], attempts: Sequence[StoredConversation]
) -> list[Replayed]:
    """Play the group, and score it as training does: together, where the environment scores groups,
    without those that failed.
    """
    opened: dict[int, Conversation] = {}
    faults: dict[int, str] = {}
    for number, (task, attempt) in enumerate(zip(tasks, attempts, strict=True)):
        turns = [_turn(item) for item in attempt.messages[attempt.prompt :] if _is_turn(item)]
        try:
            opening = await host.open(task.split, task.index)
            opened[number] = Conversation(host, opening, turns, repeat=False)
            while not opened[number].is_over:
                await opened[number].take_turn()
        except EnvironmentFault as fault:
            faults[number] = str(fault)
            if failed := opened.pop(number, None):
                await _close(host, failed)
    scores: dict[int, Score] = {}
    if host.scores_groups and len(opened) > 1:
        try:
            ended = [Ended(item.opening.episode) for item in opened.values()]
            scores = dict(zip(opened, await host.score_group(ended), strict=True))
        except EnvironmentFault as fault:
            faults |= dict.fromkeys(opened, str(fault))
            for item in opened.values():
                await _close(host, item)
    else:
        for number, item in opened.items():
            try:
                scores[number] = await host.score(item.opening.episode)
            except EnvironmentFault as fault:
                faults[number] = str(fault)
                await _close(host, item)
    results: list[Replayed] = []
    for number, attempt in enumerate(attempts):
        if number in faults:
            results.append(Replayed(None, faults[number]))
        elif error := scores[number].error:
            results.append(Replayed(None, error))
        else:
            results.append(Replayed(scores[number], _difference(attempt, opened[number])))
    return results


async def _close(host: EnvironmentHost, conversation: Conversation) -> None:
    with suppress(EnvironmentFault):
        await host.close(conversation.opening.episode)


def _is_turn(message: ChatMessage) -> bool:
    return message["role"] == "assistant"


def _turn(message: ChatMessage) -> GivenTurn:
    return GivenTurn(message.get("content") or "", message.get("tool_calls") or [])


def _difference(attempt: StoredConversation, played: Conversation) -> str:
    """How the conversation goes another way; empty if the model read what it read before."""
    before = [text_of(item) for item in attempt.messages[: attempt.prompt] if _is_asked(item)]
    if before != [text_of(item) for item in played.opening.messages if _is_asked(item)]:
        return "the prompt is another one"
    replies = [item for item in attempt.messages[attempt.prompt :] if not _is_turn(item)]
    now = list(map(text_of, played.replies))
    # What came after the last turn of a conversation that was cut may not be stored.
    same = list(map(text_of, replies))
    if now[: len(same)] != same or (len(now) > len(same) and not attempt.is_cut):
        return "the environment answers in another way"
    return ""


def _is_asked(message: ChatMessage) -> bool:
    """A run may have a system prompt of its own."""
    return message["role"] != "system"
