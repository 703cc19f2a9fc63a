"""Ports of this machine for the servers of tests."""

import random
import socket
from contextlib import suppress

BELOW_EPHEMERAL = range(20_000, 32_000)  # and above those of Ray's workers
"""Other processes' outgoing connections get none of these ports before a test's server listens there."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    held: list[socket.socket] = []
    while len(held) < count:
        with suppress(OSError):
            held.append(socket.create_server((host, random.SystemRandom().choice(BELOW_EPHEMERAL))))
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(1, host)[0]


def is_answered(port: int) -> bool:
    """Whether a server listens on it."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0
