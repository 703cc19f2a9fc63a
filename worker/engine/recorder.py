"""Records what deployments are asked and answer, as the model server's front sees it.

vLLM is asked for token ids and log-probabilities too. The client gets its answer without them,
unless it asked for them itself."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from environments.process.redaction import Redactor
from environments.tools import as_list, as_object
from flash_mcp.protocol.recordings import Recording

log = logging.getLogger(__name__)
Json = dict[str, Any]
ROUTE = ("POST", "/v1/chat/completions")
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
"""Names of variables whose values are not recorded."""
MIN_SECRET = 8
SAMPLING = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n")


class Recorder:
    """Knows which deployments are recorded, by the files that the supervisor wrote."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._recordings: dict[str, Recording] = {}
        values = [value for name, value in os.environ.items() if SECRET.search(name)]
        self._redactor = Redactor(value for value in values if len(value) >= MIN_SECRET)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for chat completions, and record it if its model is recorded."""
        content = await _content(receive)
        request: Json = {}
        with suppress(ValueError, RecursionError):
            request = as_object(json.loads(content))
        recording = self._recording(str(request.get("model")))
        if recording is None:
            await app(scope, _replayed(content, receive), send)
            return
        asked = {**request, "return_token_ids": True, "logprobs": True}
        answer = _Answer(request)
        content = json.dumps(asked).encode()
        scope = {**scope, "headers": _with_length(scope["headers"], len(content))}
        await app(scope, _replayed(content, receive), answer.sender(send))
        try:
            for line in answer.lines():
                recording.append(self._redactor.value(line))
        except OSError as error:  # a full disk ends no deployment
            log.warning("a request was not recorded: %s", error)

    def _recording(self, model: str) -> Recording | None:
        if not re.fullmatch(r"dep-\w+", model):
            return None
        known = self._recordings.setdefault(model, Recording(self._home, model))
        return known if known.is_on() else None


async def _content(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):
            return content


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
    """One answer, of all its parts that have come."""

    text: str = ""
    calls: dict[int, Json] = field(default_factory=dict[int, Json])
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    def add(self, part: Json) -> None:
        said = as_object(part.get("message")) or as_object(part.get("delta"))
        self.text += said.get("content") or ""
        for number, call in enumerate(map(as_object, as_list(said.get("tool_calls")))):
            self._add_call(call.get("index", number), call)
        self.finish = part.get("finish_reason") or self.finish
        self.token_ids += as_list(part.get("token_ids"))
        for token in as_list(as_object(part.get("logprobs")).get("content")):
            self.logprobs.append(token["logprob"])

    def _add_call(self, index: int, part: Json) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.calls.setdefault(index, empty)
        call["id"] = part.get("id") or call["id"]
        for name, more in as_object(part.get("function")).items():
            call["function"][name] += more or ""


class _Answer:
    """Reads an answer on its way to the client, and takes out what only the recording asked for."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._started = time.time()
        self._choices: dict[int, _Choice] = {}
        self._prompt: list[int] = []
        self._status = 0
        self._is_stream = False
        self._start: Message = {}
        self._rest = b""

    def sender(self, send: Send) -> Send:
        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(message)
                if self._is_stream:
                    await send(message)
                return
            self._rest += message.get("body", b"")
            if self._is_stream:
                await send({**message, "body": self._events(is_last=not message.get("more_body"))})
            elif not message.get("more_body"):
                content = self._whole()
                headers = _with_length(self._start["headers"], len(content))
                await send({**self._start, "headers": headers})
                await send({**message, "body": content})

        return forward

    def lines(self) -> list[Json]:
        """A line of the recording for each choice that ended."""
        found: list[Json] = []
        for choice in self._choices.values():
            if choice.finish is None or self._status != 200:
                continue
            answer: Json = {"role": "assistant", "content": choice.text}
            if choice.calls:
                answer["tool_calls"] = [choice.calls[index] for index in sorted(choice.calls)]
            found.append(
                {
                    "time": self._started,
                    "messages": [_message(one) for one in as_list(self._request.get("messages"))],
                    "tools": as_list(self._request.get("tools")),
                    "answer": answer,
                    "finish": choice.finish,
                    "sampling": {name: self._request.get(name) for name in SAMPLING},
                    "prompt_token_ids": self._prompt,
                    "token_ids": choice.token_ids,
                    "logprobs": choice.logprobs,
                    "seconds": round(time.time() - self._started, 3),
                }
            )
        return found

    def _begin(self, message: Message) -> None:
        self._start = message
        self._status = message["status"]
        headers = dict(message["headers"])
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def _whole(self) -> bytes:
        if self._status != 200:
            return self._rest
        return json.dumps(self._read(json.loads(self._rest))).encode()

    def _events(self, *, is_last: bool) -> bytes:
        """The events that have come whole, as the client is to see them."""
        *events, self._rest = self._rest.split(b"\n\n")
        seen = b"".join(self._event(event) + b"\n\n" for event in events)
        return seen + self._rest if is_last else seen

    def _event(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data: ")
        try:
            part = json.loads(data)
        except ValueError:  # the last one is no JSON
            return event
        return b"data: " + json.dumps(self._read(part)).encode()

    def _read(self, part: Json) -> Json:
        """Note what this part of the answer says. Returns it as the client asked for it."""
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


def _message(message: Any) -> Json:
    """A message with its content as text: pictures and the like are not kept."""
    said = dict(as_object(message))
    content: Any = said.get("content")
    if isinstance(content, list):
        texts = [as_object(part).get("text") for part in as_list(content)]
        content = "".join(text for text in texts if isinstance(text, str))
    said["content"] = content or ""
    return said
