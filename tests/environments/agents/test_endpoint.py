"""Agents: programs that ask a model through OpenAI's API, in the sandbox of their environment."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from environments.agents.calls import AgentCall, CallOptions, Usage
from environments.agents.dialects import ApiError
from environments.agents.session import AgentSession
from environments.checks.playing import Task, play
from environments.checks.report import failure
from environments.process import host as host_module
from environments.process.host import EnvironmentFault, EnvironmentHost, Score
from environments.sandbox.landlock import knows_ports
from tests.environments.sandbox.test_acts import EVERY_USERS_PYTHON, ONLY_ROOT, WITHOUT_RIGHTS
from tests.folders import environment_folder
from tests.places import ROOT
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.linux]

AGENT = """
import _socket, http.client, json, socket, threading
from urllib.parse import urlsplit
from environments import EnvironmentAgent
def post(base_url, key, body, path="/chat/completions", method="POST", **headers):
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": f"Bearer {key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    connection.request(method, url.path + path, json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, content
def user(text):
    return {"role": "user", "content": text}
class Sample(EnvironmentAgent):
    max_calls = 4
    def __init__(self, programs):
        self.dataset = [TaskExample({}, each, id=f"t{n}") for n, each in enumerate(programs)]
    def run(self, example, base_url, api_key, model):
        told = []
        def ask(messages, key=api_key, **more):
            headers = more.pop("headers", {})
            path = more.pop("path", "/chat/completions")
            answer = post(base_url, key, {"model": model, "messages": messages, **more}, path, **headers)
            return answer[0], json.loads(answer[1])
        def tried(act):
            try:
                act()
                told.append("done")
            except OSError as error:
                told.append(type(error).__name__)
        exec(example.input, globals() | locals())
        return RewardResult(float(len(told)), success=True, reason=json.dumps(told))
"""
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@asynccontextmanager
async def agents(folder: Path, *programs: str, source: str = "", needs: str = "", **options: Any):
    """A host whose task number n runs program n. The program tells what is in its list `told`."""
    returns = f"Sample({[textwrap.dedent(each) for each in programs]!r})"
    environment_folder(folder, AGENT + textwrap.dedent(source), returns=returns, needs=f"endpoint = true\n{needs}")
    async with await EnvironmentHost.start(folder, **options) as host:
        yield host


async def told(host: EnvironmentHost, answers: Sequence[str], index: int = 0) -> Any:
    """What the program of a task told when the model answered so."""
    return json.loads((await play(host, Task("train", index), answers)).score.reason or "")


async def test_requests_of_an_agent_are_the_turns_of_a_conversation(tmp_path: Path) -> None:
    program = """
        messages = [{"role": "developer", "content": "Be brief."}, user("2 + 2?")]
        status, answer = ask(messages, tools=[TOOL], temperature=0.5)
        told.append(answer)
        message = json.loads(json.dumps(answer))["choices"][0]["message"]
        call = message["tool_calls"][0]
        # Clients write the arguments anew and strip the text.
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "4"}]}]
        told.append(ask(messages, tools=[TOOL])[1])
    """
    async with agents(tmp_path / "agent", program, source=f"TOOL = {TOOL}") as host:
        opening = await host.open("train", 0)
        assert opening.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
        assert opening.tools == [TOOL] and opening.max_turns == 4
        step = await host.step(opening.episode, "Let me add. ", [CALL], Usage(30, 5))
        assert step.messages == [{"role": "tool", "tool_call_id": "call00000", "content": "4"}]
        assert (await host.step(opening.episode, "It is", usage=Usage(50, 2, "length"))).done
        score = await host.score(opening.episode)
    assert score.reward == 2 and score.success
    called, said = json.loads(score.reason or "")
    choice = called["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me add. "
    assert choice["message"]["tool_calls"] == [CALL]
    assert called["object"] == "chat.completion" and called["model"] == "policy"
    assert called["usage"] == {"prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35}
    assert said["choices"][0]["finish_reason"] == "length"


REFUSED = """
    told.append(ask([user("x")], key="sk-wrong"))
    told.append(ask([user("x")], path="/embeddings"))
    told.append(ask([user("x")], n=80))
    told.append(ask([user("x")], logprobs=True, top_logprobs=3))
    told.append(ask([user("x")], logit_bias={"7": 100}))
    told.append(ask([user("x")], stop=[""]))
    told.append(ask([user("x")], min_tokens=3))
    told.append(ask([user("x")], tool_choice="required"))
    told.append(ask([user("x")], response_format={"type": "json_schema"}))
    told.append(ask([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]))
    told.append(ask([]))
    told.append(ask([user("x")], tools=[7]))
    told.append(ask([user("x" * 10_000_000)]))
    deep = {}
    for _ in range(200): deep = {"properties": deep}
    told.append(ask([user("x")], tools=[{"name": "f", "parameters": deep}]))
    told.append(ask([user("x")], tools=[{"name": "f", "parameters": {"maximum": float("nan")}}]))
    told.append(ask([user("x")], metadata={"n": float("inf")}))
    body = {"model": model, "input": "x", "previous_response_id": []}
    status, content = post(base_url, api_key, body, "/responses")
    told.append([status, json.loads(content)])
    told.append(ask([user("x")], headers={"Transfer_Encoding": "chunked"}))
    told.append(ask([user("x")], headers={"Content_Length": "9" * 5000}))
    ask([user("x")])
