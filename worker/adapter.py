"""A policy in the forms that engines, exports and checkpoints take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

ADAPTER = "default"


def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of W + scale·BA for every adapted layer, and of its bias, with the names of
    the base checkpoint.

    They are computed from the unchanged base weights each time: merging in place would make them
    drift in bf16. The engine has the rest, embeddings and norms, already.

    Axes: O outputs, I inputs, R rank."""
    base = cast(Any, model).base_model.model
    with torch.no_grad():
        for name, module in base.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            layer = cast(Any, module)
            linear = layer.base_layer
            if not linear.weight.is_floating_point():
                raise ValueError("an adapter cannot be merged into 4-bit weights")
            a_RI: Tensor = layer.lora_A[ADAPTER].weight
            b_OR: Tensor = layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER]
            dtype = linear.weight.dtype
            # One product and sum, so that the result is rounded once.
            yield f"{name}.weight", torch.addmm(linear.weight, b_OR.to(dtype), a_RI.to(dtype))
            if linear.bias is not None:
                yield f"{name}.bias", linear.bias.data


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the trained adapter, and no other, in PEFT's format: adapter_config.json and fp32
    weights.
    """
    model.save_pretrained(str(folder), selected_adapters=[ADAPTER], save_embedding_layers=False)
