"""The places where a training step with transformers' own operations is bound by memory traffic.

All are exact. Two have a gradient written by hand; tests/worker/test_kernels.py compares them with
plain PyTorch and PEFT.

Axes: N rows, I inputs, O outputs, R rank, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Self, cast

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd import function
from torch.nn.functional import linear, rms_norm

once_differentiable: Any = function.once_differentiable
VOCABULARY_TILE = 4096
"""Entries of the vocabulary whose logits are alive at once."""
FP32_HEAD = "computed_in_fp32"
"""The attribute of a head whose products are computed in fp32."""


class LoraLinear(Linear):
    """PEFT's layer. With one plain adapter, the usual case, scale and sum happen inside the matrix
    products.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = cast(Any, self)
        names: list[str] = self.active_adapters
        special = args or kwargs or self.disable_adapters or self.merged or len(names) != 1
        if special or not _is_plain(layer, names[0]):
            return super().forward(x, *args, **kwargs)
        name = names[0]
        base = layer.get_base_layer()
        a_RI = layer.lora_A[name].weight
        b_OR = layer.lora_B[name].weight
        x_NI = x.reshape(-1, x.size(-1)).to(base.weight.dtype)
        product = cast(Any, _LoraProduct)
        out_NO = product.apply(x_NI, base.weight, base.bias, a_RI, b_OR, layer.scaling[name])
        return out_NO.view(*x.shape[:-1], -1)


def _is_plain(layer: Any, name: str) -> bool:
    """Whether the adapter is only W + scale·BA: no variant, no dropout, no bias, and no 4-bit W."""
    if name not in layer.lora_A or name in layer.lora_variant:
        return False
    if not layer.get_base_layer().weight.is_floating_point():
        return False
    no_dropout = isinstance(layer.lora_dropout[name], torch.nn.Identity)
    return no_dropout and layer.lora_B[name].bias is None


class _LoraProduct(torch.autograd.Function):
    """x W' + bias + scale (x A') B'; gradients of x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.scale = scale
        ctx.dtype = a_RI.dtype
        a_RI = a_RI.to(x_NI.dtype)
        b_OR = (b_OR * scale).to(x_NI.dtype)
        low_NR = x_NI @ a_RI.t()
        ctx.save_for_backward(x_NI, weight_OI, low_NR, a_RI, b_OR)
        return linear(x_NI, weight_OI, bias_O).addmm_(low_NR, b_OR.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, low_NR, a_RI, b_OR = ctx.saved_tensors
        grad_NR = grad_NO @ b_OR
        grad_x = (grad_NO @ weight_OI).addmm_(grad_NR, a_RI) if ctx.needs_input_grad[0] else None
        grad_a = (grad_NR.t() @ x_NI).to(ctx.dtype)
        grad_b = (grad_NO.t() @ low_NR).to(ctx.dtype) * ctx.scale
        return grad_x, None, None, grad_a, grad_b, None


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap tanh(scale (x W' + bias) / softcap)."""

    linear: torch.nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    in_fp32: bool = False
    """Whether products are computed in fp32, with a copy of one tile of the weights at a time."""

    @classmethod
    def from_model(cls, causal_lm: Any) -> Self:
        """The head of a transformers model, by what its config says."""
        config = causal_lm.config.get_text_config()

        def first(*names: str) -> float | None:
            values = (getattr(config, name, None) for name in names)
            return next((value for value in values if value is not None), None)

        scale = first("logit_scale", "output_multiplier", "lm_head_multiplier")
        divisor = first("logits_scaling")  # of Granite; HyperCLOVA X multiplies by it
        if scale is None and divisor is not None:
            scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
        softcap = first("final_logit_softcapping", "logits_soft_cap")
        linear = causal_lm.get_output_embeddings()
        in_fp32 = getattr(linear, FP32_HEAD, False)
        return cls(linear, 1.0 if scale is None else scale, softcap, in_fp32)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Those of sums and of products."""
        own = self.linear.weight.dtype
        exact = torch.promote_types(own, torch.float32)
        return exact, exact if self.in_fp32 else own

    def logits(self, hidden: Tensor) -> Tensor:
        """All at once; only small cases fit into memory."""
        values = self.linear(hidden).float() * self.scale
        return values if self.softcap is None else self.softcap * (values / self.softcap).tanh()


def token_logps(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, *, trains_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (N,) in fp32, or in fp64 of such a model: of `targets`
    (N,) under `hidden` (N, H).

    Logits are computed VOCABULARY_TILE columns at a time. The head carries no gradient, and the
    entropies do with `trains_entropy`, which computes all logits a second time."""
    # Autocast would take the products in half precision again.
    with torch.autocast(hidden.device.type, enabled=False):
        return cast(Any, _TokenLogps).apply(hidden, targets, temperature, head, trains_entropy)


