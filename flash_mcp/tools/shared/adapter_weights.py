"""The weights of an adapter's folder that another program may have written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from flash_mcp.protocol.base_models import NO_SAFETENSORS
from flash_mcp.protocol.errors import FlashError

LORA = re.compile(r"\.lora_[AB](\.\w+)?(\.weight)?$")
NO_NUMBERS = {
    "F32": (4, re.compile(rb"[\x7f\xff]"), 0x80),
    "BF16": (2, re.compile(rb"[\x7f\xff]"), 0x80),
    "F16": (2, re.compile(rb"[\x7c-\x7f\xfc-\xff]"), 0),
}
"""Of each type of numbers: its bytes, the last byte of infinity and NaN, and a bit that
the byte before has then."""


def check_weights(path: Path) -> None:
    """FlashError(adapter_mismatch) unless the file holds the matrices of a LoRA adapter and nothing
    else, and all of their numbers are finite."""
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        numbers: dict[str, tuple[str, bytes]] = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            numbers[name] = (entry["dtype"], content[8 + length + start : 8 + length + end])
            if len(numbers[name][1]) != end - start:
                raise ValueError("it is cut short")
    except NO_SAFETENSORS as error:
        what = f"{path.name} cannot be read as safetensors: {error}"
        raise _mismatch(path, what, "give the file as its writer saved it") from error
    others = [name for name in numbers if not LORA.search(name)]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        what = f"the adapter holds more than lora_A and lora_B: {', '.join(others[:3])}{more}"
        fix = (
            "merge it into its base model and train that, or save it again without them "
            "(PEFT: save_pretrained(save_embedding_layers=False), no modules_to_save)"
        )
        raise _mismatch(path, what, fix)
    for name, (dtype, data) in numbers.items():
        if not _are_finite(dtype, data):
            what = f"the adapter holds NaN or infinity in {name}"
            raise _mismatch(path, what, "start from a checkpoint before its training diverged")


def _are_finite(dtype: str, data: bytes) -> bool:
    if dtype not in NO_NUMBERS:
        return True
    size, last, bit = NO_NUMBERS[dtype]
    found = last.finditer(data[size - 1 :: size])
    return not any(data[match.start() * size + size - 2] & bit == bit for match in found)


def _mismatch(path: Path, what: str, fix: str) -> FlashError:
    return FlashError("adapter_mismatch", what, folder=path.parent, fix=fix)
