"""Deployments: adapters that model servers serve. A server is a run (`Run.serves`), which the
reconciler of its target starts, replaces and ends as any other. Here is what it needs beyond that:
a way to it, its adapters, and whether it answers and is used.

On this machine the deployments of a base model share a server; on a target each has its own.
worker/serving.py is the other side. The supervisor connects to one of the addresses that a node
names, or through `ssh` if the target has one."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import httpx

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import Listening, free_port
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment, Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import queue
from flash_mcp.state.removal import add_removed
from flash_mcp.state.runs import REMOTE_RETRY_S
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target
from flash_mcp.supervisor.launch.base import Handle
from flash_mcp.supervisor.process import PYTHON
from flash_mcp.supervisor.server import Server, idle_error, idle_minutes, server_here

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at a server that starts or ends."""
AGAIN_S = 5.0
"""Before the next try, if the storage did not answer."""
REACH_S = 60.0
"""A server that listens and cannot be reached for so long never will be."""
SILENT_S = 120.0
"""A server that was ready and has not answered for so long is replaced."""
PING_S = 5.0
STOP_TIMEOUT_S = 5.0
OF_THE_PLACE = ("store_refused", "store_unreachable", "target_unreachable")
"""Errors that pass when the engine or the storage answers again."""
Rows = Sequence[Deployment]


class ModelServers:
    """Makes the servers follow the deployments. `tick` returns at once: each server is looked after
    on a thread, which may wait for what does not answer.
    """

    def __init__(self, store: Store, home: Path) -> None:
        self.store = store
        self.home = home
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="serving")
        self._servers: dict[str, ModelServer] = {}
        """By their runs."""

    def tick(self) -> None:
        """Look after every server that is due and not being looked after."""
        # First: a run is written together with the deployment that needs it.
        running = self.store.active_servers()
        live = self.store.deployments(LIVE_DEPLOYMENT)
        shared: list[Deployment] = []
        for row in live:
            if row.state != "stopping" and access_to(self.home, row.target).is_shared:
                shared.append(row)
        for model in {row.model for row in shared if row.server_run is None}:
            self._share(model, [row for row in shared if row.model == model])
        rows_of: dict[str, list[Deployment]] = {}
        for row in self.store.deployments(LIVE_DEPLOYMENT):
            if row.server_run:
                rows_of.setdefault(row.server_run, []).append(row)
            elif row.state == "stopping":
                self.store.update_deployment(row.id, expected_states=(row.state,), state="stopped")
        for run in running:
            if run.id not in rows_of:
                end_server(self.store, run)
        for run_id in self._servers.keys() - rows_of.keys():
            del self._servers[run_id]
        for run_id, rows in rows_of.items():
            if run_id not in self._servers:
                access = access_to(self.home, rows[0].target)
                self._servers[run_id] = ModelServer(self.store, self.home, run_id, access)
            server = self._servers[run_id]
            if server.is_due(rows):
                server.looking = self._pool.submit(server.look_after, rows)

    def _share(self, model: str, rows: Rows) -> None:
        """Give a model's deployments on this machine one server; to all of them another one if an
        adapter has a higher rank than the server takes.
        """
        fresh = [row for row in rows if row.server_run is None]
        rank = max(row.lora_rank for row in rows)
        with self.store.transaction():
            run = self.store.shared_server(model)
            if run and run.training.lora_rank >= rank:
                run_id, moved = run.id, fresh
            else:
                port = next((row.port for row in rows if row.port), 0) or free_port()
                first = {**vars(fresh[0]), "lora_rank": rank}
                run_id = queue.enqueue_server(self.store, model, first, port=port)
                moved = rows if run else fresh
            for row in moved:
                values: dict[str, Any] = {"server_run": run_id, "base_url": None}
                states = (row.state,)
                self.store.update_deployment(
                    row.id, expected_states=states, state="starting", **values
                )


def end_server(store: Store, run: Run) -> Run:
    """Have the run end, and delete what is here of its server."""
    if not run.ended and not run.cancel_requested:
        run = queue.request_cancel(store, run.id, "nobody wants its server any more")
        if run.ended and run.attempt:  # between two attempts: nobody else ends it
            add_removed(store, run)
    shutil.rmtree(store.base / "servers" / run.id, ignore_errors=True)
    return run


