"""What the tools say of a run's health: contaminated splits, failure modes, lineage, and the detailed status."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flash_mcp import __version__
from flash_mcp.cli import main
from flash_mcp.judgement.labels import NO_LABEL
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.state import queue, references
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.queue import code_version
from flash_mcp.state.references import REGRESSION_FOLDER
from flash_mcp.state.serving import request
from flash_mcp.state.store import open_store
from flash_mcp.tools.curate import read_attempts
from flash_mcp.tools.shared.run_view import headline, view_of
from tests.calls import call
from tests.places import ROOT
from tests.samples import (
    ENVIRONMENT,
    end,
    evaluate,
    finished_run,
    learn,
    push_echo,
    queued_run,
    read_in,
    rolled_out,
    sample_rollout,
    save_adapter,
    start,
    started_run,
)

pytestmark = pytest.mark.usefixtures("no_supervisor")

SAME_QUESTIONS = ENVIRONMENT.replace('f"go {n}"', 'f"say {n}"')
SAME_IDS = ENVIRONMENT.replace('f"eval-{n}"', 'f"train-{n}"')


def environment_folder(folder: Path, code: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text(code)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "evidence"),
    [(SAME_QUESTIONS, "40 ask what a train task asks"), (SAME_IDS, "40 have the id of a train task")],
    ids=["same question", "same id"],
)
async def test_a_contaminated_split_is_said_wherever_it_is_seen(tmp_path: Path, code: str, evidence: str):
    folder = environment_folder(tmp_path / "echo", code)
    tested = await call("env_test", folder=str(folder))
    assert [evidence in probe["evidence"] for probe in tested["probes"] if probe["name"] == "tasks"] == [True]
    assert not tested["passed"]

    pushed = await call("env_push", name="echo", folder=str(folder))
    assert pushed["contaminated"].startswith("CONTAMINATED: 40 of 60 eval tasks") and evidence in pushed["contaminated"]
    assert "train(" not in pushed["next"]

    started = await call("train", environment="echo", steps=20, accept_failed_gate=True)
    assert started["notes"][0].startswith("CONTAMINATED: 40 of 60 eval tasks")

    writer = start(started["run_id"])
    evaluate(writer, 0, 20)
    learn(writer, range(1, 21))
    save_adapter(writer, 20, tmp_path)
    evaluate(writer, 20, 90)
    writer.commit_result("succeeded", 20)
    read_in(open_store(), started["run_id"])
    queue.finish(open_store(), started["run_id"], 1, "succeeded", step=20)
    body = await call("status", run_id=started["run_id"])
    verdict, flag = body["run"]["verdict"], body["run"]["flags"][0]
    assert verdict["outcome"] == "contaminated"
    assert verdict["explanation"].startswith("CONTAMINATED: 40 of 60 eval tasks are train tasks too")
    assert evidence in verdict["explanation"]
    assert (flag["name"], flag["severity"]) == ("contaminated_split", "problem")
    assert body["run"]["outlook"].startswith("no: contaminated_split")
    assert "deploy" not in body["next"] and "env_push" in body["next"]

    compared = await call("compare", base=started["run_id"])
    assert (compared["verdict"], compared["success"]["outcome"]) == ("contaminated", "improved")
    assert compared["notes"][0].startswith("CONTAMINATED: 40 of 60 eval tasks") and "env_push" in compared["next"]
    for model, spoiled in ((f"{started['run_id']}@20", True), (f"{started['run_id']}@0", False)):
        notes = (await call("evaluate", model=model, wait_s=0)).get("notes", [])
        assert any(note.startswith("CONTAMINATED: 40 of 60 eval tasks") for note in notes) == spoiled
    other = {"model": f"{started['run_id']}@20", "environment_args": {"fail": False}, "wait_s": 0}
    assert "CONTAMINATED" not in str((await call("evaluate", **other)).get("notes"))


@pytest.mark.slow
async def test_base_models_that_were_never_trained_are_compared_on_a_contaminated_split(tmp_path: Path):
    pushed = await call("env_push", name="echo", folder=str(environment_folder(tmp_path / "echo", SAME_IDS)))
    trained = (await call("train", environment="echo", steps=20, accept_failed_gate=True))["run_id"]
    evaluated: list[str] = []
    for model, solved in (("smollm2-135m-instruct", 20), ("smollm2-360m-instruct", 90)):
        run_id = (await call("evaluate", environment=pushed["environment"], model=model, wait_s=0))["run_id"]
        rows = [sample_rollout(0, index * 4, float(index < solved)) for index in range(100)]
        summary = {"n": 100, "success": solved / 100, "reward_mean": solved / 100, "error_share": 0.0}
        body = {"step": 0, "epoch": 1, "time": 1.0, "summary": summary, "rollouts": rows}
        for each in (run_id, trained):  # before training, too, it is a base model
            open_store().put_evaluation(each, body)
        evaluated.append(run_id)
    for base, other in (evaluated, (evaluated[0], f"{trained}@0")):
        compared = await call("compare", base=base, other=other)
        assert compared["verdict"] == "improved" and "CONTAMINATED" not in str(compared)


async def test_a_destroyed_model_is_said_of_its_run_and_before_one_that_starts_from_it(tmp_path: Path):
    values = {"algorithm": "sft", "learning_rate": 0.5}
    run, writer = started_run(tmp_path / "environment", **values)
    evaluate(writer, 0, 20)
    known = {"frequencies/loss": 2.5}
    learn(writer, range(1, 11), **known)
    save_adapter(writer, 10, tmp_path)
    learn(writer, range(11, 21), **known, loss=9.0)
    save_adapter(writer, 20, tmp_path)
    evaluate(writer, 20, 0)
    end(writer, run.id, 20)
    ended = (await call("status", run_id=run.id))["run"]
    assert ended["verdict"]["outcome"] == "destroyed" and ended["outlook"].startswith("no: destroyed_model")
    assert ended["verdict"]["explanation"].startswith("DESTROYED: the loss is 9, from 0.01: no better than")
    for step, spoiled in ((10, False), (20, True)):
        for given in (
            {"init_from_adapter": f"{run.id}@{step}"},
            {"algorithm": "distill", "teacher": f"{run.id}@{step}"},
        ):
            notes = (await call("train", environment="echo", steps=20, validate_only=True, **given))["notes"]
            said = [
                note for note in notes if note.startswith(f"{[*given][-1]}={run.id}@{step} is flagged destroyed_model")
            ]
            assert bool(said) == spoiled and all("take an earlier checkpoint" in note for note in said), notes


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.5, "1000 times the 0.0005"), (0.005, "10 times"), (0.0005, ""), (1e-7, "little will be learnt")],
)
async def test_a_rate_far_from_those_that_moved_models_is_said_before_the_run(tmp_path: Path, rate: float, said: str):
    push_echo(tmp_path / "echo")
    started = await call("train", environment="echo", algorithm="sft", learning_rate=rate, validate_only=True)
    about = [note for note in started.get("notes", ()) if "learning_rate" in note]
    assert [said in note for note in about] == [True] * bool(said), about


async def test_a_clean_split_is_not_spoken_of(tmp_path: Path):
    folder = environment_folder(tmp_path / "echo", ENVIRONMENT)
    assert "contaminated" not in await call("env_push", name="echo", folder=str(folder))
    started = await call(
        "train", environment="echo", steps=20, eval_before=True, eval_after=True, accept_failed_gate=True
    )
    assert "CONTAMINATED" not in str(started) and "overlap" not in open_store().run(started["run_id"]).lineage


async def test_failure_modes_are_counted_by_status_and_named_by_rollouts(tmp_path: Path):
    texts = ["", "so " * 100, "nothing", "The answer is 84."]
    rows = [sample_rollout(1, index, 0.9 if index == 3 else 0.0, text) for index, text in enumerate(texts)]
    run = rolled_out(tmp_path, rows)
    expected = {"empty": 1, "looping": 1, "wrong": 1}
    assert (await call("status", run_id=run.id, detail="detailed"))["run"]["failures"] == expected
    assert "failures" not in (await call("status", run_id=run.id))["run"]
    page = await call("rollouts", run_id=run.id, which="index", limit=4)
    assert page["failures"] == expected
    assert [each.get("failure") for each in page["rollouts"]] == ["empty", "looping", "wrong", None]
    everywhere = await call("rollouts", run_id=run.id, step=-1, which="index", limit=4)
    assert [each.get("failure") for each in everywhere["rollouts"]] == ["empty", "looping", "wrong", None]
    assert "failures" not in everywhere


async def test_tool_calls_are_shown_with_their_results_and_curated_with_their_tools(tmp_path: Path):
    function = {"name": "add", "arguments": '{"a": 3}'}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    properties = {"a": {"type": "integer"}, "unit": {"enum": ["m", "s"]}}
    body = {"name": "add", "description": "Adds\n3.", "parameters": {"properties": properties, "required": ["a"]}}
    tools = [{"type": "function", "function": body}]
    rows = [{**sample_rollout(1, index, float(index)), "expected": "6" * 500} for index in range(2)]
    rows[1] |= {"turns": 2, "tools": tools}
    rows[1]["messages"] = [
        {"role": "user", "content": "3 and 3?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call00000", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
    rows[0] |= {"turns": 1, "tools": tools}
    rows[0]["messages"][-1] |= {"content": "<tool_call>", "bad_tool_call": "it does not parse"}
    run = rolled_out(tmp_path, rows)
    page = await call("rollouts", run_id=run.id, which="best", limit=2)
    assert page["failures"] == {"bad_tool_call": 1} and page["tools"] == ["add(a: integer, unit?: m|s) Adds 3."]
    assert all(6 < each["expected"].count("6") < 300 for each in page["rollouts"])
    shown = [(each["role"], each["content"]) for each in page["rollouts"][0]["messages"]]
    assert shown[-3:] == [("assistant", 'add({"a": 3})'), ("tool", "6"), ("assistant", "6")]
    (attempt,) = [each for each in read_attempts(open_store().run(run.id)) if each.success]
    assert attempt.row()["tools"] == tools and attempt.row()["messages"] == rows[1]["messages"]
    assert attempt.answers == ['add({"a": 3})', "6"]


async def test_the_detailed_form_has_every_metric_and_where_the_run_comes_from(tmp_path: Path):
    earlier = finished_run(tmp_path)
    started = await call("train", environment="echo", init_from_adapter=f"{earlier.id}@10")
    learn(start(started["run_id"]), range(1, 21))
    read_in(open_store(), started["run_id"])
    view = (await call("status", run_id=started["run_id"], detail="detailed"))["run"]
    assert view["metrics"]["reward/mean"].startswith("0.2057 -> ")
    assert set(view["metrics"]) >= {"loss", "entropy", "grad_norm", "tokens/completion_mean"}
    assert view["sources"]["argument"] == ["environment", "init_from_adapter"]
    assert view["sources"]["adapter"] == ["lora_rank", "lora_alpha"]
    lineage = view["lineage"]
    assert (lineage["parent"], lineage["environment"]) == (f"{earlier.id}@10", "echo@0123456789abcdef")
    assert lineage["parent_digest"] == open_store().checkpoint(earlier.id, 10).digest
    assert lineage["code"] == code_version() and code_version().startswith(__version__)
    described = os.system(f"git -C '{ROOT}' rev-parse HEAD >/dev/null 2>&1") == 0  # noqa: ASYNC221
    assert ("+g" in code_version()) >= ((ROOT / ".git").exists() and described)
    assert queue.job(open_store().run(started["run_id"]))["lineage"]["code"] == code_version()
    concise = (await call("status", run_id=started["run_id"]))["run"]
    assert not {"metrics", "lineage", "failures", "sources"} & set(concise)


@pytest.mark.slow
async def test_what_builds_on_a_run_uses_the_same_commit_of_its_hub_model(tmp_path: Path):
    commit, store = "c0ffee" + "0" * 34, open_store()
    pinned = f"someone/some-model@{commit}"
    fields = {"model": "someone/some-model", "max_length": 64}
    run, writer = started_run(tmp_path / "environment", **fields)
    writer.event("model", "as the worker says", commit=commit)
    save_adapter(writer, 20, tmp_path)
    end(writer, run.id, 20)
    view = (await call("status", run_id=run.id, detail="detailed"))["run"]
    assert view["lineage"]["model"] == pinned

    assert request(store, run.id).model == pinned
    warm = await call("train", environment="echo", init_from_adapter=f"{run.id}@20", **fields)
    evaluations = [await call("evaluate", model=f"{run.id}@{step}", wait_s=0, limit=1) for step in (0, 20)]
    for made in (warm, *evaluations):
        later = store.run(made["run_id"])
        assert later.model == "someone/some-model" and queue.job(later)["lineage"]["model_commit"] == commit
        view = (await call("status", run_id=later.id, detail="detailed"))["run"]
        assert view["lineage"]["model"] == pinned

    other = "someone/some-model@" + "a" * 40
    with pytest.raises(FlashError, match="adapter_mismatch"):
        await call("train", environment="echo", init_from_adapter=run.id, **{**fields, "model": other})
    same = await call("train", environment="echo", init_from_adapter=run.id, **{**fields, "model": pinned})
    assert store.run(same["run_id"]).model == pinned


async def test_a_store_made_before_lineage_was_kept_is_read(tmp_path: Path):
    run = finished_run(tmp_path)
    open_store().execute("UPDATE runs SET lineage = '{}' WHERE id = ?", [run.id])
    view = (await call("status", run_id=run.id, detail="detailed"))["run"]
    assert "code" not in view["lineage"] and view["verdict"]["outcome"] == "improved"


GOLDS = ["ship"] * 30 + ["bill"] * 24 + ["log in"] * 6


def labelled(step: int, answers: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, (gold, answer) in enumerate(zip(GOLDS, answers, strict=True)):
        row = sample_rollout(step, index, float(gold == answer), f"I think <answer>{answer}</answer>")
        rows.append({**row, "task_id": f"eval-{index}", "expected": gold, "split": "eval"})
    return rows


async def test_results_are_shown_by_label_wherever_an_evaluation_is(tmp_path: Path, html: Any):
    folder = tmp_path / "echo"
    (folder / "datasets").mkdir(parents=True)
    words = {"ship": "my parcel is late", "bill": "the invoice is wrong", "log in": "i lost my password"}
    for split, count in (("train", 20), ("eval", 4)):
        rows = [{"input": f"{text} {n}", "output": label} for label, text in words.items() for n in range(count)]
        (folder / "datasets" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    push_echo(folder)
    run, writer = started_run(folder)
    answers = {0: ["ship"] * 60, 20: ["ship"] * 30 + ["bill"] * 20 + ["ship"] * 3 + ["what?"] + ["bill"] * 6}
    for step, said in answers.items():
        rows = labelled(step, said)
        share = sum(row["success"] for row in rows) / 60
        writer.evaluation(step, {"n": 60, "success": share, "reward_mean": share, "error_share": 0.0}, rows)
    read_in(open_store(), run.id)
    end(writer, run.id, 20)

    view = (await call("status", run_id=run.id))["run"]
    found = view["by_label"]
    assert "counting words does as well" in view["verdict"]["explanation"]
    worst = found["labels"][0]
    assert (worst["label"], worst["n"], worst["right"], worst["taken_for"]) == ("log in", 6, 0.0, {"bill": 6})
    bill = next(row for row in found["labels"] if row["label"] == "bill")
    assert bill["taken_for"] == {"ship": 3, NO_LABEL: 1}
    assert found["few"] == "fewer than 20 tasks: log in 6"
    assert found["balanced"] == pytest.approx((1 + 20 / 24 + 0) / 3, abs=1e-3)
    assert "by words: 100 % of the 12 eval rows" in found["baseline"]

    compared = await call("compare", base=run.id)
    assert [compared[side]["by_label"]["step"] for side in ("base", "other")] == [0, 20]
    assert compared["other"]["by_label"]["labels"] == found["labels"]
    page = html(open_store(), run.id)
    assert "By label" in page and "bill 6" in page and found["baseline"] in page


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


def peaked_run(folder: Path, last: int | None = 80, **fields: object) -> Run:
    """A run whose held-out success was 20 % before, 95 % at step 10, and `last` at its end."""
    run, writer = started_run(folder / "environment", **fields)
    evaluate(writer, 0, 20)
    learn(writer, range(1, 21))
    save_adapter(writer, 10, folder)
    evaluate(writer, 10, 95)
    save_adapter(writer, 20, folder)
    if last is not None:
        evaluate(writer, 20, last)
    return end(writer, run.id, 20)


def test_the_terminal_names_the_best_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", peaked_run(tmp_path).id]) == 0
    assert "best  checkpoint 10: 0.950" in capsys.readouterr().out


async def test_the_best_checkpoint_is_named_and_served_where_it_is_not_the_newest(tmp_path: Path) -> None:
    run = peaked_run(tmp_path)
    report = await call("status", run_id=run.id)
    assert report["run"]["best"] == "checkpoint 10: 0.950 held-out success, 0.800 at the newest, 20"
    assert report["run"]["verdict"]["outcome"] == "improved"  # of the newest: the best was chosen by looking
    assert report["next"].startswith(f"deploy(run_id={run.id!r}, step=10), then chat")
    listed = await call("checkpoints", run_id=run.id)
    assert f"deploy(run_id={run.id!r}, step=10) serves the best, checkpoint 10: 0.950" in listed["next"]

    values = {"owner": run.owner, "name": "mine", "model": run.model, "run_id": run.id, "state": "ready"}
    open_store().add_deployment({**values, "id": "dep-newest", "step": 20})
    assert (await call("status", run_id=run.id))["next"].startswith("deploy(")
    open_store().add_deployment({**values, "id": "dep-best", "step": 10})
    said = (await call("status", run_id=run.id))["next"]
    assert said == "chat(deployment='dep-best', side_by_side=true) shows the base too"


async def test_a_run_that_got_worse_again_leads_to_its_best_checkpoint(tmp_path: Path) -> None:
    run = peaked_run(tmp_path, last=20)
    report = await call("status", run_id=run.id)
    assert report["run"]["verdict"]["outcome"] != "improved"
    assert f"deploy(run_id={run.id!r}, step=10) serves the best checkpoint" in report["next"]


async def test_a_model_that_says_no_more_than_one_constant_answer_is_not_deployed(tmp_path: Path) -> None:
    run, writer = started_run(tmp_path / "environment", algorithm="sft")
    evaluate(writer, 0, 0)
    learn(writer, range(1, 21))
    save_adapter(writer, 20, tmp_path)
    evaluate(writer, 20, 40, constant_success=0.4, constant_n=100)
    run = end(writer, run.id, 20)
    report = await call("status", run_id=run.id)
    assert report["run"]["verdict"]["outcome"] == "constant"
    assert "BUT it is no better than" in report["run"]["verdict"]["explanation"]
    assert "deploy" not in report["next"] and "which='worst', split='eval'" in report["next"]
    assert (await call("status"))["runs"][0]["verdict"] == "constant"
    compared = await call("compare", base=f"{run.id}@0", other=run.id)
    assert compared["verdict"] == compared["success"]["outcome"] == "constant"
    assert "deploy" not in compared["next"]


@pytest.mark.parametrize("last", [95, 99])
async def test_no_best_is_named_where_it_is_the_newest(tmp_path: Path, last: int) -> None:
    assert "best" not in (await call("status", run_id=peaked_run(tmp_path, last).id))["run"]


@pytest.mark.parametrize("measured", [True, False])
async def test_what_a_cancelled_run_shows_was_measured_of_it(tmp_path: Path, measured: bool) -> None:
    run, writer = started_run(tmp_path / "environment", eval_before=True)
    evaluate(writer, 0, 20)
    learn(writer, range(1, 13))
    save_adapter(writer, 10, tmp_path)
    save_adapter(writer, 12, tmp_path)
    if measured:
        evaluate(writer, 10, 95)
        read_in(open_store(), run.id)
        assert "best" not in (await call("status", run_id=run.id))["run"]
    run = end(writer, run.id, 12, "cancelled")
    report = await call("status", run_id=run.id)
    (line,) = (await call("status"))["runs"]
    shown = headline(view_of(open_store(), run.id))
    if measured:
        assert report["run"]["best"] == "checkpoint 10: 0.950 held-out success; the newest, 12, has none"
        assert f"deploy(run_id={run.id!r}, step=10) serves it" in report["next"]
        assert line["success"] == 0.95 and shown == "20 % → 95 % of 100 held-out tasks: improved"
    else:
        assert "best" not in report["run"] and "success" not in line
        assert shown == "20 % of 100 held-out tasks before training: cancelled"


async def test_the_highest_of_equal_evaluations_is_no_best(tmp_path: Path) -> None:
    run, writer = started_run(tmp_path / "environment", eval_every=2)
    evaluate(writer, 0, 50)
    for step, solved in ((2, 48), (4, 52), (6, 57), (8, 49), (10, 50)):
        learn(writer, (step - 1, step))
        save_adapter(writer, step, tmp_path)
        evaluate(writer, step, solved)
    run = end(writer, run.id, 10)
    report = await call("status", run_id=run.id)
    assert "best" not in report["run"] and "step=6" not in report["next"]
    assert "step=6" not in (await call("checkpoints", run_id=run.id))["next"]


@pytest.mark.parametrize(("solved", "outcome"), [(45, "improved"), (37, "underpowered")])
async def test_each_look_at_a_run_under_way_is_judged_more_strictly(tmp_path: Path, solved: int, outcome: str) -> None:
    run, writer = started_run(tmp_path / "environment", eval_every=5)
    for step, count in ((0, 30), (5, 30), (10, solved)):
        evaluate(writer, step, count)
    read_in(open_store(), run.id)
    under_way = (await call("status", run_id=run.id))["run"]["verdict"]
    assert under_way["outcome"] == outcome and "judged at 0.05 / 6" in under_way["explanation"]
    end(writer, run.id, 10)
    verdict = (await call("status", run_id=run.id))["run"]["verdict"]
    assert verdict["outcome"] == "improved" and "judged at" not in verdict["explanation"]


async def test_a_deadline_says_of_how_many_steps_it_made_which_the_last(tmp_path: Path) -> None:
    run, writer = started_run(tmp_path, steps=400, finish_by="25 min")
    learn(writer, range(1, 4))
    open_store().execute("UPDATE main.runs SET steps = 16 WHERE id = ?", [run.id])
    under_way = (await call("status", run_id=run.id))["run"]
    assert (under_way["steps"], under_way["last_step"]) == (16, "finish_by=25 min: about 16 of 400 steps fit")
    writer.event("last_step", "finish_by=25 min: step 3 is the last, of up to 400")
    end(writer, run.id, 3)
    report = (await call("status", run_id=run.id))["run"]
    assert report["last_step"] == "finish_by=25 min: step 3 is the last, of up to 400"


async def test_compare_says_in_which_settings_the_two_runs_were_trained_differently(tmp_path: Path) -> None:
    one = peaked_run(tmp_path / "one", learning_rate=1e-4)
    other = peaked_run(tmp_path / "other", learning_rate=3e-4, seed=7)
    notes = (await call("compare", base=one.id, other=other.id))["notes"]
    assert f"{one.id} and {other.id} were trained with learning_rate 0.0001 and 0.0003; seed 0 and 7" in notes
    within = await call("compare", base=one.id)
    assert not any("were trained with" in note for note in within.get("notes", ()))
