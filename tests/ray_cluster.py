"""A real Ray of two nodes on this machine, for tests.

Ray is no dependency: `scripts/test-engines` installs it into .venv/engines."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.places import ROOT
from tests.slurm import daemon, free_ports, wait_for

RAY = Path(os.environ.get("FLASH_RAY", ROOT / ".venv/engines/ray/bin/ray"))


def missing() -> str:
    """Why there can be no Ray here; empty if there can."""
    return "" if RAY.exists() else f"there is no {RAY}: scripts/test-engines installs Ray there"


class Cluster:
    """A head and another node of one processor each, which are children in sessions of their own.
    On both, the folders `hidden` are empty.
    """

    def __init__(self, folder: Path, hidden: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.hidden = hidden
        self.token_file = folder / "token"
        self.token_file.write_text(secrets.token_hex(32))
        self.port, dashboard, self.client_port = free_ports(3)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.dashboard_port = dashboard
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        head = [f"--port={self.port}", f"--dashboard-port={self.dashboard_port}", "--head"]
        head += ["--dashboard-host=127.0.0.1", f"--ray-client-server-port={self.client_port}"]
        self._start("head", *head, f"--temp-dir={self.folder}")
        wait_for(lambda: self.alive_nodes() == 1)
        self._start("other", f"--address=127.0.0.1:{self.port}")
        wait_for(lambda: self.alive_nodes() == 2)

    def _start(self, name: str, *options: str) -> None:
        common = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--disable-usage-stats", "--block"]
        command = [str(RAY), "start", *options, *common]
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "FLASH_RAY_CLUSTER": str(self.folder),
        }
        self.nodes[name] = daemon(command, variables, self.hidden, self.folder / f"{name}.log")

    def alive_nodes(self) -> int:
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}"}
        with suppress(httpx.TransportError):
            found = httpx.get(f"{self.address}/api/v0/nodes", headers=headers, timeout=5)
            if found.status_code == 200:
                nodes = found.json()["data"]["result"]["result"]
                return [node["state"] for node in nodes].count("ALIVE")
        return 0

    def stop(self) -> None:
        mark = f"FLASH_RAY_CLUSTER={self.folder}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        for node in self.nodes.values():
            node.wait()


@contextmanager
def running(hidden: Sequence[Path] = ()) -> Generator[Cluster]:
    """A cluster that is ready."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: it holds sockets
    cluster = Cluster(folder, hidden)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
