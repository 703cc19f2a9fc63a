"""tournament, through a real MCP client and a real queue; a scripted worker makes the attempts."""

from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from flash_mcp.extensions.tournament import rows as tournaments
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state import queue
from flash_mcp.state.owners import Caller, Quotas, acting_as
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import process
from tests.calls import call as made
from tests.calls import call_over as call
from tests.calls import refusal, refused
from tests.samples import ECHO, push_echo
from tests.scripted_supervisor import let_go
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("supervisor")

ALL, NONE = {"solved": list(range(60))}, {"solved": list[int]()}
HALF = {"solved": list(range(0, 60, 2))}


def arm(name: str, script: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "environment_args": script, **fields}


@pytest.mark.slow
async def test_an_arm_that_loses_goes_and_the_last_one_left_is_the_winner(client: Client):
    arms = [arm("none", NONE, precision="float32"), arm("all", ALL), arm("half", HALF)]
    body = await call(client, "tournament", environment="echo", arms=arms)
    assert "in different precisions: " in body["explanation"] and "1 in float32" in body["explanation"]
    assert (body["state"], body["verdict"], body["winner"], body["created"]) == ("finished", "winner", "all", True)
    assert [row["name"] for row in body["arms"]] == ["all", "half", "none"]
    first, second, last = body["arms"]
    assert first["success"] == 1 and "out" not in first and "low" not in first
    assert last["out"] == 1 and last["high"] < -0.5 and last["tasks"] == 25 and last["evidence"] >= 20
    assert second["low"] < -0.5 < second["high"] < 0
    assert body["attempts"] < body["attempts_in_full"] == 180
    assert "worst" not in body  # the winner never failed
    row = tournaments.find_tournament(open_store(), body["tournament_id"])
    tasks = [open_store().run(entry["runs"]["1"]).evaluation.tasks for entry in row.rounds]
    used = [task for part in tasks for task in part]
    assert len(used) == len({*used}) == body["tasks"], "no round takes the tasks of another"
    assert (await call(client, "tournament", tournament_id=body["tournament_id"])) == {**body, "created": False}


@pytest.mark.slow
async def test_equal_arms_end_without_a_claim_and_with_intervals(client: Client):
    arms = [arm("half", HALF, system_prompt="Be right."), arm("as good", HALF, system_prompt="")]
    body = await call(client, "tournament", environment="echo", arms=arms)
    assert (body["verdict"], body["tasks"], body["round"]) == ("no_difference", 60, 3)
    assert "winner" not in body and "no difference" in body["explanation"] and "precision" not in body["explanation"]
    other = body["arms"][1]
    assert other["low"] < 0 < other["high"] and other["tasks"] == 60
    worst = body["worst"][0]
    assert worst["prompt"].startswith("say ") and worst["text"] == "It is unknown"
    specs = [open_store().run(row["run_id"]).evaluation for row in body["arms"]]
    assert [spec.system_prompt for spec in specs] == ["Be right.", ""]
    assert specs[0].tasks == specs[1].tasks and specs[0].seed == specs[1].seed
    assert (await call(client, "status"))["runs"][0]["name"] == f"{body['tournament_id']} round 3: as good"


@pytest.mark.slow
async def test_it_goes_on_alone_is_found_by_its_key_and_can_be_stopped(client: Client):
    held = {"hold": True, **HALF}
    arms = [arm("a", held), arm("b", {**held, "say": "b"})]
    asked = {"environment": "echo", "arms": arms, "idempotency_key": "once", "wait_s": 0}
    body = await call(client, "tournament", **asked)
    assert (body["state"], body["created"], body["tasks"], body["attempts"]) == ("running", True, 25, 0)
    folder = open_store().environment("echo").path
    newer = {"name": "echo", "digest": "fedcba9876543210", "path": folder, "size_bytes": 1}
    open_store().add_environment(**newer)
    same = await call(client, "tournament", **asked)
    assert (same["tournament_id"], same["created"]) == (body["tournament_id"], False)
    assert "idempotency_conflict" in await refusal(client, "tournament", **{**asked, "limit": 30})
    runs = tournaments.find_tournament(open_store(), body["tournament_id"]).run_ids
    for run in runs:
        let_go(run)
    await until(lambda: len(tournaments.find_tournament(open_store(), body["tournament_id"]).rounds) == 2)
    ended = await call(client, "cancel", run_id=body["tournament_id"])
    assert (ended["run_id"], ended["state"]) == (body["tournament_id"], "cancelled")
    assert (await call(client, "cancel", run_id=body["tournament_id"]))["state"] == "cancelled"
    body = await call(client, "tournament", tournament_id=body["tournament_id"], wait_s=0)
    assert body["state"] == "cancelled" and "nothing is claimed" in body["explanation"]
    assert body["attempts"] == 50
    store = open_store()
    newest = tournaments.find_tournament(store, body["tournament_id"]).run_ids
    await until(lambda: all(store.run(run).state == "cancelled" for run in newest))
    assert not store.active_targets()


