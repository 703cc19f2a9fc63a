"""Agents outside the sandbox play the rollouts of a run: through the worker's gateway, and through
`flash-mcp serve --http`."""

import asyncio
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from rich.console import Console

from environments.process.host import EnvironmentHost
from flash_mcp.cli.demo import DemoSession, connected, watch
from flash_mcp.protocol.records import Json
from flash_mcp.state import tokens
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.launch.local import ProcessRecord
from tests.folders import environment_folder
from tests.places import ROOT, VOWELS
from tests.ports import free_port
from tests.server.test_mcp_server import serving
from tests.tiny import make_tokenizer
from tests.virtual import FakeEngine
from tests.waiting import WAIT_S
from worker.extensions import gateway as gateway_module
from worker.extensions.gateway import Gateway
from worker.rollouts.scheduler import Generator as Turns
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, TalkLimits, collect
from worker.rollouts.transcript import ChatTemplate

pytestmark = pytest.mark.slow

TEMPLATE = ChatTemplate(make_tokenizer())
AT_ONCE = 4


def share(text: str) -> float:
    return sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))


def solve(messages: list[Any], client: openai.OpenAI, model: str) -> str:
    """Two requests, of which one is streamed; the better answer goes back."""
    with client:
        create = client.chat.completions.create
        first = create(model=model, messages=messages).choices[0].message.content or ""
        said = {"role": "assistant", "content": first}
        stream = create(model="second", messages=[*messages, said, {"role": "user", "content": "again"}], stream=True)
        second = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    return max(first, second, key=share)


def client_of_the_docs() -> Any:
    """`play` of docs/agents.md; its connections end with it."""
    *_, source = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(source.replace("    http = httpx.Client(timeout=60)\n", ""), names)

    def play(*arguments: Any) -> None:
        with httpx.Client(timeout=60, trust_env=False) as http:
            names["http"] = http
            names["play"](*arguments)

    return play


def test_agents_of_a_user_play_a_training_run_over_http(tiny_model: Path, outside: Path, flash_home: Path) -> None:
    port = free_port()
    key = tokens.local_token(open_store().base)
    stranger = tokens.create(open_store(), "mallory", "write")[1]
    reader = tokens.create(open_store(), "mallory", "read")[1]
    refused = [("nothing", "tasks", 401), (stranger, "tasks", 404), (reader, "tasks", 403)]

    async def train(session: DemoSession) -> str:
        await session.call("env_push", folder=str(outside), name="vowels")
        shape: dict[str, Any] = {"steps": 2, "batch_size": 2, "group_size": 4, "max_tokens": 16, "lora_rank": 4}
        wanted = {"environment": "vowels", "model": str(tiny_model), **shape, "learning_rate": 1e-3}
        return (await session.call("train", **wanted))["run_id"]

    async def scenario() -> None:
        async with connected(Console(file=io.StringIO())) as session:
            run_id = await train(session)
            url = f"http://127.0.0.1:{port}/gateway/{run_id}"
            async with httpx.AsyncClient(trust_env=False) as http:
                for token, path, status in refused:
                    headers = {"authorization": f"Bearer {token}"}
                    answer = await http.post(f"{url}/{path}", headers=headers, json={})
                    assert answer.status_code == status, answer.text
            with ThreadPoolExecutor(AT_ONCE) as pool:
                playing = [pool.submit(client_of_the_docs(), url, key, solve) for _ in range(AT_ONCE)]
                await watch(session, run_id)
                for agent in playing:
                    await anyio.to_thread.run_sync(agent.result)
            shown = await session.call("rollouts", run_id=run_id, limit=3)
            assert shown["total"] == 8 and all(row["turns"] == 2 for row in shown["rollouts"])
            rows = open_store().rollouts(run_id, limit=20)
            assert len(rows) == 16 and all(row.error is None and row.reward == row.metrics["vowels"] for row in rows)

    with serving(port):
        anyio.run(scenario)


AGENT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
if os.environ.get("FLASH_TOKEN"):
    sys.exit("it has the token")
if task["task_id"] == os.environ.get("FAILS"):
    sys.exit("no tools today")
body = {"model": "planner", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))
text = answer["choices"][0]["message"]["content"]
if task["task_id"] == os.environ.get("SCORES"):
    with open(os.environ["FLASH_REWARD_FILE"], "w") as file:
        json.dump({"score": 0.125, "success": True}, file)
if task["task_id"] == os.environ.get("GARBLES"):
    with open(os.environ["FLASH_REWARD_FILE"], "w") as file:
        file.write('["no reward"]')
print(text)
"""
"""A program of a user's, which asks the model once."""


def command(run_id: str, agent: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "flash_mcp.cli", "gateway", run_id, "--json", *options]
    return [*words, "--", sys.executable, str(agent), "{prompt}"]


