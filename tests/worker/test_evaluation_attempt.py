"""Evaluations by real workers: the tiny model, the real engine, real processes and signals."""

import threading
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import EvalSpec
from flash_mcp.state.references import Subject
from flash_mcp.tools.shared import resolve
from tests.attempts import VOWELS, Attempt, vowels
from tests.model_rows import make_model
from tests.waiting import WAIT_S
from worker.evaluate import EvalRecorder
from worker.heartbeat import Heartbeat
from worker.rollouts.scheduler import PlayedRollout, RolloutTask


def make_evaluation(
    folder: Path, model: Path, *, environment: Path = VOWELS, adapter: Path | None = None, **fields: Any
) -> RunFolder:
    """A run folder with an evaluation of the first five eval tasks, or of `tasks`."""
    step = 7 if adapter else 0
    subject = Subject(str(model), 4096, step, adapter={"path": str(adapter)} if adapter else None)
    place = {"owner": "local", "name": "vowels", "digest": "0", "path": str(environment)}
    row = EnvironmentVersion(**place, size_bytes=1, pushed=0.0, data={})
    tasks, attempts = fields.pop("tasks", range(5)), fields.pop("attempts", 1)
    given = {"max_tokens": 16, "max_length": 256, **fields}
    spec = resolve.resolve_eval(subject, row, split="eval", tasks=list(tasks), attempts=attempts, arguments=given).spec
    run = RunFolder(folder)
    job = {"run_id": folder.name, "spec": spec.model_dump(), "environment": vars(row)}
    run.create({**job, "init_adapter": subject.adapter})
    return run


def finish(run: RunFolder, number: int = 1, step: int = 0) -> dict[str, Any]:
    """The evaluation, once an attempt has ended well."""
    result, found = Attempt(run, number).ended(), run.evaluation(step)
    assert result is not None and result["state"] == "succeeded", (result, run.log_tail(number))
    assert found is not None
    return found


