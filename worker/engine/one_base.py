"""One copy of the base weights for engine and trainer, where both hold the same numbers.

An engine that takes adapters never changes its base weights, and the trainer freezes them. The
engine keeps some layers of a model in one matrix, such as qkv_proj: the trainer's q_proj is then
some of its rows."""

from __future__ import annotations

import re
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

WRAPPED = re.compile(r"\b(base_layer|base_model\.model)\.")
"""What adapters add to the names of weights, in PEFT and in vLLM."""


def share_base(engine_model: Any, policy: PeftModel) -> int:
    """Let the policy's frozen weights be the engine's where they are equal, number by number; the
    bytes that this frees."""
    held = {_name(name): weight.data for name, weight in engine_model.named_parameters()}
    fused: dict[str, list[str]] = getattr(engine_model, "packed_modules_mapping", {})
    own = {
        _name(name): weight
        for name, weight in policy.named_parameters()
        if not weight.requires_grad
    }
    freed = 0
    for name, weight in own.items():
        start, matrix = _place(name, own, held, fused)
        # vLLM pads a vocabulary at its end.
        rows = None if matrix is None else matrix[start : start + len(weight)]
        if rows is not None and _is_same(rows, weight.data):
            freed += weight.nbytes
            weight.data = rows
    return freed


def _name(name: str) -> str:
    """From the decoder on, which wrappers of engine and trainer have at different places."""
    return WRAPPED.sub("", name).rpartition("model.")[2]


def _place(
    name: str, own: dict[str, Any], held: dict[str, Tensor], fused: dict[str, list[str]]
) -> tuple[int, Tensor | None]:
    """The first row and the engine's matrix of the trainer's weight."""
    if name in held:
        return 0, held[name]
    for whole, parts in fused.items():
        for number, part in enumerate(parts):
            siblings = [name.replace(f".{part}.", f".{before}.") for before in parts[:number]]
            matrix = held.get(name.replace(f".{part}.", f".{whole}."))
            if f".{part}." in name and matrix is not None and all(map(own.__contains__, siblings)):
                return sum(len(own[sibling]) for sibling in siblings), matrix
    return 0, None


def _is_same(theirs: Tensor, mine: Tensor) -> bool:
    kinds = [
        (weight.shape, weight.dtype, weight.device, weight.layout) for weight in (theirs, mine)
    ]
    return kinds[0] == kinds[1] and not theirs.is_inference() and torch.equal(theirs, mine)