async def played(run_id: str, agent: Path, *options: str, **variables: str) -> tuple[int, Any, str]:
    """Exit code, result and stderr of `flash-mcp gateway` with the agent."""
    code, printed, errors = await refused(run_id, agent, *options, **variables)
    assert printed, errors
    return code, json.loads(printed), errors


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """The vowels as an environment whose agent is outside."""
    folder = tmp_path / "environment"
    shutil.copytree(VOWELS, folder)
    (folder / "environment.toml").write_text("gateway = true\ncall_timeout_s = 300\n")
    return folder


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return path


def test_the_command_plays_an_evaluation_with_a_program(tiny_model: Path, outside: Path, agent: Path, flash_home: Path):
    async def scenario() -> None:
        async with connected(Console(file=io.StringIO())) as session:
            await session.call("env_push", folder=str(outside), name="vowels")
            wanted: Json = {"environment": "vowels", "model": str(tiny_model), "split": "train", "max_tokens": 8}
            run_id = (await session.call("evaluate", **wanted, wait_s=0))["run_id"]
            code, result, errors = await played(run_id, agent, FAILS="t1", SCORES="t2", GARBLES="t3")
            assert (code, result) == (0, {"run_id": run_id, "state": "succeeded", "played": 10, "dropped": 2}), errors
            assert "t1 is dropped: the program's exit code was 1; it wrote: no tools today" in errors
            scores = (await session.call("status", run_id=run_id))["run"]["scores"]
            assert (scores["n"], scores["errors"], scores["error_codes"]) == (10, 2, {"environment_error": 2})
            rows = {row.index: row for row in open_store().rollouts(run_id, "eval", limit=20)}
            assert len(rows) == 12
            failed, scored, garbled = rows.pop(1), rows.pop(2), rows.pop(3)
            assert failed.error and "no tools today" in failed.error["what"]
            assert garbled.error and "send one of answer and error" in garbled.error["what"]
            assert (scored.reward, scored.success) == (0.125, True)
            assert all(row.reward == row.metrics["vowels"] for row in rows.values())
            assert {call["role"] for row in rows.values() for call in row.calls} == {"planner"}

    anyio.run(scenario)


@pytest.mark.long
def test_the_command_plays_a_run_of_two_ranks_over_http(tiny_model: Path, outside: Path, agent: Path, flash_home: Path):
    port = free_port()
    token = tokens.create(open_store(), "alice", "write")[1]
    key = tokens.local_token(open_store().base)

    async def scenario() -> None:
        async with connected(Console(file=io.StringIO())) as session:
            await session.call("env_push", folder=str(outside), name="vowels")
            shape: Json = {"steps": 2, "batch_size": 2, "group_size": 4, "max_tokens": 8, "lora_rank": 4, "gpus": 2}
            shape |= {"eval_before": True, "eval_after": True, "eval_examples": 4, "learning_rate": 1e-3}
            run_id = (await session.call("train", environment="vowels", model=str(tiny_model), **shape))["run_id"]
            url = f"http://127.0.0.1:{port}"
            code, _, errors = await refused(run_id, agent, "--url", url, FLASH_TOKEN=token)
            assert code == 1 and json.loads(errors)["error"]["code"] == "unknown_run"
            code, result, errors = await played(run_id, agent, "--url", f"{url}/mcp/", FLASH_TOKEN=key)
            assert (code, result["played"], result["dropped"]) == (0, 24, 0), errors
            view = (await session.call("status", run_id=run_id))["run"]
            assert [row["n"] for row in view["held_out"]] == [4, 4]
            rows = open_store().rollouts(run_id, limit=20)
            assert len(rows) == 16 and all(row.error is None for row in rows)
            assert {call["role"] for row in rows for call in row.calls} == {"planner"}

    with serving(port):
        anyio.run(scenario)


async def refused(run_id: str, agent: Path, *options: str, **variables: str) -> tuple[int, str, str]:
    env = {**os.environ, **variables}
    ended = await anyio.run_process(command(run_id, agent, *options), env=env, cwd=ROOT, check=False)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.long
