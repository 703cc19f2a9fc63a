"""Deployments on targets: the model server of each is a run there (`Run.serves`), which the
target's reconciler starts, replaces and ends as any other. Here is what a server needs beyond
that: its keys, a way to it, the adapter, and whether it answers and is used.

worker/serving.py is the other side. The supervisor connects to one of the addresses that the node
names, or through `ssh` if the target has one."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import httpx

from environments.sandbox.kernel import die_with_parent
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import Listening, free_port
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment, Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import queue
from flash_mcp.state.removed_folders import add_removed
from flash_mcp.state.runs import REMOTE_PATIENCE_S
from flash_mcp.state.store import Store
from flash_mcp.state.targets import TargetSettings, find_target
from flash_mcp.supervisor.model_servers import idle_error, idle_minutes
from flash_mcp.supervisor.server import ADMIN_KEY, STOP_TIMEOUT_S, Server
from flash_mcp.supervisor.serving_health import EVERY_S, examine

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at a server that starts or ends."""
AGAIN_S = 5.0
"""Before the next try, if the storage did not answer."""
REACH_S = 60.0
"""A server that listens and cannot be reached for so long never will be."""
SILENT_S = 120.0
"""A server that was ready and has not answered for so long is replaced."""
PING_S = 5.0
OF_THE_PLACE = ("store_refused", "store_unreachable", "target_unreachable")
"""Errors that pass when the engine or the storage answers again."""


def keys_of(home: Path, run: Run) -> dict[str, str]:
    """The secrets of a model server: the key of its users, and that of the supervisor."""
    server = server_here(home, run)
    return {"VLLM_API_KEY": server.api_key, "FLASH_ADMIN_KEY": server.admin_key}


def server_here(home: Path, run: Run) -> Server:
    """What is known here of a run's server, made if missing: keys come before an address."""
    folder = home / "servers" / run.id
    if server := Server.read(folder):
        return server
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    server = Server(
        folder=str(folder),
        model=run.model,
        port=0,
        lora_rank=run.training.lora_rank,
        log="",
        api_key=secrets.token_urlsafe(24),
    )
    write_private(folder / ADMIN_KEY, secrets.token_urlsafe(24))
    server.write()
    return server


class RemoteServers:
    """Makes the deployments on targets follow their rows. `tick` returns at once: each is looked
    after on a thread, which may wait for what does not answer.
    """

    def __init__(self, store: Store, home: Path) -> None:
        self.store = store
        self.home = home
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="serving-remote")
        self._servers: dict[str, RemoteServer] = {}
        """By their runs."""

    def tick(self) -> None:
        """Look after every deployment that is due and not being looked after."""
        for row in self.store.deployments(LIVE_DEPLOYMENT):
            if row.server_run is None:
                continue
            if row.server_run not in self._servers:
                server = RemoteServer(self.store, self.home, row.server_run)
                self._servers[row.server_run] = server
            server = self._servers[row.server_run]
            if server.is_due(row):
                server.looking = self._pool.submit(server.look_after, row)

    def busy(self) -> bool:
        return any(server.is_looked_after() for server in self._servers.values())


