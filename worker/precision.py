"""The precision in which this machine computes a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from flash_mcp.protocol.errors import FlashError
from worker.model_files import ModelFiles

COPIES = 2
"""The trainer and the engine each hold the weights on a CPU."""
WHOLE_SHARE = 0.5
"""The share of the memory that fp32 weights may take where bf16 would do."""
RUN_ROWS = (32, 128)
"""Rows of the products in a run: of a decoding engine, and of a pack that is trained."""
SERVED_ROWS = (1, 8)
"""Those of a model server, which decodes few conversations at once."""
PROBE_WIDTH = 1536
PROBE_REPEATS = 4
MARGIN = 1.15
"""fp32 is chosen only if it is so many times as fast as bf16: its weights take twice the memory."""
STATEFUL = "on a CPU, vLLM computes layers with a state in bf16 only"


class Chosen(NamedTuple):
    dtype: torch.dtype
    why: str


def precision_of(
    base: ModelFiles, capacity: int, name: str | None = None, *, served: bool = False
) -> Chosen:
    """The precision of this `name`. Without one it is fp32 if the model's own files are fp32, as
    those of tests are, or if this CPU has room for it in `capacity` bytes of memory and computes
    the products of a run, or of a server, clearly faster in it; else bf16.

    FlashError(device_unsupported | out_of_memory) if this machine cannot compute the model so."""
    on_gpu = torch.cuda.is_available()
    is_whole = base.config.dtype == torch.float32
    needed = COPIES * 2 * base.weights_bytes  # in fp32, where the files are in bf16
    if name:
        chosen = Chosen(getattr(torch, name), "as it was asked for, or chosen before")
    elif base.has_state and not on_gpu:
        chosen = Chosen(torch.bfloat16, STATEFUL)
    elif is_whole:
        chosen = Chosen(torch.float32, "the model's files are in fp32")
    elif on_gpu:
        chosen = Chosen(torch.bfloat16, "on a GPU")
    elif needed > WHOLE_SHARE * capacity:
        what = "fp32 weights would take more than half of the memory"
        chosen = Chosen(torch.bfloat16, what)
    elif not has_bf16_products():
        chosen = Chosen(torch.float32, "this CPU has no fast products in bf16")
    else:
        ratio = bf16_over_fp32(min(PROBE_WIDTH, base.text.hidden_size), served)
        measured = f"products in bf16 take {ratio:.2g} times those in fp32 on this CPU"
        chosen = Chosen(torch.float32 if ratio > MARGIN else torch.bfloat16, measured)
    fix = "use precision='bfloat16'"
    if on_gpu:
        supports_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if chosen.dtype == torch.bfloat16 and not supports_bf16:
            # fp16 would overflow where models were trained in bf16; there is no loss scaling.
            what = "the GPU has no bfloat16, in which models are trained"
            fix = "use a card of compute capability 8.0 or more (A10, A100, RTX 30 and newer), or "
            fix += "train on the CPU"
            raise FlashError("device_unsupported", what, gpu=torch.cuda.get_device_name(), fix=fix)
    elif chosen.dtype == torch.float32 and base.has_state:
        raise FlashError("device_unsupported", STATEFUL, precision="float32", fix=fix)
    elif chosen.dtype == torch.float32 and not is_whole and needed > capacity:
        what = f"{COPIES} copies of the weights in fp32 do not fit"
        raise FlashError(
            "out_of_memory", what, needed_bytes=needed, available_bytes=capacity, fix=fix
        )
    return chosen


@cache
def bf16_over_fp32(width: int, served: bool) -> float:
    """How many times as long as in fp32 products in bf16 take: the geometric mean over numbers of
    rows, with `width` numbers each. Those of a run go forward and backward; those of a server are
    its engine's. Measured in some 50 ms: the instructions of a CPU do not tell. Those for dot
    products in bf16 are slower than fp32 on some processors without AMX and four times as fast on
    others.
    """
    rows = SERVED_ROWS if served else RUN_ROWS
    kinds = (torch.bfloat16, torch.float32)
    best = {(count, kind): math.inf for count in rows for kind in kinds}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on a busy machine
    try:
        for count, kind in best:
            weight = torch.ones(PROBE_WIDTH, width, dtype=kind)
            inputs = torch.ones(count, width, dtype=kind)
            product = packed(weight, count) if served else partial(there_and_back, weight)
            for _ in range(PROBE_REPEATS):
                started = time.thread_time()  # a clock would count what other programs do
                product(inputs)
                best[count, kind] = min(best[count, kind], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    ratios = [best[count, torch.bfloat16] / best[count, torch.float32] for count in rows]
    return math.prod(ratios) ** (1 / len(ratios))


def there_and_back(weight: Tensor, inputs: Tensor) -> Tensor:
    """A product as in the forward pass, and one as in the backward pass."""
    return linear(inputs, weight) @ weight


def packed(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """`linear` with this weight as vLLM's engine computes it on a CPU: in oneDNN's own order.
    Without it few rows may take as long in bf16 as in fp32."""
    onednn: Any = torch.ops.mkldnn
    ordered = onednn._reorder_linear_weight(weight, rows)
    return lambda inputs: onednn._linear_pointwise(inputs, ordered, None, "none", [], "")


def name_of(dtype: torch.dtype) -> str:
    """Such as "float32", as vLLM and JSON take it."""
    return str(dtype).removeprefix("torch.")


def has_bf16_products() -> bool:
    """Whether PyTorch has kernels for products in bf16 on this CPU. Without AVX-512 it adds them up
    one by one: 15 instead of 74 to 118 GFLOP/s in fp32, for 32 and 512 rows on 2 cores with AVX2.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
