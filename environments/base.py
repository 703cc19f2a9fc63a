"""The environment contract.

A folder with an `environment.py` that defines `load_environment(**kwargs)` is an environment. The
object that it returns extends EnvironmentSingleTurn or EnvironmentMultiTurn. Every method may also
be `async def`. The names are those of the `freesolo` SDK, so a folder written for it runs where
that package is installed.

One rollout of a multi-turn environment:

    episode = environment.new_episode(example)
    messages = episode.start_episode(example, prompt_text)
    repeat: the model answers; result = episode.step_episode(example, messages + [answer], answer_text)
    until result.done or episode.max_episode_turns(example) answers were given
    reward = episode.score_episode(example, EnvironmentEpisode(...)); episode.close_episode()
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

ChatMessage = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": str, ...}"""

Split = Literal["train", "eval"]


def _no_metadata() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class TaskExample:
    """One task. `record` is its dataset row, `input` what the model is asked, `output` the gold
    answer, if any.

    `id` is stable across runs and machines; `load_dataset` derives it from the row where the row
    has none."""

    record: Mapping[str, Any]
    input: str
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)
    output: Any = None


@dataclass(frozen=True)
class EnvironmentTurn:
    """One message or event of an episode."""

    role: str
    content: Any
    name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)


@dataclass(frozen=True)
class EnvironmentStepResult:
    """What the environment does after one model turn: `messages` are appended to the conversation
    unless `done`.
    """

    done: bool = True
    messages: Sequence[ChatMessage] = ()
    final_response_text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)


@dataclass(frozen=True)
class EnvironmentEpisode:
    """A finished conversation. `messages` holds all of it, prompt included; `response_text` is the
    final answer.
    """

    messages: Sequence[ChatMessage]
    response_text: str
    turns: Sequence[EnvironmentTurn] = ()
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)
    latency_ms: int | None = None
    total_tokens: int | None = None


@dataclass(frozen=True)
class RewardMetric:
    """A named component that explains how a reward came about."""

    name: str
    score: float | None = None
    value: Any = None
    success: bool | None = None
    threshold: float | None = None
    weight: float | None = None
    reason: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)


@dataclass(frozen=True)
class RewardResult:
    """The reward of one answer or episode: `score` is what is trained on, `success` what is judged."""

    score: float
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)
    name: str = "environment_reward"
    success: bool | None = None
    threshold: float | None = None
    value: Any = None
    reason: str | None = None
    error: str | None = None
    return_type: Literal["binary", "numeric"] = "numeric"
    metrics: Sequence[RewardMetric] = ()
    latency_ms: int | None = None
    total_tokens: int | None = None

    def resolved_success(self) -> bool:
        """`success` if given; False on error; score >= threshold if there is one; else score > 0."""
        if self.success is not None:
            return self.success
        if self.error:
            return False
        if self.threshold is not None:
            return self.score >= self.threshold
        return self.score > 0.0


