"""Close the TCP ports that an engine leaves open.

torch.distributed's gloo listens on a port for every process group, even in a world of one process,
where nobody ever connects. Any local user could: gloo asks for no key."""

from __future__ import annotations

import os
import socket
from collections.abc import Set
from pathlib import Path


def listening() -> set[int]:
    """The file descriptors of this process that listen on TCP."""
    descriptors = (int(link.name) for link in Path("/proc/self/fd").iterdir())
    return {descriptor for descriptor in descriptors if _listens(descriptor)}


def close_listening(keep: Set[int] = frozenset()) -> None:
    """Close every listening TCP socket of this process except `keep`.

    gloo keeps the numbers of its descriptors, so each stays taken, by a socket that nothing can
    reach. The kernel forgets the closed socket in gloo's epoll set.
    """
    for descriptor in listening() - keep:
        with socket.socket(socket.AF_UNIX) as unreachable:
            os.dup2(unreachable.fileno(), descriptor, inheritable=False)


def _listens(descriptor: int) -> bool:
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or closed meanwhile
        return False
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        borrowed.detach()


class PortClosing:
    """Mixed into vLLM's worker class as its `worker_extension_cls`."""

    def close_listening_ports(self) -> None:
        close_listening()
