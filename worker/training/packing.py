"""Log-probabilities of a group's completions, its prompt computed once.

The rollouts of a group share their prompt. They are laid out as one sequence, prompt then
completion after completion, without padding but at its end; a mask lets each completion see the
prompt and itself, and its positions go on from the prompt's end. The language-model head runs on
the positions that predict trained tokens alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flash_mcp.protocol.errors import FlashError
from worker.training.kernels import token_logps

log = logging.getLogger("worker")
PACK_TOKENS = 4096
"""A longer sequence is split: its mask is quadratic in it, and one prompt more is cheaper."""
BLOCK, HEAD_STEP = 64, 16
"""Sequences and rows of the head are filled up to whole multiples. On the CPU PyTorch compiles
kernels for each new length and keeps them: megabytes a length, without end.
"""
ATTENTION = "packed"
"""The name under which transformers knows `_attend`."""


def attention_of(config: Any) -> str | None:
    """What to load a model with: `_attend`; its own, None, where its layers look up none (Falcon)."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return ATTENTION if getattr(kind, "_supports_attention_backend", False) else None


def group_logps(
    causal_lm: Any,
    input_ids: Tensor,  # (B, P+C) prompts padded left, completions padded right
    attention_mask: Tensor,  # (B, P+C)
    trained: Tensor,  # (B, C) 1 where a log-probability is wanted
    temperature: float,
    *,
    keep_tokens: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (B, C) in fp32, zero where `trained` is 0. Entropies
    carry no gradient.

    `causal_lm` is a transformers decoder with a `model` and an `lm_head`. Where its sequences have
    more than `keep_tokens` tokens together, activations are recomputed in the backward pass."""
    length = trained.size(1)
    starts = input_ids.size(1) - length
    packs = list(_packs(input_ids, attention_mask, starts))
    if torch.is_grad_enabled():
        tokens = sum(len(prompt) for prompt, _ in packs) + int(attention_mask[:, starts:].sum())
        recompute(causal_lm, tokens > keep_tokens)
    logps = input_ids.new_zeros(trained.shape, dtype=torch.float32)
    entropies = torch.zeros_like(logps)
    for prompt, rows in packs:
        completions = [input_ids[row, starts:][attention_mask[row, starts:].bool()] for row in rows]
        layout = Layout(
            len(prompt), [len(part) for part in completions], causal_lm.dtype, prompt.device
        )
        hidden = hidden_states(causal_lm, torch.cat([prompt, *completions]), layout)  # (L, H)
        predictors, targets, places = [], [], []
        offset = len(prompt)
        for row, completion in zip(rows, completions, strict=True):
            at = trained[row, : len(completion)].nonzero().squeeze(1)
            # Token t is predicted at t-1; a completion's first token at the prompt's end.
            predictors.append(torch.where(at == 0, len(prompt) - 1, offset + at - 1))
            targets.append(completion[at])
            places.append(row * length + at)
            offset += len(completion)
        where = torch.cat(places)
        filler = -len(where) % HEAD_STEP
        values, entropy = token_logps(
            causal_lm.lm_head,
            pad(hidden[torch.cat(predictors)], (0, 0, 0, filler)),
            pad(torch.cat(targets), (0, filler)),
            temperature,
        )
        logps = logps.view(-1).index_put((where,), values[: len(where)]).view_as(logps)
        entropies.view(-1)[where] = entropy[: len(where)]
    return logps, entropies


def recompute(causal_lm: Any, on: bool) -> None:
    """Whether layers compute their activations again in the backward pass instead of holding them."""
    if on == causal_lm.is_gradient_checkpointing or not causal_lm.supports_gradient_checkpointing:
        return
    if on:
        causal_lm.gradient_checkpointing_enable()
        causal_lm.disable_input_require_grads()  # which only reentrant checkpointing needs
    else:
        causal_lm.gradient_checkpointing_disable()


def _packs(
    input_ids: Tensor, attention_mask: Tensor, starts: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """(prompt, rows) of sequences of at most PACK_TOKENS, or of a single row."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in range(input_ids.size(0)):
        prompt = input_ids[row, :starts][attention_mask[row, :starts].bool()]
        by_prompt.setdefault(tuple(prompt.tolist()), []).append(row)
    lengths = attention_mask[:, starts:].sum(1).tolist()
    for key, rows in by_prompt.items():
        prompt = input_ids.new_tensor(key)
        pack: list[int] = []
        size = len(prompt)
        for row in rows:
            if pack and size + lengths[row] > PACK_TOKENS:
                yield prompt, pack
                pack, size = [], len(prompt)
            pack.append(row)
            size += lengths[row]
        yield prompt, pack


class Layout:
    """Positions and mask of a prompt and its completions one after the other, by their lengths in
    tokens.

    The last completion is followed by as many tokens that nobody sees as make up whole blocks.
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
        self.mask: Any = visible[
            None, None
        ]  # transformers hands a 4-D mask through, and what `_attend` needs with it
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


def _blocks(visible: Tensor, dtype: torch.dtype) -> Iterator[tuple[list[int], Tensor]]:
    """For each block of queries: the blocks of keys of which it sees any, and what is added to
    their scores.

    On a GPU all is one block: there starting many small kernels costs more than computing what is
    masked."""
    size = BLOCK if visible.device.type == "cpu" else len(visible)
    for rows in visible.split(size):  # (size, L)
        tiles = rows.view(size, -1, size)
        seen = tiles.any(2).any(0).nonzero().flatten()
        columns = tiles[:, seen].flatten(1)
        yield (
            seen.tolist(),
            torch.zeros_like(columns, dtype=dtype).masked_fill_(~columns, -torch.inf),
        )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: (1, heads, L, D) each to (1, L, heads, D).

    A completion sees the prompt and itself: most of a pack's mask is empty, and nothing is computed
    there."""
    blocks = getattr(attention_mask, "blocks", None)
    if blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    size = query.size(2) // len(blocks)
    keys, values = (
        repeat_kv(part, query.size(1) // part.size(1)).split(size, dim=2) for part in (key, value)
    )
    parts: list[Tensor] = []
    gathered: list[int] = []
    some_keys = some_values = query
    # From the end: what a block sees is how the next one's begins, so that a completion takes one
    # copy and no more.
    for part, (seen, mask) in zip(
        reversed(query.split(size, dim=2)), reversed(blocks), strict=True
    ):
        if gathered[: len(seen)] != seen:
            gathered = seen
            some_keys, some_values = (
                torch.cat([of[at] for at in seen], dim=2) for of in (keys, values)
            )
        width = mask.size(1)
        parts.append(
            scaled_dot_product_attention(
                part,
                some_keys[:, :, :width],
                some_values[:, :, :width],
                attn_mask=mask,
                scale=options.get("scaling"),
            ).transpose(1, 2)
        )
    return torch.cat(parts[::-1], dim=1), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# -- whether a model is computed rightly -----------------------------------------------------------

PROBE_PROMPT, PROBE = 4, [12, 4]
"""Tokens of a prompt and of the completions that a model is tried with."""


def can_pack(causal_lm: Any) -> bool:
    """Whether `group_logps` computes what the model itself would, tried on a few tokens without a
    random number.

    A model may scale its logits, number its positions by itself or carry a state from one
    completion to the next. An attention's window is longer than these tokens: there the config
    decides."""
    config = causal_lm.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if set(kinds) != {"full_attention"} if kinds else getattr(config, "sliding_window", None):
        return False
    try:
        with _at_rest(causal_lm):
            return _is_exact(causal_lm)
    except (
        Exception
    ) as error:  # whatever a model raises that is not made as `group_logps` takes for granted
        log.info("no packed training pass: %s: %s", type(error).__name__, error)
        return False


def _is_exact(causal_lm: Any) -> bool:
    ids, seen = _few_tokens(causal_lm)
    hidden = causal_lm.model(
        input_ids=ids, attention_mask=seen, use_cache=False
    ).last_hidden_state  # (2, P+C, H)
    logits = causal_lm(input_ids=ids, attention_mask=seen, use_cache=False).logits  # (2, P+C, V)
    completions = [
        row[PROBE_PROMPT : PROBE_PROMPT + length] for row, length in zip(hidden, PROBE, strict=True)
    ]
    tokens = [
        row[PROBE_PROMPT : PROBE_PROMPT + length] for row, length in zip(ids, PROBE, strict=True)
    ]
    layout = Layout(PROBE_PROMPT, PROBE, causal_lm.dtype, ids.device)
    packed = hidden_states(causal_lm, torch.cat([ids[0, :PROBE_PROMPT], *tokens]), layout)[
        PROBE_PROMPT:
    ]  # (L, H)
    apart = zip(packed[: sum(PROBE)].split(PROBE), completions, strict=True)
    rounding = (
        torch.finfo(causal_lm.dtype).eps ** 0.5
    )  # attention by blocks adds up in another order
    return _off(causal_lm.lm_head(hidden), logits) < 1e-3 and all(
        _off(*pair) < rounding for pair in apart
    )


def check_trl_head(causal_lm: Any, temperature: float) -> None:
    """FlashError unless the head that a TRL trainer has put on the model gives the model's own
    log-probabilities.
    """
    ids, seen = _few_tokens(causal_lm)
    targets = ids.masked_fill(seen == 0, -100)
    with _at_rest(causal_lm):
        logits = (
            causal_lm(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1].float()
            / temperature
        )
        own = (
            logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * seen[:, 1:]
        )  # (2, P+C-1)
        theirs = causal_lm(
            input_ids=ids, attention_mask=seen, labels=targets, fused_lm_head=True
        ).log_probs
    if not _off(theirs, own) < torch.finfo(causal_lm.dtype).eps ** 0.5:
        raise FlashError(
            "invalid_argument",
            "the model changes its logits in a way that the trainer does not know: its gradients would be wrong",
            model_type=causal_lm.config.model_type,
            fix="use a model of another architecture",
        )


@contextmanager
def _at_rest(model: torch.nn.Module) -> Iterator[None]:
    """Without gradients and without dropout, which would draw random numbers."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def _few_tokens(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask (2, P+C) of two rows with the same prompt, the second shorter."""
    width = PROBE_PROMPT + max(PROBE)
    ids = torch.arange(7, 7 + 14 * width, 7, device=causal_lm.device).view(2, width)
    ids = ids % causal_lm.config.get_text_config().vocab_size
    ids[1, :PROBE_PROMPT] = ids[0, :PROBE_PROMPT]
    ends = torch.tensor(PROBE, device=ids.device) + PROBE_PROMPT
    return ids, (torch.arange(width, device=ids.device) < ends[:, None]).long()


def _off(values: Tensor, expected: Tensor) -> float:
    """The norm of their difference, relative to what was expected."""
    return ((values - expected).float().norm() / expected.float().norm()).item()