class _TokenLogps(torch.autograd.Function):
    """The softmax is summed tile by tile, relative to the largest logit so far.

    d logp / d hidden = scale / temperature (s(t) W[t] - sum over v of p(v) s(v) W[v]), where t is
    the target and s the slope of the soft cap, does not depend on the gradient that comes in: it is
    summed with the softmax, and the backward pass is one product. The target's own part,
    (1 - p(t)) s(t) W[t], is added in fp32: where p(t) is nearly 1, the difference of two rounded
    sums would be mostly rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets_N: Tensor,
        temperature: float,
        head: Head,
        trains_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        exact, dtype = head.dtypes
        ctx.dtype = hidden.dtype
        hidden_NH = hidden.to(dtype)
        weight_VH = head.linear.weight
        count = len(targets_N)
        largest_N1 = hidden.new_full((count, 1), -torch.inf, dtype=exact)
        total_N1 = torch.zeros_like(largest_N1)  # of exp(logit - largest)
        weighted_N1 = torch.zeros_like(largest_N1)  # of exp(logit - largest) * logit
        chosen_N1 = torch.empty_like(largest_N1)  # the target's logit
        # of p(v) s(v) W[v], the target left out
        others_NH = torch.zeros_like(hidden_NH, dtype=exact) if ctx.needs_input_grad[0] else None
        room = largest_N1.new_empty(count, min(VOCABULARY_TILE, len(weight_VH)))
        for start, weight_vH, logits_Nv in _tiles(head, hidden_NH, temperature):
            width = logits_Nv.size(1)
            place_N1 = targets_N[:, None] - start
            inside_N1 = (place_N1 >= 0) & (place_N1 < width)
            place_N1 = place_N1.clamp(0, width - 1)
            chosen_N1 = torch.where(inside_N1, logits_Nv.gather(1, place_N1), chosen_N1)
            before_N1 = largest_N1
            largest_N1 = torch.maximum(largest_N1, logits_Nv.amax(1, keepdim=True))
            shrink_N1 = (before_N1 - largest_N1).exp_()
            share_Nv = torch.sub(logits_Nv, largest_N1, out=room[:, :width]).exp_()
            total_N1 = total_N1 * shrink_N1 + share_Nv.sum(1, keepdim=True)
            if others_NH is not None:
                kept_Nv = share_Nv
                if head.softcap is not None:
                    kept_Nv = share_Nv * _slope(logits_Nv * temperature, head.softcap)
                kept_Nv = kept_Nv.to(dtype, copy=True)
                kept_N1 = kept_Nv.gather(1, place_N1).masked_fill_(inside_N1, 0.0)
                kept_Nv.scatter_(1, place_N1, kept_N1)
                others_NH.mul_(shrink_N1).add_(kept_Nv @ weight_vH)
            logits_Nv.mul_(share_Nv)
            weighted_N1 = weighted_N1 * shrink_N1 + logits_Nv.sum(1, keepdim=True)
        normalizer_N1 = largest_N1 + total_N1.log()
        logps_N1 = chosen_N1 - normalizer_N1
        entropies_N1 = normalizer_N1 - weighted_N1 / total_N1
        slopes: list[Tensor] = []
        if others_NH is not None:
            own_N1 = -torch.expm1(logps_N1)
            if head.softcap is not None:
                own_N1 = own_N1 * _slope(chosen_N1 * temperature, head.softcap)
            slope_NH = own_N1 * weight_VH[targets_N].to(exact) - others_NH.div_(total_N1)
            slope_NH.mul_(head.scale / temperature)
            slopes.append(slope_NH.to(dtype))
            if trains_entropy:
                slope_NH = _entropy_slope(head, hidden_NH, normalizer_N1, entropies_N1, temperature)
                slopes.append(slope_NH.to(dtype))
        ctx.save_for_backward(*slopes)
        entropies_N = entropies_N1.squeeze(1)
        if not trains_entropy:
            ctx.mark_non_differentiable(entropies_N)
        return logps_N1.squeeze(1), entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope_NH, *entropy_slopes = ctx.saved_tensors
        grad_NH = grads[0][:, None] * slope_NH
        for entropy_slope_NH in entropy_slopes:
            grad_NH += grads[1][:, None] * entropy_slope_NH
        return grad_NH.to(ctx.dtype), None, None, None, None


def _tiles(
    head: Head, hidden_NH: Tensor, temperature: float
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first column, weights, logits) of each tile of the vocabulary; v: the columns of a tile."""
    exact, dtype = head.dtypes
    weight_VH = head.linear.weight
    bias_V = cast(Tensor | None, head.linear.bias)
    for start in range(0, len(weight_VH), VOCABULARY_TILE):
        tile = slice(start, start + VOCABULARY_TILE)
        weight_vH = weight_VH[tile].to(dtype)
        bias = None if bias_V is None else bias_V[tile].to(dtype)
        logits_Nv = linear(hidden_NH, weight_vH, bias).to(exact).mul_(head.scale)
        if head.softcap is not None:
            logits_Nv.div_(head.softcap).tanh_().mul_(head.softcap)
        yield start, weight_vH, logits_Nv.div_(temperature)


