"""The training step of three models on an H200, computed: no GPU is needed, and none was used.

    python -m bench.paper

A pass of 8 x 8 rollouts (prompt 256, 3 x 512 tokens) runs on tensors without storage. Matrix
products count by their floating-point operations, everything else by the bytes that it reads and
writes, at the rates below, without overlap. "before" has the dense mask and keeps the
activations of a whole group; "after" has flash attention and PyTorch's kernel for RMS norms, and
keeps the activations of one pack."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from bench.random_model import config_of
from worker.model_files import ModelFiles
from worker.training import attention, kernels, packing
from worker.training.policy import with_adapter

FLOPS = 600e12
"""Dense bf16, of 989e12 in the data sheet."""
BYTES = 4.0e12
"""Copying, of 4.8e12 in the data sheet."""
GROUPS = 8


@dataclass(frozen=True)
class Work:
    """The rollouts of a group, in tokens."""

    prompt: int
    completion: int
    group_size: int
    longest: float | None = None
    """As of worker.training.packing.pack_limit."""

    @property
    def rows(self) -> int:
        """Completions of a pack."""
        room = packing.pack_limit(self.prompt, longest=self.longest) - self.prompt
        return max(1, min(self.group_size, int(room) // self.completion))


WORK = Work(256, 1536, 8)
RANK = 32


@dataclass
class Cost:
    flops: float = 0.0
    moved: float = 0.0

    def plus(self, other: Cost, times: float) -> Cost:
        return Cost(self.flops + times * other.flops, self.moved + times * other.moved)

    @property
    def seconds(self) -> float:
        return self.flops / FLOPS + self.moved / BYTES


class _Moved(TorchDispatchMode):
    """Counts the bytes that operations other than matrix products and attention read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet not in flop_registry and not func.is_view:
            for tensor in pytree.tree_leaves((args, kwargs, result)):
                if isinstance(tensor, torch.Tensor):
                    self.total += tensor.nbytes
        return result


def _flash_flops(lengths: Sequence[int]) -> dict[Any, Any]:
    """How the counter counts flash attention of segments of these lengths in tokens. Its own rule
    takes each for the longest, and the half that a causal mask leaves out for computed.
    """

    def forward(query: Any, key: Any, *rest: Any, **_: Any) -> float:
        tokens, heads, size = query
        is_causal = rest[6]
        pairs = sum(length**2 / 2 for length in lengths) if is_causal else tokens * key[0]
        return 4 * pairs * heads * size

    def backward(_gradient: Any, *rest: Any, **_: Any) -> float:
        query, key, value, _out, _lse, *others = rest
        return 2.5 * forward(query, key, value, *others)  # five products instead of two

    return {attention.FLASH_FORWARD: forward, attention.FLASH_BACKWARD: backward}


def pass_cost(
    folder: Path, layers: int, *, flash: bool, recomputed: bool, work: Work = WORK
) -> Cost:
    """One pack's forward and backward pass."""
    model = _without_storage(folder, layers)
    if flash:
        norm = patch.object(kernels, "_fused_norm", lambda norm, hidden: _FusedNorm.apply(hidden))
        with norm:
            kernels.fuse_norms(model)
    device = torch.device("meta")  # tensors without storage, and PyTorch's rules for their shapes
    lengths = [work.completion] * work.rows
    layout = attention.Layout(work.prompt, lengths, torch.bfloat16, device, flash=flash)
    causal_lm = model.get_base_model()
    packing.recompute(causal_lm, recomputed)
    ids = torch.zeros(work.prompt + sum(lengths), dtype=torch.long, device=device)
    counted = torch.zeros(sum(lengths), dtype=torch.long, device=device)
    own = _flash_flops([work.prompt, *lengths])
    with FlopCounterMode(display=False, custom_mapping=own) as flops, _Moved() as moved:
        hidden = packing.hidden_states(causal_lm, ids, layout)
        # kernels.token_logps also turns autocast off, which PyTorch has not for "meta".
        head = kernels.Head.from_model(causal_lm)
        logps, _ = kernels._TokenLogps.apply(hidden[counted], counted, 1.0, head, False)
        logps.sum().backward()
    return Cost(flops.get_total_flops(), moved.total)


def _without_storage(folder: Path, layers: int) -> Any:
    """The first layers of the policy."""
    base = ModelFiles(folder)
    base.config.num_hidden_layers = layers
    with torch.device("meta"):
        model = base.auto_class.from_config(
            base.config, dtype=torch.bfloat16, attn_implementation=attention.ATTENTION
        )
    return with_adapter(model, RANK, RANK, low_cpu_mem_usage=True)


class _FusedNorm(torch.autograd.Function):
    """The bytes of PyTorch's kernel on CUDA: the hidden states read and written, and on the way
    back read with the gradient. On other devices PyTorch computes norms in many operations.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return hidden.neg()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (hidden,) = ctx.saved_tensors
        return gradient + hidden


def step_cost(
    folder: Path, *, flash: bool, recomputed: bool, work: Work = WORK, groups: int = GROUPS
) -> Cost:
    """A whole step: layers are alike, so that two sizes tell what one adds."""
    layers = ModelFiles(folder).config.num_hidden_layers
    few = pass_cost(folder, 1, flash=flash, recomputed=recomputed, work=work)
    more = pass_cost(folder, 2, flash=flash, recomputed=recomputed, work=work)
    one = more.plus(few, -1)
    packs = groups * math.ceil(work.group_size / work.rows)
    return Cost().plus(few.plus(one, layers - 1), packs)


def main() -> None:
    lines = ["| model | before | after | of it matrix products |", "|---|---|---|---|"]
    for name in ("0.6B", "1.7B", "8B"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            config_of(name).save_pretrained(folder)
            before = step_cost(folder, flash=False, recomputed=False)
            after = step_cost(folder, flash=True, recomputed=False)
        lines.append(
            f"| {name} | {before.seconds:.1f} s | {after.seconds:.1f} s "
            f"| {after.flops / FLOPS:.1f} s |"
        )
        sys.stdout.write("\n".join(lines) + "\n")
        lines = []


if __name__ == "__main__":
    main()
