"""What the files of a base model's folder say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
STATELESS_KINDS = {*ATTENTION_KINDS, "mlp", "moe"}
STATE_FIELDS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_conv_kernel_dim")
LAYER = re.compile(r"(.*?)layers\.\d+\.")
TOWERS = ("vision", "visual", "audio", "mtp.")
"""In names of weights that are no part of the text decoder."""


def config_of(model_path: Path) -> Any:
    """The model's transformers config. `Any`, since what a config holds depends on its model."""
    from transformers import AutoConfig  # noqa: PLC0415  seconds of imports

    return cast(Any, AutoConfig).from_pretrained(model_path)


def weights_bytes(model_path: Path) -> int:
    """The size of the model's weights on disk."""
    return sum(path.stat().st_size for path in model_path.glob("*.safetensors"))


def end_ids(model_path: Path) -> list[int]:
    """The tokens, beside its tokenizer's eos, at which vLLM ends a turn of this model."""
    from transformers import GenerationConfig  # noqa: PLC0415

    kind = cast(Any, GenerationConfig)
    try:
        ids: Any = kind.from_pretrained(model_path).eos_token_id
    except OSError:  # the model has no such file
        return []
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids


def check_shape(config: Any, count: int) -> None:
    """FlashError(invalid_argument) unless `count` cards can share each layer's heads in vLLM."""
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    keys: int = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or (keys % count and count % keys):
        what = f"{count} cards cannot share {heads} heads, {keys} of them with keys of their own"
        fix = "use a number of gpus that divides them, or a model that one card can hold"
        raise FlashError("invalid_argument", what, gpus=count, fix=fix)


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model to train its text: of a wrapper with towers,
    only the text decoder where transformers has a class for that."""
    import transformers  # noqa: PLC0415

    library = cast(Any, transformers)
    if type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        return library.AutoModelForCausalLM
    return library.AutoModelForImageTextToText


def has_state(config: Any) -> bool:
    """Whether some layers carry a state from token to token instead of keys and values: linear
    attention, convolutions, Mamba."""
    text = config.get_text_config()
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    if kinds:
        return not STATELESS_KINDS.issuperset(kinds)
    return any(getattr(text, name, None) for name in STATE_FIELDS)


def head_size(config: Any) -> int:
    """The size of an attention head; the largest, where layers differ."""
    text = config.get_text_config()
    per_layer: list[Any] = getattr(text, "per_layer_config", None) or []
    sizes = [getattr(layer, "head_dim", None) for layer in per_layer]
    sizes = [size for size in sizes if size]
    if sizes:
        return max(sizes)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def decoder_prefix(names: Iterable[str]) -> str:
    """What stands before `layers.N.` in the names of the text decoder's weights."""
    prefixes = {match[1] for name in names if (match := LAYER.match(name))}
    texts = [prefix for prefix in prefixes if not any(tower in prefix for tower in TOWERS)]
    return max(texts, key=len, default="")


def checkpoint_prefix(folder: Path) -> str:
    """`decoder_prefix` of a model folder's weights."""
    from safetensors import safe_open  # noqa: PLC0415

    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with cast(Any, safe_open)(path, "pt") as weights:
            names += weights.keys()
    return decoder_prefix(names)
