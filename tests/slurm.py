"""A real Slurm of two nodes on this machine, for tests and scripts/scale.

python -m tests.slurm FOLDER COMMAND ...      # runs COMMAND with SLURM_CONF set"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tests.network import Network
from tests.ports import free_ports
from tests.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")
CONFIG = """
ClusterName=rehearsal
SlurmctldHost={host}({addresses[0]})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdTimeout=10
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr={addresses[1]} Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr={addresses[2]} Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if not find(name)]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.getuid() == 0 else "slurmd needs root"


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


class Cluster:
    """Its daemons are children in sessions of their own. On its nodes the folders `hidden` are empty, as on a
    machine that is not this one."""

    def __init__(self, folder: Path, hidden: Sequence[Path] = (), network: Network | None = None) -> None:
        self.folder = folder
        self.hidden = hidden
        self.network = network
        self.conf = folder / "slurm.conf"
        self.bound: dict[Path, Path] = {}
        """Files of this machine, and what its nodes have in their place."""
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", *NODES):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        addresses = ["127.0.0.1"] * 3
        if network:
            addresses = [network.address, *(network.addresses[name] for name in NODES)]
        text = CONFIG.format(host=host, addresses=addresses, ports=free_ports(3), user="root", folder=folder)
        self.conf.write_text(text)

    def start(self) -> None:
        munge = [f"--{name}={self.folder}/munge.{name}" for name in ("socket", "key-file")]
        munge[1] = f"--key-file={self.folder}/munge.key"
        logs = [f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munge.seed"]
        pid = f"--pid-file={self.folder}/munged.pid"
        self._start("munged", "--foreground", "--force", *munge, *logs, pid)
        wait_for(lambda: (self.folder / "munge.socket").exists())
        self.start_daemon("slurmctld")
        for node in NODES:
            self.start_daemon(node)
        wait_for(lambda: self.idle_nodes() == len(NODES))

    def start_daemon(self, name: str) -> None:
        """slurmctld, or the slurmd of a node."""
        if name == "slurmctld":
            self._start(name, "-D", "-i")
        else:
            self._start("slurmd", "-D", "-N", name, known_as=name)

    def _start(self, program: str, *arguments: str, known_as: str = "") -> None:
        command = [find(program) or program, *arguments]
        hidden = self.hidden if program == "slurmd" else ()
        bound = self.bound if program == "slurmd" else {}
        variables = {"SLURM_CONF": str(self.conf)}
        log = self.folder / "daemons.log"
        if self.network and known_as:
            command = self.network.within(known_as, command)
        self.daemons[known_as or program] = daemon(command, variables, hidden, log, bound)

    def mend(self) -> None:
        """Start daemons again that have ended, as a service manager does."""
        for name, process in self.daemons.items():
            if process.poll() is not None:
                self.start_daemon(name)

    def kill(self, name: str) -> None:
        self.daemons[name].kill()
        self.daemons[name].wait()

    def pause(self, name: str) -> None:
        self.daemons[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.daemons[name].send_signal(signal.SIGCONT)

    def idle_nodes(self) -> int:
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
        return listed.stdout.split().count("idle")

    def stop(self) -> None:
        for daemon in reversed(self.daemons.values()):
            with suppress(ProcessLookupError):
                daemon.send_signal(signal.SIGCONT)
                daemon.kill()
            daemon.wait()
        for stepd in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"SLURM_CONF={self.conf}".encode() in (stepd / "environ").read_bytes():
                    os.kill(int(stepd.name), signal.SIGKILL)


def daemon(command, variables, hidden, log, bound=None) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own. It finds the folders `hidden` empty, and other files in place of
    those that are `bound`."""
    mounts = "".join(f"mount -t tmpfs none {shlex.quote(str(p))} && " for p in hidden)
    for place, file in (bound or {}).items():
        mounts += f"mount --bind {shlex.quote(str(file))} {shlex.quote(str(place))} && "
    if mounts:
        command = ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh", *command]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


@contextmanager
def running(
    folder: Path | None = None, hidden: Sequence[Path] = (), network: Network | None = None
) -> Generator[Cluster]:
    """A cluster that is ready, with SLURM_CONF set within."""
    made = folder or Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(made, hidden, network)
    with started(cluster, made, cluster.conf):
        yield cluster


class Starts(Protocol):
    """What can be started and stopped."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def started(cluster: Starts, folder: Path, conf: Path) -> Generator[None]:
    """The cluster runs, with SLURM_CONF set within. Afterwards its folder is gone."""
    before = os.environ.get("SLURM_CONF")
    try:
        cluster.start()
        os.environ["SLURM_CONF"] = str(conf)
        yield
    finally:
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with running(Path(sys.argv[1])):
        sys.exit(subprocess.run(sys.argv[2:], check=False).returncode)
