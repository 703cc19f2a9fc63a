"""The regression split by a real worker: before and after a run, whatever its own environment is."""

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.references import REGRESSION_FOLDER
from tests.attempts import Attempt, events_of, make_run
from worker.ranks import ALONE
from worker.training_session import TrainingSession

TROUBLE = {"tools_unsupported": True, "out_of_memory": False}
"""Whether a run goes on after it."""
SPLIT = {"name": "regression", "path": str(REGRESSION_FOLDER), "owner": "local", "tasks": 120}


def test_a_run_tries_the_split_before_and_after_and_goes_on_without_one_that_fails(tiny_model: Path, tmp_path: Path):
    run = make_run(tmp_path / "run", tiny_model, job={"regression": SPLIT}, steps=1)
    Attempt(run).ended()
    first, last = events_of(run, "regression")
    assert (first["step"], last["step"]) == (0, 1)
    assert len(first["outcomes"]) == 120 and first["outcomes"].keys() == last["outcomes"].keys()
    assert first["message"] == f"solved {sum(first['outcomes'].values())} of 120 regression tasks"
    assert run.evaluation(0) is None, "it is no evaluation of the run's own split"
    gone = {**SPLIT, "path": str(tmp_path / "nowhere")}
    run = make_run(tmp_path / "other", tiny_model, job={"regression": gone}, steps=1)
    result = Attempt(run).ended()
    assert result and result["state"] == "succeeded" and not events_of(run, "regression")
    assert "the regression split was not tried" in events_of(run, "warning")[0]["message"]


@pytest.mark.parametrize("code", TROUBLE)
def test_only_trouble_of_that_environment_leaves_the_run_alone(code: str) -> None:
    warnings: list[str] = []

    def fail(coroutine: Any) -> None:
        coroutine.close()
        raise ExceptionGroup("", [ExceptionGroup("", [FlashError(code, "what happened")])])

    session: Any = SimpleNamespace(
        heartbeat=SimpleNamespace(cancelled=threading.Event(), enter=lambda *_: None), sync=lambda step: None,
        ranks=ALONE, wait=fail, writer=SimpleNamespace(event=lambda kind, what: warnings.append(what)),
    )  # fmt: skip
    session._regression = partial(TrainingSession._regression, session)
    with nullcontext() if TROUBLE[code] else pytest.raises(ExceptionGroup):
        TrainingSession.try_regression(session, SPLIT, 0)
    assert len(warnings) == TROUBLE[code]
