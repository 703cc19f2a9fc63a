"""An adapter's folder, changed for the engine that is to load it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors
from torch import Tensor

from worker.model_files import decoder_prefix

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Splits = Mapping[str, Sequence[str]]
SPLIT_LAYERS: Mapping[str, Splits] = {"glm4": {"gate_up_proj": ("gate_proj", "up_proj")}}
"""Layers that an adapter has whole, and vLLM's loader wants in parts, by model type."""


def named_as(prefix: str, adapter: Path, copy: Path, model_type: str) -> Path:
    """The adapter in `adapter` with layers named as in a base model of that type whose decoder has
    this prefix, and those of SPLIT_LAYERS in equal parts: the same folder, or `copy`."""
    splits = SPLIT_LAYERS.get(model_type, {})
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
