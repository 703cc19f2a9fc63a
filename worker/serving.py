"""An attempt that serves deployments instead of training.

It starts the model server (worker/engine/serve.py) and says in the run folder where it listens: on
a node with TLS, on the server's machine on a port of loopback that job.json names. The supervisor
loads adapters and looks after the server. If a node hears nothing of the supervisor and of users
for long, the server ends by itself: nodes cost money."""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from environments.sandbox.kernel import die_with_parent
from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.listening import FREE_FIX, Listening, free_port, trust
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.spec import Precision
from worker.heartbeat import Cancelled, Heartbeat
from worker.process import COMPUTES_IN, names_memory

log = logging.getLogger("worker")
ALONE_S = 1800.0
"""Without a word from the supervisor and without a user's request for so long, the server ends."""
LOOK_S = 10.0
START_S = 1.0
"""Between two looks at a server that starts."""
STOP_S = 10.0
TAIL_LINES = 2000
LOG_TAIL_CHARACTERS = 1500
COMMAND = ("-P", "-m", "worker.engine.serve")
DAYS = 365
STARTED = "Application startup complete"
"""What uvicorn logs when a server begins to answer."""


def serve(job: Json, writer: RunWriter, heartbeat: Heartbeat, scratch: Path) -> None:
    """Serve until the supervisor ends the attempt, or nobody wants anything any more.

    FlashError(deployment_failed, or what the server says) if it ends by itself."""
    own_port: int | None = job["serve"].get("port")
    addresses, certificate, scheme = ["127.0.0.1"], "", "http"
    port = own_port or free_port("0.0.0.0")
    if own_port is None:
        addresses, scheme = own_addresses(), "https"
        certificate = make_certificate(scratch, addresses)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look at the server
    heartbeat.enter("serve")
    request = job["serve"]
    command = [sys.executable, *COMMAND, "--model", job["model"], "--port", str(port)]
    command += ["--max-lora-rank", str(request["rank"]), "--name", request["name"]]
    if "precision" in request:
        command += ["--precision", request["precision"]]
    if own_port is None:
        command += ["--tls", str(scratch)]
    child = _ServerChild(command, {**os.environ, "VLLM_RPC_BASE_PATH": str(scratch)}, port)
    try:
        client = httpx.Client(
            base_url=f"{scheme}://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {os.environ['VLLM_API_KEY']}"},
            verify=trust(certificate) if certificate else True,
            trust_env=False,
        )
        with client:
            while not (certificate or child.has(port)) or not _answers(client):
                child.check()
                _pause(heartbeat, START_S)
            adapter = job["init_adapter"]["path"] if certificate else ""
            listening = Listening(addresses, port, certificate, adapter, child.precision)
            writer.listens(listening.signed(os.environ["FLASH_ADMIN_KEY"]))
            while not certificate or not _is_alone(client):
                child.check()
                if _answers(client):
                    heartbeat.advance()
                _pause(heartbeat, LOOK_S)
        log.info("nothing was heard of the supervisor for %.0f s: the server ends", ALONE_S)
    finally:
        child.stop()


