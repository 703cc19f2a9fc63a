"""A real model made in seconds: 2 layers, one token per byte, a ChatML template. transformers and vLLM both run it.

    python -m tests.tiny FOLDER

It was taught nothing, but it writes printable text and ends its turns after some twenty characters."""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CONTEXT = 4096
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, context: int = CONTEXT) -> Path:
    """Write the model to `folder` in bf16, tokenizer and chat template included."""
    tokenizer = make_tokenizer(context)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=context, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Dimension 0 is the same for every token, so that the head's column 0 acts as a bias.
        model.model.embed_tokens.weight[:, 0] = 0.2
        bias = torch.full([len(tokenizer)], -2.0)
        bias[[tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127)]] = 0.0
        bias[tokenizer.eos_token_id] = 0.3
        model.lm_head.weight.mul_(5)[:, 0] = bias
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(context: int = CONTEXT) -> PreTrainedTokenizerFast:
    # llama.cpp reads no tokenizer without a merge. This one is of bytes that no text in UTF-8 has.
    tokens = ["ÀÁ" if token == "ÿ" else token for token in sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("À", "Á")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[3],
        unk_token=SPECIAL[0], model_max_length=context, chat_template=CHATML, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_tiny_adapter(folder: Path, base: Path, *, rank: int = 4, alpha: int = 8, favourite: str = "Z") -> Path:
    """A PEFT adapter of the tiny model that makes it write `favourite` far more often than anything else."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    adapted: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))
    favoured = model.lm_head.weight[tokenizer.convert_tokens_to_ids(favourite)].detach().clone()
    favoured[0] = 0.0
    weights = {name.split("layers.1.self_attn.")[-1]: weight for name, weight in adapted.named_parameters()}
    with torch.no_grad():
        # Layer 1 reads the constant dimension 0 into its values, and writes the favourite's
        # direction for them.
        weights["v_proj.lora_A.default.weight"].zero_()[0, 0] = 1.0
        weights["v_proj.lora_B.default.weight"].zero_()[:, 0] = 0.01
        weights["o_proj.lora_A.default.weight"].zero_()[0] = 100 / 64
        weights["o_proj.lora_B.default.weight"].zero_()[:, 0] = 0.02 * favoured / favoured.norm()
    adapted.save_pretrained(folder)
    return folder


def change_adapter(policy: Any, std: float = 0.05, *, seed: int = 1, part: str = "lora_B") -> Any:
    """The policy, with these weights of its adapter drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy.named_parameters():
        if part in name:
            weight.data.normal_(std=std, generator=generator)
    return policy


if __name__ == "__main__":
    sys.stdout.write(f"{make_tiny_model(Path(sys.argv[1]))}\n")
