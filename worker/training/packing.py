"""Log-probabilities of a group's completions, its prompt computed once.

The rollouts of a group share their prompt. They are laid out as one sequence, the prompt and then
the completions, with padding only at the end. A mask lets each completion see the prompt and
itself, and its positions continue from the prompt's end. The language-model head runs only on the
positions that predict trained tokens.

Axes: B rows of a batch, P prompt tokens, C completion tokens, T = P + C; L tokens of a packed
sequence, H hidden size, V vocabulary, N predicted tokens; D size of an attention head."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as masks
from transformers.integrations import sdpa_attention as sdpa

from flash_mcp.protocol.errors import FlashError
from worker.training.kernels import token_logps

log = logging.getLogger("worker")
PACK_TOKENS = 4096
"""A longer sequence is split: its mask grows with the square, and one more prompt is cheaper."""
BLOCK = 64
HEAD_STEP = 16
"""Sequences, and rows of the head, are padded to multiples of these. On the CPU PyTorch compiles
kernels for each new length and keeps them, which takes megabytes for each length.
"""
ATTENTION = "packed"
"""The name under which transformers knows `_attend`."""


def attention_of(config: Any) -> str | None:
    """The attention to load a model with: `_attend`, or None, its own, if its layers look up none
    (Falcon).
    """
    kind = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING).get(type(config), None)
    return ATTENTION if getattr(kind, "_supports_attention_backend", False) else None


def group_logps(
    causal_lm: Any,
    ids_BT: Tensor,  # prompts padded left, completions padded right
    seen_BT: Tensor,  # the attention mask
    trained_BC: Tensor,  # 1 where a log-probability is wanted
    temperature: float,
    *,
    keep_tokens: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (B, C) in fp32, zero where `trained_BC` is 0. Entropies
    carry no gradient.

    `causal_lm` is a transformers decoder with a `model` and an `lm_head`. If its sequences have
    more than `keep_tokens` tokens together, activations are recomputed in the backward pass."""
    length = trained_BC.size(1)
    starts = ids_BT.size(1) - length
    packs = list(_packs(ids_BT, seen_BT, starts))
    if torch.is_grad_enabled():
        tokens = sum(len(prompt) for prompt, _ in packs) + int(seen_BT[:, starts:].sum())
        recompute(causal_lm, tokens > keep_tokens)
    logps_BC = ids_BT.new_zeros(trained_BC.shape, dtype=torch.float32)
    entropies_BC = torch.zeros_like(logps_BC)
    for prompt, rows in packs:
        completions = [ids_BT[row, starts:][seen_BT[row, starts:].bool()] for row in rows]
        lengths = [len(part) for part in completions]
        layout = Layout(len(prompt), lengths, causal_lm.dtype, prompt.device)
        hidden_LH = hidden_states(causal_lm, torch.cat([prompt, *completions]), layout)
        predictors: list[Tensor] = []
        targets: list[Tensor] = []
        places: list[Tensor] = []
        offset = len(prompt)
        for row, completion in zip(rows, completions, strict=True):
            at = trained_BC[row, : len(completion)].nonzero().squeeze(1)
            # Token t is predicted at t-1; a completion's first token at the prompt's end.
            predictors.append(torch.where(at == 0, len(prompt) - 1, offset + at - 1))
            targets.append(completion[at])
            places.append(row * length + at)
            offset += len(completion)
        where_N = torch.cat(places)
        filler = -len(where_N) % HEAD_STEP
        values, entropies = token_logps(
            causal_lm.lm_head,
            pad(hidden_LH[torch.cat(predictors)], (0, 0, 0, filler)),
            pad(torch.cat(targets), (0, filler)),
            temperature,
        )
        values_N = values[: len(where_N)]
        logps_BC = logps_BC.view(-1).index_put((where_N,), values_N).view_as(logps_BC)
        entropies_BC.view(-1)[where_N] = entropies[: len(where_N)]
    return logps_BC, entropies_BC