def test_an_evaluation_makes_every_attempt_and_trains_nothing(tiny_model: Path, tmp_path: Path) -> None:
    run = make_evaluation(tmp_path / "run", tiny_model, attempts=3, tasks=[4, 1])
    found = finish(run)
    rows = found["rollouts"]
    assert [(row["task_id"], row["attempt"], row["index"]) for row in rows] == [
        (task, number, place * 3 + number) for place, task in enumerate(("v4", "v1")) for number in range(3)
    ]
    assert all(row["split"] == "eval" and row["step"] == 0 and row["turns"] == 2 and not row["error"] for row in rows)
    assert len({str(row["messages"]) for row in rows}) == 6, "attempts at temperature 1 are of different seeds"
    summary = found["summary"]
    assert summary["n"] == 6 and summary["tokens_per_s"] > 0
    assert "constant_success" not in summary, "two tasks say nothing of constants"
    assert summary["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 6)
    assert run.result()["step"] == 6 and not run.checkpoints.steps() and not run.metric_steps()
    assert not Path(run.path("evals", "0")).exists(), "the shards are gone once the whole is there"


def test_the_best_constant_answer_is_measured_on_the_tasks_of_an_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    args = {"held_out": 12}
    run = make_evaluation(tmp_path / "run", tiny_model, attempts=1, tasks=range(12), environment_args=args)
    summary = finish(run)["summary"]
    # The fixture pays for vowels, whatever the task asks.
    assert summary["constant_n"] == 12 and summary["constant_success"] == 1
    said = [run.event(name) or {} for name in run.event_names()]
    assert [event["kind"] for event in said].count("constant") == 1


def test_a_checkpoint_is_evaluated_with_its_adapter(tiny_model: Path, tiny_adapter: Path, tmp_path: Path) -> None:
    run = make_evaluation(tmp_path / "run", tiny_model, adapter=tiny_adapter)
    assert EvalSpec(**run.job()["spec"]).lora_rank == 4
    rows = finish(run, step=7)["rollouts"]
    written = "".join(message["content"] for row in rows for message in row["messages"] if message["role"] != "user")
    assert written.count("Z") > len(written) / 2, "the adapter prefers Z"


@pytest.mark.cpu
def test_an_evaluation_of_a_model_that_needs_a_gpu_is_refused(tmp_path: Path) -> None:
    result = Attempt(make_evaluation(tmp_path / "run", make_model("lfm2", tmp_path / "model"))).ended()
    assert result is not None and result["error"]["code"] == "model_unsupported", result


def test_an_evaluation_killed_in_mid_way_repeats_no_attempt_that_was_recorded(tiny_model: Path, tmp_path: Path) -> None:
    slow = "        import time\n        time.sleep(0.005 * int(example.id[1:]))\n        text ="
    environment = vowels(tmp_path / "slow", "        text =", slow)
    fields = {"tasks": range(60), "environment_args": {"held_out": 60}, "env_concurrency": 4}
    run = make_evaluation(tmp_path / "run", tiny_model, environment=environment, **fields)
    with Attempt(run) as first:
        first.wait_until(lambda: run.attempts(0))
    recorded = run.attempts(0)
    assert run.result() is None and run.evaluation(0) is None and 0 < len(recorded) < 60
    found = finish(run, 2)
    rows = {row["index"]: row for row in found["rollouts"]}
    assert list(rows) == list(range(60)) and found["summary"]["n"] == 60 and found["epoch"] == 2
    assert all(rows[row["index"]] == row for row in recorded), "each with its own time, so none was made again"
    said = [run.event(name) or {} for name in run.event_names()]
    assert any(f"{len(recorded)} of 60" in event["message"] for event in said)


GROUPED = """
    def score_group(self, example, episodes):
        metrics = [RewardMetric("of", score=len(episodes))]
        return [RewardResult(at, metrics=metrics) for at, _ in enumerate(episodes)]
    def score_episode("""


def test_the_attempts_of_a_task_are_scored_together_also_those_of_a_resumed_evaluation(tiny_model: Path, tmp_path):
    environment = vowels(tmp_path / "grouped", "    def score_episode(", GROUPED)
    run = make_evaluation(tmp_path / "run", tiny_model, environment=environment, tasks=[2, 0], attempts=3)
    writer = RunWriter(run, 1)
    task = RolloutTask("eval", 2, 0, 1, seed=0, attempt=1)
    writer.attempts(0, [PlayedRollout(task, "v2", reward=9.0).record(0).fields()])
    rows = finish(run, 2)["rollouts"]
    # The attempt that was recorded before the interruption is made again with the two others.
    assert [row["reward"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["metrics"] for row in rows] == [{"of": 3}] * 6


def test_attempts_end_while_a_shard_of_them_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.evaluate.SHARD_EVERY_S", 0.0)
    run = make_evaluation(tmp_path / "run", tmp_path)
    writer, is_back, shards = RunWriter(run, 1), threading.Event(), list[int]()

    def slowly(step: int, rows: list[dict[str, Any]]) -> None:
        assert is_back.wait(WAIT_S)
        shards.append(len(rows))
        RunWriter.attempts(writer, step, rows)

    monkeypatch.setattr(writer, "attempts", slowly)
    recorder = EvalRecorder(writer, Heartbeat(writer), 0)
    for index in range(3):
        recorder.add(PlayedRollout(RolloutTask("eval", index, index, index, seed=0), f"v{index}"))
    assert not shards, "nobody waits for the store"
    is_back.set()
    recorder.flush()
    assert shards == [1, 2] and [row["index"] for row in run.attempts(0)] == [0, 1, 2]
    RunWriter(run, 2)
    recorder.add(PlayedRollout(RolloutTask("eval", 3, 3, 3, seed=0), "v3"))
    with pytest.raises(FlashError, match="fenced"):
        recorder.flush()


def test_an_evaluation_whose_environment_fails_keeps_the_evidence_and_says_so(tiny_model: Path, tmp_path: Path) -> None:
    environment = vowels(tmp_path / "failing", "        text =", "        raise KeyError('boom')\n        text =")
    run = make_evaluation(tmp_path / "run", tiny_model, environment=environment)
    result, found = Attempt(run).ended(), run.evaluation(0)
    assert result is not None and (result["state"], result["error"]["code"]) == ("failed", "environment_error")
    assert "5 of 5 rollouts" in result["error"]["what"] and "boom" in result["error"]["wrote"]
    assert found is not None and (found["summary"]["n"], found["summary"]["success"]) == (0, None)
    assert all(row["error"]["code"] == "environment_error" for row in found["rollouts"])
    # Killed before it could say so: the next attempt finds the evaluation done.
    Path(run.path("result.1.json")).unlink()
    again = Attempt(run, 2).ended()
    assert again is not None and (again["state"], again["error"]) == ("failed", result["error"])
