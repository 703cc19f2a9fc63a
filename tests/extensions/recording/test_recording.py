"""What a model server's front records, and what the client sees of that: nothing."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash_mcp.protocol.recordings import TOKENS, Recording, RecordingLimits
from worker.engine.front import Front

pytestmark = pytest.mark.slow

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ASKED = {"model": "dep-1", "messages": [{"role": "user", "content": "my key: sk-12345678"}]}

PLAIN = [{"role": "user", "content": "add"}]


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value} for value in values]}


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers as vLLM does, and says how it was asked."""
    request = Request(scope, receive)
    asked = await request.json()
    assert int(request.headers["content-length"]) == len(await request.body())
    if scope["path"] != "/v1/chat/completions":
        await JSONResponse(asked)(scope, receive, send)
        return
    if asked["messages"][0]["content"] == "refuse":
        await JSONResponse({"error": {"message": "no"}}, 400)(scope, receive, send)
        return
    with_ids = asked.get("return_token_ids")
    body: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "prompt_token_ids": [1, 2]}
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
    deltas = [{"content": "hel"}, {"content": "lo"}, {"tool_calls": [function]}, {"tool_calls": [rest]}]
    text = ": a comment, which some proxies send\n\n"
    for number, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        choice |= {"token_ids": [number], "logprobs": logprobs(-float(number))}
        text += f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': [choice], 'prompt_token_ids': [1, 2]})}\n\n"
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    text += f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"
    for start in range(0, len(text), 37):
        yield text[start : start + 37].encode()


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    recording = Recording(tmp_path, "dep-1")
    recording.start(RecordingLimits(1 << 20, 30.0))
    return recording


async def ask(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str = "user",
    path: str = "/chat/completions",
    app: Callable[[ASGIApp], ASGIApp] = lambda front: front,
    **fields: Any,
) -> httpx.Response:
    for name, value in (
        ("VLLM_API_KEY", "user"),
        ("FLASH_ADMIN_KEY", "admin"),
        ("FLASH_HOME", str(home)),
        ("OPENAI_API_KEY", "sk-12345678"),
    ):
        monkeypatch.setenv(name, value)
    transport = httpx.ASGITransport(app=app(Front(behind)))
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post(f"/v1{path}", headers=headers, json={**ASKED, **fields})


async def test_an_answer_is_recorded_with_its_tokens(tmp_path: Path, monkeypatch, recording: Recording):
    answer = (await ask(tmp_path, monkeypatch, messages=PLAIN, tools=TOOLS, temperature=0.5)).json()
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0] and "prompt_token_ids" not in answer
    (line,) = recording.lines()
    assert line["messages"] == PLAIN
    assert line["answer"] == {"role": "assistant", "content": "hello", "tool_calls": [CALL]}
    assert (line["prompt_token_ids"], line["token_ids"]) == ([1, 2], [3, 4])
    assert (line["logprobs"], line["finish"]) == ([-0.5, -0.25], "stop")
    assert (line["tools"], line["sampling"]["temperature"]) == (TOOLS, 0.5)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_the_whole_answer_can_rate_it(tmp_path: Path, monkeypatch, recording: Recording, stream: bool):
    recorded: list[int] = []

    def watched(front: ASGIApp) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body = b""

            async def seen(message: Message) -> None:
                nonlocal body
                body += message.get("body", b"")
                if body and (not stream or b"[DONE]" in body):
                    recorded.append(len(list(recording.lines())))
                await send(message)

            await front(scope, receive, seen)

        return app

    await ask(tmp_path, monkeypatch, app=watched, stream=stream)
    assert recorded and set(recorded) == {1}


async def test_of_an_answer_with_a_secret_no_tokens_are_recorded(tmp_path: Path, monkeypatch, recording: Recording):
    await ask(tmp_path, monkeypatch)
    (line,) = recording.lines()
    assert line["messages"] == [{"role": "user", "content": "my key: [secret]"}]
    assert [line[name] for name in TOKENS] == [[], [], []] and line["prompt_tokens"] == 2


