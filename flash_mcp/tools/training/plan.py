"""How much work a run is, a run that is ready to be queued, and one that goes on."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.schedules import (
    learnt_in,
    measured_of,
    measurements_of,
    rate_factor,
    steps_of,
)
from flash_mcp.protocol.spec import ResolvedSpec, RunSpec
from flash_mcp.state import queue
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.disk import in_words
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.devices import MemoryNeed
from flash_mcp.tools.shared.rows import Preview
from flash_mcp.tools.training.probe import NO_PROBE, MixturePart, Probed
from flash_mcp.tools.training.run_time import RunTime, Work

# -- how much work a run is, whether its lengths can work, and what its checkpoints will take ------

BYTES = 4
"""Of a parameter of an adapter: fp32, whatever the precision of the model."""
MOMENTS = 2
"""Numbers that the optimizer keeps for each parameter."""


class Estimate(ResultModel):
    steps: int
    rollouts: int | None = None
    examples: int | None = None
    held_out_examples: int | None = None
    train_tasks: int
    eval_tasks: int
    dataset_rows: int | None = None
    passes: float
    prompt_tokens_about: int
    tokens_at_most: int | None = None
    regression: str | None = None
    disk: str | None = None
    time: RunTime | None = None


def check_lengths(spec: RunSpec, card: ModelCard, prompt_tokens: int) -> None:
    """FlashError for lengths that cannot work. The worker checks with real tokens."""
    context = card.context
    if context and spec.max_length and spec.max_length > context:
        what = f"max_length={spec.max_length} is more than the model's context of {context}"
        raise FlashError("invalid_argument", what, fix=f"use max_length={context} or less")
    room = spec.max_length or DEFAULT_MAX_LENGTH
    if prompt_tokens > 2 * room:  # an estimate from characters may be wrong by half, not by twice
        what = f"a prompt of about {prompt_tokens} tokens does not fit into {room}"
        fix = "shorten the prompts, raise max_length, or choose a model with a longer context"
        raise FlashError("prompt_too_long", what, fix=fix)


def estimate_of(
    spec: RunSpec, probe: Probed, dataset: Dataset | None, preview: Preview | None = None
) -> Estimate:
    """`preview` says how many rows of the dataset are left out."""
    dataset_rows = len(dataset.rows()) if dataset else None
    tasks = dataset_rows or probe.splits["train"]
    if preview and preview.left_out:
        tasks -= preview.left_out
    if tasks < 1:
        what = f"no answer to learn fits within max_length={spec.max_length or DEFAULT_MAX_LENGTH}"
        raise FlashError("dataset_invalid", what, rows=dataset_rows, fix="raise max_length")
    batch = spec.batch_size
    steps = steps_of(spec, tasks)
    seen = steps * batch
    if spec.algorithm == "sft":
        seen = learnt_in(spec, steps, tasks)
    estimate = Estimate(
        steps=steps,
        train_tasks=probe.splits["train"],
        eval_tasks=probe.splits.get("eval", 0),
        dataset_rows=dataset_rows,
        passes=round(seen / tasks, 2),
        prompt_tokens_about=probe.prompt_tokens,
    )
    if spec.algorithm != "sft":
        estimate.rollouts = steps * batch * (spec.group_size or 1)
        # A bound, not a guess: answers are usually shorter.
        room = (spec.max_length or DEFAULT_MAX_LENGTH) - probe.prompt_tokens
        estimate.tokens_at_most = estimate.rollouts * max(1, min(spec.max_tokens, room))
    else:
        estimate.examples = seen
        rows = 0
        if spec.evaluates:
            rows = estimate.eval_tasks
        if dataset:
            rows = dataset.manifest["counts"]["holdout_rows"]
        measured = measured_of(spec, tasks, rows)
        estimate.held_out_examples = measurements_of(spec, steps) * measured or None
    return estimate


@dataclass(frozen=True)
class DiskNeed:
    adapter: int
    kept: int
    """Checkpoints that are there at the end."""
    free: int

    @property
    def whole(self) -> int:
        return self.adapter * (1 + MOMENTS)

    @property
    def total(self) -> int:
        """All that is there while the last checkpoint is saved."""
        return self.kept * self.adapter + 2 * self.whole

    def __str__(self) -> str:
        sizes = f"checkpoints take {self.kept} x {in_words(self.adapter)}"
        saving = f"{in_words(2 * self.whole)} more while one is saved"
        return f"{sizes}, and {saving}; {in_words(self.free)} free"

    def check(self) -> None:
        if self.free >= self.whole:
            return
        what = f"a checkpoint takes {in_words(self.whole)}, and {in_words(self.free)} are free"
        fix = "free space: `flash-mcp doctor` says what takes it; or use a lower lora_rank"
        raise FlashError("disk_full", what, fix=fix)

    def warning(self) -> str | None:
        if self.free >= self.total:
            return None
        return f"the disk may fill up: {self}; raise save_every or lower keep_checkpoints"


def disk_need(store: Store, spec: RunSpec, card: ModelCard, steps: int) -> DiskNeed | None:
    adapter = 0
    for run in store.runs(limit=50):  # the newest checkpoint of a run of the same model
        saved = run.model == spec.model and run.algorithm != "eval" and store.checkpoints(run.id)
        if saved:
            adapter = saved[-1].size_bytes * spec.lora_rank // run.training.lora_rank
            break
    adapter = adapter or _computed(spec, card)
    if not adapter:
        return None
    saves = math.ceil(steps / spec.save_every)
    # The newest and the best one are kept besides.
    kept = min(saves, spec.keep_checkpoints + 2)
    return DiskNeed(adapter, kept, shutil.disk_usage(store.base).free)


def _computed(spec: RunSpec, card: ModelCard) -> int:
    """From the shapes of the linear layers, if the model lies ready."""
    path = models_dir() / card.address / "config.json"
    if not path.is_file():
        path = models_dir() / card.name / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        config = config.get("text_config") or config
        hidden = int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        queries = heads * head
        keys = int(config.get("num_key_value_heads") or heads) * head
        inner = int(config["intermediate_size"])
        layers = int(config["num_hidden_layers"])
    except (OSError, KeyError, TypeError, ValueError):
        return 0
    # Each linear layer gets one matrix at its input and one at its output.
    # Queries and output, then keys and values.
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    feed_forward = 3 * (hidden + inner)
    return spec.lora_rank * layers * (attention + feed_forward) * BYTES


Like = tuple[Run, dict[str, list[Any]]]
"""A run, and {field: [its value there, its value here]} of the values that differ."""


@dataclass(frozen=True)
class Inputs:
    resolved: ResolvedSpec
    card: ModelCard
    dataset: Dataset | None
    parts: list[MixturePart]
    """Its environments."""
    adapter: Json | None
    teacher: Json | None
    placed: str | None
    """Why it is to run where it is, if nobody named the target."""
    is_repeated: bool
    """An earlier call with the same idempotency_key made this run."""
    like: Like | None
    """The earlier run that is the same, or nearly."""
    env_files: list[str]

    @property
    def environment(self) -> EnvironmentVersion:
        return self.parts[0].environment

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    @property
    def probe(self) -> Probed:
        return sum((part.probe for part in self.parts), NO_PROBE)


@dataclass(frozen=True)
class Plan(Inputs):
    """A run that was resolved and checked, and can be queued."""

    store: Store
    estimate: Estimate
    needs: list[MemoryNeed | DiskNeed]
    """What it takes of this machine, as far as that is known."""
    work: Work
    preview: Preview | None
    """Of its dataset, if that was wanted or rows may be too long."""

    @property
    def gate(self) -> str:
        parts = self.parts
        if len(parts) == 1:
            return str(parts[0].gate)
        return "; ".join(f"{part.environment.name}: {part.gate}" for part in parts)

    def check_gate(self) -> None:
        """FlashError(gate_failed) if env_test last found a fault, or had no time for all checks."""
        error = self.gate_error()
        if error and not self.is_repeated:
            raise error

    def gate_error(self) -> FlashError | None:
        refused = [part for part in self.parts if part.gate.is_refused]
        if not refused:
            return None
        reference, gate = refused[0].environment.reference, refused[0].gate
        what = f"env_test of {reference} {gate}"
        test = f"env_test(environment={reference!r}) says what to change"
        if not gate.failed:
            test = f"env_test(environment={reference!r}, time_s=...) with more seconds"
        fix = f"{test}; accept_failed_gate=true trains all the same, and is written on the report"
        return FlashError("gate_failed", what, fix=fix)


# -- continue a training run that has ended: the same run goes on from its newest checkpoint -------

RETRY_S = 10.0
"""How long an object store may not answer before the call fails."""


@dataclass(frozen=True)
class Resumed:
    run: Run
    step: int
    """The step of the checkpoint that it goes on from; 0 for the start."""
    notes: list[str]


def resume_run(store: Store, run_id: str, steps: int | None, *, fresh_optimizer: bool) -> Resumed:
    """Queue the run again with its own values, up to `steps` or as far as it was to go. A repeat
    finds it under way, or at those steps already, and changes nothing.
    """
    run = store.run(run_id)
    if queue.is_held(run):
        return Resumed(queue.release(store, run_id), run.step, [])
    if run.ended is not None:
        _check_files(run)
    total = _total(run, steps)
    if run.ended is None or (run.state == "succeeded" and total == run.steps):
        return Resumed(run, run.step, [f"it is {run.state} already: nothing was changed"])
    # Before the transaction: it reads whole checkpoints, and others wait to write.
    folder = RunFolder(run.folder, retry_s=RETRY_S)
    step = folder.checkpoints.newest_good() or 0
    notes = _loss(folder, step, fresh_optimizer=fresh_optimizer)
    notes += _schedule(run, step, total)
    if step and total == step:
        notes.append(f"all {step} steps are made: it only evaluates, where it was asked to")
    with store.transaction():
        again = store.run(run_id)
        if again.ended == run.ended:
            _check_files(again)
            return Resumed(
                queue.resume(store, run, folder, total, surroundings.client()), step, notes
            )
    # Another call resumed it meanwhile.
    return resume_run(store, run_id, steps, fresh_optimizer=fresh_optimizer)


def _total(run: Run, steps: int | None) -> int | None:
    """The steps that it is to have; None until the worker has counted those of epochs."""
    run_id = run.id
    if run.algorithm == "eval":
        fix = "evaluate starts another; train(resume=...) takes a training run"
        raise FlashError("invalid_argument", f"{run_id} is an evaluation", fix=fix)
    if run.ended is None:
        if steps in (None, run.steps):
            return run.steps
        what = f"{run_id} is {run.state} and goes on to {run.steps} steps"
        fix = "repeat the call once it has ended, or cancel it first"
        raise FlashError("not_ready", what, run_id=run_id, steps=steps, fix=fix)
    if steps is None and run.state == "succeeded":
        what = f"{run_id} has made all its {run.steps} steps"
        checkpoints = RunFolder(run.folder, retry_s=RETRY_S).checkpoints
        fresh = ""
        if not checkpoints.has_optimizer(checkpoints.newest_good() or 0):
            fresh = ", fresh_optimizer=true"
        fix = f"name more: train(resume={run_id!r}, steps={2 * (run.steps or run.step)}{fresh})"
        raise FlashError("invalid_argument", what, fix=fix)
    if steps is not None and steps < run.step:
        what = f"{run_id} has made {run.step} steps"
        fix = f"name more, or start another from one of checkpoints(run_id={run_id!r})"
        raise FlashError("invalid_argument", what, steps=steps, fix=fix)
    return run.steps if steps is None else steps


def _check_files(run: Run) -> None:
    """FlashError(unknown_checkpoint) if what the run was made from, or saved, was removed."""
    sources = [source["path"] for source in (run.dataset, run.init_adapter, *run.mixture) if source]
    for path in (run.environment_path, *sources):
        if path and not Path(path).exists():
            what = f"{run.id} cannot go on: {path} was removed"
            raise FlashError("unknown_checkpoint", what, fix="start another run with train")
    # Retention keeps the row of an old run, so that its numbers can still be read.
    if run.files_removed is not None:
        what = f"the files of {run.id} were removed to make room"
        raise FlashError("unknown_checkpoint", what, fix="start another run with train")


def _schedule(run: Run, step: int, total: int | None) -> list[str]:
    """What another number of steps does to the learning rate, if it does anything."""
    if not step or total in (None, step) or run.steps in (None, total):
        return []
    spec = run.training
    before = spec.learning_rate * rate_factor(spec, step - 1, run.steps)
    after = spec.learning_rate * rate_factor(spec, step, total)
    if before == after:
        return []
    lengths = f"is of {total} steps now, and was of {run.steps}"
    return [
        f"the {spec.lr_schedule} schedule (warmup={spec.warmup:g}) {lengths}: the learning rate "
        f"goes from {before:.3g} in step {step} to {after:.3g} in step {step + 1}"
    ]


def _loss(folder: RunFolder, step: int, *, fresh_optimizer: bool) -> list[str]:
    """Notes on what is lost. FlashError if the optimizer's state is, unless that was allowed."""
    if not step:
        return ["it saved no checkpoint that can be read: it starts over"]
    if folder.checkpoints.has_optimizer(step):
        return []
    if fresh_optimizer:
        return [f"checkpoint {step} has no {OPTIMIZER}: it goes on with a fresh optimizer"]
    what = (
        f"the optimizer's state of checkpoint {step} was deleted: only the newest checkpoint keeps "
        "it, for as many days after the end as settings.toml says"
    )
    fix = "pass fresh_optimizer=true to go on without it; its first steps may be rougher"
    raise FlashError("invalid_argument", what, step=step, fix=fix)
