"""The regression split by a real worker: before and after a run, whatever its own environment is."""

import io
import shutil
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from rich.console import Console

from flash_mcp.cli.demo import connected, watch
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.state.references import REGRESSION_FOLDER
from tests.attempts import Attempt, events_of, make_run
from tests.folders import environment_folder
from tests.places import CALCULATOR, NO_TORCH
from worker.ranks import ALONE
from worker.training_session import TrainingSession

TROUBLE = {"tools_unsupported": True, "out_of_memory": False}  # whether a run goes on after it
SPLIT = {"name": "regression", "path": str(REGRESSION_FOLDER), "owner": "local", "tasks": 120}
GONE = {**SPLIT, "path": "/nowhere"}
SFT: dict[str, Any] = {
    "algorithm": "sft", "environment": CALCULATOR, "group_size": None, "batch_size": 2, "eval_after": False,
    "max_length": 1024,
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, SFT], ids=["grpo", "sft"])
def test_a_run_tries_the_split_before_and_after_it(tiny_model: Path, tmp_path: Path, fields: dict[str, Any]):
    run = make_run(tmp_path / "run", tiny_model, job={"regression": SPLIT}, steps=1, **fields)
    Attempt(run).ended()
    first, last = events_of(run, "regression")
    assert (first["step"], last["step"]) == (0, 1)
    assert len(first["outcomes"]) == 120 and first["outcomes"].keys() == last["outcomes"].keys()
    assert first["message"] == f"solved {sum(first['outcomes'].values())} of 120 regression tasks"
    assert run.evaluation(0) is None, "it is no evaluation of the run's own split"


@pytest.mark.parametrize(
    ("fields", "split", "without_vllm", "says"),
    [
        ({}, GONE, False, "tried: "),
        pytest.param(SFT, SPLIT, True, "tried: the engine does not start: ", marks=pytest.mark.long),
        pytest.param(SFT, None, True, "", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_without_a_split_that_cannot_be_tried(tiny_model, tmp_path, fields, split, without_vllm, says):
    shutil.copy(NO_TORCH / "vllm.py", tmp_path)
    path: dict[str, Any] = {"PYTHONPATH": str(tmp_path)} if without_vllm else {}
    run = make_run(tmp_path / "run", tiny_model, job={"regression": split}, steps=1, **fields)
    result = Attempt(run, fresh=without_vllm, **path).ended()
    assert result and result["state"] == "succeeded" and not events_of(run, "regression")
    warnings = [event["message"] for event in events_of(run, "warning")]
    assert [text.startswith(f"the regression split was not {says}") for text in warnings] == [True] * bool(says)


@pytest.mark.parametrize("code", TROUBLE)
def test_only_trouble_of_that_environment_leaves_the_run_alone(code: str) -> None:
    warnings: list[str] = []

    def fail(coroutine: Any) -> None:
        coroutine.close()
        raise ExceptionGroup("", [ExceptionGroup("", [FlashError(code, "what happened")])])

    session: Any = SimpleNamespace(
        heartbeat=SimpleNamespace(cancelled=threading.Event(), enter=lambda *_: None), sync=lambda step: None,
        ranks=ALONE, wait=fail, regression=SPLIT,
        writer=SimpleNamespace(event=lambda kind, what: warnings.append(what)),
    )  # fmt: skip
    session._regression = partial(TrainingSession._regression, session)
    session._leave_out = partial(TrainingSession._leave_out, session)
    with nullcontext() if TROUBLE[code] else pytest.raises(ExceptionGroup):
        TrainingSession.try_regression(session, 0)
    assert len(warnings) == TROUBLE[code]


NARROW = """
class Sample(EnvironmentSingleTurn):
    dataset = [TaskExample({}, f"Report on machine {n}.", output="OK", id=f"t{n}") for n in range(64)]
    eval_dataset = [TaskExample({}, f"Report on engine {n}.", output="OK", id=f"v{n}") for n in range(20)]
    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]
    def score_response(self, example, text):
        return RewardResult(float((text or "").strip() == example.output))
"""


@pytest.mark.long
def test_a_real_model_that_learns_one_answer_forgets_and_its_run_says_so(tmp_path: Path, flash_home: Path) -> None:
    folder = environment_folder(tmp_path / "environment", NARROW)

    async def judged() -> Json:
        async with connected(Console(file=io.StringIO(), width=200)) as session:
            pushed = await session.call("env_push", folder=str(folder), name="narrow")
            common = {"environment": pushed["environment"], "algorithm": "sft", "model": "smollm2-135m-instruct"}
            train = {"steps": 16, "batch_size": 8, "learning_rate": 1e-3, "max_length": 512, "accept_failed_gate": True}
            started = await session.call("train", **common, **train)
            assert started["estimate"]["regression"].startswith("on: 120 short tasks"), started
            assert (await watch(session, started["run_id"]))["state"] == "succeeded"
            return await session.call("status", run_id=started["run_id"])

    body = anyio.run(judged)
    assert body["run"]["regression"].startswith("regressed on 120 other tasks, 0.")
    assert [flag["name"] for flag in body["run"]["flags"]] == ["worse_elsewhere"]
    assert body["next"].startswith("worse_elsewhere: ")
