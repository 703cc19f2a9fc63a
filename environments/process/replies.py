"""Reads the replies of the process that runs environment code.

Environment code can find the descriptor that replies go through and write to it, so each reply may
be forged. A reply has to be exactly what `environments.process.child` sends for that request; all
else raises ForgedError."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

from environments import task_cache
from environments.agents.calls import ANSWER_ROLES, OPENING_ROLES, CallOptions, finite_json
from environments.base import ChatMessage, Environment, EnvironmentAgent, Json, reward_of
from environments.tools import NAME
from environments.untrusted_text import Redactor

MAX_TASKS = 1_000_000
"""Tasks of one split. The host keeps a list of their ids."""
MAX_ID_CHARACTERS = 1000
MAX_TURNS = 2**31 - 1
MAX_DEPTH = 100
"""How deep a reply may be nested. The extra fields of a message may hold any JSON value."""
OPTIONS = {item.name for item in fields(CallOptions)}
WHAT_CHARACTERS = 2000
EVIDENCE_CHARACTERS = 4000
FAULT_CODES = (
    "environment_invalid",
    "environment_unsupported",
    "environment_error",
    "lost_call",
    "environment_memory",
    "environment_file_size",
    "environment_processes",
    "environment_network",
    "environment_access",
    "dataset_invalid",
    "invalid_argument",
)
METHODS = {"import_and_load", "read_splits", *vars(Environment), *vars(EnvironmentAgent)}
"""What user code is called through. Another name is not repeated."""
Read = Callable[[Any], Any]
"""The value as the host uses it. ForgedError for one that the child does not send."""


class ForgedError(ValueError):
    """The text is no reply to that request."""


def parse(line: bytes) -> Json:
    """{"number": int, "value" or "fault": ...}, with texts that have a UTF-8 form."""
    try:
        parsed = finite_json(line.decode("ascii"), object_pairs_hook=_unrepeated)
    except (ValueError, RecursionError) as error:
        raise ForgedError from error
    message = _mapping(_encodable(parsed, 0))
    if set(message) not in ({"number", "value"}, {"number", "fault"}):
        raise ForgedError
    _whole()(message["number"])
    return message


def protections(line: bytes) -> dict[str, str]:
    """What the warden wrote before foreign code started: {protection: "" or why not}."""
    return {name: _string(why) for name, why in _mapping(json.loads(line)).items()}


class ReplyReader:
    """Checks values and removes secrets from their texts."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        text = self._text
        refusals = _named(text, _whole())
        messages = _each(self._message(OPENING_ROLES))
        answers = _each(self._message(ANSWER_ROLES))
        name = _such(_string, task_cache.is_name)

        def task_id(value: Any) -> str:
            return text(_short(MAX_ID_CHARACTERS)(value))

        def method(value: Any) -> str:
            return value if _string(value) in METHODS else ""

        request = {
            "messages": _such(messages, bool),
            "tools": _each(self._tool),
            "options": self._options,
        }
        score = _object(
            reward=_number,
            success=_truth,
            metrics=_named(text, _number),
            reason=_maybe(text),
            error=_maybe(text),
            refusals=refusals,
        )
        step = _object(done=_truth, messages=answers, reward=_maybe(_number))
        self.fault = _row(_one_of(FAULT_CODES), self._what, self._evidence, refusals)
        """The code, what happened, the traceback, and what an agent was refused."""
        self._values: dict[str, Read] = {
            "load": _object(
                splits=_object(train=_whole(1, MAX_TASKS), eval=_whole(0, MAX_TASKS)),
                max_score_concurrency=_whole(1),
                scores_groups=_truth,
                plays_gold=_truth,
                generated=_such(_each(name), lambda names: len(names) <= task_cache.MAX_NAMES),
            ),
            "generated": _such(_short(task_cache.MAX_BYTES), str.isascii),
            "list_tasks": _each(_row(task_id, _short(64))),
            "reworded": _each(_row(_whole(), _whole())),
            "start_episode": _object(
                task_id=task_id,
                expected=_maybe(text),
                group=_maybe(text),
                max_turns=_whole(1, MAX_TURNS),
                is_agent=_truth,
                **request,
            ),
            "step_episode": _such(step, lambda value: value["done"] != bool(value["messages"])),
            "next_call": _either(
                _object(ended=_one_of(("done", "max_turns"))),
                _object(number=_whole(), parent=_maybe(_whole()), **request),
            ),
            **dict.fromkeys(("answer_call", "refuse_call", "close_episode"), _one_of((None,))),
            "score_episode": score,
            "score_group": _each(score),
            "judge": _maybe(_such(_each(_whole()), lambda all: sorted(all) == [*range(len(all))])),
            "sft_completion": messages,
            "gold_turn": _maybe(self._message(("assistant",))),
            "abandon": _object(stuck=_truth, method=method, traceback=self._evidence),
        }

    def value(self, op: str, value: Any) -> Any:
        """The reply to a request with this `op`."""
        return self._values[op](value)

    def _text(self, value: Any) -> str:
        return self._redactor.text(_string(value))

    def _what(self, value: Any) -> str:
        return self._text(value)[:WHAT_CHARACTERS]

    def _evidence(self, value: Any) -> str:
        return self._text(value)[-EVIDENCE_CHARACTERS:]

    def _message(self, roles: Sequence[str]) -> Read:
        function = _object(name=self._text, arguments=self._text)
        call = _object(id=self._text, type=_one_of(("function",)), function=function)

        def read(value: Any) -> ChatMessage:
            message = _mapping(value)
            # These names and values are the API's: a secret that is "user" is not there.
            fields = {"role": _one_of(roles)(message.pop("role", None))}
            fields["content"] = self._text(message.pop("content", None))
            if "tool_calls" in message:
                fields["tool_calls"] = _each(call)(message.pop("tool_calls"))
            return fields | self._redactor.value(message)

        return read

    def _tool(self, value: Any) -> Json:
        tool = _object(type=_one_of(("function",)), function=_mapping)(value)
        function = tool["function"]
        _such(_string, NAME.fullmatch)(function.get("name"))
        _mapping(function.get("parameters"))
        # The names of fields are the API's: a secret that is "type" is not there.
        values = {name: self._redactor.value(item) for name, item in function.items()}
        return {**tool, "function": values}

    def _options(self, value: Any) -> CallOptions:
        """What a request asks. The names of a schema are the agent's own text: no secrets."""
        readers: dict[str, Read] = {
            "max_tokens": _whole(1),
            "stop": _each(_string),
            "tool_choice": _one_of(("auto", "none", "required")),
            "tool_name": _short(64),
            "json_schema": _mapping,
            "role": self._text,
        }
        options: Json = {}
        for name, item in _mapping(value).items():
            if name not in OPTIONS:
                raise ForgedError
            options[name] = readers.get(name, _truth)(item)
        options["stop"] = tuple(options.get("stop", ()))
        return CallOptions(**options)


