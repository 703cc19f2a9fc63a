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
    """What is left of a value after this share of the steps."""
    if schedule == "linear":
        return max(0.0, 1 - share)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * min(1.0, share))) / 2
    return 1.0
