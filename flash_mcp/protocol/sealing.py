"""Hands values of secrets to an attempt on another machine, through a storage that may be read by
others.

    receiver = Receiver(name, token)             # on the node: makes a pair of keys
    sealed = seal(values, receiver.offer, name, token)   # on the server
    values = receiver.open(sealed)

HPKE (RFC 9180) encrypts the values for the attempt's public key. A code (HMAC) made from the launch
token, which the engine gives the attempt, shows that the key is the attempt's. The token opens
nothing. Other users of an engine may see it: with it, those who can write to the storage too could
offer a key of their own."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_files import Json

TOKEN = "FLASH_LAUNCH_TOKEN"
"""Variable of an attempt that receives secrets."""
SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


class Receiver:
    """An attempt that waits for its secrets. What is sealed for another `name` stays closed."""

    def __init__(self, name: str, token: str) -> None:
        self.name = name
        self._private = X25519PrivateKey.generate()
        public = self._private.public_key().public_bytes_raw().hex()
        self.offer: Json = {"public": public, "mac": _code(public, name, token)}
        """What the server needs, for everybody to see."""

    def open(self, sealed: bytes) -> dict[str, str]:
        """The values. FlashError(secret_missing) if sealed for another attempt, or changed."""
        try:
            text = SUITE.decrypt(sealed, self._private, info=_info(self.name))
        except (InvalidTag, ValueError) as error:
            what = f"the secrets of {self.name} cannot be opened"
            fix = "nothing: another attempt receives them anew; the storage may be damaged"
            raise FlashError("secret_missing", what, fix=fix) from error
        return json.loads(text)


def seal(values: Mapping[str, str], offer: Mapping[str, Any], name: str, token: str) -> bytes:
    """Seal the values for one attempt. FlashError(secret_missing) if its offer lacks the token."""
    public = str(offer.get("public"))
    if not hmac.compare_digest(str(offer.get("mac")).encode(), _code(public, name, token).encode()):
        what = f"a key was offered for {name} that its attempt did not make"
        fix = "find out who can write to the storage; cancel the run if it may be misused"
        raise FlashError("secret_missing", what, fix=fix)
    try:
        key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return SUITE.encrypt(json.dumps(dict(values)).encode(), key, info=_info(name))
    except ValueError as error:  # a point with which no secret can be agreed on
        what = f"the attempt {name} offered no key that can be used: {error}"
        raise FlashError(
            "secret_missing", what, fix="cancel the run, and ask who runs its node"
        ) from error


def _info(name: str) -> bytes:
    return f"flash-mcp secrets of {name}".encode()


def _code(public: str, name: str, token: str) -> str:
    return hmac.digest(token.encode(), f"{name} {public}".encode(), "sha256").hex()


# Keys of the rollouts that programs outside play: whoever has the gateway's key makes them, and
# knows them without a list

PREFIX = "sk-"
NONCE_LENGTH = 32


def new_key(gateway_key: str) -> str:
    nonce = secrets.token_hex(NONCE_LENGTH // 2)
    return f"{PREFIX}{nonce}{_rollout_code(gateway_key, nonce)}"


def is_of(gateway_key: str, key: str) -> bool:
    """Whether the key was made with that of the gateway. Its rollout may have ended."""
    nonce = key.removeprefix(PREFIX)[:NONCE_LENGTH]
    made = f"{PREFIX}{nonce}{_rollout_code(gateway_key, nonce)}"
    return hmac.compare_digest(key.encode(), made.encode())


def _rollout_code(gateway_key: str, nonce: str) -> str:
    return hmac.digest(gateway_key.encode(), nonce.encode(), "sha256").hex()[:32]