# -- kinds of values -------------------------------------------------------------------------------


def _unrepeated(pairs: list[tuple[str, Any]]) -> Json:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ForgedError
    return items


def _encodable(value: Any, depth: int) -> Any:
    """The JSON value with lone surrogates as escapes: they cannot be encoded as UTF-8."""
    if depth > MAX_DEPTH:
        raise ForgedError
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(item, depth + 1) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("Json", value).items()
        return {_encodable(name, 0): _encodable(item, depth + 1) for name, item in items}
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ForgedError
    if (number := reward_of(value)) is None:
        raise ForgedError
    return number


def _such(read: Read, is_right: Callable[[Any], Any]) -> Read:
    """What `read` returns, if it is right."""

    def checked(value: Any) -> Any:
        result = read(value)
        if not is_right(result):
            raise ForgedError
        return result

    return checked


def _is(is_right: Callable[[Any], Any]) -> Read:
    return _such(lambda value: value, is_right)


_string = _is(lambda value: isinstance(value, str))
_truth = _is(lambda value: isinstance(value, bool))
_mapping = _is(lambda value: isinstance(value, dict))
_items = _is(lambda value: isinstance(value, list))
_integer = _is(lambda value: isinstance(value, int) and not isinstance(value, bool))


def _short(most: int) -> Read:
    return _such(_string, lambda value: len(value) <= most)


def _whole(least: int = 0, most: int = 2**63 - 1) -> Read:
    return _such(_integer, lambda value: least <= value <= most)


def _one_of(values: Sequence[Any]) -> Read:
    return _is(lambda value: value in values)


def _maybe(read: Read) -> Read:
    return lambda value: None if value is None else read(value)


def _either(read: Read, other: Read) -> Read:
    def either(value: Any) -> Any:
        try:
            return read(value)
        except ForgedError:
            return other(value)

    return either


def _object(**readers: Read) -> Read:
    """An object that has exactly these fields."""

    def read(value: Any) -> Json:
        if _mapping(value).keys() != readers.keys():
            raise ForgedError
        return {name: reader(value[name]) for name, reader in readers.items()}

    return read


def _named(name: Read, read: Read) -> Read:
    return lambda value: {name(key): read(item) for key, item in _mapping(value).items()}


def _each(read: Read) -> Read:
    return lambda value: list(map(read, _items(value)))


def _row(*readers: Read) -> Read:
    def read(value: Any) -> tuple[Any, ...]:
        if len(_items(value)) != len(readers):
            raise ForgedError
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read
