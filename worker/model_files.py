"""What the files of a base model's folder say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError


def config_of(model_path: Path) -> Any:
    """The model's transformers config. `Any`, since what a config holds depends on its model."""
    from transformers import AutoConfig  # noqa: PLC0415  seconds of imports

    return cast(Any, AutoConfig).from_pretrained(model_path)


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
