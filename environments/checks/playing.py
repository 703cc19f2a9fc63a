"""Plays conversations whose model turns are fixed in advance.

    played = await play(host, Task("train", 0), ["42"])
    played.score.reward

A fault of the environment is raised as EnvironmentFault, and closes the episode."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from environments.base import ChatMessage, Json
from environments.faults import EnvironmentFault
from environments.process.host import Ended, EnvironmentHost, Opening, Score
from environments.tools import as_list, as_object, call_id

T = TypeVar("T")


class GivenTurn(str):
    """The text of a model's turn, with the tool calls that go with it."""

    tool_calls: list[Json]
    task_id: str | None
    """The task, of gold that depends on the request. Where that task is played, the environment
    gives it again: which of an agent's requests comes first may be chance."""

    def __new__(cls, text: str, tool_calls: list[Json], *, task_id: str | None = None) -> Self:
        turn = super().__new__(cls, text)
        turn.tool_calls = tool_calls
        turn.task_id = task_id
        return turn

    @classmethod
    def from_message(cls, message: ChatMessage, *, task_id: str | None = None) -> Self:
        return cls(message["content"], message.get("tool_calls", []), task_id=task_id)


def call_values(turns: Sequence[str]) -> list[str]:
    """The texts and numbers that the calls of these turns pass."""
    calls = [call for turn in turns if isinstance(turn, GivenTurn) for call in turn.tool_calls]
    values: list[Any] = []
    for call in calls:
        with suppress(ValueError, RecursionError):
            arguments = json.loads(as_object(call.get("function")).get("arguments", ""))
            values += as_object(arguments).values()
    return [str(value) for value in values if isinstance(value, str | int | float)]


Answers = Sequence[str | None]
"""The model's turns, Turns where it calls tools. The last one repeats if the episode goes on."""
Watch = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Awaits a call into the environment; gets the name of the method as well."""


@dataclass(frozen=True)
class Task:
    split: str
    index: int

    def __str__(self) -> str:
        return f"{self.split}[{self.index}]"


@dataclass(frozen=True)
class Played:
    prompt: list[ChatMessage]
    replies: list[ChatMessage]
    score: Score
    is_cut: bool  # whether the episode would have gone on after the last answer
    is_agent: bool = False

    @property
    def said(self) -> list[ChatMessage]:
        """What the model read. An agent's requests come in any order, so they are sorted."""
        messages = [*self.prompt, *self.replies]
        return sorted(messages, key=str) if self.is_agent else messages

    def goes_as(self, other: Played) -> bool:
        one = self.said, self.score, self.is_cut
        return one == (other.said, other.score, other.is_cut)


async def _unwatched(method: str, call: Awaitable[T]) -> T:
    return await call


@dataclass
class Conversation:
    """An open episode. `repeat` gives the last answer again until the episode ends."""

    host: EnvironmentHost
    opening: Opening
    answers: Answers
    repeat: bool = True
    watch: Watch = _unwatched
    taken: int = 0
    is_done: bool = False
    replies: list[ChatMessage] = field(default_factory=list[ChatMessage])

    @property
    def is_over(self) -> bool:
        turns = self.opening.max_turns
        if not self.repeat:
            turns = min(len(self.answers), turns)
        return self.is_done or self.taken >= turns

    async def take_turn(self) -> None:
        episode = self.opening.episode
        text = self.answers[min(self.taken, len(self.answers) - 1)]
        if isinstance(text, GivenTurn) and text.task_id == self.opening.task_id:
            gold = await self.host.gold_turn(episode, self.taken)
            text = text if gold is None else GivenTurn.from_message(gold)
        self.taken += 1
        calls = text.tool_calls if isinstance(text, GivenTurn) else []
        step = await self.watch("step_episode", self.host.step(episode, text, calls))
        self.replies += step.messages
        self.is_done = step.done

    async def score(self) -> Played:
        score = await self.watch("score_episode", self.host.score(self.opening.episode))
        is_cut = not self.is_done and self.taken < self.opening.max_turns
        opening = self.opening
        return Played(opening.messages, self.replies, score, is_cut, opening.is_agent)


async def play(
    host: EnvironmentHost,
    task: Task,
    answers: Answers,
    *,
    repeat: bool = True,
    draw: int = 0,
    watch: Watch = _unwatched,
) -> Played:
    """Play one conversation; see Conversation, and `EnvironmentHost.open` for `draw`."""
    opening = await watch("start_episode", host.open(task.split, task.index, draw))
    conversation = Conversation(host, opening, answers, repeat, watch)
    try:
        while not conversation.is_over:
            await conversation.take_turn()
        return await conversation.score()
    except BaseException:
        # What ended the conversation tells more than why it could not be closed.
        with suppress(EnvironmentFault):
            await host.close(opening.episode)
        raise


