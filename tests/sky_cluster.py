"""A real API server of SkyPilot on this machine, whose only cloud is a real Slurm of two nodes.

SkyPilot is no dependency: `scripts/test-engines` installs it into .venv/engines, and takes out its
question to the internet whether there is a network. It reaches Slurm over ssh, here through an sshd
of its own. On the nodes it installs uv from the internet, and with it itself: in place of curl they
have a program that brings a uv which links .venv/engines/sky."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests import slurm, sshd
from tests.places import ROOT
from tests.ports import free_ports

SKY = Path(os.environ.get("FLASH_SKY", ROOT / ".venv/engines/sky"))  # the environment that has SkyPilot
PROGRAMS = ("curl", "rsync", *sshd.PROGRAMS)
CURL = """#!/bin/sh
case "$*" in
*astral.sh/uv*) echo 'mkdir -p "$UV_INSTALL_DIR" && cp {folder}/uv "$UV_INSTALL_DIR/uv"' ;;
*) exit 1 ;;
esac
"""
UV = """#!/bin/sh
case "$*" in
*--relocatable*) exit 1 ;;
"venv --seed "*) ln -sfn {sky} "$3" ;;
"pip list"*) exit 1 ;;
esac
"""
CONFIG = """
allowed_clouds: [slurm]
jobs:
  controller:
    consolidation_mode: true
slurm:
  cluster_configs:
    lab:
      workdir: {folder}/shared
"""


def missing() -> str:
    """Why there can be no SkyPilot here; empty if there can."""
    if reason := slurm.missing():
        return reason
    if absent := [name for name in PROGRAMS if not slurm.find(name)]:
        return f"not installed: {', '.join(absent)} (apt-get install rsync openssh-server)"
    return "" if (SKY / "bin/sky").exists() else f"scripts/test-engines installs SkyPilot: {SKY}"


class Cluster:
    """SkyPilot's API server, an sshd and a Slurm, which are children in sessions of their own."""

    def __init__(self, folder: Path, hidden: Sequence[Path] = ()) -> None:
        self.folder = folder
        for name in ("login", "shared", "home/.sky", "home/.slurm", "nobody"):
            (folder / name).mkdir(parents=True)
        self.slurm = slurm.Cluster(folder / "slurm", hidden)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.port, self.ssh_port, self.metrics_port = free_ports(3)
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = f"SetEnv SLURM_CONF={self.slurm.conf} HOME={self.folder}/login\n"
        run_sshd = sshd.configure(self.folder, self.ssh_port, environment)
        self._shield_nodes()
        self.slurm.start()
        self._write("home/.slurm/config", sshd.HOSTS, port=self.ssh_port)
        self._write("home/.sky/config.yaml", CONFIG)
        self._start(*run_sshd)
        ports = [f"--port={self.port}", f"--metrics-port={self.metrics_port}"]
        self._start(f"{SKY}/bin/python", "-u", "-m", "sky.server.server", *ports)
        slurm.wait_for(self._is_ready)

    def _shield_nodes(self) -> None:
        """What SkyPilot changes on a node: this user's own files, and programs that it fetches."""
        hosts = f"127.0.0.1 localhost {socket.gethostname()} {' '.join(slurm.NODES)}\n"
        for name, text in {"curl": CURL, "uv": UV, "bashrc": "", "hosts": hosts}.items():
            self._write(name, text, sky=SKY).chmod(0o755)
        home = Path.home()
        (home / ".ssh").mkdir(exist_ok=True)
        (home / ".bashrc").touch()
        self.slurm.bound = {
            Path(str(slurm.find("curl"))): self.folder / "curl", Path("/etc/hosts"): self.folder / "hosts",
            home / ".bashrc": self.folder / "bashrc", home / ".ssh": self.folder / "nobody",
        }  # fmt: skip

    def _write(self, name: str, text: str, **values: object) -> Path:
        path = self.folder / name
        path.write_text(text.format(folder=self.folder, **values))
        return path

    def _start(self, *command: str) -> None:
        variables = {
            "HOME": f"{self.folder}/home",
            "PATH": f"{SKY}/bin:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            # By these it decides how many processes it starts.
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "8",
            "SKYPILOT_POD_CPU_CORE_LIMIT": "2",
            "IS_SKYPILOT_SERVER": "true",
        }
        log = self.folder / f"{Path(command[0]).name}.log"
        command = ("env", f"--chdir={self.folder}", *command)
        self.daemons.append(slurm.daemon(command, variables, (), log))

    def _is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/api/health", timeout=5).is_success
        return False

    def take_nodes_away(self) -> None:
        """Cancel all jobs of Slurm, in which SkyPilot's machines live."""
        listed = subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=True)
        subprocess.run(["scancel", *listed.stdout.split()], check=True)

    def stop(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        self.slurm.stop()
        mark = f"{self.folder}/".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                known = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                # SkyPilot's processes write their titles over both, and stay in their folder.
                if mark in known or (process / "cwd").readlink() == self.folder:
                    os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def running(hidden: Sequence[Path] = ()) -> Generator[Cluster]:
    """A cluster that is ready, with SLURM_CONF set within."""
    folder = Path(tempfile.mkdtemp(prefix="sky-"))
    cluster = Cluster(folder, hidden)
    with slurm.started(cluster, folder, cluster.slurm.conf):
        yield cluster
