"""What a run says of other kinds of tasks, and the ledger; no worker runs."""

from pathlib import Path
from typing import Any

import pytest

from flash_mcp.state import queue, references
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.references import REGRESSION_FOLDER
from flash_mcp.state.store import open_store
from tests.calls import call
from tests.samples import end, evaluate, learn, push_echo, queued_run, read_in, save_adapter, start, started_run

pytestmark = pytest.mark.usefixtures("no_supervisor")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "on: 240 short tasks before and after, 480 rollouts beside 4"),
        ({"steps": 10}, "off: 120 short tasks before and after are 240 rollouts beside 320; regression='on' tries all"),
        ({"steps": 10, "settings": {"regression": "on"}}, "on: 311 short tasks before and after, 622 rollouts"),
        ({"settings": {"regression": "off"}}, None),
        ({"algorithm": "sft"}, "on: 120 short tasks before and after, for which an engine starts; of 33 %"),
        ({"algorithm": "sft", "settings": {"regression": "off"}}, None),
        ({"algorithm": "sft", "settings": {"eval_after": True}}, "on: 120 short tasks before and after"),
        ({"algorithm": "sft", "steps": 10, "settings": {"regression": "on"}}, "on: 311 short tasks"),
    ],
)
async def test_the_split_is_tried_where_it_costs_little_or_where_it_is_asked_for(
    tmp_path: Path, fields: dict[str, object], says: str | None
):
    push_echo(tmp_path)
    estimate = (await call("train", environment="echo", validate_only=True, **fields))["estimate"]
    assert estimate.get("regression", "").startswith(says or "") and ("regression" in estimate) == (says is not None)
    run = open_store().run((await call("train", environment="echo", **fields))["run_id"])
    split = queue.job(run)["regression"]
    assert (split is not None) == (says is not None and says.startswith("on"))
    if split:
        tasks = int(str(says).split()[1])
        assert split == {"name": "regression", "path": str(REGRESSION_FOLDER), "owner": "local", "tasks": tasks}


def test_an_environment_of_that_name_replaces_the_packages(tmp_path: Path, flash_home: Path):
    store = open_store()
    packaged = references.environment(store, "regression")
    assert references.environment(store, "regression") == packaged and Path(packaged.path, "environment.py").is_file()
    assert references.regression_split(store)["path"] == str(REGRESSION_FOLDER)
    with acting_as(Caller("ann")):
        theirs = push_echo(tmp_path / "ann", name="regression")
        assert references.regression_split(store)["path"] == theirs.path
        assert references.environment(store, "regression").path == theirs.path
    assert references.regression_split(store)["path"] == str(REGRESSION_FOLDER)
    own = push_echo(tmp_path / "own", name="regression")
    assert references.environment(store, "regression") == store.environment("regression") == own
    assert references.regression_split(store) == {"name": "regression", "path": own.path, "owner": "local"}


@pytest.mark.parametrize(("solved", "outlook"), [(25, "no: worse_elsewhere: "), (90, "doubtful: the held-out ")])
async def test_what_was_forgotten_is_said_by_status_and_by_the_page(
    tmp_path: Path, solved: int, outlook: str, html: Any
):
    run, writer = started_run(tmp_path / "e")
    before = {f"spelling-{n:02}": True for n in range(30)} | {f"arithmetic-{n:02}": False for n in range(70)}
    writer.event("regression", "solved 30 of 100 regression tasks", step=0, outcomes=before)
    read_in(open_store(), run.id)
    seen = (await call("status", run_id=run.id))["run"]
    assert seen["regression"] == "0.30 of 100 other tasks before training; a loss of 48 % of what it solves is seen"
    after = before | {f"spelling-{n:02}": False for n in range(12)}
    evaluate(writer, 0, 20)
    learn(writer, range(1, 21))
    save_adapter(writer, 20, tmp_path)
    evaluate(writer, 20, solved)
    writer.event("regression", "solved 18 of 100 regression tasks", step=20, outcomes=after)
    end(writer, run.id, 20)
    body = await call("status", run_id=run.id)
    seen = body["run"]["regression"]
    assert seen.startswith("regressed on 100 other tasks, 0.30 -> 0.18: -0.120, 95 % interval")
    assert "exact McNemar test" in seen and seen.endswith("no longer solved: spelling 12")
    assert body["run"]["outlook"].startswith(outlook)
    assert [flag["name"] for flag in body["run"]["flags"]] == ["worse_elsewhere"]
    assert body["next"].startswith("worse_elsewhere: train again") and ("deploy(" in body["next"]) == (solved == 90)
    assert (await call("checkpoints", run_id=run.id))["next"].startswith("worse_elsewhere: ")
    compared = await call("compare", base=run.id)
    is_better = compared["verdict"] == "improved"
    assert is_better == (solved == 90) and compared["notes"][0].startswith("worse_elsewhere: other regressed on 100")
    assert compared["next"].startswith("worse_elsewhere: status(" if is_better else "claim no change")
    page = html(open_store(), run.id)
    assert "Elsewhere: regressed on 100 other tasks" in page and ", worse at other kinds of tasks" in page


async def test_the_page_shows_the_spread_over_seeds(tmp_path: Path, html: Any):
    push_echo(tmp_path / "e")
    body = await call("train", environment="echo", seeds=[1, 2], steps=10)
    assert "Seeds: 2 seeds, none with a held-out success yet" in html(open_store(), body["run_id"])


async def test_the_ledger_adds_up_by_day_and_by_name(tmp_path: Path, flash_home: Path):
    store = open_store()
    days = [1_790_000_000.0, 1_790_000_100.0, 1_790_100_000.0]
    for number, (day, name) in enumerate(zip(days, ("sums", "sums", None), strict=True)):
        run = queued_run(tmp_path / "e", seed=number)
        queue.label(store, run, queue.Label(name))
        start(run.id)
        store.execute("UPDATE main.runs SET started = ?, used_s = ? WHERE id = ?", [day, 1800 * (number + 1), run.id])
    flash_home.joinpath("settings.toml").write_text('[cost]\nprice_per_hour = 2.0\ncurrency = "EUR"\n')
    ledger = (await call("catalog", kind="ledger"))["ledger"]
    assert ledger == [
        {"name": "2026-09-22", "runs": 1, "hours": 1.5, "cost": "3.00 EUR"},
        {"name": "2026-09-21", "runs": 2, "hours": 1.5, "cost": "3.00 EUR"},
        {"name": "sums", "runs": 2, "hours": 1.5, "cost": "3.00 EUR"},
        {"name": "without a name", "runs": 1, "hours": 1.5, "cost": "3.00 EUR"},
    ]
    assert "ledger" not in await call("catalog")
    assert [row["name"] for row in (await call("catalog", kind="ledger", contains="sum"))["ledger"]] == ["sums"]
