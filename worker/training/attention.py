"""Attention of a packed sequence: completions that each see themselves and a common prompt.

Which way it is computed depends on the device; all give the same values.

    GPU, half precision     flash attention without a mask: every span of tokens by itself, and
                            over what comes before it, merged by their log-sum-exp. With a window,
                            once: every span after as many tokens as it sees. On Hopper by
                            FlashAttention 3 if its package is installed
    CPU, other GPUs, fp32   blocks of queries, each with the keys that it sees

A tree is made of spans, too. No way has a mask of (L, L). Layers with a window see tokens whose
positions differ by less. Soft-capped scores and attention sinks are written out, since no kernel
of PyTorch's computes them.

Axes: L tokens of a packed sequence, P of its prompt, H heads, K heads of keys, D size of a head."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.autograd import function
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as masks
from transformers.integrations import sdpa_attention as sdpa

from worker.model_files import head_size

log = logging.getLogger("worker")
once_differentiable: Any = function.once_differentiable
BLOCK = 64
"""Sequences are padded to a multiple. On the CPU PyTorch compiles kernels for each new length and
keeps them, which takes megabytes for each length. It is also the most queries of a block there.
"""
ROWS = 16
"""On the CPU the queries of a block are padded to a multiple, for the same reason."""
GPU_BLOCK = 1024
"""Queries of a block on a GPU."""
ATTENTION = "packed"
"""The name under which transformers knows `_attend`."""
FLASH_FORWARD: Any = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD: Any = torch.ops.aten._flash_attention_backward
FLASH_CAPABILITY = (8, 0)
FLASH_3_CAPABILITY = (9, 0)
FLASH_HEAD = 256
"""The largest head of flash attention; sizes are multiples of 8."""
Ranges = tuple[tuple[int, int], ...]
"""(first, end) of tokens of a packed sequence."""
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


def use_flash_3(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Put the kernels of FlashAttention 3, which only Hopper has, behind both operators, if
    `can_flash` and if their package is installed."""
    if not can_flash(config, dtype, device) or find_spec("flash_attn_interface") is None:
        return
    if torch.cuda.get_device_capability(device) != FLASH_3_CAPABILITY:
        return
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("FlashAttention 2 computes, since FlashAttention 3 fails to load: %s", error)


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
class Span:
    """Tokens of a packed sequence that follow each other: its prompt, a completion, or a part of
    one from a fork on."""

    start: int
    end: int
    path: Ranges
    """(first, end) of the tokens that come before it, in order."""

    @property
    def before(self) -> int:
        """How many tokens come before it: the position of its first one."""
        return sum(end - first for first, end in self.path)


def spans_of(lengths: Sequence[int], forks: Sequence[tuple[int, int, int]]) -> list[Span]:
    """The spans of a prompt, its completions and the filler, of so many tokens each, in order."""
    prompt = lengths[0]
    *completions, filler, total = itertools.accumulate(lengths)
    after = {0: 0, **dict.fromkeys(completions, prompt)}
    after |= {start: shared for start, shared, _ in forks}
    after |= {filler: 0, total: 0}  # the filler sees itself
    spans: list[Span] = []
    for start, end in itertools.pairwise(sorted(after)):
        path: Ranges = ()
        if last := after[start]:
            parent = next(span for span in spans if span.start < last <= span.end)
            path = (*parent.path, (parent.start, last))
        spans.append(Span(start, end, path))
    return spans


@dataclass(frozen=True)
class Rows:
    """Queries and keys of flash attention, sequence after sequence: each is a slice, or int64."""

    queries: Any
    keys: Any
    options: tuple[Any, ...]
    """Ends of each sequence's queries and keys (int32, from 0), the most of each, no dropout, and
    whether a query sees only the keys up to its own, which is the last one."""
    window: Mapping[str, int]

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[Ranges, Ranges]],
        device: torch.device,
        *,
        causal: bool,
        window: int | None = None,
    ) -> Self:
        """Of the ranges of each sequence's queries and keys."""
        sides = list(zip(*sequences, strict=True))
        lengths = [[sum(end - first for first, end in part) for part in side] for side in sides]
        ends = [
            torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32, device=device)
            for side in lengths
        ]
        places = [_places(tuple(itertools.chain(*side)), device) for side in sides]
        # Of the tokens before it, a query sees one less than the window.
        sees = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        queries, keys = places
        return cls(queries, keys, (*ends, *map(max, lengths), 0.0, causal), sees)


def _places(ranges: Ranges, device: torch.device) -> Any:
    """The places in these ranges: as a slice if they follow each other, which copies nothing."""
    pairs = [pair for pair in ranges if pair[0] < pair[1]]
    if all(end == first for (_, end), (first, _) in itertools.pairwise(pairs)):
        return slice(pairs[0][0], pairs[-1][1])
    return torch.cat([torch.arange(*pair, device=device) for pair in pairs])


