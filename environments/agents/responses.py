"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from environments.agents.calls import CallOptions
from environments.agents.dialects import (
    ApiError,
    ApiRequest,
    Dialect,
    Event,
    Kept,
    TurnToSend,
    add_calls,
    invalid,
    read_choice,
    read_message,
    read_number,
    read_schema,
    read_text,
    sampled_tokens,
    unsupported,
    words,
)
from environments.base import ChatMessage, Json
from environments.tools import as_list, as_object

LOGPROBS = "message.output_text.logprobs"


class Responses(Dialect):
    replies = "resp_"
    honoured = words(
        "input model instructions previous_response_id max_output_tokens tools tool_choice "
        "parallel_tool_calls text stream stream_options include"
    )
    of_the_run = words("temperature top_p reasoning")
    without_effect = words(
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
            messages.insert(0, {"role": "system", "content": read_text(body["instructions"])})
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
            max_tokens=read_number(body, "max_output_tokens"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            json_schema=read_schema(form, "text"),
            logprobs=LOGPROBS in included,
            **read_choice(body.get("tool_choice")),
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
                "logprobs": sampled_tokens(answer),
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
        messages.append(read_message({"role": item.get("role"), "content": item.get("content")}))
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "name": item.get("name")}
        add_calls(messages, [{**call, "arguments": item.get("arguments", "{}")}])
    elif kind == "function_call_output":
        result = {"content": item.get("output"), "tool_call_id": item.get("call_id", "")}
        messages.append(read_message({"role": "tool", **result}))
    elif kind != "reasoning":
        raise invalid(f"an item of type {kind!r:.40} cannot be read here", "input")
