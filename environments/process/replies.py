"""Reads the replies of the process that runs environment code.

Environment code can find the descriptor that replies go through and write to it, so each reply may
be forged. A reply has to be exactly what `environments.process.child` sends for that request; all
else raises ForgedError."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

from environments import task_cache
from environments.agents.calls import ANSWER_ROLES, OPENING_ROLES, CallOptions, finite_float
from environments.base import ChatMessage
from environments.redaction import Redactor
from environments.tools import NAME

MAX_TASKS = 1_000_000
"""Tasks of one split. The host keeps a list of their ids."""
MAX_ID_CHARACTERS = 1000
MAX_TURNS = 2**31 - 1
MAX_DEPTH = 100
"""How deep a reply may be nested. The extra fields of a message may hold any JSON value."""
OPTION_NAMES = {item.name for item in fields(CallOptions)}
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
METHODS = (
    "import_and_load",
    "read_splits",
    "new_episode",
    "start_episode",
    "episode_tools",
    "max_episode_turns",
    "step_episode",
    "run",
    "normalize_response_text",
    "score_episode",
    "score_group",
    "close_episode",
    "sft_completion",
    "gold_turn",
)
"""What user code is called through. Another name is not repeated."""


class ForgedError(ValueError):
    """The text is no reply to that request."""


def parse(line: bytes) -> dict[str, Any]:
    """{"number": int, "value": ...} or {"number": int, "fault": ...}, with texts that have a UTF-8
    form.
    """
    try:
        parsed = json.loads(
            line.decode("ascii"),
            object_pairs_hook=_object,
            parse_float=finite_float,
            parse_constant=finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise ForgedError from error
    message = _mapping(_encodable(parsed, 0))
    if set(message) not in ({"number", "value"}, {"number", "fault"}):
        raise ForgedError
    _whole(message["number"])
    return message


def protections(line: bytes) -> dict[str, str]:
    """What the warden wrote before foreign code started: {protection: "" or why not}."""
    return {name: _string(why) for name, why in _mapping(json.loads(line)).items()}


class Reader:
    """Checks values and removes secrets from their texts. A method `_NAME` reads the replies to
    the requests whose `op` is NAME.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def value(self, op: str, value: Any) -> Any:
        return getattr(self, f"_{op}")(value)

    def fault(self, value: Any) -> tuple[str, str, str, dict[str, int]]:
        """The code, what happened, the traceback, and what an agent was refused."""
        code, what, traceback, refusals = _items(value, 4)
        if _string(code) not in FAULT_CODES:
            raise ForgedError
        return (
            code,
            self._text(what)[:WHAT_CHARACTERS],
            self._text(traceback)[-EVIDENCE_CHARACTERS:],
            self._refusals(refusals),
        )

    def _refusals(self, value: Any) -> dict[str, int]:
        return {self._text(what): _whole(count) for what, count in _mapping(value).items()}

    # -- one method for each op --------------------------------------------------------------------

    def _load(self, value: Any) -> dict[str, Any]:
        splits, concurrency, scores_groups, plays_gold, generated = _fields(
            value, "splits", "max_score_concurrency", "scores_groups", "plays_gold", "generated"
        )
        names = [_string(name) for name in _items(generated)]
        if len(names) > task_cache.MAX_NAMES or not all(map(task_cache.is_name, names)):
            raise ForgedError
        train, held_out = _fields(splits, "train", "eval")
        return {
            "splits": {
                "train": _whole(train, 1, MAX_TASKS),
                "eval": _whole(held_out, 0, MAX_TASKS),
            },
            "max_score_concurrency": _whole(concurrency, 1),
            "scores_groups": _truth(scores_groups),
            "plays_gold": _truth(plays_gold),
            "generated": names,
        }

    def _generated(self, value: Any) -> str:
        page = _string(value, task_cache.MAX_BYTES)
        if not page.isascii():
            raise ForgedError
        return page

    def _list_tasks(self, value: Any) -> list[tuple[str, str]]:
        page: list[tuple[str, str]] = []
        for row in _items(value):
            task_id, digest = _items(row, 2)
            page.append((self._id(task_id), _string(digest, 64)))
        return page

    def _start_episode(self, value: Any) -> dict[str, Any]:
        task_id, expected, messages, turns, tools, is_agent, options = _fields(
            value, "task_id", "expected", "messages", "max_turns", "tools", "is_agent", "options"
        )
        opening = self._messages(messages, OPENING_ROLES)
        if not opening:
            raise ForgedError
        most = _whole(turns, 1, MAX_TURNS)
        return {
            "task_id": self._id(task_id),
            "expected": None if expected is None else self._text(expected),
            "messages": opening,
            "max_turns": most,
            "tools": [self._tool(tool) for tool in _items(tools)],
            "is_agent": _truth(is_agent),
            "options": self._options(options),
        }

    def _step_episode(self, value: Any) -> dict[str, Any]:
        done, messages, reward = _fields(value, "done", "messages", "reward")
        answers = self._messages(messages, ANSWER_ROLES)
        if _truth(done) == bool(answers):
            raise ForgedError
        reward = None if reward is None else _number(reward)
        return {"done": done, "messages": answers, "reward": reward}

    def _next_call(self, value: Any) -> dict[str, Any]:
        if set(_mapping(value)) == {"ended"}:
            if value["ended"] not in ("done", "max_turns"):
                raise ForgedError
            return value
        number, parent, messages, tools, options = _fields(
            value, "number", "parent", "messages", "tools", "options"
        )
        said = self._messages(messages, OPENING_ROLES)
        if not said:
            raise ForgedError
        return {
            "number": _whole(number),
            "parent": None if parent is None else _whole(parent),
            "messages": said,
            "tools": [self._tool(tool) for tool in _items(tools)],
            "options": self._options(options),
        }

    def _answer_call(self, value: Any) -> None:
        if value is not None:
            raise ForgedError

    _refuse_call = _close_episode = _answer_call

    def _score_episode(self, value: Any) -> dict[str, Any]:
        reward, success, metrics, reason, error, refusals = _fields(
            value, "reward", "success", "metrics", "reason", "error", "refusals"
        )
        return {
            "reward": _number(reward),
            "success": _truth(success),
            "metrics": {
                self._text(name): _number(number) for name, number in _mapping(metrics).items()
            },
            "reason": None if reason is None else self._text(reason),
            "error": None if error is None else self._text(error),
            "refusals": self._refusals(refusals),
        }

    def _score_group(self, value: Any) -> list[dict[str, Any]]:
        return [self._score_episode(score) for score in _items(value)]

    def _judge(self, value: Any) -> list[int] | None:
        if value is None:
            return None
        ranks = [_whole(rank) for rank in _items(value)]
        if sorted(ranks) != list(range(len(ranks))):
            raise ForgedError
        return ranks

    def _sft_completion(self, value: Any) -> list[ChatMessage]:
        return self._messages(value, OPENING_ROLES)

    def _gold_turn(self, value: Any) -> ChatMessage | None:
        turns = self._messages(value, ("assistant",))
        if len(turns) > 1:
            raise ForgedError
        return turns[0] if turns else None

    def _abandon(self, value: Any) -> dict[str, Any]:
        stuck, method, traceback = _fields(value, "stuck", "method", "traceback")
        return {
            "stuck": _truth(stuck),
            "method": method if _string(method) in METHODS else "",
            "traceback": self._text(traceback)[-EVIDENCE_CHARACTERS:],
        }

    # -- texts -------------------------------------------------------------------------------------

    def _messages(self, value: Any, roles: Sequence[str]) -> list[ChatMessage]:
        return [self._message(_mapping(message), roles) for message in _items(value)]

    def _message(self, message: dict[str, Any], roles: Sequence[str]) -> ChatMessage:
        # The names and values of these two fields are known: a secret that is "user" is not there.
        fields = {
            "role": _string(message.pop("role", None)),
            "content": message.pop("content", None),
        }
        if fields["role"] not in roles:
            raise ForgedError
        fields["content"] = self._text(fields["content"])
        if "tool_calls" in message:
            fields["tool_calls"] = [self._call(call) for call in _items(message.pop("tool_calls"))]
        return fields | self._redactor.value(message)

    def _tool(self, value: Any) -> dict[str, Any]:
        kind, function = _fields(value, "type", "function")
        body = _mapping(function)
        name = _string(body.pop("name", None), 64)
        _mapping(body.get("parameters"))
        # The names of fields are the API's: a secret that is "type" is not there.
        if kind != "function" or not NAME.fullmatch(name):
            raise ForgedError
        return {"type": "function", "function": {"name": self._text(name), **self._values(body)}}

    def _values(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: self._redactor.value(item) for name, item in fields.items()}

    def _call(self, value: Any) -> dict[str, Any]:
        identity, kind, function = _fields(value, "id", "type", "function")
        name, arguments = _fields(function, "name", "arguments")
        if kind != "function":
            raise ForgedError
        body = {"name": self._text(name), "arguments": self._text(arguments)}
        return {"id": self._text(identity), "type": "function", "function": body}

    def _options(self, value: Any) -> CallOptions:
        role = self._text(_mapping(value).get("role", ""))
        return replace(_options(value), role=role)

    def _id(self, value: Any) -> str:
        return self._text(_string(value, MAX_ID_CHARACTERS))

    def _text(self, value: Any) -> str:
        return self._redactor.text(_string(value))


