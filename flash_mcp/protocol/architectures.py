"""Architectures that cannot be trained or served without a GPU, as docs/models.md found them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError

_LATENT = "vLLM's CPU kernels compute its latent attention differently from transformers"
NEEDS_GPU = {
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "lfm2": "vLLM's CPU build lacks its convolutions",
}
"""Why not, by the `model_type` of config.json."""


def check_without_gpu(folder: Path) -> None:
    """Look at the config.json of a model's folder; its weights need not be there.

    FlashError(model_unsupported) if this machine, which has no GPU, cannot run the model."""
    try:
        config: Any = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # the checks of the whole folder say what is wrong
    if not isinstance(config, dict):
        return
    fields = cast("dict[str, Any]", config)
    text_config = fields.get("text_config") or fields
    for architecture in (fields.get("model_type"), text_config.get("model_type")):
        if reason := NEEDS_GPU.get(str(architecture)):
            what = f"the architecture {architecture} does not run without a GPU: {reason}"
            fix = "use a model that docs/models.md has a yes for, or a machine with a GPU"
            raise FlashError("model_unsupported", what, architecture=architecture, fix=fix)
