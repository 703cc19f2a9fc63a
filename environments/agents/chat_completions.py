"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from environments.agents.calls import CallOptions, Usage
from environments.agents.dialects import (
    MOST_CHOICES,
    ApiRequest,
    Dialect,
    Event,
    Kept,
    TurnToSend,
    invalid,
    read_choice,
    read_message,
    read_number,
    read_schema,
    read_stops,
    sampled_tokens,
    words,
)
from environments.base import ChatMessage, Json
from environments.tools import as_list, as_object


class ChatCompletions(Dialect):
    ends_with = "[DONE]"
    replies = "chatcmpl-"
    honoured = words(
        "messages model max_tokens max_completion_tokens n parallel_tool_calls response_format "
        "stop stream stream_options tool_choice tools logprobs"
    )
    of_the_run = words("temperature top_p seed reasoning_effort verbosity")
    without_effect = words(
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
        return [read_message(as_object(message)) for message in messages]

    def options(self, body: Json) -> CallOptions:
        limits = [read_number(body, name) for name in ("max_tokens", "max_completion_tokens")]
        form = as_object(body.get("response_format"))
        if form.get("type") == "json_schema":
            form = {**as_object(form.get("json_schema")), "type": "json_schema"}
        return CallOptions(
            max_tokens=min((limit for limit in limits if limit), default=None),
            stop=read_stops(body, "stop"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            json_schema=read_schema(form, "response_format"),
            logprobs=body.get("logprobs") is True,
            **read_choice(body.get("tool_choice")),
        )

    def choices(self, body: Json) -> int:
        return read_number(body, "n", MOST_CHOICES) or 1

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


def _logprobs(answer: TurnToSend) -> Json:
    return {"content": sampled_tokens(answer), "refusal": None}
