"""The policy: a base model with a LoRA adapter, and how it gets into the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import check_adapter
from worker.training import packing
from worker.training.kernels import LoraLinear

ADAPTER = "default"


def load_policy(
    model_path: Path,
    *,
    rank: int,
    alpha: int,
    seed: int,
    dtype: torch.dtype,
    adapter_path: Path | None = None,
) -> PeftModel:
    """The base model with a fresh adapter on every linear layer, or a warm start from a PEFT
    adapter.

    The base keeps `dtype`; the adapter's weights are fp32. Raises FlashError(adapter_mismatch).
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = packing.attention_of(AutoConfig.from_pretrained(model_path))
    base: Any = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=dtype, attn_implementation=attention
    )
    torch.manual_seed(seed)
    model = get_peft_model(base.to(device), lora_config(rank, alpha))
    if adapter_path is not None:
        _warm_start(model, adapter_path, rank, alpha)
    return model


def lora_config(rank: int, alpha: int) -> LoraConfig:
    """An adapter on every linear layer but the head, computed by
    worker.training.kernels.LoraLinear.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({torch.nn.Linear: LoraLinear})  # pyright: ignore[reportPrivateUsage]
    return config


def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of W + scale·BA for every adapted layer, and of its bias, named as in the base
    checkpoint.

    Made anew from the untouched base weights each time: merging in place would drift them in bf16.
    What no adapter changes, embeddings and norms, is what the engine has already."""
    base: Any = model.base_model.model
    adapted: list[tuple[str, Any]] = [
        each for each in base.named_modules() if isinstance(each[1], LoraLayer)
    ]
    with torch.no_grad():
        for name, layer in adapted:
            weight, bias = layer.base_layer.weight, layer.base_layer.bias  # (out, in), (out,)
            a, b = (
                layer.lora_A[ADAPTER].weight,
                layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER],
            )
            yield (
                f"{name}.weight",
                torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype)),
            )  # rounded once
            if bias is not None:
                yield f"{name}.bias", bias.data


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter that is trained, and no other, as PEFT does: adapter_config.json and its
    weights in fp32.
    """
    model.save_pretrained(str(folder), selected_adapters=[ADAPTER], save_embedding_layers=False)


def _warm_start(model: PeftModel, adapter_path: Path, rank: int, alpha: int) -> None:
    check_adapter(
        json.loads((adapter_path / "adapter_config.json").read_text()), rank=rank, alpha=alpha
    )
    weights = load_file(adapter_path / "adapter_model.safetensors")
    try:
        outcome: Any = set_peft_model_state_dict(model, weights)
    except RuntimeError as error:  # layers of these names, but of other sizes
        raise _of_another_model(reason=str(error).strip().splitlines()[-1].strip()) from error
    missing = [name for name in outcome.missing_keys if "lora_" in name]
    if outcome.unexpected_keys:
        raise _of_another_model(unexpected=len(outcome.unexpected_keys), missing=len(missing))
    if missing:
        raise FlashError(
            "adapter_mismatch",
            "the adapter's target_modules (exclude_modules, layers_to_transform) leave linear layers out",
            missing=len(missing),
            first=missing[0],
            fix="merge it into its base model and train that, or start from an adapter of every linear layer",
        )


def _of_another_model(**values: Any) -> FlashError:
    what = "the adapter to start from was made for another base model"
    return FlashError(
        "adapter_mismatch", what, fix="start from an adapter of the same base model", **values
    )
