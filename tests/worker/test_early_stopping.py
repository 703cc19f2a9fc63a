"""A run that has nothing left to learn ends, at the same step if it was killed on its way there."""

import pytest

from tests.attempts import Attempt, held, make_run, messages_of
from worker.training_session import LEARNT_STEPS, EarlyStopping

PAID = """
class Paid(Held):
    def score_episode(self, example, episode):
        return RewardResult(1.0, success=True)
def load_environment():
    return Paid(12, 5, "Write")
"""
CERTAIN = """
from environments import EnvironmentSingleTurn, RewardResult, TaskExample
class Certain(EnvironmentSingleTurn):
    dataset = [TaskExample({}, f"Write {i}", output="a", id=f"t{i}") for i in range(16)]
    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]
    def score_response(self, example, response):
        return RewardResult(float(response == example.output))
def load_environment():
    return Certain()
"""


class TinyAttempt(Attempt):
    """The tiny model's head cannot make a token more certain than a loss of 0.44."""

    program = """
from worker import main
main.prepare_process()
from worker import training_session
training_session.LOSS_THRESHOLD = 0.46
main.main()
"""


def is_due(algorithm: str, *steps: dict[str, float | None]) -> bool:
    early = EarlyStopping(algorithm)
    for metrics in steps:
        early.add(metrics)
    return early.is_due


def test_ten_steps_in_a_row_without_anything_to_learn_are_the_end() -> None:
    low, high = {"loss": 0.0005}, {"loss": 0.002}
    assert is_due("sft", high, *[low] * LEARNT_STEPS)
    assert not is_due("sft", *[low] * LEARNT_STEPS, high), "the last step had something to learn"
    assert not is_due("sft", *[low] * (LEARNT_STEPS - 1)) and not is_due("sft", *[{"loss": None}] * LEARNT_STEPS)
    solved = {"success/rate": 1.0, "groups/uniform_share": 1.0, "loss": 0.0}
    assert is_due("grpo", *[solved] * LEARNT_STEPS)
    for name in solved.keys() - {"loss"}:
        assert not is_due("grpo", *[{**solved, name: 0.97}] * LEARNT_STEPS)
    assert not is_due("grpo", *[{**solved, "success/rate": 0.0}] * LEARNT_STEPS), "all fail: that is no end"
    assert not is_due("distill", *[{**solved, **low}] * LEARNT_STEPS)


@pytest.mark.long
def test_a_killed_run_whose_rollouts_all_succeed_ends_at_the_step_that_it_would_have_ended_at(tiny_model, tmp_path):
    saved = tmp_path / "run" / "checkpoints" / "8"
    environment, flag = held(tmp_path / "paid", saved=saved)
    source = environment / "environment.py"
    source.write_text(source.read_text() + PAID)
    fields = {"environment": environment, "steps": 30, "batch_size": 2, "group_size": 2, "eval_after": True}
    run = make_run(tmp_path / "run", tiny_model, **fields)
    with Attempt(run) as attempt:
        attempt.wait_until(lambda: run.checkpoints.newest_good() == 8)
    flag.unlink()
    result = Attempt(run, 2).ended()
    assert result is not None and (result["state"], result["step"]) == ("succeeded", LEARNT_STEPS + 1)
    assert run.checkpoints.newest_good() == LEARNT_STEPS + 1 and list(run.eval_steps()) == [LEARNT_STEPS + 1]
    assert messages_of(run, "last_step") == ["nothing to learn was left in 10 steps: step 11 is the last, of up to 30"]


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [True, False])
def test_fine_tuning_ends_once_its_answers_are_certain_unless_it_may_not(tiny_model, tmp_path, early_stopping: bool):
    environment = tmp_path / "certain"
    environment.mkdir()
    (environment / "environment.py").write_text(CERTAIN)
    fields = {"algorithm": "sft", "steps": 80, "group_size": None, "save_every": 80, "learning_rate": 0.003}
    fields |= {"lora_rank": 64, "lora_alpha": 256, "lr_schedule": "constant", "environment": environment}
    run = make_run(tmp_path / "run", tiny_model, early_stopping=early_stopping, **fields)
    result = TinyAttempt(run).ended()
    assert result is not None and result["state"] == "succeeded"
    losses = [metrics["metrics"]["loss"] for step in run.metric_steps() if (metrics := run.metrics(step))]
    assert max(losses[-LEARNT_STEPS:]) < 0.46, losses
    assert (result["step"] < 80) == bool(messages_of(run, "last_step")) == early_stopping
