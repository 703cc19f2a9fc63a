"""What an attempt will need of memory, known before its engine starts.

The training pass is not a formula: it runs on tensors without storage, and the bytes that would be
alive are counted. That follows every architecture and every change of worker/packing.py. It runs
through a few layers, and what a layer adds is counted for the others: through all of them it took
ten seconds. tests/worker/test_memory.py compares it with measured peaks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_mcp.protocol.errors import FlashError

MIB, GIB = 2**20, 2**30
PROCESS_BYTES = 1050 * MIB
"""Imports of torch, transformers and vLLM (690 MiB), the engine's start (40), and kernels compiled
for each length.
"""
GPU_PROCESS_BYTES = 2 * GIB
"""CUDA's context, and the engine's graphs and workspace. A guess: not measured."""
ENGINE_COPIES = 2
"""On the CPU vLLM holds packed weights beside those that it loaded."""
HEAP_OVERHEAD = 1.5
"""glibc's heap over what is alive in it: groups differ in length, so a freed block seldom fits the
next tensor.
"""
KV_BLOCK_TOKENS = 32
"""Of the CPU's cache: the smallest that vLLM takes. Prefixes are found by whole blocks; at its own
128 a chat prompt shorter than that never is.
"""
TRACED_LAYERS = 2
"""Two, since layers of two kinds often take turns; and once more as many, to tell what they add."""
KV_CACHE_SHARE = 4
"""On the CPU the cache takes at most this part of the memory: sequences that find no room wait for
their turn.
"""


@dataclass(frozen=True)
class Workload:
    """The largest step that a run may take; lengths in tokens. Without `sequences` there is no
    engine.

    Of SFT, a batch is the group: rows of `max_tokens` that have no prompt in common.
    """

    prompt: int
    max_tokens: int
    turns: int
    max_length: int
    group_size: int
    sequences: int
    lora_rank: int
    packed: bool = True
    """Whether the training pass is worker.training.packing's, else TRL's own."""
    recomputed: bool = False
    """Whether activations are computed again in the backward pass: gradient checkpointing."""

    @property
    def completion(self) -> int:
        """What the model may write in one conversation. What the environment says in between is not
        known.
        """
        return max(1, min(self.turns * self.max_tokens, self.max_length - self.prompt))

    @property
    def rows(self) -> int:
        """Completions that are computed together: by worker.training.packing after one prompt, by
        TRL each after its own.
        """
        from worker.training.packing import PACK_TOKENS  # noqa: PLC0415  seconds of imports that a server of models can spare

        fitting = (PACK_TOKENS - self.prompt) // self.completion if self.packed else self.group_size
        return max(1, min(self.group_size, fitting))

    @property
    def tokens(self) -> int:
        """What is computed of a group: its prompt once for each pack, or for each completion."""
        prompts = math.ceil(self.group_size / self.rows) if self.packed else self.group_size
        return prompts * self.prompt + self.group_size * self.completion

    @property
    def knobs(self) -> dict[str, tuple[str, int]]:
        """What can be turned down: the spec's name of it, ours, and how far."""
        length = {"max_length": ("max_length", max(256, 2 * self.prompt))}
        if not self.prompt:
            return {"batch_size": ("group_size", 1), **length}
        return {"max_tokens": ("max_tokens", 32), "group_size": ("group_size", 4), **length}


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of an attempt by what needs them. `activations` and `logits` are of one group's
    training pass.
    """

    process: int
    weights: int
    engine_weights: int
    kv_cache: int
    adapter: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        """The name of the largest term."""
        terms = asdict(self)
        return max(terms, key=lambda name: terms[name])

    def __str__(self) -> str:
        terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in asdict(self).items())
        return f"{self.total / GIB:.2f} GiB ({terms})"


def estimate(model_path: Path, work: Workload, dtype: torch.dtype, capacity: int) -> Estimate:
    """What an attempt needs where it may have `capacity` bytes; on a GPU, bytes of the card."""
    on_gpu = torch.cuda.is_available()
    model = _without_storage(model_path, dtype, work.lora_rank)
    weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    adapter = 4 * sum(
        p.nbytes for p in model.parameters() if p.requires_grad
    )  # with gradients and Adam's two moments
    kv_cache = engine_weights = 0
    if work.sequences:
        engine_weights = weights if on_gpu else ENGINE_COPIES * weights
        room = _cache_room(capacity - weights if on_gpu else capacity, engine_weights)
        kv_cache = kv_cache_bytes(
            model.config, work.max_length, work.sequences, room, itemsize=dtype.itemsize
        )
    held, passing = _training_pass(model_path, dtype, work)
    return Estimate(
        process=GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES,
        weights=weights,
        engine_weights=engine_weights,
        kv_cache=kv_cache,
        adapter=adapter,
        activations=held if on_gpu else round(HEAP_OVERHEAD * held),
        logits=passing,
    )


def check(
    model_path: Path, work: Workload, dtype: torch.dtype
) -> tuple[Estimate, int | None, str | None]:
    """(estimate, tokens of a group above which its activations have to be recomputed, warning).

    The tokens are None where nothing has to be, and there is a warning where the longest
    conversations would not fit all the same. FlashError(out_of_memory) where not even the shortest
    would: such a run cannot take one step."""
    capacity = capacity_bytes()
    needs = estimate(model_path, work, dtype, capacity)
    if needs.total <= capacity:
        return needs, None, None
    recomputed = replace(work, recomputed=True)
    shortest = replace(recomputed, max_tokens=1, turns=1)
    least = estimate(model_path, shortest, dtype, capacity)
    if least.total > capacity:
        raise FlashError(
            "out_of_memory",
            f"the run needs at least {least}, and {capacity / GIB:.2f} GiB are available; {least.largest} needs most",
            needed_gib=round(least.total / GIB, 2),
            available_gib=round(capacity / GIB, 2),
            largest=least.largest,
            fix=_knob(model_path, shortest, dtype, capacity),
        )
    # Activations grow with the tokens.
    kept = work.tokens * max(0, capacity - needs.total + needs.activations) // needs.activations
    needs = estimate(model_path, recomputed, dtype, capacity)
    if needs.total <= capacity:
        return needs, kept, None
    knob = _knob(model_path, recomputed, dtype, capacity)
    longest = (
        "conversations get as long as they may" if work.prompt else "a batch is of the longest rows"
    )
    return (
        needs,
        kept,
        f"memory runs out if {longest}: {needs} of {capacity / GIB:.2f} GiB available; {knob}",
    )


def kv_cache_bytes(
    config: Any, max_length: int, sequences: int, room: int, *, itemsize: int = 2
) -> int:
    """A cache that holds every sequence at full length, but at most `room` bytes and at least one
    of them.

    `config` is of transformers.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = 2 * itemsize * config.num_hidden_layers * heads * head_dim * KV_BLOCK_TOKENS
    blocks = math.ceil(max_length / KV_BLOCK_TOKENS)
    one, every = blocks + 1, sequences * blocks + 1  # vLLM keeps one block empty
    return block * max(one, min(every, room // block))


def engine_cache_bytes(
    model_path: Path, max_length: int, sequences: int, *, itemsize: int = 2
) -> int:
    """`kv_cache_bytes` on this machine as it is now."""
    from transformers import AutoConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(model_path)
    weights = sum(path.stat().st_size for path in model_path.glob("*.safetensors"))
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else capacity_bytes()
    return kv_cache_bytes(
        config, max_length, sequences, _cache_room(free, weights), itemsize=itemsize
    )


def _cache_room(free: int, engine_weights: int) -> int:
    """Bytes of `free` for the engine's cache; on a GPU half of what its weights leave, and the rest
    to train in.
    """
    if torch.cuda.is_available():
        return max(0, free - engine_weights - GPU_PROCESS_BYTES) // 2
    return free // KV_CACHE_SHARE


def capacity_bytes() -> int:
    """What this process may have in all: what is free, and what it holds already. On a GPU, of the
    card.
    """
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    rooms = _control_group_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([psutil.virtual_memory().available, *rooms]) + psutil.Process().memory_info().rss


def _control_group_rooms(membership: Path, root: Path) -> Iterator[int]:
    """Bytes left within each memory limit that control groups, of version 1 or 2, set on this
    process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        group = top / path.lstrip("/")
        for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(top))]:
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                statistics = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):
                continue
            if limit.isdigit():
                yield (
                    int(limit) - int(used) + int(statistics.get("inactive_file", 0))
                )  # the kernel drops those first


# -- the training pass -----------------------------------------------------------------------------


class _Alive(TorchDispatchMode):
    """Counts the bytes of tensors made under it: those alive `now`, and the most that were at once."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()) not in self._known
            ):
                self._known.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _without_storage(
    model_path: Path, dtype: torch.dtype, lora_rank: int, layers: int | None = None
) -> Any:
    """The policy as worker.training.policy makes it, on the meta device; only its first `layers`."""
    from peft import get_peft_model  # noqa: PLC0415  seconds of imports that a server of models can spare
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    from worker.training.packing import attention_of  # noqa: PLC0415
    from worker.training.policy import lora_config  # noqa: PLC0415

    config = AutoConfig.from_pretrained(model_path)
    if layers:
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_of(config)
        )
    return get_peft_model(model, lora_config(lora_rank, lora_rank), low_cpu_mem_usage=True)