async def test_a_stop_that_fails_leaves_it_running_and_can_be_repeated(client: Client, monkeypatch: pytest.MonkeyPatch):
    arms = [arm("a", {"hold": True}), arm("b", {"hold": True, "say": "b"})]
    body = await call(client, "tournament", environment="echo", arms=arms, wait_s=0)
    store, tournament_id = open_store(), body["tournament_id"]

    def has_ended(*_: object) -> None:
        raise FlashError("run_finished", "the run ended before")

    with monkeypatch.context() as patched, pytest.raises(FlashError, match="run_finished"):
        patched.setattr(queue, "request_cancel", has_ended)
        tournaments.stop(store, tournament_id)
    assert tournaments.find_tournament(store, tournament_id).state == "running"
    tournaments.stop(store, tournament_id)
    row = tournaments.find_tournament(store, tournament_id)
    assert row.state == "cancelled" and all(store.run(run).cancel_requested for run in row.run_ids)


@pytest.mark.slow
async def test_one_that_no_supervisor_looks_after_yet_is_no_error(client: Client, monkeypatch: pytest.MonkeyPatch):
    def no_room(base: Path) -> bool:
        raise FlashError("internal", "the supervisor did not start")

    monkeypatch.setattr(process, "ensure_supervisor", no_room)
    body = await call(client, "tournament", environment="echo", arms=[arm("all", ALL), arm("none", NONE)])
    assert body["created"] and "did not start" in body["next"]
    assert f"tournament(tournament_id={body['tournament_id']!r})" in body["next"]


@pytest.mark.slow
async def test_an_arm_that_cannot_run_ends_it_with_the_reason(client: Client):
    failing = {"failing": list(range(60))}
    arms = [arm("good", ALL), arm("cancelled", {"hold": True})]
    body = await call(client, "tournament", environment="echo", arms=arms, wait_s=0)
    held = tournaments.find_tournament(open_store(), body["tournament_id"]).run_ids[1]
    await call(client, "cancel", run_id=held)
    body = await call(client, "tournament", tournament_id=body["tournament_id"])
    assert body["state"] == "failed" and held in body["error"] and "'cancelled'" in body["error"]
    # Attempts that environment code failed count for nobody.
    body = await call(client, "tournament", environment="echo", arms=[arm("a", failing), arm("b", ALL)])
    assert body["verdict"] == "no_difference"
    assert {row["name"]: row["tasks"] for row in body["arms"]} == {"b": 60, "a": 0}


@pytest.mark.slow
async def test_the_rounds_of_an_owner_are_theirs_and_wait_for_a_place_in_their_queue(tmp_path: Path):
    arms = [arm("a", HALF), arm("b", {**HALF, "say": "b"})]
    open_store()
    with acting_as(Caller("ann", limits=Quotas(queued_runs=2))):
        push_echo(tmp_path / "ann", ECHO)
        body = await made("tournament", environment="echo", arms=arms)
        assert body["verdict"] == "no_difference"
        assert {open_store().run(row["run_id"]).owner for row in body["arms"]} == {"ann"}
        with pytest.raises(FlashError, match="quota_exceeded"):
            await made("tournament", environment="echo", arms=[*arms, arm("c", NONE)], limit=25)
        assert open_store().column("SELECT id FROM tournaments") == [body["tournament_id"]]
    with acting_as(Caller("bob")):
        assert (await refused("tournament", tournament_id=body["tournament_id"])).code == "unknown_tournament"


