"""Attention of a packed sequence: completions that each see themselves and a common prompt.

Which way it is computed depends on the device; all give the same values.

    CPU                     blocks of 64 queries, each with the blocks of keys that it sees
    GPU, half precision     flash attention twice, without a mask: every segment by itself, and the
                            completions over the prompt. Both are merged by their log-sum-exp
    other GPUs, fp32, and   one block with a dense mask
    layers with a window

Layers with a window see tokens whose positions differ by less. Soft-capped scores and attention
sinks are written out, since no kernel of PyTorch's computes them.

Axes: L tokens of a packed sequence, P of its prompt, H heads, K heads of keys, D size of a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.autograd import function
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as masks
from transformers.integrations import sdpa_attention as sdpa

from worker.model_files import head_size

once_differentiable: Any = function.once_differentiable
BLOCK = 64
"""Sequences are padded to a multiple. On the CPU PyTorch compiles kernels for each new length and
keeps them, which takes megabytes for each length.
"""
ATTENTION = "packed"
"""The name under which transformers knows `_attend`."""
FLASH_FORWARD: Any = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD: Any = torch.ops.aten._flash_attention_backward
FLASH_CAPABILITY = (8, 0)
FLASH_HEAD = 256
"""The largest head of flash attention; sizes are multiples of 8."""
Windows = Mapping[str, int | None]
"""Kind of layer, as a config's layer_types has it -> its window in tokens. A model that takes one
mask for all its layers has the kind ALL."""
ALL = ""
WITHOUT_EFFECT = {"scaling", "is_causal", "dropout", "sliding_window", "position_ids", "use_cache"}
"""Options that `_attend` computes or that change nothing: masks hold the windows, and dropout is
off.
"""


def can_flash(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch's flash attention computes a model of this config on the device."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    config = config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        return False
    size = head_size(config)
    fits = size % 8 == 0 and size <= FLASH_HEAD
    return fits and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def windows_of(config: Any) -> Windows | None:
    """The windows of a model's layers; None if some layers are no attention, or of another kind."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window: int | None = getattr(config, "sliding_window", None)
    if not kinds:
        return {ALL: window}
    if kinds == {"full_attention"}:
        return {ALL: None}
    if kinds <= {"full_attention", "sliding_attention"} and window:
        return {"full_attention": None, "sliding_attention": window}
    return None


@dataclass(frozen=True)
class Segments:
    """Where the parts of a packed sequence begin and end, as flash attention wants to know it."""

    prompt: int
    completions: int
    """Tokens of all completions, with the filler: what it attends to does not matter."""
    longest: int
    ends: Tensor
    """int32: 0, and the end of the prompt and of each completion."""
    completion_ends: Tensor
    """int32: 0 and `completions`: over the prompt, all completions are one row of queries."""
    prompt_ends: Tensor
    """int32: 0 and `prompt`."""

    @classmethod
    def from_lengths(cls, prompt: int, completions: list[int], device: torch.device) -> Self:
        lengths = [length for length in (prompt, *completions) if length]
        rest = sum(completions)

        def ends(of: list[int]) -> Tensor:
            counted = torch.tensor([0, *of], device=device)
            return counted.cumsum(0).to(torch.int32)

        return cls(prompt, rest, max(lengths), ends(lengths), ends([rest]), ends([prompt]))