def _training_pass(model_path: Path, dtype: torch.dtype, work: Workload) -> tuple[int, int]:
    """(held, passing) bytes of one group's pass: what waits for its backward pass, and what comes
    and goes beside.
    """
    from transformers import AutoConfig  # noqa: PLC0415

    text = AutoConfig.from_pretrained(model_path).get_text_config()
    layers, few = text.num_hidden_layers, TRACED_LAYERS
    if layers <= 2 * few or getattr(
        text, "num_kv_shared_layers", 0
    ):  # those need the layers that they share with
        return _traced_pass(_without_storage(model_path, dtype, work.lora_rank), work)
    some, more = (
        _traced_pass(_without_storage(model_path, dtype, work.lora_rank, count), work)
        for count in (few, 2 * few)
    )
    held, passing = (a + (b - a) * (layers - few) // few for a, b in zip(some, more, strict=True))
    return held, passing


def _traced_pass(model: Any, work: Workload) -> tuple[int, int]:
    """`_training_pass` through every layer of `model`.

    As worker.training.packing.group_logps, or as TRL's trainer does it, with every completion at
    full length."""
    from trl.trainer.utils import add_fused_lm_head  # noqa: PLC0415

    from worker.training import kernels, packing  # noqa: PLC0415

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = work.rows
    packs = work.group_size / rows
    layout = packing.Layout(work.prompt, [work.completion] * rows, model.dtype, device)

    def ids(length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.long, device=device)

    # `to_empty` reads the meta tensors, hence allow_non_fake_inputs.
    with FakeTensorMode(allow_non_fake_inputs=True):
        causal_lm = model.to_empty(device=device).get_base_model()
        causal_lm.tie_weights()
        packing.recompute(causal_lm, work.recomputed)
        if not work.packed:
            add_fused_lm_head(causal_lm, outputs=("log_probs", "entropy"))
        with _Alive(model.parameters()) as alive:
            with torch.autocast(
                device.type, torch.bfloat16, enabled=causal_lm.dtype == torch.bfloat16
            ):
                if work.packed:
                    hidden = packing.hidden_states(
                        causal_lm, ids(work.prompt + rows * work.completion), layout
                    )
                    before_head = alive.now
                    count = rows * work.completion
                    outcome = kernels.token_logps(
                        causal_lm.lm_head, hidden[ids(count)], ids(count), 1.0
                    )
                else:
                    whole = ids(rows * (work.prompt + work.completion)).view(rows, -1)
                    outcome = causal_lm(
                        input_ids=whole, labels=whole, fused_lm_head=True
                    ).to_tuple()
                    before_head = alive.now
            held, logits = alive.now, alive.now - before_head
            outcome[0].sum().backward()
            peak = alive.peak
    return round(packs * (held - logits)), round((packs - 1) * logits) + peak - held + logits


# -- what to do about it ---------------------------------------------------------------------------


def _knob(model_path: Path, work: Workload, dtype: torch.dtype, capacity: int) -> str:
    """The first of the knobs, turned down by halves, with which the run fits."""
    for knob, (name, least) in work.knobs.items():
        value = getattr(work, name) // 2
        while value >= least:
            if (
                estimate(model_path, replace(work, **{name: value}), dtype, capacity).total
                <= capacity
            ):
                return f"set {knob}={value} (it is {getattr(work, name)}), free memory, or use a smaller model"
            value //= 2
    return "use a smaller model, or a machine with more memory"
