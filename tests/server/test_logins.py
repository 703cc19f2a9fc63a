"""What acts for a caller over HTTP has the secrets that their token was granted, and no other login of the server."""

import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.paths import exports_dir
from flash_mcp.protocol.surroundings import NO_HUB_LOGIN, environment_for
from flash_mcp.state import queue
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.store import open_store
from tests.samples import ENVIRONMENT, finished_run, queued_run, supervised
from tests.server.test_http_server import give
from tests.teams import Team, team_server, text_of

pytestmark = pytest.mark.slow


@pytest.fixture
def team(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Team]:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "the-operators")
    with supervised(), team_server() as started:
        yield started


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
    team: Team, tmp_path: Path, starts: list[str]
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
    team: Team, tracker: str, variable: str
) -> None:
    granted = team.token("alice", secret_names=[variable])
    files = {"environment.py": ENVIRONMENT}
    await call(team, granted, "env_push", name="e", files=files, load=False)
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
    team: Team, tmp_path: Path, starts: list[str], flash_home: Path
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
