"""Environment classes as TRL's GRPOTrainer takes them in `environment_factory`.

    return load(Game, dataset=[{"prompt": "Guess a number.", "secret": 7}], max_turns=6)

As there, an episode is `factory()` with `reset(**row)`, whose text joins the last user message; its
public methods are the tools; `get_reward()` and reward functions, which get lists of one and
`environments`, are summed. TRL itself is not needed, and nothing of it is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from environments.adapters import Row, prompt_messages, prompt_text, tasks_of
from environments.base import (
    ChatMessage,
    EnvironmentEpisode,
    RewardMetric,
    RewardResult,
    TaskExample,
    UnsupportedError,
)
from environments.tools import EnvironmentToolUse

OWN = ("reset", "get_reward")  # methods that are no tools


def load(
    environment_factory: Callable[[], Any],
    dataset: Iterable[Row],
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    *,
    eval_dataset: Iterable[Row] = (),
    max_turns: int = 8,
    success_at: float = 1.0,
) -> FactoryEnvironment:
    """Raises UnsupportedError for coroutine methods and rewards that are models."""
    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    probe = environment_factory()
    names = _methods(probe)
    if "reset" not in names:
        raise UnsupportedError(f"{type(probe).__name__} has no method reset")
    if not functions and "get_reward" not in names:
        raise UnsupportedError(f"{type(probe).__name__} has no get_reward: pass reward_funcs")
    for item in (*(getattr(probe, name) for name in names), *functions):
        if not callable(item) or inspect.iscoroutinefunction(item):
            raise UnsupportedError(f"{item!r:.80} must be a function that is not async")
    tasks = tasks_of(list(dataset), list(eval_dataset), prompt_text)
    return FactoryEnvironment(environment_factory, functions, success_at, *tasks, max_turns)


@dataclass(eq=False)
class FactoryEnvironment(EnvironmentToolUse):
    _factory: Callable[[], Any]
    _functions: Sequence[Callable[..., Any]]
    _success_at: float
    dataset: Sequence[TaskExample]
    eval_dataset: Sequence[TaskExample]
    max_turns: int
    _object: Any = None

    def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        self._object = self._factory()
        messages = prompt_messages(example.record)
        if observation := self._object.reset(**example.record):
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + observation}]
        return messages

    def episode_tools(self, example: TaskExample) -> Sequence[Callable[..., Any]]:
        return [getattr(self._object, name) for name in _methods(self._object) if name not in OWN]

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        metrics: list[RewardMetric] = []
        columns = {name: [value] for name, value in example.record.items() if name != "prompt"}
        arguments: dict[str, Any] = {
            **columns,
            "prompts": [list(episode.messages[: episode.prompt_length])],
            "completions": [list(episode.messages[episode.prompt_length :])],
            "environments": [self._object],
        }
        for function in self._functions:
            (paid,) = function(**arguments)
            if paid is not None:  # it does not apply to this task
                metrics.append(RewardMetric(function.__name__, score=float(paid)))
        if hasattr(self._object, "get_reward"):
            paid = float(self._object.get_reward())
            metrics.append(RewardMetric(type(self._object).__name__, score=paid))
        reward = sum(metric.score or 0.0 for metric in metrics)
        return RewardResult(reward, success=reward >= self._success_at, metrics=metrics)


def _methods(instance: object) -> list[str]:
    """Names of the public methods of its class, in the order of TRL, which is the alphabet's."""
    result = inspect.getmembers(type(instance), inspect.isfunction)
    return [name for name, _ in result if not name.startswith("_")]
