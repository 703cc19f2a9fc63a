"""Environments of the Open Reward Standard: classes that extend `Environment` of openreward.

    from server import MyEnvironment    # all that environment.py needs besides:

    def load_environment():
        return MyEnvironment

An episode is an object of the class with one task. Its tools are called in this process; no server
is needed. A turn without a call ends the episode, and goes to the terminal tool if there is one.
The reward is the sum of those that the tools gave, and an episode with at least 1 succeeds. Seen to
work with openreward 0.1.167."""

# Any method of an environment may be `async def`.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from environments.adapters import tasks_of
from environments.base import (
    ChatMessage,
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    RewardMetric,
    RewardResult,
    TaskExample,
    UnsupportedError,
)
from environments.tools import TOOL_ERROR

MAX_TURNS = 32


def adapt(kind: Any) -> OrsEnvironment:
    """The environment of a class. Raises UnsupportedError."""
    if not isinstance(kind, type):
        raise UnsupportedError("load_environment must return the class of openreward, no object")
    return OrsEnvironment(kind)


class OrsEnvironment(EnvironmentMultiTurn):
    """A class of openreward. Its splits of type train are trained on, the others are held out."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        rows: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
        for split in kind.list_splits():
            name: str = getattr(split, "name", split)
            is_train = getattr(split, "type", name) == "train"
            rows[is_train] += asyncio.run(_value(kind.list_tasks(name)))
        self.dataset, self.eval_dataset = tasks_of(rows[True], rows[False], _question)
        self._object: Any = None
        self._reward = 0.0
        self._calls = 0

    async def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        self._object = self._kind(task_spec=dict(example.record), secrets={})
        await _value(self._object.setup())
        return [{"role": "user", "content": _text(await _value(self._object.get_prompt()))}]

    def episode_tools(self, example: TaskExample) -> Sequence[Mapping[str, Any]]:
        specs = [*self._kind.list_tools().tools, *self._object.list_task_tools().tools]
        return [
            {"name": spec.name, "description": spec.description, "parameters": spec.input_schema}
            for spec in specs
        ]

    def max_episode_turns(self, example: TaskExample) -> int:
        return MAX_TURNS

    async def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        calls = messages[-1].get("tool_calls") or ()
        if not calls:
            if self._kind.terminal_tool() is not None:
                self._take(await self._object.call_terminal_tool(assistant_response or ""))
            return EnvironmentStepResult(done=True)
        answers: list[ChatMessage] = []
        for call in calls:
            text, finished = await self._call(call["function"])
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            if finished:  # later calls would earn a reward again
                return EnvironmentStepResult(True, answers)
        return EnvironmentStepResult(False, answers)

    async def _call(self, function: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of a call's result, and whether it ended the episode."""
        self._calls += 1
        try:
            arguments = json.loads(function["arguments"])
            return self._take(await self._object._call_tool(function["name"], arguments))
        except Exception as error:  # the model may call again, in another way
            return f"{TOOL_ERROR}{error or type(error).__name__}", False

    def _take(self, result: Any) -> tuple[str, bool]:
        if not result.root.ok:
            return f"{TOOL_ERROR}{result.root.error}", False
        output = result.root.output
        self._reward += output.reward or 0.0
        return _text(output.blocks), bool(output.finished)

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        metrics = [RewardMetric("calls", score=float(self._calls))]
        return RewardResult(self._reward, metrics=metrics)

    async def close_episode(self) -> None:
        if self._object is not None:
            await _value(self._object.teardown())


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _text(blocks: Sequence[Any]) -> str:
    """The text of blocks. Raises ValueError for pictures."""
    if any(block.type != "text" for block in blocks):
        raise ValueError("the environment shows a picture, and models here read text only")
    return "\n".join(block.text for block in blocks)


def _question(row: Mapping[str, Any]) -> str:
    return json.dumps(dict(row), sort_keys=True, default=str)
