"""Objects with `reset` and `step` as multi-turn environments: Gymnasium and GEM, TextArena with one
player, OpenEnv.

    def load_environment(**args):
        return GymEnvironment(lambda seed: gem.make("game:GuessTheNumber-v0"), max_turns=12, **args)

Every task is a seed, every rollout has an object of its own, made and reset with that seed. What
the model writes is the action, what the object shows is the next message. The reward is the sum of
what `step` paid.

    object      reset(...) returns                    step(action) returns
    Gymnasium   (observation, info)                   (observation, reward, terminated, truncated, info)
    older gym   observation                           (observation, reward, done, info)
    TextArena   nothing; get_observation() shows it   (done, info); close() tells the reward
    OpenEnv     an object with `observation`          an object with `observation`, `reward`, `done`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from environments.base import (
    ChatMessage,
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    RewardMetric,
    RewardResult,
    TaskExample,
)

EVAL_SEED_OFFSET = 1_000_000
SUCCESS_KEYS = ("success", "is_success")


@dataclass(frozen=True)
class Shown:
    """What an object showed after `reset` or `step`. `ended` is False where only its own limit of
    steps cut it off.
    """

    observation: Any
    reward: float = 0.0
    done: bool = False
    ended: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class GymEnvironment(EnvironmentMultiTurn):
    """`make(seed)` returns a new object.

    `to_action(text)` makes an action of what the model wrote, by default that text without
    surrounding space; where it raises ValueError the model is told so and the turn is lost.
    `to_text(observation)` makes a message of what is shown. An episode is a success where `info`
    says so ("success" or "is_success"); where it says nothing, if it came to an end of its own with
    a total reward of at least `success_at`."""

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        max_turns: int,
        instruction: str = "",
        train_size: int = 500,
        eval_size: int = 100,
        seed: int = 0,
        success_at: float = 1.0,
        to_action: Callable[[str], Any] = str.strip,
        to_text: Callable[[Any], str] = str,
    ) -> None:
        self.dataset = _tasks(seed, train_size)
        self.eval_dataset = _tasks(seed + EVAL_SEED_OFFSET, eval_size)
        self._make, self._max_turns, self._instruction, self._success_at = (
            make,
            max_turns,
            instruction,
            success_at,
        )
        self._to_action, self._to_text = to_action, to_text
        self._object: Any = None
        self._shown = Shown(None)
        self._total = 0.0
        self._steps = self._invalid = 0

    def start_episode(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        seed = int(example.record["seed"])
        self._object = self._make(seed)
        self._shown = _reset(self._object, seed)
        text = "\n\n".join(
            part for part in (self._instruction, self._to_text(self._shown.observation)) if part
        )
        return [{"role": "user", "content": text}]

    def max_episode_turns(self, example: TaskExample) -> int:
        return self._max_turns

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        self._steps += 1
        try:
            action = self._to_action(assistant_response or "")
        except ValueError as error:
            self._invalid += 1
            return _reply(f"That is no valid action: {error}")
        self._shown = _step(self._object, action)
        self._total += self._shown.reward
        if self._shown.done:
            return EnvironmentStepResult(done=True)
        return _reply(self._to_text(self._shown.observation))

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        told = next(
            (self._shown.info[key] for key in SUCCESS_KEYS if key in self._shown.info), None
        )
        success = (
            bool(told)
            if told is not None
            else self._shown.ended and self._total >= self._success_at
        )
        invalid = self._invalid / self._steps if self._steps else 0.0
        return RewardResult(
            score=self._total,
            success=success,
            metrics=[
                RewardMetric("ended", score=float(self._shown.ended)),
                RewardMetric("invalid", score=invalid),
            ],
        )

    def close_episode(self) -> None:
        if (
            self._object is not None
            and not _is_textarena(self._object)
            and hasattr(self._object, "close")
        ):
            self._object.close()


def _tasks(first_seed: int, count: int) -> list[TaskExample]:
    return [
        TaskExample(record={"seed": seed}, input=f"seed {seed}", id=f"seed-{seed}")
        for seed in range(first_seed, first_seed + count)
    ]


def _reply(text: str) -> EnvironmentStepResult:
    return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": text}])


def _is_textarena(environment: Any) -> bool:
    return hasattr(environment, "get_observation")


def _reset(environment: Any, seed: int) -> Shown:
    parameters = inspect.signature(environment.reset).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    arguments = {"seed": seed} if takes_any or "seed" in names else {}
    if _is_textarena(environment):
        environment.reset(num_players=1, **arguments)
        return Shown(environment.get_observation()[1])
    result = environment.reset(**arguments)
    if hasattr(result, "observation"):
        return Shown(result.observation)
    if isinstance(result, tuple):
        observation, info = cast("tuple[Any, Any]", result)
        return Shown(observation, info=info or {})
    return Shown(result)


def _step(environment: Any, action: Any) -> Shown:
    result: Any = environment.step(action)
    if _is_textarena(environment):
        done, info = result
        if not done:
            return Shown(environment.get_observation()[1], info=info or {})
        rewards = cast("Mapping[int, float]", environment.close()[0] or {})
        return Shown(None, float(rewards.get(0, 0.0)), done=True, ended=True, info=info or {})
    if hasattr(result, "observation"):
        done, told = (
            bool(result.done),
            getattr(result, "info", None) or getattr(result, "metadata", None),
        )
        return Shown(result.observation, float(result.reward or 0.0), done, done, told or {})
    if len(result) == 5:
        observation, reward, terminated, truncated, info = result
        return Shown(
            observation, float(reward), bool(terminated or truncated), bool(terminated), info or {}
        )
    observation, reward, done, info = result
    return Shown(observation, float(reward), bool(done), bool(done), info or {})
