"""A launcher that starts nothing: the smallest one that obeys the contract of launchers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher


@dataclass
class MemoryLauncher(Launcher):
    """Attempts are entries of `statuses`, which launchers may share."""

    statuses: dict[str, JobStatus] = field(default_factory=dict[str, JobStatus])

    def submit(self, launch: Launch) -> Handle:
        self.statuses.setdefault(launch.key, JobStatus("alive"))
        return Handle(launch.key, launch.key)

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        return {handle.key: self.statuses.get(handle.key, JobStatus("gone")) for handle in handles}

    def under_way(self) -> list[Handle]:
        return [Handle(key, key) for key, status in self.statuses.items() if status.state != "gone"]

    def cancel(self, handle: Handle) -> None:
        self.statuses[handle.key] = JobStatus("gone", "cancelled")
