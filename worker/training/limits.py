"""How much of a step is computed at once, what is done when memory runs out all the same, and how
several ranks make one step."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor

from worker.process import is_memory_error
from worker.ranks import Ranks
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

    def run(self, trainer: Any, compute: Callable[[], Tensor], *, can_repeat: bool) -> Tensor:
        """`compute`, which is a step. If memory runs out, drop its gradients so far, halve the
        packs, and `compute` once more."""
        try:
            return compute()
        except Exception as error:
            if not is_memory_error(error) or self._is_halved or not (can_repeat and self.current):
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
        return compute()


# -- one step of several ranks, from the parts that each of them computed --------------------------


def combine(trainer: Any, ranks: Ranks, loss: float) -> Tensor:
    """Make the gradients and metrics of a TRL trainer those of all ranks; their summed loss.

    Called on each rank after its backward passes of a step, and before gradients are clipped."""
    trained: list[Tensor] = [p for p in trainer.model.parameters() if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    total = ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
    parts = torch.split(total, [weights.numel() for weights in trained])
    for weights, gradient in zip(trained, parts, strict=True):
        weights.grad = gradient.view_as(weights)
    metrics: dict[str, list[float]] = trainer._metrics["train"]
    # A sum of integers does not depend on the order of its terms.
    integers = [weight.detach().view(torch.int32) for weight in trained]
    fingerprint = sum(int(item.sum(dtype=torch.int64)) for item in integers)
    result = ranks.gather((fingerprint, loss, dict(metrics)))
    if len({theirs for theirs, _, _ in result}) > 1:
        # Cards of two kinds may round a norm differently.
        log.info("the ranks' adapters differ: all take that of the first")
        for weights in trained:
            ranks.copy(weights)
    metrics.clear()
    for _, _, part in result:
        for name, values in part.items():
            metrics[name] += values
    return total.new_tensor(sum(item for _, item, _ in result))


class Passes:
    """Lets ranks that share the layers of `policy` (worker/model.py) make equally many
    passes through them, whose collectives need all ranks. Before each pass a rank says so."""

    def __init__(self, policy: PeftModel, ranks: Ranks) -> None:
        self._ranks = ranks
        self._model: Any = policy.get_base_model()
        self._fills = False
        self.is_shared = ranks.count > 1 and hasattr(self._model.model, "unshard")
        if self.is_shared:
            self._model.model.register_forward_pre_hook(self._announce, prepend=True)

    def _announce(self, *_: Any) -> None:
        if not self._fills:
            self._ranks.gather(True)

    def finish(self) -> None:
        """After this rank's last pass, make passes that count nothing while other ranks make some:
        forward, and backward where gradients are enabled."""
        if not self.is_shared:
            return
        self._fills = True
        while any(self._ranks.gather(False)):
            token = torch.zeros(1, 1, dtype=torch.long, device=self._model.device)
            hidden: Tensor = self._model.model(input_ids=token, use_cache=False).last_hidden_state
            if torch.is_grad_enabled():
                cast(Any, (hidden * 0.0).sum()).backward()
        self._fills = False


def no_loss(model: Any) -> Tensor:
    """A loss of 0. It keeps the graph that the optimizer loop expects, over all parameters, so that
    Adam's momentum applies to each.
    """
    trained = [p.sum() for p in model.parameters() if p.requires_grad]
    return torch.stack(trained).sum() * 0.0
