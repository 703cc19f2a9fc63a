"""GGUF, the format of llama.cpp: one file with weights, tokenizer and chat template.

The names of tensors and fields are those of llama.cpp's own converter, which the gguf package
holds as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gguf
import numpy
import torch

from flash_mcp.protocol.errors import FlashError

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""By the `model_type` of transformers."""
TYPES = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
Q8_BLOCK = 32
"""Rows of q8_0 are a whole number of such blocks."""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {QWEN2_SPLIT: "qwen2", LLAMA3_SPLIT: "llama-bpe", TEKKEN_SPLIT: "tekken"}
"""llama.cpp's names of the expressions that cut a text into words."""


def check(config: Any, source: Path) -> None:
    """FlashError(export_unsupported) for a model that is none of ARCHITECTURES, or whose tokenizer,
    in the folder `source`, llama.cpp would not reproduce."""
    if config.model_type not in ARCHITECTURES:
        raise _unsupported(f"the architecture {config.model_type}")
    rope: dict[str, Any] = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise _unsupported(f"the position encoding {rope['rope_type']}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("a position encoding of a part of each head")
    if getattr(config, "sliding_window", None):
        raise _unsupported("layers with a sliding window")
    described = json.loads((source / "tokenizer.json").read_text())
    if described["model"]["type"] != "BPE":
        raise _unsupported(f"a tokenizer of the type {described['model']['type']}")
    _splitting(described["pre_tokenizer"])


def write(model: Any, source: Path, folder: Path, name: str, type_name: str) -> Path:
    """Write a transformers model that passes `check` as `folder`/`name`-`type_name`.gguf; `source`
    is the folder of its tokenizer."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    path = folder / f"{name}-{type_name}.gguf"
    tensor_type, file_type = TYPES[type_name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        writer.add_name(name)
        writer.add_file_type(file_type)
        _add_shape(writer, config)
        _add_tokenizer(writer, source, config)
        for tensor_name, weight in _tensors(model, architecture):
            _add_tensor(writer, tensor_name, weight, tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def read_back(path: Path, library: Any, dtype: torch.dtype) -> Any:
    """The model that transformers reads from the file.

    It takes the size of a head from few architectures' files, and its default for the others."""
    from transformers import AutoConfig  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = cast(Any, AutoConfig).from_pretrained(**source)
    fields = gguf.GGUFReader(path).fields
    architecture = fields["general.architecture"].contents()
    config.head_dim = fields[f"{architecture}.attention.key_length"].contents()
    return library.from_pretrained(**source, config=config, dtype=dtype)


def _unsupported(what: str) -> FlashError:
    fix = "use merged or adapter; llama.cpp's own convert_hf_to_gguf.py may read a merged export"
    return FlashError("export_unsupported", f"no GGUF is written for {what}", fix=fix)


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


# -- the tokenizer ---------------------------------------------------------------------------------


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: Any) -> None:
    described = json.loads((source / "tokenizer.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(described["pre_tokenizer"]))
    tokens = [f"[PAD{place}]" for place in range(config.vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * config.vocab_size
    for token, place in described["model"]["vocab"].items():
        tokens[place] = token
        kinds[place] = gguf.TokenType.NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.USER_DEFINED
        if added["special"]:
            kinds[added["id"]] = gguf.TokenType.CONTROL
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = described["model"]["merges"]
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    _add_special(writer, source, {token: place for place, token in enumerate(tokens)})


def _splitting(described: dict[str, Any]) -> str:
    """llama.cpp's name of how the tokenizer cuts a text into words."""
    steps: list[dict[str, Any]] = described.get("pretokenizers", [described])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        existing = SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if existing:
            return existing
    raise _unsupported("a tokenizer that cuts words in a way of its own")


def _add_special(writer: gguf.GGUFWriter, source: Path, places: dict[str, int]) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415  the type is not exported

    tokenizer = cast(Any, AutoTokenizer).from_pretrained(source)
    if tokenizer.bos_token:
        writer.add_bos_token_id(places[tokenizer.bos_token])
    if tokenizer.pad_token:
        writer.add_pad_token_id(places[tokenizer.pad_token])
    writer.add_eos_token_id(places[tokenizer.eos_token])
    # The chat template writes what begins a conversation.
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


# -- the weights -----------------------------------------------------------------------------------


def _tensors(model: Any, architecture: gguf.MODEL_ARCH) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in GGUF, weight). A head that shares the embeddings' weights is left out."""
    config = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        existing = names.get_name(stem)
        if existing is None:
            raise _unsupported(f"the weight {name}")
        if architecture == gguf.MODEL_ARCH.LLAMA:
            weight = _rotated(stem, weight, config)
        yield f"{existing}.{kind}", weight


def _rotated(stem: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Queries and keys in llama.cpp's order: it rotates neighbours, where transformers rotates the
    first half of a head with the second.

    Axes: H heads, D half a head, I inputs."""
    if stem.endswith("q_proj"):
        heads = config.num_attention_heads
    elif stem.endswith("k_proj"):
        heads = config.num_key_value_heads
    else:
        return weight
    weight_H2DI = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return weight_H2DI.transpose(1, 2).reshape(weight.shape)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, weight: torch.Tensor, kind: gguf.GGMLQuantizationType
) -> None:
    values = weight.float().numpy()
    if values.ndim == 1:  # norms and biases
        writer.add_tensor(name, values)
        return
    if kind == gguf.GGMLQuantizationType.F16 or values.shape[-1] % Q8_BLOCK:
        writer.add_tensor(name, values.astype(numpy.float16))
        return
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
