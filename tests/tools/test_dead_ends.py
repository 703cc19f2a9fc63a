"""Words that once led nowhere: each Fix and `next` below is done literally, and works."""

import errno
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.cli.doctor import examine
from flash_mcp.protocol.errors import FlashError, as_flash_error
from flash_mcp.protocol.paths import models_dir
from flash_mcp.state.store import open_store
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.tool_base import check_arguments
from tests.calls import named_calls
from tests.frozen_calls import play_evaluation
from tests.samples import finished_run, push_echo
from tests.tools.test_next import call, running, stopped

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_supervisor")]


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
    error = await refused("deploy", run_id=run_id)
    assert named_calls(error.fix) == named_calls(said)


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
    assert "without validate_only" not in said
    assert [tool for tool, _ in named_calls(said)] == ["env_test"]
    error = await refused("train", environment="echo")
    assert named_calls(error.fix) == named_calls(said)
    assert (await call("train", environment="echo", accept_failed_gate=True))["created"]


async def test_more_tasks_than_the_split_has_are_not_asked_for(tmp_path: Path) -> None:
    """The size is known from the run itself, also where env_push did not count it."""
    push_echo(tmp_path)
    made = await call("evaluate", environment="echo", model="smollm2-135m-instruct")
    run = open_store().run(made["run_id"])
    assert run.lineage["tasks"] == {"eval": made["tasks"]}
    trained = await call("train", environment="echo")
    assert open_store().run(trained["run_id"]).lineage["tasks"]["eval"] == made["tasks"]


async def test_the_start_of_a_warm_started_run_is_no_checkpoint_to_export(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    warm = await call("train", environment="echo", init_from_adapter=run.id)
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
