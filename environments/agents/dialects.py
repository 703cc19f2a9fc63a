"""The APIs that an agent may speak: OpenAI's chat completions and responses, and Anthropic's
messages.

    dialect = DIALECTS["/chat/completions"]
    request = dialect.read(body, kept)         # what the request asks, as messages and tools
    dialect.whole(answer, request)             # the body of the reply
    dialect.events(answer, request)            # the same as events of a stream

Every dialect reads the same messages: roles system, user, assistant and tool, texts as strings, and
calls in the form of environments/tools.py. Only the standard library is used, because the
interpreter may be the environment's own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from environments.agents.calls import Usage
from environments.base import ChatMessage
from environments.tools import as_list, as_object, tool_calls_of, tool_schemas

Json = dict[str, Any]
Event = tuple[str | None, Json]
"""Its name, if the dialect names events, and its data."""
MODEL = "policy"
"""The name of the model that is trained or evaluated."""
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
TEXT_PARTS = ("text", "input_text", "output_text")
UNSEEN_PARTS = ("thinking", "redacted_thinking")
"""Parts that models of others wrote for themselves."""
CHARACTERS_PER_TOKEN = 3
"""For requests that only count tokens: the model's tokenizer is in another process."""


@dataclass(frozen=True)
class Answer:
    """The model's turn, a message of role assistant, for one request."""

    turn: ChatMessage
    usage: Usage
    call: int
    """The number of the request."""

    @property
    def text(self) -> str:
        return self.turn["content"] or ""

    @property
    def calls(self) -> list[Json]:
        return self.turn.get("tool_calls", [])

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.usage.ended


class ApiError(Exception):
    """What the API answers instead of a turn."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        may_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.may_retry = may_retry

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "api_error"}
        return kinds.get(self.status, "invalid_request_error")


def invalid(what: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_value", what, param)


@dataclass(frozen=True)
class Asked:
    """A request in the terms of every dialect."""

    body: Json
    messages: list[ChatMessage]
    tools: list[Json]
    identity: str
    """Of the reply."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


Kept = Mapping[str, list[ChatMessage]]
"""The conversations of earlier replies by their ids, without instructions."""


class Dialect:
    """One API."""

    ends_with: str | None = None
    """What follows the last event of a stream."""
    served: ClassVar[Mapping[str, Any]] = {}
    """Fields that would change the answer, with the only value that is served."""

    replies: str
    """How the identity of a reply begins."""

    def read(self, body: Json, kept: Kept) -> Asked:
        """Raises ApiError."""
        messages = self.messages(body, kept)
        tools = self.tools(body)
        self.check(body)
        return Asked(body, messages, tools, f"{self.replies}{secrets.token_hex(12)}")

    def messages(self, body: Json, kept: Kept) -> list[ChatMessage]:
        """The conversation that a request continues. Raises ApiError."""
        raise NotImplementedError

    def tools(self, body: Json) -> list[Json]:
        """Raises ApiError."""
        return _tools(as_list(body.get("tools")))

    def turn(self, reply: Json) -> ChatMessage:
        """The model's turn in a whole reply of another server. Raises ApiError."""
        raise NotImplementedError

    def whole(self, answer: Answer, request: Asked) -> Json:
        raise NotImplementedError

    def events(self, answer: Answer, request: Asked) -> Iterator[Event]:
        raise NotImplementedError

    def error(self, error: ApiError) -> Json:
        said = {"message": str(error), "type": error.kind, "param": error.param}
        return {"error": {**said, "code": error.code}}

    def check(self, body: Json) -> None:
        if body.get("model") != MODEL:
            what = f"the model {body.get('model')!r:.80} does not exist; use {MODEL!r}"
            raise ApiError(404, "model_not_found", what, "model")
        for name, served in self.served.items():
            value = body.get(name)
            if value is not None and value not in (served, [served]):
                what = f"{name}={value!r:.80} is not supported here: leave it out"
                raise ApiError(400, "unsupported_value", what, name)


# -- OpenAI's chat completions ---------------------------------------------------------------------


class Chat(Dialect):
    ends_with = "[DONE]"
    replies = "chatcmpl-"
    served: ClassVar[Mapping[str, Any]] = {
        "n": 1,
        "logprobs": False,
        "stop": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "functions": [],
        "modalities": ["text"],
    }

    def messages(self, body: Json, kept: Kept) -> list[ChatMessage]:
        messages = as_list(body.get("messages"))
        if not messages:
            raise invalid("messages must be a list of at least one message", "messages")
        return [_message(as_object(message)) for message in messages]

    def whole(self, answer: Answer, request: Asked) -> Json:
        message = {**answer.turn, "refusal": None}
        if answer.calls and not answer.text:
            message["content"] = None
        finish = answer.finish_reason
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        usage = answer.usage.fields()
        return {**self._frame(request, ""), "choices": [choice], "usage": usage}

    def _frame(self, request: Asked, part: str) -> Json:
        kind = f"chat.completion{part}"
        return {"id": request.identity, "created": request.created, "model": MODEL, "object": kind}

    def events(self, answer: Answer, request: Asked) -> Iterator[Event]:
        frame = self._frame(request, ".chunk")
        options = as_object(request.body.get("stream_options"))
        with_usage = bool(options.get("include_usage"))
        if with_usage:
            frame["usage"] = None
        for delta in self._deltas(answer):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield None, {**frame, "choices": [choice]}
        last: Json = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield None, {**frame, "choices": [last]}
        if with_usage:
            yield None, {**frame, "choices": [], "usage": answer.usage.fields()}

    def _deltas(self, answer: Answer) -> Iterator[Json]:
        yield {"role": "assistant", "content": None if answer.calls else ""}
        if answer.text:
            yield {"content": answer.text}
        for index, call in enumerate(answer.calls):
            opened = {**call["function"], "arguments": ""}
            yield {"tool_calls": [{"index": index, **call, "function": opened}]}
            arguments = {"arguments": call["function"]["arguments"]}
            yield {"tool_calls": [{"index": index, "function": arguments}]}


