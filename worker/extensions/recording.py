"""Records chat completions of deployments, as the model server's front sees them.

vLLM is asked for the ids and log-probabilities of tokens too. The client gets its answer without
them, unless it asked for them itself. Users rate answers by POST /v1/ratings, or in the metadata of
a later request: {"rates": ID, "rating": "up"}."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from environments.base import Json
from environments.tools import add_call_parts, as_list, as_object
from environments.untrusted_text import Redactor
from flash_mcp.protocol.recordings import TOKENS, Recording, rating_of

log = logging.getLogger(__name__)
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
"""Names of variables whose values are not recorded."""
MIN_SECRET = 8
RATINGS = "/v1/ratings"
SAMPLING = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n")


class Recorder:
    """Knows which deployments are recorded, by the files that the supervisor wrote."""

    routes = frozenset([("POST", "/v1/chat/completions"), ("POST", RATINGS)])

    def __init__(self, home: Path) -> None:
        self._home = home
        self._recordings: dict[str, Recording] = {}
        values = [value for name, value in os.environ.items() if SECRET.search(name)]
        self._redactor = Redactor(value for value in values if len(value) >= MIN_SECRET)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request to one of `routes`, and record it if its model is recorded."""
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
        answer = _Answer(request)
        content = json.dumps({**request, "return_token_ids": True, "logprobs": True}).encode()
        scope = {**scope, "headers": _with_length(scope["headers"], len(content))}
        is_recorded = False

        async def record() -> None:
            nonlocal is_recorded
            if is_recorded:
                return
            is_recorded = True
            try:
                for line in answer.lines() if answer.status == 200 else ():
                    # The line without secrets, and without tokens that would spell one out again
                    redacted: Json = self._redactor.value(line) | {"id": line["id"]}
                    if redacted != line:
                        redacted |= {name: [] for name in TOKENS}
                    await run_in_threadpool(recording.append, redacted)
            except OSError as error:  # a full disk ends no deployment
                log.warning("a request was not recorded: %s", error)

        await app(scope, _replayed(content, receive), answer.sender(send, record))
        await record()  # of a stream that nothing ended

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

    def __init__(self, request: Json) -> None:
        self.status = 0
        self._request = request
        self._started = time.time()
        self._is_stream = False
        self._has_ended = False
        """The last event of the stream has come."""
        self._start: Message = {}
        self._rest = b""
        self._choices: dict[int, _Choice] = {}
        self._prompt: list[int] = []
        self._identity = ""

    def lines(self) -> Iterator[Json]:
        """A line for each choice that has come whole."""
        metadata = as_object(self._request.get("metadata"))
        for choice in self._choices.values():
            if choice.finish is None:
                continue
            answer: Json = {"role": "assistant", "content": choice.text}
            if choice.calls:
                answer["tool_calls"] = [choice.calls[index] for index in sorted(choice.calls)]
            yield {
                "id": self._identity,
                "time": self._started,
                "user": self._request.get("user") or metadata.get("user_id"),
                "metadata": metadata,
                "sampling": {name: self._request.get(name) for name in SAMPLING},
                "seconds": round(time.time() - self._started, 3),
                "messages": [_message(one) for one in as_list(self._request.get("messages"))],
                "tools": as_list(self._request.get("tools")),
                "answer": answer,
                "finish": choice.finish,
                "prompt_token_ids": self._prompt,
                "token_ids": choice.token_ids,
                "logprobs": choice.logprobs,
                "prompt_tokens": len(self._prompt),
                "completion_tokens": len(choice.token_ids),
            }

    def _read(self, part: Json) -> Json:
        """Note what this part of the answer says. Returns it as the client asked for it."""
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

    def sender(self, send: Send, record: Callable[[], Awaitable[None]]) -> Send:
        """Sends what comes to the client. Before the end of it `record` is awaited: who has the
        whole answer may rate it at once.
        """

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._start = message
                self.status = message["status"]
                kind = dict(message["headers"]).get(b"content-type", b"")
                self._is_stream = kind.startswith(b"text/event-stream")
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
                content = self._rest
                if self.status == 200:
                    content = json.dumps(self._read(json.loads(content))).encode()
                await record()
                headers = _with_length(self._start["headers"], len(content))
                await send({**self._start, "headers": headers})
                await send({**message, "body": content})

        return forward

    def _events(self, *, is_last: bool) -> bytes:
        """The events that have come whole, as the client is to see them."""
        *events, self._rest = self._rest.split(b"\n\n")
        seen = b"".join(self._event(event) + b"\n\n" for event in events)
        return seen + self._rest if is_last else seen

    def _event(self, event: bytes) -> bytes:
        name, mark, data = event.partition(b"data: ")
        try:
            part = json.loads(data)
        except ValueError:  # the last one, [DONE], is no JSON
            self._has_ended |= data.strip() == b"[DONE]"
            return event
        return name + mark + json.dumps(self._read(part)).encode()


def _message(message: Any) -> Json:
    """A message with its content as text: pictures and the like are not kept."""
    said = dict(as_object(message))
    content: Any = said.get("content")
    if isinstance(content, list):
        texts = [as_object(part).get("text") for part in as_list(content)]
        content = "".join(text for text in texts if isinstance(text, str))
    said["content"] = content or ""
    return said
