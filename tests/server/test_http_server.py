"""The server for teams: tokens, owners kept apart, limits, health, shutdown; over real HTTP, in both protocol eras."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from mcp import Client

from flash_mcp.cli import main
from flash_mcp.cli.serving import where_token_is
from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.paths import environments_dir, exports_dir
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.surroundings import NO_HUB_LOGIN, environment_for
from flash_mcp.state import queue, tokens
from flash_mcp.state.owners import Caller, Quotas, acting_as
from flash_mcp.state.serving import request
from flash_mcp.state.store import open_store
from flash_mcp.state.versions import inline_files
from flash_mcp.supervisor import process, secrets
from flash_mcp.supervisor.process import is_supervised
from flash_mcp.tools.environments import publish
from flash_mcp.tools.registry import TOOLS
from tests.places import ROOT
from tests.ports import free_port
from tests.samples import ENVIRONMENT, finished_run, queued_run, supervised
from tests.server.test_mcp_server import body_of, serving
from tests.teams import Team, code_of, team_server, text_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow

MARK = "only-alice-knows"
TABLES = ("runs", "environments", "deployments", "checkpoints", "rollouts", "metrics", "evals", "events")


@pytest.fixture(params=["auto", "legacy"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def give(owner: str, name: str) -> None:
    """Make all that belongs to nobody else yet the owner's, the environment under another name."""
    store = open_store()
    store.execute("UPDATE environments SET owner = ?, name = ? WHERE owner = 'local'", [owner, name])
    store.execute("UPDATE runs SET owner = ?, environment = ? WHERE owner = 'local'", [owner, name])
    store.execute("UPDATE deployments SET owner = ? WHERE owner = 'local'", [owner])


def furnish(owner: str, folder: Path) -> dict[str, str]:
    """A finished run, an environment, and a deployment of the owner; how each can be referred to."""
    run = finished_run(folder)
    name, deployment = f"{owner}-env", f"dep-{owner:0>8}"
    values = {"id": deployment, "owner": "local", "name": f"{owner}-chat", "model": run.model, "run_id": run.id}
    open_store().add_deployment({**values, "step": 20, "state": "starting"})
    give(owner, name)
    return {
        "run_id": run.id,
        "environment": name,
        "version": f"{name}@0123456789abcdef",
        "deployment": deployment,
        "name": f"{owner}-chat",
    }


@pytest.fixture
def things(team: Team, tmp_path: Path) -> dict[str, dict[str, str]]:
    """What alice has, and what bob has."""
    alices = furnish("alice", tmp_path / "alice")
    mark = f"UPDATE rollouts SET body = replace(body, 'The answer', '{MARK}') WHERE run_id = ?"
    open_store().execute(mark, [alices["run_id"]])
    for path in Path(open_store().run(alices["run_id"]).folder, "rollouts").iterdir():
        path.write_text(path.read_text().replace("The answer", MARK))
    return {"alice": alices, "bob": furnish("bob", tmp_path / "bob")}


def missing(reference: str) -> str:
    """A reference of the same shape that nothing has; as near as can be, so that a careless hint would tell."""
    head, at, tail = reference.partition("@")
    return f"{head[:-1]}{'x' if head[-1] != 'x' else 'y'}{at}{tail}"


def plainly(text: str, reference: str) -> str:
    """An answer without what differs from call to call."""
    text = text.replace(reference, "IT").replace(reference.partition("@")[0], "IT")
    text = re.sub(r"; did you mean [^?]*\?", ".", re.sub("; '[^']*' would do", "", text))
    return re.sub(r"\d+(\.\d+)?", "0", re.sub(r"(dep|run)-[0-9a-z]{8}", "ID", text))