async def interleave(host: EnvironmentHost, plans: Sequence[tuple[Task, Answers]]) -> list[Played]:
    """Play these conversations turn by turn: all open, all take their first turn, and so on."""
    async with _interleaved(host, plans) as conversations:
        return await together(conversation.score() for conversation in conversations)


async def play_group(host: EnvironmentHost, task: Task, group: Sequence[Answers]) -> list[Score]:
    """Play a conversation with each of these answers, and score them together."""
    async with _interleaved(host, [(task, answers) for answers in group]) as conversations:
        return await host.score_group([Ended(item.opening.episode) for item in conversations])


@asynccontextmanager
async def _interleaved(
    host: EnvironmentHost, plans: Sequence[tuple[Task, Answers]]
) -> AsyncGenerator[list[Conversation]]:
    """The conversations, played to their ends. A fault, also while they are scored, closes all."""
    opened: list[int] = []

    async def begin(task: Task, answers: Answers) -> Conversation:
        opening = await host.open(task.split, task.index)
        opened.append(opening.episode)
        return Conversation(host, opening, answers)

    try:
        conversations = active = await together(itertools.starmap(begin, plans))
        while active := [item for item in active if not item.is_over]:
            await together(item.take_turn() for item in active)
        yield conversations
    except BaseException:
        for episode in opened:
            with suppress(EnvironmentFault):
                await host.close(episode)
        raise


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. If one fails, the others are cancelled, and its exception is raised."""
    # A TaskGroup of Python 3.11 loses the cancellation by a timeout if a call fails as it comes.
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prompt_text(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(message["content"] for message in messages)


async def look(host: EnvironmentHost, task: Task) -> Opening:
    """The opening of a task, which is not played."""
    opening = await host.open(task.split, task.index)
    await host.close(opening.episode)
    return opening


async def gold_turns(host: EnvironmentHost, task: Task) -> tuple[str, ...]:
    """The model's turns of the gold answer; () if it has none."""
    if host.plays_gold:
        # The same of an agent whose gold depends on its requests, in their order
        opening = await host.open(task.split, task.index)
        turns: list[str] = []
        try:
            while gold := await host.gold_turn(opening.episode, len(turns)):
                turns.append(GivenTurn.from_message(gold, task_id=opening.task_id))
                step = await host.step(opening.episode, gold["content"], gold.get("tool_calls", []))
                if step.done or len(turns) >= opening.max_turns:
                    break
        finally:
            await host.close(opening.episode)
        return tuple(turns)
    gold = await host.gold(task.split, task.index)
    messages = [message for message in gold if message["role"] == "assistant"]
    # A turn without calls is a plain text: probes compare and cut it.
    return tuple(
        GivenTurn.from_message(message) if message.get("tool_calls") else message["content"]
        for message in messages
    )


async def known_gold(host: EnvironmentHost, task: Task) -> tuple[str, ...]:
    """The same; () also if the environment fails to give one."""
    with suppress(EnvironmentFault):
        return await gold_turns(host, task)
    return ()


# -- tool calls that a model may write without solving a task --------------------------------------

CALL_ID = call_id(0)
UNPARSED = '<tool_call>\n{"name": '  # what is left of a call that does not parse: text
UNKNOWN_TOOL = "no_such_tool"
ODD_VALUES: dict[str, Any] = {
    "string": "",
    "integer": -1,
    "number": 1e300,
    "boolean": False,
    "array": [],
    "object": {},
    "null": None,
}
"""A value of each JSON type that a careless tool trips over."""


def bad_turns(tools: Sequence[Json]) -> list[str]:
    """Turns with calls that do not parse, of no tool, with wrong arguments, or with odd ones."""
    turns: list[str] = [UNPARSED, _turn(UNKNOWN_TOOL, "{}")]
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        odd = _odd_value(function["parameters"])
        turns += [_turn(name, text) for text in ("{}", "[1]", "{", '{"no_such_argument": 1}')]
        turns.append(_turn(name, json.dumps(odd)))
    return turns


def _turn(name: str, arguments: str) -> GivenTurn:
    function = {"name": name, "arguments": arguments}
    return GivenTurn("", [{"id": CALL_ID, "type": "function", "function": function}])


def _odd_value(schema: Any) -> Any:
    """A value that fits the schema; None if the schema does not say what fits."""
    rules = as_object(schema)
    if allowed := as_list(rules.get("enum")):
        return allowed[-1]
    if options := as_list(rules.get("anyOf")):
        return _odd_value(options[0])
    if properties := as_object(rules.get("properties")):
        return {name: _odd_value(item) for name, item in properties.items()}
    kind = rules.get("type")
    return ODD_VALUES.get(kind) if isinstance(kind, str) else None
