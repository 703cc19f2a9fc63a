"""The way to model servers: those of this machine, and those on the nodes of a target."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import Listening
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.targets import find_target
from flash_mcp.supervisor.launch.base import Handle


class ServingAccess:
    """The way to the servers of this machine, and what differs for those elsewhere."""

    is_shared = True
    """Whether the deployments of a base model share a server."""

    def ssh(self) -> str:
        """The host through which the nodes are reached, or ""."""
        return ""

    def addresses(self, run: Run, listening: Listening) -> list[str]:
        """The addresses that may be tried, of those that a server named."""
        return listening.addresses

    def log(self, run: Run) -> str | None:
        """The file with what the server printed, if it is on this machine."""
        return f"{run.folder}/log.{run.attempt}"

    def unreachable(self, ways: str, seconds: float) -> FlashError:
        """The error of a server that listens but could not be reached by `ways` in time."""
        what = f"its server did not answer within {seconds:.0f} s: {ways}"
        fix = "call deploy again; the machine may have too much to do, see catalog(kind='health')"
        return FlashError("unresponsive", what, fix=fix)


class TargetAccess(ServingAccess):
    """The nodes of a target. Its settings are read when they are needed: they may change."""

    is_shared = False

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.name = name

    def ssh(self) -> str:
        return find_target(self.home, self.name).ssh

    def addresses(self, run: Run, listening: Listening) -> list[str]:
        """Those that the target's settings let a node name; without such settings those that the
        engine knows of the node, which might name any.
        """
        settings = find_target(self.home, self.name)
        allowed: Sequence[IPv4Network | str] | None = settings.nodes
        if not allowed:
            allowed = settings.launcher.of(settings).addresses_of(Handle.of(run))
        if allowed is None:
            return listening.addresses
        networks = list(map(IPv4Network, allowed))
        reachable: list[str] = []
        for address in listening.addresses:
            if any(IPv4Address(address) in network for network in networks):
                reachable.append(address)
        return reachable

    def log(self, run: Run) -> str | None:
        return None

    def unreachable(self, ways: str, seconds: float) -> FlashError:
        name = self.name
        what = f"its server runs on a node of {name}, which cannot be reached from here: {ways}"
        fix = (
            f"name a host that reaches the nodes: ssh of {name} in targets.toml; if nodes is set "
            "there, let it hold their network; or leave target out, and the checkpoint is served "
            "on the server's machine"
        )
        return FlashError("target_refused", what, target=name, fix=fix)


def access_to(home: Path, target: str) -> ServingAccess:
    return ServingAccess() if target == LOCAL_TARGET else TargetAccess(home, target)
