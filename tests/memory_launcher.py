"""A launcher that starts nothing: the smallest one that obeys the contract of launchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher


@dataclass
class MemoryLauncher(Launcher):
    """Attempts are entries of `hints`, which launchers may share."""

    hints: dict[str, JobStatus] = field(default_factory=dict[str, JobStatus])

    def submit(self, launch: Launch) -> Handle:
        self.hints.setdefault(launch.key, JobStatus("alive"))
        return Handle(launch.key, launch.key)

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        return {handle.key: self.hints.get(handle.key, JobStatus("gone")) for handle in handles}

    def under_way(self) -> list[Handle]:
        return [Handle(key, key) for key, hint in self.hints.items() if hint.state != "gone"]

    def cancel(self, handle: Handle) -> None:
        self.hints[handle.key] = JobStatus("gone", "cancelled")
