"""What the APIs that an agent may speak have in common: OpenAI's chat completions and responses,
and Anthropic's messages, each in a file of its own.

    dialect = DIALECTS["/chat/completions"]    # environments/agents/server.py
    request = dialect.read(body, kept)         # what the request asks, as messages and tools
    dialect.whole(answers, request)            # the body of the reply
    dialect.events(answers, request)           # the same as events of a stream

Every dialect reads the same messages: roles system, user, assistant and tool, texts as strings, and
calls in the form of environments/tools.py. Each has a list of the fields that it accepts and
refuses every other one, so no wish of an agent is passed over in silence."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from environments.agents.calls import CallOptions, Usage
from environments.base import ChatMessage, Json
from environments.tools import as_list, as_object, tool_calls_of, tool_schemas

Event = tuple[str | None, Json]  # its name, if the dialect names events, and its data
MODEL = "policy"
"""The name of the model that is trained or evaluated. Every other name in a request is it too, and
says which role of the agent asks, but for BASE."""
BASE = "base"  # the name of the base model, which is not trained
UNTRAINED = ":untrained"  # ends a name of the model if its answer is not to be trained
ROLE_HEADER = "x-flash-role"
TRAIN_HEADER = "x-flash-train"
MOST_CHOICES = 8  # answers that one request may ask for
MOST_STOPS = 16
MOST_ROLE_CHARACTERS = 64
ANY_OBJECT: Json = {"type": "object"}
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
TEXT_PARTS = ("text", "input_text", "output_text")
UNSEEN_PARTS = ("thinking", "redacted_thinking")  # parts that models of others wrote for themselves
CHARACTERS_PER_TOKEN = 3
"""For requests that only count tokens: the model's tokenizer is in another process."""


@dataclass(frozen=True)
class TurnToSend:
    """The model's turn, a message of role assistant, for one request."""

    turn: ChatMessage
    usage: Usage

    @property
    def text(self) -> str:
        return self.turn["content"] or ""

    @property
    def calls(self) -> list[Json]:
        return self.turn.get("tool_calls", [])

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.usage.ended


@dataclass(eq=False)
class ApiError(Exception):
    """What the API answers instead of a turn."""

    status: int
    code: str
    message: str
    param: str | None = None
    may_retry: bool = False

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "api_error"}
        return kinds.get(self.status, "invalid_request_error")


