from pathlib import Path

import pytest
from mcp import Client
from mcp_types import ResourceTemplateReference

from flash_mcp.server.mcp_server import server
from tests.samples import finished_run, queued_run

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
        assert await complete("step", "", run_id="run-none") == []
        assert await complete("goal", "") == []
