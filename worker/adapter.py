"""A policy in the forms that engines, exports and checkpoints take."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import transformers_weight_conversion as conversion_module
from safetensors import torch as safetensors
from torch import Tensor

from worker.model_files import decoder_prefix

conversion = cast(Any, conversion_module)

ADAPTER = "default"
NO_SPLITS: Mapping[str, Sequence[str]] = {}
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def merged_weights(model: PeftModel, prefix: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of W + scale·BA for every adapted layer, and of its bias, named as in a base
    model whose decoder has this prefix, else as in `model`.

    They are computed from the unchanged base weights each time: merging in place would make them
    drift in bf16. The engine has the rest, embeddings and norms, already.

    Axes: O outputs, I inputs, R rank."""
    base = cast(Any, model).base_model.model
    own = decoder_prefix(name for name, _ in base.named_modules())
    with torch.no_grad():
        for name, module in base.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            if prefix is not None:
                name = prefix + name.removeprefix(own)
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


@contextmanager
def names_as_they_are() -> Generator[None]:
    """PEFT takes an adapter's layers literally within it. Otherwise it reads `gate_proj` and its
    like of a mixture of experts as names from before transformers 5, of experts that it would adapt
    in place of dense and shared layers, together with their router."""
    own = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = _convert_nothing
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = own


def _convert_nothing(*_: Any, **__: Any) -> None: ...


def named_as(
    prefix: str, adapter: Path, copy: Path, splits: Mapping[str, Sequence[str]] = NO_SPLITS
) -> Path:
    """The adapter in `adapter` with layers named as in a base model whose decoder has this prefix,
    and with each layer that `splits` names as those equal parts: the same folder, or `copy`."""
    weights = cast(Any, safetensors).load_file(adapter / WEIGHTS)
    start = "base_model.model."
    own = decoder_prefix(name.removeprefix(start) for name in weights)
    if own == prefix and not splits:
        return adapter
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = start + prefix + name.removeprefix(start + own)
        renamed |= _split(name, weight, splits)
    copy.mkdir(parents=True, exist_ok=True)
    cast(Any, safetensors).save_file(renamed, copy / WEIGHTS)
    shutil.copyfile(adapter / CONFIG, copy / CONFIG)
    return copy


def _split(
    name: str, weight: Tensor, splits: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of each part of a layer's adapter: A is common to all."""
    for whole, parts in splits.items():
        if f".{whole}." not in name:
            continue
        is_b = ".lora_B." in name
        weights = weight.chunk(len(parts)) if is_b else [weight] * len(parts)
        for part, its_weight in zip(parts, weights, strict=True):
            yield name.replace(f".{whole}.", f".{part}."), its_weight.clone()
        return
    yield name, weight


def with_noise(adapter: Path, copy: Path) -> Path:
    """`copy`: the adapter in `adapter` with random numbers in place of what it learned, so that any
    engine that loads its layers answers otherwise."""
    weights: dict[str, Tensor] = cast(Any, safetensors).load_file(adapter / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if ".lora_B." in name:
            weights[name] = torch.randn(weight.shape, generator=generator).to(weight.dtype)
    cast(Any, safetensors).save_file(weights, copy / WEIGHTS)
    shutil.copyfile(adapter / CONFIG, copy / CONFIG)
    return copy


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the trained adapter, and no other, in PEFT's format: adapter_config.json and fp32
    weights.
    """
    model.save_pretrained(str(folder), selected_adapters=[ADAPTER], save_embedding_layers=False)
