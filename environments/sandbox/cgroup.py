"""A memory cgroup for environment code, where one may be made: usually as root.

    group = make(limit_bytes)           # in the warden
    group.enter()                       # in its child: this process and what it starts
    group.has_killed(), group.remove()  # in the warden

The kernel counts what no process shows as its own: files in memory, socket buffers. When a group
needs more than its limit, the kernel kills a process of it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "flash-environment-"


@dataclass(frozen=True)
class Group:
    """A cgroup of version 1 or 2."""

    folder: Path
    events: str
    """The file with the number of processes that the kernel killed."""

    def enter(self) -> bool:
        """Put this process into the group. Whether that worked."""
        with suppress(OSError):
            (self.folder / "cgroup.procs").write_text("0")
            return True
        return False

    def has_killed(self) -> bool:
        with suppress(OSError):
            for line in (self.folder / self.events).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and int(count):
                    return True
        return False

    def remove(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()


def make(limit_bytes: int) -> Group | None:
    """A new group with this limit; None where none can be made."""
    for parent, limit, events in _parents():
        # Remove the groups of wardens that were killed
        for folder in parent.glob(f"{PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(PREFIX)).exists():
                with suppress(OSError):
                    folder.rmdir()
        group = Group(parent / f"{PREFIX}{os.getpid()}", events)
        with suppress(OSError):
            group.folder.mkdir()
            try:
                (group.folder / limit).write_text(str(limit_bytes))
            except OSError:
                group.remove()
            else:
                return group
    return None


def _parents() -> list[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the events), best first. Where processes are in the group
    itself, version 2 allows no groups in it; root may use the topmost one.
    """
    own: dict[str, str] = {}
    results: list[tuple[Path, str, str]] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            place = Path(mount.split()[4])
            kind, _, options = system.split(maxsplit=2)
            if kind == "cgroup" and "memory" in options.split(","):
                files = ("memory.limit_in_bytes", "memory.oom_control")
                results.append((place / own.get("memory", "/").lstrip("/"), *files))
            elif kind == "cgroup2":
                files = ("memory.max", "memory.events")
                results.append((place / own.get("", "/").lstrip("/"), *files))
                results.append((place, *files))
    return results
