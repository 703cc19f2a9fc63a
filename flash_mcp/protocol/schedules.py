"""How values change over the steps of a run."""

from __future__ import annotations

import math

from flash_mcp.protocol.spec import LrSchedule, RunSpec


def rate_factor(spec: RunSpec, step: int, steps: int) -> float:
    """What the learning rate is multiplied by in the step after `step` steps of `steps`. It is
    never 0, as it is in the first step of a warm-up by transformers."""
    rising = int(spec.warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return decayed(spec.lr_schedule, (step - rising) / max(1, steps - rising))


def decayed(schedule: LrSchedule, share: float) -> float:
    if schedule == "linear":
        return max(0.0, 1 - share)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * min(1.0, share))) / 2
    return 1.0


# -- how long a fine-tuning is, and how much of it is measuring: what `train` says is what runs ----

MEASURED_SHARE = 0.1
"""Held-out conversations measured in a run, all times together, for each that it learns."""
FEWEST_MEASURED = 16
"""Each time, even if that is more than the share: fewer say little. The run never measures more
conversations than it learns, though."""


def steps_of(spec: RunSpec, conversations: int) -> int:
    """Every pass over the conversations ends with a batch of those that are left."""
    per_pass = math.ceil(conversations / spec.batch_size)
    return spec.steps or math.ceil((spec.epochs or 1.0) * per_pass)


def learnt_in(spec: RunSpec, steps: int, conversations: int) -> int:
    """Conversations learnt in so many steps, repeats counted."""
    passes, more = divmod(steps, math.ceil(conversations / spec.batch_size))
    return passes * conversations + min(more * spec.batch_size, conversations)


def is_measured(spec: RunSpec, step: int, last: int) -> bool:
    """Whether the held-out loss is measured after this step: every `eval_every` (else `save_every`)
    steps and after the last one, which replaces one that came less than half as many before.
    """
    every = spec.eval_every or spec.save_every
    return step >= last or (step % every == 0 and 2 * (last - step) >= every)


def measurements_of(spec: RunSpec, steps: int) -> int:
    every = spec.eval_every or spec.save_every
    return sum(is_measured(spec, step, steps) for step in range(every, steps, every)) + 1


def measured_of(spec: RunSpec, conversations: int, held_out: int) -> int:
    steps = steps_of(spec, conversations)
    times = measurements_of(spec, steps)
    learnt = learnt_in(spec, steps, conversations)
    most = max(FEWEST_MEASURED, int(MEASURED_SHARE * learnt / times))
    return min(held_out, spec.eval_examples, most, max(1, learnt // times))
