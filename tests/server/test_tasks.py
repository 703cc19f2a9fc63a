import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, Request, RequestParams, Result

from flash_mcp.protocol.errors import FlashError
from flash_mcp.server.mcp_server import server
from flash_mcp.server.tasks import IDENTIFIER
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import is_supervised
from flash_mcp.tools.shared import waiting
from tests.places import ROOT
from tests.samples import end, evaluate, finished_run, learn, push_echo, save_adapter, start, supervised

MISSING_CAPABILITY, INVALID_PARAMS, METHOD_NOT_FOUND = -32021, -32602, -32601


class Created(Result):
    """CreateTaskResult."""

    result_type: Literal["task"]
    task_id: str
    status: str
    created_at: str
    last_updated_at: str
    ttl_ms: int | None
    poll_interval_ms: int


class Got(Result):
    """The answer of tasks/get."""

    result_type: Literal["complete"]
    task_id: str | None = None
    status: str | None = None
    status_message: str | None = None
    result: dict[str, Any] | None = None


class TaskId(RequestParams):
    task_id: str


class Ask(Request[TaskId, str]):
    name_param = "taskId"


class Knows(ClientExtension):
    """Declares the extension; handles are looked at by the tests themselves."""

    identifier = IDENTIFIER

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=Created, resolve=self.resolve)]

    async def resolve(self, created: Created, context: ClaimContext) -> CallToolResult:
        raise AssertionError("tests call with allow_claimed")


@pytest.fixture
async def client() -> AsyncGenerator[Client]:
    async with Client(server, extensions=[Knows()]) as connected:
        yield connected


async def ask(client: Client, method: str, task_id: str) -> Got:
    return await client.session.send_request(Ask(method=method, params=TaskId(task_id=task_id)), Got)


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    """A CallToolResult, or a task."""
    return await client.session.call_tool(tool, arguments, allow_claimed=True)


async def train(client: Client, folder: Path, **arguments: Any) -> Any:
    push_echo(folder)
    return await call(client, "train", environment="echo", steps=20, **arguments)


async def begun(client: Client, folder: Path) -> str:
    """The task of a new run."""
    created = await train(client, folder)
    assert isinstance(created, Created)
    return created.task_id


async def test_a_run_is_a_task_under_its_own_id(client: Client, tmp_path: Path):
    with supervised():
        created = await train(client, tmp_path)
        got = await ask(client, "tasks/get", created.task_id)
    assert created.status == "working" and created.ttl_ms is None
    assert open_store().run(created.task_id).state == "queued"
    assert (got.task_id, got.status) == (created.task_id, "working")
    assert got.status_message == "queued, step 0 of 20"


async def test_what_leaves_no_work_behind_is_answered_plainly(client: Client, tmp_path: Path):
    validated = await train(client, tmp_path, validate_only=True)
    refused = await call(client, "train", environment="none")
    listed = await call(client, "catalog")
    assert validated.structured_content["state"] == "validated"
    assert refused.is_error
    assert not listed.is_error


@pytest.mark.parametrize(("mode", "code"), [("auto", MISSING_CAPABILITY), ("legacy", METHOD_NOT_FOUND)])
async def test_a_client_without_the_extension_gets_plain_results_and_no_task_methods(tmp_path, mode: str, code: int):
    async with Client(server, mode=mode) as plain:
        with supervised():
            result = await train(plain, tmp_path)
        assert result.structured_content is not None
        with pytest.raises(MCPError) as refused:
            await ask(plain, "tasks/get", result.structured_content["run_id"])
        assert refused.value.error.code == code


async def result_of(client: Client, tool: str, task_id: str) -> dict[str, Any]:
    """The structured content of a completed task, which follows the tool's schema."""
    got = await ask(client, "tasks/get", task_id)
    assert got.status == "completed" and got.result is not None
    await client.session.validate_tool_result(tool, CallToolResult.model_validate(got.result))
    return got.result["structuredContent"]


async def test_the_result_of_a_run_is_what_train_returned_and_how_it_ended(client: Client, tmp_path: Path):
    with supervised():
        task_id = await begun(client, tmp_path / "environment")
        writer = start(task_id)
        evaluate(writer, 0, 20)
        learn(writer, range(1, 21))
        save_adapter(writer, 20, tmp_path)
        evaluate(writer, 20, 90)
        end(writer, task_id, 20)
        body = await result_of(client, "train", task_id)
    assert (body["run_id"], body["state"]) == (task_id, "succeeded")
    assert body["run"]["verdict"]["outcome"] == "improved" and body["run"]["checkpoint"] == 20
    assert body["estimate"]["steps"] == 20