def everything() -> dict[str, list[dict[str, Any]]]:
    return {table: open_store().query(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4") for table in TABLES}


async def calls_with(client: Client, own: dict[str, str], value: str) -> list[tuple[str, dict[str, Any]]]:
    """Every tool, with `value` in each of its text arguments in turn, and the rest as harmless as can be."""
    own = {**own, "message": "hello", "name": "a-name"}
    calls: list[tuple[str, dict[str, Any]]] = []
    for tool in (await client.list_tools()).tools:
        fields = tool.input_schema["properties"]
        base: dict[str, Any] = {name: own.get(name, "none") for name in tool.input_schema.get("required", [])}
        base |= {"wait_s": 0} if "wait_s" in fields else {}
        base |= {"environment": own["environment"], "validate_only": True} if "validate_only" in fields else {}
        for name, field in fields.items():
            if field.get("type") == "string" and "enum" not in field:
                calls.append((tool.name, {**base, name: value}))
            elif field.get("type") == "array" and field["items"].get("type") == "string":
                calls.append((tool.name, {**base, name: [value]}))
    return calls


# -- owners ----------------------------------------------------------------------------------------


@pytest.mark.hostile("other owners")
async def test_what_is_anothers_reads_exactly_like_what_does_not_exist_in_every_argument_of_every_tool(
    team: Team, things: dict[str, dict[str, str]], mode: str
):
    kinds = ("run_id", "version", "deployment", "name") if mode == "auto" else ("run_id",)
    alices = {kind: things["alice"][kind] for kind in kinds}
    before = everything()
    tried = 0
    async with team.client(team.token("bob"), mode) as bob:
        for reference in alices.values():
            other = missing(reference)
            hers, nobodys = [await calls_with(bob, things["bob"], value) for value in (reference, other)]
            for (tool, given), (_, given_instead) in zip(hers, nobodys, strict=True):
                found = text_of(await bob.call_tool(tool, given))
                absent = text_of(await bob.call_tool(tool, given_instead))
                assert plainly(found, reference) == plainly(absent, other), (tool, given)
                for name in things["alice"].values():
                    assert name not in found.replace(reference, "").replace(reference.partition("@")[0], ""), tool
                    assert name not in absent, tool
                assert MARK not in found
                tried += 1
    assert tried > 20 * len(alices)
    after = everything()
    for table in TABLES:
        theirs = "owner" if table in TABLES[:3] else "run_id"
        is_alices = ("alice", things["alice"]["run_id"])
        hers_before, hers_after = ([row for row in rows[table] if row[theirs] in is_alices] for rows in (before, after))
        assert hers_before == hers_after
        assert hers_before or table == "events"


@pytest.mark.hostile("other owners")
async def test_resources_of_another_read_exactly_like_what_does_not_exist(
    team: Team, things: dict[str, dict[str, str]], mode: str
):
    run_id = things["alice"]["run_id"]

    async def read(client: Client, template: str, run_id: str) -> str:
        uri = re.sub(r"\{(\w+)\}", lambda match: run_id if match[1] == "run_id" else "3", template)
        try:
            return str((await client.read_resource(uri)).contents)
        except Exception as error:
            return str(error)

    async with team.client(team.token("bob"), mode) as bob, team.client(team.token("alice"), mode) as alice:
        templates = [entry.uri_template for entry in (await bob.list_resource_templates()).resource_templates]
        templates = [template for template in templates if "{run_id}" in template]
        assert len(templates) >= 4
        for template in templates:
            assert "unknown_run" in (theirs := await read(bob, template, run_id))
            assert plainly(theirs, run_id) == plainly(await read(bob, template, missing(run_id)), missing(run_id))
            assert "unknown_run" not in await read(alice, template, run_id)
        assert MARK in await read(alice, "flash://runs/{run_id}/rollouts/{step}", run_id)


async def test_lists_hold_what_is_ones_own_and_the_local_owner_sees_all(
    team: Team, things: dict[str, dict[str, str]], mode: str
):
    async def seen_by(client: Client) -> str:
        return text_of(await client.call_tool("status", {})) + text_of(await client.call_tool("catalog", {}))

    endpoint = "http://127.0.0.1:4711/v1"
    open_store().update_deployment(things["alice"]["deployment"], state="ready", base_url=endpoint)
    async with team.client(team.token("alice"), mode) as alice, team.client(team.token("carol"), mode) as carol:
        hers, nothing = await seen_by(alice), await seen_by(carol)
        body = body_of(await alice.call_tool("status", {}))
        assert (len(body["runs"]), body["counts"]) == (1, {"succeeded": 1})
        assert (
            body_of(await alice.call_tool("status", {"run_id": things["alice"]["run_id"]}))["run"]["checkpoint"] == 20
        )
        assert MARK in text_of(await alice.call_tool("rollouts", {"run_id": things["alice"]["run_id"], "limit": 1}))
    async with Client(team_less_server(), mode=mode) as local:
        everyones = await seen_by(local)
    for owner in ("alice", "bob"):
        for kind in ("run_id", "environment", "deployment"):
            name = things[owner][kind]
            assert (name in hers, name in nothing, name in everyones) == (owner == "alice", False, True), name
    assert '"owner":"alice"' in everyones
    assert '"owner"' not in hers
    assert endpoint in everyones and endpoint not in hers, "she cannot reach it"


def team_less_server() -> Any:
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    return server


async def test_two_owners_may_use_the_same_names_keys_and_files(team: Team, mode: str):
    runs: dict[str, dict[str, Any]] = {}
    for owner in ("alice", "bob"):
        async with team.client(team.token(owner), mode) as client:
            pushed = body_of(
                await client.call_tool("env_push", {"name": "echo", "files": {"environment.py": ENVIRONMENT}})
            )
            assert pushed["created"], "a push of equal files must not tell that another made it"
            train = {"environment": "echo", "steps": 3, "idempotency_key": "k"}
            runs[owner] = body_of(await client.call_tool("train", train))
            assert runs[owner]["created"]
            again = body_of(await client.call_tool("train", train))
            assert (again["run_id"], again["created"]) == (runs[owner]["run_id"], False)
    rows = {row.id: row for row in open_store().runs()}
    for owner, body in runs.items():
        assert rows[body["run_id"]].owner == owner and f"@{owner}" in rows[body["run_id"]].environment_path


async def test_the_local_owner_deploys_for_the_owner_of_the_run(things: dict[str, dict[str, str]]):
    row = request(open_store(), things["alice"]["run_id"], step=10)
    assert row.owner == "alice"
    with acting_as(Caller("alice")):
        assert request(open_store(), things["alice"]["run_id"], step=10).id == row.id


@pytest.mark.hostile("other owners")
def test_a_caller_who_is_not_local_can_neither_read_nor_write_past_their_rows(things: dict[str, dict[str, str]]):
    store, alices = open_store(), things["alice"]
    tables = [row["name"] for row in store.query("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert "tokens" in tables
    with acting_as(Caller("carol")):
        for table in tables:
            assert store.query(f"SELECT * FROM [{table}]") == []
        assert not store.update_deployment(alices["deployment"], state="stopped")
        with pytest.raises(Exception, match="view"):
            store.execute("UPDATE runs SET state = 'failed'")
    with acting_as(Caller("alice")):
        assert store.update_deployment(alices["deployment"], state="stopped")
        assert {row["owner"] for row in store.query("SELECT owner FROM runs")} == {"alice"}


# -- the server's own files ------------------------------------------------------------------------


@pytest.mark.hostile("other owners")
async def test_paths_of_the_server_read_like_paths_that_do_not_exist_in_every_argument_of_every_tool(
    team: Team, things: dict[str, dict[str, str]], mode: str, tmp_path: Path
):
    there, absent = tmp_path / "there", tmp_path / "gone"
    there.mkdir()
    files = ("config.json", "tokenizer_config.json", "adapter_config.json", "adapter_model.safetensors", "a.toml")
    for name in files:
        (there / name).write_text(json.dumps({"mark": MARK}))
    (there / "environment.py").write_text(ENVIRONMENT + f"# {MARK}")
    async with team.client(team.token("bob"), mode) as bob:
        real, unreal = [await calls_with(bob, things["bob"], str(path)) for path in (there, absent)]
        refused = 0
        for (tool, given), (_, given_instead) in zip(real, unreal, strict=True):
            found = text_of(await bob.call_tool(tool, given))
            assert plainly(found, str(there)) == plainly(
                text_of(await bob.call_tool(tool, given_instead)), str(absent)
            ), (tool, given)
            assert MARK not in found
            refused += code_of(found) == "local_only"
        assert refused >= 5
        text = text_of(await bob.call_tool("train", {"environment": "bob-env", "config": str(there / "a.toml")}))
        assert code_of(text) == "local_only" and "give the fields of the file as arguments" in text


@pytest.mark.parametrize("template", ["calculator", "sort_words"])
async def test_a_caller_from_elsewhere_gets_the_starters_files_and_publishes_them(team: Team, template: str):
    async with team.client(team.token("alice")) as alice:
        empty = body_of(await alice.call_tool("catalog", {"kind": "environments"}))
        assert "env_setup()" in empty["next"] and "folder" not in empty["next"]
        refused = text_of(await alice.call_tool("env_setup", {"folder": "mine"}))
        assert code_of(refused) == "local_only" and "leave folder out" in refused
        made = body_of(await alice.call_tool("env_setup", {"template": template}))
        assert "folder" not in made and "cut" not in made
        pushed = await alice.call_tool("env_push", {"name": "mine", "files": made["contents"]})
        assert body_of(pushed)["train_tasks"] >= 1 and body_of(pushed)["eval_tasks"] >= 1


async def test_each_refusal_of_something_local_names_the_way_of_that_argument(team: Team):
    ways = {
        ("env_test", "folder"): "env_test(environment=NAME)",
        ("env_push", "folder"): "files={path: text}",
        ("train", "config"): "arguments of train",
        ("train", "model"): "catalog(kind='models')",
    }
    async with team.client(team.token("alice")) as alice:
        for (tool, argument), way in ways.items():
            needed = {"env_push": {"name": "mine"}, "train": {"environment": "echo"}}
            given = {**needed.get(tool, {}), argument: "/tmp"}
            refused = text_of(await alice.call_tool(tool, given))
            assert code_of(refused) == "local_only" and way in refused, (tool, refused)


@pytest.mark.hostile("other owners")
async def test_environment_code_sees_only_the_secrets_that_the_token_was_given(team: Team, monkeypatch):
    monkeypatch.setenv("GRANTED", "1")
    monkeypatch.setenv("OTHERS", "2")
    push = {"name": "echo", "files": {"environment.py": ENVIRONMENT}}
    async with team.client(team.token("alice", secret_names=["GRANTED"])) as alice:
        assert body_of(await alice.call_tool("env_push", {**push, "secrets": ["GRANTED"]}))["created"]
        refused = text_of(await alice.call_tool("env_push", {**push, "secrets": ["OTHERS"]}))
        unknown = text_of(await alice.call_tool("env_push", {**push, "secrets": ["OTHER5"]}))
        assert refused.replace("OTHERS", "") == unknown.replace("OTHER5", "")
        assert code_of(refused) == "invalid_argument"


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.hostile("other owners")
async def test_a_read_only_token_can_call_what_changes_nothing_and_that_alone(
    team: Team, things: dict[str, dict[str, str]], mode: str
):
    before = everything()
    async with team.client(team.token("bob", "read"), mode) as bob:
        for tool in TOOLS.values():
            given = {"wait_s": 0} if "wait_s" in tool.signature.parameters else {}
            required = [n for n, p in tool.signature.parameters.items() if p.default is p.empty]
            given |= {name: things["bob"].get(name, "none") for name in required}
            text = text_of(await bob.call_tool(tool.name, given))
            assert (code_of(text) == "not_permitted") == (not tool.is_reading(given)), text
            for name in tool.changes_with:
                text = text_of(await bob.call_tool(tool.name, given | {name: "merged"}))
                assert code_of(text) == "not_permitted"
    assert everything() == before
    with team.http(team.token("bob", "read")) as http:
        answer = http.put("/environments/e", content=b"")
    assert (answer.status_code, code_of(answer.json()["error"]["message"])) == (403, "not_permitted")


@pytest.mark.hostile("other owners")
async def test_a_read_only_token_starts_no_process_and_hands_no_secret_over(
    flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    """Not even where a run and a deployment wait for a supervisor, and this server could help."""
    monkeypatch.setenv("PLANTED_KEY", "value")
    things = furnish("bob", tmp_path / "bob")
    things["run_id"] = queued_run(tmp_path / "active", secrets=["PLANTED_KEY"]).id
    give("bob", "bob-active")
    asked: list[str] = []

    def answer_nobody(base: Path, request: dict[str, Any]) -> None:
        asked.extend(request)

    monkeypatch.setattr(process, "_start_detached", lambda *_: pytest.fail("a supervisor was started"))
    monkeypatch.setattr(secrets, "_ask", answer_nobody)
    with team_server() as team:
        async with team.client(team.token("bob", "read", secret_names=["PLANTED_KEY"]), mode) as bob:
            for tool in TOOLS.values():
                parameters = tool.signature.parameters
                given = {name: value for name, value in things.items() if name in parameters}
                required = [name for name, p in parameters.items() if p.default is p.empty]
                given = {**dict.fromkeys(required, "none"), **given, "message": "hello"}
                await bob.call_tool(tool.name, {n: given[n] for n in given if n in parameters})
            blocked = text_of(await bob.call_tool("status", {"run_id": things["run_id"]}))
            assert not is_supervised(flash_home) and not (flash_home / "supervisor.log").exists()
            with supervised():
                waits = text_of(await bob.call_tool("status", {"run_id": things["run_id"]}))
    assert "[not_ready] no supervisor runs" in blocked
    assert "[secret_missing" in waits
    assert "names" in asked and "values" not in asked


@pytest.mark.hostile("other owners")
async def test_a_read_only_token_queues_no_evaluation(team: Team):
    with acting_as(Caller("bob")):
        await publish("sums", inline_files({"environment.py": ENVIRONMENT}))
    async with team.client(team.token("bob", "read")) as bob:
        text = text_of(await bob.call_tool("env_test", {"environment": "sums", "model": "smollm2-135m-instruct"}))
    assert code_of(text) == "not_permitted" and open_store().runs() == []


def test_a_gateway_names_what_is_wrong_in_a_damaged_environment_toml(team: Team, tmp_path: Path):
    with acting_as(Caller("alice")):
        run = queued_run(tmp_path)
    (tmp_path / "environment.toml").write_text("gateway = 3")
    with team.http(team.token("alice")) as http:
        answer = http.post(f"/gateway/{run.id}/tasks")
        assert http.post("/gateway/run-none/tasks").status_code == 404
    error = answer.json()["error"]
    assert (answer.status_code, error["data"]["code"]) == (400, "environment_invalid")
    assert "environment.toml: gateway must be true or false, got 3" in error["message"]


@pytest.mark.hostile("requests")
@pytest.mark.parametrize("path", ["/mcp", "/metrics", "/environments/e", "/nowhere"])
def test_nothing_but_health_answers_without_a_valid_token(team: Team, path: str):
    store = open_store()
    expired, text = tokens.create(store, "alice", expires_days=1)
    store.execute("UPDATE tokens SET expires = ? WHERE id = ?", [time.time() - 1, expired["id"]])
    revoked = team.token("bob")
    tokens.revoke(store, "bob")
    for header in ("", f"Bearer {text}", f"Bearer {revoked}", "Bearer", "Basic Ym9iOg==", "Bearer flash_" + "x" * 43):
        with team.http(authorization=header) as http:
            answer = http.request("PUT" if "env" in path else "GET", path)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
        assert code_of(answer.json()["error"]["message"]) == "unauthenticated"
    with team.http() as http:
        health = http.get("/healthz", headers={"host": "whatever"})
        assert (health.status_code, health.text) == (200, "ok\n")


@pytest.mark.hostile("requests")
async def test_a_revoked_token_ends_a_session_at_its_next_request(team: Team, mode: str):
    async with team.client(team.token("alice"), mode) as alice:
        assert "no runs yet" in text_of(await alice.call_tool("status", {}))
        tokens.revoke(open_store(), "alice")
        with pytest.raises(Exception, match="unauthenticated"):
            await alice.call_tool("status", {})


@pytest.mark.hostile("requests")
def test_a_session_is_of_no_use_to_another_token(team: Team):
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    ask = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    accept = {"accept": "application/json, text/event-stream"}
    with team.http(team.token("alice"), **accept) as alice, team.http(team.token("bob"), **accept) as bob:
        session = {"mcp-session-id": alice.post("/mcp", json=ask).headers["mcp-session-id"]}
        assert bob.post("/mcp", json=listing, headers=session).status_code == 404
        alice.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
        assert alice.post("/mcp", json=listing, headers=session).status_code == 200


def test_tokens_are_made_listed_and_revoked_by_commands_and_kept_nowhere(capsys, flash_home: Path):
    assert main.main(["token", "create", "alice", "--read-only", "--expires-days", "2", "--secret", "HF_TOKEN"]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith(tokens.PREFIX)
    found = tokens.find(open_store(), tokens.digest_of(text))
    assert found is not None
    assert (found["owner"], found["access"], found["secrets"]) == ("alice", "read", ["HF_TOKEN"])
    assert found["expires"] == pytest.approx(time.time() + 2 * 86_400, abs=60)
    open_store().close()
    for path in flash_home.rglob("*"):
        assert path.is_dir() or text.encode() not in path.read_bytes()
    assert main.main(["token", "list"]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed and text not in listed
    assert main.main(["token", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == found["id"]
    assert main.main(["token", "revoke", found["id"]]) == 0
    assert tokens.find(open_store(), tokens.digest_of(text)) is None
    assert main.main(["token", "revoke", "alice"]) == 2 and main.main(["token", "create", "local"]) == 2


# -- protection and limits -------------------------------------------------------------------------


@pytest.mark.hostile("requests")
@pytest.mark.parametrize("path", ["/mcp", "/metrics", "/environments/e"])
def test_requests_for_other_hosts_and_from_other_origins_are_refused(team: Team, path: str):
    for headers in ({"host": "evil.example"}, {"host": ""}, {"origin": "http://evil.example"}):
        with team.http(team.token("alice"), **headers) as http:
            answer = http.put(path) if "env" in path else http.get(path)
        kind = "origin" if "origin" in headers else "host"
        assert answer.status_code == {"origin": 403, "host": 421}[kind]
        assert code_of(answer.json()["error"]["message"]) == f"{kind}_refused"


APP = "tauri://localhost"


@pytest.mark.hostile("requests")
def test_an_admitted_origin_may_call_mcp_alone(flash_home: Path):
    with team_server(origins=[APP, "null"]) as team, team.http(team.token("alice")) as http:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        before = http.options("/mcp", headers={"origin": APP, **asked})
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, APP)
        assert http.options("/mcp", headers={"origin": "null.example", **asked}).status_code == 400
        for origin, path, expected in [
            (APP, "/mcp", {400, 406}),
            ("null", "/mcp", {400, 406}),
            (APP, "/ui", {403}),
            ("vscode-file://vscode-app", "/mcp", {403}),
        ]:
            answer = http.get(path, headers={"origin": origin})
            assert answer.status_code in expected, (origin, path)
        assert "--allow-origin vscode-file://vscode-app" in answer.text


@pytest.mark.hostile("requests")
async def test_too_many_requests_are_refused_with_the_time_to_wait(flash_home: Path, mode: str):
    with team_server(Quotas(requests_per_minute=12)) as team:
        async with team.client(team.token("alice"), mode) as alice:
            with pytest.raises(Exception, match=r"\[rate_limited retry_after_s=[1-5]\].*try again in"):
                for _ in range(20):
                    await alice.call_tool("status", {})
        with team.http(team.token("bob")) as bob:
            answers = [bob.get("/metrics") for _ in range(30)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and not any(answer in refused for answer in answers[:12])
        assert all(1 <= int(answer.headers["retry-after"]) <= 5 for answer in refused)


@pytest.mark.hostile("requests")
def test_a_body_that_is_too_large_and_what_clients_look_for_before_a_login_are_refused(team: Team):
    with team.http(tokens.local_token(open_store().base)) as http:  # of the machine's own user
        assert http.post("/mcp", json={}).status_code == 401
    with team.http() as http:
        for name in ("oauth-protected-resource", "oauth-authorization-server/mcp", "openid-configuration"):
            assert http.get(f"/.well-known/{name}").status_code == 404
            assert http.post(f"/.well-known/{name}").status_code == 404
    with team.http(team.token("alice")) as http:
        answer = http.post("/mcp", content=b"x" * (4 * 2**20 + 1))
    assert answer.status_code == 413 and "PUT /environments/NAME" in answer.json()["error"]["message"]


async def test_queued_runs_and_stored_bytes_have_a_limit_for_each_owner(flash_home: Path):
    with supervised(), team_server(Quotas(queued_runs=1, environment_bytes=2 * len(ENVIRONMENT))) as team:
        for owner in ("alice", "bob"):
            async with team.client(team.token(owner)) as client:
                for number in (0, 1, 1):
                    files = {"environment.py": ENVIRONMENT, "number": str(number)}
                    text = text_of(await client.call_tool("env_push", {"name": "e", "files": files, "load": False}))
                    assert (code_of(text) == "quota_exceeded") == (number == 1), text
                first = body_of(await client.call_tool("train", {"environment": "e", "steps": 3}))
                text = text_of(await client.call_tool("train", {"environment": "e", "steps": 4}))
                assert code_of(text) == "quota_exceeded"
                assert f"status(run_id={first['run_id']!r}, wait_s=40)" in text
            assert len(list((environments_dir() / f"@{owner}" / "e").glob("*"))) == 1
    assert len(open_store().runs()) == 2


@pytest.mark.parametrize("target", [None, "lab"])
def test_deployments_have_a_limit_for_each_owner_here_and_on_targets(tmp_path, flash_home: Path, target: str | None):
    store = open_store()
    (flash_home / "targets.toml").write_text(f'[lab]\nengine = "slurm"\nstorage = "{tmp_path}"\n')
    for owner, number in (("alice", 2), ("bob", 2), ("local", 3)):
        (tmp_path / owner).mkdir()
        with acting_as(Caller(owner, limits=Quotas(deployments=2), secrets=None)):
            run = finished_run(tmp_path / owner)
            made = [request(store, run.id, name=f"{owner}-{n}", target=target) for n in range(number)]
            assert request(store, run.id, name=f"{owner}-0", target=target).id == made[0].id
            if owner != "local":
                with pytest.raises(FlashError, match=rf"^\[quota_exceeded.*undeploy.'{made[0].id}'"):
                    request(store, run.id, name="another", target=target)


def test_the_local_owner_has_no_quota(tmp_path: Path):
    for _ in range(Quotas().queued_runs + 1):
        queued_run(tmp_path / "environment")
    assert open_store().run_counts() == {"queued": Quotas().queued_runs + 1}


def test_metrics_count_ones_own_and_with_a_metrics_token_everything(team: Team, things: dict[str, dict[str, str]]):
    def counts(token: str) -> str:
        with team.http(token) as http:
            return http.get("/metrics").text

    assert 'flash_runs{state="succeeded"} 1' in counts(team.token("alice"))
    assert 'flash_runs{state="succeeded"}' not in counts(team.token("carol"))
    everything = counts(team.token("prometheus", "metrics"))
    assert 'flash_runs{state="succeeded"} 2' in everything
    assert not re.search("alice|bob|run-|dep-|/", everything.replace("version=", ""))
    with team.http(team.token("prometheus", "metrics")) as http:
        assert http.post("/mcp", json={}).status_code == 403


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--host", "0.0.0.0"], "flash-mcp token create NAME"),
        (["--allow-host", "flash.example.com"], "flash-mcp token create NAME"),
        (["--port", "80000"], "[invalid_argument port=80000] there is no such port"),
        (["--port", "0"], "a port from 1 to 65535"),
        (["--host", "box.invalid", "--unauthenticated"], "[invalid_argument host=box.invalid] cannot listen there"),
        (["--host", "192.0.2.1", "--unauthenticated"], "see `ip address`"),
        (["--allow-host", "https://box.example"], "--allow-host flash.example.com"),
        (["--requests-per-minute", "0"], "requests_per_minute=0] every request would be refused"),
    ],
)
def test_options_with_which_nobody_can_be_served_are_refused(words: list[str], named: str, flash_home: Path, capsys):
    assert main.main(["serve", "--http", *words]) == 2
    assert named in capsys.readouterr().err


def test_settings_that_cannot_be_used_are_named_at_the_start(flash_home: Path, capsys: pytest.CaptureFixture[str]):
    flash_home.mkdir()
    (flash_home / "settings.toml").write_text("[server]\nconnections = 0\n")
    assert main.main(["serve", "--http", "--port", str(free_port())]) == 2
    assert "settings.toml: server: connections must be a number above 0, got 0" in capsys.readouterr().err


def test_a_damaged_file_of_the_machines_own_token_is_made_anew_or_named(tmp_path: Path):
    file = tmp_path / tokens.LOCAL_TOKEN
    file.write_bytes(b"\xff\xfe")
    assert tokens.local_token(tmp_path).startswith(tokens.PREFIX)
    assert "only you can read" in where_token_is(tmp_path)
    file.chmod(0o640)
    assert f"Others may read it: `chmod 600 {file}`" in where_token_is(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(FlashError, match="cannot be read: Is a directory"):
        where_token_is(tmp_path)


@pytest.mark.hostile("requests")
def test_a_server_on_loopback_asks_for_the_token_of_the_machines_own_user(flash_home: Path, monkeypatch):
    monkeypatch.setenv("ALLOWED", "1")
    monkeypatch.setenv("OTHERS", "2")
    flash_home.mkdir(mode=0o700)
    (flash_home / "settings.toml").write_text('[server]\nsecrets = ["ALLOWED"]\n')
    port = free_port()
    with serving(port):
        file = flash_home / tokens.LOCAL_TOKEN
        assert file.stat().st_mode & 0o077 == 0
        token = file.read_text().strip()
        for text in (None, "x", token[:-1], "flash_" + "x" * 43):
            with Team(port).http(text) as http:
                refused = http.post("/mcp", json={})
            assert refused.status_code == 401 and tokens.LOCAL_TOKEN in refused.text
        anyio.run(names_its_settings_secrets_only, Team(port), token)
    assert tokens.local_token(flash_home) == token, "it is made once"


async def names_its_settings_secrets_only(team: Team, token: str) -> None:
    push: dict[str, Any] = {"name": "echo", "files": {"environment.py": ENVIRONMENT}}
    async with team.client(token) as client:
        refused = text_of(await client.call_tool("env_push", {**push, "secrets": ["OTHERS"]}))
        assert code_of(refused) == "invalid_argument" and "settings.toml" in refused
        assert body_of(await client.call_tool("env_push", {**push, "secrets": ["ALLOWED"]}))["created"]


async def test_a_server_that_asks_for_no_token_gives_none_of_its_variables(flash_home: Path, monkeypatch):
    monkeypatch.setenv("OTHERS", "2")
    push: dict[str, Any] = {"name": "echo", "files": {"environment.py": ENVIRONMENT}}
    with supervised(), team_server(authenticate=False) as team:
        async with team.client("none") as client:
            refused = text_of(await client.call_tool("env_push", {**push, "secrets": ["OTHERS"]}))
    assert code_of(refused) == "invalid_argument"


@contextmanager
def serving_everywhere(port: int) -> Generator[subprocess.Popen[bytes]]:
    """`flash-mcp serve --http` on all addresses, once it is healthy."""
    command = [sys.executable, "-m", "flash_mcp.cli", "serve", "--http", "--host", "0.0.0.0", "--port", str(port)]
    command += ["--allow-host", "flash.example.com"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            said = server.stderr.readline() + server.stderr.readline()
            assert b"Authorization: Bearer" in said and b"flash-mcp token create NAME" in said
            with httpx.Client(trust_env=False, timeout=60, transport=httpx.HTTPTransport(retries=10)) as http:
                assert http.get(f"http://127.0.0.1:{port}/healthz").text == "ok\n"
            yield server
        finally:
            server.kill()


def test_a_client_that_only_listens_does_not_keep_a_server_from_ending(flash_home: Path):
    text, port, version = tokens.create(open_store(), "alice")[1], free_port(), "2026-07-28"
    prefix = "io.modelcontextprotocol"
    meta = {f"{prefix}/protocolVersion": version, f"{prefix}/clientInfo": {"name": "t", "version": "0"}}
    meta |= {f"{prefix}/clientCapabilities": {}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen"}
    body |= {"params": {"_meta": meta, "notifications": {"toolsListChanged": True}}}
    headers = {"authorization": f"Bearer {text}", "accept": "application/json, text/event-stream"}
    headers |= {"mcp-protocol-version": version, "mcp-method": "subscriptions/listen"}
    with supervised(), serving_everywhere(port) as server, httpx.Client(trust_env=False, timeout=60) as http:
        with http.stream("POST", f"http://127.0.0.1:{port}/mcp", json=body, headers=headers) as listening:
            assert listening.is_success
            lines = listening.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            started = time.monotonic()
            list(lines)
        assert server.wait(WAIT_S) in (0, -signal.SIGTERM) and time.monotonic() - started < 40


def test_what_holds_the_state_up_is_told_over_http(flash_home: Path) -> None:
    from flash_mcp.server.uploads import STATUS, refusal_response  # noqa: PLC0415

    assert set(STATUS) <= set(CODES)
    with pytest.raises(FlashError, match="no valid token"):
        tokens.revoke(open_store(), "nobody")
    error = FlashError("disk_full", "no space is left", path=Path("/data"), fix="free some")
    answer = refusal_response(error)
    assert answer.status_code == 507 and json.loads(bytes(answer.body))["error"]["data"]["values"] == {"path": "/data"}


async def test_a_server_that_is_told_to_end_lets_calls_end_first(flash_home: Path, tmp_path: Path):
    run: Run = queued_run(tmp_path / "environment")
    text = tokens.create(open_store(), "alice")[1]
    give("alice", "echo")
    port, results, begun = free_port(), list[str](), anyio.Event()
    with supervised(), serving_everywhere(port) as server, anyio.fail_after(WAIT_S):
        # A client of the handshake era holds a stream open beside its calls.
        async with Team(port).client(text, "legacy") as client, anyio.create_task_group() as group:
            await client.list_tools()  # which a client does after its first call otherwise

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                begun.set()

            async def wait() -> None:
                arguments = {"run_id": run.id, "wait_s": 3}
                results.append(text_of(await client.call_tool("status", arguments, progress_callback=hear)))

            group.start_soon(wait)
            await begun.wait()
            server.send_signal(signal.SIGTERM)
        started = time.monotonic()
        code = await anyio.to_thread.run_sync(server.wait, 45)
    assert json.loads(results[0])["changed"] is False
    assert code in (0, -signal.SIGTERM)
    assert time.monotonic() - started < 40  # SHUTDOWN_S is more


def test_a_reverse_proxys_name_is_let_in(flash_home: Path):
    text, port = tokens.create(open_store(), "alice")[1], free_port()
    team = Team(port)
    with serving_everywhere(port), team.http(text) as http, team.http() as stranger:
        for host, status in (("flash.example.com", 200), (f"127.0.0.1:{port}", 200), ("example.com", 421)):
            assert http.get("/metrics", headers={"host": host}).status_code == status
        assert stranger.get("/metrics").status_code == 401


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "the-operators")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exports that would have started."""
    from flash_mcp.extensions.export.background import Exporter  # noqa: PLC0415  the room may be left out

    started: list[str] = []
    monkeypatch.setattr(Exporter, "start", lambda exporter: started.append(exporter.reference))
    return started


async def call(team: Team, token: str, tool: str, **arguments: Any) -> str:
    async with team.client(token) as client:
        return text_of(await client.call_tool(tool, arguments))


@pytest.mark.hostile("logins")
async def test_a_push_to_the_hub_needs_a_token_that_was_granted_the_hub_s_login(
    logins: None, team: Team, tmp_path: Path, starts: list[str]
) -> None:
    run = finished_run(tmp_path)
    give("alice", "alices")
    push = {"run_id": run.id, "export": "adapter", "push_to": "operator/stolen"}
    refused = await call(team, team.token("alice"), "checkpoints", **push)
    assert refused.startswith("[invalid_argument") and "HF_TOKEN" in refused
    assert "--secret" in refused and not starts
    granted = team.token("alice", secret_names=["HF_TOKEN"])
    assert "[worker_failed" in await call(team, granted, "checkpoints", **push)
    assert starts == [f"{run.id}@20"]


@pytest.mark.hostile("logins")
@pytest.mark.parametrize(
    ("tracker", "variable"), [("wandb", "WANDB_API_KEY"), ("mlflow", "MLFLOW_TRACKING_URI"), ("trackio", "HF_TOKEN")]
)
async def test_metrics_go_to_the_operator_s_tracker_only_for_those_who_were_granted_it(
    logins: None, team: Team, tracker: str, variable: str
) -> None:
    granted = team.token("alice", secret_names=[variable])
    await call(team, granted, "env_push", name="e", files={"environment.py": ENVIRONMENT}, load=False)
    arguments = {"environment": "e", "validate_only": True, "report_to": [tracker]}
    refused = await call(team, team.token("alice"), "train", **arguments)
    assert refused.startswith("[invalid_argument") and variable in refused
    assert not (await call(team, granted, "train", **arguments)).startswith("[")


@pytest.mark.hostile("logins")
def test_a_run_s_process_has_no_hub_login_unless_its_caller_was_granted_it(flash_home: Path, tmp_path: Path) -> None:
    def variables(secrets: frozenset[str] | None) -> dict[str, str]:
        with acting_as(Caller("alice", secrets=secrets)):
            job = queue.job(queued_run(tmp_path))
        return environment_for(job["lineage"].get("granted"), {"HF_TOKEN": "t", "PATH": "/bin"})

    assert variables(frozenset({"OTHER"})) == {"PATH": "/bin", NO_HUB_LOGIN: "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    assert variables(frozenset({"HF_TOKEN"})) == {"HF_TOKEN": "t", "PATH": "/bin"}
    assert variables(None) == {"HF_TOKEN": "t", "PATH": "/bin"}


@pytest.mark.hostile("logins")
async def test_exports_count_in_a_quota_and_an_owner_writes_one_at_a_time(
    logins: None, team: Team, tmp_path: Path, starts: list[str], flash_home: Path
) -> None:
    run = finished_run(tmp_path)
    give("alice", "alices")
    token = team.token("alice", secret_names=["HF_TOKEN"])
    push = {"run_id": run.id, "push_to": "me/model"}
    folder = exports_dir(open_store().base) / f"{run.id}-10-adapter"
    folder.mkdir(parents=True)
    with folder.with_name(f"{folder.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = await call(team, token, "checkpoints", export="adapter", **push)
        assert refused.startswith("[quota_exceeded") and folder.name in refused
    (flash_home / "settings.toml").write_text("[disk]\nexports_gib = 0.2\n")
    # The model has 134,515,008 parameters of two bytes each.
    refused = await call(team, token, "checkpoints", export="merged", **push)
    assert refused.startswith("[quota_exceeded") and "269,030,016 more" in refused
    with (folder / "model.safetensors").open("wb") as weights:
        os.truncate(weights.fileno(), 300 << 20)
    refused = await call(team, token, "checkpoints", export="adapter", **push)
    assert refused.startswith("[quota_exceeded") and not starts
    folder.rename(folder.with_name("run-anothers-10-adapter"))
    assert "[worker_failed" in await call(team, token, "checkpoints", export="adapter", **push)
    assert starts == [f"{run.id}@20"]
