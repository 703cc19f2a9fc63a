"""Deployments on targets: the model server of each is a job of the target's engine, on a node.

The job is prepared as a run's attempt is, with its own folder in the target's storage
(worker/serving.py is the other side). The keys are sealed for it. The supervisor connects to one of
the addresses that the node names, or through `ssh` if the target has one."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from environments.sandbox.kernel import die_with_parent
from flash_mcp.protocol.artifacts import delete_run
from flash_mcp.protocol.base_models import find
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import Listening, free_port
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment
from flash_mcp.protocol.run_files import Result
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.removed_folders import add_removed
from flash_mcp.state.runs import REMOTE_PATIENCE_S
from flash_mcp.state.serving import job_key, target_of
from flash_mcp.state.store import Store
from flash_mcp.state.targets import Cards
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Target
from flash_mcp.supervisor.launch.devices import Device
from flash_mcp.supervisor.launch.memory_need import WEIGHTS_SHARE, memory_need
from flash_mcp.supervisor.model_servers import (
    ADMIN_KEY,
    RESTART_EVERY_S,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Server,
    diagnose,
    idle_error,
    idle_minutes,
    server_of,
)
from flash_mcp.supervisor.serving_health import EVERY_S, examine
from flash_mcp.supervisor.targets import RemoteTarget, open_target

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at a server that starts or ends."""
AGAIN_S = 5.0
"""Before the next try, if the engine or the storage did not answer."""
REACH_S = 60.0
"""A server that listens and cannot be reached for so long never will be."""
SILENT_S = 120.0
"""A server that was ready and has not answered for so long is replaced."""
GONE_S = 10.0
"""A file may become visible so long after the job that wrote it has ended."""
LEAVE_S = 20.0
"""What a job may take to end before its folder is deleted: Ray needs some seconds."""
PING_S = 5.0
OF_THE_PLACE = ("store_unreachable", "target_unreachable")
"""Errors that pass when the engine or the storage answers again."""
NO_TARGET = ("unknown_target", "targets_invalid")


class RemoteServers:
    """Makes the servers on targets follow the rows. `tick` returns at once: each deployment is
    looked after on a thread, which may wait for what does not answer.
    """

    def __init__(
        self, store: Store, home: Path, opened: Callable[[Path, str], Target] = open_target
    ) -> None:
        self.store = store
        self.home = home
        self.opened = opened
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="serving-remote")
        self._under_way: dict[str, Future[None]] = {}
        self._next: dict[str, tuple[str, float]] = {}
        """By deployment: the state that was looked at, and when to look at it again."""
        self._servers: dict[str, RemoteServer] = {}

    def tick(self) -> None:
        """Look after every deployment that is due and not being looked after."""
        for row in self.store.deployments(LIVE_DEPLOYMENT):
            if "job" not in row.data:
                continue
            under_way = self._under_way.get(row.id)
            if under_way and not under_way.done():
                continue
            state, due = self._next.get(row.id, ("", 0.0))
            if state != row.state or time.monotonic() >= due:
                self._under_way[row.id] = self._pool.submit(self._look_after, row)

    def busy(self) -> bool:
        return any(not future.done() for future in self._under_way.values())

    def _look_after(self, row: Deployment) -> None:
        pause_s = AGAIN_S
        try:
            pause_s = self._look(row)
        except Exception:
            log.exception("trouble with %s", row.id)
        self._next[row.id] = row.state, time.monotonic() + pause_s

    def _look(self, row: Deployment) -> float:
        """Seconds until the next look."""
        try:
            return self._server(row).look(row)
        except FlashError as error:
            self._meet(row, error)
            return AGAIN_S

    def _server(self, row: Deployment) -> RemoteServer:
        server = self._servers.get(row.id)
        if server is None or server.name != row.data["job"]:
            target = self.opened(self.home, target_of(row))
            assert isinstance(target, RemoteTarget)
            server = self._servers[row.id] = RemoteServer(self.store, self.home, row, target)
        return server

    def _meet(self, row: Deployment, error: FlashError) -> None:
        """Wait where the engine or the storage does not answer; else the deployment has failed."""
        log.warning("%s: %s", row.id, error)
        if error.code in OF_THE_PLACE:
            note(self.store, row, pending_reason=error.what)
            return
        state = "stopped" if row.state == "stopping" else "failed"
        values = {"state": state, "error": error.to_dict()}
        self.store.update_deployment(row.id, expected_states=(row.state,), **values)
        # If its job cannot be ended now, the target's maintenance does that.
        server = self._servers.get(row.id)
        if server and error.code not in NO_TARGET:
            with suppress(FlashError):
                server.end(row)


