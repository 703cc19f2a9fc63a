"""Looks at exams: budgets, what counts as spent, and how often an interval is wrong."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from flash_mcp.exam import exams
from flash_mcp.judgement.statistics import ALPHA, difference
from flash_mcp.state import store as stores
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import recovery
from tests.calls import call, refused
from tests.exam.test_exams import PASSPHRASE
from tests.freeze import command
from tests.samples import ENVIRONMENT, end, save_adapter, start, supervised

MODEL = {"environment": "exam:sums", "model": "smollm2-135m-instruct", "wait_s": 0}


@pytest.fixture
def folder(tmp_path: Path, flash_home: Path) -> Path:
    path = tmp_path / "sums"
    path.mkdir()
    (path / "environment.py").write_text(ENVIRONMENT)
    exams.create(flash_home, "sums", path, looks=3, passphrase=PASSPHRASE)
    return path


def finish(run_id: str, **totals: int) -> None:
    writer = start(run_id)
    if totals:
        writer.evaluation(0, totals, [])
    end(writer, run_id, 20, "succeeded" if totals else "failed")


def lose_database(home: Path) -> None:
    for path in home.glob("flash.db*"):
        path.unlink()
    stores._store_at.cache_clear()


async def test_a_budget_of_looks_is_spent_by_totals_alone(folder: Path, flash_home: Path) -> None:
    store = open_store()
    with supervised():
        first = await call("evaluate", **MODEL)
        assert first["created"] and first["tasks"] == 20 and first["state"] == "queued"
        again = await call("evaluate", **MODEL, again=True)
        assert store.run(again["run_id"]).evaluation.tasks != store.run(first["run_id"]).evaluation.tasks
        finish(first["run_id"], tasks=20, solved=15)
        finish(again["run_id"])  # it failed: its tasks serve another look
        found = await call("evaluate", **MODEL)
        assert found["run_id"] == first["run_id"] and not found["created"]
        assert (found["exam"]["look"], found["exam"]["success"]) == ("1 of 3", 0.75)
        second = await call("evaluate", **MODEL, again=True, idempotency_key="k")
        same = await call("evaluate", **MODEL, again=True, idempotency_key="k")
        assert second["run_id"] == same["run_id"] and not same["created"]
        tasks = [store.run(body["run_id"]).evaluation.tasks for body in (again, second)]
        assert tasks[0] == tasks[1]
        finish(second["run_id"], tasks=20, solved=5)
        found = await call("evaluate", **MODEL)
        assert (found["exam"]["look"], found["exam"]["tasks"], found["exam"]["success"]) == ("2 of 3", 40, 0.5)
        other = await call("evaluate", **MODEL, temperature=0.5)
        assert other["created"], "another way to sample is another policy"
        assert command("remove", first["run_id"])[0] == 0
        error = await refused("evaluate", **MODEL, again=True)
        assert error.code == "exam_spent" and "all 3 looks" in error.what
        await call("cancel", run_id=other["run_id"])
        assert (await call("evaluate", **MODEL, again=True))["created"], "a cancelled look is not spent"


async def test_the_exam_decides_its_tasks_and_their_scoring(folder: Path) -> None:
    with supervised():
        for wrong in (
            {"environment_args": {"fail": True}},
            {"secrets": ["X"]},
            {"target": "cluster"},
            {"seed": 3},
            {"task_ids": ["eval-1"]},
            {"limit": 3},
            {"attempts": 4},
            {"split": "train"},
        ):
            error = await refused("evaluate", **MODEL, **wrong)
            assert error.code == "invalid_argument" and next(iter(wrong)) in error.what, error
        assert (await refused("evaluate", **{**MODEL, "environment": "exam:other"})).code == "unknown_exam"


async def test_looks_survive_a_lost_database(folder: Path, flash_home: Path) -> None:
    with supervised():
        first = await call("evaluate", **MODEL)
        finish(first["run_id"], tasks=20, solved=15)
    open_store().close()
    lose_database(flash_home)
    assert recovery.recover(flash_home).runs == [first["run_id"]]
    with supervised():
        found = await call("status", run_id=first["run_id"])
        assert "look 1 of 3: 0.75" in str(found), found
        assert (await call("evaluate", **MODEL, again=True))["created"]
        sql = "SELECT number FROM exam_looks ORDER BY number"
        assert open_store().column(sql) == [1, 2]


async def test_rows_that_ask_what_an_exam_asks_are_counted(
    folder: Path, flash_home: Path, tmp_path: Path, html: Any
) -> None:
    source = ENVIRONMENT.replace("go {n}", "look {n}").replace(
        'input=f"say {n}"', "input=f\"{'go' if n < 7 else 'say'} {n}\""
    )
    rows = tmp_path / "rows.jsonl"
    lines = [{"question": f"{'Go' if n < 5 else 'tell'} {n}!", "answer": str(n)} for n in range(30)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    looked = {"environment": "mine", "steps": 2, "validate_only": True}
    with supervised():
        await call("env_push", name="mine", files={"environment.py": source})
        assert "exam:sums is locked" in str((await call("train", **looked))["notes"])
        exams.unlock(flash_home, "sums", PASSPHRASE)
        assert "7 rows ask what exam:sums asks" in str((await call("train", **looked))["notes"])
        curated = await call("curate", runs=[str(rows)], dry_run=True)
        assert "CONTAMINATED: 5 rows" in str(curated["notes"]) and "go " not in str(curated["notes"])
        await call("curate", runs=[str(rows)], name="rows")
        for given in ({"environment": "mine"}, {}):
            sft = await call("train", **given, algorithm="sft", dataset="rows", validate_only=True)
            assert "CONTAMINATED: 5 rows" in str(sft["notes"]), given
        run = await call("train", environment="mine", steps=2)
        assert open_store().run(run["run_id"]).lineage["exam_rows"] == {"sums": 7}
        writer = start(run["run_id"])
        save_adapter(writer, 2, tmp_path)
        end(writer, run["run_id"], 2)
        look = await call("evaluate", **{**MODEL, "model": run["run_id"]})
        finish(look["run_id"], tasks=20, solved=18, base_solved=2, wins=17, losses=1)
        found = (await call("evaluate", **{**MODEL, "model": run["run_id"]}))["exam"]
        assert found["verdict"] == "better" and "7 rows" in found["contaminated"] and found["base"] == 0.1
        for page in (await call("status", run_id=run["run_id"]), html(open_store(), run["run_id"])):
            assert "look 1 of 3: 0.90" in str(page) and "CONTAMINATED" in str(page)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.9])
def test_an_agent_that_picks_by_its_looks_is_rarely_wrong(truth: float) -> None:
    """Ten looks at ten models of one true success, of tasks of few templates: the best look is reported."""
    draw, misses, looks, exams_drawn = random.Random(0), 0, 10, 150
    for _ in range(exams_drawn):
        hard = [draw.random() < truth for _ in range(20)]
        tasks = [hard[place % 20] if draw.random() < 0.5 else draw.random() < truth for place in range(200)]
        draw.shuffle(tasks)
        mean, wrong = fmean(tasks), False
        for look in range(looks):
            solved = sum(tasks[look * 20 : look * 20 + 20])
            around = difference(solved, 20 - solved, 0, ALPHA / (2 * looks))
            wrong |= not around.low <= 2 * mean - 1 <= around.high
        misses += wrong
    assert misses <= 0.05 * exams_drawn
