"""Ports of this machine for the servers of tests."""

import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    held = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(1, host)[0]


def is_answered(port: int) -> bool:
    """Whether a server listens on it."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0
