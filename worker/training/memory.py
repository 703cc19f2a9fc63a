"""The memory that an attempt will need, known before its engine starts.

The training pass is not a formula: it runs on tensors without storage, and the bytes that would be
alive are counted. That follows every architecture and every change of worker/training/packing.py.
It runs through a few layers and extrapolates to the others: all of them would take ten seconds.
tests/worker/test_memory.py compares the estimate with measured peaks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flash_mcp.protocol.errors import FlashError
from worker.capacity import GIB, GPU_PROCESS_BYTES, MIB, cache_room, capacity_bytes, kv_cache_bytes
from worker.model_files import auto_class, config_of, has_experts

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
KEPT_SHARE = 0.98
"""A pack with a smaller part of prompt in it needs a little more for each token."""
NF4_BYTES = 0.516
"""Bytes of a parameter in NF4: 4 bits, and scales that are quantized too."""
TRACED_LAYERS = 2
"""Two, since layers of two kinds often alternate. Twice as many are traced too, to tell what they
add."""


@dataclass(frozen=True)
class Workload:
    """The largest step of a run; lengths in tokens. With 0 `sequences` there is no engine.

    With SFT, the group is a batch: rows of `max_tokens` without a common prompt.
    """

    prompt: int
    max_tokens: int
    turns: int
    max_length: int
    group_size: int
    sequences: int
    lora_rank: int
    way: str = "packed"
    """The training pass's worker.training.packing.Way."""
    longest: float | None = None
    """Tokens of a pack, where attention has no mask (worker.training.packing.longest_pack)."""
    experts: bool = False
    """Whether experts have an adapter."""
    four_bit: bool = False
    """Whether the trainer's linear layers are in NF4. The engine's are whole."""
    recomputed: bool = False
    """Whether activations are computed again in the backward pass (gradient checkpointing)."""
    teacher: int = 0
    """Bytes of the weights of a teacher."""
    shards: int = 1
    """Cards that share the base weights of the trainer (worker.model) and the engine."""

    @property
    def completion(self) -> int:
        """Tokens that the model may write in a conversation. The environment's are not known."""
        return max(1, min(self.turns * self.max_tokens, self.max_length - self.prompt))

    @property
    def rows(self) -> int:
        # Imported here: this module is also used by a server of models, which needs no trainer.
        from worker.training.packing import pack_limit  # noqa: PLC0415

        shared, own = (0, self.prompt) if self.way == "rows" else (self.prompt, 0)
        longest = None if self.recomputed else self.longest
        limit = pack_limit(shared, longest=longest)
        fitting = int(limit - shared) // (own + self.completion)
        return max(1, min(self.group_size, fitting))

    @property
    def tokens(self) -> int:
        prompts = self.rows if self.way == "rows" else 1
        return prompts * self.prompt + self.rows * self.completion

    @property
    def knobs(self) -> dict[str, tuple[str, int]]:
        """Fields of the spec that can be lowered -> (the field here, its least value)."""
        length = {"max_length": ("max_length", max(256, 2 * self.prompt))}
        if not self.prompt:
            return {"batch_size": ("group_size", 1), **length}
        return {"max_tokens": ("max_tokens", 32), "group_size": ("group_size", 4), **length}


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of an attempt by purpose. `activations` and `logits` are those of one training
    pass. `fragmentation` is what the allocator wastes.
    """

    process: int
    weights: int
    engine_weights: int
    kv_cache: int
    adapter: int
    activations: int
    logits: int
    fragmentation: int

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


def estimate(model_path: Path, work: Workload, dtype: torch.dtype, capacity: int) -> MemoryEstimate:
    """The memory that an attempt needs if `capacity` bytes are available; on a GPU, of the card."""
    base = estimate_model(model_path, work, dtype, capacity)
    held, passing = _training_pass(model_path, dtype, work)
    overhead = GPU_HEAP_OVERHEAD if torch.cuda.is_available() else HEAP_OVERHEAD
    return replace(base, activations=held, logits=passing, fragmentation=round(overhead * held))


def estimate_model(
    model_path: Path, work: Workload, dtype: torch.dtype, capacity: int
) -> MemoryEstimate:
    """`estimate` without the training pass."""
    model = _without_storage(model_path, dtype, work)
    full = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    weights = full - _saved_by_nf4(model) if work.four_bit else full
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
        room = cache_room(free, engine_weights)
        kv_cache = kv_cache_bytes(
            model.config,
            work.max_length,
            work.sequences,
            room,
            itemsize=dtype.itemsize,
            shards=work.shards,
        )
        if work.shards > 1:
            process *= 2  # the engine has one of its own on each card
    return MemoryEstimate(process, weights, engine_weights, kv_cache, adapter, 0, 0, 0)


def _saved_by_nf4(model: Any) -> int:
    adapted = [module.base_layer for module in model.modules() if hasattr(module, "base_layer")]
    return sum(layer.weight.nbytes - round(NF4_BYTES * layer.weight.numel()) for layer in adapted)


def check_model(model_path: Path, work: Workload, dtype: torch.dtype, cards: int = 1) -> int:
    """How many of `cards` share the base weights: 1, or all if one cannot hold them. It is called
    before the model is loaded.

    FlashError(out_of_memory) if not even the model, its adapter and an engine with a cache for one
    conversation fit."""
    capacity = capacity_bytes()
    work = replace(work, sequences=min(1, work.sequences))
    least = estimate_model(model_path, work, dtype, capacity)
    if least.total <= capacity:
        return 1
    if cards > 1 and not work.four_bit:
        work = replace(work, shards=cards)
        least = estimate_model(model_path, work, dtype, capacity)
        if least.total <= capacity:
            return cards
    raise _does_not_fit(least, capacity, _knob(estimate_model, model_path, work, dtype, capacity))


def check(
    model_path: Path, work: Workload, dtype: torch.dtype
) -> tuple[MemoryEstimate, int | None, str | None]:
    """(estimate, tokens of a pass above which its activations must be recomputed, warning).

    The tokens are None if nothing must be recomputed. There is a warning if even then the longest
    conversations would not fit. FlashError(out_of_memory) if not even the shortest fit: such a run
    cannot take one step."""
    capacity = capacity_bytes()
    needs = estimate(model_path, work, dtype, capacity)
    if needs.total <= capacity:
        return needs, None, None
    recomputed = replace(work, recomputed=True)
    shortest = replace(recomputed, max_tokens=1, turns=1)
    least = estimate(model_path, shortest, dtype, capacity)
    if least.total > capacity:
        raise _does_not_fit(least, capacity, _knob(estimate, model_path, shortest, dtype, capacity))
    # Activations grow with the tokens.
    passing = needs.activations + needs.fragmentation
    room = max(0, capacity - needs.total + passing)
    kept = int(KEPT_SHARE * work.tokens * room / passing)
    needs = estimate(model_path, recomputed, dtype, capacity)
    if needs.total <= capacity:
        return needs, kept, None
    knob = _knob(estimate, model_path, recomputed, dtype, capacity)
    longest = "conversations get as long as they may"
    if not work.prompt:
        longest = "a batch is of the longest rows"
    available = f"{needs} of {capacity / GIB:.2f} GiB available"
    return needs, kept, f"memory runs out if {longest}: {available}; {knob}"


def _does_not_fit(least: MemoryEstimate, capacity: int, fix: str) -> FlashError:
    return FlashError(
        "out_of_memory",
        f"the run needs at least {least}, and {capacity / GIB:.2f} GiB are available; "
        f"{least.largest} needs most",
        needed_gib=round(least.total / GIB, 2),
        available_gib=round(capacity / GIB, 2),
        largest=least.largest,
        fix=fix,
    )


# -- the training pass -----------------------------------------------------------------------------


class _Alive(TorchDispatchMode):
    """Counts the bytes of tensors made within it: those alive `now`, and their `peak`."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        cast(Any, super()).__init__()
        self.now = 0
        self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _without_storage(
    model_path: Path, dtype: torch.dtype, work: Workload, layers: int | None = None
) -> Any:
    """The policy of worker.training.policy on the meta device; only its first `layers`."""
    from worker.training.attention import attention_of  # noqa: PLC0415
    from worker.training.kernels import fuse_norms  # noqa: PLC0415
    from worker.training.policy import with_adapter  # noqa: PLC0415

    config = config_of(model_path)
    if layers:
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        attention = attention_of(config)
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    if torch.cuda.is_available():
        fuse_norms(model)
    rank = work.lora_rank
    return with_adapter(model, rank, rank, experts=work.experts, low_cpu_mem_usage=True)