def recompute(causal_lm: Any, on: bool) -> None:
    """Set whether layers compute their activations again in the backward pass or keep them."""
    if on == causal_lm.is_gradient_checkpointing or not causal_lm.supports_gradient_checkpointing:
        return
    if on:
        causal_lm.gradient_checkpointing_enable()
        causal_lm.disable_input_require_grads()  # which only reentrant checkpointing needs
    else:
        causal_lm.gradient_checkpointing_disable()


def _packs(ids_BT: Tensor, seen_BT: Tensor, starts: int) -> Iterator[tuple[Tensor, list[int]]]:
    """(prompt, rows) of sequences of at most PACK_TOKENS, or of a single row."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in range(ids_BT.size(0)):
        prompt: Any = ids_BT[row, :starts][seen_BT[row, :starts].bool()]
        by_prompt.setdefault(tuple(prompt.tolist()), []).append(row)
    lengths: list[int] = cast(Any, seen_BT[:, starts:].sum(1)).tolist()
    for key, rows in by_prompt.items():
        prompt = ids_BT.new_tensor(key)
        pack: list[int] = []
        size = len(prompt)
        for row in rows:
            if pack and size + lengths[row] > PACK_TOKENS:
                yield prompt, pack
                pack = []
                size = len(prompt)
            pack.append(row)
            size += lengths[row]
        yield prompt, pack


class Layout:
    """Positions and mask of a prompt and its completions in one sequence, by their lengths in
    tokens.

    `filler` tokens, which no other token sees, fill the last block.
    """

    def __init__(
        self, prompt: int, completions: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.filler = -(prompt + sum(completions)) % BLOCK
        lengths = torch.tensor([prompt, *completions, self.filler], device=device)
        owner = torch.arange(len(lengths), device=device).repeat_interleave(lengths)  # (L,)
        at = torch.arange(len(owner), device=device)
        starts = lengths.cumsum(0) - lengths
        self.positions = torch.where(owner == 0, at, prompt + at - starts[owner])  # (L,)
        visible = ((owner[:, None] == owner) | (owner == 0)) & (at[:, None] >= at)  # (L, L)
        # transformers passes a 4-D mask through unchanged, with the attribute that `_attend` reads.
        self.mask: Any = visible[None, None]
        self.mask.blocks = list(_blocks(visible, dtype))


def hidden_states(causal_lm: Any, ids: Tensor, layout: Layout) -> Tensor:
    """Last hidden states (L, H) of `ids` and the filler after them."""
    ids = pad(ids, (0, layout.filler))
    output = causal_lm.model(
        input_ids=ids[None],
        attention_mask=layout.mask,
        position_ids=layout.positions[None],
        use_cache=False,
    )
    return output.last_hidden_state[0]


def _blocks(visible_LL: Tensor, dtype: torch.dtype) -> Iterator[tuple[list[int], Tensor]]:
    """For each block of queries: the blocks of keys that it sees any of, and the mask to add to
    their scores.

    On a GPU everything is one block: starting many small kernels costs more there than computing
    the masked part."""
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
    blocks: list[tuple[list[int], Tensor]] | None = getattr(attention_mask, "blocks", None)
    if blocks is None:
        plain = cast(Any, sdpa).sdpa_attention_forward
        return plain(module, query, key, value, attention_mask, **options)
    heads = query.size(1)
    size = query.size(2) // len(blocks)
    keys = torch.split(sdpa.repeat_kv(key, heads // key.size(1)), size, dim=2)
    values = torch.split(sdpa.repeat_kv(value, heads // value.size(1)), size, dim=2)
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
        attended = scaled_dot_product_attention(
            part,
            some_keys[:, :, :width],
            some_values[:, :, :width],
            attn_mask=mask,
            scale=options.get("scaling"),
        )
        parts.append(attended.transpose(1, 2))
    return torch.cat(parts[::-1], dim=1), None


cast(Any, AttentionInterface).register(ATTENTION, _attend)
cast(Any, AttentionMaskInterface).register(ATTENTION, cast(Any, masks).sdpa_mask)


# -- whether a model is computed correctly ---------------------------------------------------------

PROBE_PROMPT = 4
PROBE = [12, 4]
"""Tokens of the prompt, and of the completions, that a model is tried with."""


def can_pack(causal_lm: Any) -> bool:
    """Whether `group_logps` computes what the model itself would, tried on a few tokens without
    random numbers.

    A model may scale its logits, number its positions itself or carry a state from one completion
    to the next. An attention window is longer than these tokens: there the config decides."""
    config = causal_lm.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) != {"full_attention"}:
        return False
    if not kinds and getattr(config, "sliding_window", None):
        return False
    try:
        with _at_rest(causal_lm):
            return _is_exact(causal_lm)
    except Exception as error:  # whatever a model raises that `group_logps` does not fit
        log.info("no packed training pass: %s: %s", type(error).__name__, error)
        return False


def _is_exact(causal_lm: Any) -> bool:
    ids_BT, seen_BT = _few_tokens(causal_lm)
    inputs = {"input_ids": ids_BT, "attention_mask": seen_BT, "use_cache": False}
    hidden_BTH = causal_lm.model(**inputs).last_hidden_state
    logits_BTV = causal_lm(**inputs).logits
    layout = Layout(PROBE_PROMPT, PROBE, causal_lm.dtype, ids_BT.device)
    ends = [PROBE_PROMPT + length for length in PROBE]
    tokens = [row[PROBE_PROMPT:end] for row, end in zip(ids_BT, ends, strict=True)]
    completions = [row[PROBE_PROMPT:end] for row, end in zip(hidden_BTH, ends, strict=True)]
    ids_L = torch.cat([ids_BT[0, :PROBE_PROMPT], *tokens])
    packed_LH = hidden_states(causal_lm, ids_L, layout)[PROBE_PROMPT:]
    parts = torch.split(packed_LH[: sum(PROBE)], PROBE)
    # Attention by blocks sums in another order.
    rounding = torch.finfo(causal_lm.dtype).eps ** 0.5
    if not _off(causal_lm.lm_head(hidden_BTH), logits_BTV) < 1e-3:  # also where it is NaN
        return False
    return all(_off(*pair) < rounding for pair in zip(parts, completions, strict=True))


def check_trl_head(causal_lm: Any, temperature: float) -> None:
    """FlashError unless the head that a TRL trainer put on the model gives the model's own
    log-probabilities.
    """
    ids_BT, seen_BT = _few_tokens(causal_lm)
    inputs = {"input_ids": ids_BT, "attention_mask": seen_BT}
    targets_BT = ids_BT.masked_fill(seen_BT == 0, -100)
    with _at_rest(causal_lm):
        logits = causal_lm(**inputs, use_cache=False).logits[:, :-1].float() / temperature
        logps = logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
        theirs = causal_lm(**inputs, labels=targets_BT, fused_lm_head=True).log_probs
    if not _off(theirs, logps * seen_BT[:, 1:]) < torch.finfo(causal_lm.dtype).eps ** 0.5:
        raise FlashError(
            "invalid_argument",
            "the model changes its logits in a way that the trainer does not know: its gradients "
            "would be wrong",
            model_type=causal_lm.config.model_type,
            fix="use a model of another architecture",
        )


@contextmanager
def _at_rest(model: torch.nn.Module) -> Generator[None]:
    """Without gradients and without dropout, which would draw random numbers."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def _few_tokens(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, T), of two rows with the same prompt, the second shorter."""
    width = PROBE_PROMPT + max(PROBE)
    ids = torch.arange(7, 7 + 14 * width, 7, device=causal_lm.device).view(2, width)
    ids = ids % causal_lm.config.get_text_config().vocab_size
    ids[1, :PROBE_PROMPT] = ids[0, :PROBE_PROMPT]
    ends = torch.tensor(PROBE, device=ids.device) + PROBE_PROMPT
    return ids, (torch.arange(width, device=ids.device) < ends[:, None]).long()


def _off(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to what was expected."""
    difference: Any = (values - expected).float()
    return (difference.norm() / cast(Any, expected.float()).norm()).item()
