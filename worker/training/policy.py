"""The policy: a base model with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import save_and_load, transformers_weight_conversion
from safetensors import torch as safetensors
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BitsAndBytesConfig

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.spec import check_adapter
from worker.model_files import ModelFiles
from worker.training.attention import ATTENTION
from worker.training.kernels import LoraLinear, fuse_norms

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Layers that choose experts. Trained, they would change what each expert sees."""
FUSED_MAMBA = ("falcon_h1", "nemotron_h")


def load_policy(
    base: ModelFiles,
    *,
    rank: int,
    alpha: int,
    seed: int,
    dtype: torch.dtype,
    adapter_path: Path | None = None,
    experts: bool = False,
    four_bit: bool = False,
    device: str | None = None,
) -> PeftModel:
    """The base model with a fresh adapter on every linear layer, or a warm start from a PEFT
    adapter; with `experts`, also on those of a mixture.

    The base keeps `dtype`, or has its linear layers in NF4 if `four_bit`; the adapter's weights are
    fp32. It is on the card, unless `device` says otherwise. Raises FlashError(adapter_mismatch |
    engine_missing).
    """
    has_card = torch.cuda.is_available()
    device = device or ("cuda" if has_card else "cpu")
    quantized = _nf4(dtype, device) if four_bit else {}
    causal_lm = base.auto_class.from_pretrained(
        base.path, dtype=dtype, attn_implementation=attention_of(base.config), **quantized
    )
    # cuDNN's attention builds a plan for each length, and hardly two batches have the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    cast(Any, torch).manual_seed(seed)
    if has_card:  # the CPU gains nothing
        fuse_norms(causal_lm)
    if not four_bit:  # those are there already
        causal_lm = causal_lm.to(device)
    model = with_adapter(causal_lm, rank, alpha, experts=experts)
    if adapter_path is not None:
        config = read_adapter_config(adapter_path)
        check_adapter(config, rank=rank, alpha=alpha, experts=experts)
        _warm_start(model, adapter_path)
    return model


def without_storage(base: ModelFiles, dtype: torch.dtype, rank: int, *, experts: bool) -> Any:
    """The policy on the meta device."""
    config = base.config
    with torch.device("meta"):
        attention = attention_of(config)
        model = base.auto_class.from_config(config, dtype=dtype, attn_implementation=attention)
    return with_adapter(model, rank, rank, experts=experts, low_cpu_mem_usage=True)


def attention_of(config: Any) -> str | None:
    """The attention to load a model with: that of worker.training.attention, or None, its own, if
    its layers look up none (Falcon)."""
    kind = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING).get(type(config), None)
    return ATTENTION if getattr(kind, "_supports_attention_backend", False) else None


def _nf4(dtype: torch.dtype, device: str) -> Json:
    """Arguments of from_pretrained. vLLM 0.31 has no such format: its weights stay whole."""
    if find_spec("bitsandbytes") is None:
        fix = "uv pip install bitsandbytes (the extra nf4), or base_precision=full"
        what = "base_precision=nf4 needs bitsandbytes, which is not installed"
        raise FlashError("engine_missing", what, fix=fix)
    config = cast(Any, BitsAndBytesConfig)(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def with_adapter(
    base: Any, rank: int, alpha: int, *, experts: bool = False, **options: Any
) -> PeftModel:
    """`base` with a fresh adapter on the linear layers of its text decoder, computed by
    worker.training.kernels.LoraLinear, and with `experts` on each expert, by PEFT. The head and
    routers have none. FlashError(invalid_argument) for experts of a model without.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=adapted_layers(base),
        target_parameters=adapted_experts(base) if experts else None,
        task_type="CAUSAL_LM",
    )
    cast(Any, config)._register_custom_module({torch.nn.Linear: LoraLinear})
    with names_as_they_are():
        return cast(Any, get_peft_model)(base, config, **options)


def _convert_nothing(*_: Any, **__: Any) -> None: ...


@contextmanager
def names_as_they_are() -> Generator[None]:
    """PEFT takes an adapter's layers literally within it. Otherwise it reads `gate_proj` and its
    like of a mixture of experts as names from before transformers 5, of experts that it would adapt
    in place of dense and shared layers, together with their router."""
    conversion = cast(Any, transformers_weight_conversion)
    own = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = _convert_nothing
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = own


def adapted_layers(base: Any) -> list[str]:
    decoder = base.get_decoder()
    head = base.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    # PEFT refuses these two of a Mamba layer: the fused kernel reads their weights itself.
    fused = base.config.get_text_config().model_type in FUSED_MAMBA
    names: list[str] = []
    for name, module in base.named_modules():
        if not isinstance(module, torch.nn.Linear) or id(module) not in inside or module is head:
            continue
        leaf = name.rpartition(".")[2]
        if leaf not in ROUTERS and not (fused and leaf == "out_proj"):
            names.append(name)
    return names


def adapted_experts(base: Any) -> list[str]:
    """Parameters that hold a matrix for each expert."""
    names = [
        name
        for name, parameter in base.get_decoder().named_parameters()
        if parameter.dim() == 3 and ".experts." in name
    ]
    if not names:
        fix = "leave experts out"
        what = "experts=true, but the model is no mixture of experts that transformers stacks"
        raise FlashError("invalid_argument", what, model_type=base.config.model_type, fix=fix)
    return names


def _warm_start(model: PeftModel, adapter_path: Path) -> None:
    weights = cast(Any, safetensors).load_file(adapter_path / "adapter_model.safetensors")
    try:
        outcome = cast(Any, save_and_load).set_peft_model_state_dict(model, weights)
    except RuntimeError as error:  # layers of these names, but of other sizes
        raise _of_another_model(reason=str(error).strip().splitlines()[-1].strip()) from error
    missing: list[str] = [name for name in outcome.missing_keys if "lora_" in name]
    if outcome.unexpected_keys:
        raise _of_another_model(unexpected=len(outcome.unexpected_keys), missing=len(missing))
    if missing:
        raise FlashError(
            "adapter_mismatch",
            "the adapter's target_modules (exclude_modules, layers_to_transform) leave linear "
            "layers out",
            missing=len(missing),
            first=missing[0],
            fix="merge it into its base model and train that, or start from an adapter of every "
            "linear layer",
        )


def _of_another_model(**values: Any) -> FlashError:
    what = "the adapter to start from was made for another base model"
    return FlashError(
        "adapter_mismatch", what, fix="start from an adapter of the same base model", **values
    )
