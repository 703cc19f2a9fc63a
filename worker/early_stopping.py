"""The end of a run that has nothing left to learn (`early_stopping`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

STEPS = 10
LOSS_THRESHOLD = 0.001
"""In nats per token, for SFT: each token of an answer has a probability of 0.999."""


class EarlyStopping:
    """Watches the metrics of the last STEPS steps. A resumed attempt adds those before its
    checkpoint, so that the run ends at the same step however often it was killed.
    """

    def __init__(self, algorithm: str) -> None:
        self._is_learnt = {"sft": _is_learnt, "grpo": _is_solved}.get(algorithm)
        self._recent: deque[bool] = deque(maxlen=STEPS)

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Take the metrics of the next step."""
        if self._is_learnt:
            self._recent.append(self._is_learnt(metrics))

    @property
    def is_due(self) -> bool:
        return sum(self._recent) == STEPS


def _is_learnt(metrics: Mapping[str, float | None]) -> bool:
    loss = metrics.get("loss")
    return loss is not None and loss < LOSS_THRESHOLD


def _is_solved(metrics: Mapping[str, float | None]) -> bool:
    """Every rollout succeeded, and no reward differs from others of its group."""
    return metrics.get("groups/uniform_share") == metrics.get("success/rate") == 1
