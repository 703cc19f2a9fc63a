"""The memory that an attempt will need, known before its engine starts.

Weights, cache and adapter are counted on the model without storage, before it is loaded. What the
training pass keeps is measured on a few tokens of the loaded model: packs that the rest of the
memory does not hold are split, or compute their activations twice.
tests/worker/test_memory.py compares the estimate with measured peaks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flash_mcp.protocol.errors import FlashError
from worker.capacity import GIB, GPU_PROCESS_BYTES, MIB, kv_cache_bytes
from worker.model_files import ModelFiles
from worker.training.attention import BLOCK
from worker.training.kernels import VOCABULARY_TILE
from worker.training.packing import Pack, Way, at_rest, probe
from worker.training.policy import without_storage

PROCESS_BYTES = 1050 * MIB
"""Imports of torch, transformers and vLLM (690 MiB), the engine's start (40), and kernels compiled
for each length.
"""
ENGINE_COPIES = 2
"""On the CPU vLLM holds packed weights in addition to those that it loaded."""
HEAP_OVERHEAD = 0.5
"""Free memory in glibc's heap, relative to the live data: groups differ in length, so a freed block
seldom fits the next tensor.
"""
GPU_HEAP_OVERHEAD = 0.1
"""The same of PyTorch's allocator on a GPU. This is a guess."""
NF4_BYTES = 0.516
"""Bytes of a parameter in NF4: 4 bits, and scales that are quantized too."""
LOGIT_BYTES = 10
"""Bytes of a token for each entry of a tile of the vocabulary: logits and their exponentials in
fp32, and those again in half precision.
"""
LEAST_LENGTH = 256
"""Tokens of the shortest max_length that is proposed."""


@dataclass(frozen=True)
class Workload:
    """What decides how much memory an attempt needs beside its training pass; lengths in tokens.
    With 0 `sequences` there is no engine."""

    max_length: int
    sequences: int
    lora_rank: int
    experts: bool = False
    """Whether experts have an adapter."""
    four_bit: bool = False
    """Whether the trainer's linear layers are in NF4. The engine's are whole."""
    teacher: int = 0
    """Bytes of the weights of a teacher."""
    shards: int = 1
    """Cards that share the base weights of the trainer (worker.model) and the engine."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of an attempt by purpose, without those of its training pass."""

    process: int
    weights: int
    engine_weights: int
    kv_cache: int
    adapter: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        terms = asdict(self)
        return max(terms, key=terms.__getitem__)

    def __str__(self) -> str:
        terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in asdict(self).items())
        return f"{self.total / GIB:.2f} GiB ({terms})"


def estimate(base: ModelFiles, work: Workload, dtype: torch.dtype, capacity: int) -> MemoryEstimate:
    """The memory that an attempt needs if `capacity` bytes are available; on a GPU, of the card."""
    model = without_storage(base, dtype, work.lora_rank, experts=work.experts)
    full = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    weights = full
    if work.four_bit:
        adapted = [
            each.base_layer.weight for each in model.modules() if hasattr(each, "base_layer")
        ]
        weights -= sum(weight.nbytes - round(NF4_BYTES * weight.numel()) for weight in adapted)
    if work.shards > 1:
        layers = model.get_base_model().model.layers
        sizes = [
            sum(p.nbytes for p in layer.parameters() if not p.requires_grad) for layer in layers
        ]
        # The layer that is computed and the next one are whole.
        weights += 2 * max(sizes) - sum(sizes) + math.ceil(sum(sizes) / work.shards)
        full = math.ceil(full / work.shards)
    weights += work.teacher
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    process = PROCESS_BYTES
    copies = ENGINE_COPIES
    adapter = 4 * trained  # with gradients and Adam's two moments
    free = capacity
    if torch.cuda.is_available():
        process = GPU_PROCESS_BYTES
        copies = 1
        free -= weights
        if work.sequences:
            adapter += trained  # the engine's copy, of a larger rank but in half precision
    kv_cache = engine_weights = 0
    if work.sequences:
        engine_weights = copies * full
        sizes = {"itemsize": dtype.itemsize, "shards": work.shards}
        length, sequences = work.max_length, work.sequences
        kv_cache = kv_cache_bytes(base, length, sequences, free, engine_weights, **sizes)
        if work.shards > 1:
            process *= 2  # the engine has one of its own on each card
    return MemoryEstimate(process, weights, engine_weights, kv_cache, adapter)


def check_model(
    base: ModelFiles, work: Workload, dtype: torch.dtype, capacity: int, cards: int = 1
) -> int:
    """How many of `cards` share the base weights: 1, or all if one cannot hold them. It is called
    before the model is loaded.

    FlashError(out_of_memory) if not even the model, its adapter and an engine with a cache for one
    conversation fit."""
    work = replace(work, sequences=min(1, work.sequences))
    if estimate(base, work, dtype, capacity).total <= capacity:
        return 1
    if cards > 1 and not work.four_bit:
        work = replace(work, shards=cards)
        if estimate(base, work, dtype, capacity).total <= capacity:
            return cards
    raise does_not_fit(base, work, dtype, capacity)


def does_not_fit(base: ModelFiles, work: Workload, dtype: torch.dtype, capacity: int) -> FlashError:
    """The error of a run that needs more than `capacity`, with the max_length that would do."""
    least = estimate(base, work, dtype, capacity)
    fix = "use a smaller model, or a machine with more memory"
    if torch.cuda.is_available():
        fix = "use a smaller model, a card with more memory, or end what else uses this card"
    shorter = work.max_length // 2
    while work.sequences and shorter >= LEAST_LENGTH:
        lowered = replace(work, max_length=shorter)
        if estimate(base, lowered, dtype, capacity).total <= capacity:
            now = work.max_length
            fix = f"set max_length={shorter} (it is {now}), free memory, or use a smaller model"
            break
        shorter //= 2
    return FlashError(
        "out_of_memory",
        f"the run needs at least {least}, and {capacity / GIB:.2f} GiB are available; "
        f"{least.largest} needs most",
        needed_gib=round(least.total / GIB, 2),
        available_gib=round(capacity / GIB, 2),
        largest=least.largest,
        fix=fix,
    )


def token_bytes(causal_lm: Any, way: Way) -> float:
    """Bytes that a pass takes for each of its tokens: what the layers keep for the backward pass,
    as autograd counts it for two short completions of a prompt, and a tile of logits."""
    pack = probe(causal_lm, [BLOCK] * 3, way)
    held = pass_bytes(causal_lm, pack) / pack.tokens
    overhead = GPU_HEAP_OVERHEAD if torch.cuda.is_available() else HEAP_OVERHEAD
    vocabulary: int = causal_lm.config.get_text_config().vocab_size
    return (1 + overhead) * held + LOGIT_BYTES * min(vocabulary, VOCABULARY_TILE)


def pass_bytes(causal_lm: Any, pack: Pack) -> int:
    """Bytes of the activations that the layers keep for the backward pass of `pack`."""
    weights = {parameter.untyped_storage() for parameter in causal_lm.parameters()}
    kept: set[Any] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage())
        return tensor

    half = causal_lm.dtype == torch.bfloat16
    device = cast(torch.device, causal_lm.device).type
    autocast = torch.autocast(device, torch.bfloat16, enabled=half)
    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with at_rest(causal_lm), torch.enable_grad(), autocast, hooks:
        pack.hidden(causal_lm)
    return sum(storage.nbytes() for storage in kept - weights)
