"""What an environment asks for in environment.toml, and the limits of one child process.

needs = Needs.from_folder(folder)    # the defaults, if the folder has no environment.toml
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from environments.settings import FILE as SETTINGS_FILE
from environments.settings import EnvironmentSettings, read_toml

FILE = "environment.toml"
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix", "/proc",
    "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm",
)  # fmt: skip
"""Where installed programs are, and what the kernel tells them: processors, memory and limits."""
PYTHON = (sys.executable, "-P", "-s", "-m")
"""Starts a module of ours with a HOME that foreign code has written to: -s ignores packages there,
whose .pth files would run outside the sandbox."""
WARDEN = (*PYTHON, "environments.process")
"""What starts a program in the sandbox: followed by our own pid, bounds and the program."""
PLAYS_OUTSIDE = "`flash-mcp gateway RUN_ID -- PROGRAM` plays them"
READABLE_VARIABLE = "FLASH_READABLE"
"""More folders that environment code may read, separated by colons: data sets too large to push."""


@dataclass(frozen=True)
class Needs:
    """What an environment asks for in environment.toml. The defaults suit most environments."""

    network: bool = False
    endpoint: bool = False
    """For an EnvironmentAgent: the model is served to it on a port of loopback."""
    gateway: bool = False
    """Its agent is a program outside, which asks a run for tasks and sends back answers."""
    memory_gib: float = 8.0  # for all its processes together
    processes: int = 512  # processes and threads, in addition to one thread for each running call
    file_gib: float = 4.0  # the size of one file
    call_timeout_s: float = 0.0
    """Seconds that one call into its code may take, if those of its caller are fewer."""
    secrets: tuple[str, ...] = ()
    """Names of the server's variables that it needs. A caller has to pass each one."""

    @classmethod
    def from_folder(cls, folder: Path) -> Needs:
        """Read the folder's environment.toml. ValueError explains a file that cannot be used."""
        return read_toml(cls, folder / FILE)

    def within(self, operator: EnvironmentSettings) -> Needs:
        """With defaults lowered to the operator's limits. ValueError if it asks for more."""
        limits = {
            "memory_gib": operator.most_memory_gib,
            "processes": operator.processes,
            "file_gib": operator.file_gib,
        }
        requests = self.requested()
        for name, most in limits.items():
            value = requests.get(name, most)
            if value > most:
                what = f"{FILE}: {name} = {value:g} is more than the {most:g} of this machine"
                where = f"under [environments] in {SETTINGS_FILE}"
                raise ValueError(f"{what}; the operator allows more with {name} {where}")
        lowered = {name: min(getattr(self, name), most) for name, most in limits.items()}
        return replace(self, **lowered)

    def requested(self) -> dict[str, Any]:
        """The values that differ from the defaults."""
        usual = asdict(Needs())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


@dataclass(frozen=True)
class Bounds:
    """The limits of one child. No rule opens what is in `hidden`, except `folder`."""

    folder: str
    scratch: str
    hidden: str
    needs: Needs = Needs()
    threads: int = 32
    system: tuple[str, ...] = SYSTEM
    readable: tuple[str, ...] = ()
    written: tuple[str, ...] = ()  # folders in `scratch`, if the code may not write to all of it
    port: int = 0  # the port of an endpoint, the only one where the code has no loopback of its own
    user: int | None = None
    """The user that the code becomes, if we are root and these folders are already that user's."""
    without_file_protection: bool = False  # run code also if `files` cannot be protected

    @property
    def writable(self) -> tuple[str, ...]:
        return self.written or (self.scratch,)

    @property
    def memory_bytes(self) -> int:
        return int(self.needs.memory_gib * 2**30)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Bounds:
        fields: dict[str, Any] = json.loads(text)
        fields["needs"] = Needs(**fields["needs"])
        return cls(**fields)


own: Bounds | None = None  # those of the sandbox that this process is in
