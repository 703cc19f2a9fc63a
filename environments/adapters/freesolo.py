"""Folders written for the `freesolo` SDK: its objects on the inside, this contract on the outside.

As in the SDK's own runtime the rows of datasets/train.jsonl come before the object's own,
TRAINING_CONTRACT.md is the system prompt, `load_environment` is told where both are if it asks,
scorers are given text and never None, and one object serves all episodes at once.
datasets/eval.jsonl or `eval_dataset`, where there is one, is the eval split."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from environments.base import (
    ChatMessage,
    Environment,
    EnvironmentEpisode,
    EnvironmentStepResult,
    RewardResult,
    TaskExample,
)

TRAIN_FILES = ("datasets/train.jsonl", "datasets/train.json", "train.jsonl", "train.json")
EVAL_FILES = ("datasets/eval.jsonl", "datasets/eval.json", "eval.jsonl", "eval.json")
CONTRACT_FILE = "TRAINING_CONTRACT.md"


def load(folder: Path, load_environment: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """What `load_environment` of a folder that imports the SDK returns, adapted if it is an object
    of the SDK.
    """
    rows, contract = _first_file(folder, TRAIN_FILES), folder / CONTRACT_FILE
    implied = {"dataset_path": str(rows) if rows else None, "contract_path": str(contract)}
    accepted = _accepted(load_environment)
    extra = {
        name: value
        for name, value in implied.items()
        if value and (accepted is None or name in accepted)
    }
    loaded = load_environment(**{**extra, **args})
    if not is_sdk_object(loaded):
        return loaded
    source = (
        args.get("dataset_path")
        or rows
        or _own_rows(loaded, "dataset")
        or _own_rows(loaded, "examples")
    )
    held_out = _first_file(folder, EVAL_FILES) or _own_rows(loaded, "eval_dataset")
    contract_path = Path(str(args.get("contract_path") or contract))
    prompt_text = contract_path.read_text(errors="replace") if contract_path.is_file() else ""
    return SdkEnvironment(loaded, _tasks(source), _tasks(held_out), prompt_text)


def is_sdk_object(value: Any) -> bool:
    """Whether the value's class extends a class of the SDK."""
    return any(base.__module__.partition(".")[0] == "freesolo" for base in type(value).__mro__)


class SdkEnvironment(Environment):
    """One object of the SDK, single-turn or multi-turn."""

    def __init__(
        self, sdk: Any, train: list[TaskExample], held_out: list[TaskExample], prompt_text: str
    ) -> None:
        from freesolo.environments import EnvironmentMultiTurn  # noqa: PLC0415  # pyright: ignore

        self._sdk, self._prompt_text = sdk, prompt_text
        self._is_multi_turn = isinstance(sdk, cast("type", EnvironmentMultiTurn))
        self._steps: list[Any] = []
        self.dataset, self.eval_dataset = train, held_out
        self.max_score_concurrency = int(sdk.max_score_concurrency)

    def start_episode(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        self._steps = []
        return list(self._sdk.start_episode(_to_sdk(example), self._prompt_text or prompt_text))

    def max_episode_turns(self, example: TaskExample) -> int:
        return int(self._sdk.max_episode_turns(_to_sdk(example))) if self._is_multi_turn else 1

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        if not self._is_multi_turn:
            return EnvironmentStepResult(done=True)  # score_responses normalizes the text, once
        text = assistant_response or ""
        messages = [*messages[:-1], {**messages[-1], "content": text}]
        result = self._sdk.step_episode(_to_sdk(example), messages, text)
        if result.metadata:
            self._steps.append(result.metadata)
        return EnvironmentStepResult(
            bool(result.done), list(result.messages), result.final_response_text
        )

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        text = episode.response_text or ""
        if not self._is_multi_turn:
            return _reward(self._sdk.score_responses(_to_sdk(example), [text]))
        from freesolo.environments import EnvironmentEpisode as Episode  # noqa: PLC0415  # pyright: ignore
        from freesolo.environments import EnvironmentTurn as Turn  # noqa: PLC0415  # pyright: ignore

        make_episode, make_turn = (
            cast("Callable[..., Any]", Episode),
            cast("Callable[..., Any]", Turn),
        )
        finished = make_episode(
            messages=tuple(_with_text(message) for message in episode.messages),
            response_text=text,
            turns=tuple(
                make_turn(role=turn.role, content=turn.content or "") for turn in episode.turns
            ),
            metadata={"steps": self._steps} if self._steps else {},
            latency_ms=episode.latency_ms,
            total_tokens=episode.total_tokens,
        )
        return _reward(self._sdk.score_episodes(_to_sdk(example), [finished]))

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        if example.output is None:
            return super().sft_completion(
                example
            )  # refuses; the SDK would make an empty answer of it
        return [dict(message) for message in self._sdk.sft_completion(_to_sdk(example))]


def _accepted(function: Callable[..., Any]) -> set[str] | None:
    """The names that a function takes as keywords; None where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters)


def _first_file(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _own_rows(sdk: Any, attribute: str) -> Any:
    rows = getattr(sdk, attribute, None)
    return getattr(rows, "examples", rows)  # a freesolo.datasets.Dataset holds them in `examples`


def _tasks(source: Any) -> list[TaskExample]:
    """Rows as the SDK reads them. Its ids are positions, the same in every split; ours stand for
    the row.
    """
    if not source:
        return []
    from freesolo.datasets.records import load_task_examples  # noqa: PLC0415  # pyright: ignore

    examples = cast("list[Any]", load_task_examples(source))
    return [
        TaskExample(e.record, e.input, _task_id(e.record), e.metadata or {}, e.output)
        for e in examples
    ]


def _task_id(record: Mapping[str, Any]) -> str:
    if record.get("id") is not None:
        return str(record["id"])
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _to_sdk(example: TaskExample) -> Any:
    from freesolo.datasets import TaskExample as SdkExample  # noqa: PLC0415  # pyright: ignore

    make: Callable[..., Any] = partial(
        cast("Callable[..., Any]", SdkExample), dict(example.record), example.input
    )
    return make(id=example.id, metadata=dict(example.metadata), output=example.output)


def _reward(results: list[Any]) -> RewardResult:
    if len(results) != 1:
        raise ValueError(f"the SDK environment returned {len(results)} rewards for one answer")
    return RewardResult(
        **{each.name: getattr(results[0], each.name) for each in fields(RewardResult)}
    )


def _with_text(message: ChatMessage) -> ChatMessage:
    return message if message.get("content") is not None else {**message, "content": ""}