async def test_the_result_of_an_evaluation_has_its_scores(client: Client, tmp_path: Path):
    push_echo(tmp_path)
    with supervised():
        task_id = (await call(client, "evaluate", environment="echo", wait_s=0)).task_id
        writer = start(task_id)
        evaluate(writer, 0, 20)
        end(writer, task_id, 60)
        body = await result_of(client, "evaluate", task_id)
    assert (body["state"], body["done"], body["scores"]["success"]) == ("succeeded", 60, 0.2)


async def test_a_failed_run_is_a_completed_task_with_an_error(client: Client, tmp_path: Path):
    with supervised():
        task_id = await begun(client, tmp_path)
        run = queue.claim(open_store())
        assert run is not None
        error = FlashError("environment_error", "the scorer raised", fix="mend it")
        queue.finish(open_store(), task_id, run.attempt, "failed", error=error.to_dict())
        got = await ask(client, "tasks/get", task_id)
    assert got.status == "completed"
    assert got.result == {
        "content": [{"type": "text", "text": "[environment_error] the scorer raised. Fix: mend it"}],
        "isError": True,
        "resultType": "complete",
    }


async def test_cancelling_a_task_cancels_the_run_and_twice_is_as_good_as_once(client: Client, tmp_path: Path):
    with supervised():
        task_id = await begun(client, tmp_path)
        for _ in range(2):
            assert (await ask(client, "tasks/cancel", task_id)).status is None
        assert (await ask(client, "tasks/get", task_id)).status == "cancelled"
    assert open_store().run(task_id).state == "cancelled"


async def test_polling_a_task_says_what_holds_it_up_and_starts_nothing(
    client: Client, flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with supervised():
        run = finished_run(tmp_path / "finished")
        tasks = [await begun(client, tmp_path)]
        tasks.append((await call(client, "deploy", run_id=run.id, wait_s=0)).task_id)
    for task_id in tasks:
        got = await ask(client, "tasks/get", task_id)
        assert got.status == "working" and got.status_message.startswith("[not_ready] no supervisor runs.")
    assert not is_supervised(flash_home) and not (flash_home / "supervisor.log").exists()
    monkeypatch.setattr(waiting, "LEAST_FREE_BYTES", sys.maxsize)
    for task_id in tasks:
        got = await ask(client, "tasks/get", task_id)
        assert "the disk is as good as full" in got.status_message


@pytest.mark.parametrize("method", ["tasks/get", "tasks/cancel", "tasks/update"])
async def test_an_unknown_task_is_invalid_params_also_where_the_run_exists(client: Client, method: str, tmp_path: Path):
    run_id = finished_run(tmp_path).id
    for task_id in ("task-none", "dep-none", run_id):
        with pytest.raises(MCPError) as refused:
            await ask(client, method, task_id)
        assert refused.value.error.code == INVALID_PARAMS


async def test_a_deployment_that_is_not_ready_in_time_is_a_task(client: Client, tmp_path: Path):
    run = finished_run(tmp_path)
    store = open_store()
    with supervised():
        task_id = (await call(client, "deploy", run_id=run.id, wait_s=0)).task_id
        assert task_id == store.deployments()[0].id
        assert (await ask(client, "tasks/get", task_id)).status == "working"
        store.update_deployment(task_id, state="ready", base_url="http://127.0.0.1:1/v1")
        ready = await ask(client, "tasks/get", task_id)
        assert ready.result is not None and ready.result["structuredContent"]["state"] == "ready"
        store.update_deployment(task_id, state="failed", error=FlashError("port_taken", "taken").to_dict())
        failed = await ask(client, "tasks/get", task_id)
        assert failed.result is not None and "[port_taken]" in failed.result["content"][0]["text"]


@asynccontextmanager
async def fresh_server(home: Path) -> AsyncGenerator[Client]:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "flash_mcp.cli", "serve"], env={"FLASH_HOME": str(home)}, cwd=ROOT
    )
    async with Client(command, extensions=[Knows()]) as client:
        yield client


@pytest.mark.slow
async def test_a_task_outlives_the_server_that_made_it(flash_home: Path, tmp_path: Path):
    with supervised():
        async with fresh_server(flash_home) as client:
            task_id = await begun(client, tmp_path)
        async with fresh_server(flash_home) as client:
            assert (await ask(client, "tasks/get", task_id)).status == "working"
            await ask(client, "tasks/cancel", task_id)
            assert (await ask(client, "tasks/get", task_id)).status == "cancelled"
