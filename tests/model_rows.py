"""A tiny random model of each architecture that docs/models.md has a row for.

What they write is printable, as that of tests/tiny.py: the head's rows say so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.tiny import make_tokenizer

CONTEXT = 1024
WINDOW = 32
COMMON = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
MULTIMODAL_ROPE = {
    "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_key_value_heads": 2,
    "head_dim": 64, "topk_method": "noaux_tc", "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}


def sliding(layers: int) -> dict[str, Any]:
    """Fields for so many layers with a window, and then one without."""
    kinds = ["sliding_attention"] * layers + ["full_attention"]
    return {"sliding_window": WINDOW, "num_hidden_layers": len(kinds), "layer_types": kinds}


SLIDING = sliding(1)
GEMMA4 = {
    **SLIDING, "global_head_dim": 64, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260,
}  # fmt: skip


def _text(**fields: Any) -> dict[str, Any]:
    return {**COMMON, **fields}


def _wrapped(model_type: str, tower: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "text_config": {"model_type": model_type, **_text(**fields)},
        "vision_config": tower,
        "tie_word_embeddings": False,
    }


_QWEN_IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _text()),
    "qwen2": ("qwen2", _text()),
    "qwen3": ("qwen3", _text()),
    "mistral": ("mistral", _text(sliding_window=None)),
    "ministral3": ("ministral3", _text(sliding_window=None)),
    "phi3": ("phi3", _text(pad_token_id=3)),
    "glm4": ("glm4", _text(partial_rotary_factor=0.5, pad_token_id=3)),
    "smollm3": ("smollm3", _text(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], pad_token_id=3)),
    "olmo3": ("olmo3", _text(**sliding(3))),
    "granite": ("granite", _text(logits_scaling=4.0, residual_multiplier=0.5)),
    "gemma2": ("gemma2", _text(**SLIDING, query_pre_attn_scalar=32, tie_word_embeddings=True)),
    "gemma3_text": ("gemma3_text", _text(**sliding(5), query_pre_attn_scalar=32)),
    "gemma3": ("gemma3", {**_wrapped("gemma3_text", SIGLIP, **sliding(5), query_pre_attn_scalar=32),
        "mm_tokens_per_image": 4, "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252}),
    "gemma4_text": ("gemma4_text", _text(**GEMMA4)),
    "gemma4": ("gemma4", {"text_config": {"model_type": "gemma4_text", **_text(**GEMMA4)},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        },
        "audio_config": None, "image_token_id": 250, "boi_token_id": 251, "eoi_token_id": 252,
        "audio_token_id": 253, "video_token_id": 254}),
    "gpt_oss": ("gpt_oss", _text(**SLIDING, num_local_experts=4, num_experts_per_tok=2, pad_token_id=3)),
    "qwen3_5_text": ("qwen3_5_text", _text(**LINEAR, rope_parameters=MULTIMODAL_ROPE)),
    "qwen3_5": (
        "qwen3_5", {**_wrapped("qwen3_5_text", QWEN_TOWER, **LINEAR, rope_parameters=MULTIMODAL_ROPE), **_QWEN_IDS}),
    "qwen3_5_moe": ("qwen3_5_moe", {**_wrapped("qwen3_5_moe_text", QWEN_TOWER, **LINEAR, **EXPERTS,
        shared_expert_intermediate_size=32, rope_parameters=MULTIMODAL_ROPE), **_QWEN_IDS}),
    "qwen3_moe": ("qwen3_moe", _text(**EXPERTS, norm_topk_prob=True)),
    "qwen3_next": ("qwen3_next", _text(**LINEAR, **EXPERTS, shared_expert_intermediate_size=32)),
    "deepseek_v3": ("deepseek_v3", _text(**LATENT)),
    "glm4_moe_lite": ("glm4_moe_lite", _text(**LATENT)),
    "granitemoehybrid": ("granitemoehybrid", _text(**MAMBA, layer_types=["mamba", "attention"], num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=128, pad_token_id=3)),
    "lfm2": ("lfm2", _text(layer_types=["conv", "full_attention"], conv_L_cache=3, conv_dim=64, conv_dim_out=64,
        block_dim=64, block_ff_dim=128, block_auto_adjust_ff_dim=False)),
    "nemotron_h": ("nemotron_h", _text(hybrid_override_pattern="M-*-", num_hidden_layers=4, mamba_num_heads=4,
        mamba_head_dim=32, ssm_state_size=16, n_groups=1, chunk_size=16)),
    "qwen3_vl": ("qwen3_vl", {**_wrapped("qwen3_vl_text", {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        rope_parameters={**MULTIMODAL_ROPE, "mrope_section": [8, 4, 4], "partial_rotary_factor": 1.0}), **_QWEN_IDS}),
    "mistral3": ("mistral3", {**_wrapped("ministral3", {**SIGLIP, "model_type": "pixtral", "head_dim": 16},
        sliding_window=None), "image_token_index": 250}),
}  # fmt: skip
"""Name of the row -> (model_type, fields of its config)."""
WITH_SENTENCEPIECE = ("phi3", "gemma2")
"""Their hub folders have a tokenizer.model, and llama.cpp's converter asks for it."""


def make_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write the tiny model of this row, with tokenizer and chat template."""
    model_type, fields = ARCHITECTURES[name]
    tokenizer = make_tokenizer(CONTEXT)
    config = AutoConfig.for_model(model_type, **fields)
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    for part in {id(config): config, id(text): text}.values():
        part.bos_token_id = tokenizer.bos_token_id
        part.eos_token_id = tokenizer.eos_token_id
        part.pad_token_id = tokenizer.pad_token_id
    model = _class_of(config)(config, dtype=dtype)
    printable = [tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127)]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _randomize(model, printable)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name in WITH_SENTENCEPIECE:
        (folder / "tokenizer.model").write_bytes(_sentencepiece(len(tokenizer)))
    return folder


def _sentencepiece(size: int) -> bytes:
    """A tokenizer of bytes in SentencePiece's form. Only the converter to GGUF reads it."""
    model = sentencepiece_model_pb2.ModelProto()
    kinds = model.SentencePiece
    pieces = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    pieces += [(f"▁{place}", kinds.NORMAL) for place in range(size - len(pieces))]
    for text, kind in pieces:
        model.pieces.add(piece=text, type=kind, score=0.0)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    return model.SerializeToString()


def _class_of(config: Any) -> Callable[..., Any]:
    """What makes the model as the hub has it: the wrapper, where there is one."""
    kinds = AutoModelForImageTextToText._model_mapping
    if type(config) in kinds:
        return AutoModelForImageTextToText.from_config
    return AutoModelForCausalLM.from_config


def _randomize(model: Any, printable: list[int]) -> None:
    """Weights as spread as those of a trained model, so that layers matter and tokens differ."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                spread = 1.0 if "embed_tokens" in name else 0.8 * parameter.size(-1) ** -0.5
                parameter.normal_(0.0, spread)
            elif "sink" in name or name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
        head = model.get_output_embeddings().weight
        head.normal_(0.0, 1.5 * head.size(-1) ** -0.5)
        others = torch.ones(head.size(0), dtype=torch.bool)
        others[printable] = False
        head[others] *= 0.05  # greedily never chosen
