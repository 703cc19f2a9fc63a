"""Models of random weights, for scripts/gpu-check."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.tiny import make_tokenizer

SIZES = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "8B": (4096, 12288, 36, 32),
}
"""Hidden size, intermediate size, layers and heads of Qwen3."""


def config_of(size: str) -> Qwen3Config:
    hidden, inner, layers, heads = SIZES[size]
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, tie_word_embeddings=hidden < 4096,
    )  # fmt: skip


def make_model(folder: Path, size: str) -> Path:
    """A model of random weights on the card."""
    config = config_of(size)
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
