import json
import re
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ResourceTemplateReference
from pydantic import Field
from tokenizers import Tokenizer

from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.paths import home, models_dir
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.server import mcp_server as server_module
from flash_mcp.server.mcp_server import FlashServer, plain, server
from flash_mcp.state import tokens
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.tool_base import Result, Tool, report
from flash_mcp.tools.shared.truncation import LEAST_CHARACTERS, RESULT_CHARACTERS, fit, to_text
from tests.places import ROOT
from tests.ports import free_port, is_answered
from tests.samples import finished_run, queued_run, supervised
from tests.teams import Team
from tests.waiting import WAIT_S, wait_for

START_TIMEOUT_S = 60


@pytest.fixture(params=["auto", "legacy"])
async def client(request: pytest.FixtureRequest) -> AsyncGenerator[Client]:
    """The product's server in this process, in both protocol eras."""
    async with Client(server, mode=request.param) as connected:
        yield connected


def text_of(result: CallToolResult) -> str:
    assert len(result.content) == 1 and result.content[0].type == "text"
    return result.content[0].text


def code_of(result: CallToolResult) -> str:
    """The code of a tool error, which has to be a registered one."""
    assert result.is_error, text_of(result)
    code = text_of(result).removeprefix("[").partition("]")[0].partition(" ")[0]
    assert code in CODES, text_of(result)
    return code


def body_of(result: CallToolResult) -> dict[str, Any]:
    """The structured content, which has to say the same as the text, compactly and within the limit."""
    text = text_of(result)
    assert not result.is_error, text
    assert result.structured_content == json.loads(text) and text == to_text(result.structured_content)
    assert len(text) <= RESULT_CHARACTERS and list(json.loads(text))[-1] == "next"
    return json.loads(text)


# -- what clients see before they call -------------------------------------------------------------


async def test_every_tool_is_listed_with_schemas_annotations_and_a_description(client: Client):
    listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(listed) == list(TOOLS) and len(listed) <= 16
    for tool in listed.values():
        assert tool.title and tool.description
        hints = tool.annotations
        assert hints is not None
        assert None not in (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint, hints.open_world_hint)
        assert not (hints.read_only_hint and hints.destructive_hint)
        for name, field in tool.input_schema["properties"].items():
            assert field.get("description"), f"{tool.name}.{name} has no description"
            assert "type" in field, f"{tool.name}.{name} has no type"
        assert tool.output_schema is not None and "next" in tool.output_schema["properties"]


async def test_schemas_have_no_references_and_no_unions_with_null(client: Client):
    for tool in (await client.list_tools()).tools:
        text = json.dumps([tool.input_schema, tool.output_schema])
        assert "$ref" not in text and '{"type": "null"}' not in text
        arguments = json.dumps(tool.input_schema)
        assert "additionalProperties" not in arguments  # which Google's SDK refuses, as the next
        assert "exclusiveM" not in arguments


async def test_the_schemas_of_all_tools_take_few_tokens(client: Client):
    """Counted as the default model counts."""
    tokenizer = Tokenizer.from_file(str(models_dir() / DEFAULT_MODEL / "tokenizer.json"))
    tools = (await client.list_tools()).tools
    for limit, schemas in (
        (6500, [to_text(tool.input_schema) for tool in tools]),
        (8000, [to_text(tool.output_schema) for tool in tools]),
    ):
        taken = sum(len(tokenizer.encode(schema).ids) for schema in schemas)
        assert taken <= limit, taken


def test_a_schema_keeps_properties_that_are_called_title_or_default():
    schema = {"type": "object", "title": "X", "properties": {"title": {"title": "T", "type": "string"}}}
    assert plain(schema) == {"type": "object", "properties": {"title": {"type": "string"}}}


@pytest.mark.needs("tournament")
async def test_the_instructions_are_short_and_give_the_order_of_work(client: Client):
    assert client.instructions is not None and len(client.instructions) < 1000
    assert client.instructions.index("env_push") < client.instructions.index("train ->")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TOOLS))
async def test_every_tool_refuses_an_argument_that_it_does_not_have(client: Client, name: str):
    result = await client.call_tool(name, {"no_such_argument": 1})
    assert code_of(result) == "unknown_argument" and "no_such_argument" in text_of(result)