def _training_pass(model_path: Path, dtype: torch.dtype, work: Workload) -> tuple[int, int]:
    """(held, passing) bytes of one pass: kept for the backward pass, and those that come and go."""
    config = config_of(model_path)
    text = config.get_text_config()
    layers: int = text.num_hidden_layers
    if dtype == torch.float32 and has_experts(config):
        # PyTorch's product of groups knows bf16 only where tensors have no storage.
        held, passing = _training_pass(model_path, torch.bfloat16, work)
        return 2 * held, 2 * passing
    few = TRACED_LAYERS

    def traced(count: int | None = None) -> tuple[int, int]:
        return _traced_pass(_without_storage(model_path, dtype, work, count), work)

    # Layers that share keys need those that they share with.
    if layers <= 2 * few or getattr(text, "num_kv_shared_layers", 0):
        return traced()
    held, passing = traced(few)
    held_more, passing_more = traced(2 * few)
    held += (held_more - held) * (layers - few) // few
    passing += (passing_more - passing) * (layers - few) // few
    return held, passing


def _traced_pass(model: Any, work: Workload) -> tuple[int, int]:
    """`_training_pass` through every layer of `model`.

    It runs like worker.training.packing.Pack.logps, with every completion at full length."""
    from worker.training import kernels, packing  # noqa: PLC0415

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = work.rows
    count = rows * work.completion
    way = packing.Way.ROWS if work.recomputed and work.way == "state" else packing.Way(work.way)

    def ids(length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.long, device=device)

    layout = None
    if way == packing.Way.PACKED:
        lengths = [work.completion] * rows
        layout = packing.layout_of(model.get_base_model(), work.prompt, lengths, device=device)
    # `to_empty` reads the meta tensors, hence allow_non_fake_inputs.
    with FakeTensorMode(allow_non_fake_inputs=True):
        causal_lm = model.to_empty(device=device).get_base_model()
        causal_lm.tie_weights()
        packing.recompute(causal_lm, work.recomputed)
        with _Alive(model.parameters()) as alive:
            half = causal_lm.dtype == torch.bfloat16
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                if layout:
                    hidden = packing.hidden_states(causal_lm, ids(work.prompt + count), layout)
                    hidden = hidden[ids(count)]
                else:
                    completions = [ids(work.completion)] * rows
                    trained = [torch.arange(work.completion, device=device)] * rows
                    places = ids(count), [()] * rows, [*range(rows)]
                    pack = packing.Pack(ids(work.prompt), completions, trained, *places, way)
                    hidden = pack.hidden(causal_lm)
                before_head = alive.now
                head = kernels.Head.from_model(causal_lm)
                logps, _ = kernels.token_logps(head, hidden, ids(count), 1.0)
            held = alive.now
            logits = held - before_head
            cast(Any, logps.sum()).backward()
            peak = alive.peak
    return held - logits, peak - held + logits


# -- what to do about it ---------------------------------------------------------------------------


def _knob(
    estimated: Callable[[Path, Workload, torch.dtype, int], MemoryEstimate],
    model_path: Path,
    work: Workload,
    dtype: torch.dtype,
    capacity: int,
) -> str:
    """The first field that makes the run fit when it is lowered by halves."""
    for knob, (name, least) in work.knobs.items():
        now: int = getattr(work, name)
        value = now // 2
        while value >= least:
            lowered = replace(work, **{name: value})
            if estimated(model_path, lowered, dtype, capacity).total <= capacity:
                return f"set {knob}={value} (it is {now}), free memory, or use a smaller model"
            value //= 2
    if torch.cuda.is_available():
        return "use a smaller model, a card with more memory, or end what else uses this card"
    return "use a smaller model, or a machine with more memory"
