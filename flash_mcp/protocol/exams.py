"""The sealed file of an exam: an environment's folder, encrypted with a key that lies elsewhere.

    sealed = seal(key, pack(files), exam_id)
    unpack(unseal(key, sealed, exam_id), folder)   # in the worker, for as long as it runs

The key is made from a passphrase (scrypt), or is random and lies in a file that only the operator's
account reads. AES-256-GCM encrypts, and shows that nothing was changed."""

from __future__ import annotations

import io
import json
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from flash_mcp.protocol.errors import FlashError

REFERENCE = "exam:"
"""How `evaluate` names one: exam:NAME."""
SEALED = "exam.sealed"
KEY_VARIABLE = "FLASH_EXAM_"
"""The variable with an exam's key, in hex, is this and the exam's id."""
PROMPTS = "prompts.sealed"
"""What its tasks ask, for the search of training rows."""
NONCE_BYTES = 12
SALT_BYTES = 16
SCRYPT = {"length": 32, "n": 2**15, "r": 8, "p": 1}


def key_of(passphrase: str, salt: str) -> bytes:
    return Scrypt(salt=bytes.fromhex(salt), **SCRYPT).derive(passphrase.encode())


def variable_of(exam_id: str) -> str:
    return f"{KEY_VARIABLE}{exam_id}"


def seal(key: bytes, body: bytes, about: str) -> bytes:
    """`about` is no secret: what was sealed for another purpose does not open."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, body, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    """FlashError(exam_locked) with another key, and for a file that was changed."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about.encode())
    except (InvalidTag, ValueError) as error:
        what = "the key does not open the exam, or its file was changed"
        fix = "use the passphrase or key file that it was created with"
        raise FlashError("exam_locked", what, fix=fix) from error


def seal_json(key: bytes, body: Any, about: str) -> str:
    return seal(key, zlib.compress(json.dumps(body).encode()), about).hex()


def unseal_json(key: bytes, sealed: str, about: str) -> Any:
    """Raises as `unseal` does."""
    return json.loads(zlib.decompress(unseal(key, bytes.fromhex(sealed), about)))


def pack(files: Mapping[str, bytes]) -> bytes:
    """One archive of a folder's files by path."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return buffer.getvalue()


def unpack(body: bytes, folder: Path) -> None:
    """Write the files below `folder`, which only this user may enter."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        archive.extractall(folder)
