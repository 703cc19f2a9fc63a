"""Tiny random models of the architectures that people train, as configs of transformers."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from worker.training.policy import attention_of

BASE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "mamba_expand": 2, "num_local_experts": 0, "shared_intermediate_size": 96,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
STATE = ["linear_attention", "full_attention"] * 2
WINDOW = 24
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625, "sliding_window": WINDOW, "layer_types": MIXED},
    "gemma2": {"sliding_window": WINDOW, "layer_types": MIXED, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "olmo3": {"sliding_window": WINDOW, "layer_types": MIXED},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "qwen3_5_text": {**LINEAR, "layer_types": STATE},
    "qwen3_next": {**LINEAR, "layer_types": STATE, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mlp_only_layers": []},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_ffn_dim_multiplier": 1.0},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {"hybrid_override_pattern": "M*M*", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
                   "ssm_state_size": 16, "chunk_size": 16, "conv_kernel": 4},
}  # fmt: skip
MIXTURES = {"gpt_oss": SIZES["gpt_oss"], **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "granitemoe"), MIXTURE)}


def make_architecture(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.1) -> Any:
    """A model whose weights are large enough that every part of it can be seen in its output."""
    config = transformers.CONFIG_MAPPING[model_type](**{**BASE, **(SIZES | MIXTURES)[model_type]})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config))
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=std)
            elif "sinks" in name:
                torch.nn.init.normal_(weight, std=2.0)
    return model.eval()
