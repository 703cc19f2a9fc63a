"""What the files of a base model's folder say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
STATELESS_KINDS = {*ATTENTION_KINDS, "mlp", "moe"}
STATE_FIELDS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_conv_kernel_dim")
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
LAYER = re.compile(r"(.*?)layers\.\d+\.")
TOWERS = ("vision", "visual", "audio", "mtp.")
"""In names of weights that are no part of the text decoder."""


class ModelFiles:
    """A base model as its files describe it. They are read once, here, and whoever computes with
    the model gets this record: engine, trainer, estimates of memory, export."""

    def __init__(self, path: Path) -> None:
        import transformers  # noqa: PLC0415  seconds of imports

        library = cast(Any, transformers)
        self.path = path
        self.config: Any = library.AutoConfig.from_pretrained(path)
        """Of transformers. `Any`, since what a config holds depends on its model."""
        text = self.text = self.config.get_text_config()
        """Of a wrapper with towers the text decoder's part; else the same."""
        self.weights_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
        self.has_state = any(getattr(text, name, None) for name in STATE_FIELDS)
        """Whether some layers carry a state from token to token instead of keys and values: linear
        attention, convolutions, Mamba."""
        if kinds:
            self.has_state = not STATELESS_KINDS.issuperset(kinds)
        self.experts = experts_of(text)
        self.head_size = head_size(text)
        self.has_tower = bool(
            getattr(self.config, "vision_config", None)
            or getattr(self.config, "audio_config", None)
        )
        self.auto_class: Any = library.AutoModelForImageTextToText
        """The class of transformers that loads the model to train its text: of a wrapper only the
        text decoder where transformers has a class for that."""
        if type(self.config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
            self.auto_class = library.AutoModelForCausalLM
        self.end_ids = end_ids(path)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # noqa: PLC0415

        return cast(Any, AutoTokenizer).from_pretrained(self.path)

    @cached_property
    def prefix(self) -> str:
        """`decoder_prefix` of the weights in the files."""
        from safetensors import safe_open  # noqa: PLC0415

        names: list[str] = []
        for path in self.path.glob("*.safetensors"):
            with cast(Any, safe_open)(path, "pt") as weights:
                names += weights.keys()
        return decoder_prefix(names)

    def check_shape(self, count: int) -> None:
        """FlashError(invalid_argument) unless `count` cards can share each layer's heads in
        vLLM."""
        heads: int = self.text.num_attention_heads
        keys: int = getattr(self.text, "num_key_value_heads", None) or heads
        if heads % count or (keys % count and count % keys):
            heads_said = f"{heads} heads, {keys} of them with keys of their own"
            what = f"{count} cards cannot share {heads_said}"
            fix = "use a number of gpus that divides them, or a model that one card can hold"
            raise FlashError("invalid_argument", what, gpus=count, fix=fix)


def end_ids(path: Path) -> list[int]:
    """The tokens, beside its tokenizer's eos, at which vLLM ends a turn of this model."""
    from transformers import GenerationConfig  # noqa: PLC0415

    try:
        ids = cast(Any, GenerationConfig).from_pretrained(path).eos_token_id
    except OSError:  # the model has no such file
        return []
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids


def experts_of(text: Any) -> int:
    """How many experts a mixture has in a layer; 0 for other models."""
    counts = [getattr(text, name, 0) for name in EXPERTS]
    return next(filter(None, counts), 0)


def head_size(text: Any) -> int:
    """The size of an attention head of a text decoder; the largest, where layers differ."""
    per_layer: list[Any] = getattr(text, "per_layer_config", None) or []
    sizes = [getattr(layer, "head_dim", None) for layer in per_layer]
    sizes = [size for size in sizes if size]
    if sizes:
        return max(sizes)
    heads: int = getattr(text, "num_attention_heads", None) or 1
    return getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads


def decoder_prefix(names: Iterable[str]) -> str:
    """What stands before `layers.N.` in the names of the text decoder's weights."""
    prefixes = {match[1] for name in names if (match := LAYER.match(name))}
    texts = [prefix for prefix in prefixes if not any(tower in prefix for tower in TOWERS)]
    return max(texts, key=len, default="")