class Environment(ABC):
    """What single-turn and multi-turn environments share. Extend one of the two classes below."""

    dataset: Sequence[TaskExample] = ()
    """The train split."""
    eval_dataset: Sequence[TaskExample] = ()
    """The held-out split; never trained on."""
    max_score_concurrency: int = 32
    """Calls of this environment that may run at once; 1 where a scorer is not thread-safe."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for many, one in (
            ("score_responses", "score_response"),
            ("score_episodes", "score_episode"),
        ):
            nearest = next(
                (kind for kind in cls.__mro__ if many in vars(kind) or one in vars(kind)), cls
            )
            if many in vars(nearest) and one not in vars(nearest):  # as in the freesolo SDK
                raise TypeError(
                    f"{cls.__name__}.{many} would never be called: each is scored when it ends, by {one}"
                )

    def new_episode(self, example: TaskExample) -> Environment:
        """The object that serves one rollout; by default a shallow copy, so that attributes set on
        it are its own.
        """
        return copy.copy(self)

    def close_episode(self) -> None:  # noqa: B027
        """Release what this episode holds. Called once, also after an error or a timeout."""

    def normalize_response_text(self, example: TaskExample, response_text: str) -> str:
        """The answer as the scorer should see it."""
        return response_text

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        """The gold messages that follow the prompt; by default made from `example.output`."""
        if example.output is None:
            raise ValueError(f"task {example.id!r} has no gold output; override sft_completion")
        output = example.output
        if isinstance(output, Mapping) and "messages" in output:
            output = cast("Mapping[str, Any]", output)["messages"]
        if isinstance(output, Sequence) and not isinstance(output, str):
            return [dict(message) for message in cast("Sequence[ChatMessage]", output)]
        return [
            {
                "role": "assistant",
                "content": output if isinstance(output, str) else json.dumps(output),
            }
        ]

    @abstractmethod
    def start_episode(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        """The messages that the model is shown first."""

    @abstractmethod
    def max_episode_turns(self, example: TaskExample) -> int:
        """Model turns after which the episode ends."""

    @abstractmethod
    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        """Answer one model turn. `messages[-1]` is that turn; `assistant_response` is its text."""

    @abstractmethod
    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        """The reward of a finished conversation. Must not raise, whatever the model wrote."""


class EnvironmentSingleTurn(Environment):
    """One prompt, one answer: implement `build_prompt_messages` and `score_response`."""

    @abstractmethod
    def build_prompt_messages(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        """The messages that the model is shown."""

    @abstractmethod
    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        """The reward of one answer. Must not raise, whatever the model wrote."""

    def start_episode(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        messages = self.build_prompt_messages(example, prompt_text)
        if prompt_text.strip() and all(message["role"] != "system" for message in messages):
            return [{"role": "system", "content": prompt_text.strip()}, *messages]
        return messages

    def max_episode_turns(self, example: TaskExample) -> int:
        return 1

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        return EnvironmentStepResult(
            done=True, final_response_text=self.normalize_response_text(example, assistant_response)
        )

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        return self.score_response(example, episode.response_text)


class EnvironmentMultiTurn(Environment):
    """A conversation: implement `start_episode`, `max_episode_turns`, `step_episode` and
    `score_episode`.
    """


class DatasetError(ValueError):
    """A dataset is missing, empty or has a malformed row; the message names the file and the line."""


def load_dataset(
    path: str | Path, *, input_key: str = "input", output_key: str = "output"
) -> list[TaskExample]:
    """Tasks from a JSONL file, one object a line; `id` and `metadata` keys are used where present.

    Raises DatasetError for anything malformed, for a missing or empty file and for a repeated id.
    """
    path = Path(path)
    examples: list[TaskExample] = []
    seen: dict[str, int] = {}
    try:
        lines = path.read_bytes().decode().split("\n")
    except FileNotFoundError as error:
        raise DatasetError(f"{path.name}: there is no such file in {path.parent}") from error
    except UnicodeDecodeError as error:
        line_number = error.object[: error.start].count(b"\n") + 1
        raise DatasetError(f"{path.name} line {line_number}: not UTF-8: {error.reason}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path.name} line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DatasetError(
                f"{path.name} line {number}: expected an object, got {type(row).__name__}"
            )
        record = cast("dict[str, Any]", row)
        if not isinstance(record.get(input_key), str):
            raise DatasetError(
                f"{path.name} line {number}: {input_key!r} must be a string, got {record.get(input_key)!r}"
            )
        given_id = record.get("id")
        task_id = (
            hashlib.sha256(line.strip().encode()).hexdigest()[:16]
            if given_id is None
            else str(given_id)
        )
        if task_id in seen:
            raise DatasetError(
                f"{path.name} line {number}: id {task_id!r} stands on line {seen[task_id]} already"
            )
        seen[task_id] = number
        examples.append(
            TaskExample(
                record=record,
                input=record[input_key],
                id=task_id,
                metadata=record.get("metadata") or {},
                output=record.get(output_key),
            )
        )
    if not examples:
        raise DatasetError(f"{path.name}: no rows")
    return examples