"""


CRASHES = """
    for _ in range({asked}):
        ask([user("x")], thread={{"id": 1}}, path="/messages", max_tokens=1)
    ask([user("x")])
    ask([user("x")], min_tokens=3)
    raise RuntimeError("Unknown parameter")
"""
SILENT = """
    for _ in range(2): ask([user("x")], min_tokens=3)
"""


async def test_refusals_are_counted_where_the_rollout_fails_because_of_them(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", CRASHES.format(asked=3), SILENT) as host:
        with pytest.raises(EnvironmentFault, match="Unknown parameter") as caught:
            await play(host, Task("train", 0), ["y"])
        with pytest.raises(EnvironmentFault, match=r"without asking the model.*last request: .*min_tokens") as silent:
            await host.open("train", 1)
    assert caught.value.refusals == {"thread_unsupported_request: thread": 3, "unknown_parameter: min_tokens": 1}
    assert silent.value.refusals == {"unknown_parameter: min_tokens": 2}


async def test_what_is_not_served_is_answered_as_an_api_does(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", REFUSED) as host:
        score = (await play(host, Task("train", 0), ["y"])).score
    answers = json.loads(score.reason or "")
    assert score.refusals["unsupported_value: top_logprobs"] == 1
    assert score.refusals["unknown_parameter: min_tokens"] == 1
    assert sum(score.refusals.values()) == len(answers) - 1, "the wrong key belongs to nobody"
    assert [(status, body["error"]["code"]) for status, body in answers] == [
        (401, "invalid_api_key"), (404, "unknown_url"), (400, "unsupported_value"), (400, "unsupported_value"),
        (400, "unsupported_value"), (400, "invalid_value"), (400, "unknown_parameter"), (400, "invalid_value"),
        (400, "invalid_value"), (400, "invalid_value"), (400, "invalid_value"), (400, "invalid_value"),
        (413, "request_too_large"), (400, "invalid_value"), (400, "invalid_value"), (400, "invalid_value"),
        (404, "previous_response_not_found"), (411, "length_required"), (411, "length_required"),
    ]  # fmt: skip


async def served(host: EnvironmentHost, index: int = 0) -> list[AgentCall]:
    """The calls of a program, each of which is answered as it comes."""
    opening = await host.open("train", index)
    assert opening.is_agent
    calls = [opening.call]
    await host.answer_call(opening.episode, 0, "a0")
    while isinstance(call := await host.next_call(opening.episode), AgentCall):
        calls.append(call)
        await host.answer_call(opening.episode, call.number, f"a{call.number}")
    assert call == "done"
    await host.score(opening.episode)
    return calls


FORKS: dict[str, tuple[str, list[tuple[int | None, int]]]] = {
    "branches": ('say(user("x"), answer, user("y")); say(user("x"), answer, user("z"))', [(None, 1), (0, 1), (0, 1)]),
    "samples again": ('say(user("x"))', [(None, 1), (None, 1)]),
    "changes history": ('say(user("z"), answer, user("y"))', [(None, 1), (None, 3)]),
    "changes its tools": ('say(user("x"), answer, user("y"), tools=[{"name": "f"}])', [(None, 1), (None, 3)]),
    "compacts its history": ('more = say(user("x"), answer, user("y")); say(user("so far: x"), more, user("z"))',
        [(None, 1), (0, 1), (None, 3)]),
    "writes a turn of the model": (
        'say(user("x"), answer, {"role": "assistant", "content": "I"}, user("y"))', [(None, 1), (None, 4)]),
    "asks nothing new": ('say(user("x"), answer)', [(None, 1), (None, 2)]),
    "asks twice at once": (
        """
        both = [
            threading.Thread(target=say, args=(user("x"), answer, user(str(n)))) for n in (1, 2)
        ]
        for each in both: each.start()
        for each in both: each.join()
        """,
        [(None, 1), (0, 1), (0, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fork", FORKS)
async def test_an_agent_may_go_on_from_any_answer_or_begin_anew(fork: str, tmp_path: Path) -> None:
    start = """
