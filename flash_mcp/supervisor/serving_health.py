"""Whether a model server answers, and how long nobody has used it."""

from __future__ import annotations

import logging
import re
from contextlib import suppress

import httpx

from flash_mcp.supervisor.server import Server

log = logging.getLogger(__name__)

EVERY_S = 20.0
"""Between two checks of a server that answers."""
PING_TIMEOUT_S = 10.0
"""For a route that computes nothing."""
TOKEN_TIMEOUT_S = 60.0
"""For one token of a server that computes no other tokens meanwhile."""
FAILURES = 2
"""Checks that fail in a row until a server counts as hung: a machine may have been paused during
one of them."""


def examine(server: Server, deployment_id: str) -> float | None:
    """Seconds since a user's request ended, if the server computes a token; None if it does not."""
    try:
        idle_s = idle_seconds(server)
        before = _tokens(server)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        log.warning("%s does not answer: %r", server.model, error)
        return None
    body = {"model": deployment_id, "prompt": "Hello", "max_tokens": 1}
    try:
        server.call("/completions", body, key=server.admin_key, timeout_s=TOKEN_TIMEOUT_S)
        return idle_s
    except httpx.HTTPError as error:
        log.warning("%s computes no token: %r", server.model, error)
    with suppress(httpx.HTTPError):
        if _tokens(server) > before:  # it computes others' before ours
            return 0.0
    return None


def idle_seconds(server: Server) -> float:
    """Since the last user's request ended; 0 while one is under way."""
    response = server.call("/idle", key=server.admin_key, timeout_s=PING_TIMEOUT_S)
    # A server that refuses to say counts as busy: it must not be stopped as idle.
    return float(response.json()["idle_s"]) if response.is_success else 0.0


def _tokens(server: Server) -> float:
    text = server.call(f"{server.root}/metrics", timeout_s=PING_TIMEOUT_S).text
    counts = re.findall(r"^vllm:(?:prompt|generation)_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return sum(map(float, counts))