class ModelServer:
    """The way to one server, from its first attempt to its end."""

    def __init__(self, store: Store, home: Path, name: str, access: ServingAccess) -> None:
        self.store = store
        self.home = home
        self.name = name
        """The id of its run."""
        self.access = access
        self.tunnel: subprocess.Popen[bytes] | None = None
        self.looking: Future[None] | None = None
        self._seen: tuple[object, float] = (None, 0.0)
        """The deployments' states at the last look, and when to look again."""
        self._since = time.monotonic()
        """When the newest attempt began to listen, or answered last."""
        self._failures = 0
        """Checks that failed since then."""
        self._listened = 0
        """The newest attempt that was seen to listen."""

    def is_due(self, rows: Rows) -> bool:
        states, due = self._seen
        if self.looking and not self.looking.done():
            return False
        return states != _states(rows) or time.monotonic() >= due

    def look_after(self, rows: Rows) -> None:
        """Bring it nearer to what its deployments say."""
        pause_s = AGAIN_S
        try:
            pause_s = self._look(rows)
        except Exception:
            log.exception("trouble with %s", self.name)
        self._seen = _states(rows), time.monotonic() + pause_s

    def _look(self, rows: Rows) -> float:
        """Seconds until the next look."""
        run = self.store.server_run(self.name)
        requested = [row for row in rows if row.state != "stopping"]
        if not requested:
            self._close_tunnel()
            if end_server(self.store, run).ended:
                for row in rows:
                    self._update(row, state="stopped", base_url=None)
            return LOOK_S
        for row in rows:
            if row.state == "stopping":
                if row.base_url:
                    server_here(self.home, run).unload(row.id)
                self._update(row, state="stopped", base_url=None)
        try:
            return self._advance(requested, run)
        except FlashError as error:
            log.warning("%s: %s", self.name, error)
            if error.code in OF_THE_PLACE and not run.ended:
                return AGAIN_S
            self._close_tunnel()
            end_server(self.store, run)
            if log_file := self.access.log(run):
                error.values.setdefault("log", log_file)
            for row in requested:
                self._update(row, state="failed", error=error.to_dict(), base_url=None)
            return LOOK_S

    def _advance(self, rows: Rows, run: Run) -> float:
        if run.ended and run.error:
            raise FlashError.from_dict(run.error)
        if run.ended:  # although no deployment was stopped
            what = f"its server on {run.target} ended by itself: for long it heard of nobody"
            raise FlashError("deployment_failed", what, fix="call deploy again")
        starting: list[Deployment] = []
        ready: list[Deployment] = []
        for row in rows:
            answers = run.state == "running" and run.attempt == row.server_attempt
            if row.state == "starting":
                starting.append(row)
            elif answers:
                ready.append(row)
            else:
                self._close_tunnel()
                self._update(row, state="starting", base_url=None, error=run.error)
        if starting and run.state == "running":
            self._reach(starting, run, is_first=len(starting) == len(rows))
        pause_s = self._check(ready, run) if ready else LOOK_S
        return LOOK_S if starting else pause_s

    def _reach(self, rows: Rows, run: Run, *, is_first: bool) -> None:
        """Connect to the newest attempt once it listens. `is_first`: no other is ready."""
        folder = RunFolder(run.folder, retry_s=REMOTE_RETRY_S)
        response = folder.listening(run.attempt)
        if response is None:
            return
        if self._listened != run.attempt:
            self._listened, self._since = run.attempt, time.monotonic()
            self._failures = 0
        listening = Listening.checked(response, server_here(self.home, run).admin_key)
        for address in self.access.addresses(run, listening):
            server = self._by(run, address, listening)
            if server is None:
                continue
            write_private(Path(server.certificate_file), listening.certificate)
            server.write()
            if listening.precision:
                self.store.put_precision(run.id, listening.precision)
            try:
                for row in rows:
                    self._load(row, run, server, listening.adapter or str(row.adapter_path))
            except httpx.TransportError as error:
                log.warning("%s: %r", self.name, error)
                break
            self._since = time.monotonic()
            return
        if is_first and time.monotonic() - self._since > REACH_S:
            ways = f"{', '.join(listening.addresses)}, port {listening.port}"
            raise self.access.unreachable(ways, REACH_S)

    def _load(self, row: Deployment, run: Run, server: Server, adapter: str) -> None:
        try:
            server.load(row.id, adapter)
        except FlashError as error:
            if not self.access.is_shared:
                raise
            server.unload(row.id)
            self._update(row, state="failed", error=error.to_dict())
            return
        values: dict[str, Any] = {"base_url": server.url, "server_attempt": run.attempt}
        self._update(row, state="ready", error=None, **values)
        log.info("%s answers on %s", row.id, server.url)

    def _by(self, run: Run, address: str, listening: Listening) -> Server | None:
        """The server by one of its addresses, if it answers there."""
        existing = server_here(self.home, run)
        host, port = address, listening.port
        if ssh := self.access.ssh():
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
        tied = [*PYTHON, "flash_mcp.supervisor.tied", str(os.getpid())]
        self.tunnel = subprocess.Popen(
            [*tied, "ssh", *options, "-L", f"127.0.0.1:{port}:{there}", ssh],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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

    def _check(self, rows: Rows, run: Run) -> float:
        """Whether a ready server computes and is used; seconds until the next check."""
        has_tunnel = self.tunnel is not None and self.tunnel.poll() is None
        if self.access.ssh() and not has_tunnel:
            self._reach(rows, run, is_first=False)  # it has answered: it may do so again
        server = server_here(self.home, run)
        idle_s = examine(server, rows[0].id)
        if idle_s is None:
            self._failures += 1
            if self._failures >= FAILURES and time.monotonic() - self._since > SILENT_S:
                what = f"its server did not answer for {SILENT_S:.0f} s"
                error = FlashError("unresponsive", what, fix="call deploy to wait for another one")
                queue.report_error(self.store, run.id, run.attempt, error)
            return LOOK_S
        self._failures, self._since = 0, time.monotonic()
        for row in rows:
            minutes = idle_minutes(row, self.home)
            is_idle = minutes and idle_s > 60 * minutes
            if is_idle and idle_seconds(server) > 60 * minutes:  # a request may have come since
                error = idle_error(row, minutes)
                self._update(row, state="stopping", error=error.to_dict())
                log.info("%s: %s", row.id, error.what)
        return EVERY_S

    def _update(self, row: Deployment, **values: Any) -> None:
        # A row that was asked to stop meanwhile stays so.
        self.store.update_deployment(row.id, expected_states=(row.state,), **values)


def _states(rows: Rows) -> list[tuple[str, str]]:
    return [(row.id, row.state) for row in rows]


# -- the way to model servers: those of this machine, and those on the nodes of a target -----------


class ServingAccess:
    """The way to the servers of this machine, and what differs for those elsewhere."""

    is_shared = True
    """Whether the deployments of a base model share a server."""

    def ssh(self) -> str:
        """The host through which the nodes are reached, or ""."""
        return ""

    def addresses(self, run: Run, listening: Listening) -> list[str]:
        """The addresses that may be tried, of those that a server named."""
        return listening.addresses

    def log(self, run: Run) -> str | None:
        """The file with what the server printed, if it is on this machine."""
        return f"{run.folder}/log.{run.attempt}"

    def unreachable(self, ways: str, seconds: float) -> FlashError:
        """The error of a server that listens but could not be reached by `ways` in time."""
        what = f"its server did not answer within {seconds:.0f} s: {ways}"
        fix = "call deploy again; the machine may have too much to do, see catalog(kind='health')"
        return FlashError("unresponsive", what, fix=fix)


class TargetAccess(ServingAccess):
    """The nodes of a target. Its settings are read when they are needed: they may change."""

    is_shared = False

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.name = name

    def ssh(self) -> str:
        return find_target(self.home, self.name).ssh

    def addresses(self, run: Run, listening: Listening) -> list[str]:
        """Those that the target's settings let a node name; without such settings those that the
        engine knows of the node, which might name any.
        """
        settings = find_target(self.home, self.name)
        allowed: Sequence[IPv4Network | str] | None = settings.nodes
        if not allowed:
            allowed = settings.launcher.of(settings).addresses_of(Handle.of(run))
        if allowed is None:
            return listening.addresses
        networks = list(map(IPv4Network, allowed))
        reachable: list[str] = []
        for address in listening.addresses:
            if any(IPv4Address(address) in network for network in networks):
                reachable.append(address)
        return reachable

    def log(self, run: Run) -> str | None:
        return None

    def unreachable(self, ways: str, seconds: float) -> FlashError:
        name = self.name
        what = f"its server runs on a node of {name}, which cannot be reached from here: {ways}"
        fix = (
            f"name a host that reaches the nodes: ssh of {name} in targets.toml; if nodes is set "
            "there, let it hold their network; or leave target out, and the checkpoint is served "
            "on the server's machine"
        )
        return FlashError("target_refused", what, target=name, fix=fix)


def access_to(home: Path, target: str) -> ServingAccess:
    return ServingAccess() if target == LOCAL_TARGET else TargetAccess(home, target)


# -- whether a model server answers, and how long nobody has used it -------------------------------

EVERY_S = 20.0
"""Between two checks of a server that answers."""
PING_TIMEOUT_S = 10.0
"""For a route that computes nothing."""
TOKEN_TIMEOUT_S = 60.0
"""For one token of a server that computes no other tokens meanwhile."""
FAILURES = 2
"""Checks that fail in a row until a server counts as hung: a machine may have been paused during
one of them."""


def examine(server: Server, deployment_id: str) -> float | None:
    """Seconds since a user's request ended, if the server computes a token; None if it does not."""
    try:
        idle_s = idle_seconds(server)
        before = _tokens(server)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        log.warning("%s does not answer: %r", server.model, error)
        return None
    body = {"model": deployment_id, "prompt": "Hello", "max_tokens": 1}
    try:
        server.call("/completions", body, key=server.admin_key, timeout_s=TOKEN_TIMEOUT_S)
        return idle_s
    except httpx.HTTPError as error:
        log.warning("%s computes no token: %r", server.model, error)
    with suppress(httpx.HTTPError):
        if _tokens(server) > before:  # it computes others' before ours
            return 0.0
    return None


def idle_seconds(server: Server) -> float:
    """Since the last user's request ended; 0 while one is under way."""
    response = server.call("/idle", key=server.admin_key, timeout_s=PING_TIMEOUT_S)
    # A server that refuses to say counts as busy: it must not be stopped as idle.
    return float(response.json()["idle_s"]) if response.is_success else 0.0


def _tokens(server: Server) -> float:
    text = server.call(f"{server.root}/metrics", timeout_s=PING_TIMEOUT_S).text
    counts = re.findall(r"^vllm:(?:prompt|generation)_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return sum(map(float, counts))
