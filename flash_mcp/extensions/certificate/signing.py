"""Certificates of environments: a page for people that holds the same facts as JSON, and one
signature over both.

It is ed25519 over CONTEXT and the canonical JSON (sorted keys, no spaces, ASCII) of `certificate`
and `page_sha256`, which is the digest of the page without its JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from flash_mcp.protocol.errors import FlashError, expanded
from flash_mcp.protocol.paths import home, write_private
from flash_mcp.protocol.records import EnvironmentVersion, Json
from flash_mcp.state.database import pick
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.store import Store

CONTEXT = b"flash-mcp certificate of an environment\n"
"""So that a key which signs other things too signs no certificate by accident."""
KEY_FILE = "certificate.key"
BLOCK = re.compile(r'<script type="application/json" id="certificate">(.*?)</script>\n', re.DOTALL)
FIELDS = {"certificate", "page_sha256", "public_key", "signature"}


@dataclass(frozen=True)
class Certificate:
    """One that was signed or checked here. `page` is empty if only its JSON was."""

    facts: Json
    signer: str
    """The fingerprint of the key, as `ssh-keygen -lf` prints it."""
    text: str
    """The JSON."""
    page: str

    def __str__(self) -> str:
        answers = [f"{name} {row['answer']}" for name, row in self.facts["questions"].items()]
        if self.facts["environment"]["arguments"]:
            answers.append(f"with {json.dumps(self.facts['environment']['arguments'])}")
        return f"{', '.join(answers)}; {self.facts['made']} UTC, signed by {self.signer}"


def signing_key(path: Path | None = None) -> Ed25519PrivateKey:
    """The key of this file (PEM or OpenSSH), by default that of the state directory, which is made
    at its first use. FlashError(invalid_argument)."""
    if path is None:
        path = home() / KEY_FILE
        if not path.exists():
            kinds = forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
            part = path.with_name(f".{KEY_FILE}-{secrets.token_hex(4)}")
            write_private(part, Ed25519PrivateKey.generate().private_bytes(*kinds))
            with suppress(FileExistsError):  # another process was faster: its key stays
                os.link(part, path)
            part.unlink()
    try:
        content = expanded(path).read_bytes()
        if b"OPENSSH" in content[:40]:
            key = forms.load_ssh_private_key(content, None)
        else:
            key = forms.load_pem_private_key(content, None)
        if isinstance(key, Ed25519PrivateKey):
            return key
        raise ValueError("it is no ed25519 key")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        fix = "make one without a passphrase: ssh-keygen -t ed25519 -N '' -f FILE"
        what = f"the key cannot be used: {error!s:.300}"
        raise FlashError("invalid_argument", what, key=path, fix=fix) from error


def fingerprint(key: Ed25519PublicKey) -> str:
    digest = forms.ssh_key_fingerprint(key, hashes.SHA256())
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def sign(facts: Json, page: str, key: Ed25519PrivateKey) -> Certificate:
    """`page` is HTML; the JSON is put at the end of its body."""
    public = key.public_key()
    page = page.encode(errors="replace").decode()
    envelope: Json = {"certificate": facts, "page_sha256": _digest(page)}
    signature = key.sign(_message(envelope))
    line = public.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    envelope |= {"public_key": line.decode(), "signature": base64.b64encode(signature).decode()}
    text = json.dumps(envelope, indent=1)
    inert = text.replace("<", "\\u003c")
    before, end, after = page.rpartition("</body>")
    block = f'<script type="application/json" id="certificate">{inert}</script>\n'
    return Certificate(facts, fingerprint(public), text, f"{before}{block}{end}{after}")


def _digest(page: str) -> str:
    return hashlib.sha256(BLOCK.sub("", page).encode()).hexdigest()


def _message(envelope: Json) -> bytes:
    signed = pick(envelope, "certificate", "page_sha256")
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return CONTEXT + text.encode()


def read(content: bytes) -> Certificate:
    """A certificate from its page or its JSON. FlashError(certificate_invalid)."""
    try:
        text = content.decode()
        blocks = BLOCK.findall(text)
        body = blocks[0] if blocks else text
        envelope: Json = json.loads(body, object_pairs_hook=_once)
        if len(blocks) > 1 or set(envelope) != FIELDS:
            raise ValueError(f"it is not one object with {', '.join(sorted(FIELDS))}")
        key = forms.load_ssh_public_key(envelope["public_key"].encode())
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("its key is no ed25519 key")
        key.verify(base64.b64decode(envelope["signature"], validate=True), _message(envelope))
        if blocks and _digest(text) != envelope["page_sha256"]:
            raise InvalidSignature
    except InvalidSignature as error:
        raise _invalid("it was changed after it was signed") from error
    except (ValueError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm) as error:
        raise _invalid(f"it cannot be read: {error!s:.200}") from error
    return Certificate(envelope["certificate"], fingerprint(key), body, text if blocks else "")


def _once(pairs: Sequence[tuple[str, Any]]) -> Json:
    """An object whose keys differ: of two, readers would show different ones."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return dict(pairs)


def _invalid(what: str) -> FlashError:
    fix = "ask its signer for the file as it was, or certify the environment yourself"
    return FlashError("certificate_invalid", what, fix=fix)


def check_about(certificate: Certificate, version: EnvironmentVersion) -> None:
    """FlashError(certificate_invalid) if it is about other files."""
    about = certificate.facts["environment"]
    if about["digest"] != version.digest:
        raise _invalid(f"it is about {about['name']}@{about['digest']}, not {version.reference}")


def place_of(version: EnvironmentVersion) -> Path:
    """Where the newest certificate of exactly these files is kept."""
    folder = home() / "certificates"
    if version.owner != LOCAL_OWNER:
        folder /= f"@{version.owner}"
    return folder / f"{version.digest}.html"


def kept_page(store: Store, reference: str) -> str:
    """The certificate of a version as its file has it. FlashError(unknown_environment |
    unknown_page | certificate_invalid)."""
    version = store.environment(reference)
    try:
        return read(place_of(version).read_bytes()).page
    except FileNotFoundError as error:
        what = f"{version.reference} has no certificate"
        fix = f"flash-mcp certify {version.name}"
        raise FlashError("unknown_page", what, fix=fix) from error


def line_of(version: EnvironmentVersion) -> str | None:
    """The certificate of a version on one line; None if it has none."""
    try:
        certificate = read(place_of(version).read_bytes())
        check_about(certificate, version)
    except FileNotFoundError:
        return None
    except FlashError as error:
        return f"not valid: {error.what}"
    return str(certificate)