def _flash_rows(spans: Sequence[Span], window: int | None, device: torch.device) -> list[Rows]:
    """Every span by itself, and spans over what comes before them: those that follow the same
    tokens are one row of queries. With a window, each span after as many tokens as it sees."""
    own = [((span.start, span.end),) for span in spans]
    if window:
        seen = [(*_last(span.path, window - 1), *one) for span, one in zip(spans, own, strict=True)]
        return [Rows.of([*zip(own, seen, strict=True)], device, causal=True, window=window)]
    rows = [Rows.of([*zip(own, own, strict=True)], device, causal=True)]
    by_path: dict[Ranges, list[tuple[int, int]]] = {}
    for span in spans:
        if span.path:
            by_path.setdefault(span.path, []).append((span.start, span.end))
    if by_path:
        after = [(tuple(queries), path) for path, queries in by_path.items()]
        rows.append(Rows.of(after, device, causal=False))
    return rows


def _last(path: Ranges, count: int) -> Ranges:
    """The last tokens of a path."""
    pieces: list[tuple[int, int]] = []
    for first, end in reversed(path):
        if count > 0:
            pieces.append((max(first, end - count), end))
            count -= end - first
    return tuple(pieces[::-1])


class _Flash(torch.autograd.Function):
    """Flash attention of every span by itself, and of spans over what comes before them.

    softmax over both = each part's output, weighted with exp(its log-sum-exp - that of both). A
    part's gradient is flash attention's own, given the merged output and log-sum-exp: they are all
    that it needs to know of the other part."""

    @staticmethod
    def forward(
        ctx: Any,
        query_LHD: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
        rows: Any,
        scale: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        first, *others = cast(list[Rows], rows)
        out_LHD, lse_HL, *random = _flash(first, query_LHD, key_LKD, value_LKD, scale)
        for part in others:
            at = part.queries
            seen_CHD, seen_HC, *_ = _flash(part, query_LHD, key_LKD, value_LKD, scale)
            own_HC = lse_HL[:, at]
            both_HC = torch.logaddexp(own_HC, seen_HC)
            own_weight = _weight(own_HC, both_HC)
            seen_weight = _weight(seen_HC, both_HC)
            out_LHD[at] = out_LHD[at] * own_weight + seen_CHD * seen_weight
            lse_HL[:, at] = both_HC
        if sinks_H is not None:  # a sink is a key with the value 0
            with_sink_HL = torch.logaddexp(lse_HL, sinks_H.float()[:, None])
            out_LHD = (out_LHD * _weight(lse_HL, with_sink_HL)).to(out_LHD.dtype)
            lse_HL = with_sink_HL
        ctx.save_for_backward(query_LHD, key_LKD, value_LKD, out_LHD, lse_HL, *random[:2])
        ctx.rows = rows
        ctx.scale = scale
        return out_LHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LHD: Tensor) -> tuple[Tensor | None, ...]:
        query_LHD, key_LKD, value_LKD, out_LHD, lse_HL, *random = ctx.saved_tensors
        grads = [torch.zeros_like(part) for part in (query_LHD, key_LKD, value_LKD)]
        for part in cast(list[Rows], ctx.rows):
            at, seen = part.queries, part.keys
            of_part = FLASH_BACKWARD(
                grad_LHD[at].contiguous(), query_LHD[at], key_LKD[seen], value_LKD[seen],
                out_LHD[at], lse_HL[:, at].contiguous(), *part.options, *random,
                scale=ctx.scale, **part.window,
            )  # fmt: skip
            for total, places, more in zip(grads, (at, seen, seen), of_part, strict=True):
                if isinstance(places, slice):
                    total[places] += more
                else:  # a key may be seen from several spans
                    total.index_add_(0, places, more)
        return *grads, None, None, None


def _flash(
    rows: Rows, query_LHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scale: float
) -> list[Tensor]:
    """Output, log-sum-exp (H, queries), and what the backward pass wants."""
    seen = key_LKD[rows.keys], value_LKD[rows.keys]
    return FLASH_FORWARD(
        query_LHD[rows.queries], *seen, *rows.options, False, scale=scale, **rows.window
    )


def _weight(part_HC: Tensor, both_HC: Tensor) -> Tensor:
    """(C, H, 1): the share of a part in the softmax over both."""
    return (part_HC - both_HC).exp().t()[..., None]


@dataclass(frozen=True)
class Line:
    """A span's keys, and the blocks of its queries."""

    pieces: list[int]
    """Of `Blocks.keys`: what the first block sees, up to the span's end."""
    skipped: int
    """Tokens of the first piece that no block sees."""
    filler: int
    """Keys after the last one, which nothing sees."""
    blocks: list[tuple[int, Tensor]]
    """The first key of each, and the mask to add to its scores: from there on it has all keys."""


