"""Records what deployments are asked and answer, as the model server's front sees it.

vLLM is asked for what it tells of tokens too: for chat completions their ids and log-probabilities,
for OpenAI's responses their ids. It tells nothing of those of Anthropic's messages. The client gets
its answer without them, unless it asked for them itself.

A request of OpenAI's responses may continue an earlier one of a recorded deployment: vLLM keeps
none, so it gets the whole conversation. Users rate answers by POST /v1/ratings, or in the metadata
of a later request: {"rates": ID, "rating": "up"}."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from environments.agents.dialects import DIALECTS, ApiError
from environments.base import Json
from environments.redaction import Redactor
from environments.tools import add_call_parts, as_list, as_object
from flash_mcp.protocol.recordings import TOKENS, Recording, rating_of

log = logging.getLogger(__name__)
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
"""Names of variables whose values are not recorded."""
MIN_SECRET = 8
RATINGS = "/v1/ratings"
MOST_KEPT = 1000
"""Conversations that a later request may continue."""
LAST_EVENTS = ("response.completed", "response.incomplete", "message_stop")
"""Of streams of OpenAI's responses and Anthropic's messages; chat completions have none."""
SAMPLING = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "seed",
    "stop",
    "n",
)


class Recorder:
    """Knows which deployments are recorded, by the files that the supervisor wrote."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._recordings: dict[str, Recording] = {}
        self._kept: dict[str, list[Json]] = {}
        """The conversations up to each response, without instructions, by its id."""
        values = [value for name, value in os.environ.items() if SECRET.search(name)]
        self._redactor = Redactor(value for value in values if len(value) >= MIN_SECRET)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request to one of ROUTES, and record it if its model is recorded."""
        try:
            content = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        request: Json = {}
        with suppress(ValueError, RecursionError):
            request = as_object(json.loads(content))
        recording = self._recording(str(request.get("model")))
        if scope["path"] == RATINGS:
            await (await _rated(recording, request))(scope, receive, send)
            return
        if recording is None:
            await app(scope, _replayed(content, receive), send)
            return
        metadata = as_object(request.get("metadata"))
        if "rates" in metadata:
            await _rated(recording, metadata)
        request = self._continued(request)
        answer = _ANSWERS[scope["path"]](request)
        completed = {**request, **answer.asks}
        content = json.dumps(completed).encode()
        scope = {**scope, "headers": _with_length(scope["headers"], len(content))}
        is_recorded = False

        async def record() -> None:
            nonlocal is_recorded
            if is_recorded:
                return
            is_recorded = True
            try:
                for line in answer.lines() if answer.status == 200 else ():
                    await run_in_threadpool(recording.append, self._redacted(line))
                    self._keep(line, request)
            except OSError as error:  # a full disk ends no deployment
                log.warning("a request was not recorded: %s", error)

        await app(scope, _replayed(content, receive), answer.sender(send, record))
        await record()  # of a stream without an event that ends it

    def _redacted(self, line: Json) -> Json:
        """The line without secrets, and without tokens that would spell one out again."""
        redacted: Json = self._redactor.value(line) | {"id": line["id"]}
        if redacted != line:
            redacted |= {name: [] for name in TOKENS}
        return redacted

    def _continued(self, request: Json) -> Json:
        before = self._kept.get(str(request.get("previous_response_id")))
        if before is None:
            return request
        value = request.get("input")
        added = [{"role": "user", "content": value}] if isinstance(value, str) else as_list(value)
        items = itertools.chain.from_iterable(map(_items, before))
        return {**request, "previous_response_id": None, "input": [*items, *added]}

    def _keep(self, line: Json, request: Json) -> None:
        """Let later requests continue this answer."""
        is_instructed = bool(request.get("instructions"))
        self._kept[line["id"]] = [*line["messages"][is_instructed:], line["answer"]]
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def _recording(self, model: str) -> Recording | None:
        if not re.fullmatch(r"dep-\w+", model):
            return None
        existing = self._recordings.setdefault(model, Recording(self._home, model))
        return existing if existing.is_on() else None


async def _rated(recording: Recording | None, request: Json) -> JSONResponse:
    """Rate an answer: {"id" or "rates": its id, "rating": "up", "down" or a number}."""
    identity = str(request.get("rates", request.get("id")))
    rating = rating_of(request.get("rating"))
    status = 404
    if recording is None:
        message = "This model is no deployment whose answers are recorded."
    elif rating is None:
        status = 400
        message = 'Send {"model": DEPLOYMENT, "id": ID, "rating": "up", "down" or a number}.'
    elif await run_in_threadpool(recording.rate, identity, rating):
        return JSONResponse({"id": identity, "object": "rating", "rating": rating})
    else:
        message = f"No recorded answer has the id {identity!r:.80}."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


def _items(message: Json) -> Iterator[Json]:
    """The items of OpenAI's responses that a message is."""
    if message["role"] == "tool":
        result = {"call_id": message.get("tool_call_id", ""), "output": message["content"]}
        yield {"type": "function_call_output", **result}
        return
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        yield {"role": message["role"], "content": message["content"]}
    for call in calls:
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _replayed(content: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body first."""
    left: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    others = [pair for pair in headers if pair[0].lower() != b"content-length"]
    return [*others, (b"content-length", str(length).encode())]


@dataclass
class _Choice:
    text: str = ""
    calls: dict[int, Json] = field(default_factory=dict[int, Json])
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    def add(self, part: Json) -> None:
        said = as_object(part.get("message")) or as_object(part.get("delta"))
        self.text += said.get("content") or ""
        add_call_parts(self.calls, as_list(said.get("tool_calls")))
        self.finish = part.get("finish_reason") or self.finish
        self.token_ids += as_list(part.get("token_ids"))
        for token in as_list(as_object(part.get("logprobs")).get("content")):
            self.logprobs.append(token["logprob"])


class _Answer:
    """Reads an answer on its way to the client, and takes out what only the recording asked for."""

    asks: ClassVar[Json] = {}
    """What the recording asks vLLM for."""

    def __init__(self, request: Json) -> None:
        self.status = 0
        self._request = request
        self._started = time.time()
        self._is_stream = False
        self._has_ended = False
        """An event said that the stream ends."""
        self._start: Message = {}
        self._rest = b""

    def read(self, part: Json) -> Json:
        """Note what this part of the answer says. Returns it as the client asked for it."""
        raise NotImplementedError

    def lines(self) -> Iterator[Json]:
        raise NotImplementedError

    def line(self, identity: str, **facts: Any) -> Json:
        """The line of one answer: these facts, and what all lines have."""
        metadata = as_object(self._request.get("metadata"))
        existing: Json = {
            "id": identity,
            "time": self._started,
            "user": self._request.get("user") or metadata.get("user_id"),
            "metadata": metadata,
            "sampling": {name: self._request.get(name) for name in SAMPLING},
            "prompt_token_ids": [],
            "token_ids": [],
            "logprobs": [],
            "seconds": round(time.time() - self._started, 3),
        }
        return existing | facts

    def sender(self, send: Send, record: Callable[[], Awaitable[None]]) -> Send:
        """Sends what comes to the client. Before the end of it `record` is awaited: who has the
        whole answer may rate it, or continue it, at once.
        """

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(message)
                if self._is_stream:
                    await send(message)
                return
            self._rest += message.get("body", b"")
            is_last = not message.get("more_body")
            if self._is_stream:
                events = self._events(is_last=is_last)
                if is_last or self._has_ended:
                    await record()
                await send({**message, "body": events})
            elif is_last:
                content = self._whole()
                await record()
                headers = _with_length(self._start["headers"], len(content))
                await send({**self._start, "headers": headers})
                await send({**message, "body": content})

        return forward

    def _begin(self, message: Message) -> None:
        self._start = message
        self.status = message["status"]
        headers = dict(message["headers"])
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def _whole(self) -> bytes:
        if self.status != 200:
            return self._rest
        return json.dumps(self.read(json.loads(self._rest))).encode()

    def _events(self, *, is_last: bool) -> bytes:
        """The events that have come whole, as the client is to see them."""
        *events, self._rest = self._rest.split(b"\n\n")
        seen = b"".join(self._event(event) + b"\n\n" for event in events)
        return seen + self._rest if is_last else seen

    def _event(self, event: bytes) -> bytes:
        name, mark, data = event.partition(b"data: ")
        try:
            part = json.loads(data)
        except ValueError:  # the last one of chat completions is no JSON
            self._has_ended = True
            return event
        self._has_ended |= as_object(part).get("type") in LAST_EVENTS
        return name + mark + json.dumps(self.read(part)).encode()


class _ChatAnswer(_Answer):
    asks: ClassVar[Json] = {"return_token_ids": True, "logprobs": True}

    def __init__(self, request: Json) -> None:
        super().__init__(request)
        self._choices: dict[int, _Choice] = {}
        self._prompt: list[int] = []
        self._identity = ""

    def lines(self) -> Iterator[Json]:
        for choice in self._choices.values():
            if choice.finish is None:
                continue
            answer: Json = {"role": "assistant", "content": choice.text}
            if choice.calls:
                answer["tool_calls"] = [choice.calls[index] for index in sorted(choice.calls)]
            yield self.line(
                self._identity,
                messages=[_message(one) for one in as_list(self._request.get("messages"))],
                tools=as_list(self._request.get("tools")),
                answer=answer,
                finish=choice.finish,
                prompt_token_ids=self._prompt,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(choice.token_ids),
            )

    def read(self, part: Json) -> Json:
        self._identity = part.get("id") or self._identity
        self._prompt = part.get("prompt_token_ids") or self._prompt
        for choice in map(as_object, as_list(part.get("choices"))):
            self._choices.setdefault(choice["index"], _Choice()).add(choice)
            if not self._request.get("return_token_ids"):
                choice.pop("token_ids", None)
            if not self._request.get("logprobs"):
                choice["logprobs"] = None
        if not self._request.get("return_token_ids"):
            part.pop("prompt_token_ids", None)
        return part


class _OtherAnswer(_Answer):
    """An answer of an API that is read as an agent's requests are (environments)."""

    path: str
    """Names the dialect."""

    def __init__(self, request: Json) -> None:
        super().__init__(request)
        self._reply: Json = {}
        """The whole reply, as far as it has come."""

    @property
    def finish(self) -> str | None:
        """Why the answer ended: "length" or "stop"; None if it has not."""
        raise NotImplementedError

    def lines(self) -> Iterator[Json]:
        if self.finish is None:
            return
        dialect = DIALECTS[self.path]
        usage = as_object(self._reply.get("usage"))
        cached = usage.get("cache_read_input_tokens") or 0
        try:
            messages = dialect.messages(self._request, {})
            tools = dialect.tools(self._request)
            answer = dialect.turn(self._reply)
        except ApiError as error:  # pictures
            log.warning("a request was not recorded: %s", error)
            return
        yield self.line(
            str(self._reply.get("id", "")),
            messages=messages,
            tools=tools,
            answer=answer,
            finish=self.finish,
            prompt_tokens=(usage.get("input_tokens") or 0) + cached,
            completion_tokens=usage.get("output_tokens") or 0,
            **self.token_ids(),
        )

    def token_ids(self) -> dict[str, list[int]]:
        return {}


class _ResponsesAnswer(_OtherAnswer):
    path = "/responses"
    asks: ClassVar[Json] = {"enable_response_messages": True}
    _raw: ClassVar[Mapping[str, str]] = {
        "prompt_token_ids": "input_messages",
        "token_ids": "output_messages",
    }
    """Where vLLM says what is recorded under these names."""

    @property
    def finish(self) -> str | None:
        reasons = {"completed": "stop", "incomplete": "length"}
        return reasons.get(str(self._reply.get("status")))

    def token_ids(self) -> dict[str, list[int]]:
        results: dict[str, list[int]] = {}
        for name, field_name in self._raw.items():
            parts = map(as_object, as_list(self._reply.get(field_name)))
            results[name] = [token for part in parts for token in as_list(part.get("tokens"))]
        return results

    def read(self, part: Json) -> Json:
        response = part if part.get("object") == "response" else as_object(part.get("response"))
        if response:
            self._reply = {**response}
            if not self._request.get("enable_response_messages"):
                response.update(dict.fromkeys(self._raw.values()))
        return part


class _MessagesAnswer(_OtherAnswer):
    path = "/messages"

    @property
    def finish(self) -> str | None:
        reason = self._reply.get("stop_reason")
        if reason is None:
            return None
        return "length" if reason == "max_tokens" else "stop"

    def read(self, part: Json) -> Json:
        kind = part.get("type")
        blocks = as_list(self._reply.get("content"))
        delta = as_object(part.get("delta"))
        if kind == "message":
            self._reply = part
        elif kind == "message_start":
            self._reply = {**as_object(part.get("message")), "content": []}
        elif kind == "content_block_start":
            blocks.append({**as_object(part.get("content_block"))})
        elif kind == "content_block_delta":
            block = as_object(blocks[-1])
            for name in ("text", "partial_json"):
                if name in delta:
                    block[name] = block.get(name, "") + delta[name]
        elif kind == "content_block_stop" and "partial_json" in blocks[-1]:
            with suppress(ValueError):
                blocks[-1]["input"] = json.loads(blocks[-1]["partial_json"])
        elif kind == "message_delta":
            self._reply |= delta
            self._reply["usage"] = part.get("usage")
        return part


_ANSWERS: Mapping[str, type[_Answer]] = {
    "/v1/chat/completions": _ChatAnswer,
    "/v1/responses": _ResponsesAnswer,
    "/v1/messages": _MessagesAnswer,
}
ROUTES = frozenset(("POST", path) for path in (*_ANSWERS, RATINGS))


def _message(message: Any) -> Json:
    """A message with its content as text: pictures and the like are not kept."""
    said = dict(as_object(message))
    content: Any = said.get("content")
    if isinstance(content, list):
        texts = [as_object(part).get("text") for part in as_list(content)]
        content = "".join(text for text in texts if isinstance(text, str))
    said["content"] = content or ""
    return said
