"""vLLM's two model runners: which of them scripts/gpu-check uses.

A card takes the second by itself, a CPU the first. vLLM chooses when it is imported, by SWITCH."""

from __future__ import annotations

import math
from typing import Any

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = {"second": "1", "first": "0"}
"""Values of SWITCH."""
SYNCS: Any = ("merged", "adapter")
ROOM = 2.0
"""Times the first runner's mismatch that the second may have: both round, in their own way."""
NOISE_NATS = 1e-3


def chosen(figures: dict[str, Any]) -> dict[str, str]:
    """Which runner is used, and why: the second, unless it is further from the trainer than the
    first, or failed. AssertionError if both failed."""
    off = {
        runner: [figures.get(f"{runner}_{sync}_mismatch_nats", math.nan) for sync in SYNCS]
        for runner in RUNNERS
    }
    ended = [runner for runner, values in off.items() if all(map(math.isfinite, values))]
    assert ended, "neither of vLLM's model runners came to its end"
    if len(ended) == 1:
        return {"runner": ended[0], "runner_reason": "the other one failed: see engine.log"}
    pairs = list(zip(SYNCS, off["second"], off["first"], strict=True))
    agrees = all(second <= ROOM * first + NOISE_NATS for _, second, first in pairs)
    said = ", ".join(f"{sync} {second:.2g} and {first:.2g}" for sync, second, first in pairs)
    why = f"mean mismatch in nats, second and first: {said}"
    return {"runner": "second" if agrees else "first", "runner_reason": why}
