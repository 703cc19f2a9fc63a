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
    OpenEnv     an object or a mapping with `reward` and `done`. What the model sees is its
                `observation`, or without that its other fields

`make`, `reset`, `step` and `close` may be coroutine functions, as those of OpenEnv's clients are.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
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
NOT_SHOWN = ("reward", "done", "metadata")
"""Fields of an OpenEnv observation that are not for the model."""
ACTION_ERRORS = (TypeError, AttributeError, LookupError, AssertionError, ValueError)
"""What objects raise for an action of another kind than theirs."""


@dataclass(frozen=True)
class Shown:
    """What `reset` or `step` gave. `ended` is False if only a limit of steps ended the episode."""

    observation: Any
    reward: float = 0.0
    done: bool = False
    ended: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


def to_text(observation: Any) -> str:
    """The observation as text: its only text, or JSON; of OpenEnv without reward and metadata."""
    fields = dict(_fields(observation))
    if _is_result(observation):
        for name in NOT_SHOWN:
            fields.pop(name, None)
        fields = {name: value for name, value in fields.items() if not name.startswith("_")}
    elif not isinstance(observation, Mapping):
        return str(observation)
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, ensure_ascii=False, default=str)


@dataclass(eq=False)
class GymEnvironment(EnvironmentMultiTurn):
    """`make(seed)` returns a new object.

    `to_action(text)` turns the model's text into an action; the default strips it. If it raises
    ValueError, the model reads the error and the turn is lost. `to_text(observation)` makes the
    message. An episode is a success if `info` says so ("success" or "is_success"). If `info` does
    not say, it is one if the object ended it and the total reward is at least `success_at`."""

    make: Callable[[int], Any]
    _: KW_ONLY
    max_turns: int
    instruction: str = ""
    train_size: int = 500
    eval_size: int = 100
    seed: int = 0
    success_at: float = 1.0
    to_action: Callable[[str], Any] = str.strip
    to_text: Callable[[Any], str] = to_text

    def __post_init__(self) -> None:
        self.dataset = _tasks(self.seed, self.train_size)
        self.eval_dataset = _tasks(self.seed + EVAL_SEED_OFFSET, self.eval_size)
        self._object: Any = None
        self._shown = Shown(None)
        self._total = 0.0
        self._steps = 0
        self._invalid = 0

    def start_episode(self, example: TaskExample) -> Any:
        seed = int(example.record["seed"])

        def begin(created: Any) -> Any:
            self._object = created
            return _then(_reset(created, seed), show)

        def show(shown: Shown) -> list[ChatMessage]:
            self._shown = shown
            parts = filter(None, (self.instruction, self.to_text(shown.observation)))
            return [{"role": "user", "content": "\n\n".join(parts)}]

        return _then(self.make(seed), begin)

    def max_episode_turns(self, example: TaskExample) -> int:
        return self.max_turns

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> Any:
        self._steps += 1
        try:
            action = self.to_action(assistant_response or "")
        except ValueError as error:
            self._invalid += 1
            return _reply(f"That is no valid action: {error}")
        with self._explains(action):
            stepped = _step(self._object, action)
        if inspect.isawaitable(stepped):
            return self._awaited(stepped, action)
        return self._answer(stepped)

    async def _awaited(self, stepped: Awaitable[Shown], action: Any) -> EnvironmentStepResult:
        with self._explains(action):
            shown = await stepped
        return self._answer(shown)

    @contextmanager
    def _explains(self, action: Any) -> Generator[None]:
        """An error of `step` says that it got text, if no `to_action` was given."""
        try:
            yield
        except ACTION_ERRORS as error:
            if isinstance(error, RewardError) or self.to_action is not str.strip:
                raise
            raised = f"step raised {type(error).__name__}: {error!s:.200}"
            what = f"{raised}; its action was the model's text, {action!r:.100}"
            raise TypeError(what) from error

    def _answer(self, shown: Shown) -> EnvironmentStepResult:
        self._shown = shown
        self._total += shown.reward
        if shown.done:
            return EnvironmentStepResult(done=True)
        return _reply(self.to_text(shown.observation))

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        shown = self._shown
        success = shown.info.get("success", shown.info.get("is_success"))
        if success is None:
            success = shown.ended and self._total >= self.success_at
        metrics = [
            RewardMetric("ended", score=float(shown.ended)),
            RewardMetric("invalid", score=self._invalid / max(1, self._steps)),
        ]
        return RewardResult(score=self._total, success=bool(success), metrics=metrics)

    def close_episode(self) -> Any:
        if _is_textarena(self._object):
            return None  # `_step` has closed it
        return self._object.close() if hasattr(self._object, "close") else None


