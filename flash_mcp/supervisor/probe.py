"""The job that proves a target: it starts on a node, uses the storage, and says what is there."""

from __future__ import annotations

import secrets
import shlex
import time
from contextlib import ExitStack
from pathlib import Path

from flash_mcp import __version__
from flash_mcp.protocol.artifacts import Artifacts
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.node_code import Order
from flash_mcp.protocol.packages import how_to_install
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.run_files import ProbeFile
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.runs import REMOTE_RETRY_S
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.base import Handle, Launch, Launcher
from flash_mcp.supervisor.targets import code_folder, node_environment, on_node

PROBE_S = 120.0
MAX_CLOCK_S = 300.0
"""A node's clock may differ by so much."""
MAX_LIST_LAG_S = 60.0
"""Lists may show so much later what another machine wrote: a folder is read again that often."""
SETUP_FIX = "correct the target's setup or python; docs/targets.md describes them"
POLL_S = 0.5
GONE_S = 10.0
"""A file may become visible so long after the job that wrote it has ended."""


def probe(name: str, settings: TargetSettings, wait_s: float = PROBE_S) -> ProbeFile:
    """Run the job; what its node says of itself.
    FlashError(target_unreachable | target_refused | store_unreachable).
    """
    key = f"probe-{secrets.token_hex(4)}"
    folder = RunFolder(settings.folder_of(key), retry_s=REMOTE_RETRY_S)
    artifacts = Artifacts(settings.storage, retry_s=REMOTE_RETRY_S)
    launcher = settings.launcher.of(settings)
    with ExitStack() as cleanup:  # whatever one of them raises, the others are called
        cleanup.callback(folder.remove)
        code: Order | None = None
        if settings.setup == "uv":
            digest = artifacts.put(code_folder(home()), key)
            cleanup.callback(artifacts.release, digest, key)
            log = f"{folder.url}/log.1"
            code = Order(archive=artifacts.url_of(digest), digest=digest, log=log)
        command = on_node(settings, ["worker.node", folder.url, "--probe"], code)
        began = time.time()
        folder.create({"time": began})
        # What it prints before it can store anything is seen where the node shares the folder.
        log = Path(folder.path("log.1")) if folder.is_local else None
        variables = node_environment(settings)
        handle = launcher.submit(Launch(key, 1, command, variables, log))
        cleanup.callback(launcher.cancel, handle)
        probed = _answer(name, folder, launcher, handle, command, wait_s)
        probed["list_lag_s"] = _list_lag_s(name, folder)
        return _checked(name, probed, time.time() - began)


def _answer(
    name: str,
    folder: RunFolder,
    launcher: Launcher,
    handle: Handle,
    command: list[str],
    wait_s: float,
) -> ProbeFile:
    deadline = time.monotonic() + wait_s
    gone_at: float | None = None
    while True:
        if result := folder.probe():
            return result
        status = launcher.poll([handle])[handle.key]
        if status.state == "gone" and gone_at is None:
            gone_at = time.monotonic()
        if gone_at is not None and time.monotonic() - gone_at > GONE_S:
            what = f"the probe of {name} ended without an answer ({status.detail})"
            if said := folder.log_tail(1):
                raise FlashError("target_refused", f"{what}: {said}", fix=SETUP_FIX)
            needs = "python must exist there, with flash-mcp, and reach the storage with its keys"
            fix = f"run this on a node: {shlex.join(command)}; {needs}"
            raise FlashError("target_refused", what, fix=fix)
        if time.monotonic() > deadline:
            what = f"the probe of {name} did not answer within {wait_s:.0f} s"
            where = status.detail or status.state
            fix = f"the engine says: {where}; wait longer with --wait-s, or correct the target"
            raise FlashError("target_unreachable", what, fix=fix)
        time.sleep(POLL_S)


def _list_lag_s(name: str, folder: RunFolder) -> float:
    """How long the storage's lists lack what the node wrote before its answer."""
    began = time.monotonic()
    while not folder.newest_epoch():
        if time.monotonic() - began > MAX_LIST_LAG_S:
            what = f"a list of {name}'s storage lacks what was there {MAX_LIST_LAG_S:.0f} s ago"
            fix = "use a store with consistent lists, or shorten the cache of that file system"
            raise FlashError("target_refused", what, fix=fix)
        time.sleep(POLL_S)
    return round(time.monotonic() - began, 1)


def _checked(name: str, probed: ProbeFile, waited_s: float) -> ProbeFile:
    if probed["version"] != __version__:
        what = f"the nodes of {name} have flash-mcp {probed['version']}; this is {__version__}"
        raise FlashError("target_refused", what, fix="install this version there")
    # Jobs may wait, so that its clock may be late by that.
    if not -MAX_CLOCK_S < probed["clock_s"] < waited_s + MAX_CLOCK_S:
        what = f"the clock of {probed['host']} is wrong, by {probed['clock_s']:.0f} s or less"
        fix = "set it by NTP: stores refuse requests of other times, and reports would be wrong"
        raise FlashError("target_refused", what, fix=fix)
    if probed["missing"]:
        what = f"the nodes of {name} lack {', '.join(probed['missing'])}"
        raise FlashError("target_refused", what, fix=f"{how_to_install(probed['missing'])} there")
    return probed