async def ended(client: Client, tournament_id: str) -> dict[str, Any]:
    await until(lambda: tournaments.find_tournament(open_store(), tournament_id).state != "running")
    return await call(client, "tournament", tournament_id=tournament_id, wait_s=0)


def learner(name: str, climbs: float, **fields: Any) -> dict[str, Any]:
    return {"name": name, "environment_args": {"climbs": climbs}, **fields}


@pytest.mark.slow
async def test_arms_that_learn_are_trained_in_rounds_and_the_last_are_judged_on_tasks_held_back(client: Client):
    arms = [learner("slow", 0.02), learner("fast", 0.34, learning_rate=1e-3), learner("steady", 0.15)]
    asked = {"environment": "echo", "arms": arms, "settings": {"steps": 3}, "idempotency_key": "race", "wait_s": 0}
    body = await call(client, "tournament", **asked)
    assert body["state"] == "running" and "step 1 of 3" in body["explanation"]
    again = await call(client, "tournament", **asked)
    assert (again["tournament_id"], again["created"]) == (body["tournament_id"], False)
    body = await ended(client, body["tournament_id"])
    assert (body["state"], body["verdict"], body["winner"]) == ("finished", "winner", "fast"), body
    assert [row["name"] for row in body["arms"]] == ["fast", "steady", "slow"]
    fast, steady, slow = body["arms"]
    assert slow["out"] == 2 and fast["success"] == 1 and steady["high"] < 0
    assert "best at 3 steps" in body["explanation"] and "8 of 9 steps were trained" in body["explanation"]
    store = open_store()
    row = tournaments.find_tournament(store, body["tournament_id"])
    assert [(item["step"], item["tasks"] > 0) for item in row.rounds] == [
        (n, m) for n in (1, 2, 3) for m in (False, True)
    ]
    run = store.run(row.rounds[0]["runs"]["1"])
    assert (run.steps, run.step, run.state, run.attempt) == (3, 3, "succeeded", 5), "one run, resumed twice"
    assert run.training.learning_rate == 1e-3 and fast["of"].endswith(f"with {run.id}@3")
    evaluations = [store.run(item["runs"]["1"]).evaluation for item in row.rounds if item["tasks"]]
    assert [spec.checkpoint for spec in evaluations] == [f"{run.id}@{step}" for step in (1, 2, 3)]
    assert not {*evaluations[-1].tasks} & {task for spec in evaluations[:-1] for task in spec.tasks}
    assert len(evaluations[-1].tasks) == 30
    assert f"deploy(run_id='{run.id}', step=3)" in body["next"]


@pytest.mark.slow
async def test_an_arm_whose_training_fails_is_out_and_two_have_to_be_left(client: Client):
    failing = {"environment_args": {"climbs": 0.1, "1": {"at": 1, "do": "fail"}}}
    arms = [learner("a", 0.2), learner("b", 0.1), {"name": "broken", **failing}]
    body = await call(client, "tournament", environment="echo", arms=arms, settings={"steps": 2}, wait_s=0)
    body = await ended(client, body["tournament_id"])
    assert body["verdict"] == "winner" and body["winner"] == "a", body
    assert {row["name"]: row.get("out") for row in body["arms"]} == {"a": None, "b": None, "broken": 1}
    body = await call(client, "tournament", environment="echo", arms=arms[1:], settings={"steps": 2}, wait_s=0)
    body = await ended(client, body["tournament_id"])
    assert body["state"] == "failed" and "fewer than two are left" in body["error"]


@pytest.mark.slow
async def test_the_worst_attempts_come_with_an_evaluation(client: Client):
    body = await call(client, "evaluate", environment="echo", environment_args=HALF, system_prompt="Be brief.")
    assert body["values"]["system_prompt"] == "Be brief."
    assert [row["text"] for row in body["worst"]] == ["It is unknown"] * 2
    other = await call(client, "evaluate", environment="echo", environment_args=HALF)
    assert other["created"] and "system_prompt" not in other["values"]
    compared = await call(client, "compare", base=other["run_id"], other=body["run_id"])
    assert any("system_prompt None and Be brief." in note for note in compared["notes"])
