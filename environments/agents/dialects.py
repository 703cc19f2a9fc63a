"""The APIs that an agent may speak: OpenAI's chat completions and responses, and Anthropic's
messages.

    dialect = DIALECTS["/chat/completions"]
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

from environments.agents.calls import THREAD_UNSUPPORTED, CallOptions, Usage
from environments.base import ChatMessage, Json
from environments.tools import as_list, as_object, tool_calls_of, tool_schemas

Event = tuple[str | None, Json]
"""Its name, if the dialect names events, and its data."""
MODEL = "policy"
"""The name of the model that is trained or evaluated. Every other name in a request is it too, and
says which role of the agent asks, but for BASE."""
BASE = "base"
"""The name of the base model, which is not trained."""
UNTRAINED = ":untrained"
"""Ends a name of the model if its answer is not to be trained."""
ROLE_HEADER = "x-flash-role"
TRAIN_HEADER = "x-flash-train"
MOST_CHOICES = 8
"""Answers that one request may ask for."""
MOST_STOPS = 16
MOST_ROLE_CHARACTERS = 64
ANY_OBJECT: Json = {"type": "object"}
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
TEXT_PARTS = ("text", "input_text", "output_text")
UNSEEN_PARTS = ("thinking", "redacted_thinking")
"""Parts that models of others wrote for themselves."""
LOGPROBS = "message.output_text.logprobs"
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
    identity: str
    """Of the reply."""
    choices: int = 1
    """How many answers it asks for."""
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


def _words(text: str) -> frozenset[str]:
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
        return _tools([tool for tool in as_list(body.get("tools")) if self.is_function(tool)])

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


def _number(body: Json, name: str, most: int | None = None) -> int | None:
    """The value of a field that is a number of at least 1. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(f"{name} must be a whole number of at least 1, got {value!r:.40}", name)
    if most is not None and value > most:
        raise ApiError(400, "unsupported_value", f"{name} may be at most {most} here", name)
    return value


def _stops(body: Json, name: str) -> tuple[str, ...]:
    value = body.get(name)
    stops = [value] if isinstance(value, str) else as_list(value)
    if not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > MOST_STOPS:
        raise invalid(f"{name} must be a text or up to {MOST_STOPS} texts", name)
    return tuple(stops)


def _schema(form: Json, param: str) -> Json | None:
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


def _chosen(value: Any) -> Json:
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


# -- OpenAI's chat completions ---------------------------------------------------------------------


