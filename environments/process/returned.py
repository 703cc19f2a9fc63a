"""Checks of what user code returned, in the process that ran it, and how faults show it.

Each raises an EnvironmentFault that says what had to be returned and what was."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from environments.base import (
    LARGEST_REWARD,
    ChatMessage,
    Json,
    RewardResult,
    TaskExample,
    reward_of,
)
from environments.faults import EnvironmentFault
from environments.process.replies import EVIDENCE_CHARACTERS, MAX_ID_CHARACTERS, MAX_TASKS
from environments.same_task import TaskTexts, gold_of
from environments.sandbox.confinement import message_of
from environments.tools import tool_calls_of
from environments.untrusted_text import Redactor

EXPECTED_CHARACTERS = 2000
ADDRESS = re.compile(" at 0x[0-9a-f]+")

environment_error = functools.partial(EnvironmentFault, "environment_error")
environment_invalid = functools.partial(EnvironmentFault, "environment_invalid")
dataset_invalid = functools.partial(EnvironmentFault, "dataset_invalid")

_redactor = Redactor(())


def hide(secrets: Iterable[str]) -> None:
    """Faults hide these from now on. What is cut here is redacted here, and by the host again."""
    global _redactor
    _redactor = Redactor(secrets)


def check_tasks(attribute: str, value: Any) -> None:
    if not isinstance(value, Sequence):
        raise dataset_invalid(f"{attribute} must be a list of TaskExample, got {kind_of(value)}")
    examples = cast("Sequence[Any]", value)
    count = len(examples)
    if count > MAX_TASKS:
        raise dataset_invalid(f"{attribute} has {count:,} tasks; the most are {MAX_TASKS:,}")
    result = 0
    for example in itertools.islice(examples, count + 1):
        what = f"{attribute}[{result}] must be a TaskExample"
        question = cast("Any", example.input) if isinstance(example, TaskExample) else None
        if not isinstance(question, str):
            raise dataset_invalid(f"{what} whose input is a string, got {shown(example, 200)}")
        if example.id is not None and len(str(example.id)) > MAX_ID_CHARACTERS:
            raise dataset_invalid(f"{what} whose id has at most {MAX_ID_CHARACTERS:,} characters")
        result += 1
    if result != count:
        more = "more" if result > count else f"only {result:,}"
        raise dataset_invalid(f"len({attribute}) is {count:,}, but it has {more} tasks")


def assistant(text: str | None, tool_calls: list[Json]) -> ChatMessage:
    turn: ChatMessage = {"role": "assistant", "content": text}
    if tool_calls:
        turn["tool_calls"] = tool_calls
    return turn


def messages_of(value: Any, method: str, roles: Sequence[str]) -> list[ChatMessage]:
    messages = listed(value, f"{method} must return a list of messages")
    return [chat_message(message, method, roles) for message in messages]


def listed(value: Any, must: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise environment_error(f"{must}, got {kind_of(value)}")
    return cast("Sequence[Any]", value)


def chat_message(message: Any, method: str, roles: Sequence[str]) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise environment_error(f"a message of {method} must be a dict, got {kind_of(message)}")
    fields = dict(cast("Mapping[str, Any]", message))
    role = fields.get("role")
    if role not in roles:
        what = f"a message of {method} has role {shown(role)}"
        raise environment_error(f"{what}; expected one of: {', '.join(roles)}")
    what = f"the content of a {role} message of {method}"
    content = fields.get("content")
    if fields.get("tool_calls"):
        try:
            fields["tool_calls"] = tool_calls_of(fields["tool_calls"])
        except ValueError as error:
            raise environment_error(
                f"a {role} message of {method}: {cut(message_of(error), 300)}"
            ) from error
        content = content or ""
    else:
        fields.pop("tool_calls", None)
    fields["content"] = text_of(content, what)
    return fields


def text_of(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise environment_error(f"{what} must be a string, got {kind_of(value)}")
    # A lone surrogate, as from a badly decoded file, cannot be encoded as UTF-8.
    return value if value.isascii() else value.encode(errors="replace").decode()


def score_of(result: Any, must: str) -> Json:
    if not isinstance(result, RewardResult):
        raise environment_error(f"{must}, got {kind_of(result)}; write RewardResult(score=...)")
    reward = number_of(result.score, "the score")
    score: Json = {"reward": reward, "success": bool(result.resolved_success())}
    score["metrics"] = {}
    try:
        for metric in result.metrics:
            value: Any = metric.score
            if value is not None and value == value:  # None and NaN: it was not measured
                score["metrics"][metric.name] = number_of(value, f"metric {metric.name!r:.80}")
    except (TypeError, AttributeError) as error:
        what = f"the metrics must be a list of RewardMetric, got {kind_of(result.metrics)}"
        raise environment_error(what) from error
    for name, text in (("reason", result.reason), ("error", result.error)):
        score[name] = None if text is None else text_of(str(text), name)
    return score


def number_of(value: Any, what: str) -> float:
    number = reward_of(value)
    if number is None:
        size = f"it may be at most {LARGEST_REWARD:,.0f} in size"
        raise environment_error(f"{what} must be a finite number, got {shown(value)}; {size}")
    return number


def kind_of(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {shown(value)}"


def shown(value: object, most: int = 100) -> str:
    return cut(repr(value), most)


def cut(text: str, most: int) -> str:
    return _redactor.text(text)[:most]


def end_of(text: str) -> str:
    return _redactor.text(text)[-EVIDENCE_CHARACTERS:]


def task_id(example: TaskExample) -> str:
    return str(example.id) if example.id is not None else digest(example.input)[:16]


def expected_of(example: TaskExample) -> str | None:
    """The gold answer, as a transcript shows it."""
    gold = example.output
    if gold is None or isinstance(gold, str):
        return gold and gold[:EXPECTED_CHARACTERS]
    with suppress(TypeError, ValueError, RecursionError):
        return json.dumps(gold, ensure_ascii=False, default=kind_of)[:EXPECTED_CHARACTERS]
    return None


def as_task(example: TaskExample) -> TaskTexts:
    """Without a gold answer, the rest of the row but its id tells tasks apart as one would."""
    gold: Any = example.output
    if isinstance(gold, str):
        return TaskTexts(example.input, gold_of(gold))
    if gold is None:
        record = {**example.record, "id": None}
        rest = {name: value for name, value in record.items() if value != example.input}
        gold = [rest, dict(example.metadata)]
    return TaskTexts(example.input, json.dumps(gold, sort_keys=True, default=_lasting))


def _lasting(value: object) -> str:
    """What JSON cannot represent, without the address that tells equal objects apart."""
    return ADDRESS.sub("", f"{type(value).__name__} {value!r}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
