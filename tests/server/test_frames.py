"""Each request is answered, whatever form it came in: over stdio and over HTTP."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.server.frames import CheckedPosts, Refused, StdioFrames, checked
from tests.places import ROOT
from tests.teams import Team
from tests.waiting import WAIT_S

PARSE, REQUEST = -32700, -32600
DEEP = '{"jsonrpc":"2.0","id":"deep","method":"m","params":' + '{"a":' * 3000 + "1" + "}" * 3001
DEEPER_THAN_THE_SDK = '{"jsonrpc":"2.0","id":9,"method":"m","params":' + '{"a":' * 400 + "1" + "}" * 401
ODD: list[tuple[str, int, list[Any]]] = [
    ("{not json", PARSE, [None]),
    ("\ufffd", PARSE, [None]),
    ('{"jsonrpc":"2.0","id":"cut","method":"ping","params":{"a', PARSE, ["cut"]),
    ('{"jsonrpc":"2.0","method":"ping","id": 5, "params":{"a', PARSE, [5]),
    (DEEP, PARSE, ["deep"]),
    (DEEPER_THAN_THE_SDK, PARSE, [9]),
    ("[]", REQUEST, [None]),
    ('[{"id":1,"method":"ping"},{"id":"b","method":"ping"},{"method":"note"},3]', REQUEST, [1, "b"]),
    ("42", REQUEST, [None]),
    ("null", REQUEST, [None]),
    ('{"id":"nojr","method":"ping"}', REQUEST, ["nojr"]),
    ('{"jsonrpc":"1.0","id":1,"method":"ping"}', REQUEST, [1]),
    ('{"jsonrpc":"2.0","id":1.5,"method":"ping"}', REQUEST, [1.5]),
    ('{"jsonrpc":"2.0","id":null,"method":"ping"}', REQUEST, [None]),
    ('{"jsonrpc":"2.0","id":true,"method":"ping"}', REQUEST, [None]),
    ('{"jsonrpc":"2.0","id":{"a":1},"method":"ping"}', REQUEST, [None]),
    ('{"jsonrpc":"2.0","id":"p","method":"ping","params":[]}', REQUEST, ["p"]),
    ('{"jsonrpc":"2.0","id":"p","method":7}', REQUEST, ["p"]),
    ('{"jsonrpc":"2.0","id":"p"}', REQUEST, ["p"]),
]


@pytest.mark.parametrize(("text", "code", "ids"), ODD)
def test_what_is_no_message_is_refused_with_the_id_that_it_has(text: str, code: int, ids: list[Any]) -> None:
    with pytest.raises(Refused) as refused:
        checked(text)
    assert [(answer["error"]["code"], answer["id"]) for answer in refused.value.answers] == [
        (code, identity) for identity in ids
    ]
    assert all(len(answer["error"]["message"]) < 300 for answer in refused.value.answers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\ufeff {"jsonrpc":"2.0","id":1,"method":"ping"}\r\n', {"id": 1, "method": "ping"}),
        ('{"jsonrpc":"2.0","id":"","method":"ping","params":null}', {"id": "", "method": "ping", "params": None}),
        ('{"jsonrpc":"2.0","method":"notifications/x"}', {"method": "notifications/x"}),
        ('{"jsonrpc":"2.0","id":3,"result":{}}', {"id": 3, "result": {}}),
        (
            '{"jsonrpc":"2.0","id":null,"error":{"code":-1,"message":"x"}}',
            {"id": None, "error": {"code": -1, "message": "x"}},
        ),
        (
            r'{"jsonrpc":"2.0","id":"\ud83d","method":"m","params":{"a":"half \ud83d, whole \ud83d\ude00, \\ud83d"}}',
            {"id": "\ufffd", "method": "m", "params": {"a": "half \ufffd, whole 😀, \\ud83d"}},
        ),
    ],
)
def test_a_message_is_passed_on_with_a_sign_for_each_half_character(text: str, message: dict[str, Any]) -> None:
    passed, fields = checked(text)
    assert json.loads(passed) == fields == {"jsonrpc": "2.0", **message}


HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}


@pytest.mark.slow
def test_all_that_came_over_a_pipe_is_answered_before_the_server_ends(flash_home: Path) -> None:
    call = {"name": "status", "arguments": {"run_id": "half \ud83d"}}
    sent = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "cursor", "method": "tools/list", "params": {"cursor": "zzz"}},
        {"jsonrpc": "2.0", "id": "prompt", "method": "prompts/get", "params": {"name": "nope"}},
        {"jsonrpc": "2.0", "id": "call", "method": "tools/call", "params": call},
    ]
    lines = [json.dumps(message) for message in sent]
    lines += ["", *(text for text, _, _ in ODD)]
    command = [sys.executable, "-m", "flash_mcp.cli", "serve"]
    ended = subprocess.run(
        command, input="\n".join(lines).encode(), capture_output=True, cwd=ROOT, timeout=WAIT_S, check=True
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    errors = [(answer["id"], answer["error"]["code"]) for answer in answers if "error" in answer]
    assert sorted(errors, key=repr) == sorted(
        [("cursor", -32602), ("prompt", -32602)] + [(identity, code) for _, code, ids in ODD for identity in ids],
        key=repr,
    )
    assert "half \ufffd" in next(
        json.dumps(a, ensure_ascii=False) for a in answers if "result" in a and a["id"] == "call"
    )


async def test_a_doubled_id_over_stdio_is_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    ping = '{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
    sent, answered = tmp_path / "in", tmp_path / "out"
    sent.write_text(ping + ping + '{"jsonrpc":"2.0","id":2,"method":"subscriptions/listen"}\n' + ping)
    with sent.open() as stdin, answered.open("w") as stdout:
        frames = StdioFrames(stdin, stdout)
        lines = aiter(frames)
        assert [json.loads(await anext(lines))["id"] for _ in range(2)] == [1, 2]
        await frames.write('{"jsonrpc":"2.0","id":1,"result":{}}\n')
        assert json.loads(await anext(lines))["id"] == 1  # the first has been answered
    refused, done = map(json.loads, answered.read_text().splitlines())
    assert (refused["id"], refused["error"]["code"], done["id"]) == (1, REQUEST, 1)


@pytest.mark.slow
def test_what_is_no_message_is_a_400_over_http(team: Team) -> None:
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    with team.http(team.token("alice"), **headers) as http:
        for text, code, ids in ODD:
            answer = http.post("/mcp", content=text.encode())
            found = answer.json()
            found = found if isinstance(found, list) else [found]
            assert answer.status_code == 400
            assert [(item["error"]["code"], item["id"]) for item in found] == [(code, identity) for identity in ids]
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
        assert http.post("/mcp", content=b"\xef\xbb\xbf" + json.dumps(hello).encode()).status_code == 200
        assert http.post("/mcp", content=b" " * (5 << 20)).status_code == 413


async def test_a_doubled_id_of_a_session_is_refused_while_the_first_is_under_way() -> None:
    inner: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        inner.append(len((await receive())["body"]))
        if len(inner) == 1:
            assert await post("a") == 400
            assert await post("b") == 202  # the same id in another session
        await send({"type": "http.response.start", "status": 202, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    posts = CheckedPosts(app, "/mcp")

    async def post(session: str) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"jsonrpc":"2.0","id":1,"method":"ping"}'}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"mcp-session-id", session.encode()), (b"content-type", b"application/json")]
        await posts({"type": "http", "method": "POST", "path": "/mcp", "headers": headers}, receive, send)
        return sent[0]["status"]

    assert await post("a") == 202
    assert await post("a") == 202  # the first has been answered
    assert len(inner) == 3
