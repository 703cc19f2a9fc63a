"""How much of a step is computed at once, and what is done when memory runs out all the same."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from worker.lack_of_memory import is_memory_error
from worker.training.packing import Pack

log = logging.getLogger("worker")


class PackLimits:
    """The packs of a trainer. Those of more than `keep_tokens` tokens compute their activations
    twice; none of several completions has more than `longest`.

    Both fall to half of the pack that found no memory, once: the estimate may be off a little, and
    other programs may take some of the card. `warn` says so to the run's owner."""

    def __init__(
        self, keep_tokens: float, longest: float | None, warn: Callable[[str], None]
    ) -> None:
        self.keep_tokens = keep_tokens
        self.longest = longest
        self.current = 0
        """Tokens of the pack that is computed."""
        self._warn = warn
        self._is_halved = False

    def sum_of(
        self,
        trainer: Any,
        causal_lm: Any,
        packs: Sequence[Pack],
        loss: Callable[[Pack, Tensor, Tensor], Tensor],
        **options: Any,
    ) -> Tensor | None:
        """The sum of `loss` of each pack, its log-probabilities and entropies; None without packs.
        The backward pass of all packs but the last is done: only one pack's activations are alive.
        """
        total: Tensor | None = None
        for pack in packs:
            if total is not None and total.requires_grad:
                trainer.accelerator.backward(total)
                total = total.detach()
            self.current = pack.tokens
            with trainer.accelerator.autocast():
                values = pack.logps(causal_lm, keep_tokens=self.keep_tokens, **options)
            part = loss(pack, *values)
            total = part if total is None else total + part
        return total

    def run(self, trainer: Any, compute: Callable[[], Tensor], rewind: Callable[[], int]) -> Tensor:
        """`compute`. If memory runs out, drop the step's gradients so far, halve the packs, and
        `compute` as often as `rewind` says: once for each part of the step that was begun."""
        try:
            return compute()
        except Exception as error:
            if not is_memory_error(error) or self._is_halved:
                raise
            parts = rewind()
            if not parts or not self.current:
                raise
            half = self.current // 2
            what = f"memory ran out in a pack of {self.current} tokens ({error!s:.200})"
        # Here no frame of the failed pass holds tensors any more.
        self._is_halved = True
        self._warn(f"{what}: from here on packs have at most {half}")
        self.keep_tokens = min(self.keep_tokens, half)
        self.longest = min(math.inf if self.longest is None else self.longest, half)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        results = [compute() for _ in range(parts)]
        return results[-1]
