"""A call of status waits as long as its client does."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from mcp import Client

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.server import mcp_server
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.tools.shared import tool_base, waiting
from tests.samples import end, learning_run, supervised
from tests.teams import Team, team_server

pytestmark = pytest.mark.slow
CALL_S = 4.0
"""What a call may take without progress, here."""


@pytest.fixture
def running(flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, RunWriter]]:
    monkeypatch.setattr(mcp_server, "CALL_TIMEOUT_S", CALL_S)
    monkeypatch.setattr(tool_base, "ANSWER_S", 1.0)
    monkeypatch.setattr(waiting, "PROGRESS_S", 0.5)
    with supervised():
        run, writer = learning_run(tmp_path, range(1, 3))
        yield run, writer


@pytest.fixture
def server(running: tuple[Run, RunWriter]) -> Iterator[Team]:
    """Over real HTTP: in one process a client sends no token for its progress."""
    with team_server(authenticate=False) as started:
        yield started


async def ignore(progress: float, total: float | None, message: str | None) -> None:
    """A client that takes progress."""


async def waited(client: Client, run_id: str, since: str, **options: Any) -> Any:
    arguments = {"run_id": run_id, "until": "end", "since": since}
    return (await client.call_tool("status", arguments, **options)).structured_content


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_that_takes_progress_waits_for_the_end_in_one_call(
    running: tuple[Run, RunWriter], server: Team, mode: str
) -> None:
    run, writer = running
    async with server.client("none", mode) as client:
        since = (await client.call_tool("status", {"run_id": run.id})).structured_content["since"]
        began = time.monotonic()
        assert "now" in await waited(client, run.id, since)
        assert time.monotonic() - began < 3 * CALL_S
        results: list[Any] = []

        async def wait() -> None:
            results.append(await waited(client, run.id, since, progress_callback=ignore))

        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.sleep(2 * CALL_S)
                assert not results
                end(writer, run.id, 2)
        assert results[0]["news"]["state"] == "succeeded"


async def test_a_client_that_gave_up_gets_its_next_answer_before_it_gives_up_again(
    running: tuple[Run, RunWriter], server: Team
) -> None:
    run, _ = running
    async with server.client("none") as client:
        first = (await client.call_tool("status", {"run_id": run.id})).structured_content
        with anyio.move_on_after(2 * CALL_S):
            await waited(client, run.id, first["since"], progress_callback=ignore)
            pytest.fail("it waited for less than it may")
        with anyio.fail_after(mcp_server.LONG_CALL_S / 10):  # without what it learnt it would wait ten times as long
            answer = await waited(client, run.id, first["since"], progress_callback=ignore)
        assert "now" in answer


def test_the_next_call_ends_before_the_time_after_which_its_client_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SimpleNamespace(meta={"progress_token": 1})
    client = SimpleNamespace(client_params=SimpleNamespace(client_info=SimpleNamespace(name="impatient")))
    context: Any = SimpleNamespace(request_context=request, session=client)
    remembered = mcp_server.CallTimeouts()
    assert remembered.limit_s(context) == mcp_server.LONG_CALL_S
    remembered.gave_up(context, 300.0)
    assert mcp_server.CALL_TIMEOUT_S < remembered.limit_s(context) < 300.0
    remembered.gave_up(context, 1.0)  # no call is that quick: its user stopped it
    assert mcp_server.CALL_TIMEOUT_S < remembered.limit_s(context) < 300.0
    with acting_as(Caller("another")):
        assert remembered.limit_s(context) == mcp_server.LONG_CALL_S, "nobody shortens another owner's calls"
    monkeypatch.setattr(mcp_server, "KEPT_S", 0.0)
    remembered.gave_up(context, 300.0)
    assert remembered.limit_s(context) == mcp_server.LONG_CALL_S


async def test_waits_end_with_the_server(running: tuple[Run, RunWriter], server: Team) -> None:
    run, _ = running
    async with server.client("none") as client:
        first = (await client.call_tool("status", {"run_id": run.id})).structured_content
        waiting.closing.set()
        try:
            with anyio.fail_after(CALL_S):
                answer = await waited(client, run.id, first["since"], progress_callback=ignore)
        finally:
            waiting.closing.clear()
        assert "now" in answer
