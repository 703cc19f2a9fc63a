"""The precision in which this machine computes a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flash_mcp.protocol.errors import FlashError
from worker.capacity import capacity_bytes
from worker.model_files import has_state, weights_bytes

COPIES = 2
"""The trainer and the engine each hold the weights on a CPU."""
WHOLE_SHARE = 0.5
"""The share of the memory that fp32 weights may take where bf16 would do."""


def precision_of(config: Any, model_path: Path) -> torch.dtype:
    """fp32 if the model's own files are fp32 on purpose, as the tiny models of tests are, or if the
    CPU has no products in bf16 and has room for fp32; else bf16. On a CPU, vLLM computes layers
    with a state in bf16 only.
    """
    is_whole = config.dtype == torch.float32
    if torch.cuda.is_available():
        return torch.float32 if is_whole else torch.bfloat16
    if has_state(config):
        return torch.bfloat16
    if is_whole or (not has_bf16_products() and _fits_whole(model_path)):
        return torch.float32
    return torch.bfloat16


def name_of(dtype: torch.dtype) -> str:
    """Such as "float32", as vLLM and JSON take it."""
    return str(dtype).removeprefix("torch.")


def has_bf16_products() -> bool:
    """Whether PyTorch has kernels for products in bf16 on this CPU. Without AVX-512 it adds them up
    one by one: 15 instead of 74 to 118 GFLOP/s in fp32, for 32 and 512 rows on 2 cores with AVX2.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _fits_whole(model_path: Path) -> bool:
    whole = 2 * weights_bytes(model_path)
    return COPIES * whole <= WHOLE_SHARE * capacity_bytes()


def check_precision(dtype: torch.dtype) -> None:
    """FlashError(device_unsupported) if the GPU has no bfloat16: fp16 would overflow where models
    were trained in bf16, and loss scaling is not implemented.
    """
    if dtype != torch.bfloat16 or not torch.cuda.is_available():
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise FlashError(
            "device_unsupported",
            "the GPU has no bfloat16, in which models are trained",
            gpu=torch.cuda.get_device_name(),
            fix="use a card of compute capability 8.0 or more (A10, A100, RTX 30 and newer), or "
            "train on the CPU",
        )