def note(store: Store, row: Deployment, **values: Any) -> None:
    """Set these of the row's data; others may change at the same time."""
    with store.transaction():
        newest = store.deployment(row.id)
        if newest.data.get("job") == row.data["job"]:
            store.update_deployment(row.id, data={**newest.data, **values})


def cards_for(model: str, cards: Cards | None) -> int:
    """How many of a node's cards the server takes, as `deploy` does here: 1, 2, 4 or more, until
    they hold the weights. 1 if the cards or the model's size are not known.
    """
    count = 1
    if cards is None or cards.kind != "gpu":
        return count
    device = Device("gpu", cards.name, cards.memory_gib, cards.memory_gib)
    while count * 2 <= cards.count:
        need = memory_need(find(model), device, has_engine=True, trains=False, gpus=count)
        if need is None or need.all_gib <= WEIGHTS_SHARE * cards.memory_gib:
            break
        count *= 2
    return count


class RemoteServer:
    """The server of one deployment on a target, from its first attempt to its end."""

    def __init__(self, store: Store, home: Path, row: Deployment, target: RemoteTarget) -> None:
        self.store = store
        self.home = home
        self.target = target
        self.name: str = row.data["job"]
        place = target.settings.folder_of(self.name)
        self.folder = RunFolder(place, patience_s=REMOTE_PATIENCE_S)
        self.local = home / "servers" / self.name
        """Its keys and its certificate."""
        self._tunnel: subprocess.Popen[bytes] | None = None
        self._sealed = 0
        """The attempt that was given the keys."""
        self._since = time.monotonic()
        """When the newest attempt began to run, or listened, or answered last."""
        self._gone_at: float | None = None
        self._listened = False
        self._replaced_at: float | None = None

    def look(self, row: Deployment) -> float:
        """Bring it nearer to what its row says; seconds until the next look."""
        if row.state == "stopping":
            self.end(row)
            self._update(row, state="stopped", pid=None)
            return LOOK_S
        if not row.data.get("handle"):
            self._submit(row)
            return LOOK_S
        if row.state == "starting":
            self._advance(row)
            return LOOK_S
        return self._check(row)

    def _submit(self, row: Deployment) -> None:
        """Give the newest attempt to the engine, or find it there."""
        self._keys(row)
        job = {
            "run_id": self.name,
            "model": row.model,
            "spec": {},
            "init_adapter": {"path": row.adapter_path},
            "serve": {"rank": row.data["rank"], "name": row.model},
        }
        self.folder.create(self.target.prepare(job))
        number = row.data["attempt"]
        gpus = cards_for(row.model, self.target.settings.cards)
        launch = self.target.start(self.name, number, self.folder.url, has_secrets=True, gpus=gpus)
        handle = self.target.launcher.submit(launch)
        log.info("%s: job %s of %s", row.id, handle.id, self.target.name)
        self._since = time.monotonic()
        self._gone_at, self._listened = None, False
        note(self.store, row, handle=handle.id, gpus=gpus)

    def _keys(self, row: Deployment) -> Server:
        """Its server.json, written where there is none. It is not reachable yet."""
        if server := Server.read(self.local):
            return server
        for path in (self.local, self.home / "logs"):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        server = Server(
            folder=str(self.local),
            model=row.model,
            port=0,
            lora_rank=row.data["rank"],
            log=str(self.home / "logs" / f"{self.name}.log"),
            api_key=secrets.token_urlsafe(24),
        )
        write_private(self.local / ADMIN_KEY, secrets.token_urlsafe(24))
        server.write()
        return server

    def _advance(self, row: Deployment) -> None:
        """From the engine's queue to a server that answers."""
        number = row.data["attempt"]
        if result := self._result(row):
            self._lost(row, result.get("error"), is_final=not result.get("retryable"))
            return
        hint = self._hint(row)
        if hint.state == "gone":
            self._gone_at = self._gone_at or time.monotonic()
            if time.monotonic() - self._gone_at > GONE_S:
                self._lost(row, None, hint.detail)
            return
        pending_reason = hint.detail if hint.state in ("pending", "unknown") else None
        if pending_reason != row.data.get("pending_reason"):
            note(self.store, row, pending_reason=pending_reason)
        if hint.state == "pending":
            self._since = time.monotonic()
            return
        if hint.state == "alive" and not row.data.get("holds_since"):
            note(self.store, row, holds_since=time.time())
        if self._sealed != number and (offer := self.folder.offer(number)):
            self._seal(row, number, offer)
        response = self.folder.listening(number)
        if response and not self._listened:
            self._listened, self._since = True, time.monotonic()
        waited_s = time.monotonic() - self._since
        if response:
            listening = Listening.checked(response, self._keys(row).admin_key)
            if not self._connect(row, listening) and waited_s > REACH_S:
                self._fail(row, self._unreachable(listening))
        elif waited_s > START_TIMEOUT_S:
            what = f"its server did not answer within {START_TIMEOUT_S:.0f} s"
            self._fail(row, self._diagnosed(row, what))

    def _seal(self, row: Deployment, number: int, offer: dict[str, Any]) -> None:
        server = self._keys(row)
        values = {"VLLM_API_KEY": server.api_key, "FLASH_ADMIN_KEY": server.admin_key}
        self.folder.put_sealed(number, self.target.sealed(job_key(row), offer, values))
        self._sealed = number

    def _connect(self, row: Deployment, listening: Listening) -> bool:
        """Find an address that leads there, and load the adapter; whether one does."""
        for address in listening.addresses:
            server = self._by(row, address, listening)
            if server is None:
                continue
            write_private(Path(server.certificate_file), listening.certificate)
            server.write()
            try:
                server.load(row.id, listening.adapter)
            except FlashError as error:
                self._fail(row, error)
            except httpx.TransportError as error:
                log.warning("%s: %r", row.id, error)
                return False
            else:
                self._since = time.monotonic()
                self._update(row, state="ready", base_url=server.url, error=None)
                log.info("%s answers on %s", row.id, server.url)
            return True
        return False

    def _by(self, row: Deployment, address: str, listening: Listening) -> Server | None:
        """The server by one of its addresses, if it answers there."""
        existing = self._keys(row)
        host, port = address, listening.port
        if self.target.settings.ssh:
            host, port = "127.0.0.1", existing.port or free_port()
            self._open_tunnel(port, f"{address}:{listening.port}")
        server = replace(existing, host=host, port=port, certificate=listening.certificate)
        with suppress(httpx.TransportError):
            if server.call("/models", timeout_s=PING_S).is_success:
                return server
        return None

    def _open_tunnel(self, port: int, there: str) -> None:
        """Forward a port of loopback through the target's host. It ends with this process."""
        self._close_tunnel()
        options = ["-N", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes"]
        options += ["-o", f"ConnectTimeout={PING_S:.0f}", "-o", "ServerAliveInterval=15"]
        parent = os.getpid()
        self._tunnel = subprocess.Popen(
            ["ssh", *options, "-L", f"127.0.0.1:{port}:{there}", self.target.settings.ssh],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(parent),
        )
        deadline = time.monotonic() + PING_S
        while self._tunnel.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.1)

    def _close_tunnel(self) -> None:
        if self._tunnel:
            self._tunnel.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._tunnel.wait(STOP_TIMEOUT_S)
        self._tunnel = None

    def _check(self, row: Deployment) -> float:
        """Whether a ready server computes and is used."""
        server = server_of(self.home, row)
        assert server
        if self.target.settings.ssh and (self._tunnel is None or self._tunnel.poll() is not None):
            response = self.folder.listening(row.data["attempt"])
            if response:
                self._connect(row, Listening.checked(response, server.admin_key))
        outcome = examine(server, row.id)
        if outcome.answers:
            self._since = time.monotonic()
            minutes = idle_minutes(row, self.home)
            if minutes and outcome.idle_s > 60 * minutes:
                self.end(row)
                error = idle_error(row, minutes)
                self._update(row, state="stopped", error=error.to_dict())
                log.info("%s: %s", row.id, error.what)
            return EVERY_S
        result = self._result(row)
        hint = self._hint(row)
        if result or hint.state == "gone":
            self._lost(row, result.get("error") if result else None, hint.detail)
        elif time.monotonic() - self._since > SILENT_S:
            self._lost(row, None, f"it did not answer for {SILENT_S:.0f} s")
        return LOOK_S

    def _result(self, row: Deployment) -> Result | None:
        result = self.folder.result()
        return result if result and result["epoch"] == row.data["attempt"] else None

    def _hint(self, row: Deployment) -> JobStatus:
        key = job_key(row)
        return self.target.launcher.poll([Handle(key, row.data["handle"])])[key]

    def _lost(
        self,
        row: Deployment,
        response: Mapping[str, Any] | None,
        detail: str = "",
        *,
        is_final: bool = False,
    ) -> None:
        """The attempt has ended, as nobody asked it to. Another one follows, but not at once after
        the last one, and not if the same would happen again.
        """
        what = f"its server on {self.target.name} has ended"
        error = FlashError.from_dict(response) if response else self._diagnosed(row, what, detail)
        last = self._replaced_at
        is_again = last is not None and time.monotonic() - last < RESTART_EVERY_S
        if is_final or is_again:
            self._fail(row, error)
            return
        self._replaced_at = time.monotonic()
        self._close_tunnel()
        self.target.launcher.cancel(Handle(job_key(row), row.data["handle"]))
        log.warning("%s: %s", row.id, error)
        self._gave_back(row)
        note(self.store, row, attempt=row.data["attempt"] + 1, handle=None, pending_reason=None)
        self._update(row, state="starting", base_url=None, error=error.to_dict())

    def _diagnosed(self, row: Deployment, what: str, detail: str = "") -> FlashError:
        """What its log says; a copy is kept here."""
        server = self._keys(row)
        Path(server.log).write_text(self.folder.log_tail(row.data["attempt"], 64 << 10))
        return diagnose(server, f"{what}: {detail}" if detail else what)

    def _unreachable(self, listening: Listening) -> FlashError:
        name = self.target.name
        ways = f"{', '.join(listening.addresses)}, port {listening.port}"
        what = f"its server runs on a node of {name}, which cannot be reached from here: {ways}"
        fix = (
            f"name a host that reaches the nodes: ssh of {name} in targets.toml; or leave target "
            "out, and the checkpoint is served on the server's machine"
        )
        return FlashError("target_refused", what, target=name, fix=fix)

    def _fail(self, row: Deployment, error: FlashError) -> None:
        self.end(row)
        self._update(row, state="failed", error=error.to_dict(), base_url=None)
        log.warning("%s failed: %s", row.id, error.what)

    def end(self, row: Deployment) -> None:
        """End every job of it, and delete what it has in the storage and here."""
        self._close_tunnel()
        launcher = self.target.launcher
        mine = [item for item in launcher.under_way() if item.key.startswith(f"{self.name}-")]
        if handle := row.data.get("handle"):
            mine.append(Handle(job_key(row), handle))
        for entry in {item.id: item for item in mine}.values():
            launcher.cancel(entry)
        deadline = time.monotonic() + LEAVE_S
        while any(hint.state != "gone" for hint in launcher.poll(mine).values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self._gave_back(row)
        delete_run(self.folder, REMOTE_PATIENCE_S)
        # A killed job may write something later.
        add_removed(self.store, self.folder.url, self.target.name)
        shutil.rmtree(self.local, ignore_errors=True)

    def _gave_back(self, row: Deployment) -> None:
        """Keep for how long it held its machine."""
        if since := row.data.get("holds_since"):
            held_s = row.data.get("held_s", 0.0) + time.time() - since
            note(self.store, row, holds_since=None, held_s=held_s)

    def _update(self, row: Deployment, **values: Any) -> None:
        # A row that was asked to stop meanwhile stays so.
        self.store.update_deployment(row.id, expected_states=(row.state,), **values)
