"""How much work a run is, whether its lengths can work, and what its checkpoints will take."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from typing import Any

from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.protocol.schedules import learnt_in, measured_of, measurements_of, steps_of
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.disk import in_words
from flash_mcp.state.store import Store
from flash_mcp.tools.training.probe import Probe
from flash_mcp.tools.training.run_time import RunTime

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


def estimate_of(spec: RunSpec, probe: Probe, dataset: Dataset | None) -> Estimate:
    dataset_rows = len(dataset.rows()) if dataset else None
    tasks = dataset_rows or probe.splits["train"]
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
        """FlashError(disk_full) if not even one checkpoint fits."""
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
    """None if nothing is known about the size of the model's adapters."""
    adapter = _measured(store, spec) or _computed(spec, card)
    if not adapter:
        return None
    saves = math.ceil(steps / spec.save_every)
    # The newest and the best one are kept besides.
    kept = min(saves, spec.keep_checkpoints + 2)
    return DiskNeed(adapter, kept, shutil.disk_usage(store.base).free)


def _measured(store: Store, spec: RunSpec) -> int:
    """From the newest checkpoint of a run of the same model."""
    for run in store.runs(limit=50):
        if run.model != spec.model or run.algorithm == "eval":
            continue
        if saved := store.checkpoints(run.id):
            return saved[-1].size_bytes * spec.lora_rank // run.training.lora_rank
    return 0


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
