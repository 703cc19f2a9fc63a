"""The end of a run that has nothing left to learn (`early_stopping`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

STEPS = 10
LEAST_LOSS = 0.001
"""Nats of a token, of SFT: the answers have a probability of 0.999 a token."""


class EarlyStopping:
    """Watches the metrics of the last steps. Kept metrics of an attempt before bring it to where
    that one was, so that a run ends at the same step however often it was killed.
    """

    def __init__(self, algorithm: str) -> None:
        self._is_learnt = {"sft": _is_learnt, "grpo": _is_solved}.get(algorithm)
        self._recent: deque[bool] = deque(maxlen=STEPS)

    def add(self, steps: Iterable[Mapping[str, float | None]]) -> None:
        """The metrics of the next steps."""
        if self._is_learnt:
            self._recent.extend(map(self._is_learnt, steps))

    @property
    def is_due(self) -> bool:
        return sum(self._recent) == STEPS


def _is_learnt(metrics: Mapping[str, float | None]) -> bool:
    loss = metrics.get("loss")
    return loss is not None and loss < LEAST_LOSS


def _is_solved(metrics: Mapping[str, float | None]) -> bool:
    """Every rollout succeeded, and no reward differs from others of its group."""
    return metrics.get("groups/uniform_share") == metrics.get("success/rate") == 1