def _tasks(first_seed: int, count: int) -> list[TaskExample]:
    return [
        TaskExample(record={"seed": seed}, input=f"seed {seed}", id=f"seed-{seed}")
        for seed in range(first_seed, first_seed + count)
    ]


def _reply(text: str) -> EnvironmentStepResult:
    return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": text}])


def _is_textarena(environment: Any) -> bool:
    return hasattr(environment, "get_observation")


def _then(value: Any, use: Callable[[Any], Any]) -> Any:
    """`use(value)`; if the value is awaitable, a coroutine that awaits it first."""
    if not inspect.isawaitable(value):
        return use(value)

    async def wait() -> Any:
        used = use(await value)
        return await used if inspect.isawaitable(used) else used

    return wait()


def _reset(environment: Any, seed: int) -> Any:
    """A Shown, or an awaitable of it."""
    arguments = {"seed": seed} if takes_keyword(environment.reset, "seed") else {}
    if _is_textarena(environment):
        environment.reset(num_players=1, **arguments)
        return Shown(environment.get_observation()[1])
    return _then(environment.reset(**arguments), _first_shown)


def _first_shown(result: Any) -> Shown:
    if (shown := _of_fields(result)) is not None:
        return shown
    if isinstance(result, tuple):
        observation, info = cast("tuple[Any, Any]", result)
        return Shown(observation, info=info or {})
    return Shown(result)


def _step(environment: Any, action: Any) -> Any:
    """A Shown, or an awaitable of it."""
    if _is_textarena(environment):
        done, info = environment.step(action)
        if not done:
            return Shown(environment.get_observation()[1], info=info or {})
        rewards = cast("Mapping[int, float]", environment.close()[0] or {})
        reward = _number(rewards.get(0, 0.0))
        return Shown(None, reward, done=True, ended=True, info=info or {})
    return _then(environment.step(action), _shown_of)


def _shown_of(result: Any) -> Shown:
    if (shown := _of_fields(result)) is not None:
        return shown
    if len(result) == 4:
        observation, reward, terminated, info = result
        truncated = False
    else:
        observation, reward, terminated, truncated, info = result
    done = bool(terminated or truncated)
    return Shown(observation, _number(reward), done, bool(terminated), info or {})


def _of_fields(result: Any) -> Shown | None:
    """What an OpenEnv result shows; None if it is none."""
    if not _is_result(result):
        return None
    fields = _fields(result)
    observation = fields.get("observation", result)
    nested = _fields(observation)
    info = fields.get("info") or fields.get("metadata") or nested.get("metadata")
    if isinstance(observation, Mapping):  # over HTTP it may hold the metadata
        observation = {name: value for name, value in nested.items() if name not in NOT_SHOWN}
    done = bool(fields["done"])
    return Shown(observation, _number(fields["reward"] or 0.0), done, done, info or {})


def _is_result(value: Any) -> bool:
    fields = _fields(value)
    return "reward" in fields and "done" in fields


def _fields(value: Any) -> Mapping[str, Any]:
    """The entries of a mapping, or the attributes of an object."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    return getattr(value, "__dict__", {})


class RewardError(TypeError):
    """`step` returned a reward that is no number."""


def _number(reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        what = f"step returned the reward {reward!r:.100}, which is no number"
        raise RewardError(f"{what}: wrap the object, and return a number from its step") from None
