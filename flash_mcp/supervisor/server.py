"""A model server: vLLM's OpenAI server of one base model, as a run here or on a target has it."""

from __future__ import annotations

import json
import logging
import secrets
import ssl
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from environments.settings import ServingSettings, load_settings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import check_port, trust
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment, Json, Run
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.serving import served_model
from flash_mcp.state.store import Store

log = logging.getLogger(__name__)
ADMIN_KEY = "admin.key"
"""A file beside server.json. It is apart from it, for agents read server.json."""
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Server:
    """vLLM's OpenAI server of one base model. What is here stands in its server.json, which only
    its owner can read.
    """

    folder: str
    model: str
    port: int
    api_key: str
    host: str = "127.0.0.1"
    certificate: str = ""
    """In PEM: that of a server on a node."""

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
        return f"{self.folder}/server.json"

    def write(self) -> None:
        write_private(Path(self.file), json.dumps(asdict(self)))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    @property
    def admin_key(self) -> str:
        return Path(self.folder, ADMIN_KEY).read_text()

    @property
    def trusted(self) -> ssl.SSLContext | bool:
        return trust(self.certificate) if self.certificate else True

    @property
    def certificate_file(self) -> str:
        return f"{self.folder}/certificate.pem"

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


def server_here(home: Path, run: Run) -> Server:
    """The record of a run's server, created if missing: keys come before an address."""
    folder = home / "servers" / run.id
    if server := Server.read(folder):
        return server
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    port = run.lineage.get("port", 0)  # on a target the node says
    server = Server(str(folder), run.model, port, api_key=secrets.token_urlsafe(24))
    write_private(folder / ADMIN_KEY, secrets.token_urlsafe(24))
    server.write()
    return server


def keys_of(home: Path, run: Run) -> dict[str, str]:
    """The secrets of a model server: the key of its users, and that of the supervisor."""
    server = server_here(home, run)
    return {"VLLM_API_KEY": server.api_key, "FLASH_ADMIN_KEY": server.admin_key}


def server_of(base: Path, row: Deployment) -> Server | None:
    if row.server_run:
        return Server.read(base / "servers" / row.server_run)
    return None


def error_message(body: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:500]


def check_serving_port(store: Store, run_id: str, port: int) -> None:
    """FlashError(unknown_run | invalid_argument | port_taken) unless `port` can serve the run."""
    model = served_model(store, store.run(run_id))
    for row in store.deployments(LIVE_DEPLOYMENT):
        server = server_of(store.base, row)
        if (row.model, row.target) == (model, LOCAL_TARGET) and server and server.port:
            if server.port != port:
                what = f"{model} is served on port {server.port} already"
                fix = "leave port out: all adapters of a base model share its server"
                raise FlashError("invalid_argument", what, port=port, fix=fix)
            return
    check_port("127.0.0.1", port)


def idle_error(row: Deployment, minutes: float) -> FlashError:
    """Why a deployment has ended that nobody used for so long."""
    what = f"it was stopped after {minutes:g} minutes without a request"
    again = f"deploy(run_id={row.run_id!r}, step={row.step}) starts it again"
    fix = f"{again}; its idle_minutes sets another limit"
    return FlashError("unknown_deployment", what, deployment=row.id, fix=fix)


def idle_minutes(row: Deployment, home: Path) -> float:
    """Minutes without a request after which the deployment ends; 0: never."""
    if row.idle_minutes is not None:
        return row.idle_minutes
    try:
        return load_settings(home).serving.idle_minutes
    except ValueError as error:  # a file that is being edited ends nobody's deployment
        log.warning("%s", error)
        return ServingSettings().idle_minutes
