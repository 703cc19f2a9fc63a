"""Constants: answers that are the same for every task. A model that has only learned one of them
has learned nothing.

    constant = await best_constant(host, "eval", range(200))
    constant.success_share, constant.answer

The candidates come from gold answers of some tasks: the commonest ones, several of them in one
answer, the first with every digit replaced by 0, usual short answers, and texts that win if a
scorer runs them or uses them as a pattern; each also in the tags that the prompts ask for. With
`copies` also parts of the prompt, which need no more than reading it."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from environments.checks.answers import parts, tags
from environments.checks.playing import (
    Answers,
    Played,
    Task,
    known_gold,
    look,
    play,
    prompt_text,
    together,
)
from environments.faults import EnvironmentFault
from environments.process.host import EnvironmentHost

USUAL = ("0", "1", "Yes", "No", "True", "A", "B", "[]")
INJECTED = (
    ".*",
    "*",
    "%",
    "nan",
    "example.output",
    "int(example.output)",
    "type('', (), {'__eq__': lambda *_: True})()",
)
"""Answers that are right everywhere if the scorer uses them as a pattern, a number or code."""
MOST_GOLDS = 6
MOST_JOINED = 40
FIRST_TASKS = 6  # every candidate is played on so many tasks, and then only the best ones on all
FINALISTS = 3
FIRST_FINAL_TASKS = 40
"""The finalists are played on so many tasks, and then the best one on all the others."""
TIMEOUT_S = 30.0

NUMBER = r"-?\d+(?:\.\d+)?"


def _last_of(pattern: str, text: str) -> str:
    return (re.findall(pattern, text) or [""])[-1]


PARTS: dict[str, Callable[[str], str]] = {
    "the first number": lambda text: (re.findall(NUMBER, text) or [""])[0],
    "the last number": partial(_last_of, NUMBER),
    "the largest number": lambda text: max(re.findall(NUMBER, text), key=float, default=""),
    "the smallest number": lambda text: min(re.findall(NUMBER, text), key=float, default=""),
    "the last line": partial(_last_of, r"[^\n]+"),
    "the first line": lambda text: text.partition("\n")[0],
    "the end of the first line": lambda text: text.partition("\n")[0].rpartition(":")[2].strip(),
    "the end after the last colon": partial(_last_of, r":\s*([^:]+)$"),
    "the last word": partial(_last_of, r"\w+"),
    "the last quoted text": partial(_last_of, "[\"'`]([^\"'`\n]+)[\"'`]"),
}
"""Parts of the last message of a prompt, by name."""
Turns = tuple[str, ...]
Player = Callable[[Task, Answers], Coroutine[Any, Any, Played]]


class Copy(tuple[str, ...]):
    """The one turn of an answer that is a part of the prompt: its name, and tags around it."""

    def of(self, message: str) -> str:
        name, before, after = self
        return before + PARTS[name](message) + after


@dataclass(frozen=True)
class Constant:
    """One answer, and what it earned on each task. `turns` has one text for each model turn; the
    last one is repeated until the episode ends.
    """

    turns: Turns
    successes: tuple[bool, ...]
    rewards: tuple[float, ...]

    @property
    def answer(self) -> str:
        if isinstance(self.turns, Copy):
            return f"copying {self.turns[0]} of the prompt"
        return " / ".join(self.turns)

    def __add__(self, other: Constant) -> Constant:
        """The same on the tasks of both."""
        return Constant(self.turns, self.successes + other.successes, self.rewards + other.rewards)

    @property
    def success_share(self) -> float:
        return fmean(self.successes)

    @property
    def mean_reward(self) -> float:
        return fmean(self.rewards)


def candidates(golds: Sequence[Turns], prompts: Sequence[str]) -> list[Turns]:
    """The constants to try, without repetition. `golds` are gold conversations of several tasks."""
    common = [turns for turns, _ in Counter(golds).most_common(MOST_GOLDS)]
    texts = list(dict.fromkeys(turns[0] for turns in golds if len(turns) == 1))[:MOST_JOINED]
    wrappers = tags("\n".join(prompts))
    single: list[str] = list(USUAL)
    if not wrappers:
        single += INJECTED
    if texts:
        single += [" ".join(texts), "\n".join(reversed(texts)), re.sub(r"\d", "0", texts[0])]
    plain = [turns[0] for turns in common if len(turns) == 1]
    inside = (*plain, *single, *INJECTED)
    wrapped = [before + text + after for before, after in wrappers for text in inside]
    inner = [parts(text)[1] for text in texts]
    if inner != texts:
        wrapped += [before + " ".join(inner) + after for before, after in wrappers]
    return list(dict.fromkeys((*common, *((text,) for text in (*single, *wrapped)))))


async def best_constant(
    host: EnvironmentHost,
    split: str,
    tasks: Sequence[int],
    *,
    at_once: int = 1,
    copies: bool = False,
    player: Player | None = None,
) -> Constant | None:
    """The constant with the most successes, then the highest reward, on all of these tasks, or on
    those for which TIMEOUT_S is enough. None if none could be scored in that time. `at_once`
    constants are played at the same time. A fault of the environment leaves that constant out; with
    a `player`, which plays a conversation, it is raised.
    """
    # Tasks at equal distances would miss kinds of tasks that take turns.
    tasks = random.Random(0).sample(list(tasks), len(tasks))
    few = tasks[:FIRST_FINAL_TASKS]
    best: Constant | None = None
    plays = _Plays(host, split, at_once, player)
    with suppress(TimeoutError, *([] if player else [EnvironmentFault])):
        async with asyncio.timeout(TIMEOUT_S):
            result = await together(known_gold(host, Task(split, index)) for index in few)
            golds = [turns for turns in result if turns]
            opened = await together(look(host, Task(split, index)) for index in few[:FIRST_TASKS])
            prompts = [prompt_text(opening.messages) for opening in opened]
            texts = candidates(golds, prompts)
            if copies:
                around = [*tags("\n".join(prompts)), ("", "")]
                texts += [Copy((name, *pair)) for name in PARTS for pair in around]
            tried = await plays.all(few[: FIRST_TASKS // 2], texts)
            better = [constant.turns for constant in tried[: len(texts) // 2]]
            tried = await plays.all(few[FIRST_TASKS // 2 : FIRST_TASKS], better, tried)
            finalists = [constant.turns for constant in tried[:FINALISTS]]
            # On the first tasks another one may have been luckier than the commonest gold answer.
            finalists += [turns for turns, _ in Counter(golds).most_common(1)]
            finals = await plays.all(few, list(dict.fromkeys(finalists)))
            best = finals[0] if finals else None
            for start in range(len(few), len(tasks), FIRST_FINAL_TASKS):
                batch = tasks[start : start + FIRST_FINAL_TASKS]
                more = await plays.one(batch, best.turns) if best else None
                if best is None or more is None:
                    break
                best += more
    return best


@dataclass(frozen=True)
class _Plays:
    """Plays constants on tasks of a split."""

    host: EnvironmentHost
    split: str
    at_once: int
    player: Player | None

    async def all(
        self, tasks: Sequence[int], texts: Sequence[Turns], before: Sequence[Constant] = ()
    ) -> list[Constant]:
        """Those that the environment could score, the best one first, with what they earned on
        other tasks `before`."""
        earlier = {constant.turns: constant for constant in before}
        constants: list[Constant] = []
        for start in range(0, len(texts), self.at_once):
            batch = texts[start : start + self.at_once]
            played = await together(self.one(tasks, turns) for turns in batch)
            for one in filter(None, played):
                constants.append(earlier[one.turns] + one if earlier else one)
        return sorted(
            constants, key=lambda item: (item.success_share, item.mean_reward), reverse=True
        )

    async def one(self, tasks: Sequence[int], turns: Turns) -> Constant | None:
        """Play it on every task. None if the environment fails at it and there is no player."""
        player = self.player or partial(play, self.host)
        try:
            plans = [(Task(self.split, index), turns) for index in tasks]
            if isinstance(turns, Copy):
                openings = await together(look(self.host, task) for task, _ in plans)
                answers = [(turns.of(opening.messages[-1]["content"]),) for opening in openings]
                plans = [(task, answer) for (task, _), answer in zip(plans, answers, strict=True)]
            played = await together(player(*plan) for plan in plans)
        except EnvironmentFault:
            if self.player:
                raise
            return None
        successes = tuple(item.score.success for item in played)
        return Constant(turns, successes, tuple(item.score.reward for item in played))