async def test_wrong_values_are_explained_one_field_a_line_without_the_validators_own_words(client: Client):
    result = await client.call_tool("train", {"environment": "echo", "steps": 0, "group_size": 0, "loss_type": "x"})
    assert code_of(result) == "invalid_argument"
    lines = text_of(result).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == ["steps", "group_size", "loss_type"]
    assert "pydantic" not in text_of(result) and "Arguments" not in text_of(result)


async def test_a_missing_argument_is_named_and_a_list_given_as_json_text_is_understood(client: Client):
    assert "run_id" in text_of(await client.call_tool("cancel", {}))
    result = await client.call_tool("train", {"environment": "echo", "secrets": '["A", "B"]'})
    assert code_of(result) == "unknown_environment"


async def test_an_error_about_a_long_text_is_short(client: Client):
    for tool, arguments in (
        ("status", {"run_id": "x" * 1_000_000}),
        ("status", dict.fromkeys(map(str, range(50_000)))),
    ):
        assert len(text_of(await client.call_tool(tool, arguments))) < 8000


class Said(Result):
    """A result for tests."""

    said: str = ""


def fails() -> Said:
    """Raise what nobody foresaw."""
    raise ZeroDivisionError("the secret detail")


def refuses() -> Said:
    """Raise what was foreseen."""
    raise FlashError("port_taken", "another listens", port=80, fix="choose another")


def talks() -> Said:
    """Return more than fits."""
    return Said(said="word " * 10_000, next="nothing")


def hangs() -> Said:
    """Block its thread until the test lets it go."""
    RELEASE.wait(2 * WAIT_S)
    return Said(next="nothing")


async def reports() -> Said:
    """Tell how far it has come."""
    for share in (0.25, 0.5, 1.0):
        await report(f"at {share:.0%}", share)
    return Said(next="nothing")


def repeats(
    text: str,
    other: str | None = None,
    short: Annotated[str, Field(max_length=99)] | None = None,
    words: list[str] | None = None,
) -> Said:
    """Return what came."""
    return Said(said=repr((text, other, short, words)), next="nothing")


async def babbles() -> Said:
    """Say a hundred times within a moment that it goes on."""
    for _ in range(100):
        await report("still at it")
    return Said(next="nothing")


RELEASE = threading.Event()
ODD_TOOLS = [Tool(function, title="x") for function in (fails, refuses, talks, hangs, reports, repeats, babbles)]
ODD = FlashServer({tool.name: tool for tool in ODD_TOOLS})


@pytest.fixture(params=["auto", "legacy"])
async def odd(request: pytest.FixtureRequest) -> AsyncGenerator[Client]:
    """A server whose tools misbehave."""
    async with Client(ODD, mode=request.param) as connected:
        yield connected


async def test_what_a_tool_foresees_or_says_at_length_and_a_defect_reach_the_caller(odd: Client, flash_home: Path):
    assert text_of(await odd.call_tool("refuses", {})) == "[port_taken port=80] another listens. Fix: choose another"
    body = body_of(await odd.call_tool("talks", {}))
    assert "characters cut" in body["said"] and "too long" in body["cut"]
    # A defect is told by an id; the log has its traceback.
    result = await odd.call_tool("fails", {})
    assert code_of(result) == "internal" and "secret detail" not in text_of(result)
    identity = text_of(result).partition("id=")[2].partition("]")[0].split()[0]
    log = (flash_home / "logs" / "server.log").read_text()
    assert f"id={identity}" in log and "ZeroDivisionError: the secret detail" in log and "in fails" in log


@pytest.mark.slow
async def test_a_call_that_hangs_is_left_while_others_are_served(odd: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "CALL_TIMEOUT_S", 3.0)
    RELEASE.clear()
    results: dict[str, CallToolResult] = {}

    async def call(name: str) -> None:
        results[name] = await odd.call_tool(name, {})

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(call, "hangs")
            await call("refuses")
            assert "hangs" not in results
    RELEASE.set()
    assert code_of(results["hangs"]) == "not_ready"


@pytest.mark.parametrize("text", ['{"city": "Paris"}', "[1, 2]", "null", "true", "42", '"a"'])
async def test_a_text_that_is_json_stays_a_text_and_a_list_as_json_is_a_list(odd: Client, text: str):
    given = {"text": text, "other": text, "short": text, "words": '["a", "b"]'}
    assert body_of(await odd.call_tool("repeats", given))["said"] == repr((text, text, text, ["a", "b"]))


