"""What happens between two steps: metrics are reported, checkpoints are committed, cancels are
obeyed.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.schedules import is_measured, rate_factor
from flash_mcp.protocol.spec import RunSpec
from worker.capacity import used_gib
from worker.rollouts.task_choice import BELIEFS

log = logging.getLogger("worker")

REPORTED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "kl",
    "teacher_kl",
    "is_ratio/mean",
    "is_ratio/clipped_share",
    "is_ratio/effective_share",
    "sampling_kl",
    "sampling_logp_difference/mean",
)
"""The metrics of a trainer that are kept."""
CHECKPOINT_FILES = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    BELIEFS,
}


def trainer_arguments(spec: RunSpec, policy: PeftModel, output_dir: str) -> Json:
    """The arguments that the trainers of GRPO and SFT share. Reporter decides when to save and what
    to log.
    """
    return {
        "output_dir": output_dir,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",  # Reporter sets the run's own
        "max_grad_norm": spec.max_grad_norm,
        "router_aux_loss_coef": 0.0,  # no adapter is on a mixture of experts' router
        "seed": spec.seed,
        "bf16": policy.dtype == torch.bfloat16,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,  # the trainers decide for each group or batch
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


class Finished(Exception):
    """An attempt that resumes finds every step done; transformers would make one more."""


class Reporter(TrainerCallback):
    """Writes a step's metrics after it, and a checkpoint when one is due.

    `pending` holds the metrics of the current step's rollouts. The trainer's own metrics are added
    to them, `steady` ones, which are the same at each step, and those of `measure` where
    `is_measured`. `advance` is called after each part of a step. FlashError(diverged) if a gradient
    is not finite."""

    def __init__(
        self,
        writer: RunWriter,
        spec: RunSpec,
        cancelled: threading.Event,
        *,
        before_step: Callable[[int, int], None] = lambda step, steps: None,
        planned: Callable[[int, int], int] = lambda step, most: most,
        advance: Callable[[], None] = lambda: None,
        saves: bool = True,
    ) -> None:
        self.saves = saves
        """Whether this process writes checkpoints. Of several ranks, the first does."""
        self.writer = writer
        self.spec = spec
        self.cancelled = cancelled
        self.before_step = before_step
        self.planned = planned
        self.advance = advance
        self.pending: Json = {}
        self.steady: Json = {}
        self.begin: Callable[[], None] = lambda: None
        self.measure: Callable[[], Json] = dict
        self.tell: Callable[[int, Json], None] = lambda step, metrics: None
        """Gets the metrics of every step and of every evaluation."""
        self.add_files: Callable[[Path], None] = lambda folder: None
        """Writes more of CHECKPOINT_FILES into a checkpoint."""
        self.step_started = time.monotonic()
        self.saved_step = -1
        self.last: Json = {}
        """The metrics of the last step that this attempt reported."""
        self._most = 0
        """The steps of the run, if it does not have to end earlier."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the trainer's scheduler, which may come from a checkpoint, the run's schedule."""
        scheduler = kwargs["lr_scheduler"]
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it

        def factor(step: int) -> float:
            return rate_factor(self.spec, step, state.max_steps)

        scheduler.last_epoch = state.global_step  # a fresh optimizer comes with a fresh scheduler
        scheduler.lr_lambdas = [factor for _ in scheduler.lr_lambdas]
        for group in scheduler.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        self.begin()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            raise Finished
        self.before_step(state.global_step, state.max_steps)
        self.step_started = time.monotonic()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.advance()

    on_prediction_step = on_substep_end

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._most = self._most or state.max_steps
        # The schedule of the learning rate reads it too.
        state.max_steps = self.planned(state.global_step, self._most)
        last = state.global_step >= state.max_steps
        # Before the flags of `control` are set: an evaluation within a step clears them.
        if is_measured(self.spec, state.global_step, state.max_steps):
            self.pending |= self.measure()
        control.should_log = True
        control.should_training_stop |= last or self.cancelled.is_set()
        is_due = state.global_step % self.spec.save_every == 0
        control.should_save = self.saves and (is_due or last or control.should_training_stop)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs:  # the summary that follows the last step
            return
        state.log_history.clear()  # every checkpoint would hold all of it
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            raise FlashError(
                "diverged",
                f"the gradient of step {state.global_step} is {logs['grad_norm']}: the adapter is "
                "lost from there on",
                step=state.global_step,
                fix="lower learning_rate (and kl_penalty_coef), and start from this run's last "
                "checkpoint",
            )
        step_s = time.monotonic() - self.step_started
        reported = {name: value for name, value in logs.items() if name in REPORTED}
        beside = ("time/rollout_s", "time/sync_s", "time/held_out_s")
        train_s = step_s - sum(self.pending.get(name, 0.0) for name in beside)
        times = {"time/step_s": step_s, "time/train_s": train_s}
        self.last = clean({**self.pending, **reported, **self.steady, **times, **used_gib()})
        self.pending = {}
        self.writer.metrics(state.global_step, self.last)
        self.tell(state.global_step, self.last)
        shown = ("reward/mean", "success/rate", "loss", "time/step_s")
        existing = [name for name in shown if self.last.get(name) is not None]
        values = "  ".join(f"{name} {self.last[name]:.3g}" for name in existing)
        log.info("step %s/%s: %s", state.global_step, state.max_steps, values)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.commit(Path(args.output_dir or "."), state.global_step)

    def commit(self, output_dir: Path, step: int) -> None:
        """Move the trainer's checkpoint of `step` into the run folder."""
        source = output_dir / f"checkpoint-{step}"
        for path in source.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in CHECKPOINT_FILES:  # such as the tokenizer: the base model has it
                path.unlink()
        self.add_files(source)
        manifest = self.writer.commit_checkpoint(step, source, self.last)
        shutil.rmtree(source)
        self.saved_step = step
        size = manifest["size_bytes"]
        self.writer.event("checkpoint", f"checkpoint {step}", step=step, size_bytes=size)


def clean(metrics: Json) -> Json:
    """Finite numbers as they are, anything else as null: JSON has no NaN."""
    return {
        name: float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
        for name, value in metrics.items()
    }