class _ServerChild:
    """The server's process; its output goes into this process's own."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int) -> None:
        parent = os.getpid()
        self.port = port
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
            preexec_fn=lambda: die_with_parent(parent),
        )
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.precision: Precision | None = None
        self.has_started = False
        """It has begun to answer: its log may hold lines of users."""
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    def _copy(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.tail.append(line)
            if not self.has_started and line.startswith(COMPUTES_IN):
                self.precision = cast("Precision", line.removeprefix(COMPUTES_IN).strip())
            self.has_started |= STARTED in line
            sys.stderr.write(line)
            sys.stderr.flush()

    def check(self) -> None:
        """FlashError if it has ended."""
        code = self.process.poll()
        if code is None:
            return
        self._copier.join(STOP_S)
        raise explained("".join(self.tail), self.port, has_started=self.has_started)

    def has(self, port: int) -> bool:
        """Whether it listens on the port. Until it does, any local user may listen there: nobody
        else must be sent a key.
        """
        with suppress(psutil.Error):
            for connection in psutil.Process(self.process.pid).net_connections("tcp"):
                if (connection.status, connection.laddr[1:]) == (psutil.CONN_LISTEN, (port,)):
                    return True
        return False

    def stop(self) -> None:
        """It ends its engine; what is left of both is killed."""
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.process.pid)
            family = [server, *server.children(recursive=True)]
        self.process.terminate()
        _, left = psutil.wait_procs(family, STOP_S)
        for item in left:
            with suppress(psutil.NoSuchProcess):
                item.kill()


def explained(text: str, port: int, *, has_started: bool) -> FlashError:
    """Why the server ended, from its log: its own FlashError, a known cause, or the first exception
    that it names. The log is foreign text: it holds requests, and what chat templates raise.
    """
    response = None if has_started else _early_error(text)
    if response:
        return response
    tail = text[-LOG_TAIL_CHARACTERS:]
    # What ends a server that has answered stands at the end: before are requests, whoever's.
    if has_started:
        text = tail
    if re.search(r"address already in use", text, re.IGNORECASE):
        what = f"port {port} cannot be listened on"
        return FlashError("port_taken", what, port=port, fix=FREE_FIX)
    # vLLM quotes some in its warnings.
    cause = re.search(r"(?<!`)\b(?:\w+Error|\w+Exception): .+", text)
    what = "the server ended" if cause else "the server ended: its log does not say why"
    wrote = f"{cause[0][:400] if cause else ''}\nThe end of its log:\n{tail}"
    code, fix = "deployment_failed", "read the log, correct the cause and call deploy again"
    if names_memory(text.lower()) or "MemoryError" in text:
        others = "wait for the run that trains on this machine, or undeploy another model"
        code, fix = "out_of_memory", f"{others}, and call deploy again"
    return FlashError(code, what, fix=fix, wrote=wrote)


def _early_error(text: str) -> FlashError | None:
    """What worker.engine.serve wrote before vLLM ran, whose log may hold such lines of others."""
    if STARTED in text or "Traceback (" in text:
        return None
    for line in reversed(text.splitlines()[-5:]):
        with suppress(ValueError, KeyError, TypeError):
            response = cast(Json, json.loads(line))
            if response["code"] in CODES:
                return FlashError.from_dict(response)
    return None


def _answers(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/health").is_success
    return False


def _is_alone(client: httpx.Client) -> bool:
    """Whether the supervisor and all users have been silent for long. A server that hangs is the
    supervisor's concern, while there is one.
    """
    with suppress(httpx.TransportError, ValueError, KeyError):
        response = client.get("/v1/idle").json()
        return min(response["idle_s"], response["unwatched_s"]) > ALONE_S
    return False


def _pause(heartbeat: Heartbeat, seconds: float) -> None:
    if heartbeat.cancelled.wait(seconds):
        raise Cancelled


def own_addresses() -> list[str]:
    """Where this node may be reached, by IPv4. The last one serves a server on the same machine."""
    results: list[str] = []
    for addr in psutil.net_if_addrs().values():
        results += [one.address for one in addr if one.family == socket.AF_INET]
    return sorted(results, key=lambda address: ipaddress.ip_address(address).is_loopback)


def make_certificate(folder: Path, addresses: list[str]) -> str:
    """Write key.pem and certificate.pem for a server at these addresses; the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flash-mcp model server")])
    now = datetime.datetime.now(datetime.UTC)
    usage: dict[str, Any] = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    created = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of nodes may be wrong by a day.
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = created.public_bytes(serialization.Encoding.PEM).decode()
    write_private(folder / "key.pem", private.decode())
    write_private(folder / "certificate.pem", certificate)
    return certificate