def invalid(what: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_value", what, param)


@dataclass(frozen=True)
class ApiRequest:
    """A request in the terms of every dialect."""

    body: Json
    messages: list[ChatMessage]
    tools: list[Json]
    options: CallOptions
    identity: str  # of the reply
    choices: int = 1  # how many answers it asks for
    left_out: list[str] = field(default_factory=list[str])
    """Tools of the service, which cannot be had here."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str:
        return str(self.body.get("model"))


Kept = Mapping[str, list[ChatMessage]]
"""The conversations of earlier replies by their ids, without instructions."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Dialect:
    ends_with: str | None = None
    """What follows the last event of a stream."""
    replies: str
    """How the identity of a reply begins."""
    honoured: ClassVar[frozenset[str]]
    """Fields that change the answer as the API says."""
    of_the_run: ClassVar[frozenset[str]]
    """Fields that are accepted and have no effect: the run decides how its model samples."""
    without_effect: ClassVar[frozenset[str]]
    """Fields that say nothing about the answer, in the API either."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Fields that would change the answer, with the values that do not."""

    def read(self, body: Json, kept: Kept, *, is_counted: bool = False) -> ApiRequest:
        """Raises ApiError. If `is_counted`, the request only asks for its number of tokens."""
        self.check(body)
        messages = self.messages(body, kept)
        tools = self.tools(body)
        options = CallOptions() if is_counted else self.options(body)
        names = [tool["function"]["name"] for tool in tools]
        if options.tool_choice == "required":
            if options.tool_name is not None and options.tool_name not in names:
                raise invalid(
                    f"tool_choice: there is no tool {options.tool_name!r:.80}", "tool_choice"
                )
            if not names:
                what = "tool_choice asks for a tool, and the request has none"
                raise invalid(what, "tool_choice")
        given = as_list(body.get("tools"))
        left_out = [as_object(tool) for tool in given if not self.is_function(tool)]
        return ApiRequest(
            body,
            messages,
            tools,
            options,
            f"{self.replies}{secrets.token_hex(12)}",
            self.choices(body),
            [str(tool.get("type", "tool"))[:40] for tool in left_out],
        )

    def messages(self, body: Json, kept: Kept) -> list[ChatMessage]:
        """The conversation that a request continues. Raises ApiError."""
        raise NotImplementedError

    def tools(self, body: Json) -> list[Json]:
        """Raises ApiError."""
        return read_tools([tool for tool in as_list(body.get("tools")) if self.is_function(tool)])

    def is_function(self, tool: Any) -> bool:
        """Whether the client runs this tool. Those that the service runs cannot be had here."""
        return as_object(tool).get("type", "function") == "function"

    def options(self, body: Json) -> CallOptions:
        """Raises ApiError."""
        raise NotImplementedError

    def choices(self, body: Json) -> int:
        return 1

    def whole(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Json:
        raise NotImplementedError

    def events(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Iterator[Event]:
        raise NotImplementedError

    def error(self, error: ApiError, request_id: str | None = None) -> Json:
        return {"error": {**self._said(error), "code": error.code}}

    def error_event(self, error: ApiError, request_id: str | None = None) -> Event:
        """The error in a stream that has begun."""
        return None, self.error(error)

    def _said(self, error: ApiError) -> Json:
        return {"message": str(error), "type": error.kind, "param": error.param}

    def check(self, body: Json) -> None:
        """Raises ApiError for a field that is not accepted."""
        if not isinstance(body.get("model"), str):
            raise ApiError(400, "missing_required_parameter", "model must be a string", "model")
        accepted = self.honoured | self.of_the_run | self.without_effect
        for name, value in body.items():
            if name in accepted or value is None:
                continue
            if name not in self.neutral:
                raise self.unknown(name)
            if value not in self.neutral[name]:
                raise unsupported(name, value)

    def unknown(self, name: str) -> ApiError:
        return ApiError(400, "unknown_parameter", f"Unknown parameter: {name!r:.80}.", name[:80])


def unsupported(name: str, value: Any) -> ApiError:
    what = f"{name}={value!r:.80} is not supported here: leave it out"
    return ApiError(400, "unsupported_value", what, name)


def read_number(body: Json, name: str, most: int | None = None) -> int | None:
    """The value of a field that is a number of at least 1. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(f"{name} must be a whole number of at least 1, got {value!r:.40}", name)
    if most is not None and value > most:
        raise ApiError(400, "unsupported_value", f"{name} may be at most {most} here", name)
    return value


def read_stops(body: Json, name: str) -> tuple[str, ...]:
    value = body.get(name)
    stops = [value] if isinstance(value, str) else as_list(value)
    if not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > MOST_STOPS:
        raise invalid(f"{name} must be a text or up to {MOST_STOPS} texts", name)
    return tuple(stops)


def read_schema(form: Json, param: str) -> Json | None:
    """The JSON schema that a response format asks for. Raises ApiError."""
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    schema = form.get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise invalid(f"{param} must be text, json_object, or json_schema with a schema", param)
    return as_object(schema)


def in_role(request: ApiRequest, headers: Mapping[str, str]) -> CallOptions:
    """The options with what the headers and the model's name say of the role. Raises ApiError."""
    trains = headers.get(TRAIN_HEADER, "true").lower()
    if trains not in ("true", "false"):
        raise invalid(f"{TRAIN_HEADER} must be true or false, got {trains!r:.40}")
    name = request.model.removesuffix(UNTRAINED)
    role = headers.get(ROLE_HEADER, "" if name == MODEL else name)
    return replace(
        request.options,
        role=role[:MOST_ROLE_CHARACTERS],
        is_trained=trains == "true" and name == request.model and name != BASE,
        is_base=name == BASE,
    )


def read_choice(value: Any) -> Json:
    """`tool_choice` of OpenAI's APIs as options. Raises ApiError."""
    if value is None:
        return {}
    if value in ("auto", "none", "required"):
        return {"tool_choice": value}
    choice = as_object(value)
    name = choice.get("name", as_object(choice.get("function")).get("name"))
    if choice.get("type") != "function" or not isinstance(name, str):
        raise unsupported("tool_choice", value)
    return {"tool_choice": "required", "tool_name": name}


# -- messages and calls, of every API --------------------------------------------------------------


def read_message(message: Json) -> ChatMessage:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise invalid(f"unknown role {message.get('role')!r:.40}", "messages")
    said: ChatMessage = {"role": role, "content": read_text(message.get("content"))}
    if role == "tool":
        said["tool_call_id"] = str(message.get("tool_call_id", ""))
    if role == "assistant" and message.get("tool_calls"):
        said["tool_calls"] = _calls(message["tool_calls"], "messages")
    return said


def _calls(value: Any, param: str) -> list[Json]:
    try:
        return tool_calls_of(value)
    except ValueError as error:
        raise invalid(str(error), param) from error


def read_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in map(as_object, as_list(content) or [None]):
        kind = part.get("type")
        text = part.get("text")
        if kind in UNSEEN_PARTS:
            continue
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise invalid("the content of a message must be text; this model reads no more")
        texts.append(text)
    return "".join(texts)


def read_tools(value: list[Any]) -> list[Json]:
    try:
        return tool_schemas(value)
    except (TypeError, ValueError) as error:
        raise invalid(str(error), "tools") from error


def add_calls(messages: list[ChatMessage], calls: list[Json]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    called = turn.get("tool_calls", []) + _calls(calls, "input")
    messages[-1] = {**turn, "tool_calls": called}


def sampled_tokens(answer: TurnToSend) -> list[Json]:
    """The sampled tokens as OpenAI's APIs write them."""
    tokens: list[Json] = []
    for text, logprob in answer.usage.logprobs:
        token = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        tokens.append({**token, "top_logprobs": []})
    return tokens


def count_tokens(request: ApiRequest) -> Json:
    """About how many tokens the request has, for agents that plan by it."""
    characters = len(json.dumps([request.messages, request.tools]))
    return {"input_tokens": characters // CHARACTERS_PER_TOKEN}
