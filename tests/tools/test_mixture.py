"""train on several environments: what is queued, refused and reported; no worker runs."""

from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.state import queue
from flash_mcp.state.removal import remove
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.next_steps import going_on
from tests.calls import call, refused
from tests.samples import ENVIRONMENT, end, learn, push_echo, read_in, sample_rollout, start, supervised

pytestmark = pytest.mark.usefixtures("pushed")
SECRET = ENVIRONMENT.replace("self, fail=False", "self, level=1").replace("if fail", "if level > 2").replace("40", "30")


@pytest.fixture
def pushed(flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "a" * 20)
    monkeypatch.setenv("B_KEY", "b" * 20)
    with supervised():
        push_echo(tmp_path / "first")
        push_echo(tmp_path / "second", SECRET, name="second")
        yield


MIXED: dict[str, Any] = {"environment": "echo", "secrets": ["A_KEY"], "steps": 20}
PART = {"ratio": 3, "environment_args": {"level": 2}, "secrets": ["B_KEY"]}


async def mixed_run(**fields: Any) -> Run:
    body = await call("train", **{**MIXED, "settings": {"mixture": {"second": PART}}, **fields})
    return open_store().run(body["run_id"])


@pytest.mark.slow
async def test_each_environment_has_its_own_ratio_arguments_and_secrets() -> None:
    run = await mixed_run(idempotency_key="once")
    first, second = queue.job(run)["mixture"]
    assert (first["name"], first["ratio"], first["args"], first["secrets"]) == ("echo", 1.0, {}, ["A_KEY"])
    assert (second["name"], second["ratio"], second["args"], second["secrets"]) == (
        "second",
        3.0,
        {"level": 2},
        ["B_KEY"],
    )
    assert second["tasks"] == {"train": 30, "eval": 60} and run.lineage["tasks"] == {"train": 40, "eval": 60}
    assert run.training.secrets == ["A_KEY", "B_KEY"], "what the worker gets"
    again = await call("train", **MIXED, settings={"mixture": {"second": PART}}, idempotency_key="once")
    assert (again["run_id"], again["created"]) == (run.id, False)
    assert again["gate"] == "echo: never run; second: never run"
    body = await call("train", environment="echo", settings={"mixture": {"second": 1}}, validate_only=True)
    assert body["estimate"]["train_tasks"] == 70 and body["values"]["mixture"] == {"second": {"ratio": 1.0}}
    error = await refused(
        "train", environment="echo", settings={"mixture": {"second": {"environment_args": {"level": 3}}}}
    )
    assert error.code == "environment_invalid", "one that cannot be loaded is refused"
    with pytest.raises(FlashError, match="1 runs were made from it"):
        remove(open_store(), f"second@{second['digest']}")


@pytest.mark.slow
async def test_env_test_has_to_pass_for_each() -> None:
    store = open_store()
    store.put_gate(store.environment("second").digest, {"level": 2}, ["gold"])
    error = await refused("train", **MIXED, settings={"mixture": {"second": PART}})
    assert error.code == "gate_failed" and "second@" in error.what
    assert await call("train", **MIXED, settings={"mixture": {"second": {"ratio": 1}}})


def measured(writer: RunWriter, step: int, solved: tuple[int, int]) -> None:
    """An evaluation of 60 tasks of each environment."""
    rows, summary = list[dict[str, Any]](), {"n": 120, "success": sum(solved) / 120, "error_share": 0.0}
    for name, count in zip(("echo", "second"), solved, strict=True):
        summary |= {f"{name}:n": 60, f"{name}:success": count / 60, f"{name}:error_share": 0.0}
        for place in range(60):
            rows.append(sample_rollout(step, len(rows), float(place < count)) | {"task_id": f"{name}/eval-{place}"})
    writer.evaluation(step, summary, rows)


@pytest.mark.slow
async def test_the_run_has_one_headline_and_each_environment_a_verdict(html: Any) -> None:
    run = await mixed_run()
    writer = start(run.id)
    measured(writer, 0, (10, 20))
    read_in(open_store(), run.id)
    view = (await call("status", run_id=run.id))["run"]
    assert view["mixture"] == [
        "echo (25 % of the groups); held out 0.17 of 60 at step 0",
        "second (75 % of the groups); held out 0.33 of 60 at step 0",
    ]
    own = {"echo:success/rate": 0.5, "second:success/rate": 0.1, "second:rollouts/truncated_share": 0.6}
    learn(writer, range(1, 21), **own)
    measured(writer, 20, (50, 21))
    end(writer, run.id, 20)
    view = (await call("status", run_id=run.id))["run"]
    assert view["verdict"]["outcome"] == "improved" and "same 120 tasks" in view["verdict"]["explanation"]
    echo, second = view["mixture"]
    assert echo.startswith(
        "echo (25 % of the groups), success in training 0.50 -> 0.50; held out improved, 0.17 -> 0.83"
    )
    assert "held out no_change" in second or "held out underpowered" in second
    assert "0.33 -> 0.35" in second and "same 60 tasks" in second
    flag = next(flag for flag in view["flags"] if flag["name"] == "truncation")
    assert flag["severity"] == "problem" and flag["evidence"].startswith("second: 60 % of the rollouts")
    page = html(open_store(), run.id)
    assert "echo (25 % of the groups)" in page and "second (75 % of the groups)" in page
    run = open_store().run(run.id)
    assert "'mixture': {'second': {" in going_on(run, 20) and "secrets=['A_KEY']" in going_on(run, 20)
    compared = await call("compare", base=run.id)
    digest = "0123456789abcdef"
    assert compared["base"]["tasks"] == 120 and compared["base"]["environment"] == f"echo@{digest}, second@{digest}"
    assert "several environments" in str(await refused("curate", runs=[run.id], name="d"))