# -- OpenAI's responses ----------------------------------------------------------------------------


class Responses(Dialect):
    replies = "resp_"
    served: ClassVar[Mapping[str, Any]] = {
        "tool_choice": "auto",
        "background": False,
        "conversation": None,
        "prompt": None,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}},
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

    def tools(self, body: Json) -> list[Json]:
        return _tools([tool for tool in as_list(body.get("tools")) if _is_function(tool)])

    def turn(self, reply: Json) -> ChatMessage:
        messages: list[ChatMessage] = [{"role": "assistant", "content": ""}]
        for item in as_list(reply.get("output")):
            _add_item(messages, as_object(item))
        return messages[-1]

    def check(self, body: Json) -> None:
        format_only = {"format": as_object(body.get("text")).get("format") or {"type": "text"}}
        super().check({**body, "text": format_only})

    def whole(self, answer: Answer, request: Asked) -> Json:
        return self._response(answer, request, self._items(answer, request), "completed")

    def _items(self, answer: Answer, request: Asked) -> list[Json]:
        items: list[Json] = []
        name = request.identity.removeprefix("resp_")
        done = {"status": "completed"}
        if answer.text or not answer.calls:
            part: Json = {
                "type": "output_text",
                "text": answer.text,
                "annotations": [],
                "logprobs": [],
            }
            items.append(
                {"id": f"msg_{name}", "type": "message", "role": "assistant", **done}
                | {"content": [part]}
            )
        for number, call in enumerate(answer.calls):
            called = {"call_id": call["id"], **call["function"]}
            items.append({"id": f"fc_{name}{number}", "type": "function_call", **called, **done})
        return items

    def _response(self, answer: Answer, request: Asked, items: list[Json], status: str) -> Json:
        usage = None
        details = None
        if status == "completed":
            usage = {
                "input_tokens": answer.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
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
            "model": MODEL,
            "output": items,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": as_list(request.body.get("tools")),
            "truncation": "disabled",
            "metadata": request.body.get("metadata") or {},
            "usage": usage,
        }

    def events(self, answer: Answer, request: Asked) -> Iterator[Event]:
        for number, (name, data) in enumerate(self._numbered(answer, request)):
            yield name, {"type": name, "sequence_number": number, **data}

    def _numbered(self, answer: Answer, request: Asked) -> Iterator[tuple[str, Json]]:
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
                if text:
                    delta: Json = {"delta": text, "logprobs": []}
                    yield "response.output_text.delta", {**place, **delta}
                whole: Json = {"text": text, "logprobs": []}
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


def _is_function(tool: Any) -> bool:
    """Whether the client runs this tool. Those that the service would run cannot be had here."""
    return as_object(tool).get("type", "function") == "function"


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
    served: ClassVar[Mapping[str, Any]] = {"stop_sequences": []}

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
        for tool in map(as_object, as_list(body.get("tools"))):
            if tool.get("type", "custom") == "custom":
                named = {"name": tool.get("name"), "description": tool.get("description")}
                tools.append({**named, "parameters": tool.get("input_schema")})
        return _tools(tools)

    def turn(self, reply: Json) -> ChatMessage:
        messages: list[ChatMessage] = []
        _add_turn(messages, reply)
        return messages[-1]

    def check(self, body: Json) -> None:
        choice = as_object(body.get("tool_choice")).get("type", "auto")
        if choice != "auto":
            what = f"tool_choice={choice!r:.40} is not supported here: leave it out"
            raise ApiError(400, "unsupported_value", what, "tool_choice")
        super().check(body)

    def _message(self, answer: Answer, request: Asked) -> Json:
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        return {
            "id": request.identity,
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": list(self._blocks(answer)),
            "stop_reason": reasons[answer.finish_reason],
            "stop_sequence": None,
            "usage": self._usage(answer),
        }

    def _usage(self, answer: Answer) -> Json:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        used = answer.usage
        return {
            "input_tokens": used.prompt_tokens,
            **cached,
            "output_tokens": used.completion_tokens,
        }

    def _blocks(self, answer: Answer) -> Iterator[Json]:
        if answer.text or not answer.calls:
            yield {"type": "text", "text": answer.text}
        for call in answer.calls:
            arguments: Any = None
            with suppress(ValueError):
                arguments = json.loads(call["function"]["arguments"])
            # This API knows no other arguments than objects.
            call_part = {"name": call["function"]["name"], "input": as_object(arguments)}
            yield {"type": "tool_use", "id": call["id"], **call_part}

    def whole(self, answer: Answer, request: Asked) -> Json:
        return self._message(answer, request)

    def events(self, answer: Answer, request: Asked) -> Iterator[Event]:
        message = self._message(answer, request)
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
        ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        yield self._event("message_delta", delta=ended, usage=usage)
        yield self._event("message_stop")

    def _event(self, name: str, **data: Any) -> Event:
        return name, {"type": name, **data}

    def error(self, error: ApiError) -> Json:
        kinds = {404: "not_found_error", 413: "request_too_large"}
        message = str(error)
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        said = {"type": kinds.get(error.status, error.kind), "message": message}
        return {"type": "error", "error": said, "request_id": None}


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


def count_tokens(request: Asked) -> Json:
    """About how many tokens the request has, for agents that plan by it."""
    characters = len(json.dumps([request.messages, request.tools]))
    return {"input_tokens": characters // CHARACTERS_PER_TOKEN}


DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": Chat(),
    "/responses": Responses(),
    "/messages": Messages(),
}
"""By the path of their requests."""
