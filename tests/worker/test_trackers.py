import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.spec import RunSpec
from tests.attempts import make_run, messages_of
from tests.waiting import WAIT_S
from worker.training import trackers
from worker.training.trackers import Trackers

STEPS = 200


class Kept(TrainerCallback):
    """A tracker that works."""

    told: list[tuple[int, float]]

    def __init__(self) -> None:
        Kept.told = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        assert args.to_dict()["environment"] and args.run_name == "run"
        Kept.told.append((state.global_step, logs["loss"]))


class Away(TrainerCallback):
    """A tracker that cannot be reached once training has begun."""

    def on_log(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("no route to the tracker")


class Hanging(TrainerCallback):
    """A tracker that never answers."""

    let_go = threading.Event()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.let_go.wait(WAIT_S)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known: Any = INTEGRATION_TO_CALLBACK
    for name, callback in (("wandb", Kept), ("mlflow", Away), ("trackio", Hanging)):
        monkeypatch.setitem(known, name, callback)
    monkeypatch.setattr(trackers, "CLOSING_S", 2.0)
    for variable in (*trackers.VARIABLES, *trackers.IN_RUN_FOLDER):
        monkeypatch.setenv(variable, "set by this test")  # and removed after it
    monkeypatch.delenv("WANDB_DIR")
    monkeypatch.delenv("WANDB_CONSOLE")
    Hanging.let_go.clear()
    yield
    Hanging.let_go.set()


@pytest.mark.usefixtures("stand_ins")
def test_a_tracker_that_raises_or_hangs_stops_neither_the_run_nor_the_others(tmp_path: Path):
    run = make_run(tmp_path / "run", tmp_path, report_to=["wandb", "mlflow", "trackio"])
    writer = RunWriter(run, 1)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    told = Trackers(RunSpec(**run.job()["spec"]), writer, arguments)
    for step in range(1, STEPS + 1):
        told.tell(step, {"loss": step / 2, "kl": None})
    told.close()
    assert (os.environ["WANDB_DIR"], os.environ["WANDB_CONSOLE"]) == (str(tmp_path / "run"), "off")
    assert os.environ["WANDB_PROJECT"] == "set by this test"
    assert Kept.told == [(step, step / 2) for step in range(1, STEPS + 1)]
    assert sorted(messages_of(run, "warning")) == [
        "mlflow gets no more metrics: ConnectionError: no route to the tracker",
        "trackio gets no more metrics: it did not answer within 2 s",
    ]
