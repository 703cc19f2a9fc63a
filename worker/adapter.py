"""A policy in the forms that engines, exports and checkpoints take."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors import torch as safetensors
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from worker.model_files import ModelFiles, decoder_prefix

ADAPTER = "default"


def merged_weights(model: PeftModel, prefix: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of W + scale·BA for every adapted layer, and of its bias, named as in the
    files of a base model whose decoder has this prefix, else as in `model`.

    They are computed from the unchanged base weights each time: merging in place would make them
    drift in bf16. The engine has the rest, embeddings and norms, already.

    Axes: E experts, O outputs, I inputs, R rank."""
    base = cast(Any, model).base_model.model
    own = decoder_prefix(name for name, _ in base.named_modules())
    with torch.no_grad():
        for name, module in base.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            layer = cast(Any, module)
            if isinstance(module, ParamWrapper):
                weights = _merged_experts(name, layer)
                if prefix is not None:
                    weights = named_in_files(base, weights, prefix)
                yield from weights.items()
                continue
            if prefix is not None:
                name = prefix + name.removeprefix(own)
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


def _merged_experts(name: str, layer: Any) -> dict[str, Tensor]:
    """`merged_weights` of the one parameter, of all experts, that PEFT's wrapper `name` adapts.
    Some models have it as EIO."""
    name = f"{name.replace('.base_layer', '')}.{layer.parameter_name}"  # wrappers may be nested
    left_EOR, right_ERI, scale = layer.get_delta_factors(ADAPTER)
    weights = {name: torch.baddbmm(layer.get_param(), left_EOR, right_ERI, alpha=scale)}
    bias = getattr(layer.get_base_layer(), f"{layer.parameter_name}_bias", None)
    if bias is not None:
        weights[f"{name}_bias"] = bias.data
    return weights


def named_in_files(model: Any, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Weights of transformers' `model` as the files of its base model have them: those of experts
    one by one, where transformers stacks them."""
    reverted: dict[str, Tensor] = cast(Any, revert_weight_conversion)(model, dict(weights))
    own = decoder_prefix(reverted)
    return {prefix + name.removeprefix(own): weight for name, weight in reverted.items()}


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the trained adapter alone, in PEFT's format: adapter_config.json and fp32 weights."""
    model.save_pretrained(str(folder), selected_adapters=[ADAPTER], save_embedding_layers=False)


# -- an adapter's folder, changed for the engine that is to load it --------------------------------

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Splits = Mapping[str, Sequence[str]]
SPLIT_LAYERS: Mapping[str, Splits] = {"glm4": {"gate_up_proj": ("gate_proj", "up_proj")}}
"""Layers that an adapter has whole, and vLLM's loader wants in parts, by model type."""


def named_as(base: ModelFiles, adapter: Path, copy: Path) -> Path:
    """The adapter in `adapter` with layers named as in the base model's files, and those of
    SPLIT_LAYERS in equal parts: the same folder, or `copy`."""
    splits = SPLIT_LAYERS.get(base.config.model_type, {})
    weights = cast(Any, safetensors).load_file(adapter / WEIGHTS)
    start = "base_model.model."
    own = decoder_prefix(name.removeprefix(start) for name in weights)
    if own == base.prefix and not splits:
        return adapter
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = start + base.prefix + name.removeprefix(start + own)
        renamed |= _split(name, weight, splits)
    copy.mkdir(parents=True, exist_ok=True)
    cast(Any, safetensors).save_file(renamed, copy / WEIGHTS)
    shutil.copyfile(adapter / CONFIG, copy / CONFIG)
    return copy


def _split(name: str, weight: Tensor, splits: Splits) -> Iterator[tuple[str, Tensor]]:
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
