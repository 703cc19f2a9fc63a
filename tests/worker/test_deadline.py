"""A run that has to end in time: how many steps are planned, and what a real one leaves."""

import time

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import validate
from tests.attempts import Attempt, make_run, messages_of
from worker.training_session import Deadline


def plan(*step_s: float, ends: float, most: int = 100, evaluation_s: float | None = None, attempts: int = 0) -> int:
    """The steps that a run makes whose steps take so long, the last one again and again."""
    deadline = Deadline(ends, attempts, evaluation_s)
    now, step, planned = 5.0, 0, most
    deadline.begin(now)
    while step < planned:
        now += step_s[min(step, len(step_s) - 1)]
        step += 1
        deadline.begin(now)
        planned = deadline.steps(step, most, now)
    return step


def test_as_many_steps_are_made_as_fit_before_the_last_evaluation() -> None:
    assert plan(2.0, ends=45.0) == 20 and plan(2.0, ends=45.0, most=12) == 12
    assert plan(2.0, ends=45.0, evaluation_s=10.0, attempts=4) == 15
    assert plan(2.0, ends=45.0, attempts=4) == 16, "as long as four steps until it was measured"
    assert plan(10.0, 1.0, ends=45.0) > 25, "a first step that compiles does not decide"
    assert plan(2.0, ends=3.0) == 1, "one step is made even if there is no time"


@pytest.mark.parametrize("text", ["25 min", "1.5h", "90 s"])
def test_a_time_is_read_as_people_write_it(text: str) -> None:
    spec = validate({"environment": "echo", "finish_by": text})
    assert spec.finish_s == {"25 min": 1500, "1.5h": 5400, "90 s": 90}[text]


@pytest.mark.parametrize("text", ["soon", "25", "2026-11-25T16:00", "-1 h"])
def test_what_is_no_time_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(FlashError, match="25 min or 2 h") as caught:
        validate({"environment": "echo", "finish_by": text})
    assert text in str(caught.value)


@pytest.mark.slow
def test_a_run_that_is_out_of_time_succeeds_with_a_checkpoint_an_evaluation_and_a_rate_that_fell(tiny_model, tmp_path):
    fields = {"steps": 1000, "save_every": 1000, "lr_schedule": "linear", "eval_after": True}
    started = time.time() - 3600
    run = make_run(tmp_path / "run", tiny_model, finish_by="60 min", job={"started": started}, **fields)
    result = Attempt(run).ended()
    assert result is not None and result["state"] == "succeeded"
    step = result["step"]
    assert step == 1 and run.checkpoints.newest_good() == step and list(run.eval_steps()) == [step]
    assert messages_of(run, "last_step") == ["finish_by=60 min: step 1 is the last, of up to 1000"]
    beat = run.read_json("beat.json")
    assert beat is not None and beat["steps"] == step
