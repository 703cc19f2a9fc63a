"""Where a model server listens, as its attempt says.

On a node it listens on all addresses, with TLS. Its certificate is its own, a new one for each
start, and is the only one that is accepted: whoever else listens there learns no key. The code
(HMAC) by the supervisor's key shows that nobody else wrote what is said here."""

from __future__ import annotations

import errno
import hmac
import json
import socket
import ssl
from dataclasses import asdict, dataclass, fields
from typing import cast

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import ListeningFile
from flash_mcp.protocol.spec import Precision

FREE_FIX = "choose another port, or leave port out for a free one"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Listening:
    addresses: list[str]
    """Of the node, as it knows them; some may not lead there from elsewhere."""
    port: int
    certificate: str
    """In PEM."""
    adapter: str
    """The adapter's folder on the node; empty on the server's machine."""
    precision: Precision | None = None
    """In which the server computes."""

    def signed(self, key: str) -> Json:
        return {**asdict(self), "mac": self._code(key)}

    @classmethod
    def checked(cls, response: ListeningFile, key: str) -> Listening:
        """FlashError(deployment_failed) unless the holder of the key signed it."""
        said = cast("Json", response)
        result = cls(**{field.name: said[field.name] for field in fields(cls)})
        if not hmac.compare_digest(response["mac"].encode(), result._code(key).encode()):
            what = "the node's address was not written by the node"
            fix = "find out who can write to the target's storage"
            raise FlashError("deployment_failed", what, fix=fix)
        return result

    def _code(self, key: str) -> str:
        body = json.dumps(asdict(self), sort_keys=True).encode()
        return hmac.digest(key.encode(), body, "sha256").hex()


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, fix: str = FREE_FIX) -> None:
    """FlashError(port_taken | invalid_argument) unless this process could listen there."""
    if not 0 < port < 65536:
        what = "there is no such port"
        raise FlashError("invalid_argument", what, port=port, fix="choose a port from 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"cannot listen there: {error.strerror}"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                fix = "use an address of this machine: see `ip address`, or 0.0.0.0 for all"
                raise FlashError("invalid_argument", what, host=host, fix=fix) from error
            raise FlashError("port_taken", what, host=host, port=port, fix=fix) from error


def trust(certificate: str) -> ssl.SSLContext:
    """For clients: accepts this certificate alone, at whichever address."""
    try:
        context = ssl.create_default_context(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        what = f"the node wrote no certificate: {error}"
        fix = "find out who can write to the target's storage"
        raise FlashError("deployment_failed", what, fix=fix) from error
    context.check_hostname = False
    return context
