"""Options of vLLM's that an engine and a server of a model share.

It imports neither torch nor vLLM: the process that chooses a server's options is then replaced by
the server."""

from __future__ import annotations

from typing import Any

CPU_LORA_WORKER = "worker.engine.lora_cpu.LoraWorker"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports; an adapter of a rank in between uses the next larger one."""
UTILIZATION = 0.01
"""vLLM ignores this share of a GPU's memory beside `kv_cache_memory_bytes`, except that it does not
start if less is free."""


def text_only(config: Any) -> dict[str, Any]:
    """Arguments with which vLLM leaves the towers of a wrapper out."""
    has_tower = getattr(config, "vision_config", None) or getattr(config, "audio_config", None)
    return {"language_model_only": True} if has_tower else {}


def room_for_rank(rank: int) -> int:
    """The smallest of LORA_RANKS that holds `rank`."""
    return next((room for room in LORA_RANKS if room >= rank), rank)
