"""How much work a run is, and whether its lengths can work."""

from __future__ import annotations

import math

from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state.datasets import Dataset
from flash_mcp.tools.training.probe import Probe
from flash_mcp.tools.training.run_time import RunTime


class Estimate(ResultModel):
    steps: int
    """Optimizer steps."""
    rollouts: int | None = None
    """Conversations generated (grpo)."""
    examples: int | None = None
    """Conversations trained on, repeats counted (sft)."""
    held_out_examples: int | None = None
    """Held-out conversations whose loss is measured, all times together (sft)."""
    train_tasks: int
    """Rows of the train split."""
    eval_tasks: int
    """Rows of the eval split."""
    dataset_rows: int | None = None
    """Rows of the dataset, if there is one (sft)."""
    passes: float
    """Times that each row is seen."""
    prompt_tokens_about: int
    """First prompt of a few tasks, estimated from its characters; 0 if none opened in time."""
    tokens_at_most: int | None = None
    """Tokens generated if every rollout had one turn as long as max_tokens and max_length let
    it be."""
    regression: str | None = None
    """Whether the regression split is tried before and after."""
    disk: str | None = None
    """With validate_only: what checkpoints take, and what is free."""
    time: RunTime | None = None
    """From the sample's tokens and speed, else from earlier runs there, of the model or, as a
    guess, of another; absent if there are none."""


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
    batch = spec.batch_size or 1
    steps = spec.steps or math.ceil(tasks * (spec.epochs or 1.0) / batch)
    estimate = Estimate(
        steps=steps,
        train_tasks=probe.splits["train"],
        eval_tasks=probe.splits.get("eval", 0),
        dataset_rows=dataset_rows,
        passes=round(steps * batch / tasks, 2),
        prompt_tokens_about=probe.prompt_tokens,
    )
    if spec.algorithm != "sft":
        estimate.rollouts = steps * batch * (spec.group_size or 1)
        # A bound, not a guess: answers are usually shorter.
        room = (spec.max_length or DEFAULT_MAX_LENGTH) - probe.prompt_tokens
        estimate.tokens_at_most = estimate.rollouts * max(1, min(spec.max_tokens, room))
    else:
        estimate.examples = steps * batch
        rows = 0
        if spec.evaluates:
            rows = estimate.eval_tasks
        if dataset:
            rows = dataset.manifest["counts"]["holdout_rows"]
        every = spec.eval_every or spec.save_every
        measurements = math.ceil(steps / every)
        estimate.held_out_examples = measurements * min(rows, spec.eval_examples) or None
    return estimate
