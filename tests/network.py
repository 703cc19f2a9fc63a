"""Nodes of a rehearsal in network namespaces of their own, whose links can be cut. It needs root."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress


def missing() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "nsenter") if not shutil.which(name)]
    return f"not installed: {', '.join(absent)} (iproute2, util-linux)" if absent else ""


class Network:
    """A bridge of this machine, and a namespace for each node with one link to it."""

    def __init__(self, nodes: Sequence[str]) -> None:
        mark = secrets.token_hex(3)
        self.bridge = f"fl{mark}"
        prefix = f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(256)}"
        self.address = f"{prefix}.1"
        """Of this machine, as the nodes reach it."""
        self.addresses = {node: f"{prefix}.{2 + place}" for place, node in enumerate(nodes)}
        self._links = {node: f"{self.bridge}n{place}" for place, node in enumerate(nodes)}

    def start(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for node, link in self._links.items():
            _ip("netns", "add", link)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", link)
            _ip("link", "set", link, "master", self.bridge, "up")
            _ip("-n", link, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            for each in ("eth0", "lo"):
                _ip("-n", link, "link", "set", each, "up")

    def within(self, node: str, command: Sequence[str]) -> list[str]:
        """The command as it runs on the node."""
        return ["nsenter", f"--net=/run/netns/{self._links[node]}", *command]

    @contextmanager
    def cut(self, node: str) -> Generator[None]:
        """The node reaches nothing, and nothing reaches it."""
        _ip("link", "set", self._links[node], "down")
        try:
            yield
        finally:
            _ip("link", "set", self._links[node], "up")

    def stop(self) -> None:
        for link in self._links.values():
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", link)
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", link)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self.bridge)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def running(nodes: Sequence[str]) -> Generator[Network]:
    network = Network(nodes)
    try:
        network.start()
        yield network
    finally:
        network.stop()
