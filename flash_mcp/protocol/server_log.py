"""What the log of a model server says of its end."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import cast

from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.records import Json

STARTED = "Application startup complete"
"""What uvicorn logs when a server begins to answer."""


def told_error(text: str) -> FlashError | None:
    """What worker.engine.serve wrote before vLLM ran, whose log may hold such lines of others."""
    if STARTED in text or "Traceback (" in text:
        return None
    for line in reversed(text.splitlines()[-5:]):
        with suppress(ValueError, KeyError, TypeError):
            response = cast(Json, json.loads(line))
            if response["code"] in CODES:
                return FlashError.from_dict(response)
    return None