class _SharedPrompt(torch.autograd.Function):
    """Flash attention of every segment by itself, and of the completions over the prompt.

    softmax over both = each part's output, weighted with exp(its log-sum-exp - that of both). A
    part's gradient is flash attention's own, given the merged output and log-sum-exp: they are all
    that it needs to know of the other part."""

    @staticmethod
    def forward(
        ctx: Any,
        query_LHD: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
        parts: Any,
        scale: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        segments = cast(Segments, parts)
        at = segments.prompt
        out_LHD, lse_HL, *random = FLASH_FORWARD(
            query_LHD, key_LKD, value_LKD, *_own(segments), 0.0, True, False, scale=scale
        )
        if at and segments.completions:
            seen_CHD, seen_HC, *_ = FLASH_FORWARD(
                query_LHD[at:], key_LKD[:at], value_LKD[:at], *_over_prompt(segments),
                0.0, False, False, scale=scale,
            )  # fmt: skip
            own_HC = lse_HL[:, at:]
            both_HC = torch.logaddexp(own_HC, seen_HC)
            own_weight = _weight(own_HC, both_HC)
            seen_weight = _weight(seen_HC, both_HC)
            out_LHD[at:] = out_LHD[at:] * own_weight + seen_CHD * seen_weight
            lse_HL[:, at:] = both_HC
        if sinks_H is not None:  # a sink is a key with the value 0
            with_sink_HL = torch.logaddexp(lse_HL, sinks_H.float()[:, None])
            out_LHD = (out_LHD * _weight(lse_HL, with_sink_HL)).to(out_LHD.dtype)
            lse_HL = with_sink_HL
        ctx.save_for_backward(query_LHD, key_LKD, value_LKD, out_LHD, lse_HL, *random[:2])
        ctx.segments = segments
        ctx.scale = scale
        return out_LHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LHD: Tensor) -> tuple[Tensor | None, ...]:
        query_LHD, key_LKD, value_LKD, out_LHD, lse_HL, *random = ctx.saved_tensors
        segments: Segments = ctx.segments
        at = segments.prompt
        grad_LHD = grad_LHD.contiguous()
        query_grad, key_grad, value_grad = FLASH_BACKWARD(
            grad_LHD, query_LHD, key_LKD, value_LKD, out_LHD, lse_HL, *_own(segments),
            0.0, True, *random, scale=ctx.scale,
        )  # fmt: skip
        if at and segments.completions:
            more_query, more_key, more_value = FLASH_BACKWARD(
                grad_LHD[at:], query_LHD[at:], key_LKD[:at], value_LKD[:at], out_LHD[at:],
                lse_HL[:, at:].contiguous(), *_over_prompt(segments),
                0.0, False, *random, scale=ctx.scale,
            )  # fmt: skip
            query_grad[at:] += more_query
            key_grad[:at] += more_key
            value_grad[:at] += more_value
        return query_grad, key_grad, value_grad, None, None, None