@dataclass(frozen=True)
class Blocks:
    """Attention without an (L, L) mask: by blocks of queries, each with the keys that it sees. The
    masks of all blocks are parts of one band of a block's height."""

    keys: list[int]
    """Tokens of the pieces that keys and values are split into."""
    queries: list[int]
    """Of the blocks."""
    lines: list[Line]

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_cpu: bool,
    ) -> Self:
        size, unit = (BLOCK, ROWS) if on_cpu else (GPU_BLOCK, BLOCK)
        longest = max(span.before + span.end - span.start for span in spans)
        # Multiples of BLOCK: kernels of a GPU want masks that begin at aligned places.
        reach = _rounded(min(longest, window or longest), BLOCK)
        query = torch.arange(size, device=device)
        apart = query[:, None] - torch.arange(-reach, size + BLOCK, device=device)
        hidden = (apart < 0) | (apart >= (window or longest))
        band = torch.zeros(hidden.shape, dtype=dtype, device=device)
        band = band.masked_fill_(hidden, -torch.inf)
        ranges = [pair for span in spans for pair in ((span.start, span.end), *span.path)]
        bounds = sorted({0, *itertools.chain(*ranges)})
        keys = [end - start for start, end in itertools.pairwise(bounds)]
        number = {bound: piece for piece, bound in enumerate(bounds)}
        queries: list[int] = []
        lines: list[Line] = []
        for span in spans:
            before = span.before
            end = before + span.end - span.start
            # On a CPU blocks begin with their span, so that there are few of them.
            begin = before if on_cpu else before // size * size
            skipped = first = max(0, begin - reach)
            blocks: list[tuple[int, Tensor]] = []
            last = end
            for at in range(begin, end, size):
                top = max(before, at)
                rows = _rounded(min(at + size, end) - top, unit)
                seen = max(0, at - reach)
                width = _rounded(min(top + rows, at + size) - seen, BLOCK)
                column = seen - (at - reach)
                blocks.append(
                    (seen - first, band[top - at : top - at + rows, column : column + width])
                )
                queries.append(min(at + size, end) - top)
                last = max(last, seen + width)
            pieces: list[int] = []
            for start, stop in (*span.path, (span.start, span.end)):
                for piece in range(number[start], number[stop]):
                    if not pieces and skipped >= keys[piece]:
                        skipped -= keys[piece]
                    else:
                        pieces.append(piece)
            lines.append(Line(pieces, skipped, last - end, blocks))
        return cls(keys, queries, lines)


def _rounded(count: int, unit: int) -> int:
    return count + -count % unit


class Layout:
    """Positions and mask of a prompt and its completions in one sequence, by their lengths in
    tokens.

    `mask` is what the model takes: one for all layers, or a dict with one for each of `windows`.
    `filler` tokens, which no other token sees, fill the last block. With `flash`, attention is
    computed by `_Flash`.

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
        spans = spans_of([prompt, *completions, self.filler], forks)
        positions = [
            torch.arange(span.before, span.before + span.end - span.start, device=device)
            for span in spans
        ]
        self.positions = torch.cat(positions)  # (L,)
        # transformers passes a 4-D mask through unchanged. `_attend` reads its attribute alone; an
        # expanded tensor takes no memory.
        length = len(self.positions)
        every = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, length, length)
        by_kind: dict[str, Any] = {}
        for kind, window in windows.items():
            by_kind[kind] = every.view_as(every)
            if flash:
                by_kind[kind].rows = _flash_rows(spans, window, device)
            else:
                on_cpu = device.type == "cpu"
                by_kind[kind].blocks = Blocks.of(spans, window, dtype, device, on_cpu=on_cpu)
        self.mask: Any = by_kind.get(ALL, by_kind)


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
    rows: list[Rows] | None = getattr(attention_mask, "rows", None)
    if rows is not None:
        if softcap is not None:
            raise NotImplementedError("flash attention with soft-capped scores")
        parts = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
        attended_LHD = cast(Any, _Flash).apply(*parts, rows, scale, sinks_H)
        return attended_LHD[None], None
    blocks: Blocks | None = getattr(attention_mask, "blocks", None)
    if blocks is None and softcap is None and sinks_H is None:
        plain = cast(Any, sdpa).sdpa_attention_forward
        return plain(module, query, key, value, attention_mask, **options)
    key = sdpa.repeat_kv(key, heads // key.size(1))
    value = sdpa.repeat_kv(value, heads // value.size(1))
    if blocks is None:
        added = _added(attention_mask, query, key)
        return _weighted(query, key, value, added, scale, softcap, sinks_H).transpose(1, 2), None
    queries = iter(torch.split(query, blocks.queries, dim=2))
    pieces = [torch.split(part, blocks.keys, dim=2) for part in (key, value)]
    attended: list[Tensor] = []
    for line in blocks.lines:
        seen = [_line(line, part) for part in pieces]
        for first, mask in line.blocks:
            part = next(queries)
            count = part.size(2)
            if count < len(mask):
                part = pad(part, (0, 0, 0, len(mask) - count))
            some_keys, some_values = (whole[:, :, first : first + mask.size(1)] for whole in seen)
            block = _weighted(part, some_keys, some_values, mask, scale, softcap, sinks_H)
            block = block.transpose(1, 2)
            attended.append(block if count == len(mask) else block[:, :count])
    return torch.cat(attended, dim=1), None


def _line(line: Line, pieces: Sequence[Tensor]) -> Tensor:
    """The keys or values of a line."""
    first, *others = [pieces[number] for number in line.pieces]
    if line.skipped:
        first = first[:, :, line.skipped :]
    filler = first.new_zeros(*first.shape[:2], line.filler, first.size(3))
    return torch.cat([first, *others, filler], dim=2)


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
