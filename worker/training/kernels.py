"""The two places where a training step on PyTorch's own operations moves more memory than it
computes.

Both are exact, and have one gradient written by hand; tests/worker/test_kernels.py compares them with
plain PyTorch and PEFT."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

VOCABULARY_TILE = 4096
"""Entries of the vocabulary whose logits are alive at once."""


class LoraLinear(Linear):
    """PEFT's layer. With one plain adapter, which is the rule, scale and sum happen inside of the
    matrix products.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = self.active_adapters
        if (
            args
            or kwargs
            or self.disable_adapters
            or self.merged
            or len(names) != 1
            or not self._is_plain(names[0])
        ):
            return super().forward(x, *args, **kwargs)
        name, base = names[0], cast(Any, self.get_base_layer())
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        rows = x.reshape(-1, x.size(-1)).to(base.weight.dtype)
        out = _LoraProduct.apply(rows, base.weight, base.bias, a, b, self.scaling[name])
        return out.view(*x.shape[:-1], -1)

    def _is_plain(self, name: str) -> bool:
        dropout = (
            self.lora_dropout[name]
            if name in self.lora_A and name not in self.lora_variant
            else None
        )
        return isinstance(dropout, torch.nn.Identity) and self.lora_B[name].bias is None


class _LoraProduct(torch.autograd.Function):
    """x W' + bias + scale (x A') B' for x (N, I), W (O, I), A (R, I), B (O, R); gradients of x, A
    and B.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        low_a, low_b = a.to(x.dtype), (b * scale).to(x.dtype)
        low = x @ low_a.t()  # (N, R)
        ctx.save_for_backward(x, weight, low, low_a, low_b)
        ctx.scale, ctx.dtype = scale, a.dtype
        return linear(x, weight, bias).addmm_(low, low_b.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, low, low_a, low_b = ctx.saved_tensors
        grad_low = grad @ low_b  # (N, R)
        grad_x = (grad @ weight).addmm_(grad_low, low_a) if ctx.needs_input_grad[0] else None
        grad_a = (grad_low.t() @ x).to(ctx.dtype)
        grad_b = (grad.t() @ low).to(ctx.dtype) * ctx.scale
        return grad_x, None, None, grad_a, grad_b, None


def token_logps(
    head: torch.nn.Linear, hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (N,) in fp32, of `targets` (N,) under `hidden` (N, H).

    Logits are (N, VOCABULARY_TILE) at a time; the entropies carry no gradient, and neither does the
    head."""
    return _TokenLogps.apply(hidden, head.weight, head.bias, targets, temperature)


class _TokenLogps(torch.autograd.Function):
    """The softmax is summed up tile by tile, relative to the largest logit so far.

    d logp / d hidden = (W[target] - sum over v of p(v) W[v]) / temperature does not depend on what
    comes after: it is summed up with the softmax, and the backward pass is one product."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden.to(weight.dtype)
        count = len(targets)
        largest = hidden.new_full((count, 1), -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(largest)  # of exp(logit - largest)
        weighted = torch.zeros_like(largest)  # of exp(logit - largest) * logit
        mean = (
            hidden.new_zeros(hidden.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        )  # of p(v) W[v]
        chosen = torch.empty_like(largest)  # the target's logit
        room = largest.new_empty(count, min(VOCABULARY_TILE, len(weight)))
        for start in range(0, len(weight), VOCABULARY_TILE):
            tile = slice(start, start + VOCABULARY_TILE)
            logits = (
                linear(hidden, weight[tile], None if bias is None else bias[tile])
                .float()
                .div_(temperature)
            )
            place = targets[:, None] - start
            inside = (place >= 0) & (place < logits.size(1))
            chosen = torch.where(
                inside, logits.gather(1, place.clamp(0, logits.size(1) - 1)), chosen
            )
            before, largest = largest, torch.maximum(largest, logits.amax(1, keepdim=True))
            shrink = (before - largest).exp_()
            share = torch.sub(logits, largest, out=room[:, : logits.size(1)]).exp_()
            total = total * shrink + share.sum(1, keepdim=True)
            weighted = weighted * shrink + logits.mul_(share).sum(1, keepdim=True)
            if mean is not None:
                mean.mul_(shrink).add_(share.to(weight.dtype) @ weight[tile])
        normalizer = largest + total.log()
        if mean is not None:
            ctx.save_for_backward(
                (weight[targets].float() - mean.div_(total)).div_(temperature).to(weight.dtype)
            )
        logps, entropies = (
            (chosen - normalizer).squeeze(1),
            (normalizer - weighted / total).squeeze(1),
        )
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        return (grad[:, None] * slope).to(slope.dtype), None, None, None, None