def say(*messages, **more):
    return ask(list(messages), **more)[1]["choices"][0]["message"]
answer = say(user("x"))
"""
    act, expected = FORKS[fork]
    async with agents(tmp_path / "agent", start + textwrap.dedent(act)) as host:
        calls = await served(host)
    assert [(call.parent, len(call.messages)) for call in calls] == expected


BOTH = """
def say(text):
    told.append(ask([user(text)])[1]["choices"][0]["message"]["content"])
both = [threading.Thread(target=say, args=(str(n),)) for n in (1, 2)]
for each in both: each.start()
for each in both: each.join()
"""


async def test_calls_at_once_are_answered_in_any_order(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", BOTH, timeout_s=1) as host:
        opening = await host.open("train", 0)
        second = await host.next_call(opening.episode)
        assert isinstance(second, AgentCall) and second.number == 1
        ending = asyncio.create_task(host.next_call(opening.episode))
        done, _ = await asyncio.wait([ending], timeout=1.5)
        assert not done, "the agent is not late while it waits for the model"
        await host.answer_call(opening.episode, 1, "second")
        await host.answer_call(opening.episode, 0, "first")
        assert await ending == "done"
        score = await host.score(opening.episode)
    assert sorted(json.loads(score.reason or "")) == ["first", "second"]


LEFT = """
    url = urlsplit(base_url)
    body = json.dumps({"model": model, "messages": [user("x")]})
    head = f"POST {url.path}/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer {api_key}\\r\\n"
    with socket.create_connection((url.hostname, url.port)) as left:
        left.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.01)
        BEFORE
    told.append(ask([user("y")])[0])
    AFTER
"""
SAME = 'ask([user("x")])'
RETRY = 'ask([user("x")], headers={"x_stainless_retry_count": "1"})'


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("", "", "reached no client"),
        ("", 'raise ValueError("I give up")', r"reached no client.*; run raised ValueError: I give up"), ("", SAME, ""),
        ("", 'ask([user("x")], max_tokens=5)', "reached no client"), (SAME, "", ""), (RETRY, "", ""),
    ],
)  # fmt: skip
async def test_an_answer_that_reaches_nobody_drops_the_rollout(before: str, after: str, lost: str, tmp_path: Path):
    """`before` it left the request for x, and `after` that, the agent asks again."""
    program = LEFT.replace("BEFORE", before).replace("AFTER", after)
    async with agents(tmp_path / "agent", program, source="from pathlib import Path") as host:
        episode = (await host.open("train", 0)).episode
        (tmp_path / "agent" / "go").touch()
        call = await host.next_call(episode)
        if before:
            assert isinstance(call, AgentCall)
            await host.answer_call(episode, call.number, "another x")
            call = await host.next_call(episode)
        assert isinstance(call, AgentCall)  # for y, so it has left the first one
        await host.answer_call(episode, 0, "x")
        await host.answer_call(episode, call.number, "y")
        if "max_tokens" in after:
            call = await host.next_call(episode)
            assert isinstance(call, AgentCall) and call.number == 2
            await host.answer_call(episode, 2, "short")
        if lost:
            with pytest.raises(EnvironmentFault, match=lost) as caught:
                await host.next_call(episode)
            assert caught.value.code == "lost_call", caught.value.what
        else:
            assert await host.next_call(episode) == "done"
            assert json.loads((await host.score(episode)).reason or "") == [200]


async def test_a_caller_that_plays_turn_by_turn_answers_calls_one_after_the_other(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", BOTH) as host:
        assert sorted(await told(host, ["y", "z"])) == ["y", "z"]


WISHES = """
    def said(messages, **more):
        status, answer = ask(messages, **more)
        told.append(answer["choices"])
    said([user("x")], n=2, logprobs=True, max_tokens=7, stop="END", seed=3, temperature=0)
    tool = {"type": "function", "function": {"name": "f"}}
    said([user("y")], tools=[tool], tool_choice=tool, parallel_tool_calls=False)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    said([user("z")], response_format=form, tool_choice="none")
