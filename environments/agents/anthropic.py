"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, cast

from environments.agents.calls import THREAD_UNSUPPORTED, CallOptions
from environments.agents.dialects import (
    ApiError,
    ApiRequest,
    Dialect,
    Event,
    Kept,
    TurnToSend,
    add_calls,
    invalid,
    read_message,
    read_number,
    read_schema,
    read_stops,
    read_text,
    read_tools,
    unsupported,
    words,
)
from environments.base import ChatMessage, Json
from environments.tools import as_list, as_object


class Messages(Dialect):
    replies = "msg_"
    honoured = words(
        "messages model max_tokens system tools tool_choice stop_sequences stream output_config "
        "output_format"
    )
    of_the_run = words("temperature top_p top_k thinking")
    without_effect = words(
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
            messages.append({"role": "system", "content": read_text(body["system"])})
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
        return read_tools(tools)

    def is_function(self, tool: Any) -> bool:
        return as_object(tool).get("type", "custom") == "custom"

    def options(self, body: Json) -> CallOptions:
        config = as_object(body.get("output_config"))
        form = as_object(config.get("format") or body.get("output_format"))
        limit = read_number(body, "max_tokens")
        if limit is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        choice = as_object(body.get("tool_choice"))
        kinds = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
        kind = str(choice.get("type", "auto"))
        if kind not in kinds:
            raise unsupported("tool_choice", body.get("tool_choice"))
        return CallOptions(
            max_tokens=limit,
            stop=read_stops(body, "stop_sequences"),
            tool_choice=cast('Literal["auto", "none", "required"]', kinds[kind]),
            tool_name=str(choice.get("name")) if kind == "tool" else None,
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            json_schema=read_schema(form, "output_config"),
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
        blocks: list[Json] = []
        if answer.text or not answer.calls:
            blocks.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            arguments: Any = None
            with suppress(ValueError):
                arguments = json.loads(call["function"]["arguments"])
            # This API knows no other arguments than objects.
            call_part = {"name": call["function"]["name"], "input": as_object(arguments)}
            blocks.append({"type": "tool_use", "id": call["id"], **call_part})
        return {
            "id": request.identity,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": used.stopped_by,
            "usage": {
                "input_tokens": used.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": used.completion_tokens,
            },
        }

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
        messages.append(read_message({"role": role, "content": content}))
        return
    parts: list[Any] = []
    calls: list[Json] = []
    for part in map(as_object, as_list(content)):
        if part.get("type") == "tool_result":
            result = {"content": part.get("content"), "tool_call_id": part.get("tool_use_id", "")}
            messages.append(read_message({"role": "tool", **result}))
        elif part.get("type") == "tool_use":
            called = {"id": part.get("id"), "name": part.get("name")}
            calls.append({**called, "arguments": part.get("input", {})})
        else:
            parts.append(part)
    if parts or calls or not content:
        messages.append(read_message({"role": role, "content": parts or ""}))
    if calls:
        add_calls(messages, calls)
