"""The targets that the supervisor knows: this machine, and those of targets.toml."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.run_folder import PATIENCE_S
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import queue
from flash_mcp.supervisor.launch.base import Launch, Launcher, Target


def open_target(base: Path, name: str) -> Target:
    """The target of that name. FlashError(unknown_target)."""
    raise FlashError("unknown_target", f"there is no target {name!r}", target=name)


class LocalTarget(Target):
    """This machine. Its attempts share the supervisor's environment, state directory and files."""

    name = LOCAL_TARGET
    patience_s = PATIENCE_S

    def __init__(self, base: Path, launcher: Launcher, worker: Sequence[str]) -> None:
        self.base = base
        self.launcher = launcher
        self.worker = tuple(worker)

    def job(self, run: Run) -> Json:
        return queue.job(run)

    def launch(self, run: Run, secrets: Mapping[str, str]) -> Launch:
        return Launch(
            run.id,
            run.attempt,
            [*self.worker, run.folder, "--attempt", str(run.attempt)],
            {**os.environ, **secrets, "FLASH_HOME": str(self.base)},
            Path(run.folder) / f"log.{run.attempt}",
        )