async def test_other_requests_go_on_while_an_answer_is_recorded(tmp_path: Path, monkeypatch, recording: Recording):
    threads: list[threading.Thread] = []
    monkeypatch.setattr(Recording, "append", lambda *_: threads.append(threading.current_thread()))
    await ask(tmp_path, monkeypatch)
    assert threads and threading.current_thread() not in threads


async def test_what_a_client_asks_for_itself_it_gets(tmp_path: Path, monkeypatch, recording: Recording):
    answer = (await ask(tmp_path, monkeypatch, logprobs=True, return_token_ids=True)).json()
    assert answer["choices"][0]["logprobs"] == logprobs(-0.5, -0.25)
    assert (answer["choices"][0]["token_ids"], answer["prompt_token_ids"]) == ([3, 4], [1, 2])


async def test_a_streamed_answer_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording):
    text = (await ask(tmp_path, monkeypatch, messages=PLAIN, stream=True)).text
    assert text.endswith("data: [DONE]\n\n") and "token_ids" not in text and "-3.0" not in text
    parts = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
    assert "".join([part["choices"][0]["delta"].get("content", "") for part in parts]) == "hello"
    (line,) = recording.lines()
    assert line["answer"]["content"] == "hello" and line["answer"]["tool_calls"] == [CALL]
    assert (line["token_ids"], line["logprobs"]) == ([0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
    assert line["finish"] == "tool_calls"


async def test_nothing_else_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording) -> None:
    await ask(tmp_path, monkeypatch, key="admin")  # the supervisor's greeting
    await ask(tmp_path, monkeypatch, model="dep-2")
    await ask(tmp_path, monkeypatch, model="../dep-1")
    for path in ("/responses", "/messages", "/completions"):
        assert (await ask(tmp_path, monkeypatch, path=path, input="x")).json() == {**ASKED, "input": "x"}
    refused = await ask(tmp_path, monkeypatch, messages=[{"role": "user", "content": "refuse"}])
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no")
    recording.stop()
    await ask(tmp_path, monkeypatch)
    assert [*recording.lines()] == []


async def test_a_request_whose_client_leaves_before_its_end_is_not_passed_on(tmp_path: Path, monkeypatch):
    await ask(tmp_path, monkeypatch)  # sets the variables
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"model": "dep-1"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    headers = [(b"authorization", b"Bearer user")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    passed_on: list[Scope] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed_on.append(scope)

    async def send(message: Message) -> None:
        pass

    await Front(app)(scope, receive, send)
    assert passed_on == []


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_is_recorded_with_its_id_its_user_and_the_requests_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording, streams: bool
) -> None:
    await ask(tmp_path, monkeypatch, user="ann", metadata={"ticket": "7"}, stream=streams)
    (chat,) = recording.lines()
    assert (chat["id"], chat["user"], chat["metadata"]) == ("chatcmpl-1", "ann", {"ticket": "7"})


async def test_users_rate_answers_by_a_route_and_in_their_next_request(tmp_path, monkeypatch, recording: Recording):
    async def rate(**body: Any) -> httpx.Response:
        return await ask(tmp_path, monkeypatch, path="/ratings", **body)

    await ask(tmp_path, monkeypatch)
    rated = await rate(id="chatcmpl-1", rating="up")
    assert rated.json() == {"id": "chatcmpl-1", "object": "rating", "rating": 1.0}
    assert [row.reward for row in recording.rollouts()] == [1.0]
    for body, status in (
        ({"id": "chatcmpl-2", "rating": "up"}, 404),
        ({"id": "chatcmpl-1", "rating": "good"}, 400),
        ({"id": "chatcmpl-1", "rating": 1, "model": "dep-2"}, 404),
    ):
        refused = await rate(**body)
        assert (refused.status_code, "message" in refused.json()["error"]) == (status, True)
    assert (await ask(tmp_path, monkeypatch, key="no", path="/ratings", id="chatcmpl-1", rating=1)).status_code == 401
    await ask(tmp_path, monkeypatch, metadata={"rates": "chatcmpl-1", "rating": "0.5"})
    first, _ = recording.rollouts()
    assert (first.reward, first.success) == (0.5, False)
