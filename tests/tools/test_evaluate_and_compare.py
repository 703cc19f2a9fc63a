"""evaluate, compare and the sample before training, through a real MCP client; a scripted worker makes the attempts."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from flash_mcp.judgement import statistics
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import resolve, validate
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import process
from flash_mcp.tools.training import run_time
from tests.calls import call_over as call
from tests.calls import refusal
from tests.folders import environment_folder
from tests.samples import ECHO, ENVIRONMENT, end, evaluate, finished_run, push_echo, read_in, save_adapter, started_run
from tests.scripted_supervisor import let_go

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("supervisor")]


@pytest.fixture
def run(supervisor: object, tmp_path: Path) -> Run:
    """A run that learnt, in an environment whose evaluations follow a script."""
    trained = finished_run(tmp_path / "run", solved=90)
    push_echo(tmp_path / "echo", ECHO)
    return trained


async def evaluated(client: Client, *, solved: int = 0, **arguments: Any) -> dict[str, Any]:
    """A finished evaluation in which the first `solved` tasks are successes."""
    script = {"solved": list(range(solved)), **arguments.pop("script", {})}
    return await call(client, "evaluate", **{"environment": "echo", "environment_args": script, **arguments})


# -- evaluate --------------------------------------------------------------------------------------


async def test_an_evaluation_is_a_run_whose_scores_come_with_their_interval(client: Client, html: Any):
    body = await evaluated(client, solved=30)
    scores, interval = body["scores"], statistics.wilson(30, 60)
    assert (body["state"], body["tasks"], body["attempts"], body["done"]) == ("succeeded", 60, 1, 60)
    assert (scores["success"], scores["low"], scores["high"]) == (0.5, round(interval.low, 4), round(interval.high, 4))
    assert (scores["n"], scores["errors"], scores["reward"], scores["tokens_mean"]) == (60, 0, 0.5, 20.0)
    assert "pass_at" not in scores
    assert body["values"]["temperature"] == 0.0  # one attempt is greedy
    run = open_store().run(body["run_id"])
    assert (run.algorithm, run.state, run.steps) == ("eval", "succeeded", 60)
    status = await call(client, "status", run_id=body["run_id"])
    assert status["run"]["scores"] == scores
    assert f"({scores['low']} to {scores['high']})" in html(open_store(), body["run_id"])
    assert status["next"] == body["next"]
    assert (await call(client, "rollouts", run_id=body["run_id"], success=False))["total"] == 30
    assert "evaluation" in (await call(client, "checkpoints", run_id=body["run_id"]))["next"]


async def test_an_evaluation_that_nobody_looks_after_yet_is_no_error(client: Client, monkeypatch: pytest.MonkeyPatch):
    def no_room(base: Path) -> bool:
        raise FlashError("internal", "the supervisor did not start")

    monkeypatch.setattr(process, "ensure_supervisor", no_room)
    body = await evaluated(client)
    assert "did not start" in body["next"] and f"status(run_id='{body['run_id']}')" in body["next"]
    sample = (await sampled(client, {"often": list(range(40))}))["sample"]
    assert "did not start" in sample["error"]
    for made in (body, sample):
        assert open_store().run(made["run_id"]).algorithm == "eval"


async def test_status_wakes_when_a_tenth_of_the_attempts_was_made(client: Client):
    script = {"hold": "climbing"}
    run_id = (await call(client, "evaluate", environment="echo", environment_args=script, wait_s=0))["run_id"]
    while (seen := await call(client, "status", run_id=run_id))["run"].get("phase") != "eval":
        pass
    woken = await call(client, "status", run_id=run_id, wait_s=20)
    assert woken["changed"] is True and woken["run"]["step"] // 6 > seen["run"]["step"] // 6


async def test_an_evaluation_whose_attempts_all_failed_has_no_rate(client: Client):
    body = await evaluated(client, script={"failing": list(range(60))})
    assert "success" not in body["scores"] and body["scores"]["errors"] == 60
    assert "environment_error" in await refusal(client, "compare", base=body["run_id"], other=body["run_id"])


async def test_several_attempts_are_sampled_and_give_pass_at_k(client: Client):
    body = await evaluated(client, solved=10, script={"often": list(range(10, 30))}, attempts=4, limit=40)
    scores = body["scores"]
    assert (scores["n"], scores["tasks"], body["values"]["temperature"]) == (160, 40, 1.0)
    # 10 tasks with 4 of 4, 20 with 2 of 4, 10 with none.
    assert scores["success"] == scores["pass_at"]["1"] == 0.5
    assert scores["pass_at"] == {"1": 0.5, "2": round((10 + 20 * (1 - 1 / 6)) / 40, 4), "4": 0.75}
    assert (scores["uniform_share"], scores["never_solved"], scores["always_solved"]) == (0.5, 10, 10)
    assert "40 of the split's 60 tasks" in body["notes"]


async def test_named_tasks_are_evaluated_and_unknown_ones_refused(client: Client):
    body = await evaluated(client, solved=10, task_ids=["eval-3", "eval-40"])
    assert (body["tasks"], body["scores"]["success"]) == (2, 0.5)
    assert "'eval-3'" in await refusal(client, "evaluate", environment="echo", task_ids=["evil-3"])
    trained = await evaluated(client, split="train", limit=3)
    assert trained["tasks"] == 3
    assert (await call(client, "rollouts", run_id=trained["run_id"], split="train"))["total"] == 3


async def test_an_evaluation_asks_for_the_gpus_that_share_its_model(client: Client, monkeypatch: pytest.MonkeyPatch):
    one = await evaluated(client, limit=5)
    error = await refusal(client, "evaluate", environment="echo", gpus=2)
    assert "[device_unsupported]" in error and "this machine has no GPU" in error
    monkeypatch.setattr("flash_mcp.tools.shared.placing.find_gpus", lambda: ["0", "1"])
    error = await refusal(client, "evaluate", environment="echo", gpus=3)
    assert "this machine has 2 GPUs" in error and "use gpus=2" in error
    two = await evaluated(client, limit=5, gpus=2)
    assert two["run_id"] != one["run_id"]
    assert [open_store().run(each["run_id"]).spec.gpus for each in (one, two)] == [1, 2]


async def test_a_checkpoint_is_evaluated_as_it_was_trained_also_by_what_serves_it(client: Client, run: Run):
    body = await call(client, "evaluate", model=run.id, max_tokens=33)
    spec = open_store().run(body["run_id"]).spec
    assert (spec.checkpoint, spec.step, spec.lora_rank, spec.max_tokens) == (f"{run.id}@20", 20, 32, 33)
    assert body["environment"] == "echo@0123456789abcdef"
    assert [row.step for row in open_store().evals(body["run_id"])] == [20]
    assert open_store().run(body["run_id"]).init_adapter["step"] == 20
    assert f"{run.id}@10" in (await call(client, "evaluate", model=f"{run.id}@10"))["of"]
    start = await call(client, "evaluate", model=f"{run.id}@0")
    assert "before its training" in start["of"] and open_store().run(start["run_id"]).init_adapter is None

    served = {"id": "dep-1", "name": "mine", "model": run.model, "run_id": run.id, "step": 10, "state": "ready"}
    open_store().add_deployment(served)
    body = await call(client, "evaluate", model="mine")
    assert open_store().run(body["run_id"]).spec.checkpoint == f"{run.id}@10"
    assert any("what dep-1 serves" in note for note in body["notes"])
    open_store().update_deployment("dep-1", state="stopped")


async def test_a_runs_arguments_go_with_its_environment_alone(client: Client, tmp_path: Path):
    run, writer = started_run(tmp_path / "run", environment_args={"solved": [0]})
    save_adapter(writer, 10, tmp_path)
    writer.commit_result("succeeded", 10)
    read_in(open_store(), run.id)
    push_echo(tmp_path / "echo", ECHO)
    assert (await call(client, "evaluate", model=run.id, limit=2))["scores"]["success"] == 0.5
    push_echo(tmp_path / "another", ENVIRONMENT, name="another")  # takes no such argument
    assert (await call(client, "evaluate", model=run.id, environment="another", limit=2))["scores"]["success"] == 0.0


async def test_an_evaluation_that_takes_longer_goes_on_and_is_found_again(client: Client):
    asked = {"environment": "echo", "environment_args": {"hold": True}, "idempotency_key": "k", "limit": 5}
    body = await call(client, "evaluate", **asked, wait_s=0)
    assert body["state"] in ("queued", "starting", "running") and "scores" not in body
    assert f"status(run_id={body['run_id']!r}" in body["next"]
    again = await call(client, "evaluate", **asked, wait_s=0)
    assert (again["run_id"], again["created"]) == (body["run_id"], False)
    assert "not_ready" in await refusal(client, "compare", base=body["run_id"], other=body["run_id"])
    while "eta_s" not in (run := (await call(client, "status", run_id=body["run_id"], wait_s=1))["run"]):
        assert run["step"] <= 1
    assert (run["step"], run["eta_s"]) == (1, pytest.approx(4 * run["step_s"], abs=1))
    let_go(body["run_id"])
    ended = await call(client, "evaluate", **asked)
    assert (ended["run_id"], ended["state"], ended["scores"]["n"]) == (body["run_id"], "succeeded", 5)


async def test_an_evaluation_is_cancelled_like_any_run(client: Client):
    body = await call(client, "evaluate", environment="echo", environment_args={"hold": True}, wait_s=0)
    ended = await call(client, "cancel", run_id=body["run_id"], wait_s=40)
    assert ended["state"] == "cancelled" and "evaluate" in ended["next"]


# -- compare ---------------------------------------------------------------------------------------


async def test_two_evaluations_are_paired_by_task_and_the_flips_are_shown(client: Client):
    base = await evaluated(client, solved=10)
    other = await evaluated(client, solved=40, script={"say": "Surely"})
    body = await call(client, "compare", base=base["run_id"], other=other["run_id"])
    assert (body["verdict"], body["success"]["test"], body["paired_tasks"]) == ("improved", "mcnemar_exact", 60)
    assert body["success"]["p"] == pytest.approx(statistics.mcnemar(30, 0), rel=0.01)
    assert (body["newly_solved"], body["no_longer"]) == (30, 0)
    assert "reward" not in body  # rewards of this environment are 0 and 1 too
    flip = body["flips"][0]
    assert (flip["base"], flip["other"], flip["prompt"]) == (0.0, 1.0, "say 10")
    assert (flip["base_text"], flip["other_text"]) == ("It is unknown", "Surely 10")
    assert any("environment_args" in note for note in body["notes"])
    # One model: the verdict is of what differs, and nothing is to be deployed for it.
    assert "differ in environment_args" in body["success"]["explanation"]
    assert "one model" in body["next"] and "deploy" not in body["next"] and "other_index" in body["next"]
    shown = await call(client, "rollouts", run_id=other["run_id"], split="eval", step=0, index=flip["other_index"])
    assert shown["rollouts"][0]["messages"][-1]["content"] == "Surely 10"
    back = await call(client, "compare", base=other["run_id"], other=base["run_id"])
    assert (back["verdict"], back["no_longer"]) == ("regressed", 30)


async def test_too_few_tasks_and_a_constant_that_does_as_well_are_said_beside_the_verdict(client: Client):
    base, other = await evaluated(client, solved=20), await evaluated(client, solved=23)
    body = await call(client, "compare", base=base["run_id"], other=other["run_id"])
    assert body["verdict"] == "underpowered" and body["success"]["decide_n"] > 60
    needed = body["success"]["decide_n"]
    assert f"about {needed} tasks would decide and the eval split has no more than 60" in body["next"]
    assert "add tasks" in body["next"]
    lenient = await call(client, "compare", base=base["run_id"], other=other["run_id"], min_change=0.2)
    assert lenient["verdict"] == "no_change"

    other = await evaluated(client, solved=38, script={"constant": 0.6})
    told = "may be no better than always answering 'Yes': 0.60 (0.45 to 0.74, 40 tasks)"
    assert any(told in note for note in other["notes"])
    body = await call(client, "compare", base=base["run_id"], other=other["run_id"])
    assert f"other: it {told}" in body["notes"]
    assert (body["other"]["constant"], body["other"]["constant_answer"]) == (0.6, "Yes")
    assert "constant" not in body["base"]


async def test_repeated_attempts_do_not_count_as_independent_ones(client: Client):
    base = await evaluated(client, solved=20, attempts=4)
    other = await evaluated(client, solved=38, attempts=4, script={"constant": 0.55})
    body = await call(client, "compare", base=base["run_id"], other=other["run_id"])
    assert any("may be no better than always answering" in note for note in body["notes"])
    (point,) = open_store().curve(other["run_id"]).held_out
    assert point.interval == statistics.wilson(38, 60)


async def test_two_models_that_were_sampled_differently_are_not_judged(client: Client, run: Run):
    asked = {"temperature": 1.0, "attempts": 4, "max_tokens": 16}
    base = await call(client, "evaluate", environment="echo", **asked)
    body = await call(client, "compare", base=base["run_id"], other=run.id)
    assert (body["verdict"], body["success"]["outcome"]) == ("confounded", "improved")
    assert "differ in temperature, max_tokens" in body["success"]["explanation"]
    assert "deploy(" not in body["next"]
    # The call that it names makes the two comparable.
    named = re.search(r"evaluate\((.*)\) repeats base", body["next"])
    assert named
    again = await call(client, "evaluate", **eval(f"dict({named[1]})"))
    assert (again["of"], again["attempts"], again["values"]["max_tokens"]) == (base["of"], 1, 512)
    body = await call(client, "compare", base=again["run_id"], other=run.id)
    assert body["verdict"] == "improved" and f"deploy(run_id='{run.id}', step=20)" in body["next"]
    # More attempts at the same temperature are less noise, and no other thing that is measured.
    more = await call(client, "evaluate", environment="echo", attempts=2, temperature=0)
    assert (await call(client, "compare", base=more["run_id"], other=run.id))["verdict"] == "improved"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.5), ("max_tokens", 100), ("max_length", 1000), ("stop_sequences", ["."]), ("thinking", True),
     ("environment_args", {"say": "No"})],
)  # fmt: skip
async def test_whatever_changes_what_is_measured_confounds(client: Client, run: Run, name: str, value: Any):
    base = await call(client, "evaluate", environment="echo", limit=20, **{name: value})
    body = await call(client, "compare", base=base["run_id"], other=run.id, flips=0)
    assert body["verdict"] == "confounded"
    assert f"differ in {name}:" in body["success"]["explanation"]


async def test_an_evaluation_in_another_precision_confounds_and_is_repeated_in_the_same(client: Client, run: Run):
    open_store().put_precision(run.id, "float32")
    base = await call(client, "evaluate", environment="echo")
    trained = await call(client, "evaluate", model=run.id)
    assert (base["values"]["precision"], trained["values"]["precision"]) == ("bfloat16", "float32")
    body = await call(client, "compare", base=base["run_id"], other=trained["run_id"])
    assert body["verdict"] == "confounded" and "differ in precision:" in body["success"]["explanation"]
    assert any("precision bfloat16 and float32" in note for note in body["notes"])
    named = re.search(r"evaluate\((.*)\) repeats base", body["next"])
    assert named
    again = await call(client, "evaluate", **eval(f"dict({named[1]})"))
    assert again["created"] and again["values"]["precision"] == "float32"
    body = await call(client, "compare", base=again["run_id"], other=trained["run_id"])
    assert body["verdict"] != "confounded"
    # What the worker chose by itself was measured in the precision that is now asked for.
    same = await call(client, "evaluate", environment="echo", precision="bfloat16")
    assert (same["run_id"], same["created"]) == (base["run_id"], False)


async def test_a_nucleus_counts_where_something_is_sampled(client: Client, run: Run):
    for temperature, verdict in ((0.0, "no_change"), (1.0, "confounded")):
        common = {"environment": "echo", "temperature": temperature}
        base = await call(client, "evaluate", **common, top_p=0.5)
        other = await call(client, "evaluate", **common, model=run.id)
        assert (await call(client, "compare", base=base["run_id"], other=other["run_id"]))["verdict"] == verdict


async def test_only_an_evaluation_of_another_model_made_alike_is_proposed_as_the_other_side(client: Client, run: Run):
    trained = await call(client, "evaluate", model=run.id)
    assert "compare(" not in (await call(client, "evaluate", environment="echo", temperature=1))["next"]
    start = await call(client, "evaluate", environment="echo")
    assert f"compare(base={start['run_id']!r}, other={trained['run_id']!r})" in start["next"]
    assert "compare(" not in (await call(client, "evaluate", environment="echo", max_tokens=16))["next"]
    later = await call(client, "evaluate", model=f"{run.id}@10")
    assert f"compare(base={start['run_id']!r}, other={later['run_id']!r})" in later["next"]


async def test_a_training_run_alone_is_compared_with_its_own_start(client: Client, tmp_path: Path):
    run = finished_run(tmp_path / "run", solved=90)
    body = await call(client, "compare", base=run.id)
    assert body["verdict"] == "improved" and (body["base"]["step"], body["other"]["step"]) == (0, 20)
    assert "deploy" in body["next"]
    named = await call(client, "compare", base=f"{run.id}@0", other=f"{run.id}@20")
    assert named["success"] == body["success"]


@pytest.mark.parametrize(
    ("file", "is_same"), [("README.md", True), ("environment.py", False), ("words.txt", False), ("", False)]
)
async def test_versions_are_compared_only_where_scorer_and_tasks_are_equal(
    client: Client, tmp_path: Path, file: str, is_same: bool
):
    old, new = finished_run(tmp_path / "old", solved=40), finished_run(tmp_path / "new", solved=90)
    store, digest = open_store(), "fedcba9876543210"
    later = tmp_path / "later"
    shutil.copytree(store.environment("echo").path, later)
    if file:  # else the version was removed
        (later / file).write_text("new")
        store.add_environment(name="echo", digest=digest, path=str(later), size_bytes=3)
    store.execute("UPDATE runs SET environment_digest = ? WHERE id = ?", [digest, new.id])
    for base, other in ((old, new), (new, old)):
        body = await call(client, "compare", base=base.id, other=other.id, flips=0)
        if is_same:
            assert body["verdict"] == ("improved" if other is new else "regressed")
            continue
        assert body["verdict"] == "confounded" and "deploy(" not in body["next"]
        assert "differ in environment" in body["success"]["explanation"]
        if file:  # what is older is measured again
            asked = f"evaluate(environment='echo@{digest}', model='{old.id}@20'"
            assert asked in body["next"] and f"={new.id!r})" in body["next"]


async def test_a_checkpoint_or_line_of_several_is_judged_more_strictly(client: Client, tmp_path: Path):
    run, writer = started_run(tmp_path / "run", eval_every=5, steps=20)
    for step, solved in ((0, 40), (5, 72), (10, 40), (15, 44), (20, 40)):  # of 100, 25 tasks
        evaluate(writer, step, solved)
    run = end(writer, run.id, 20)
    picked = await call(client, "compare", base=f"{run.id}@0", other=f"{run.id}@5", flips=0)
    assert picked["success"]["p"] == 0.00781
    assert picked["verdict"] == "improved" and "judged at 0.05 / 4" in picked["success"]["explanation"]
    assert any(f"{run.id}@5 is one of 4 evaluations" in note for note in picked["notes"])
    more = [f"{run.id}@{step}" for step in (10, 15)]
    several = await call(client, "compare", base=f"{run.id}@0", other=f"{run.id}@5", more=more, flips=0)
    assert several["verdict"] == several["table"][1]["verdict"] == "underpowered"
    assert "among so many comparisons" in several["success"]["explanation"]
    assert any("3 comparisons" in note for note in several["notes"])
    assert "judged at" not in (await call(client, "compare", base=run.id, flips=0))["success"]["explanation"]


async def test_tasks_of_few_kinds_are_judged_by_their_kinds(client: Client, tmp_path: Path):
    run, writer = started_run(tmp_path / "run")
    for step, solved in ((0, 0), (10, 80), (20, 160)):
        evaluate(writer, step, solved, of=160, kinds=10)
    run = end(writer, run.id, 20)
    body = await call(client, "compare", base=run.id, flips=0)
    assert (body["verdict"], body["success"]["test"]) == ("improved", "kind_flips")
    assert "40 tasks of 10 kinds" in body["success"]["explanation"]
    status = await call(client, "status", run_id=run.id)
    assert "160 tasks of 10 kinds" in status["run"]["verdict"]["explanation"]
    widths = [point["high"] - point["low"] for point in status["run"]["held_out"]]
    assert min(widths) > 0.2  # independent tasks would have 0.02 to 0.15
    half = await call(client, "compare", base=f"{run.id}@0", other=f"{run.id}@10", flips=0)
    assert (half["verdict"], half["success"]["p"]) == ("underpowered", 0.0625)
    assert half["other"]["low"] < 0.25  # 5 of 10 kinds tell less than 20 of 40 tasks


async def test_two_training_runs_are_compared_by_their_newest_evaluations(client: Client, tmp_path: Path):
    one, two = finished_run(tmp_path / "one", solved=90), finished_run(tmp_path / "two", solved=90)
    body = await call(client, "compare", base=one.id, other=two.id)
    assert (body["base"]["step"], body["other"]["step"], body["verdict"]) == (20, 20, "no_change")
    assert "flips" not in body and "other_index" not in body["next"]


async def test_what_cannot_be_compared_is_refused(client: Client, tmp_path: Path):
    body = await evaluated(client)
    trained = await evaluated(client, split="train", limit=3)
    running, writer = started_run(tmp_path / "run", eval_before=True, eval_after=True)
    early = await refusal(client, "compare", base=running.id)
    assert "[not_ready" in early and f"status(run_id={running.id!r}, until='end')" in early
    splits = await refusal(client, "compare", base=body["run_id"], other=trained["run_id"])
    assert "different splits" in splits and "split='eval'" in splits
    assert "not_ready" in await refusal(client, "compare", base=body["run_id"], other=running.id)
    writer.commit_result("succeeded", 0)


async def test_long_transcripts_and_many_flips_fit_into_one_result(client: Client):
    base = await evaluated(client, script={"say": 'a "quoted"\nline ' * 500})
    other = await evaluated(client, script={"say": "words " * 2000, "solved": list(range(30))})
    body = await call(client, "compare", base=base["run_id"], other=other["run_id"], flips=5)
    assert len(body["flips"]) == 5


async def test_several_evaluations_are_compared_with_the_first_at_once(client: Client):
    made = [(await evaluated(client, solved=count))["run_id"] for count in (5, 40, 38)]
    base, best, near = made
    body = await call(client, "compare", base=base, more=[near, best])
    assert [line["run_id"] for line in body["table"]] == [base, near, best]
    assert "verdict" not in body["table"][0]
    assert [line["verdict"] for line in body["table"][1:]] == ["improved", "improved"]
    first = body["table"][1]
    assert (first["change"], first["change_low"]) == (body["success"]["change"], body["success"]["low"])
    assert body["other"]["run_id"] == near
    assert body["best"].startswith(f"{best}@0, success 0.667; against the next, {near}@0: ")
    assert "best" not in await call(client, "compare", base=base, other=near)
    assert "the same evaluation" in (await refusal(client, "compare", base=base, more=[near, base]))


# -- the sample before training --------------------------------------------------------------------


async def sampled(client: Client, script: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    asked = {"environment": "echo", "steps": 10, "environment_args": script, "validate_only": True, "sample": True}
    return await call(client, "train", **asked, **arguments)


async def test_a_sample_says_whether_there_is_something_to_learn_and_what_it_takes(client: Client):
    body = await sampled(client, {"often": list(range(40))}, price_per_hour=2.0, eval_before=True, eval_after=True)
    sample, expected = body["sample"], body["estimate"]["time"]
    assert (body["state"], body["created"], sample["outlook"]) == ("validated", False, "good")
    assert (sample["groups"], sample["group_size"], sample["scores"]["n"]) == (8, 8, 64)
    assert (sample["scores"]["success"], sample["scores"]["uniform_share"]) == (0.5, 0.0)
    # 320 rollouts of 20 tokens at 100 tokens/s, training as long again, and 120 held-out attempts.
    assert expected["seconds"] == 320 * 20 / 100 * (1 + run_time.TRAINING_SHARE) + 120 * 20 / 100
    assert "low_s" not in expected and expected["cost"] == pytest.approx(expected["seconds"] / 1800, abs=1e-3)
    assert "guess" in expected["basis"]
    run = open_store().run(sample["run_id"])
    assert (run.spec.split, run.spec.temperature) == ("train", 1.0)
    again = await sampled(client, {"often": list(range(40))})
    assert again["sample"]["run_id"] == sample["run_id"]
    assert again["sample"]["made_before"] is True and "made_before" not in sample
    assert [row.algorithm for row in open_store().runs()] == ["eval"]


async def test_the_time_takes_its_share_of_training_from_an_earlier_run_of_the_model(client: Client, tmp_path: Path):
    earlier, _ = started_run(tmp_path / "run")
    for step in (1, 2):
        metrics = {"time/train_s": 9.0, "time/rollout_s": 3.0}
        open_store().put_metrics(earlier.id, {"step": step, "epoch": 1, "time": 0.0, "metrics": metrics})
    open_store().execute("UPDATE runs SET state = 'succeeded', ended = 1 WHERE id = ?", [earlier.id])
    push_echo(tmp_path / "echo", ECHO)
    expected = (await sampled(client, {"often": list(range(40))}))["estimate"]["time"]
    assert expected["seconds"] == 320 * 20 / 100 * 4
    assert expected["low_s"] <= expected["seconds"] <= expected["high_s"] and earlier.id in expected["basis"]


@pytest.mark.parametrize(
    ("script", "outlook", "finding", "remedy"),
    [
        ({}, "hopeless", "uniform_groups", "sft"),
        ({"solved": list(range(40))}, "hopeless", "uniform_groups", "harder"),
        ({"often": list(range(40)), "endless": list(range(40))}, "hopeless", "truncation", "max_tokens"),
        ({"failing": list(range(40))}, "hopeless", "environment_errors", "env_test"),
        ({"often": list(range(0, 40, 3))}, "doubtful", "uniform_groups", "partial progress"),
    ],
)
async def test_a_start_without_hope_is_called_so_with_what_to_do(
    client: Client, script: dict[str, Any], outlook: str, finding: str, remedy: str
):
    body = await sampled(client, script)
    sample = body["sample"]
    assert (sample["outlook"], sample["findings"][0]["name"]) == (outlook, finding)
    assert remedy in sample["findings"][0]["remedy"]
    assert any(character.isdigit() for character in sample["findings"][0]["evidence"])
    assert ("do not start" in body["next"]) == (outlook == "hopeless")
    status = await call(client, "status", run_id=sample["run_id"])
    assert status["run"]["outlook"] == outlook and status["run"]["flags"] == sample["findings"]
    assert ("do not train" in status["next"]) == (outlook == "hopeless")


async def test_a_sample_that_is_not_ready_says_how_to_go_on(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flash_mcp.tools.train.SAMPLE_LIMIT_S", 0.0)
    body = await sampled(client, {"hold": True})
    sample = body["sample"]
    assert "outlook" not in sample and "time" not in body["estimate"]
    assert sample["run_id"] in body["next"] and "same call" in body["next"]


async def test_env_test_samples_a_model_on_a_folder_that_was_never_pushed(client: Client, tmp_path: Path):
    folder = environment_folder(tmp_path / "sums", "", returns="Addition()")
    asked = {"folder": str(folder), "model": "smollm2-135m-instruct", "hunt": True}
    body = await call(client, "env_test", **asked)
    while "outlook" not in body["sample"]:  # on a busy machine the answer says: the same call again
        assert "same call" in body["next"]
        body = await call(client, "env_test", **asked)
    assert body["passed"] is True
    assert [probe["name"] for probe in body["probes"]][-3:] == ["time", "hunt", "best_of_n"]
    assert "the best of each group earns +0 and succeeds +0 % more" in body["probes"][-1]["evidence"]
    assert (body["sample"]["groups"], body["sample"]["outlook"]) == (6, "hopeless")
    assert "do not start" in body["next"]
    assert [row.name for row in open_store().environments()] == ["echo"]


async def test_env_test_samples_nothing_where_a_check_failed(client: Client, tmp_path: Path):
    source = "class Sample(Addition):\n    def score_response(self, *_):\n        raise KeyError"
    folder = environment_folder(tmp_path / "broken", source)
    body = await call(client, "env_test", folder=str(folder), model="smollm2-135m-instruct")
    assert body["passed"] is False and "sample" not in body
    assert open_store().runs() == []


@pytest.mark.parametrize(("after", "every", "count"), [(True, 10, 3), (True, 7, 4), (False, 10, 3), (True, None, 2)])
def test_as_many_evaluations_are_reckoned_with_as_a_run_makes(after: bool, every: int | None, count: int):
    spec = resolve(validate({"environment": "e", "steps": 20, "eval_before": True, "eval_after": after,
                             **({"eval_every": every} if every else {})})).spec  # fmt: skip
    assert run_time._evaluations(spec, 20) == count


# -- measured before -------------------------------------------------------------------------------


async def test_what_was_measured_is_returned_unless_it_is_to_be_measured_again(client: Client):
    first = await evaluated(client, solved=3, limit=5)
    assert first["created"] is True
    same = await evaluated(client, solved=3, limit=5)
    assert (same["run_id"], same["created"]) == (first["run_id"], False) and same["scores"] == first["scores"]
    assert any("again=true" in note for note in same["notes"])
    others: list[dict[str, Any]] = [
        {"again": True}, {"seed": 1}, {"max_tokens": 32}, {"limit": 4}, {"temperature": 0.5},
        {"idempotency_key": "k", "again": True},
    ]  # fmt: skip
    made = [(await evaluated(client, solved=3, **{"limit": 5, **each})) for each in others]
    assert len({first["run_id"], *(each["run_id"] for each in made)}) == len(others) + 1


async def test_another_adapter_and_another_version_are_measured_anew(client: Client, tmp_path: Path):
    run = finished_run(tmp_path)
    asked: dict[str, Any] = {"environment": "echo", "limit": 2, "environment_args": {}}
    ids = {
        (await call(client, "evaluate", model=model, **asked))["run_id"]
        for model in (f"{run.id}@10", f"{run.id}@20", f"{run.id}@0")
    }
    assert len(ids) == 3
    # The checkpoint of a step is another one once an attempt has made that step again.
    sql = "UPDATE checkpoints SET digest = 'other' WHERE run_id = ? AND step = 20"
    open_store().execute(sql, [run.id])
    # Until its files are there, what lies in the folder is not measured in its place.
    assert "checkpoint_corrupt" in (await refusal(client, "evaluate", model=f"{run.id}@20", **asked))


async def test_the_best_attempts_of_an_early_policy_tell_whether_training_has_headroom(client: Client, run: Run):
    often = {"often": list(range(60))}
    start = await call(client, "evaluate", model=f"{run.id}@0", attempts=4, environment_args=often)
    last = await call(client, "evaluate", model=f"{run.id}@20", environment_args={"solved": list(range(20))})
    body = await call(client, "compare", base=start["run_id"], other=last["run_id"])
    assert body["headroom"].startswith("headroom: ")
    assert "the best of 4 attempts of base solves 100 %, other 33 %" in body["headroom"]
    again = await call(client, "compare", base=last["run_id"], other=start["run_id"])
    assert "headroom" not in again, "its base had one attempt"
