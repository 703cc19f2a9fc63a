"""What the tools say of a run's health: contaminated splits, failure modes, lineage, and the detailed status."""

import os
from pathlib import Path

import pytest

from flash_mcp import __version__
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.state import queue
from flash_mcp.state.queue import code_version
from flash_mcp.state.serving import request
from flash_mcp.state.store import open_store
from flash_mcp.tools.curate import read_attempts
from tests.calls import call
from tests.places import ROOT
from tests.samples import (
    ENVIRONMENT,
    end,
    evaluate,
    finished_run,
    learn,
    push_echo,
    read_in,
    sample_rollout,
    save_adapter,
    started_run,
)

pytestmark = pytest.mark.usefixtures("no_supervisor")

SAME_QUESTIONS = ENVIRONMENT.replace('f"go {n}"', 'f"say {n}"')
SAME_IDS = ENVIRONMENT.replace('f"eval-{n}"', 'f"train-{n}"')


def environment_folder(folder: Path, code: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text(code)
    return folder


def work_on(run_id: str) -> RunWriter:
    """Be the worker of a queued run."""
    store = open_store()
    run = queue.claim(store)
    assert run is not None and run.id == run_id
    folder = RunFolder(run.folder)
    folder.create(queue.job(run))
    queue.mark_running(store, run_id, run.attempt)
    return RunWriter(folder, run.attempt)


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

    writer = work_on(started["run_id"])
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
        for start in (
            {"init_from_adapter": f"{run.id}@{step}"},
            {"algorithm": "distill", "teacher": f"{run.id}@{step}"},
        ):
            notes = (await call("train", environment="echo", steps=20, validate_only=True, **start))["notes"]
            said = [
                note for note in notes if note.startswith(f"{[*start][-1]}={run.id}@{step} is flagged destroyed_model")
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
    assert "CONTAMINATED" not in str(started)
    assert "overlap" not in open_store().run(started["run_id"]).lineage


async def test_failure_modes_are_counted_by_status_and_named_by_rollouts(tmp_path: Path):
    run, writer = started_run(tmp_path)
    texts = ["", "so " * 100, "nothing", "The answer is 84."]
    rows = [sample_rollout(1, index, 0.9 if index == 3 else 0.0, text) for index, text in enumerate(texts)]
    writer.rollouts(1, rows)
    read_in(open_store(), run.id)
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
    run, writer = started_run(tmp_path)
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
    writer.rollouts(1, rows)
    read_in(open_store(), run.id)
    page = await call("rollouts", run_id=run.id, which="best", limit=2)
    assert page["failures"] == {"bad_tool_call": 1}
    assert page["tools"] == ["add(a: integer, unit?: m|s) Adds 3."]
    assert all(6 < each["expected"].count("6") < 300 for each in page["rollouts"])
    shown = [(each["role"], each["content"]) for each in page["rollouts"][0]["messages"]]
    assert shown[-3:] == [("assistant", 'add({"a": 3})'), ("tool", "6"), ("assistant", "6")]
    (attempt,) = [each for each in read_attempts(open_store().run(run.id)) if each.success]
    assert attempt.row()["tools"] == tools
    assert attempt.row()["messages"] == rows[1]["messages"]
    assert attempt.answers == ['add({"a": 3})', "6"]


async def test_the_detailed_form_has_every_metric_and_where_the_run_comes_from(tmp_path: Path):
    earlier = finished_run(tmp_path)
    started = await call("train", environment="echo", init_from_adapter=f"{earlier.id}@10")
    learn(work_on(started["run_id"]), range(1, 21))
    read_in(open_store(), started["run_id"])
    view = (await call("status", run_id=started["run_id"], detail="detailed"))["run"]
    assert view["metrics"]["reward/mean"].startswith("0.2057 -> ")
    assert set(view["metrics"]) >= {"loss", "entropy", "grad_norm", "tokens/completion_mean"}
    assert view["sources"]["argument"] == ["environment", "init_from_adapter"]
    assert view["sources"]["adapter"] == ["lora_rank", "lora_alpha"]
    lineage = view["lineage"]
    assert (lineage["parent"], lineage["environment"]) == (f"{earlier.id}@10", "echo@0123456789abcdef")
    assert lineage["parent_digest"] == open_store().checkpoint(earlier.id, 10).digest
    assert lineage["code"] == code_version()
    concise = (await call("status", run_id=started["run_id"]))["run"]
    assert not {"metrics", "lineage", "failures", "sources"} & set(concise)


async def test_the_code_version_names_the_commit_of_a_checkout_and_reaches_the_worker(tmp_path: Path):
    assert code_version().startswith(__version__)
    root = ROOT
    described = os.system(f"git -C '{root}' rev-parse HEAD >/dev/null 2>&1") == 0  # noqa: ASYNC221
    if (root / ".git").exists() and described:
        assert "+g" in code_version()
    run, writer = started_run(tmp_path)
    assert writer.folder.job()["lineage"] == run.lineage
    assert run.lineage["code"] == code_version()


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
        assert later.model == "someone/some-model"
        assert queue.job(later)["lineage"]["model_commit"] == commit
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
