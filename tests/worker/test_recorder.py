"""What a model server's front records, and what the client sees of that: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from flash_mcp.protocol.recordings import Limits, Recording
from worker.engine.front import Front

pytestmark = pytest.mark.anyio
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ASKED = {"model": "dep-1", "messages": [{"role": "user", "content": "my key: sk-12345678"}]}


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value} for value in values]}


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers as vLLM does, and says how it was asked."""
    request = Request(scope, receive)
    asked = await request.json()
    assert int(request.headers["content-length"]) == len(await request.body())
    if asked["messages"][0]["content"] == "refuse":
        await JSONResponse({"error": {"message": "no"}}, 400)(scope, receive, send)
        return
    with_ids = asked.get("return_token_ids")
    body: dict[str, Any] = {"object": "chat.completion", "prompt_token_ids": [1, 2]}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "hello", "tool_calls": [CALL]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        if with_ids:
            choice |= {"token_ids": [3, 4], "logprobs": logprobs(-0.5, -0.25)}
        await JSONResponse({**body, "choices": [choice]})(scope, receive, send)
        return
    await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)


async def events() -> Any:
    """Parts of an answer, in pieces that end anywhere."""
    function = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    deltas = [
        {"content": "hel"},
        {"content": "lo"},
        {"tool_calls": [function]},
        {"tool_calls": [rest]},
    ]
    text = ""
    for number, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        choice |= {"token_ids": [number], "logprobs": logprobs(-float(number))}
        text += f"data: {json.dumps({'choices': [choice], 'prompt_token_ids': [1, 2]})}\n\n"
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    text += f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"
    for start in range(0, len(text), 37):
        yield text[start : start + 37].encode()


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    recording = Recording(tmp_path, "dep-1")
    recording.start(Limits(1 << 20, 30.0))
    return recording


async def ask(
    home: Path, monkeypatch: pytest.MonkeyPatch, key: str = "user", **fields: Any
) -> httpx.Response:
    for name, value in (
        ("VLLM_API_KEY", "user"),
        ("FLASH_ADMIN_KEY", "admin"),
        ("FLASH_HOME", str(home)),
        ("OPENAI_API_KEY", "sk-12345678"),
    ):
        monkeypatch.setenv(name, value)
    transport = httpx.ASGITransport(app=Front(behind))
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post("/v1/chat/completions", headers=headers, json={**ASKED, **fields})


async def test_an_answer_is_recorded_with_its_tokens_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    answer = (await ask(tmp_path, monkeypatch, tools=TOOLS, temperature=0.5)).json()
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0] and "prompt_token_ids" not in answer
    (line,) = recording.lines()
    assert line["messages"] == [{"role": "user", "content": "my key: [secret]"}]
    assert line["answer"] == {"role": "assistant", "content": "hello", "tool_calls": [CALL]}
    assert (line["prompt_token_ids"], line["token_ids"]) == ([1, 2], [3, 4])
    assert (line["logprobs"], line["finish"]) == ([-0.5, -0.25], "stop")
    assert (line["tools"], line["sampling"]["temperature"]) == (TOOLS, 0.5)


async def test_what_a_client_asks_for_itself_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    answer = (await ask(tmp_path, monkeypatch, logprobs=True, return_token_ids=True)).json()
    assert answer["choices"][0]["logprobs"] == logprobs(-0.5, -0.25)
    assert (answer["choices"][0]["token_ids"], answer["prompt_token_ids"]) == ([3, 4], [1, 2])


async def test_a_streamed_answer_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    text = (await ask(tmp_path, monkeypatch, stream=True)).text
    assert text.endswith("data: [DONE]\n\n") and "token_ids" not in text and "-3.0" not in text
    parts = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
    said = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(said) == "hello"
    (line,) = recording.lines()
    assert line["answer"]["content"] == "hello"
    assert line["answer"]["tool_calls"] == [CALL]
    assert (line["token_ids"], line["logprobs"]) == ([0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
    assert line["finish"] == "tool_calls"


async def test_nothing_else_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    await ask(tmp_path, monkeypatch, key="admin")  # the supervisor's greeting
    await ask(tmp_path, monkeypatch, model="dep-2")
    await ask(tmp_path, monkeypatch, model="../dep-1")
    refused = await ask(tmp_path, monkeypatch, messages=[{"role": "user", "content": "refuse"}])
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no")
    recording.stop()
    await ask(tmp_path, monkeypatch)
    assert [*recording.lines()] == []
