"""Log-probabilities of a group's completions, its prompt computed once.

The rollouts of a group share their prompt. They are laid out as one sequence, prompt then completion after completion,
without padding; a mask lets each completion see the prompt and itself, and its positions go on from the prompt's end.
The language-model head runs on the positions that predict trained tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

PACK_TOKENS = 4096
"""A longer sequence is split: attention is quadratic in it, and one prompt more is cheaper."""
HEAD_TOKENS = 2048
"""Rows of logits alive at once: (HEAD_TOKENS, vocabulary) in fp32."""
LENGTH_STEP, HEAD_STEP = 64, 16
"""Sequences and rows of the head are filled up to whole multiples. On the CPU PyTorch compiles kernels for each new
length and keeps them: megabytes a length, without end."""


def can_pack(config: Any) -> bool:
    """Whether every layer attends to everything before it, so that a mask alone can separate completions."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"}


def group_logps(
    causal_lm: Any,
    input_ids: Tensor,  # (B, P+C) prompts padded left, completions padded right
    attention_mask: Tensor,  # (B, P+C)
    trained: Tensor,  # (B, C) 1 where a log-probability is wanted
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (B, C) in fp32, zero where `trained` is 0. Entropies carry no gradient.

    `causal_lm` is a transformers decoder with a `model` and an `lm_head`.
    """
    length = trained.size(1)
    starts = input_ids.size(1) - length
    logps = input_ids.new_zeros(trained.shape, dtype=torch.float32)
    entropies = torch.zeros_like(logps)
    for prompt, rows in _packs(input_ids, attention_mask, starts):
        completions = [input_ids[row, starts:][attention_mask[row, starts:].bool()] for row in rows]
        filler = prompt.new_zeros(-(len(prompt) + sum(map(len, completions))) % LENGTH_STEP)
        hidden = _hidden(causal_lm, prompt, [*completions, filler])  # (L, H)
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
        values, entropy = _head(causal_lm.lm_head, hidden[torch.cat(predictors)], torch.cat(targets), temperature)
        logps = logps.view(-1).index_put((where,), values).view_as(logps)
        entropies.view(-1)[where] = entropy
    return logps, entropies


def _packs(input_ids: Tensor, attention_mask: Tensor, starts: int) -> Iterator[tuple[Tensor, list[int]]]:
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


def _hidden(causal_lm: Any, prompt: Tensor, completions: list[Tensor]) -> Tensor:
    """Last hidden states (L, H) of prompt and completions laid out one after the other."""
    device = prompt.device
    ids = torch.cat([prompt, *completions])
    owner = torch.cat(
        [torch.full((len(part),), number, device=device) for number, part in enumerate((prompt, *completions))]
    )
    positions = torch.cat(
        [torch.arange(len(prompt), device=device)]
        + [torch.arange(len(prompt), len(prompt) + len(part), device=device) for part in completions]
    )
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).tril_()
    visible = causal & ((owner[:, None] == owner[None, :]) | (owner == 0)[None, :])  # (L, L)
    output = causal_lm.model(
        input_ids=ids[None], attention_mask=visible[None, None], position_ids=positions[None], use_cache=False
    )
    return output.last_hidden_state[0]


def _head(head: torch.nn.Linear, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of `targets` (N,) under `hidden` (N, H)."""
    count, filler = len(targets), -len(targets) % HEAD_STEP
    hidden, targets = pad(hidden, (0, 0, 0, filler)), pad(targets, (0, filler))

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float() / temperature  # (N, V)
        normalizer = logits.logsumexp(-1)
        with torch.no_grad():
            logp = logits - normalizer[:, None]
            entropy = -(logp.exp() * logp).sum(-1)
        return logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer, entropy

    if len(targets) <= HEAD_TOKENS:
        logps, entropies = chunk(hidden, targets)
        return logps[:count], entropies[:count]
    parts = [
        checkpoint(chunk, part, target, use_reentrant=False)
        for part, target in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
    ]
    return torch.cat([part[0] for part in parts])[:count], torch.cat([part[1] for part in parts])[:count]
