"""The steps of a run that has to end in time (`finish_by`)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flash_mcp.protocol.records import Json
from flash_mcp.protocol.spec import RunSpec


@dataclass
class Deadline:
    """Plans the steps at the pace so far, in which saves and evaluations between steps count."""

    ends: float
    """On the monotonic clock."""
    last_attempts: int
    """Steps' worth of held-out attempts that follow the last step, until one was measured."""
    evaluation_s: float | None = None
    """What an evaluation took."""
    began: float = 0.0
    steps_done: int = 0
    """Steps since it began."""

    def begin(self, now: float) -> None:
        self.began = self.began or now

    def steps(self, step: int, most: int, now: float) -> int:
        """How many steps the run makes in all, after `step` of them; `most` at most."""
        self.steps_done += 1
        pace_s = (now - self.began) / self.steps_done
        last_s = self.last_attempts * pace_s
        if self.last_attempts and self.evaluation_s is not None:
            last_s = self.evaluation_s
        left_s = self.ends - now - last_s
        return min(most, step + max(0, int(left_s / pace_s)))


def deadline_of(job: Json, spec: RunSpec) -> Deadline | None:
    """The job says when its run started, by the server's clock."""
    if spec.finish_s is None:
        return None
    left_s = spec.finish_s - (time.time() - job["started"])
    attempts = spec.eval_examples if spec.eval_after else 0
    return Deadline(time.monotonic() + left_s, -(-attempts // spec.conversations_per_step))
