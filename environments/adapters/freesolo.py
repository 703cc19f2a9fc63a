"""Runs folders written for the `freesolo` SDK: the SDK's objects inside this project's contract.

As in the SDK's own runtime, the rows of datasets/train.jsonl have precedence over the object's own,
TRAINING_CONTRACT.md is the system prompt, `load_environment` gets the paths of both if it has
parameters for them, scorers get text and never None, one object serves all episodes at once,
`score_episodes` gets the group, and a step without messages ends its episode. Content may be a list
of text parts. The eval split is datasets/eval.jsonl or `eval_dataset`, if there is one."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from environments.adapters import takes_keyword
from environments.base import (
    ChatMessage,
    Environment,
    EnvironmentEpisode,
    EnvironmentStepResult,
    RewardMetric,
    RewardResult,
    TaskExample,
)

TRAIN_FILES = ("datasets/train.jsonl", "datasets/train.json", "train.jsonl", "train.json")
EVAL_FILES = ("datasets/eval.jsonl", "datasets/eval.json", "eval.jsonl", "eval.json")
CONTRACT_FILE = "TRAINING_CONTRACT.md"
TEXT_PARTS = {"text", "input_text"}


def load(folder: Path, load_environment: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """Call the `load_environment` of a folder that imports the SDK. Adapt an object of the SDK."""
    rows = _first_file(folder, TRAIN_FILES)
    contract = folder / CONTRACT_FILE
    arguments: dict[str, Any] = {}
    if rows and takes_keyword(load_environment, "dataset_path"):
        arguments["dataset_path"] = str(rows)
    if takes_keyword(load_environment, "contract_path"):
        arguments["contract_path"] = str(contract)
    loaded = load_environment(**{**arguments, **args})
    if not is_sdk_object(loaded):
        return loaded
    source = args.get("dataset_path") or rows
    source = source or _own_rows(loaded, "dataset") or _own_rows(loaded, "examples")
    held_out = _first_file(folder, EVAL_FILES) or _own_rows(loaded, "eval_dataset")
    contract = Path(str(args.get("contract_path") or contract))
    prompt = contract.read_text(errors="replace") if contract.is_file() else ""
    base = importlib.import_module("freesolo.environments").EnvironmentSingleTurn
    kind = SdkEnvironment
    for name in ("score_episodes", "score_responses"):
        if getattr(loaded.__class__, name) is not getattr(base, name):
            kind = GroupSdkEnvironment
    return kind(loaded, prompt, _tasks(source), _tasks(held_out))


def is_sdk_object(value: Any) -> bool:
    """Whether the value's class extends a class of the SDK."""
    return any(base.__module__.partition(".")[0] == "freesolo" for base in type(value).__mro__)