def test_what_a_killed_worker_gave_out_is_given_out_again(tiny_model: Path, outside: Path, agent: Path, flash_home):
    port = free_port()
    key = tokens.local_token(open_store().base)

    async def scenario() -> None:
        async with connected(Console(file=io.StringIO())) as session:
            await session.call("env_push", folder=str(outside), name="vowels")
            shape: Json = {"steps": 1, "batch_size": 2, "group_size": 4, "max_tokens": 8, "lora_rank": 4}
            run_id = (await session.call("train", environment="vowels", model=str(tiny_model), **shape))["run_id"]
            async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
                headers = {"authorization": f"Bearer {key}"}
                task = None
                while task is None:
                    reply = await http.post(f"http://127.0.0.1:{port}/gateway/{run_id}/tasks", headers=headers)
                    task = reply.json()["task"]
                    await anyio.sleep(0.2)
                body = {"model": "policy", "messages": task["messages"], "max_tokens": 4}
                own = {"authorization": f"Bearer {task['api_key']}"}
                assert (await http.post(f"{task['base_url']}/chat/completions", headers=own, json=body)).is_success
                record = ProcessRecord.read(flash_home / "attempts" / f"{run_id}-1")
                assert record
                os.kill(record.pid, signal.SIGKILL)
                code, result, errors = await played(run_id, agent)
                old = await http.post(f"{task['base_url']}/chat/completions", headers=own, json=body)
            assert (code, result["played"], result["dropped"]) == (0, 8, 0), errors
            assert old.status_code == 401 and "has ended" in old.json()["error"]["message"]
            assert open_store().run(run_id).attempt == 2
            rows = open_store().rollouts(run_id, limit=20)
            assert len(rows) == 8 and all(row.error is None for row in rows)

    with serving(port):
        anyio.run(scenario)


@asynccontextmanager
async def gateway(folder: Path, timeout_s: float) -> AsyncGenerator[Gateway]:
    environment_folder(folder, "class Sample(Addition): pass")
    async with await EnvironmentHost.start(folder, timeout_s=timeout_s) as host:
        opened = Gateway(host)
        try:
            yield opened
        finally:
            await opened.endpoint.aclose()


async def rollouts(opened: Gateway) -> list[PlayedRollout]:
    engine = FakeEngine(step_s=0.0)
    turns = Turns(engine, run_step=engine.run_step)
    player: Any = opened
    try:
        return await collect(
            [RolloutTask("train", 0, 0, 0, seed=0)], player, turns, TEMPLATE, TalkLimits(max_tokens=12, max_length=400)
        )
    finally:
        await turns.aclose()


async def test_what_nobody_takes_or_brings_back_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "UNASKED_S", 0.7)
    async with gateway(tmp_path, timeout_s=0.5) as opened:
        (untaken,) = await rollouts(opened)
        assert untaken.error is not None and untaken.error["code"] == "environment_timeout"
        assert "nobody asked the gateway for a task for 0.7 s" in untaken.error["what"]
        playing = asyncio.ensure_future(rollouts(opened))
        assert (await opened.take()) is not None
        (lost,) = await playing
        assert lost.error is not None and "that took the task sent no result within 0.5 s" in lost.error["what"]


async def test_a_task_that_is_taken_late_and_not_brought_back_is_dropped_as_soon(tmp_path: Path) -> None:
    async with gateway(tmp_path, timeout_s=0.5) as opened:
        playing = asyncio.ensure_future(rollouts(opened))
        await asyncio.sleep(0.3)
        assert await opened.take() is not None
        (lost,) = await asyncio.wait_for(playing, WAIT_S)
        assert lost.error is not None and "that took the task sent no result within 0.5 s" in lost.error["what"]


async def test_an_agent_may_score_itself_and_sends_what_breaks_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, timeout_s=60) as opened:
        played: list[PlayedRollout] = []
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{opened.endpoint.port}", trust_env=False) as http:

            async def post(path: str, key: str, body: bytes) -> tuple[int, Any]:
                answer = await http.post(path, content=body, headers={"authorization": f"Bearer {key}"})
                return answer.status_code, answer.json()

            results = (b'{"score": 0.25, "success": true}', b'{"answer": "1"}', b'{"score": -1e308}')
            for result in (*results, b'{"score": 1%s}' % (b"0" * 400)):
                playing = asyncio.ensure_future(rollouts(opened))
                _, given = await post("/tasks", opened.key, b"")
                key = given["task"]["api_key"]
                # A lone surrogate has no form in UTF-8, so no tokenizer takes it.
                asked = b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'
                assert (await post("/v1/chat/completions", key, asked))[0] == 200
                assert (await post("/tasks", key, b"{}"))[0] == 404
                assert (await post("/v1/chat/completions", opened.key, asked))[0] == 429
                for bad in (b"{}", b'{"answer": 1}', b'{"score": NaN}', b'{"score": 1, "answer": ""}', b"["):
                    assert (await post("/v1/result", key, bad))[0] == 400
                assert await post("/v1/result", key, result) == (200, {"accepted": True})
                played += await playing
        own, scored, *large = played
        assert [item.error and item.error["code"] for item in large] == ["environment_error"] * 2
        assert (own.error, own.reward, own.success, own.turns) == (None, 0.25, True, 1)
        assert (scored.error, scored.reward, scored.success) == (None, 1.0, True)
