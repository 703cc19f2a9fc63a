"""Random models of some 50 million parameters, shaped as architectures that have no small model.

    python -m bench.shapes qwen3_5_text FOLDER --tokenizer MODEL

Their training step takes as long as that of a trained model: scripts/bench --only step --model
FOLDER measures it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) + ["sliding_attention"] * 2,
        "query_pre_attn_scalar": 64,
    },
    "qwen3_5_text": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 8,
        "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip


def make(shape: str, folder: Path, tokenizer_of: Path) -> int:
    """Write the model to `folder` in bf16, and return the number of its parameters."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_of)
    config = transformers.CONFIG_MAPPING[shape](
        **SIZE, **SHAPES[shape], vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's folder")
    options = parser.parse_args()
    count = make(options.shape, options.folder, options.tokenizer)
    sys.stdout.write(f"{options.folder}: {count / 1e6:.0f} million parameters\n")
