"""train(resume=RUN): the same run goes on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.checkpoints import Checkpoints
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import queue
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import open_store
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.training.plan import resume_run
from tests.calls import refused
from tests.samples import end, learn, push_echo, queued_run, read_in, save_adapter, start, started_run

pytestmark = pytest.mark.usefixtures("no_supervisor")


async def train(**arguments: Any) -> dict[str, Any]:
    return (await TOOLS["train"].function(**arguments)).model_dump(mode="json")


def stopped_run(folder: Path, state: str, **fields: Any) -> Run:
    """A run that ended at step 6 of 20, with a checkpoint there."""
    run, writer = started_run(folder / "environment", **fields)
    learn(writer, range(1, 7))
    save_adapter(writer, 6, folder, optimizer=True)
    if state == "cancelled":
        queue.request_cancel(open_store(), run.id, "enough")
    error = FlashError("worker_failed", "it died") if state == "failed" else None
    return end(writer, run.id, 6, state, error)


@pytest.mark.parametrize("state", ["cancelled", "failed", "succeeded"])
async def test_an_ended_run_goes_on_with_its_own_values(state: str, tmp_path: Path):
    run = stopped_run(tmp_path, state, learning_rate=3e-4, seed=7)
    body = await train(resume=run.id, steps=30)
    assert (body["run_id"], body["state"], body["resumed_at"]) == (run.id, "queued", 6)
    assert (body["values"]["learning_rate"], body["values"]["steps"]) == (3e-4, 30)
    assert f"status(run_id={run.id!r}" in body["next"]
    # A repeat finds it, and so it does while it runs.
    assert ((await train(resume=run.id, steps=30))["state"], open_store().run(run.id).attempt) == ("queued", 2)
    writer = start(run.id)
    assert not RunFolder(run.folder).is_cancelled() and RunFolder(run.folder).job()["spec"]["steps"] == 30
    assert (await train(resume=run.id, steps=30))["state"] == "running"
    learn(writer, range(7, 31), of=30)
    read_in(open_store(), run.id)
    assert [row.step for row in open_store().metrics(run.id)] == list(range(1, 31))
    writer.commit_result("succeeded", 30)
    queue.finish(open_store(), run.id, 3, "succeeded", step=30)
    assert ((await train(resume=run.id, steps=30))["state"], len(open_store().runs())) == ("succeeded", 1)


@pytest.mark.parametrize(
    ("schedule", "steps", "note"),
    [
        ("cosine", 40, "the cosine schedule (warmup=0) is of 40 steps now, and was of 20: the learning rate goes from "
         "0.000256 in step 6 to 0.000284 in step 7"),
        ("linear", 40, "goes from 0.000225 in step 6 to 0.000255 in step 7"),
        ("cosine", None, None),
        ("cosine", 20, None),
        ("constant", 40, None),
    ],
)  # fmt: skip
async def test_more_steps_say_what_they_do_to_the_learning_rate(schedule: str, steps: int | None, note: Any, tmp_path):
    run = stopped_run(tmp_path, "cancelled", learning_rate=3e-4, lr_schedule=schedule)
    body = await train(resume=run.id, steps=steps)
    assert [note in said for said in body.get("notes", ())] == [True] * bool(note)


async def test_steps_may_be_among_the_settings(tmp_path: Path):
    run = stopped_run(tmp_path, "failed")
    for steps in (12.5, 100_001):
        error = await refused("train", resume=run.id, settings={"steps": steps})
        assert error.code == "invalid_argument" and error.what.startswith("steps: "), steps
    assert (await train(resume=run.id, settings={"steps": "30"}))["values"]["steps"] == 30


async def test_without_steps_a_run_goes_on_as_far_as_it_was_to_go(tmp_path: Path):
    run = stopped_run(tmp_path, "cancelled")
    assert (await train(resume=run.id))["state"] == "queued" and open_store().run(run.id).training.steps == 20


async def test_a_run_that_never_started_starts_over(tmp_path: Path):
    run = queued_run(tmp_path)
    queue.request_cancel(open_store(), run.id)
    body = await train(resume=run.id)
    assert (body["state"], body["resumed_at"]) == ("queued", 0) and "starts over" in body["notes"][0]
    start(run.id)


async def test_others_may_write_while_checkpoints_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = stopped_run(tmp_path, "failed")
    newest_good = Checkpoints.newest_good

    def also_resumed(checkpoints: Checkpoints) -> int | None:
        monkeypatch.setattr(Checkpoints, "newest_good", newest_good)
        with ThreadPoolExecutor(1) as other:
            other.submit(resume_run, open_store(), run.id, 30, fresh_optimizer=False).result(20)
        return newest_good(checkpoints)

    monkeypatch.setattr(Checkpoints, "newest_good", also_resumed)
    body = await train(resume=run.id, steps=30)
    assert (body["state"], body["values"]["steps"]) == ("queued", 30)
    assert "nothing was changed" in body["notes"][0]
    assert open_store().run(run.id).attempt == 2


async def test_a_deleted_optimizer_is_said_and_done_without_only_on_demand(tmp_path: Path):
    run = stopped_run(tmp_path, "failed")
    assert folder_of(run).checkpoints.drop_optimizers() > 0
    error = await refused("train", resume=run.id)
    assert "optimizer's state" in error.what and "fresh_optimizer=true" in error.fix
    assert open_store().run(run.id).state == "failed"
    assert "fresh optimizer" in (await train(resume=run.id, fresh_optimizer=True))["notes"][0]


async def test_a_call_that_died_half_way_is_made_up_for_by_the_next(tmp_path: Path):
    run = stopped_run(tmp_path, "cancelled")
    RunFolder(run.folder).reopen()
    body = await train(resume=run.id)
    assert (body["state"], body["resumed_at"]) == ("queued", 6)
    start(run.id).metrics(7, {"reward/mean": 0.5})


async def test_a_warm_start_takes_the_adapters_rank_and_alpha_unless_told(tmp_path: Path):
    run, writer = started_run(tmp_path / "environment", lora_rank=8, lora_alpha=24)
    save_adapter(writer, 5, tmp_path, rank=8, alpha=24)
    end(writer, run.id, 5)
    push_echo(tmp_path / "environment")
    asked = {"environment": "echo", "init_from_adapter": run.id, "validate_only": True}
    values = (await train(**asked))["values"]
    assert (values["lora_rank"], values["lora_alpha"]) == (8, 24)
    assert (await train(**asked))["sources"]["adapter"] == ["lora_rank", "lora_alpha"]
    assert (await refused("train", **asked, lora_rank=16)).code == "adapter_mismatch"