def _own(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    """Ends of the queries and of the keys, and the longest of each."""
    return segments.ends, segments.ends, segments.longest, segments.longest


def _over_prompt(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    """As `_own`, of the completions over the prompt."""
    return (segments.completion_ends, segments.prompt_ends, segments.completions, segments.prompt)


def _weight(part_HC: Tensor, both_HC: Tensor) -> Tensor:
    """(C, H, 1): the share of a part in the softmax over both."""
    return (part_HC - both_HC).exp().t()[..., None]


class Layout:
    """Positions and mask of a prompt and its completions in one sequence, by their lengths in
    tokens.

    `mask` is what the model takes: one for all layers, or a dict with one for each of `windows`.
    `filler` tokens, which no other token sees, fill the last block. With `flash`, attention without
    a window is computed by `_SharedPrompt`, which knows no `forks`.

    A fork (start, after, end) makes the tokens from `start` to `end` follow the token before
    `after` instead of the one before `start`. Forks are in the order of their starts.
    """

    def __init__(
        self,
        prompt: int,
        completions: list[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        flash: bool = False,
        forks: Sequence[tuple[int, int, int]] = (),
        windows: Windows = {ALL: None},  # noqa: B006  nobody changes it
    ) -> None:
        self.filler = -(prompt + sum(completions)) % BLOCK
        lengths = torch.tensor([prompt, *completions, self.filler], device=device)
        owner = torch.arange(len(lengths), device=device).repeat_interleave(lengths)  # (L,)
        at = torch.arange(len(owner), device=device)
        starts = lengths.cumsum(0) - lengths
        self.positions = torch.where(owner == 0, at, prompt + at - starts[owner])  # (L,)
        # transformers passes a 4-D mask through unchanged, with the attribute that `_attend` reads.
        by_kind: dict[str, Any] = {}
        if flash and not forks:
            # Only its attribute is read; an expanded tensor takes no memory.
            every = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, len(at), len(at))
            segments = Segments.from_lengths(prompt, [*completions, self.filler], device)
            for kind, window in windows.items():
                if window is None:
                    by_kind[kind] = every.view_as(every)
                    by_kind[kind].segments = segments
        if len(by_kind) < len(windows):
            visible = owner[:, None] == owner  # (L, L), up to 150 MB: changed in place
            visible |= owner == 0
            visible &= at[:, None] >= at
            for start, after, end in forks:
                visible[start:end, :start] = visible[after - 1, :start] if after else False
                first = self.positions[after - 1] + 1 if after else 0
                self.positions[start:end] = first + at[: end - start]
            apart = self.positions[:, None] - self.positions
            for kind in windows.keys() - by_kind.keys():
                window = windows[kind]
                seen = visible if window is None else visible & (apart < window)
                by_kind[kind] = seen[None, None]
                by_kind[kind].blocks = list(_blocks(seen, dtype))  # what is computed of it
        self.mask: Any = by_kind.get(ALL, by_kind)


def _blocks(visible_LL: Tensor, dtype: torch.dtype) -> Iterator[tuple[list[int], Tensor]]:
    """For each block of queries: the blocks of keys that it sees any of, and the mask to add to
    their scores. On a GPU everything is one block."""
    size = BLOCK if visible_LL.device.type == "cpu" else len(visible_LL)
    for rows in torch.split(visible_LL, size):  # (size, L)
        tiles = rows.view(size, -1, size)
        seen = tiles.any(2).any(0).nonzero().flatten()
        columns = tiles[:, seen].flatten(1)
        mask = torch.zeros_like(columns, dtype=dtype).masked_fill_(~columns, -torch.inf)
        yield cast(Any, seen).tolist(), mask


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention with transformers' signature: (1, heads, L, D) each to (1, L, heads, D).

    A completion sees the prompt and itself, so most of a pack's mask is empty. Nothing is computed
    there."""
    scale: float = options.get("scaling") or query.size(-1) ** -0.5
    softcap: float | None = options.pop("softcap", None)
    sinks_H: Tensor | None = options.pop("s_aux", None)
    _check_options(options)
    heads = query.size(1)
    segments: Segments | None = getattr(attention_mask, "segments", None)
    if segments is not None:
        if softcap is not None:
            raise NotImplementedError("flash attention with soft-capped scores")
        rows = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
        attended_LHD = cast(Any, _SharedPrompt).apply(*rows, segments, scale, sinks_H)
        return attended_LHD[None], None
    blocks: list[tuple[list[int], Tensor]] | None = getattr(attention_mask, "blocks", None)
    if blocks is None and softcap is None and sinks_H is None:
        plain = cast(Any, sdpa).sdpa_attention_forward
        return plain(module, query, key, value, attention_mask, **options)
    key = sdpa.repeat_kv(key, heads // key.size(1))
    value = sdpa.repeat_kv(value, heads // value.size(1))
    if blocks is None:
        added = _added(attention_mask, query, key)
        return _weighted(query, key, value, added, scale, softcap, sinks_H).transpose(1, 2), None
    size = query.size(2) // len(blocks)
    keys = torch.split(key, size, dim=2)
    values = torch.split(value, size, dim=2)
    queries = torch.split(query, size, dim=2)
    parts: list[Tensor] = []
    gathered: list[int] = []
    some_keys = some_values = query
    # From the end: the keys of a block are the first keys of the next block, so a completion needs
    # only one copy.
    for part, (seen, mask) in zip(reversed(queries), reversed(blocks), strict=True):
        if gathered[: len(seen)] != seen:
            gathered = seen
            some_keys = torch.cat([keys[at] for at in seen], dim=2)
            some_values = torch.cat([values[at] for at in seen], dim=2)
        width = mask.size(1)
        near = some_keys[:, :, :width], some_values[:, :, :width]
        attended = _weighted(part, *near, mask, scale, softcap, sinks_H)
        parts.append(attended.transpose(1, 2))
    return torch.cat(parts[::-1], dim=1), None


def _check_options(options: Mapping[str, Any]) -> None:
    """NotImplementedError if a layer asks for what `_attend` does not compute."""
    unknown = [
        name
        for name, value in options.items()
        if name not in WITHOUT_EFFECT and value is not None and value is not False
    ]
    if options.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise NotImplementedError(f"attention with the options {', '.join(unknown)}")


def _added(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """A mask to add to the scores; without one, the queries are the last tokens of the keys."""
    if mask is None:
        size = query.size(2), key.size(2)
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(size[1] - size[0])
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)


def _weighted(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention under a mask that is added: (B, heads, queries, D)."""
    if sinks_H is not None:  # a sink is one more key: 0, with the value 0 and a score of its own
        key = pad(key, (0, 0, 0, 1))
        value = pad(value, (0, 0, 0, 1))
        heads, count = query.shape[1:3]
        sinks = sinks_H.to(mask.dtype).view(1, heads, 1, 1)
        mask = mask.expand(len(mask) if mask.ndim == 4 else 1, heads, count, -1)
        mask = torch.cat([mask, sinks.expand(len(mask), heads, count, 1)], dim=3)
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = softcap * (query @ key.transpose(2, 3) * (scale / softcap)).tanh()
    return (scores + mask).softmax(-1, dtype=torch.float32).to(value.dtype) @ value


cast(Any, AttentionInterface).register(ATTENTION, _attend)
cast(Any, AttentionMaskInterface).register(ATTENTION, cast(Any, masks).sdpa_mask)
