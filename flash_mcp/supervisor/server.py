"""A model server: vLLM's OpenAI server of one base model, as a process here or on a node."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import ssl
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import trust
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Deployment, Json
from flash_mcp.supervisor.launch.local import Record
from flash_mcp.supervisor.process import wait_for

ADMIN_KEY = "admin.key"
"""A file beside server.json. It is apart from it, for agents read server.json."""
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Server:
    """vLLM's OpenAI server of one base model. What is here stands in its server.json, which only
    its owner can read.
    """

    folder: str
    model: str
    port: int
    lora_rank: int
    log: str
    api_key: str
    scratch: str = ""
    """Where its sockets lie: short, as their paths must be."""
    host: str = "127.0.0.1"
    certificate: str = ""
    """In PEM: that of a server on a node, which is a job of a target's engine."""

    @classmethod
    def find(cls, base: Path, model: str) -> Server | None:
        """The server that was started last for `model`, running or not."""
        return cls.read(server_folder(base, model))

    @classmethod
    def read(cls, folder: Path) -> Server | None:
        try:
            response: Json = json.loads((folder / "server.json").read_text())
            response["folder"] = str(folder)  # the state directory may have moved
            return cls(**response)
        except (FileNotFoundError, ValueError, TypeError):  # none, or what a power cut left of one
            return None

    @property
    def root(self) -> str:
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def file(self) -> str:
        """Where its API key stands."""
        return f"{self.folder}/server.json"

    def write(self) -> None:
        """Into its server.json."""
        write_private(Path(self.file), json.dumps(asdict(self)))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    @property
    def admin_key(self) -> str:
        """The key that loads and unloads adapters."""
        return Path(self.folder, ADMIN_KEY).read_text()

    @property
    def trusted(self) -> ssl.SSLContext | bool:
        """What clients of httpx verify it by."""
        return trust(self.certificate) if self.certificate else True

    @property
    def certificate_file(self) -> str:
        return f"{self.folder}/certificate.pem"

    @property
    def _record(self) -> Record | None:
        return Record.read(Path(self.folder, "identity"))

    @property
    def pid(self) -> int | None:
        return self._record.pid if self._record else None

    def is_alive(self) -> bool:
        """Whether its process runs. Of a server on a node, only its deployment's row says so."""
        record = self._record
        return bool(self.certificate) or (record is not None and record.is_alive())

    def log_text(self) -> str:
        with suppress(FileNotFoundError):
            return Path(self.log).read_text(errors="replace")
        return ""

    def call(
        self, path: str, body: Json | None = None, *, key: str | None = None, timeout_s: float = 5.0
    ) -> httpx.Response:
        """GET, or POST where there is a body. Raises httpx.TransportError while nobody answers."""
        method = "GET" if body is None else "POST"
        headers = {"Authorization": f"Bearer {key or self.api_key}"}
        # Not through a proxy of the environment: the server is on loopback.
        options: Json = {"timeout": timeout_s, "verify": self.trusted, "trust_env": False}
        with httpx.Client(base_url=self.url, headers=headers, **options) as client:
            return client.request(method, path, json=body)

    def has_its_port(self) -> bool:
        """Whether this server listens on its port. Until it does, any local user may listen there:
        nobody else must be sent a key.
        """
        with suppress(psutil.Error):
            for connection in psutil.Process(self.pid or 0).net_connections("tcp"):
                if (connection.status, connection.laddr[1:]) == (psutil.CONN_LISTEN, (self.port,)):
                    return True
        return False

    def is_answering(self) -> bool:
        with suppress(httpx.TransportError):
            return self.has_its_port() and self.call("/models", timeout_s=2.0).is_success
        return False

    def load(self, deployment_id: str, adapter: str) -> None:
        """Load the adapter and let it answer once. FlashError(deployment_failed) if it does not."""
        adapters = [entry["id"] for entry in self.call("/models").json()["data"]]
        requests: dict[str, Json] = {}
        if deployment_id not in adapters:
            body = {"lora_name": deployment_id, "lora_path": adapter}
            requests["/load_lora_adapter"] = body
        messages = [{"role": "user", "content": "Hello"}]
        greeting = {"model": deployment_id, "max_tokens": 4, "messages": messages}
        requests["/chat/completions"] = greeting
        # With the supervisor's key: what users ask is recorded, if they want.
        for path, body in requests.items():
            response = self.call(path, body, key=self.admin_key, timeout_s=ANSWER_TIMEOUT_S)
            if not response.is_success:
                what = "the server refused the adapter"
                raise FlashError("deployment_failed", what, wrote=error_message(response.text))

    def unload(self, deployment_id: str) -> None:
        with suppress(httpx.TransportError):
            body = {"lora_name": deployment_id}
            self.call("/unload_lora_adapter", body, key=self.admin_key)

    def stop(self) -> None:
        """End the server, and what is left of its process group: a killed server's engine outlives
        it.

        Only the server gets SIGTERM: it ends its engine, which would leave its shared memory behind
        if it got the signal too."""
        if record := self._record:
            if record.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGTERM)
                wait_for(lambda: not _group_runs(record.pid), STOP_TIMEOUT_S)
            record.kill_group()


def _group_runs(group: int) -> bool:
    """Whether any of its processes runs."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            is_ours = os.getpgid(process.pid) == group
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def server_folder(base: Path, model: str) -> Path:
    slug = re.sub(r"[^\w.-]+", "-", model).strip("-.")[-60:]
    return base / "servers" / f"{slug}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def error_message(body: str) -> str:
    """The message of an OpenAI error body, or the body itself."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:500]


def server_of(base: Path, row: Deployment) -> Server | None:
    """The server of a deployment, running or not."""
    if row.server_run:
        return Server.read(base / "servers" / row.server_run)
    return Server.find(base, row.model)
