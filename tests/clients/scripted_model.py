"""A model that reads from a script, so that real coding agents can be driven without any model service.

It speaks Anthropic Messages (/v1/messages), OpenAI Responses (/v1/responses), Chat Completions
(/v1/chat/completions) and Gemini's generateContent (/v1beta/models/MODEL:...), and keeps what it was shown."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
MAX_REPEATS = 60


@dataclass(frozen=True)
class Step:
    """A call to make; again and again until its result has `until` in it. `arguments` may read the results so far."""

    tool: str
    arguments: Callable[[Sequence[str]], Json]
    until: str = ""


@dataclass
class Model:
    """Plays its script and remembers: `results` of the tools as the client last showed them,
    `tools` as offered."""

    script: Sequence[Step]
    prefix: str = ""
    """What the client puts before tool names and does not tell: Claude Code hides tools until they are searched for."""
    results: list[str] = field(default_factory=list)
    tools: dict[str, Json] = field(default_factory=dict)

    def step(self, tools: Iterable[Json], results: Sequence[str]) -> tuple[Step, Json, Json] | None:
        """(step, arguments, {"name", "namespace"?} as the client spells it); None when the script has been played."""
        offered = dict(_offered(tools))
        if not offered:  # the client wants a title for the conversation, or the like
            return None
        self.tools |= {name: tool for name, (_, tool) in offered.items()}
        self.results = list(results)
        settled = len(self.played())
        if settled == len(self.script):
            return None
        step = self.script[settled]
        name = next((name for name in offered if name.endswith(step.tool)), f"{self.prefix}{step.tool}")
        namespace, _ = offered.get(name, (None, None))
        return (step, step.arguments(results), {"name": name} | ({"namespace": namespace} if namespace else {}))

    def played(self) -> list[str]:
        """What the model was shown at the end of each step that it has played, as plain text."""
        shown, ends = [plain(result) for result in self.results], list[str]()
        for step in self.script:
            last = next((at for at, result in enumerate(shown[:MAX_REPEATS]) if step.until in result), None)
            if last is None:
                break
            ends.append(shown[last])
            shown = shown[last + 1 :]
        return ends


def plain(shown: str) -> str:
    """A result without the backslashes of JSON inside JSON."""
    return shown.replace("\\", "")


def _offered(tools: Iterable[Json]) -> Generator[tuple[str, tuple[str | None, Json]]]:
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from ((inner["name"], (tool["name"], inner)) for inner in tool.get("tools", []))
        elif name := tool.get("name") or tool.get("function", {}).get("name"):
            yield name, (None, tool.get("function") or tool)


def _words(content: Any) -> str:
    """The text of a result, whichever way it is wrapped."""
    if isinstance(content, list):
        return "".join(_words(part) for part in content)
    return content.get("text", "") if isinstance(content, dict) else str(content)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, *_: Any) -> None:
        pass

    def send_json(self, payload: Json) -> None:
        body = json.dumps(payload).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_events(self, events: Iterable[Json | str], *, named: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            head = f"event: {event['type']}\n" if named and isinstance(event, dict) else ""
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"{head}data: {data}\n\n".encode())
        self.wfile.flush()
        self.close_connection = True

    def do_HEAD(self) -> None:
        self.send_json({})

    def do_GET(self) -> None:
        self.send_json({"object": "list", "data": [{"id": "scripted", "object": "model"}], "models": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if "count_tokens" in self.path:
            self.send_json({"input_tokens": 10})
        elif "enerateContent" in self.path:
            self.answer_gemini(body)
        elif "responses" in self.path:
            self.answer_responses(body)
        elif "chat/completions" in self.path:
            self.answer_chat(body)
        elif "messages" in self.path:
            self.answer_messages(body)
        else:
            self.send_json({})

    def answer_gemini(self, body: Json) -> None:
        """https://ai.google.dev/api/generate-content"""
        parts = [part for content in body.get("contents", []) for part in content.get("parts", [])]
        answers = [part["functionResponse"]["response"] for part in parts if "functionResponse" in part]
        results = [str(each.get("output", each.get("error", each))) for each in answers]
        tools = [tool for group in body.get("tools") or [] for tool in group.get("functionDeclarations", [])]
        part: Json = {"text": "DONE"}
        if played := self.model.step(tools, results):
            _, arguments, names = played
            part = {"functionCall": {"name": names["name"], "args": arguments}}
        candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
        usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        whole: Json = {"candidates": [candidate], "usageMetadata": usage}
        if "stream" in self.path:
            self.send_events([whole], named=False)
        else:
            self.send_json(whole)

    def answer_messages(self, body: Json) -> None:
        """https://docs.anthropic.com/en/api/messages"""
        blocks = [b for m in body.get("messages", []) if isinstance(m["content"], list) for b in m["content"]]
        results = [_words(block.get("content", "")) for block in blocks if block.get("type") == "tool_result"]
        played = self.model.step(body.get("tools") or [], results)
        if played:
            _, arguments, names = played
            block: Json = {"type": "tool_use", "id": f"toolu_{len(results)}", "name": names["name"], "input": {}}
            delta, reason = ({"type": "input_json_delta", "partial_json": json.dumps(arguments)}, "tool_use")
        else:
            arguments, block = {}, {"type": "text", "text": ""}
            delta, reason = {"type": "text_delta", "text": "DONE"}, "end_turn"
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model", "scripted"),
                "content": [], "stop_reason": None, "stop_sequence": None,
                "usage": {"input_tokens": 10, "output_tokens": 5}}  # fmt: skip
        if not body.get("stream"):
            whole = {**block, "input": arguments} if played else {"type": "text", "text": "DONE"}
            self.send_json({**head, "content": [whole], "stop_reason": reason})
            return
        ending = {"stop_reason": reason, "stop_sequence": None}
        self.send_events(
            [
                {"type": "message_start", "message": head},
                {"type": "content_block_start", "index": 0, "content_block": block},
                {"type": "content_block_delta", "index": 0, "delta": delta}, {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": ending, "usage": {"output_tokens": 5}}, {"type": "message_stop"},
            ],
            named=True,
        )  # fmt: skip

    def answer_responses(self, body: Json) -> None:
        """https://platform.openai.com/docs/api-reference/responses-streaming"""
        items = body.get("input", [])
        results = [_words(item["output"]) for item in items if item.get("type") == "function_call_output"]
        if played := self.model.step(body.get("tools") or [], results):
            _, arguments, names = played
            number = len(results)
            item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", **names,
                    "arguments": json.dumps(arguments)}  # fmt: skip
        else:
            content = [{"type": "output_text", "text": "DONE", "annotations": []}]
            item = {"type": "message", "id": "msg_0", "role": "assistant", "content": content}
        usage = {"input_tokens": 1, "input_tokens_details": None, "output_tokens": 1, "output_tokens_details": None,
                 "total_tokens": 2}  # fmt: skip
        response = f"resp_{len(results)}"
        self.send_events(
            [
                {"type": "response.created", "response": {"id": response}},
                {"type": "response.output_item.done", "output_index": 0, "item": item},
                {"type": "response.completed", "response": {"id": response, "output": [item], "usage": usage}},
            ],
            named=True,
        )

    def answer_chat(self, body: Json) -> None:
        """https://platform.openai.com/docs/api-reference/chat/streaming"""
        results = [_words(m["content"]) for m in body.get("messages", []) if m.get("role") == "tool"]
        if played := self.model.step(body.get("tools") or [], results):
            _, arguments, names = played
            function = {"name": names["name"], "arguments": json.dumps(arguments)}
            call = {"index": 0, "id": f"call_{len(results)}", "type": "function", "function": function}
            delta, reason = {"role": "assistant", "tool_calls": [call]}, "tool_calls"
        else:
            delta, reason = {"role": "assistant", "content": "DONE"}, "stop"
        base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
        if not body.get("stream"):
            choice = {"index": 0, "message": delta, "finish_reason": reason}
            self.send_json({**base, "object": "chat.completion", "choices": [choice]})
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.send_events(
            [
                {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage},
                "[DONE]",
            ],
            named=False,
        )


@contextmanager
def serving(model: Model) -> Generator[str]:
    """The model on a free port of loopback; its address."""
    handler = type("ScriptedHandler", (Handler,), {"model": model})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