class RemoteServer:
    """The way to the server of one deployment, from its first attempt to its end."""

    def __init__(self, store: Store, home: Path, name: str) -> None:
        self.store = store
        self.home = home
        self.name = name
        """The id of its run."""
        self.tunnel: subprocess.Popen[bytes] | None = None
        self.looking: Future[None] | None = None
        self._seen = ("", 0.0)
        """The deployment's state at the last look, and when to look again."""
        self._since = time.monotonic()
        """When the newest attempt began to listen, or answered last."""
        self._listened = 0
        """The newest attempt that was seen to listen."""

    def is_looked_after(self) -> bool:
        return self.looking is not None and not self.looking.done()

    def is_due(self, row: Deployment) -> bool:
        state, due = self._seen
        return not self.is_looked_after() and (state != row.state or time.monotonic() >= due)

    def look_after(self, row: Deployment) -> None:
        """Bring it nearer to what its row says."""
        pause_s = AGAIN_S
        try:
            pause_s = self._look(row)
        except Exception:
            log.exception("trouble with %s", row.id)
        self._seen = row.state, time.monotonic() + pause_s

    def _look(self, row: Deployment) -> float:
        """Seconds until the next look."""
        run = self.store.server_run(self.name)
        if row.state == "stopping":
            if self._has_ended(run):
                self._update(row, state="stopped", base_url=None)
            return LOOK_S
        try:
            return self._advance(row, run)
        except FlashError as error:
            log.warning("%s: %s", row.id, error)
            if error.code in OF_THE_PLACE:
                return AGAIN_S
            self._has_ended(run)
            self._update(row, state="failed", error=error.to_dict(), base_url=None)
            return LOOK_S

    def _advance(self, row: Deployment, run: Run) -> float:
        if run.ended:
            raise _end_of(run)
        answers = run.state == "running" and run.attempt == row.server_attempt
        if row.state == "ready" and answers:
            return self._check(row, run)
        if row.state == "ready":
            self._close_tunnel()
            self._update(row, state="starting", base_url=None, error=run.error)
        elif run.state == "running":
            self._reach(row, run)
        return LOOK_S

    def _reach(self, row: Deployment, run: Run) -> None:
        """Connect to the newest attempt once it listens."""
        folder = RunFolder(run.folder, patience_s=REMOTE_PATIENCE_S)
        response = folder.listening(run.attempt)
        if response is None:
            return
        if self._listened != run.attempt:
            self._listened, self._since = run.attempt, time.monotonic()
        listening = Listening.checked(response, server_here(self.home, run).admin_key)
        is_connected = self._connect(row, run, listening)
        if not is_connected and time.monotonic() - self._since > REACH_S:
            raise _unreachable(row, listening)

    def _connect(self, row: Deployment, run: Run, listening: Listening) -> bool:
        """Find an address that leads there, and load the adapter; whether one does."""
        for address in _allowed(find_target(self.home, row.target), listening):
            server = self._by(row, run, address, listening)
            if server is None:
                continue
            write_private(Path(server.certificate_file), listening.certificate)
            server.write()
            try:
                server.load(row.id, listening.adapter)
            except httpx.TransportError as error:
                log.warning("%s: %r", row.id, error)
                return False
            self._since = time.monotonic()
            values: dict[str, Any] = {"base_url": server.url, "server_attempt": run.attempt}
            self._update(row, state="ready", error=None, **values)
            log.info("%s answers on %s", row.id, server.url)
            return True
        return False

    def _by(self, row: Deployment, run: Run, address: str, listening: Listening) -> Server | None:
        """The server by one of its addresses, if it answers there."""
        existing = server_here(self.home, run)
        host, port = address, listening.port
        if ssh := find_target(self.home, row.target).ssh:
            host, port = "127.0.0.1", existing.port or free_port()
            self._open_tunnel(ssh, port, f"{address}:{listening.port}")
        server = replace(existing, host=host, port=port, certificate=listening.certificate)
        with suppress(httpx.TransportError):
            if server.call("/models", timeout_s=PING_S).is_success:
                return server
        return None

    def _open_tunnel(self, ssh: str, port: int, there: str) -> None:
        """Forward a port of loopback through the target's host. It ends with this process."""
        self._close_tunnel()
        options = ["-N", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes"]
        options += ["-o", f"ConnectTimeout={PING_S:.0f}", "-o", "ServerAliveInterval=15"]
        parent = os.getpid()
        self.tunnel = subprocess.Popen(
            ["ssh", *options, "-L", f"127.0.0.1:{port}:{there}", ssh],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(parent),
        )
        deadline = time.monotonic() + PING_S
        while self.tunnel.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.1)

    def _close_tunnel(self) -> None:
        if self.tunnel:
            self.tunnel.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.tunnel.wait(STOP_TIMEOUT_S)
        self.tunnel = None

    def _check(self, row: Deployment, run: Run) -> float:
        """Whether a ready server computes and is used; seconds until the next check."""
        has_tunnel = self.tunnel is not None and self.tunnel.poll() is None
        if find_target(self.home, row.target).ssh and not has_tunnel:
            self._reach(row, run)
        outcome = examine(server_here(self.home, run), row.id)
        if not outcome.answers:
            if time.monotonic() - self._since > SILENT_S:
                what = f"its server on {row.target} did not answer for {SILENT_S:.0f} s"
                error = FlashError("unresponsive", what, fix="call deploy to wait for another one")
                queue.report_error(self.store, run.id, run.attempt, error)
            return LOOK_S
        self._since = time.monotonic()
        minutes = idle_minutes(row, self.home)
        if minutes and outcome.idle_s > 60 * minutes:
            error = idle_error(row, minutes)
            self._update(row, state="stopping", error=error.to_dict(), base_url=None)
            log.info("%s: %s", row.id, error.what)
        return EVERY_S

    def _has_ended(self, run: Run) -> bool:
        """Have the run end, and delete what is here of its server; whether it has ended."""
        if not run.ended and not run.cancel_requested:
            run = queue.request_cancel(self.store, run.id, "nobody wants its server any more")
            if run.ended and run.attempt:  # between two attempts: nobody else ends it
                add_removed(self.store, run.folder, run.target)
        self._close_tunnel()
        shutil.rmtree(self.home / "servers" / run.id, ignore_errors=True)
        return run.ended is not None

    def _update(self, row: Deployment, **values: Any) -> None:
        # A row that was asked to stop meanwhile stays so.
        self.store.update_deployment(row.id, expected_states=(row.state,), **values)


def _allowed(settings: TargetSettings, listening: Listening) -> list[str]:
    """The addresses that the settings let a node name."""
    if not settings.nodes:
        return listening.addresses
    return [
        address
        for address in listening.addresses
        if any(IPv4Address(address) in network for network in settings.nodes)
    ]


def _unreachable(row: Deployment, listening: Listening) -> FlashError:
    name = row.target
    ways = f"{', '.join(listening.addresses)}, port {listening.port}"
    what = f"its server runs on a node of {name}, which cannot be reached from here: {ways}"
    fix = (
        f"name a host that reaches the nodes: ssh of {name} in targets.toml; if nodes is set "
        "there, let it hold their network; or leave target out, and the checkpoint is served on "
        "the server's machine"
    )
    return FlashError("target_refused", what, target=name, fix=fix)


def _end_of(run: Run) -> FlashError:
    """Why a server is over that nobody asked to end."""
    if run.error:
        return FlashError.from_dict(run.error)
    what = f"its server on {run.target} ended by itself: for long it heard of nobody"
    return FlashError("deployment_failed", what, fix="call deploy again")