@dataclass(eq=False)
class SdkEnvironment(Environment):
    """One object of the SDK, single-turn or multi-turn."""

    _sdk: Any
    _system_prompt: str
    dataset: Sequence[TaskExample]
    eval_dataset: Sequence[TaskExample]

    def __post_init__(self) -> None:
        self._types = importlib.import_module("freesolo.environments")
        self._is_multi_turn = isinstance(self._sdk, self._types.EnvironmentMultiTurn)
        self._steps: list[Any] = []
        self.max_score_concurrency = int(self._sdk.max_score_concurrency)

    def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        self._steps = []
        opening = self._sdk.start_episode(_to_sdk(example), self._system_prompt)
        return list(map(_with_text, opening))

    def max_episode_turns(self, example: TaskExample) -> int:
        return int(self._sdk.max_episode_turns(_to_sdk(example))) if self._is_multi_turn else 1

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        if not self._is_multi_turn:
            return EnvironmentStepResult(done=True)  # score_episodes normalizes the text
        text = assistant_response or ""
        messages = [*messages[:-1], {**messages[-1], "content": text}]
        result = self._sdk.step_episode(_to_sdk(example), messages, text)
        if result.metadata:
            self._steps.append(result.metadata)
        messages = list(map(_with_text, result.messages))
        is_done = bool(result.done) or not messages
        metadata = {"steps": list(self._steps)} if self._steps else {}
        return EnvironmentStepResult(is_done, messages, result.final_response_text, metadata)

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        return self._rewards(example, [episode])[0]

    def _rewards(
        self, example: TaskExample, episodes: Sequence[EnvironmentEpisode]
    ) -> list[RewardResult]:
        finished = list(map(self._to_sdk_episode, episodes))
        results = self._sdk.score_episodes(_to_sdk(example), finished)
        if len(results) != len(finished):
            what = f"{len(results)} rewards for {len(finished)} answers"
            raise ValueError(f"the SDK environment returned {what}")
        return list(map(_reward, results))

    def _to_sdk_episode(self, episode: EnvironmentEpisode) -> Any:
        messages = tuple(map(_with_text, episode.messages))
        turns: list[Any] = []
        for message in messages[episode.prompt_length :]:
            turns.append(
                self._types.EnvironmentTurn(role=message["role"], content=message["content"])
            )
        return self._types.EnvironmentEpisode(
            messages=messages,
            response_text=episode.response_text or "",
            turns=tuple(turns),
            metadata=episode.metadata,
            latency_ms=episode.latency_ms,
            total_tokens=episode.total_tokens,
        )

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        if example.output is None:
            # The default raises ValueError. The SDK would make an empty answer of it.
            return super().sft_completion(example)
        return list(map(_with_text, self._sdk.sft_completion(_to_sdk(example))))


class GroupSdkEnvironment(SdkEnvironment):
    """One that scores several answers together, in a way of its own."""

    def score_group(
        self, example: TaskExample, episodes: Sequence[EnvironmentEpisode]
    ) -> list[RewardResult]:
        return self._rewards(example, episodes)


def _first_file(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _own_rows(sdk: Any, attribute: str) -> Any:
    rows = getattr(sdk, attribute, None)
    return getattr(rows, "examples", rows)  # a freesolo.datasets.Dataset holds them in `examples`


def _tasks(source: Any) -> list[TaskExample]:
    """Read rows as the SDK does. The SDK's ids are positions, alike in every split; ours identify
    the row, and a repeated one also has its number.
    """
    if not source:
        return []
    records = importlib.import_module("freesolo.datasets.records")
    tasks: list[TaskExample] = []
    seen: Counter[str] = Counter()
    for row in records.load_task_examples(source):
        record = row.record
        task_id = record.get("id")
        if task_id is None:
            text = json.dumps(record, sort_keys=True, default=str)
            task_id = hashlib.sha256(text.encode()).hexdigest()[:16]
        seen[str(task_id)] += 1
        if (count := seen[str(task_id)]) > 1:
            task_id = f"{task_id}-{count}"
        tasks.append(TaskExample(record, row.input, str(task_id), row.metadata or {}, row.output))
    return tasks


def _to_sdk(example: TaskExample) -> Any:
    return importlib.import_module("freesolo.datasets").TaskExample(
        record=dict(example.record),
        input=example.input,
        id=example.id,
        metadata=dict(example.metadata),
        output=example.output,
    )


def _reward(result: Any) -> RewardResult:
    metrics: list[RewardMetric] = []
    for metric in result.metrics:
        numbers = (metric.score, metric.value, metric.success)
        number = next((item for item in numbers if item is not None), math.nan)
        metrics.append(RewardMetric(metric.name, number))
    return RewardResult(
        result.score, result.resolved_success(), result.reason, result.error, metrics
    )


def _with_text(message: ChatMessage) -> ChatMessage:
    """The message with its parts as one text, "" without any. ValueError for other parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = cast("list[dict[str, Any]]", content)
        if kinds := {str(part.get("type")) for part in parts} - TEXT_PARTS:
            what = f"a {message.get('role')} message has parts of type {', '.join(sorted(kinds))}"
            raise ValueError(f"{what}: models are trained on text only")
        content = "".join(str(part.get("text", "")) for part in parts)
    return {**message, "content": content}