class ChatCompletions(Dialect):
    ends_with = "[DONE]"
    replies = "chatcmpl-"
    honoured = _words(
        "messages model max_tokens max_completion_tokens n parallel_tool_calls response_format "
        "stop stream stream_options tool_choice tools logprobs"
    )
    of_the_run = _words("temperature top_p seed reasoning_effort verbosity")
    without_effect = _words(
        "metadata user store service_tier safety_identifier prediction prompt_cache_key "
        "prompt_cache_options prompt_cache_retention"
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "audio": (),
        "moderation": (),
        "web_search_options": (),
    }

    def messages(self, body: Json, kept: Kept) -> list[ChatMessage]:
        messages = as_list(body.get("messages"))
        if not messages:
            raise invalid("messages must be a list of at least one message", "messages")
        return [_message(as_object(message)) for message in messages]

    def options(self, body: Json) -> CallOptions:
        limits = [_number(body, name) for name in ("max_tokens", "max_completion_tokens")]
        form = as_object(body.get("response_format"))
        if form.get("type") == "json_schema":
            form = {**as_object(form.get("json_schema")), "type": "json_schema"}
        return CallOptions(
            max_tokens=min((limit for limit in limits if limit), default=None),
            stop=_stops(body, "stop"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            json_schema=_schema(form, "response_format"),
            logprobs=body.get("logprobs") is True,
            **_chosen(body.get("tool_choice")),
        )

    def choices(self, body: Json) -> int:
        return _number(body, "n", MOST_CHOICES) or 1

    def whole(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Json:
        choices: list[Json] = []
        for index, answer in enumerate(answers):
            message = {**answer.turn, "refusal": None}
            if answer.calls and not answer.text:
                message["content"] = None
            logprobs = _logprobs(answer) if request.options.logprobs else None
            finish = answer.finish_reason
            choice = {"index": index, "message": message, "logprobs": logprobs}
            choices.append({**choice, "finish_reason": finish})
        return {**self._frame(request, ""), "choices": choices, "usage": _usage_of(answers)}

    def _frame(self, request: ApiRequest, part: str) -> Json:
        kind = f"chat.completion{part}"
        created = {"created": request.created, "model": request.model}
        return {"id": request.identity, **created, "object": kind}

    def events(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Iterator[Event]:
        frame = self._frame(request, ".chunk")
        options = as_object(request.body.get("stream_options"))
        with_usage = bool(options.get("include_usage"))
        if with_usage:
            frame["usage"] = None
        for index, answer in enumerate(answers):
            for delta in self._deltas(answer):
                choice: Json = {"index": index, "delta": delta, "finish_reason": None}
                if request.options.logprobs and "role" in delta:
                    choice["logprobs"] = _logprobs(answer)
                yield None, {**frame, "choices": [choice]}
            last: Json = {"index": index, "delta": {}, "finish_reason": answer.finish_reason}
            yield None, {**frame, "choices": [last]}
        if with_usage:
            yield None, {**frame, "choices": [], "usage": _usage_of(answers)}

    def _deltas(self, answer: TurnToSend) -> Iterator[Json]:
        yield {"role": "assistant", "content": None if answer.calls else ""}
        if answer.text:
            yield {"content": answer.text}
        for index, call in enumerate(answer.calls):
            opened = {**call["function"], "arguments": ""}
            yield {"tool_calls": [{"index": index, **call, "function": opened}]}
            arguments = {"arguments": call["function"]["arguments"]}
            yield {"tool_calls": [{"index": index, "function": arguments}]}


def _usage_of(answers: Sequence[TurnToSend]) -> Json:
    written = sum(answer.usage.completion_tokens for answer in answers)
    return Usage(answers[0].usage.prompt_tokens, written).fields()


def _tokens(answer: TurnToSend) -> list[Json]:
    """The sampled tokens as OpenAI's APIs write them."""
    tokens: list[Json] = []
    for text, logprob in answer.usage.logprobs:
        token = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        tokens.append({**token, "top_logprobs": []})
    return tokens


def _logprobs(answer: TurnToSend) -> Json:
    return {"content": _tokens(answer), "refusal": None}


# -- OpenAI's responses ----------------------------------------------------------------------------


class Responses(Dialect):
    replies = "resp_"
    honoured = _words(
        "input model instructions previous_response_id max_output_tokens tools tool_choice "
        "parallel_tool_calls text stream stream_options include"
    )
    of_the_run = _words("temperature top_p reasoning")
    without_effect = _words(
        "metadata client_metadata user store service_tier safety_identifier max_tool_calls "
        "prompt_cache_key prompt_cache_options prompt_cache_retention"
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "background_options": (),
        "access_programs": ([],),
        "image": (),
    }

    def messages(self, body: Json, kept: Kept) -> list[ChatMessage]:
        value = body.get("input")
        items = [{"role": "user", "content": value}] if isinstance(value, str) else as_list(value)
        before = body.get("previous_response_id")
        if before is not None and not (isinstance(before, str) and before in kept):
            what = f"there is no response {before!r:.80} of this run"
            raise ApiError(404, "previous_response_not_found", what, "previous_response_id")
        messages = [*kept[before]] if before is not None else []
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": _text(body["instructions"])})
        for item in items:
            _add_item(messages, as_object(item))
        if not items or not messages:
            raise invalid("input must be a text or a list of at least one item", "input")
        return messages

    def options(self, body: Json) -> CallOptions:
        form = as_object(as_object(body.get("text")).get("format"))
        included = as_list(body.get("include"))
        for name in included:
            if name not in (LOGPROBS, "reasoning.encrypted_content"):
                raise unsupported("include", name)
        return CallOptions(
            max_tokens=_number(body, "max_output_tokens"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            json_schema=_schema(form, "text"),
            logprobs=LOGPROBS in included,
            **_chosen(body.get("tool_choice")),
        )

    def whole(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Json:
        answer = answers[0]
        return self._response(answer, request, self._items(answer, request), "completed")

    def _items(self, answer: TurnToSend, request: ApiRequest) -> list[Json]:
        items: list[Json] = []
        name = request.identity.removeprefix("resp_")
        done = {"status": "completed"}
        if answer.text or not answer.calls:
            part: Json = {
                "type": "output_text",
                "text": answer.text,
                "annotations": [],
                "logprobs": _tokens(answer),
            }
            items.append(
                {"id": f"msg_{name}", "type": "message", "role": "assistant", **done}
                | {"content": [part]}
            )
        for number, call in enumerate(answer.calls):
            called = {"call_id": call["id"], **call["function"]}
            items.append({"id": f"fc_{name}{number}", "type": "function_call", **called, **done})
        return items

    def _response(
        self, answer: TurnToSend, request: ApiRequest, items: list[Json], status: str
    ) -> Json:
        usage = None
        details = None
        if status == "completed":
            usage = {
                "input_tokens": answer.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.usage.prompt_tokens + answer.usage.completion_tokens,
            }
            if answer.finish_reason == "length":
                status = "incomplete"
                details = {"reason": "max_output_tokens"}
        repeated = ("instructions", "previous_response_id", "max_output_tokens", "reasoning")
        return {
            "id": request.identity,
            "object": "response",
            "created_at": request.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            **{name: request.body.get(name) for name in repeated},
            "model": request.model,
            "output": items,
            "parallel_tool_calls": request.options.parallel_tool_calls,
            # The run decides these, so they are the run's, whatever the request says.
            "temperature": answer.usage.temperature,
            "top_p": answer.usage.top_p,
            "text": {"format": {"type": "text"}, **as_object(request.body.get("text"))},
            "tool_choice": request.body.get("tool_choice") or "auto",
            "tools": as_list(request.body.get("tools")),
            "truncation": "disabled",
            "metadata": request.body.get("metadata") or {},
            "usage": usage,
        }

    def error_event(self, error: ApiError, request_id: str | None = None) -> Event:
        said = {name: value for name, value in self._said(error).items() if name != "type"}
        return "error", {"type": "error", "code": error.code, **said, "sequence_number": 0}

    def events(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Iterator[Event]:
        for number, (name, data) in enumerate(self._numbered(answers[0], request)):
            yield name, {"type": name, "sequence_number": number, **data}

    def _numbered(self, answer: TurnToSend, request: ApiRequest) -> Iterator[tuple[str, Json]]:
        begun = self._response(answer, request, [], "in_progress")
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        items = self._items(answer, request)
        for index, item in enumerate(items):
            place = {"item_id": item["id"], "output_index": index}
            is_text = item["type"] == "message"
            empty: Json = {"content": []} if is_text else {"arguments": ""}
            opened = {**item, **empty, "status": "in_progress"}
            yield "response.output_item.added", {"output_index": index, "item": opened}
            if is_text:
                part = item["content"][0]
                place["content_index"] = 0
                text = part["text"]
                blank = {**part, "text": ""}
                yield "response.content_part.added", {**place, "part": blank}
                logprobs = [{**token} for token in part["logprobs"]]
                for token in logprobs:
                    del token["bytes"]  # these events have none
                if text:
                    delta: Json = {"delta": text, "logprobs": logprobs}
                    yield "response.output_text.delta", {**place, **delta}
                whole: Json = {"text": text, "logprobs": logprobs}
                yield "response.output_text.done", {**place, **whole}
                yield "response.content_part.done", {**place, "part": part}
            else:
                arguments = item["arguments"]
                yield "response.function_call_arguments.delta", {**place, "delta": arguments}
                whole = {"arguments": arguments, "name": item["name"]}
                yield "response.function_call_arguments.done", {**place, **whole}
            yield "response.output_item.done", {"output_index": index, "item": item}
        ended = self._response(answer, request, items, "completed")
        yield f"response.{ended['status']}", {"response": ended}


def _add_item(messages: list[ChatMessage], item: Json) -> None:
    """Add an item of a response's input. Text and calls of one turn are one message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_message({"role": item.get("role"), "content": item.get("content")}))
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "name": item.get("name")}
        _add_calls(messages, [{**call, "arguments": item.get("arguments", "{}")}])
    elif kind == "function_call_output":
        result = {"content": item.get("output"), "tool_call_id": item.get("call_id", "")}
        messages.append(_message({"role": "tool", **result}))
    elif kind != "reasoning":
        raise invalid(f"an item of type {kind!r:.40} cannot be read here", "input")


def _add_calls(messages: list[ChatMessage], calls: list[Json]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    called = turn.get("tool_calls", []) + _calls(calls, "input")
    messages[-1] = {**turn, "tool_calls": called}


# -- Anthropic's messages --------------------------------------------------------------------------


class Messages(Dialect):
    replies = "msg_"
    honoured = _words(
        "messages model max_tokens system tools tool_choice stop_sequences stream output_config "
        "output_format"
    )
    of_the_run = _words("temperature top_p top_k thinking")
    without_effect = _words(
        "metadata service_tier cache_control inference_geo diagnostics user_profile_id "
        "workspace_id speed betas billing_policy fallbacks fallback_credit_token"
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "context_management": ({"edits": []},),
        "compaction": (),
    }

    def messages(self, body: Json, kept: Kept) -> list[ChatMessage]:
        messages: list[ChatMessage] = []
        if body.get("system"):
            messages.append({"role": "system", "content": _text(body["system"])})
        turns = as_list(body.get("messages"))
        if not turns:
            raise invalid("messages must be a list of at least one message", "messages")
        for turn in turns:
            _add_turn(messages, as_object(turn))
        return messages

    def tools(self, body: Json) -> list[Json]:
        tools: list[Json] = []
        for tool in map(as_object, filter(self.is_function, as_list(body.get("tools")))):
            named = {"name": tool.get("name"), "description": tool.get("description")}
            tools.append({**named, "parameters": tool.get("input_schema")})
        return _tools(tools)

    def is_function(self, tool: Any) -> bool:
        return as_object(tool).get("type", "custom") == "custom"

    def options(self, body: Json) -> CallOptions:
        config = as_object(body.get("output_config"))
        form = as_object(config.get("format") or body.get("output_format"))
        limit = _number(body, "max_tokens")
        if limit is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        choice = as_object(body.get("tool_choice"))
        kinds = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
        kind = str(choice.get("type", "auto"))
        if kind not in kinds:
            raise unsupported("tool_choice", body.get("tool_choice"))
        return CallOptions(
            max_tokens=limit,
            stop=_stops(body, "stop_sequences"),
            tool_choice=cast('Literal["auto", "none", "required"]', kinds[kind]),
            tool_name=str(choice.get("name")) if kind == "tool" else None,
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            json_schema=_schema(form, "output_config"),
        )

    def check(self, body: Json) -> None:
        if body.get("thread") is not None:
            what = "threads are not served here: send the whole conversation without `thread`"
            raise ApiError(400, THREAD_UNSUPPORTED, what, "thread")
        edits = as_list(as_object(body.get("context_management")).get("edits"))
        kinds = [str(as_object(edit).get("type")) for edit in edits]
        if edits and all(kind.startswith("clear_thinking") for kind in kinds):
            # There is no thinking in a conversation here.
            body = {**body, "context_management": None}
        super().check(body)

    def unknown(self, name: str) -> ApiError:
        what = f"{name:.80}: Extra inputs are not permitted"
        return ApiError(400, "unknown_parameter", what, name[:80])

    def whole(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Json:
        answer = answers[0]
        used = answer.usage
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = reasons[answer.finish_reason]
        if used.stopped_by is not None and not answer.calls:
            reason = "stop_sequence"
        return {
            "id": request.identity,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": list(self._blocks(answer)),
            "stop_reason": reason,
            "stop_sequence": used.stopped_by,
            "usage": {
                "input_tokens": used.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": used.completion_tokens,
            },
        }

    def _blocks(self, answer: TurnToSend) -> Iterator[Json]:
        if answer.text or not answer.calls:
            yield {"type": "text", "text": answer.text}
        for call in answer.calls:
            arguments: Any = None
            with suppress(ValueError):
                arguments = json.loads(call["function"]["arguments"])
            # This API knows no other arguments than objects.
            call_part = {"name": call["function"]["name"], "input": as_object(arguments)}
            yield {"type": "tool_use", "id": call["id"], **call_part}

    def events(self, answers: Sequence[TurnToSend], request: ApiRequest) -> Iterator[Event]:
        message = self.whole(answers, request)
        usage = message["usage"]
        begun: Json = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield self._event("message_start", message={**message, **begun})
        for index, block in enumerate(message["content"]):
            if block["type"] == "text":
                opened: Json = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                opened = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield self._event("content_block_start", index=index, content_block=opened)
            yield self._event("content_block_delta", index=index, delta=delta)
            yield self._event("content_block_stop", index=index)
        ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield self._event("message_delta", delta=ended, usage=usage)
        yield self._event("message_stop")

    def _event(self, name: str, **data: Any) -> Event:
        return name, {"type": name, **data}

    def error_event(self, error: ApiError, request_id: str | None = None) -> Event:
        return "error", self.error(error, request_id)

    def error(self, error: ApiError, request_id: str | None = None) -> Json:
        kinds = {404: "not_found_error", 413: "request_too_large"}
        message = str(error)
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        said: Json = {"type": kinds.get(error.status, error.kind), "message": message}
        if error.code == THREAD_UNSUPPORTED:
            said["details"] = {"error_code": error.code, "unsupported": "thread"}
        return {"type": "error", "error": said, "request_id": request_id}


def _add_turn(messages: list[ChatMessage], turn: Json) -> None:
    """Add a message of Anthropic's API: results of tools become messages of their own."""
    role = turn.get("role")
    content = turn.get("content")
    if isinstance(content, str):
        messages.append(_message({"role": role, "content": content}))
        return
    parts: list[Any] = []
    calls: list[Json] = []
    for part in map(as_object, as_list(content)):
        if part.get("type") == "tool_result":
            result = {"content": part.get("content"), "tool_call_id": part.get("tool_use_id", "")}
            messages.append(_message({"role": "tool", **result}))
        elif part.get("type") == "tool_use":
            called = {"id": part.get("id"), "name": part.get("name")}
            calls.append({**called, "arguments": part.get("input", {})})
        else:
            parts.append(part)
    if parts or calls or not content:
        messages.append(_message({"role": role, "content": parts or ""}))
    if calls:
        _add_calls(messages, calls)


# -- messages --------------------------------------------------------------------------------------


def _message(message: Json) -> ChatMessage:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise invalid(f"unknown role {message.get('role')!r:.40}", "messages")
    said: ChatMessage = {"role": role, "content": _text(message.get("content"))}
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


def _text(content: Any) -> str:
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


def _tools(value: list[Any]) -> list[Json]:
    try:
        return tool_schemas(value)
    except (TypeError, ValueError) as error:
        raise invalid(str(error), "tools") from error


def count_tokens(request: ApiRequest) -> Json:
    """About how many tokens the request has, for agents that plan by it."""
    characters = len(json.dumps([request.messages, request.tools]))
    return {"input_tokens": characters // CHARACTERS_PER_TOKEN}


DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/responses": Responses(),
    "/messages": Messages(),
}
