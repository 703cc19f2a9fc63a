"""The precision in which this machine computes a model."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from flash_mcp.protocol.errors import FlashError
from worker.capacity import capacity_bytes
from worker.model_files import has_state, weights_bytes

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


class Chosen(NamedTuple):
    dtype: torch.dtype
    why: str


def precision_of(config: Any, model_path: Path, rows: tuple[int, ...] = RUN_ROWS) -> Chosen:
    """fp32 if the model's own files are fp32, as those of tests are, or if this CPU has room for it
    and computes products of so many `rows` clearly faster in it; else bf16.
    """
    is_whole = config.dtype == torch.float32
    if torch.cuda.is_available():
        return Chosen(torch.float32, OWN) if is_whole else Chosen(torch.bfloat16, "on a GPU")
    if has_state(config):
        return Chosen(torch.bfloat16, STATEFUL)
    if is_whole:
        return Chosen(torch.float32, OWN)
    if COPIES * _whole_bytes(model_path) > WHOLE_SHARE * capacity_bytes():
        return Chosen(torch.bfloat16, "fp32 weights would take more than half of the memory")
    if not has_bf16_products():
        return Chosen(torch.float32, "this CPU has no fast products in bf16")
    ratio = bf16_over_fp32(min(PROBE_WIDTH, config.get_text_config().hidden_size), rows)
    measured = f"products in bf16 take {ratio:.2g} times those in fp32 on this CPU"
    return Chosen(torch.float32 if ratio > MARGIN else torch.bfloat16, measured)


OWN = "the model's files are in fp32"
STATEFUL = "on a CPU, vLLM computes layers with a state in bf16 only"


@cache
def bf16_over_fp32(width: int, rows: tuple[int, ...]) -> float:
    """How many times as long as in fp32 products in bf16 take: the geometric mean over `rows`, with
    `width` numbers each, forward and backward. Measured in some 50 ms: the instructions of a CPU do
    not tell. Those for dot products in bf16 are slower than fp32 on some processors without AMX and
    four times as fast on others.
    """
    kinds = (torch.bfloat16, torch.float32)
    best = {(count, kind): math.inf for count in rows for kind in kinds}
    weights = {kind: torch.ones(PROBE_WIDTH, width, dtype=kind) for kind in kinds}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on a busy machine
    try:
        for _ in range(PROBE_REPEATS):
            for count, kind in best:
                inputs = torch.ones(count, width, dtype=kind)
                started = time.thread_time()  # a clock would count what other programs do
                outputs = linear(inputs, weights[kind])
                _ = outputs @ weights[kind]  # as in the backward pass
                best[count, kind] = min(best[count, kind], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    ratios = [best[count, torch.bfloat16] / best[count, torch.float32] for count in rows]
    return math.prod(ratios) ** (1 / len(ratios))


def name_of(dtype: torch.dtype) -> str:
    """Such as "float32", as vLLM and JSON take it."""
    return str(dtype).removeprefix("torch.")


def has_bf16_products() -> bool:
    """Whether PyTorch has kernels for products in bf16 on this CPU. Without AVX-512 it adds them up
    one by one: 15 instead of 74 to 118 GFLOP/s in fp32, for 32 and 512 rows on 2 cores with AVX2.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _whole_bytes(model_path: Path) -> int:
    """Of the weights of a model with bf16 files, in fp32."""
    return 2 * weights_bytes(model_path)


def check_precision(dtype: torch.dtype, config: Any, model_path: Path) -> None:
    """FlashError unless this machine can compute the model in `dtype`, whoever chose it."""
    if not torch.cuda.is_available():
        _check_on_cpu(dtype, config, model_path)
    elif dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        # fp16 would overflow where models were trained in bf16; loss scaling is not implemented.
        raise FlashError(
            "device_unsupported",
            "the GPU has no bfloat16, in which models are trained",
            gpu=torch.cuda.get_device_name(),
            fix="use a card of compute capability 8.0 or more (A10, A100, RTX 30 and newer), or "
            "train on the CPU",
        )


def _check_on_cpu(dtype: torch.dtype, config: Any, model_path: Path) -> None:
    fix = "use precision='bfloat16'"
    if dtype != torch.float32:
        return
    if has_state(config):
        raise FlashError("device_unsupported", STATEFUL, precision="float32", fix=fix)
    needed = COPIES * _whole_bytes(model_path)
    if config.dtype != torch.float32 and needed > (capacity := capacity_bytes()):
        what = f"{COPIES} copies of the weights in fp32 do not fit"
        raise FlashError(
            "out_of_memory", what, needed_bytes=needed, available_bytes=capacity, fix=fix
        )
