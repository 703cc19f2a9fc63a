"""Deployments: adapters served by vLLM's OpenAI server, one server for each base model.

The tools write rows (`request`, `request_stop`); the supervisor ticks `Deployments`, which makes
the world follow them. A server is a process group of its own on loopback. It outlives the
supervisor: whoever comes later finds it through SERVERS/NAME/server.json and the identity that its
shell wrote beside it."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from environments.settings import ServingSettings, load_settings
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.listening import free_port
from flash_mcp.protocol.paths import scratch_prefix, write_private
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment, Json
from flash_mcp.protocol.server_log import STARTED, told_error
from flash_mcp.state.serving import served_model
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.local import REGISTER_AND_EXEC
from flash_mcp.supervisor.process import wait_for
from flash_mcp.supervisor.server import ADMIN_KEY, STOP_TIMEOUT_S, Server, server_folder
from flash_mcp.supervisor.serving_health import FAILURES, Health, idle_seconds

log = logging.getLogger(__name__)

SERVER = (sys.executable, "-m", "worker.engine.serve")
NO_MEMORY = (
    "out of memory|not enough memory|no available memory|available KV cache memory"
    "|desired GPU memory|MemoryError"
)
START_TIMEOUT_S = 1800.0  # the model may have to be fetched first
RESTART_EVERY_S = 600.0
"""A server that hangs again sooner is not started again."""
LOG_TAIL_CHARACTERS = 1500


def check_port(store: Store, run_id: str, port: int) -> None:
    """FlashError(unknown_run | invalid_argument | port_taken) unless `port` can serve the run."""
    model = served_model(store, store.run(run_id))
    server = Server.find(store.base, model)
    if server and server.is_alive():
        if server.port != port:
            what = f"{model} is served on port {server.port} already"
            fix = "leave port out: all adapters of a base model share its server"
            raise FlashError("invalid_argument", what, port=port, fix=fix)
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise _port_taken(port) from error


def _port_taken(port: int) -> FlashError:
    fix = "choose another port, or leave port out for a free one"
    return FlashError("port_taken", f"port {port} cannot be listened on", port=port, fix=fix)


class Deployments:
    """Makes the servers follow the rows: a thread looks after each model, `tick` returns."""

    def __init__(self, store: Store, home: Path, *, command: Sequence[str] = SERVER) -> None:
        self.store, self.home, self.command = store, home, tuple(command)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="serving")
        self._under_way: dict[str, Future[None]] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._checks = ThreadPoolExecutor(4, thread_name_prefix="serving-health")
        self._health: dict[str, Health] = {}
        self._starting: dict[str, float] = {}
        """When the start of each model's server was first seen, by this process's own clock."""
        self._restarted: dict[str, float] = {}
        """When each model's hung server was last replaced."""

    def tick(self) -> None:
        """Look after every base model that is not being looked after."""
        for model in {row.model for row in self._live()} | self._served():
            under_way = self._under_way.get(model)
            if under_way is None or under_way.done():
                self._under_way[model] = self._pool.submit(self._guarded, model)

    def busy(self) -> bool:
        """Whether there are deployments, or servers that still have to end."""
        if any(not future.done() for future in self._under_way.values()):
            return True
        return bool(self._live() or self._served())

    def _live(self) -> list[Deployment]:
        rows = self.store.deployments(LIVE_DEPLOYMENT)
        return [row for row in rows if row.server_run is None]

    def _servers(self) -> list[Server]:
        result = (Server.read(path.parent) for path in self.home.glob("servers/*/server.json"))
        return [server for server in result if server and not server.certificate]

    def _served(self) -> set[str]:
        return {server.model for server in self._servers() if server.is_alive()}

    def _guarded(self, model: str) -> None:
        try:
            self._look_after(model)
        except Exception as error:
            log.exception("trouble with the server of %s", model)
            if isinstance(error, OSError):  # of the disk, as a rule: nobody would be told otherwise
                failure = disk_error(error, self.home)
                if not isinstance(failure, FlashError):
                    what = f"its server cannot be started: {error}"
                    fix = "correct that and call deploy again"
                    failure = FlashError("deployment_failed", what, fix=fix)
                for row in self.store.deployments(("starting",)):
                    if row.model == model and row.pid is None:
                        self._fail([row], failure)

    def _look_after(self, model: str) -> None:
        rows = [row for row in self._live() if row.model == model]
        requested = [row for row in rows if row.state != "stopping"]
        server = Server.find(self.home, model)
        for row in rows:
            if row.state == "stopping":
                if requested and server and server.is_alive():
                    server.unload(row.id)
                self._update(row, "stopping", state="stopped", pid=None)
        if not requested:
            if server:
                self._stop(server)
            return
        if server is None or not server.is_alive():
            self._replace(server, requested)
        elif any(row.lora_rank > server.lora_rank for row in requested):
            self._stop(server)
            self._start(model, requested)
        else:
            self._advance(server, requested)

    def _replace(self, dead: Server | None, deployments: list[Deployment]) -> None:
        """Fail the rows whose server died; start one for those that have had none."""
        lost = [row for row in deployments if row.pid is not None]
        if dead and lost:
            error = diagnose(dead)
            self._stop(dead)
            self._fail(lost, error)
        # One without a server.json was ended, and its successor not started: whoever was about to
        # do so died.
        if fresh := [row for row in deployments if row.pid is None or dead is None]:
            self._start(fresh[0].model, fresh)

    def _advance(self, server: Server, deployments: list[Deployment]) -> None:
        """Bring starting rows nearer to being ready; check the server of those that are."""
        starting = [row for row in deployments if row.state == "starting"]
        ready = [row for row in deployments if row.state == "ready"]
        if ready and self._has_ended(server, deployments, ready[0].id):
            return
        if not starting:
            return
        if not server.is_answering():
            since = self._starting.setdefault(server.model, time.monotonic())
            if time.monotonic() - since > START_TIMEOUT_S:
                what = f"the server did not answer within {START_TIMEOUT_S:.0f} s"
                self._stop(server)
                self._fail(deployments, diagnose(server, what))
            return
        self._starting.pop(server.model, None)
        for row in starting:
            try:
                server.load(row.id, str(row.adapter_path))
            except FlashError as error:
                server.unload(row.id)
                self._fail([row], diagnose(server, error.what, error.wrote))
            except httpx.TransportError as error:
                if not server.is_alive():
                    return  # the next tick tells why
                what = f"the adapter did not answer: {type(error).__name__}: {error}"
                self._fail([row], diagnose(server, what))
            else:
                values: Json = {"base_url": server.url, "pid": server.pid, "error": None}
                self._update(row, "starting", state="ready", **values)
                log.info("%s answers on %s", row.id, server.url)

    def _has_ended(self, server: Server, deployments: list[Deployment], ready_id: str) -> bool:
        """Whether the server hung and was replaced, or was ended because nobody used it."""
        health = self._health.setdefault(server.model, Health())
        health.look(server, ready_id, self._checks)
        if health.failures >= FAILURES:
            self._replace_hung(server, deployments)
            return True
        is_wanted = any(row.state == "starting" for row in deployments)
        if is_wanted or not self._unused(deployments, health.idle_s):
            return False
        health.idle_s = 0.0
        try:
            # A request may have come since.
            unused = self._unused(deployments, idle_seconds(server))
        except (httpx.HTTPError, ValueError, KeyError):  # the next check tells
            return False
        for row in unused:
            error = idle_error(row, idle_minutes(row, self.home))
            self._update(row, "ready", state="stopped", error=error.to_dict(), pid=None)
            server.unload(row.id)
            log.info("%s: %s", row.id, error.what)
        if len(unused) == len(deployments):
            self._stop(server)
        return bool(unused)

    def _unused(self, rows: list[Deployment], idle_s: float) -> list[Deployment]:
        """Those that end now that nobody has used their server for so long."""
        limits = [(row, idle_minutes(row, self.home)) for row in rows]
        return [row for row, minutes in limits if minutes and idle_s > 60 * minutes]

    def _replace_hung(self, server: Server, deployments: list[Deployment]) -> None:
        what = "its server stopped answering"
        log.warning("%s: %s", server.model, what)
        last = self._restarted.get(server.model)
        if last is not None and time.monotonic() - last < RESTART_EVERY_S:
            what = f"its server hung twice within {RESTART_EVERY_S / 60:.0f} minutes"
            fix = "read the log, mend the cause and call deploy again"
            self._stop(server)
            self._fail(deployments, FlashError("unresponsive", what, fix=fix, log=server.log))
            return
        self._restarted[server.model] = time.monotonic()
        error = FlashError("unresponsive", what, fix="call deploy to wait for it", log=server.log)
        for row in deployments:
            self._update(row, row.state, state="starting", error=error.to_dict(), pid=None)
        self._stop(server)
        rows = [self.store.deployment(row.id) for row in deployments]
        # Somebody may have asked for the end of one meanwhile.
        if still_wanted := [row for row in rows if row.state == "starting"]:
            self._start(server.model, still_wanted, like=server)

    def _start(
        self, model: str, deployments: list[Deployment], *, like: Server | None = None
    ) -> None:
        """`like` is a server whose port and key the new one takes over."""
        self._health.pop(model, None)
        self._starting.pop(model, None)
        server = self._prepare(model, deployments, like)
        command = [*self.command, "--model", model, "--port", str(server.port)]
        command += ["--max-lora-rank", str(server.lora_rank)]
        identity = Path(server.folder, "identity")
        for old in identity.parent.glob("identity*"):
            old.unlink()
        log.info("starting the server of %s on port %s", model, server.port)
        with Path(server.log).open("ab") as stream:
            child = self._children[model] = subprocess.Popen(
                ["/bin/sh", "-c", REGISTER_AND_EXEC, str(identity), "0", *command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "FLASH_HOME": str(self.home),
                    "VLLM_API_KEY": server.api_key,
                    "FLASH_ADMIN_KEY": server.admin_key,
                    "VLLM_RPC_BASE_PATH": server.scratch,
                },
                start_new_session=True,
            )
        wait_for(lambda: identity.exists() or child.poll() is not None, STOP_TIMEOUT_S)
        for row in deployments:
            self._update(row, row.state, state="starting", pid=child.pid)

    def _prepare(self, model: str, deployments: list[Deployment], like: Server | None) -> Server:
        """Write server.json for a new server."""
        folder, logs = server_folder(self.home, model), self.home / "logs"
        for path in (folder, logs):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        port = next((row.port for row in deployments if row.port), None)
        server = Server(
            folder=str(folder),
            model=model,
            port=like.port if like else port or free_port(),
            # No more: the CPU is slower for every rank.
            lora_rank=max(row.lora_rank for row in deployments),
            log=str(logs / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}.log"),
            api_key=like.api_key if like else secrets.token_urlsafe(24),
            scratch=tempfile.mkdtemp(prefix=scratch_prefix(str(folder.parent))),
        )
        write_private(folder / ADMIN_KEY, secrets.token_urlsafe(24))
        server.write()
        return server

    def _stop(self, server: Server) -> None:
        server.stop()
        if child := self._children.pop(server.model, None):
            child.poll()
        for folder in filter(None, (server.scratch, server.folder)):
            shutil.rmtree(folder, ignore_errors=True)

    def _fail(self, rows: list[Deployment], error: FlashError) -> None:
        for row in rows:
            self._update(row, row.state, state="failed", error=error.to_dict(), pid=None)
            log.warning("%s failed: %s", row.id, error.what)

    def _update(self, row: Deployment, expected: str, **values: Any) -> None:
        # A row that was asked to stop meanwhile stays so.
        self.store.update_deployment(row.id, expected_states=(expected,), **values)


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


