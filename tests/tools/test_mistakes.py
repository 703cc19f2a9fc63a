"""Every row of tests/mistakes.py is played through a client, on a store with runs in every state: the answer names
the value and the way on, the way on works as it is written, and nothing is lost or left."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mcp import Client

from flash_mcp.protocol.errors import CODES
from flash_mcp.protocol.paths import home
from flash_mcp.server.mcp_server import server
from flash_mcp.state import retention
from flash_mcp.state.store import open_store
from tests.calls import named_calls
from tests.frozen_calls import Names, failed_run, play_evaluation, sft_run
from tests.fuzz import state as everything
from tests.mistakes import BOTH, CALL, LOST, MISTAKES, ODD, Mistake, Request
from tests.places import ROOT
from tests.samples import ENVIRONMENT, finished_run, push_echo
from tests.teams import Team, team_server, text_of
from tests.tools.test_next import call, cancelled_in_queue, running, stopped

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_supervisor")]

KINDS = list(dict.fromkeys(row.kind for row in MISTAKES))


async def furnish(folder: Path) -> Names:
    """Runs that ended in every way, one that is running and one that waits; deployments; files."""
    (folder / "work/echo").mkdir(parents=True)
    (folder / "work/echo/environment.py").write_text(ENVIRONMENT)
    (folder / "work/bad.toml").write_text("environment = echo\n")
    (folder / "work/rows.csv").write_text("text,label\nhello,1\ngoodbye,2\n")
    names = Names(folder / "work")
    runs = {
        "IMPROVED": finished_run(folder / "improved"),
        "FAILED": failed_run(folder / "failed"),
        "CANCELLED": stopped(folder / "cancelled", "cancelled"),
        "SFT": sft_run(folder / "sft"),
        "REMOVED": finished_run(folder / "removed"),
        "UNSTARTED": cancelled_in_queue(folder / "unstarted"),
        "RUNNING": running(folder / "running"),
    }
    store = open_store()
    assert retention.drop_files(store, runs["REMOVED"].id, "they were old")
    for environment, name in (("echo", "EVALUATION"), ("other", "ELSEWHERE")):
        push_echo(folder / environment, name=environment, code=f"{ENVIRONMENT}# {environment}\n")
        started = await call("evaluate", environment=environment, model="smollm2-135m-instruct")
        play_evaluation(started["run_id"], 20)
        names.give(name, started["run_id"])
    (folder / "refused").mkdir()
    (folder / "refused/environment.py").write_text(f"{ENVIRONMENT}# refused\n")
    pushed = await call("env_push", name="refused", folder=str(folder / "refused"))
    store.put_gate(pushed["environment"].partition("@")[2], None, ["junk"])
    await call("curate", name="answers", runs=[runs["IMPROVED"].id], filter="best >= 0.5")
    for name in ("stopped", "starting"):
        served = await call("deploy", run_id=runs["IMPROVED"].id, step=20, name=name)
        if name == "stopped":
            store.update_deployment(served["deployment"], state="stopped")
    names.give("QUEUED", (await call("train", environment="echo", steps=5, idempotency_key="used"))["run_id"])
    for name, run in runs.items():
        names.give(name, run.id)
    return names


async def answer(client: Client, tool: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """(code, text) of a call; the code is empty where it was understood."""
    result = await client.call_tool(tool, arguments)
    text = result.content[0].text
    if not result.is_error:
        return "", text
    code = text[1:].partition("]")[0].partition(" ")[0]
    assert code in CODES, text
    return code, text


async def played(client: Client, row: Mistake, names: Names, work: Path) -> str:
    """What is wrong with the answer to a mistake; empty if nothing is."""
    before = everything(home(), work)
    code, text = await answer(client, row.tool, names.as_called(row.arguments))
    missing = [name for name in names.as_called(list(row.names)) if name not in text]
    if code != row.code or missing or "=None" in text.partition("]")[0]:
        return f"{row}: lacks {missing}, code {code or 'none'}: {text}"
    if changed := everything(home(), work) ^ before:
        return f"{row}: it changed {sorted(changed)[:3]}"
    way_on = text.partition(" Fix: ")[2] if code else json.loads(text)["next"]
    if not way_on:
        return f"{row}: no way on: {text}"
    with restored():
        return await refused_way_on(client, row, way_on)


async def refused_way_on(client: Client, row: Mistake, way_on: str) -> str:
    for tool, arguments in named_calls(way_on):
        if ... in arguments.values():  # the caller fills it in
            continue
        followed, told = await answer(client, tool, {**arguments, **WAITS.get(tool, {})})
        if followed:
            return f"{row}: its way on, {tool}({arguments}), is refused: {told}"
    return ""


@contextmanager
def restored() -> Iterator[None]:
    """Undo what the block changes in runs and deployments."""
    store = open_store()
    tables = {
        table: store.column(f"SELECT name FROM pragma_table_info('{table}')") for table in ("runs", "deployments")
    }
    for table in tables:
        store.execute(f"CREATE TEMP TABLE kept_{table} AS SELECT * FROM main.{table}")
    yield
    with store.transaction():
        for table, columns in tables.items():
            names = ", ".join(columns)
            store.execute(f"DELETE FROM main.{table}")
            store.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM kept_{table}")
            store.execute(f"DROP TABLE kept_{table}")


WAITS: dict[str, dict[str, float]] = {"status": {"wait_s": 0.05}, "evaluate": {"wait_s": 0}, "deploy": {"wait_s": 0}}


@pytest.mark.parametrize("kind", KINDS)
async def test_no_mistake_of_an_agent_ends_in_a_dead_end(kind: str, tmp_path: Path) -> None:
    names = await furnish(tmp_path)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    async with Client(server) as client:
        faults = [await played(client, row, names, tmp_path / "work") for row in MISTAKES if row.kind == kind]
    assert not any(faults), "\n\n".join(filter(None, faults))
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in children]
    assert not [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def team(flash_home: Path) -> Iterator[Team]:
    with team_server() as started:
        yield started


def leave(http: httpx.Client, tool: str, arguments: dict[str, Any]) -> None:
    """Call a tool and go before it answers."""
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    greeting = http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
    session = {"mcp-session-id": greeting.headers["mcp-session-id"]}
    http.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
    body = {**CALL, "params": {"name": tool, "arguments": arguments}}
    with suppress(httpx.ReadTimeout):
        http.post("/mcp", json=body, headers=session, timeout=0.02)


async def test_a_call_whose_client_left_is_made_once_more_and_once_alone(team: Team, tmp_path: Path) -> None:
    names = await furnish(tmp_path)
    store = open_store()
    for table in ("runs", "environments", "deployments"):
        store.execute(f"UPDATE {table} SET owner = 'alice'")
    token = team.token("alice")
    async with team.client(token) as client:
        for lost in LOST:
            before = store.query(f"SELECT count(*) AS n FROM {lost.table}")[0]["n"]
            arguments = names.as_called(lost.arguments)
            with team.http(token, accept=BOTH) as http:
                leave(http, lost.tool, arguments)
            code, text = await answer(client, lost.tool, {**arguments, **WAITS.get(lost.tool, {})})
            assert not code, text
            after = store.query(f"SELECT count(*) AS n FROM {lost.table}")[0]["n"]
            assert after - before == lost.made, (lost, text)


@pytest.mark.parametrize("request_", ODD, ids=lambda row: row.about)
def test_an_odd_client_is_told_what_is_wrong(team: Team, request_: Request) -> None:
    headers = {"accept": BOTH, "content-type": "application/json", **(request_.headers or {})}
    content = request_.body if isinstance(request_.body, bytes) else json.dumps(request_.body).encode()
    with team.http(team.token("alice"), **{"accept": BOTH}) as http:
        response = http.request(request_.method, request_.path, headers=headers, content=content)
    assert response.status_code == request_.status, response.text
    assert all(name in response.text for name in request_.names), response.text
    assert open_store().runs() == []


def test_the_documents_name_how_many_mistakes_are_played() -> None:
    count = len(MISTAKES) + len(LOST) + len(ODD)
    assert f"{count} mistakes" in (ROOT / "bench" / "faults.md").read_text()


@pytest.mark.parametrize("given", ["relative/home", "${workspaceFolder}/.flash-mcp", "~/${user}"])
async def test_a_state_directory_that_no_client_filled_in_is_refused_and_not_made(given: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASH_HOME", given)
    async with Client(server) as client:
        said = text_of(await client.call_tool("status", {}))
    assert said.startswith(f"[invalid_argument FLASH_HOME={given}]")
    assert os.listdir() == ["flash-home"]  # noqa: PTH208
