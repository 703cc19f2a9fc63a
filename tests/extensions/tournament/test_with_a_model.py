"""A tournament by real workers: the tiny model, the real queue, a detached supervisor, and SIGKILL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_mcp.extensions.tournament.rows import find_tournament
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import process
from tests.calls import call
from tests.crash import processes
from tests.places import VOWELS
from tests.supervisor.test_ensure import end_supervisors
from tests.waiting import wait_for


@pytest.fixture
def base(flash_home: Path) -> Iterator[Path]:
    folder = str(VOWELS)
    open_store().add_environment(name="vowels", digest="0123456789abcdef", path=folder, size_bytes=1)
    yield flash_home
    end_supervisors(flash_home)


async def test_it_goes_on_after_its_supervisor_and_its_worker_were_killed(base: Path, tiny_model: Path):
    common = {"model": str(tiny_model), "max_tokens": 16, "max_length": 256, "environment_args": {"held_out": 40}}
    arms = [{"name": "plain"}, {"name": "prompted", "system_prompt": "Write only aaaa."}]
    body = await call("tournament", environment="vowels", arms=arms, settings=common, wait_s=0)
    assert (body["state"], body["round"], body["tasks"]) == ("running", 1, 25)
    store = open_store()
    first = find_tournament(store, body["tournament_id"]).run_ids[0]
    wait_for(lambda: store.run(first).state == "running")
    killed = [one for kind in ("supervisor", "worker") for one in processes(base)[kind]]
    for one in killed:
        one.kill()
    assert len(killed) == 2
    with process.supervised(every_s=0.5):  # as a server does
        wait_for(lambda: store.run(first).state == "succeeded")
        wait_for(lambda: len(find_tournament(store, body["tournament_id"]).rounds) == 2)
        wait_for(lambda: find_tournament(store, body["tournament_id"]).state != "running")
    row = find_tournament(store, body["tournament_id"])
    body = await call("tournament", tournament_id=row.id)
    assert body["state"] == "finished", body
    assert store.run(first).attempt == 2, "the evaluation whose worker was killed went on"
    runs = [[store.run(run).evaluation for run in part["runs"].values()] for part in row.rounds]
    assert all(one.tasks == other.tasks for one, other in runs)
    used = [task for part in runs for task in part[0].tasks]
    assert len(used) == len({*used}) == body["tasks"]
    assert len(store.runs(limit=20)) == sum(map(len, runs)), "no evaluation was queued twice"
    by_name = {view["name"]: view["run_id"] for view in body["arms"]}
    prompts = {}
    for name, run in by_name.items():
        rows = store.rollouts(run, "eval", 0, "index", limit=40)
        prompts[name] = {row.messages[0]["content"] for row in rows if row.messages[0]["role"] == "system"}
    assert prompts == {"plain": set(), "prompted": {"Write only aaaa."}}


@pytest.mark.long
async def test_arms_that_learn_are_trained_on_after_their_supervisor_and_a_worker_were_killed(base: Path, tiny_model):
    common = {
        "model": str(tiny_model),
        "steps": 2,
        "batch_size": 2,
        "group_size": 4,
        "max_tokens": 16,
        "max_length": 256,
    }
    common |= {"lora_rank": 8, "environment_args": {"held_out": 50}}
    arms = [{"name": "quick", "learning_rate": 0.02}, {"name": "still", "learning_rate": 1e-7}]
    body = await call("tournament", environment="vowels", arms=arms, settings=common, wait_s=0)
    store = open_store()
    quick, still = find_tournament(store, body["tournament_id"]).run_ids
    wait_for(lambda: store.run(quick).state == "running")
    for kind in ("supervisor", "worker"):
        for one in processes(base)[kind]:
            one.kill()
    with process.supervised(every_s=0.5):
        for count in (2, 3, 4):  # each has a bound of its own
            wait_for(lambda count=count: len(find_tournament(store, body["tournament_id"]).rounds) == count)
        wait_for(lambda: find_tournament(store, body["tournament_id"]).state != "running")
    row = find_tournament(store, body["tournament_id"])
    body = await call("tournament", tournament_id=row.id)
    assert body["state"] == "finished", body
    assert [list(item["runs"].values()) for item in row.rounds if not item["tasks"]] == [[quick, still]] * 2
    assert [(store.run(run).step, store.run(run).state) for run in (quick, still)] == [(2, "succeeded")] * 2
    assert [row.step for row in store.metrics(quick)] == [1, 2]
    runs = [store.run(run) for item in row.rounds if item["tasks"] for run in item["runs"].values()]
    assert [run.evaluation.checkpoint for run in runs] == [f"{run}@{step}" for step in (1, 2) for run in (quick, still)]
    assert [len(run.evaluation.tasks) for run in runs] == [25] * 4
    assert not {*runs[0].evaluation.tasks} & {*runs[2].evaluation.tasks}
    assert len(store.runs(limit=20)) == 6, "no run was queued twice"