def _entropy_slope(
    head: Head, hidden_NH: Tensor, normalizer_N1: Tensor, entropies_N1: Tensor, temperature: float
) -> Tensor:
    """d entropy / d hidden = -scale / temperature (sum over v of p(v) (log p(v) + H) s(v) W[v])."""
    slope_NH = torch.zeros_like(hidden_NH, dtype=normalizer_N1.dtype)
    for _, weight_vH, logits_Nv in _tiles(head, hidden_NH, temperature):
        logps_Nv = logits_Nv - normalizer_N1
        parts_Nv = logps_Nv.exp() * (logps_Nv + entropies_N1)
        if head.softcap is not None:
            parts_Nv *= _slope(logits_Nv * temperature, head.softcap)
        slope_NH.sub_(parts_Nv.to(weight_vH.dtype) @ weight_vH)
    return slope_NH.mul_(head.scale / temperature)


def _slope(capped: Tensor, softcap: float) -> Tensor:
    """d softcap tanh(x / softcap) / dx, of the values after the cap."""
    return 1 - (capped / softcap).square()


def fuse_norms(model: torch.nn.Module) -> int:
    """Let PyTorch's kernel compute the RMS norms of a transformers model; how many there are.

    transformers computes them in seven operations over fp32 copies. Norms of another kind, such as
    Gemma's with its weight + 1, are left alone."""
    norms = [module for module in model.modules() if _is_rms_norm(module)]
    for norm in norms:
        cast(Any, norm).forward = MethodType(_fused_norm, norm)
    return len(norms)


def _fused_norm(norm: Any, hidden: Tensor) -> Tensor:
    # The kernel sums in fp32. Autocast would copy its inputs to fp32 first.
    with torch.autocast(hidden.device.type, enabled=False):
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _is_rms_norm(module: Any) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    weight: Tensor = module.weight
    if weight.is_meta:
        return True
    probe = torch.linspace(-2, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        return torch.allclose(module(probe), _fused_norm(module, probe), rtol=0.02, atol=1e-4)
