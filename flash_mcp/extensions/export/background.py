"""Exports that a tool call starts and later calls find: their process outlives the call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from anyio.to_thread import run_sync

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import exports_dir
from flash_mcp.protocol.surroundings import environment_for
from flash_mcp.state.disk import check_quota, size_of
from flash_mcp.state.locks import try_lock
from flash_mcp.state.owners import caller, operator_settings
from flash_mcp.state.store import Store
from flash_mcp.tools.checkpoints import Export
from flash_mcp.tools.shared.waiting import deadline_after, wait_until

EXPORT_WAIT_S = 38.0
"""How long a call waits for its export; the export itself goes on."""


@dataclass(frozen=True)
class Exporter:
    """One checkpoint in one format; `reference` is RUN@STEP, `push_to` a hub's OWNER/NAME."""

    base: Path
    reference: str
    kind: str
    push_to: str | None

    @property
    def folder(self) -> Path:
        name = f"{self.reference}-{self.kind}".replace("@", "-")
        return exports_dir(self.base) / name

    @property
    def _name(self) -> str:
        pushed = f"-{self.push_to.replace('/', '-')}" if self.push_to else ""
        return f"{self.folder}{pushed}"

    def look(self) -> Export | None:
        """The export as it is; None if it was never made or has failed: see `failure`."""
        with self._lock() as lock:
            if not try_lock(lock):
                return Export(state="running", folder=str(self.folder))
        body = self._printed()
        if not self.folder.is_dir() or "folder" not in body:
            return None
        return Export(
            state="ready",
            folder=str(self.folder),
            pushed=body.get("pushed"),
            agreement=body.get("agreement"),
            warnings=body.get("warnings") or None,
        )

    def start(self) -> None:
        """Start it, unless it runs. It holds the lock while it runs."""
        command = [sys.executable, "-P", "-m", "flash_mcp.cli", "export", self.reference]
        command += ["--format", self.kind, "--to", str(self.folder), "--json"]
        if self.push_to:
            command += ["--push-to", self.push_to]
        with self._lock() as lock:
            if not try_lock(lock):
                return
            with Path(f"{self._name}.json").open("wb") as printed:
                # The shell ends at once, so that the export is no child of this process.
                subprocess.run(
                    ["/bin/sh", "-c", '"$@" &', "sh", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env={
                        **environment_for(caller().secrets, os.environ),
                        "FLASH_HOME": str(self.base),
                    },
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                    check=True,
                )

    def check_quota(self, store: Store, size_bytes: int) -> None:
        """FlashError(quota_exceeded) if there is no room, or another export runs."""
        if caller().is_local:
            return
        folder, stored = self.folder.parent, 0
        own = set(store.column("SELECT id FROM runs"))
        for path in folder.glob("run-*"):
            if "-".join(path.name.split("-")[:2]) not in own:
                continue
            stored += size_of(path)
            if path.suffix == ".lock" and path != Path(f"{self._name}.lock"):
                with path.open("ab") as lock:
                    if not try_lock(lock):
                        what = f"{path.stem} is being written, and an owner has one at a time"
                        fix = "call again when it is ready"
                        raise FlashError("quota_exceeded", what, fix=fix)
        limit = int(operator_settings(self.base).disk.exports_gib * 2**30)
        check_quota("exports", stored, size_bytes, limit, "exports_gib")

    def failure(self) -> FlashError:
        body = self._printed()
        if "error" in body:
            return FlashError.from_dict(body["error"])
        what = "the export ended without a result"
        return FlashError("worker_failed", what, fix="call again; flash-mcp doctor finds causes")

    def _printed(self) -> dict[str, Any]:
        """The last line that the command printed, which is JSON unless it was killed."""
        with suppress(OSError, ValueError, IndexError):
            return json.loads(Path(f"{self._name}.json").read_text().splitlines()[-1])
        return {}

    def _lock(self) -> IO[bytes]:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(f"{self._name}.lock").open("ab")


BYTES_PER_PARAMETER: dict[str, int] = {"merged": 2, "adapter": 0, "gguf-f16": 2, "gguf-q8_0": 1}
MOST_BYTES = 2
"""Per parameter, of other formats."""


async def export(
    store: Store, reference: str, kind: str, push_to: str | None, parameters: int, least_bytes: int
) -> Export:
    """The export of RUN@STEP, once it is there or after EXPORT_WAIT_S. The error of one that
    failed.
    """
    exporter = Exporter(store.base, reference, kind, push_to)
    if await run_sync(exporter.look) is None:
        weights = parameters * BYTES_PER_PARAMETER.get(kind, MOST_BYTES)
        await run_sync(exporter.check_quota, store, max(least_bytes, weights))
        await run_sync(exporter.start)
    result = await wait_until(
        exporter.look,
        lambda seen: seen is None or seen.state == "ready",
        deadline_after(EXPORT_WAIT_S),
        lambda _: (f"writing {exporter.folder.name}", None),
    )
    if result is None:
        raise exporter.failure()
    return result
