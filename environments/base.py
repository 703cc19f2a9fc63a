"""The environment contract.

An environment is a folder with an `environment.py` that defines `load_environment(**kwargs)`. That
function returns an object of a class that extends EnvironmentSingleTurn, EnvironmentMultiTurn or
EnvironmentAgent. Any method may be `async def`.

One rollout of a multi-turn environment:

    episode = environment.new_episode(example)
    messages = episode.start_episode(example)
    repeat: the model answers
            result = episode.step_episode(example, messages + [answer], answer_text)
    until result.done or the model has answered episode.max_episode_turns(example) times
    reward = episode.score_episode(example, EnvironmentEpisode(...)); episode.close_episode()

An environment that defines `score_group` has the rollouts of a task scored together, when the last
of them has ended: rewards = environment.score_group(example, [EnvironmentEpisode(...), ...])
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

FULL_SCORE = 1.0 - 1e-6  # A score that is 1 but for rounding
LARGEST_REWARD = 1e6
"""Of rewards and metrics, in size: they are summed and squared, and means of larger ones overflow
or drown all others."""
Json = dict[str, Any]
ChatMessage = Json  # {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}

Tool = Mapping[str, Any] | Callable[..., Any]
"""An OpenAI function schema, or a typed Python function (see environments/tools.py)."""


@dataclass(frozen=True)
class TaskExample:
    """One task: its dataset row (`record`), the question (`input`) and the gold answer (`output`).

    `id` is the same in every run and on every machine. If a row has no id, `load_dataset` derives
    one from the row. Tasks with the same `group` hang together, as those of one template or one
    document: evaluations count them so. By default it is the prompt without numbers and names."""

    record: Mapping[str, Any]
    input: str
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    output: Any = None
    group: str | None = None


@dataclass(frozen=True)
class EnvironmentStepResult:
    """The environment's reply to one model turn. `messages` join the conversation unless `done`.

    `reward` is what that turn earns beside the final score: the conversation's reward is the sum,
    and training credits a turn only with what is earned from it on."""

    done: bool = True
    messages: Sequence[ChatMessage] = ()
    final_response_text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reward: float | None = None


@dataclass(frozen=True)
class EnvironmentEpisode:
    """A finished conversation: all `messages`, of which the first `prompt_length` are the prompt,
    and the final `response_text`."""

    messages: Sequence[ChatMessage]
    response_text: str
    prompt_length: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    latency_ms: int | None = None
    total_tokens: int | None = None


@dataclass(frozen=True)
class RewardMetric:
    """A named component of a reward."""

    name: str
    score: float


@dataclass(frozen=True)
class RewardResult:
    """The reward of one answer or episode. Training uses `score`; evaluations report `success`,
    which is by default a score of at least 1 without an `error`. `metadata` is what `score_group`
    gets of an agent's rollout.
    """

    score: float
    success: bool | None = None
    reason: str | None = None
    error: str | None = None
    metrics: Sequence[RewardMetric] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def resolved_success(self) -> bool:
        if self.success is not None:
            return self.success
        return not self.error and self.score >= FULL_SCORE


def reward_of(value: Any) -> float | None:
    """A reward or metric (numpy's too) as a float. None if it is no number, or not within
    LARGEST_REWARD.
    """
    if value is None or isinstance(value, str):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return number if abs(number) <= LARGEST_REWARD else None
    return None


class Environment(ABC):
    """The base of single-turn and multi-turn environments. Extend one of the two classes below."""

    dataset: Sequence[TaskExample] = ()
    """The train split."""
    eval_dataset: Sequence[TaskExample] = ()
    """The held-out split. It is never trained on."""
    max_score_concurrency: int = 32
    """How many scoring calls may run at once. Set 1 if the scorer is not thread-safe."""
    tools: Sequence[Tool] = ()
    """What the model may call, in every task."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for one in ("score_response", "score_episode"):
            many = f"{one}s"  # the batch scorer of the freesolo SDK, which this contract lacks
            for kind in cls.__mro__:
                if one in vars(kind):
                    break
                if many in vars(kind):
                    what = f"{cls.__name__}.{many} would never be called"
                    why = f"each episode is scored as it ends, by {one}"
                    raise TypeError(f"{what}: {why}; score_group scores those of a task together")

    def new_episode(self, example: TaskExample) -> Environment:
        """The object that serves one rollout: a shallow copy, so what it sets stays its own."""
        return copy.copy(self)

    def score_group(
        self, example: TaskExample, episodes: Sequence[EnvironmentEpisode]
    ) -> Sequence[RewardResult]:
        """The rewards of the finished conversations of one task, in the order of `episodes`.

        Optional, for rewards that compare the rollouts of a group, such as their ranks. If a class
        defines it, it scores the rollouts of each task of a training step, and the attempts of each
        task of an evaluation, when the last of them has ended. Rollouts that failed are left out.
        It gets at least two: `score_episode` scores a conversation that is alone, as in the
        held-out evaluations of a run. It is called on the object that load_environment
        returned, so it finds what an episode kept only in `episode.metadata`, which the `metadata`
        of each EnvironmentStepResult is added to. It must not raise: no rollout of the group would
        have a reward."""
        raise NotImplementedError

    def episode_tools(self, example: TaskExample) -> Sequence[Tool]:
        """What the model may call in this task. By default `tools`."""
        return self.tools

    def close_episode(self) -> None:  # noqa: B027
        """Free the episode's resources. Called once, also after an error or a timeout."""

    def normalize_response_text(self, example: TaskExample, response_text: str) -> str:
        """The answer in the form that the scorer expects."""
        return response_text

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        """The gold messages that follow the prompt. The default takes them from `output`."""
        output = example.output
        if output is None:
            raise ValueError(f"task {example.id!r} has no gold output; override sft_completion")
        if isinstance(output, Mapping) and "messages" in output:
            output = cast("Mapping[str, Any]", output)["messages"]
        if isinstance(output, Sequence) and not isinstance(output, str):
            return [dict(message) for message in cast("Sequence[ChatMessage]", output)]
        text = output if isinstance(output, str) else json.dumps(output)
        return [{"role": "assistant", "content": text}]

    @abstractmethod
    def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        """The first messages of the conversation: the prompt."""

    @abstractmethod
    def max_episode_turns(self, example: TaskExample) -> int:
        """The episode ends after this many model turns."""

    @abstractmethod
    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        """Reply to one model turn: `messages[-1]`, whose text is `assistant_response`.

        If the task has tools, messages[-1].get("tool_calls") has the calls, and a message with role
        "tool" answers each (environments/tools.py). A call that does not parse is text."""

    @abstractmethod
    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        """The reward of a finished conversation. It must not raise, whatever the model wrote."""


class EnvironmentSingleTurn(Environment):
    """One prompt, one answer: implement `build_prompt_messages` and `score_response`."""

    @abstractmethod
    def build_prompt_messages(self, example: TaskExample) -> list[ChatMessage]:
        """The prompt."""

    @abstractmethod
    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        """The reward of one answer. It must not raise, whatever the model wrote."""

    def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        return self.build_prompt_messages(example)

    def max_episode_turns(self, example: TaskExample) -> int:
        return 1

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        text = self.normalize_response_text(example, assistant_response)
        return EnvironmentStepResult(done=True, final_response_text=text)

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        return self.score_response(example, episode.response_text)


class EnvironmentMultiTurn(Environment):
    """A conversation. Implement the four methods `start_episode`, `max_episode_turns`,
    `step_episode` and `score_episode`.
    """


class EnvironmentAgent(Environment):
    """A program that asks a model through OpenAI's or Anthropic's API and ends with a reward:
    implement `run`.

    It needs `endpoint = true` in environment.toml. `tools` do not apply to it: the agent sends its
    tools with its requests. If it defines `score_group`, the reward that `run` returns is that of a
    rollout alone, and the result's `metadata` joins the metadata of its EnvironmentEpisode."""

    max_calls: int = 32
    """How many requests one run may make."""
    max_tokens: int | None = None
    """After how many tokens of the model a run may ask no more. None: no limit."""
    max_seconds: float | None = None
    """After how many seconds a run may ask no more. None: no limit."""

    @abstractmethod
    def run(self, example: TaskExample, base_url: str, api_key: str, model: str) -> RewardResult:
        """Solve the task with the model at `base_url`, and return the reward.

        The key is this rollout's own. A request may continue any answered one, by its messages,
        the answer, and new messages; or begin anew. Up to 8 may wait at once."""

    def gold_turn(
        self, example: TaskExample, messages: list[ChatMessage], number: int
    ) -> ChatMessage | None:
        """The gold answer to request `number`, counted from 0, whose conversation is `messages`.
        None if it has none: the agent can then ask no more.

        By default that turn of `sft_completion`, which fits an agent that asks one thing after the
        other. Override it for an agent of several roles or of requests at once."""
        gold = self.sft_completion(example)
        turns = [message for message in gold if message["role"] == "assistant"]
        return turns[number] if number < len(turns) else None

    def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        raise NotImplementedError("an agent's requests are its conversation")

    def max_episode_turns(self, example: TaskExample) -> int:
        return self.max_calls

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        raise NotImplementedError("an agent's requests are its conversation")

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        raise NotImplementedError("run returns the reward")


class DatasetError(ValueError):
    """A dataset is missing, empty or malformed. The message names the file and the line."""


class UnsupportedError(ValueError):
    """An environment of another package needs what cannot run here. The message says what."""


class ArgumentsError(ValueError):
    """`load_environment` got arguments that do not fit. The message names them."""


def load_dataset(
    path: str | Path, *, input_key: str = "input", output_key: str = "output"
) -> list[TaskExample]:
    """Read tasks from a JSONL file with one object a line; `id`, `metadata` and `group` are
    optional keys.

    Raises DatasetError if the file is missing, empty or malformed, or if an id repeats.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except FileNotFoundError as error:
        what = f"{path.name}: there is no such file in {path.parent}"
        if not path.resolve().is_relative_to(Path.cwd()):
            # The sandbox hides files outside the folder, in which environment code begins.
            what += ", or it is hidden: put the data into the environment's own folder"
        raise DatasetError(what) from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise DatasetError(f"{path.name} line {number}: not UTF-8: {error.reason}") from error
    examples: list[TaskExample] = []
    line_of_id: dict[str | None, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = _task_of_line(line, input_key, output_key)
            if (line_before := line_of_id.get(example.id)) is not None:
                raise ValueError(f"id {example.id!r} is already used on line {line_before}")
        except ValueError as error:
            raise DatasetError(f"{path.name} line {number}: {error}") from error
        line_of_id[example.id] = number
        examples.append(example)
    if not examples:
        raise DatasetError(f"{path.name}: no rows")
    return examples


def _task_of_line(line: str, input_key: str, output_key: str) -> TaskExample:
    """The task of one row. Raises ValueError if the row is malformed."""
    try:
        row: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    record = cast("dict[str, Any]", row)
    question = record.get(input_key)
    if not isinstance(question, str):
        raise ValueError(f"{input_key!r} must be a string, got {question!r}")
    task_id = record.get("id")
    if task_id is None:
        task_id = hashlib.sha256(line.strip().encode()).hexdigest()[:16]
    metadata: Any = record.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"'metadata' must be an object, got {metadata!r}")
    metadata = cast("dict[str, Any]", metadata)
    group = record.get("group")
    return TaskExample(
        record,
        question,
        str(task_id),
        metadata,
        record.get(output_key),
        None if group is None else str(group),
    )
