"""Models of random weights, for scripts/gpu-check."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.tiny import make_tokenizer

SIZES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip
"""Shapes of Qwen3, without its weights."""


def make_model(folder: Path, size: str) -> Path:
    """A model of random weights on the card."""
    config = Qwen3Config(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        **SIZES[size],
    )  # fmt: skip
    tokenizer = make_tokenizer()
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    free()
    return folder


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- the trainer -----------------------------------------------------------------------------------
