"""Every `next` is executed as it stands, on stores with runs in every state."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.cli.doctor import examine
from flash_mcp.protocol.errors import FlashError, as_flash_error
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.records import Run
from flash_mcp.state import queue
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import open_store
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.tool_base import check_arguments
from tests.calls import named_calls
from tests.frozen_calls import play_evaluation
from tests.samples import (
    end,
    evaluate,
    finished_run,
    learn,
    learning_run,
    push_echo,
    queued_run,
    read_in,
    save_adapter,
    started_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_supervisor")]

SPLIT = 60
"""Eval tasks of the environment."""
MOST_CALLS = 8


async def call(tool: str, **arguments: Any) -> dict[str, Any]:
    function = TOOLS[tool].function
    if "wait_s" in TOOLS[tool].signature.parameters:
        arguments = {"wait_s": 0, **arguments}
    result = function(**arguments)
    result = await result if hasattr(result, "__await__") else result
    return result.model_dump(mode="json")


def snapshot() -> Any:
    """What a call may have changed."""
    store = open_store()
    runs = [(run.id, run.state, run.cancel_requested) for run in store.runs(limit=100)]
    return runs, [row.id for row in store.deployments()]


def count_split(run: Run, tasks: int = SPLIT) -> None:
    """As env_push does."""
    sql = "UPDATE environments SET data = ? WHERE digest = ?"
    data = f'{{"tasks": {{"train": 40, "eval": {tasks}}}}}'
    open_store().execute(sql, [data, run.environment_digest])


# -- runs in every state ---------------------------------------------------------------------------


def running(folder: Path, **metrics: float) -> Run:
    return learning_run(folder, range(1, 12), **metrics)[0]


def stopped(folder: Path, state: Any, *, saved: bool = True, algorithm: str = "grpo") -> Run:
    run, writer = started_run(folder / "environment", algorithm=algorithm)
    if algorithm == "sft":
        writer.metrics(6, {"loss": 0.5})
    else:
        learn(writer, range(1, 7))
    if saved:
        save_adapter(writer, 6, folder, optimizer=True)
    if state == "cancelled":
        queue.request_cancel(open_store(), run.id)
    error = FlashError("environment_error", "the scorer raised") if state == "failed" else None
    return end(writer, run.id, 6, state, error)


def without_optimizer(run: Run) -> Run:
    assert folder_of(run).checkpoints.drop_optimizers()
    return run


def underpowered(folder: Path, solved: int = 25, **more: float) -> Run:
    """It went from 20 to 25 of 60 tasks, which is all that the split has."""
    run, writer = started_run(folder / "environment")
    evaluate(writer, 0, 20, of=SPLIT)
    learn(writer, range(1, 7))
    save_adapter(writer, 6, folder)
    evaluate(writer, 6, solved, of=SPLIT, **more)
    return end(writer, run.id, 6)


def cancelled_in_queue(folder: Path) -> Run:
    run = queued_run(folder)
    return queue.request_cancel(open_store(), run.id)


SITUATIONS: dict[str, Callable[[Path], Run]] = {
    "queued": queued_run,
    "running": running,
    "most groups are uniform": lambda folder: running(folder, **{"groups/uniform_share": 0.92}),
    "a problem": lambda folder: running(folder, **{"groups/uniform_share": 0.97}),
    "failed": lambda folder: stopped(folder, "failed", saved=False),
    "failed after a checkpoint": lambda folder: stopped(folder, "failed"),
    "cancelled": lambda folder: stopped(folder, "cancelled"),
    "cancelled long ago": lambda folder: without_optimizer(stopped(folder, "cancelled")),
    "cancelled in the queue": cancelled_in_queue,
    "improved": finished_run,
    "no better": lambda folder: finished_run(folder, solved=25),
    "undecided on all tasks": underpowered,
    "held-out answers cut off": lambda folder: underpowered(folder, 20, truncated_share=1.0),
    "not measured": lambda folder: stopped(folder, "succeeded"),
    "not measured (sft)": lambda folder: stopped(folder, "succeeded", algorithm="sft"),
    "not saved": lambda folder: stopped(folder, "succeeded", saved=False),
}


async def follow(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of a call. An evaluation that it starts is played to its end."""
    before = snapshot()
    body = await call(tool, **arguments)
    if tool == "evaluate":
        assert body["created"] and body["tasks"] <= SPLIT, "it measures what is there already"
        many = body["tasks"] * body["attempts"]
        play_evaluation(body["run_id"], many // 2 if body["of"].endswith("@6") else many // 3, many)
        return await call("status", run_id=body["run_id"])
    if tool in ("train", "deploy", "cancel"):
        assert snapshot() != before, (tool, arguments)
    return body


@pytest.mark.parametrize("name", SITUATIONS)
async def test_every_call_of_next_works_and_leads_on(name: str, tmp_path: Path):
    run = SITUATIONS[name](tmp_path)
    count_split(run)
    body = await call("status", run_id=run.id)
    made: list[Any] = [("status", {"run_id": run.id})]
    for _ in range(MOST_CALLS):
        calls = [each for each in named_calls(body["next"]) if each[0] in FOLLOWED]
        for tool, arguments in calls:
            if "until" in arguments or "since" in arguments:
                assert open_store().run(arguments["run_id"]).ended is None
                await call(tool, **arguments)
                continue
            assert (tool, arguments) not in made, f"{tool}({arguments}) leads to itself"
            made.append((tool, arguments))
            body = await follow(tool, arguments)
        if not calls or calls[-1][0] in ("deploy", "rollouts", "train", "cancel", "status"):
            return
    pytest.fail(f"no end: {[tool for tool, _ in made]}")


FOLLOWED = {"status", "train", "evaluate", "compare", "cancel", "deploy", "rollouts"}


# -- what was a dead end ---------------------------------------------------------------------------


async def test_a_warning_is_named_while_the_run_goes_on(tmp_path: Path):
    said = (await call("status", run_id=running(tmp_path, **{"groups/uniform_share": 0.92}).id))["next"]
    assert said.startswith("uniform_groups: rollouts(")


async def test_a_rise_stands_before_its_problems_in_outlook_and_next(tmp_path: Path):
    run, writer = started_run(tmp_path)
    evaluate(writer, 0, 10)
    learn(writer, range(1, 12), **{"rollouts/truncated_share": 0.6})
    evaluate(writer, 11, 55)
    read_in(open_store(), run.id)
    body = await call("status", run_id=run.id)
    assert body["run"]["verdict"]["outcome"] == "improved" and body["run"]["flags"][0]["severity"] == "problem"
    assert body["run"]["outlook"].startswith("yes: the held-out success rose; mind truncation: 60 %")
    assert body["next"].startswith("the held-out success rose; mind truncation: see") and "cancel" not in body["next"]


async def test_a_split_that_has_no_more_tasks_is_measured_with_more_attempts(tmp_path: Path):
    run = underpowered(tmp_path)
    count_split(run)
    said = (await call("status", run_id=run.id))["next"]
    assert "has no more than 60" in said and [each["attempts"] for _, each in named_calls(said)] == [4, 4]
    count_split(run, 5000)
    calls = named_calls((await call("status", run_id=run.id))["next"])
    assert all(60 < each["limit"] < 5000 for _, each in calls)


async def test_what_was_measured_before_and_after_is_compared(tmp_path: Path):
    run = stopped(tmp_path, "succeeded", algorithm="sft")
    count_split(run)
    assert "evaluate(" in (await call("status", run_id=run.id))["next"]
    trained = await call("evaluate", model=run.id, max_tokens=64)
    play_evaluation(trained["run_id"], 40)
    said = (await call("status", run_id=run.id))["next"]
    tool, arguments = named_calls(said)[0]
    assert (tool, arguments["model"], arguments["max_tokens"]) == ("evaluate", f"{run.id}@0", 64)
    start = await call("evaluate", **arguments)
    play_evaluation(start["run_id"], 20)
    said = (await call("status", run_id=run.id))["next"]
    assert named_calls(said) == [("compare", {"base": start["run_id"], "other": trained["run_id"]})]


async def test_a_key_of_a_cancelled_run_does_not_promise_to_follow_it(tmp_path: Path):
    queued_run(tmp_path)
    asked = {"environment": "echo", "steps": 5, "idempotency_key": "first"}
    started = await call("train", **asked)
    queue.request_cancel(open_store(), started["run_id"])
    again = await call("train", **asked)
    assert (again["state"], again["created"]) == ("cancelled", False)
    calls = named_calls(again["next"])
    assert calls == [("train", {"resume": started["run_id"]})]
    assert (await call("train", **calls[0][1]))["state"] == "queued"


async def refused(tool: str, **arguments: Any) -> FlashError:
    with pytest.raises(FlashError) as caught:
        await call(tool, **arguments)
    return caught.value


async def play(text: str) -> list[Any]:
    """The results of all calls that a text writes out."""
    calls = named_calls(text)
    assert calls, text
    return [await call(tool, **arguments) for tool, arguments in calls]


async def test_a_search_over_all_steps_is_not_sent_to_all_steps(tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    said = (await call("rollouts", run_id=run_id, contains="nowhere"))["next"]
    assert "step=-1" not in said and "leave out contains" in said
    newest = (await call("rollouts", run_id=run_id, step=1, contains="nowhere"))["next"]
    assert "step=-1 looks into all steps" in newest
    assert (await call("rollouts", run_id=run_id, step=-1))["total"]


async def test_checkpoints_of_a_running_run_are_waited_for(tmp_path: Path) -> None:
    run_id = running(tmp_path).id
    said = (await call("checkpoints", run_id=run_id))["next"]
    assert named_calls(said) == [("status", {"run_id": run_id, "until": "news"})]
    assert named_calls((await refused("deploy", run_id=run_id)).fix) == named_calls(said)


async def test_what_has_a_checkpoint_is_evaluated(tmp_path: Path) -> None:
    run_id = stopped(tmp_path, "cancelled").id
    error = await refused("compare", base=run_id, other=run_id)
    (made,) = await play(error.fix)
    assert made["created"]
    error = await refused("compare", base=f"{run_id}@3", other=run_id)
    assert named_calls(error.fix) == [("evaluate", {"model": f"{run_id}@6"})]


@pytest.mark.parametrize("name", [None, "dep-nothing"])
async def test_there_is_nothing_to_undeploy(name: str | None) -> None:
    error = await refused("undeploy", deployment=name)
    assert error.code == "unknown_deployment" and "start" not in str(error)
    assert "catalog" in error.fix and "deployments" in await call("catalog")


async def test_after_a_sample_of_the_train_split_comes_train(tmp_path: Path) -> None:
    push_echo(tmp_path)
    arguments = {"environment": "echo", "split": "train", "attempts": 4, "limit": 3}
    made = await call("evaluate", **arguments, model="smollm2-135m-instruct", max_tokens=64)
    play_evaluation(made["run_id"], 4, 12)
    said = (await call("status", run_id=made["run_id"]))["next"]
    (training,) = [arguments for tool, arguments in named_calls(said) if tool == "train"]
    assert training == {"environment": "echo", "max_tokens": 64}
    assert (await call("train", **training))["created"]


async def test_validation_does_not_promise_what_the_gate_refuses(tmp_path: Path) -> None:
    version = push_echo(tmp_path)
    open_store().put_gate(version.digest, None, ["junk"])
    said = (await call("train", environment="echo", validate_only=True))["next"]
    assert "without validate_only" not in said and [tool for tool, _ in named_calls(said)] == ["env_test"]
    assert named_calls((await refused("train", environment="echo")).fix) == named_calls(said)
    assert (await call("train", environment="echo", accept_failed_gate=True))["created"]


async def test_more_tasks_than_the_split_has_are_not_asked_for(tmp_path: Path) -> None:
    """The size is known from the run itself, also where env_push did not count it."""
    push_echo(tmp_path)
    made = await call("evaluate", environment="echo", model="smollm2-135m-instruct")
    assert open_store().run(made["run_id"]).lineage["tasks"] == {"eval": made["tasks"]}
    trained = await call("train", environment="echo")
    assert open_store().run(trained["run_id"]).lineage["tasks"]["eval"] == made["tasks"]


async def test_the_start_of_a_warm_started_run_is_no_checkpoint_to_export(tmp_path: Path) -> None:
    warm = await call("train", environment="echo", init_from_adapter=finished_run(tmp_path).id)
    error = await refused("checkpoints", run_id=f"{warm['run_id']}@0", export="adapter")
    assert error.code == "invalid_argument" and "names no checkpoint" in error.what


async def test_a_home_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    push_echo(tmp_path)
    path = "~nobody-of-this-name/it"
    calls: list[tuple[str, dict[str, Any]]] = [
        ("env_setup", {"folder": path}),
        ("env_setup", {"folder": str(tmp_path / "new"), "dataset": f"{path}.csv"}),
        ("env_setup", {"template": "mcp_server", "server": f"{path}.py"}),
        ("env_setup", {"template": "mcp_server", "server": f"{path} --fast"}),
        ("env_test", {"folder": path}),
        ("env_push", {"folder": path, "name": "new"}),
        ("train", {"environment": "echo", "config": [path]}),
        ("train", {"environment": "echo", "init_from_adapter": path}),
        ("train", {"environment": "echo", "model": path}),
        ("train", {"environment": "echo", "algorithm": "distill", "settings": {"teacher": path}}),
    ]
    for tool, arguments in calls:
        error = await refused(tool, **arguments)
        assert (error.code, "no such home folder" in error.what) == ("invalid_argument", True), (arguments, error)


@pytest.mark.parametrize("path", ["s3://bucket/it", "file:///it", "a\0b", "x" * 300, "/".join("x" * 4000)])
async def test_what_is_no_path_of_this_machine_is_refused_and_nothing_is_written(tmp_path, monkeypatch, path: str):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for tool, arguments in [
        ("env_setup", {"folder": path}),
        ("env_setup", {"folder": "new", "dataset": f"{path}.csv"}),
        ("env_test", {"folder": path}),
        ("env_push", {"folder": path, "name": "new"}),
        ("train", {"environment": "echo", "config": [path]}),
    ]:
        error = await refused(tool, **arguments)
        assert error.code == "invalid_argument" and len(error.what) < 300, error
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    "value",
    [2**63, -(2**63) - 1, 10**400, 5e-324, 1e-320, float("inf"), float("nan"), "a\0b", "x" * 100_000, [{"a": 2**63}]],
    ids=lambda value: f"{value!r:.20}",
)
def test_values_that_nothing_keeps_are_refused_for_every_tool(value: Any) -> None:
    for tool in TOOLS.values():
        with pytest.raises(FlashError) as caught:
            check_arguments(tool, dict.fromkeys(("limit", "run_id"), value))
        assert caught.value.code == "invalid_argument" and "limit: " in caught.value.what
    check_arguments(
        TOOLS["train"], {"seed": 2**63 - 1, "steps": -(2**63), "learning_rate": 2.3e-308, "note": "x" * 5000}
    )


async def test_a_models_folder_that_may_not_be_entered_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    push_echo(tmp_path)
    is_file = Path.is_file

    def refusing(path: Path) -> bool:
        if path.is_relative_to(models_dir()):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refusing)
    with pytest.raises(PermissionError) as caught:
        await call("catalog", kind="models")
    error = as_flash_error("catalog", caught.value)
    assert error.code == "path_refused" and "config.json cannot be used: Permission denied" in error.what
    (told,) = [finding for finding in examine() if finding.name == "default model"]
    assert told.level == "problem" and "[path_refused]" in told.detail
