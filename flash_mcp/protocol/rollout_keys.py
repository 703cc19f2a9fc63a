"""Keys of the rollouts that programs outside play: whoever has the gateway's key makes them, and
knows them without a list."""

from __future__ import annotations

import hmac
import secrets

PREFIX = "sk-"
NONCE_LENGTH = 32


def new_key(gateway_key: str) -> str:
    nonce = secrets.token_hex(NONCE_LENGTH // 2)
    return f"{PREFIX}{nonce}{_code(gateway_key, nonce)}"


def is_of(gateway_key: str, key: str) -> bool:
    """Whether the key was made with that of the gateway. Its rollout may have ended."""
    nonce = key.removeprefix(PREFIX)[:NONCE_LENGTH]
    made = f"{PREFIX}{nonce}{_code(gateway_key, nonce)}"
    return hmac.compare_digest(key.encode(), made.encode())


def _code(gateway_key: str, nonce: str) -> str:
    return hmac.digest(gateway_key.encode(), nonce.encode(), "sha256").hex()[:32]
