"""Reading adapters in PEFT format."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import MAX_SMALL_BYTES, AdapterConfig, decoded, read_local

MAX_RANK = 4096


def read_adapter_config(adapter: Path, *needed: str) -> Json:
    """The adapter_config.json of an adapter's folder. FlashError(unknown_checkpoint) if it cannot
    be read, or if one of the `needed` fields is not a number from 1 to MAX_RANK in it.
    """
    try:
        text = read_local(adapter / "adapter_config.json", MAX_SMALL_BYTES).decode()
        config = cast(Json, decoded(text, AdapterConfig))
        for name in needed:
            value = config[name]
            # A bool is an int too.
            if type(value) is not int or not 0 < value <= MAX_RANK:
                raise ValueError(f"{name} is {value!r:.40}")
    except (OSError, ValueError, KeyError) as error:
        raise FlashError(
            "unknown_checkpoint",
            f"no adapter is there: {error}",
            folder=adapter,
            fix="name a run, a run's checkpoint as RUN_ID@STEP, or a folder with a PEFT adapter; "
            "checkpoints lists a run's",
        ) from error
    return config
