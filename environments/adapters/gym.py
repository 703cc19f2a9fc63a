"""Wraps objects with `reset` and `step` as multi-turn environments: Gymnasium and GEM, OpenEnv, and
TextArena with one player.

    def load_environment(**args):
        return GymEnvironment(lambda seed: gem.make("game:GuessTheNumber-v0"), max_turns=12, **args)

Each task is a seed. Each rollout makes its own object and resets it with that seed. The model's
text is the action, and the observation is the next message. The reward is the sum of the rewards
that `step` returned.

    object      reset(...) returns               step(action) returns
    Gymnasium   (observation, info)              (observation, reward, terminated, truncated, info)
    older gym   observation                      (observation, reward, done, info)
    TextArena   nothing; use get_observation()   (done, info); close() returns the reward
    OpenEnv     an object with `observation`     an object with `observation`, `reward`, `done`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from environments.adapters import takes_keyword
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
    """The result of `reset` or `step`. `ended` is False if only the object's own limit of steps
    ended the episode.
    """

    observation: Any
    reward: float = 0.0
    done: bool = False
    ended: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class GymEnvironment(EnvironmentMultiTurn):
    """`make(seed)` returns a new object.

    `to_action(text)` turns the model's text into an action; the default strips it. If it raises
    ValueError, the model reads the error and the turn is lost. `to_text(observation)` makes the
    message. An episode is a success if `info` says so ("success" or "is_success"). If `info` does
    not say, it is one if the object ended it and the total reward is at least `success_at`."""

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
        self._make = make
        self._max_turns = max_turns
        self._instruction = instruction
        self._success_at = success_at
        self._to_action = to_action
        self._to_text = to_text
        self._object: Any = None
        self._shown = Shown(None)
        self._total = 0.0
        self._steps = 0
        self._invalid = 0

    def start_episode(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        seed = int(example.record["seed"])
        self._object = self._make(seed)
        self._shown = _reset(self._object, seed)
        text = self._to_text(self._shown.observation)
        parts = filter(None, (self._instruction, text))
        return [{"role": "user", "content": "\n\n".join(parts)}]

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
        shown = self._shown
        success = None
        for key in reversed(SUCCESS_KEYS):  # the first one has precedence
            success = shown.info.get(key, success)
        if success is None:
            success = shown.ended and self._total >= self._success_at
        metrics = [
            RewardMetric("ended", score=float(shown.ended)),
            RewardMetric("invalid", score=self._invalid / max(1, self._steps)),
        ]
        return RewardResult(score=self._total, success=bool(success), metrics=metrics)

    def close_episode(self) -> None:
        if _is_textarena(self._object):
            return  # `_step` has closed it
        if hasattr(self._object, "close"):
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
    arguments = {"seed": seed} if takes_keyword(environment.reset, "seed") else {}
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
        reward = _number(rewards.get(0, 0.0))
        return Shown(None, reward, done=True, ended=True, info=info or {})
    if hasattr(result, "observation"):
        done = bool(result.done)
        info = getattr(result, "info", None) or getattr(result, "metadata", None)
        return Shown(result.observation, _number(result.reward or 0.0), done, done, info or {})
    if len(result) == 4:
        observation, reward, terminated, info = result
        truncated = False
    else:
        observation, reward, terminated, truncated, info = result
    done = bool(terminated or truncated)
    return Shown(observation, _number(reward), done, bool(terminated), info or {})


def _number(reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        what = f"step returned the reward {reward!r:.100}, which is no number"
        raise TypeError(f"{what}: wrap the object, and return a number from its step") from None
