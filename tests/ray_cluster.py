"""A real Ray of two nodes on this machine, for tests.

Ray is no dependency: `scripts/test-engines` installs it into .venv/engines."""

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
import psutil

from tests.network import Network
from tests.places import ROOT
from tests.ports import free_ports
from tests.slurm import daemon
from tests.waiting import wait_for

RAY = Path(os.environ.get("FLASH_RAY", ROOT / ".venv/engines/ray/bin/ray"))


def missing() -> str:
    """Why there can be no Ray here; empty if there can."""
    return "" if RAY.exists() else f"there is no {RAY}: scripts/test-engines installs Ray there"


class Cluster:
    """A head and another node of one processor each, which are children in sessions of their own. On both, the
    folders `hidden` are empty."""

    def __init__(self, folder: Path, hidden: Sequence[Path] = (), network: Network | None = None) -> None:
        self.folder = folder
        self.hidden = hidden
        self.network = network
        self.host = network.address if network else "127.0.0.1"
        self.token_file = folder / "token"
        self.token_file.write_text(secrets.token_hex(32))
        self.port, dashboard, self.client_port = free_ports(3)
        self.address = f"http://{self.host}:{dashboard}"
        self.dashboard_port = dashboard
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for number, name in enumerate(("head", "other"), 1):
            self.start_node(name)
            wait_for(lambda number=number: self._has_nodes(number))
        wait_for(self._takes_jobs)

    def _takes_jobs(self) -> bool:
        """The agent that takes them comes up after the node; on a busy machine much later."""
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}"}
        with suppress(httpx.TransportError):
            job = {"entrypoint": "true"}
            taken = httpx.post(f"{self.address}/api/jobs/", json=job, headers=headers, timeout=30)
            return taken.status_code == 200
        return False

    def _has_nodes(self, number: int) -> bool:
        """A node that did not come up within Ray's 30 s is started again: the machine was busy."""
        self.mend()
        return self.alive_nodes() == number

    def start_node(self, name: str) -> None:
        """`head`, or `other`, which alone has the resource `other`."""
        own = self.network.addresses[name] if self.network and name == "other" else self.host
        options = [f"--address={self.host}:{self.port}", '--resources={"other": 1}']
        if name == "head":
            options = [f"--port={self.port}", f"--dashboard-port={self.dashboard_port}", "--head"]
            options += [f"--dashboard-host={self.host}", f"--temp-dir={self.folder}"]
            options += [f"--ray-client-server-port={self.client_port}"]
        # Without its port, 52365, the agent that takes jobs lives on and takes none: any free one.
        options += ["--dashboard-agent-listen-port=0"]
        options += [f"--node-ip-address={own}", "--num-cpus=1", "--disable-usage-stats", "--block"]
        command = [str(RAY), "start", *options]
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "FLASH_RAY_CLUSTER": str(self.folder),
        }
        log = self.folder / f"{name}.log"
        if self.network and name == "other":
            command = self.network.within(name, command)
        self.nodes[name] = daemon(command, variables, self.hidden, log)

    def daemon_of(self, name: str, program: str) -> psutil.Process:
        """A node's `raylet`, or `gcs_server` of the head. LookupError if it does not run."""
        node = psutil.Process(self.nodes[name].pid)
        for process in node.children(recursive=True):
            with suppress(psutil.Error):
                if process.name() == program:
                    return process
        raise LookupError(f"{name} has no {program}")

    def mend(self) -> None:
        """Start nodes again that have ended, as a service manager does. A new head knows nothing of the other node."""
        ended = [name for name, node in self.nodes.items() if node.poll() is not None]
        if "head" in ended and "other" in self.nodes:
            with suppress(LookupError, psutil.Error):
                self.daemon_of("other", "raylet").kill()
            self.nodes["other"].kill()
            self.nodes["other"].wait()
            ended = ["head", "other"]
        for name in ended:
            self.start_node(name)

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
def running(hidden: Sequence[Path] = (), network: Network | None = None) -> Generator[Cluster]:
    """A cluster that is ready."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: it holds sockets
    cluster = Cluster(folder, hidden, network)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
