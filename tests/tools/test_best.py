"""Which checkpoint is best, and what a deadline made of a run, as results say it."""

from pathlib import Path

import pytest

from flash_mcp.cli import main
from flash_mcp.protocol.records import Run
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.headline import headline
from flash_mcp.tools.shared.run_view import view_of
from tests.calls import call
from tests.samples import end, evaluate, learn, read_in, save_adapter, started_run


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
    run = peaked_run(tmp_path, last)
    assert "best" not in (await call("status", run_id=run.id))["run"]


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