async def test_progress_reaches_a_client_that_asks_and_without_a_share_once_a_second_at_most(odd: Client):
    heard: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    await odd.call_tool("reports", {}, progress_callback=hear)
    assert [message for _, message in heard] == ["at 25%", "at 50%", "at 100%"] and heard == sorted(heard)
    heard.clear()
    started = time.monotonic()
    await odd.call_tool("babbles", {}, progress_callback=hear)
    assert 1 <= len(heard) <= 1 + (time.monotonic() - started)


def test_fitting_keeps_short_values_and_the_shape():
    body = {"n": 1, "rows": [{"text": "x" * 5000}, {"text": "y" * 50}], "ids": list(range(500)), "next": "go on"}
    fitted = fit(body, 2000)
    assert len(to_text(fitted)) <= 2000 and (fitted["n"], fitted["next"]) == (1, "go on")
    assert fitted["rows"][1] == {"text": "y" * 50}
    assert fit({"n": 1}, 2000) == {"n": 1}


def test_fitting_ends_where_the_characters_of_texts_take_six_of_json():
    fitted = fit({"texts": {str(number): "\x01" * 200 for number in range(9)}}, 1000)
    assert all(0 < len(text) <= LEAST_CHARACTERS for text in fitted["texts"].values())


# -- resources and the prompt ----------------------------------------------------------------------


async def test_the_playbook_is_a_resource_and_the_loop_a_prompt(client: Client):
    assert [str(resource.uri) for resource in (await client.list_resources()).resources] == ["flash://playbook"]
    first = (await client.read_resource("flash://playbook")).contents[0].text
    assert len(first) < 11_000 and "## Start here" in first and "## The loop in detail" in first
    for address in re.findall(r"^- (flash://playbook/\S+)$", first, re.MULTILINE):
        assert (await client.read_resource(address)).contents[0].text.startswith("## ")
    with pytest.raises(MCPError, match="it has start-here, the-loop-in-detail, environment"):
        await client.read_resource("flash://playbook/nowhere")
    prompt = await client.get_prompt("train_a_model", {"goal": "teach it to add"})
    assert "Goal: teach it to add" in prompt.messages[0].content.text


@pytest.mark.slow
async def test_what_a_run_left_behind_can_be_read_as_resources(client: Client, tmp_path: Path):
    run = finished_run(tmp_path)
    base = f"flash://runs/{run.id}"
    metrics = json.loads((await client.read_resource(f"{base}/metrics")).contents[0].text)
    assert [row["step"] for row in metrics] == list(range(1, 21))
    rows = (await client.read_resource(f"{base}/rollouts/3")).contents[0].text.splitlines()
    assert [json.loads(row)["index"] for row in rows] == list(range(8))
    rows = (await client.read_resource(f"{base}/evaluations/20")).contents[0].text.splitlines()
    assert len(rows) == 100
    for kind in ("rollouts", "evaluations"):
        with pytest.raises(MCPError, match="none at step 99"):
            await client.read_resource(f"{base}/{kind}/99")
    assert (await client.read_resource(f"{base}/curve.png")).contents[0].mime_type == "image/png"
    assert (await client.read_resource(f"{base}/log")).contents[0].text == ""


@pytest.mark.slow
async def test_the_curve_comes_beside_the_report_and_changes_none_of_its_words(client: Client, tmp_path: Path):
    run_id = finished_run(tmp_path).id
    plain_report = await client.call_tool("status", {"run_id": run_id})
    report, picture = (await client.call_tool("status", {"run_id": run_id, "curve": True})).content
    assert report.type == "text" and report.text == text_of(plain_report)
    assert picture.type == "image" and picture.mime_type == "image/png"
    assert b64decode(picture.data).startswith(b"\x89PNG")


async def test_a_picture_without_what_draws_it_is_refused(client: Client, tmp_path: Path, monkeypatch):
    run_id = finished_run(tmp_path).id
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = await client.call_tool("status", {"run_id": run_id, "curve": True})
    assert result.is_error and "pictures_missing" in text_of(result) and "flash-mcp[pictures]" in text_of(result)
    with pytest.raises(MCPError, match="pictures_missing"):
        await client.read_resource(f"flash://runs/{run_id}/curve.png")


# -- every tool, whatever it is given --------------------------------------------------------------

NO_SUCH = {"run_id": "run-00000000", "deployment": "dep-0", "environment": "none", "path": "/nonexistent", "name": "n"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TOOLS))
async def test_every_tool_answers_about_what_does_not_exist(client: Client, name: str, tmp_path: Path):
    arguments: dict[str, Any] = {
        argument: str(tmp_path / "new") if name == "env_setup" else NO_SUCH.get(argument, "none")
        for argument, parameter in TOOLS[name].signature.parameters.items()
        if parameter.default is parameter.empty
    }
    with supervised():
        result = await client.call_tool(name, arguments)
    if result.is_error:
        assert code_of(result) != "internal", text_of(result)
        assert "Fix: " in text_of(result)
    else:
        body_of(result)


