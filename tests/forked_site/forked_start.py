"""As python, in a process that the tests fork (tests/forked.py).

    python tests/forked_site/forked_start.py PACKAGES -c CODE

It imports no package: it may run before the paths of packages are known."""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

WAIT_S = 500.0  # as in tests.waiting: it only ends a test that hangs
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIMITS = ("Umask", "Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")


def confinement() -> str:
    """A digest of what this process may do, and of its Python. A fork has its server's."""
    process = Path("/proc/self")
    lines = Path(process, "status").read_text().splitlines()
    state = [sys.prefix, *(line for line in lines if line.startswith(LIMITS))]
    state += [Path(process, name).read_text() for name in ("limits", "cgroup")]
    state += sorted(str(namespace.readlink()) for namespace in Path(process, "ns").iterdir())
    state += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("PYTHON"))
    return hashlib.sha256("\n".join(state).encode()).hexdigest()


def request_fork(
    packages: str, arguments: list[str], environment: dict[str, str], folder: Path | None, streams: list[int]
) -> socket.socket:
    """The link to a fork that does what `python ARGUMENTS` does, with these standard streams. It
    reads the fork's number and its exit status, 16 characters each, and the fork ends with it."""
    request = {"arguments": arguments, "environment": environment, "folder": str(folder or Path.cwd()),
               "starter": os.getpid()}  # fmt: skip
    link = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + WAIT_S
    while link.connect_ex(f"\0{os.environ['FLASH_FORKS'].split()[0]} {packages}"):
        assert time.monotonic() < deadline, "no server forks"
        time.sleep(0.01)
    socket.send_fds(link, [json.dumps(request).encode() + b"\n"], streams)
    return link


def become_fork(packages: str, arguments: list[str]) -> None:
    """Let a fork do what `python ARGUMENTS` does in the place of this process. Both end together."""
    link = request_fork(packages, arguments, dict(os.environ), None, [0, 1, 2])
    for passed_on in PASSED_ON:
        signal.signal(passed_on, lambda number, _: link.sendall(bytes([number])))
    link.recv(16, socket.MSG_WAITALL)  # its number
    code = int(link.recv(16, socket.MSG_WAITALL) or 1)
    if code < 0:
        for passed_on in PASSED_ON:
            signal.signal(passed_on, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    become_fork(sys.argv[1], [word for word in sys.argv[2:] if word not in ("-P", "-u")])
