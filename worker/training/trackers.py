"""Sends metrics to experiment trackers, through the integrations that transformers has.

Each tracker works on a thread of its own: one that is away, raises or hangs stops nothing. What
failed becomes an event of the run."""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.spec import RunSpec

CLOSING_S = 30.0
"""Time that the trackers have to send what is left when the run ends: on a busy machine a short run
may be over before the tracker's package is imported."""
PROJECT = "flash-mcp"
"""What the run is filed under."""
VARIABLES = {
    "WANDB_PROJECT": PROJECT,
    "MLFLOW_EXPERIMENT_NAME": PROJECT,
    # It would upload what the worker logs, with what environment code wrote.
    "WANDB_CONSOLE": "off",
}
"""What the trackers read, unless the user has set it."""
IN_RUN_FOLDER = {"TENSORBOARD_LOGGING_DIR": "tensorboard", "WANDB_DIR": ""}
"""Folders of theirs within that of the run, with which they are removed; wandb adds a name."""


class Trackers:
    def __init__(self, spec: RunSpec, writer: RunWriter, arguments: TrainingArguments) -> None:
        """`arguments` are those of the trainer; trackers show the fields of `spec` instead."""
        folder = writer.folder
        for variable, value in VARIABLES.items():
            os.environ.setdefault(variable, value)
        if folder.is_local:
            for variable, name in IN_RUN_FOLDER.items():
                os.environ.setdefault(variable, str(Path(folder.root, name)))
        shown: Any = copy.copy(arguments)
        shown.run_name = folder.root.rpartition("/")[2]
        shown.project = PROJECT
        shown.to_dict = spec.model_dump
        shown.to_json_string = spec.model_dump_json
        self._writer = writer
        self._running = [_Tracker(name, shown) for name in spec.report_to]
        for tracker in self._running:
            tracker.start()

    def tell(self, step: int, metrics: Json) -> None:
        """Queue the metrics of a step. Nulls are left out."""
        existing = {name: value for name, value in metrics.items() if value is not None}
        for tracker in self._running:
            tracker.waiting.put((step, existing))
        self._report_failures()

    def close(self) -> None:
        """Wait for what is still to be sent, for at most CLOSING_S in all."""
        for tracker in self._running:
            tracker.waiting.put(None)
        deadline = time.monotonic() + CLOSING_S
        for tracker in self._running:
            tracker.join(max(0.0, deadline - time.monotonic()))
            if tracker.is_alive():
                tracker.failure = f"it did not answer within {CLOSING_S:.0f} s"
        self._report_failures()

    def _report_failures(self) -> None:
        for tracker in [item for item in self._running if item.failure]:
            self._running.remove(tracker)
            what = f"{tracker.label} gets no more metrics: {tracker.failure}"
            self._writer.event("warning", what)


class _Tracker(threading.Thread):
    def __init__(self, label: str, arguments: Any) -> None:
        super().__init__(name=f"tracker {label}", daemon=True)
        self.label = label
        self.failure: str | None = None
        self.waiting = SimpleQueue[tuple[int, Json] | None]()
        self._arguments = arguments

    def run(self) -> None:
        state = TrainerState()
        common = (self._arguments, state, TrainerControl())
        try:
            # The constructor imports the tracker's package.
            callback = cast(Any, integration_utils).INTEGRATION_TO_CALLBACK[self.label]()
            callback.on_train_begin(*common, model=None)
            while (response := self.waiting.get()) is not None:
                state.global_step, metrics = response
                callback.on_log(*common, logs=dict(metrics), model=None)
            callback.on_train_end(*common, model=None)
        except BaseException as error:  # foreign code on its own thread: whatever it raises
            self.failure = f"{type(error).__name__}: {error!s:.300}"


def eval_metrics(summary: Json) -> Json:
    """An evaluation's summary under the names that the integrations show as eval/NAME."""
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    return {f"eval_{name}": value for name, value in numbers.items()}
