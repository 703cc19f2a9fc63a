"""How long a client waits for the answer to a call: an answer that comes later is lost."""

from __future__ import annotations

import math
import time
from typing import Any

from mcp.server.mcpserver import Context

from flash_mcp.state.owners import caller
from flash_mcp.tools.shared.tool_base import CALL_TIMEOUT_S

LONG_CALL_S = 3600.0
"""A call may take so long while its client takes progress."""
FIXED_TIMEOUT = ("codex-mcp-client",)
"""Clients that give a call a minute, whatever progress comes."""
KEPT_S = 3600.0
"""How long it is remembered that a client gave up."""
CAUTION = 0.8
"""Of the time after which a client gave up, the next call takes this share."""


class CallTimeouts:
    def __init__(self) -> None:
        self._given_up: dict[tuple[str, str], tuple[float, float]] = {}
        """{(owner, client): (seconds of a call, until when that counts)}"""

    def limit_s(self, context: Context[Any, Any]) -> float:
        """Seconds that a call of this client may take."""
        meta = context.request_context.meta or {}
        client = client_name(context)
        if meta.get("progress_token") is None or client in FIXED_TIMEOUT:
            return CALL_TIMEOUT_S
        limit_s, until = self._given_up.get((caller().owner, client), (LONG_CALL_S, math.inf))
        if time.monotonic() > until:
            limit_s = LONG_CALL_S
        return max(CALL_TIMEOUT_S, limit_s)

    def gave_up(self, context: Context[Any, Any], after_s: float) -> None:
        """The client cancelled a call: the next ones of its owner end sooner for a while. It may
        have been a person who did not want to wait.
        """
        if after_s > CALL_TIMEOUT_S:
            until = time.monotonic() + KEPT_S
            self._given_up[caller().owner, client_name(context)] = after_s * CAUTION, until


def client_name(context: Context[Any, Any]) -> str:
    """What the client calls itself; "" if it did not say."""
    params = context.session.client_params
    if params:
        return params.client_info.name
    return ""
