"""Reading adapters in PEFT format."""

from __future__ import annotations

import json
from pathlib import Path

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json


def read_adapter_config(adapter: Path, *needed: str) -> Json:
    """The adapter_config.json of an adapter's folder. FlashError(unknown_checkpoint) if it cannot
    be read, or if one of the `needed` fields is not an integer in it.
    """
    try:
        text = (adapter / "adapter_config.json").read_text()
        config: Json = {**json.loads(text)}  # TypeError if it is no object
        for name in needed:
            int(config[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlashError(
            "unknown_checkpoint",
            f"no adapter is there: {error}",
            folder=adapter,
            fix="name a run, a run's checkpoint as RUN_ID@STEP, or a folder with a PEFT adapter; "
            "checkpoints lists a run's",
        ) from error
    return config