# -- real transports -------------------------------------------------------------------------------


async def drive(client: Client, run_id: str) -> None:
    """A few calls, as a client would make them."""
    assert len((await client.list_tools()).tools) == len(TOOLS)
    assert "models" in body_of(await client.call_tool("catalog", {}))
    body = body_of(await client.call_tool("status", {"run_id": run_id}))
    assert (body["run"]["state"], body["run"]["verdict"]["outcome"]) == ("succeeded", "improved")
    assert code_of(await client.call_tool("status", {"runid": run_id})) == "unknown_argument"
    assert body_of(await client.call_tool("rollouts", {"run_id": run_id}))["total"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_session_over_stdio(mode: str, tmp_path: Path, flash_home: Path):
    run = finished_run(tmp_path)
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "flash_mcp.cli", "serve"], env={"FLASH_HOME": str(flash_home)}, cwd=ROOT
    )
    with anyio.fail_after(START_TIMEOUT_S):
        async with Client(command, mode=mode) as client:
            await drive(client, run.id)


@pytest.mark.slow
def test_a_client_over_stdio_that_vanishes_is_an_end_and_no_failure(flash_home: Path):
    command = [sys.executable, "-m", "flash_mcp.cli", "serve"]
    pipe = subprocess.PIPE
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "short-lived", "version": "1"}}
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr

        def send(number: int, method: str, params: dict[str, Any]) -> None:
            body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            process.stdin.write(json.dumps(body).encode() + b"\n")
            process.stdin.flush()

        send(1, "initialize", hello)
        assert b"protocolVersion" in process.stdout.readline()
        process.stdout.close()
        for number in range(2, 12):
            send(number, "tools/list", {})
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(WAIT_S) == 0, said
    assert b"unexpectedly" not in said and b"Traceback" not in said
    assert not (flash_home / "logs" / "server.log").exists()


@pytest.mark.slow
async def test_the_module_runs_under_the_sdks_own_command(flash_home: Path):
    mcp, words = str(Path(sys.executable).with_name("mcp")), ["run", "flash_mcp/server/mcp_server.py"]
    command = StdioServerParameters(command=mcp, args=words, env={"FLASH_HOME": str(flash_home)}, cwd=ROOT)
    with anyio.fail_after(START_TIMEOUT_S):
        async with Client(command) as client:
            assert "no runs yet" in body_of(await client.call_tool("status", {}))["next"]


@contextmanager
def serving(port: int) -> Generator[subprocess.Popen[str]]:
    """`flash-mcp serve --http`, once it has said that it listens."""
    command = [sys.executable, "-m", "flash_mcp.cli", "serve", "--http", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "Uvicorn running" in line or "listens on" in line:
                    break
            wait_for(lambda: is_answered(port), START_TIMEOUT_S)
            yield process
        finally:
            process.terminate()
            process.wait(WAIT_S)


@pytest.mark.slow
async def test_a_session_over_http(tmp_path: Path):
    run, port = finished_run(tmp_path), free_port()
    with serving(port):
        for mode in ("auto", "legacy"):
            with anyio.fail_after(START_TIMEOUT_S):
                token = (home() / tokens.LOCAL_TOKEN).read_text().strip()
                async with Team(port).client(token, mode) as client:
                    await drive(client, run.id)


ROLLOUTS = ResourceTemplateReference(uri="flash://runs/{run_id}/rollouts/{step}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_run_ids_and_steps_with_rollouts_are_completed(mode: str, tmp_path: Path):
    finished, queued = finished_run(tmp_path).id, queued_run(tmp_path / "other").id

    async def complete(name: str, value: str, **known: str) -> list[str]:
        answer = await client.complete(ROLLOUTS, {"name": name, "value": value}, known or None)
        return answer.completion.values

    async with Client(server, mode=mode) as client:
        assert await complete("run_id", "run-") == [queued, finished]
        assert await complete("run_id", finished[:-1]) == [finished]
        assert await complete("step", "1", run_id=finished) == ["1", *(str(step) for step in range(10, 20))]
        assert await complete("step", "", run_id="run-none") == [] and await complete("goal", "") == []