def diagnose(server: Server, what: str | None = None, wrote: str = "") -> FlashError:
    """Why the server failed, from its log: its own FlashError, a known cause, or the first
    exception that it names. The log is foreign text, as is what the server `wrote`: it holds
    requests, and what chat templates raise.
    """
    text = server.log_text()
    tail = text[-LOG_TAIL_CHARACTERS:]
    if response := told_error(text):
        return response
    # What ends a server that has answered stands at the end: before are requests, whoever's.
    if STARTED in text:
        text = tail
    if re.search(r"address already in use", text, re.IGNORECASE):
        return _port_taken(server.port)
    # vLLM quotes some in its warnings.
    cause = re.search(r"(?<!`)\b(?:\w+Error|\w+Exception): .+", text)
    if what is None:
        what = "the server ended" if cause else "the server ended: its log does not say why"
        wrote = cause[0][:400] if cause else ""
    wrote = f"{wrote}\nThe end of its log:\n{tail}"
    code, fix = "deployment_failed", "read the log, correct the cause and call deploy again"
    if re.search(NO_MEMORY, text, re.IGNORECASE):
        others = "wait for the run that trains on this machine, or undeploy another model"
        code, fix = "out_of_memory", f"{others}, and call deploy again"
    return FlashError(code, what, fix=fix, wrote=wrote, log=server.log)