"""


async def test_what_a_request_asks_of_its_answer_reaches_the_caller(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", WISHES) as host:
        opening = await host.open("train", 0)
        episode = opening.episode
        second = await host.next_call(episode)
        assert isinstance(second, AgentCall) and opening.call.parent == second.parent is None
        expected = CallOptions(max_tokens=7, stop=("END",), logprobs=True)
        assert opening.options == second.options == expected
        await host.answer_call(episode, 1, "b", usage=Usage(3, 2, logprobs=[("b", -0.5)]))
        await host.answer_call(episode, 0, "a", usage=Usage(3, 1, stopped_by="END"))
        third = await host.next_call(episode)
        assert isinstance(third, AgentCall)
        assert third.options == CallOptions(tool_choice="required", tool_name="f", parallel_tool_calls=False)
        await host.answer_call(episode, 2, "", [CALL])
        fourth = await host.next_call(episode)
        assert isinstance(fourth, AgentCall)
        assert fourth.options == CallOptions(tool_choice="none", json_schema={"type": "integer"})
        await host.answer_call(episode, 3, "7")
        assert await host.next_call(episode) == "done"
        both, called, number = json.loads((await host.score(episode)).reason or "")
    assert [choice["message"]["content"] for choice in both] == ["a", "b"]
    assert [choice["index"] for choice in both] == [0, 1] and both[1]["logprobs"]["content"][0]["logprob"] == -0.5
    assert called[0]["finish_reason"] == "tool_calls" and number[0]["message"]["content"] == "7"


async def test_what_follows_a_stop_sequence_is_rendered_anew(tmp_path: Path) -> None:
    program = """
        answer = ask([user("x")], stop=["END"])[1]["choices"][0]["message"]
        ask([user("x"), answer, user("y")])
    """
    async with agents(tmp_path / "agent", program) as host:
        episode = (await host.open("train", 0)).episode
        await host.answer_call(episode, 0, "a", usage=Usage(3, 2, stopped_by="END"))
        call = await host.next_call(episode)
        assert isinstance(call, AgentCall) and call.parent is None and len(call.messages) == 3
        await host.answer_call(episode, 1, "b")
        assert await host.next_call(episode) == "done"
        await host.score(episode)


INTERRUPTED = """
    import select
    url = urlsplit(base_url)
    def left(body, place):
        # A client that sends its request, and leaves at this place.
        head = f"POST {url.path}/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer {api_key}\\r\\n"
        sent = f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode()
        with socket.create_connection((url.hostname, url.port)) as connection:
            if place == "half a request":
                connection.sendall(sent[:-9])
                return
            connection.sendall(sent)
            if place == "an answer that lies unread":
                select.select([connection], [], [])
            if place == "a piece of the answer":
                assert connection.recv(9)
    places = ["half a request", "a whole request", "an answer that lies unread", "a piece of the answer"]
    messages = []
    for turn in range(20):
        messages.append(user(f"turn {turn}"))
        streams = turn >= 10
        body = {"model": model, "messages": messages}
        for retry in range(3):
            left(json.dumps(body), places[(turn + retry * (turn // 4)) % 4])
        status, content = post(base_url, api_key, {**body, "stream": streams})
        assert status == 200, content
        if streams:
            parts = [json.loads(line[6:]) for line in content.splitlines() if line.startswith("data: {")]
            said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        else:
            said = json.loads(content)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
        told.append(said)
"""


async def test_long_episodes_whose_clients_leave_at_every_place_are_not_lost(tmp_path: Path) -> None:
    """No request says that it is sent again, and a retry that counted as a call would meet the limit."""
    source = """
        class Sample(Sample):
            max_calls = 20
    """

    async def answered(host: EnvironmentHost, index: int) -> None:
        opening = await host.open("train", index)
        call: Any = opening.call
        numbers: list[int] = []
        while isinstance(call, AgentCall):
            assert call.parent == (call.number - 1 if call.number else None)
            numbers.append(call.number)
            await host.answer_call(opening.episode, call.number, f"answer {call.number}")
            call = await host.next_call(opening.episode)
        assert call == "done" and numbers == list(range(20))
        score = await host.score(opening.episode)
        assert json.loads(score.reason or "") == [f"answer {number}" for number in range(20)]

    async with agents(tmp_path / "agent", *[INTERRUPTED] * 8, source=source) as host:
        await asyncio.gather(*(answered(host, index) for index in range(8)))


async def test_a_stream_says_that_it_waits_and_tells_of_an_error(tmp_path: Path) -> None:
    program = """
        status, content = post(
            base_url, api_key, {"model": model, "messages": [user("x")], "stream": True}
        )
        told.append([status, content])
        body = {"model": model, "messages": [user("x")], "max_tokens": 5, "stream": True}
        told.append([*post(base_url, api_key, body, "/messages")])
    """
    source = """
        from environments.agents import server
        server.COMMENT_EVERY_S = 0.02
    """
    async with agents(tmp_path / "agent", program, source=source) as host:
        episode = (await host.open("train", 0)).episode
        await asyncio.sleep(0.1)
        await host.answer_call(episode, 0, "y")
        await host.next_call(episode)
        await asyncio.sleep(0.1)
        await host.refuse_call(episode, 1, "context_length_exceeded", "too long")
        assert await host.next_call(episode) == "done"
        whole, broken = json.loads((await host.score(episode)).reason or "")
    assert whole[0] == broken[0] == 200
    assert whole[1].count(": the model has not answered yet") > 1 and '"content": "y"' in whole[1]
    assert "event: error" in broken[1] and "prompt is too long" in broken[1]


async def test_connections_that_say_nothing_keep_no_other_rollout_out(tmp_path: Path) -> None:
    flood = """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        url = urlsplit(base_url)
        HELD.extend(socket.create_connection((url.hostname, url.port)) for _ in range(1500))
        for each in HELD[::2]:
            try:
                each.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nContent-")
            except OSError:
                pass  # closed for a newer one
        ask([user("x")])
    """
    async with agents(tmp_path / "agent", flood, 'ask([user("x")])', source="HELD = []") as host:
        assert await told(host, ["y"]) == []
        assert await asyncio.gather(*(told(host, ["y"], 1) for _ in range(8))) == [[]] * 8


LIMITS = """
messages = [user("x")]
while True:
    status, answer = ask(messages)
    told.append(status)
    if status != 200:
        told.append(answer["error"]["code"])
        break
    messages += [answer["choices"][0]["message"], user("more")]
"""


@pytest.mark.parametrize("scores", [32, 1])
async def test_an_agent_learns_of_its_limits_as_from_a_real_service(tmp_path: Path, scores: int) -> None:
    source = f"Sample.max_score_concurrency = {scores}"
    raising = LIMITS + "raise ValueError('no answer')"
    async with agents(tmp_path / "agent", LIMITS, raising, source=source) as host:
        assert await told(host, ["y"]) == [200] * 4 + [429, "rate_limit_exceeded"]
        played = await play(host, Task("train", 0), ["y"], repeat=False)
        assert json.loads(played.score.reason or "")[1:] == [400, "context_length_exceeded"]
        lost = (await play(host, Task("train", 1), ["y"])).score
    assert lost.reward == 0 and not lost.success
    assert "may ask the model 4 times" in (lost.reason or "") and "no answer" in (lost.reason or "")


async def test_a_run_has_a_budget_of_tokens_and_of_time(tmp_path: Path) -> None:
    source = """
        class Sample(Sample):
            max_tokens = 8
    """
    scores: list[Score] = []
    async with agents(tmp_path / "agent", LIMITS, LIMITS + "1 / 0", source=source) as host:
        for index in range(2):
            episode = (await host.open("train", index)).episode
            await host.answer_call(episode, 0, "y", usage=Usage(9, 4))
            await host.next_call(episode)
            await host.answer_call(episode, 1, "y", usage=Usage(9, 4))
            assert await host.next_call(episode) == "max_turns"
            scores.append(await host.score(episode))
    ended, raised = scores
    assert json.loads(ended.reason or "") == [200, 200, 429, "insufficient_quota"]
    assert raised.reward == 0 and "written the 8 tokens of this run, and" in (raised.reason or "")
    session = AgentSession(max_calls=1, max_seconds=0.0)
    with pytest.raises(ApiError, match="seconds of this run are over") as caught:
        session.ask(cast(Any, None), [{"role": "user", "content": "x"}], [])
    assert caught.value.status == 429


async def test_an_agent_that_fails_or_never_asks_fails_its_rollout_alone(tmp_path: Path) -> None:
    programs = ("pass", "raise KeyError('early')", 'ask([user("x")]); 1 / 0', 'ask([user("x")])')
    async with agents(tmp_path / "agent", *programs) as host:
        for index, what in enumerate(["without asking the model", "early", "ZeroDivisionError"]):
            with pytest.raises(EnvironmentFault, match=what) as caught:
                await told(host, ["y"], index)
            assert caught.value.code == "environment_error"
        assert await told(host, ["y"], index=3) == []


async def test_each_key_reaches_its_own_conversation_until_it_ends(tmp_path: Path) -> None:
    program = """
        KEYS.append(api_key)
        first = ask([user(str(NUMBER))])[1]["choices"][0]["message"]
        told.append(first["content"])
        told.append([ask([user("x")], key=key)[0] for key in KEYS if key in CLOSED])
        CLOSED.append(api_key)
    """
    source = "KEYS, CLOSED = [], []"
    programs = [program.replace("NUMBER", str(number)) for number in range(8)]
    async with agents(tmp_path / "agent", *programs, source=source) as host:
        openings = await asyncio.gather(*(host.open("train", n) for n in range(8)))
        for number in reversed(range(8)):
            episode = openings[number].episode
            assert openings[number].messages[0]["content"] == str(number)
            assert (await host.step(episode, f"answer {number}")).done
            score = await host.score(episode)
            assert json.loads(score.reason or "") == [f"answer {number}", [401] * (7 - number)]


async def test_as_many_agents_run_at_once_as_there_are_threads_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    most = 40
    monkeypatch.setattr(host_module, "MOST_AGENTS", most)
    async with agents(tmp_path / "agent", *['ask([user("x")])'] * 2) as host:
        episodes = [(await host.open("train", 0)).episode for _ in range(most)]
        waiting = asyncio.create_task(host.open("train", 1))
        assert (await host.step(episodes[0], "y")).done and not waiting.done(), "its request waits for no place"
        await host.score(episodes[0])
        await waiting
        with pytest.raises(EnvironmentFault):
            await asyncio.gather(*(host.open("train", 5) for _ in range(2)), host.close(episodes[1]))
        await host.close(episodes[2])
        await host.open("train", 0)


async def test_an_agent_that_does_not_end_is_left_behind(tmp_path: Path) -> None:
    endless = 'ask([user("x")])\nwhile True: time.sleep(0.01)'
    async with agents(tmp_path / "agent", endless, 'ask([user("x")])', timeout_s=1) as host:
        with pytest.raises(EnvironmentFault) as caught:
            await told(host, ["y"])
        assert caught.value.code == "environment_timeout"
        first = host._children[-1]
        assert await told(host, ["y"], index=1) == [] and host._children[-1] is not first and not first.alive


async def test_a_slow_agent_declares_its_own_limit(tmp_path: Path) -> None:
    slow = 'time.sleep(0.5)\nask([user("x")])'
    async with agents(tmp_path / "agent", slow, timeout_s=0.1, needs="call_timeout_s = 30") as host:
        assert await told(host, ["y"]) == []


@pytest.mark.hostile("network")
async def test_an_agent_reaches_its_model_and_no_other_server(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as ours:
        own_address = "127.0.0.1"
        with suppress(OSError):  # a machine may not know its own name
            own_address = str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
        unix = tmp_path / "socket"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(unix))
            listening.listen()
            attack = f"""
                def connect(address):
                    # The module below socket: its calls reach the kernel unexplained.
                    made = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
                    made.settimeout(5)
                    made.connect(address)
                tried(lambda: connect(("127.0.0.1", {ours.getsockname()[1]})))
                tried(lambda: connect(({own_address!r}, {ours.getsockname()[1]})))
                tried(lambda: connect(("192.0.2.1", 80)))
                tried(lambda: _socket.socket(_socket.AF_UNIX))
                tried(lambda: _socket.socket(_socket.AF_INET6))
                tried(lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM))
                tried(lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_RAW, 1))
                tried(lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 262))
                tried(lambda: _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW))
                ask([user("x")])
            """
            async with agents(tmp_path / "agent", attack) as host:
                tries = await told(host, ["y"])
    assert tries[0] == "ConnectionRefusedError", "its own loopback interface has no such port"
    assert tries[1] in ("ConnectionRefusedError", "OSError", "NetworkRefusedError")
    assert tries[2] in ("OSError", "NetworkRefusedError") and tries[3:] == ["PermissionError"] * 6


@pytest.mark.hostile("network")
async def test_only_what_asks_for_an_endpoint_gets_sockets(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", 'ask([user("x")])') as host:
        assert host.sandbox["network"] == ""
    (tmp_path / "agent" / "environment.toml").write_text("")
    with pytest.raises(EnvironmentFault, match="does not say endpoint = true") as caught:
        await EnvironmentHost.start(tmp_path / "agent")
    assert caught.value.code == "environment_invalid"
    assert "write endpoint = true into environment.toml" in failure("loads", caught.value).fix


PLAY = """
import asyncio, json, sys
from pathlib import Path
from environments.process.host import EnvironmentFault, EnvironmentHost, Score
async def main():
    try:
        async with await EnvironmentHost.start(Path(sys.argv[1])) as host:
            episode = (await host.open("train", 0)).episode
            await host.step(episode, "y")
            print(json.dumps([host.sandbox["network"], (await host.score(episode)).reason]))
    except EnvironmentFault as fault:
        print(json.dumps([fault.code, fault.what]))
