"""A real sshd on loopback, and an ssh that finds it as the host `lab`."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests import slurm
from tests.ports import free_port

PROGRAMS = ("ssh", "ssh-keygen", "sshd")
SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
HOSTS = """
Host lab
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
"""
KNOWN = """  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
"""


def missing() -> str:
    """Why there can be no sshd here; empty if there can."""
    if absent := [name for name in PROGRAMS if not slurm.find(name)]:
        return f"not installed: {', '.join(absent)} (apt-get install openssh-server)"
    return "" if os.getuid() == 0 else "sshd needs root"


def configure(folder: Path, port: int, more: str = "") -> list[str]:
    """Make its keys and write sshd_config, with `more` lines; the command that runs it."""
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(command, check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder, port=port) + more)
    Path("/run/sshd").mkdir(exist_ok=True)
    return [str(slurm.find("sshd")), "-D", "-e", "-f", f"{folder}/sshd_config"]


@contextmanager
def running(folder: Path) -> Generator[Path]:
    """The folder for PATH whose `ssh` knows the host `lab`."""
    port = free_port()
    command = configure(folder, port)
    hosts = HOSTS.format(folder=folder, port=port) + KNOWN
    (folder / "config").write_text(hosts)
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {slurm.find("ssh")} -F {folder}/config "$@"\n')
    ssh.chmod(0o755)
    with (folder / "sshd.log").open("wb") as log:
        daemon = subprocess.Popen(command, stderr=log)
        try:
            probe = [ssh, "-o", "BatchMode=yes", "lab", "true"]
            slurm.wait_for(lambda: subprocess.run(probe, check=False).returncode == 0)
            yield folder / "bin"
        finally:
            daemon.kill()
            daemon.wait()
