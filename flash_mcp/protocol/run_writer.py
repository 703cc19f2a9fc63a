"""What an attempt writes into its run's folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_files import Json, Manifest
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.storage import dump, this_process


class RunWriter:
    """The writes of the worker: what attempt `epoch` may write while it owns the run."""

    def __init__(self, folder: RunFolder, epoch: int) -> None:
        """Claims the run. FlashError(fenced) if that attempt or a newer one has claimed it."""
        self.folder = folder
        self.epoch = epoch
        self._claim()
        self._events = 0
        self._saves = 0
        self._writes = 0
        self._shards = 0

    def _claim(self) -> None:
        self.folder.claim(self.epoch)

    def check_owner(self) -> None:
        """FlashError(fenced) once a newer attempt has claimed the run."""
        if self.folder.has(f"epoch/{self.epoch + 1}"):
            what = "a newer attempt owns the run"
            raise FlashError("fenced", what, epoch=self.epoch, newest=self.epoch + 1)

    def beat(self, step: int, phase: str, progress: int = 0, steps: int | None = None) -> None:
        """Write the heartbeat. `phase` is a word, after which a share may stand: "eval 40/200, 90 s
        left".

        `progress` counts finished work: while it or `step` changes, the run is not stalled. `steps`
        is the total, if only the worker knows it. The memory that the process holds, and the free
        memory, explain later why the kernel killed it."""
        body: Json = {
            "step": step,
            "phase": phase,
            "progress": progress,
            "steps": steps,
            **this_process(),
        }
        body["held_bytes"] = psutil.Process().memory_info().rss
        body["available_bytes"] = psutil.virtual_memory().available
        body["writes"] = self._writes
        self._put("beat.json", body)

    def metrics(self, step: int, metrics: Json) -> None:
        self._put(f"metrics/{step}.{self.epoch}.json", {"step": step, "metrics": metrics})

    def rollouts(self, step: int, rollouts: Iterable[Json]) -> None:
        body = b"".join(dump(rollout) + b"\n" for rollout in rollouts)
        self._write(f"rollouts/{step}.{self.epoch}.jsonl", body)

    def evaluation(self, step: int, summary: Json, rollouts: Sequence[Json]) -> None:
        body = {"step": step, "summary": summary, "rollouts": list(rollouts)}
        self._put(f"evals/{step}.{self.epoch}.json", body)
        self.folder.remove("evals", str(step))

    def attempts(self, step: int, rollouts: Sequence[Json]) -> None:
        """Save attempts of a running evaluation, for a later attempt of the run to continue."""
        body = b"".join(dump(rollout) + b"\n" for rollout in rollouts)
        self._write(f"evals/{step}/{self.epoch:04d}-{self._shards:06d}", body)
        self._shards += 1

    def offer(self, offer: Json) -> None:
        """Ask for secrets: store the attempt's public key."""
        self._write(f"keys/{self.epoch}.json", dump(offer))

    def listens(self, where: Json) -> None:
        """Say where this attempt's model server listens."""
        self._write(f"listening.{self.epoch}.json", dump(where))

    def opens_gateway(self, ports: Sequence[int], key: str) -> None:
        """Say where agents outside ask this attempt for tasks: a port for each rank."""
        self._write(f"gateway.{self.epoch}.json", dump({"ports": ports, "key": key}))

    def take_sealed(self) -> bytes | None:
        """The secrets that were sealed for this attempt, once they are there. They are removed."""
        place = self.folder.path("sealed", str(self.epoch))
        try:
            sealed = cast(bytes, self.folder.filesystem.cat_file(place))
        except FileNotFoundError:
            return None
        # Once they are read nothing may lie there for whoever reads the store later.
        self.folder.remove("sealed", str(self.epoch))
        self.folder.remove("keys", f"{self.epoch}.json")
        return sealed

    def event(self, kind: str, message: str, **values: Any) -> None:
        name = f"events/{self.epoch:04d}-{self._events:06d}.json"
        self._put(name, {"kind": kind, "message": message, **values})
        self._events += 1

    def commit_checkpoint(self, step: int, source: Path, metrics: Json) -> Manifest:
        """Save the files of local folder `source` as the newest checkpoint of `step`."""
        self.check_owner()
        self._saves += 1
        save = f"{self.epoch}-{self._saves}"
        manifest = self.folder.checkpoints.save(step, save, source, metrics, self.check_owner)
        self._writes += 1
        return manifest

    def commit_result(
        self, state: str, step: int, error: FlashError | None = None, **values: Any
    ) -> None:
        """End the run as succeeded, failed, cancelled, or lost, which the supervisor retries."""
        details = error.to_dict() if error else None
        body: Json = {"state": state, "step": step, "error": details, **values}
        self._put(f"result.{self.epoch}.json", body)

    def _put(self, name: str, body: Json) -> None:
        self._write(name, dump({"epoch": self.epoch, "time": time.time(), **body}))

    def _write(self, name: str, body: bytes) -> None:
        self.folder.write(name, body, self.check_owner)
        # The heartbeat says how many: it must not change the number itself.
        self._writes += name != "beat.json"