asyncio.run(main())
"""


def played_as(
    place: Path, rights: Sequence[str], python: str, program: str = 'told.append(ask([user("x")])[0])'
) -> Any:
    """What PLAY prints of an agent's environment in `place`, as a server with these rights."""
    returns = f"Sample([{textwrap.dedent(program)!r}])"
    folder = environment_folder(place / "folder", AGENT, returns=returns, needs="endpoint = true")
    environment = {"PYTHONPATH": str(place), "PATH": os.environ["PATH"], "HOME": f"{place}/home"}
    done = subprocess.run(
        [*rights, python, "-c", PLAY, folder],
        capture_output=True, text=True, cwd=place, env=environment, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@ONLY_ROOT
@pytest.mark.hostile("network")
@pytest.mark.parametrize("power", ["sys_admin", "net_admin"])
def test_where_no_namespace_can_be_had_an_agent_gets_one_port(tmp_path: Path, power: str) -> None:
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    rights = ["setpriv", "--bounding-set", f"-{power}", "--inh-caps", f"-{power}"]
    with socket.create_server(("127.0.0.1", 0)) as ours:
        attack = f"""
            def made():
                return _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            own = urlsplit(base_url).port
            tried(lambda: made().connect(("127.0.0.1", {ours.getsockname()[1]})))
            tried(lambda: made().connect(("192.0.2.1", 80)))
            tried(lambda: made().bind(("127.0.0.1", 0)))
            tried(lambda: made().bind(("0.0.0.0", 8000)))
            tried(lambda: made().bind(("127.0.0.1", own)))
            tried(lambda: _socket.socket(_socket.AF_UNIX))
            tried(lambda: _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM))
            tried(lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM))
            tried(lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 262))
            tried(lambda: _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW))
            told.append(ask([user("x")], key="sk-other")[0])
            told.append(ask([user("x")])[0])
        """
        first, second = played_as(tmp_path, rights, sys.executable, attack)
    if not knows_ports():
        assert first == "environment_invalid" and "a network namespace with loopback" in second
        return
    *tries, other, own = json.loads(second)
    assert (first, other, own) == ("", 401, 200)
    assert tries[4] == "OSError", "the port is in use"
    refusals = [*tries[:4], *tries[5:]]
    assert refusals.pop(1) == "NetworkRefusedError", "which is a PermissionError that explains"
    assert {*refusals} == {"PermissionError"}


@ONLY_ROOT
@EVERY_USERS_PYTHON
def test_an_agent_works_for_a_server_without_rights() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        shutil.copytree(ROOT / "environments", place / "environments")
        (place / "home").mkdir()
        os.chown(place / "home", 4242, 4242)
        network, told = played_as(place, WITHOUT_RIGHTS, "/usr/bin/python3")
    if "namespace" in told:
        pytest.skip(f"a user can have no network namespace here: {told}")
    assert (network, told) == ("", "[200]")