# -- an agent's request ---------------------------------------------------------------------------


def _options(value: Any) -> CallOptions:
    """What a request asks of its answer. The names of a schema are the agent's own text, which the
    model is held to: they are no secrets.
    """
    options = _mapping(value)
    if not set(options) <= OPTION_NAMES:
        raise ForgedError
    usual = CallOptions()
    tool_name = options.get("tool_name")
    limit = options.get("max_tokens")
    schema = options.get("json_schema")
    choice = options.get("tool_choice", usual.tool_choice)
    if choice not in ("auto", "none", "required"):
        raise ForgedError
    return CallOptions(
        max_tokens=None if limit is None else _whole(limit, 1),
        stop=tuple(_string(stop) for stop in _items(options.get("stop", []))),
        tool_choice=choice,
        tool_name=None if tool_name is None else _string(tool_name, 64),
        parallel_tool_calls=_truth(options.get("parallel_tool_calls", True)),
        json_schema=None if schema is None else _mapping(schema),
        logprobs=_truth(options.get("logprobs", False)),
        is_trained=_truth(options.get("is_trained", True)),
        is_base=_truth(options.get("is_base", False)),
    )


# -- kinds of values -------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
        items = cast("dict[str, Any]", value).items()
        return {_encodable(name, 0): _encodable(item, depth + 1) for name, item in items}
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ForgedError
    return cast("dict[str, Any]", value)


def _fields(value: Any, *names: str) -> list[Any]:
    """The values of an object that has exactly these fields."""
    items = _mapping(value)
    if set(items) != set(names):
        raise ForgedError
    return [items[name] for name in names]


def _items(value: Any, count: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise ForgedError
    items = cast("list[Any]", value)
    if count is not None and len(items) != count:
        raise ForgedError
    return items


def _string(value: Any, most: int | None = None) -> str:
    if not isinstance(value, str) or (most is not None and len(value) > most):
        raise ForgedError
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ForgedError
    return value


def _whole(value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    # A bool is an int too.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ForgedError
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ForgedError
    try:
        return float(value)
    except OverflowError as error:
        raise ForgedError from error
