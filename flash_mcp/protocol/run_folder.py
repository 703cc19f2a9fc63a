"""The run folder: the protocol between server and worker, as files under one prefix.

    job.json               what to do: {"run_id", "spec", "sources", "environment_path", ...}
    epoch/N                attempt N owns the run, until there is epoch/N+1; created once,
                           exclusively, and never with a gap below it
    beat.json              the heartbeat, every few seconds: {"epoch", "time", "step", "steps",
                           "phase", "progress", "host", "pid", "held_bytes", "available_bytes",
                           "writes"}, the number of files written: if it has not changed, a reader
                           need not look for news
    metrics/STEP.N.json    {"step", "epoch", "time", "metrics": {name: number}}, of attempt N. The
                           newest attempt that made the step counts, here and below
    rollouts/STEP.N.jsonl  one rollout per line, keyed by (step, index)
    evals/STEP.N.json      {"step", "epoch", "time", "summary": {...}, "rollouts": [...]}, with one
                           rollout per attempt
    evals/STEP/EPOCH-N     attempts of a running evaluation, one per line; removed once
                           evals/STEP.EPOCH.json exists
    events/EPOCH-N.json    {"time", "epoch", "kind", "message", ...}
    log.N                  the output of attempt N
    checkpoints/STEP/EPOCH-N/
                           a PEFT adapter and the trainer's state, with MANIFEST.json (sha256 of
                           every file), written last: the Nth checkpoint that attempt EPOCH saved.
                           The newest one of a step counts. Only the newest good checkpoint keeps
                           optimizer.pt
    keys/N.json            the public key of attempt N, which waits for secrets
    sealed/N               the secrets for this key; removed by the attempt as soon as it opens them
    listening.N.json       where the model server of attempt N listens, if it serves a deployment
    gateway.N.json         where agents outside ask attempt N for tasks: {"ports", "key"}
    cancel                 the server asks the worker to save and end
    result.N.json          {"state", "step", "error", ...}: ends the run if no attempt came after N

A stopped attempt may resume at any point, also between its last check that it owns the run and a
write. So an attempt writes only files that name it; readers check the epoch of beat.json, which all
attempts share.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import psutil

from flash_mcp.protocol.checkpoints import SAVED, Checkpoints, saved_by
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_files import (
    MAX_ROLLOUTS_BYTES,
    MAX_SMALL_BYTES,
    AttemptLine,
    Beat,
    EvaluationFile,
    EventFile,
    FinalResult,
    GatewayFile,
    Json,
    KeyFile,
    ListeningFile,
    Manifest,
    MetricsFile,
    ProbeFile,
    RolloutLine,
    RunResult,
    number,
)
from flash_mcp.protocol.storage import RETRY_S, Storage, dump, read_of_all, this_process

STEP_FILE = re.compile(r"(?P<step>[0-9]{1,15})\.(?P<epoch>[0-9]{1,9})(?P<suffix>\.[a-z]+)")
"""STEP.N.json or STEP.N.jsonl: what attempt N wrote of a step."""
EPOCH_FILE = re.compile(r"[0-9]{1,9}-[0-9]{1,9}(\.json)?")
"""EPOCH-N, the attempts of an evaluation, or EPOCH-N.json, an event."""
STEP_FILES = ("metrics", "rollouts", "evals")
"""Folders of such files."""
LAUNCH = "FLASH_LAUNCH"
"""The variable with the number of the launch that an attempt belongs to, where an engine may start
it again: it claims a number of its own then."""


class RunFolder(Storage):
    """All reads, and the few writes of the server. RunWriter has the worker's."""

    def __init__(self, url: str | Path, *, retry_s: float = RETRY_S) -> None:
        super().__init__(url, retry_s=retry_s)
        self.checkpoints = Checkpoints(self)
        self._files: dict[tuple[str, int], str] = {}
        """The file of a step in a folder: by the newest attempt, as last listed."""

    # -- server ------------------------------------------------------------------------------------

    def create(self, job: Json) -> None:
        """Write job.json. A second call with the same job changes nothing."""
        self.write("job.json", dump(job))

    def request_cancel(self, reason: str = "") -> None:
        self.write("cancel", dump({"time": time.time(), "reason": reason}))

    def claim(self, epoch: int) -> None:
        """Let attempt `epoch` own the run. FlashError(fenced) if it or a newer one owned it."""
        newest = self.newest_epoch()
        claim: Json = {"time": time.time(), "claim": uuid4().hex, **this_process()}
        claim["launch"] = int(os.environ.get(LAUNCH, epoch))
        # Attempts that never started claimed nothing: an owner looks only for its successor.
        for missing in range(newest + 1, epoch):
            self.write_new(f"epoch/{missing}", claim)
        # The exclusive create refuses this number alone; an older attempt must not claim
        # either.
        if newest >= epoch or not self.write_new(f"epoch/{epoch}", claim):
            what = "the run belongs to another attempt"
            raise FlashError("fenced", what, epoch=epoch, newest=max(newest, epoch))

    def next_epoch(self, launch: int) -> int:
        """The number that an attempt of this launch has to claim. An engine may have started it
        before; if a later launch owns the run, it is one that is refused.
        """
        newest = self.newest_epoch()
        claim = self.read_json(f"epoch/{newest}") or {}
        if newest >= launch >= claim.get("launch", newest):
            return newest + 1
        return launch

    def reopen(self) -> int:
        """Let another attempt follow the one that ended the run; the number that it has to exceed.

        Neither the result nor a request to cancel counts any more, and no attempt that still runs
        can write.
        """
        epoch = self.newest_epoch() + 1
        self.claim(epoch)
        self.remove("cancel")
        return epoch

    def drop_superseded(self) -> None:
        """Delete what attempts that were replaced left and nobody reads."""
        self.remove_files(_superseded(list(self.sizes()), self.newest_epoch()))

    def put_probe(self, result: Json) -> None:
        """Write what a node says of itself: `flash-mcp target check` waits for it."""
        self.write("probe.json", dump(result))

    def put_sealed(self, epoch: int, sealed: bytes) -> None:
        self.write(f"sealed/{epoch}", sealed)

    def put_log(self, epoch: int, tail: bytes) -> None:
        self.write(f"log.{epoch}", tail)

    # -- reading -----------------------------------------------------------------------------------

    def newest_epoch(self) -> int:
        """The number of the owning attempt; 0 before the first claim."""
        return max((number(name) or 0 for name in self.names("epoch")), default=0)

    def job(self) -> Json:
        job = self.read_json("job.json")
        if job is None:
            what = "the run folder has no job.json"
            if damage := self.damaged.get("job.json"):
                what = f"{what} that can be read: {damage}"
            raise FlashError("unknown_run", what, folder=self.url)
        return job

    def beat(self) -> Beat | None:
        return self.read_object(Beat, "beat.json")

    def result(self) -> RunResult | None:
        """The result of the owning attempt. A result of an earlier attempt does not count."""
        newest = self.newest_epoch()
        name = f"result.{newest}.json"
        result = self.read_object(RunResult, name) if name in self.names() else None
        if result and result["epoch"] == newest:
            return result
        return None

    def offer(self, epoch: int) -> KeyFile | None:
        return self.read_object(KeyFile, f"keys/{epoch}.json")

    def listening(self, epoch: int) -> ListeningFile | None:
        return self.read_object(ListeningFile, f"listening.{epoch}.json")

    def gateway(self, epoch: int) -> GatewayFile | None:
        return self.read_object(GatewayFile, f"gateway.{epoch}.json")

    def probe(self) -> ProbeFile | None:
        return self.read_object(ProbeFile, "probe.json")

    def is_cancelled(self) -> bool:
        return self.has("cancel")

    def metric_steps(self) -> dict[int, str]:
        """{step: version}; the version changes when the file is replaced."""
        return self._versions("metrics", ".json")

    def metrics(self, step: int) -> MetricsFile | None:
        name = self._newest("metrics", step, ".json")
        return self.read_object(MetricsFile, name, max_bytes=MAX_SMALL_BYTES, step=step)

    def rollout_steps(self) -> dict[int, str]:
        return self._versions("rollouts", ".jsonl")

    def rollouts(self, step: int) -> Iterator[Json]:
        name = self._newest("rollouts", step, ".jsonl")
        return cast("Iterator[Json]", self.read_lines(RolloutLine, name))

    def eval_steps(self) -> dict[int, str]:
        return self._versions("evals", ".json")

    def evaluation(self, step: int) -> EvaluationFile | None:
        name = self._newest("evals", step, ".json")
        return self.read_object(EvaluationFile, name, max_bytes=MAX_ROLLOUTS_BYTES, step=step)

    def attempts(self, step: int) -> list[Json]:
        """The attempts that a running evaluation has recorded so far, each once and in order."""
        rows: dict[int, Json] = {}
        for name in sorted(self.names("evals", str(step))):
            if EPOCH_FILE.fullmatch(name):  # others are temporary files
                for row in self.read_lines(AttemptLine, f"evals/{step}/{name}"):
                    rows[row["index"]] = cast(Json, row)
        return [rows[index] for index in sorted(rows)]

    def event_names(self) -> list[str]:
        names = [name for name in self.names("events") if name.endswith(".json")]
        return sorted(name for name in names if EPOCH_FILE.fullmatch(name))

    def event(self, name: str) -> EventFile | None:
        return self.read_object(EventFile, f"events/{name}", max_bytes=MAX_SMALL_BYTES)

    def log_tail(self, epoch: int, size_bytes: int = 8192) -> str:
        return self.read_tail(f"log.{epoch}", size_bytes)

    def _versions(self, folder: str, suffix: str) -> dict[int, str]:
        versions: dict[int, str] = {}
        newest: dict[int, int] = {}
        for name, entry in self.entries(folder).items():
            match = STEP_FILE.fullmatch(name)
            if match is None or match["suffix"] != suffix:
                continue
            step = int(match["step"])
            epoch = int(match["epoch"])
            # An attempt that was replaced may have written last.
            if epoch < newest.get(step, 0):
                continue
            newest[step] = epoch
            # What there is of these: stores have an ETag, disks a time and an inode.
            written = entry.get("ETag") or entry.get("mtime") or entry.get("created")
            versions[step] = f"{name}-{written}-{entry['size']}-{entry.get('ino', '')}"
            self._files[folder, step] = f"{folder}/{name}"
        return dict(sorted(versions.items()))

    def _newest(self, folder: str, step: int, suffix: str) -> str:
        """That step's file by the newest attempt that was known when the folder was listed."""
        if (folder, step) not in self._files:
            self._versions(folder, suffix)
        return self._files.get((folder, step), f"{folder}/{step}{suffix}")


def final_result(folder: RunFolder) -> FinalResult | None:
    """What ends the run, if it is there: not an error that another attempt may cure."""
    result = folder.result()
    if result is None or result.get("retryable") or result["state"] == "lost":
        return None
    return cast(FinalResult, result)


def read_beats(folders: Sequence[RunFolder]) -> list[Beat | None]:
    """The heartbeats of runs in one store, all read at once. FlashError(store_unreachable)."""
    beats: list[Beat | None] = []
    for folder, body in zip(folders, read_of_all(folders, "beat.json"), strict=True):
        beat = None
        if body is not None:
            beat = folder.decode(Beat, "beat.json", body.decode(errors="replace"))
        beats.append(beat)
    return beats


def _superseded(names: Sequence[str], newest: int) -> list[str]:
    """Those files that no reader looks at: versions of a step's file that a newer attempt replaced,
    parts of an evaluation that is whole, and checkpoints that an attempt before `newest` did not
    finish.
    """
    parts_of = {name: name.split("/") for name in names}
    complete = {name.rpartition("/")[0] for name in names if name.endswith("/MANIFEST.json")}
    versions: dict[tuple[str, str], int] = {}
    for kind, *rest in parts_of.values():
        match = STEP_FILE.fullmatch(rest[0]) if len(rest) == 1 and kind in STEP_FILES else None
        if match:
            key = (kind, match["step"])
            versions[key] = max(int(match["epoch"]), versions.get(key, 0))

    def is_over(kind: str, *rest: str) -> bool:
        if kind in STEP_FILES and len(rest) == 1:
            match = STEP_FILE.fullmatch(rest[0])
            return bool(match and int(match["epoch"]) < versions[kind, match["step"]])
        if kind == "evals" and rest:
            return (kind, rest[0]) in versions
        if kind in ("keys", "sealed") and rest:
            epoch = number(rest[0].removesuffix(".json"))
            return epoch is not None and epoch < newest
        if kind != "checkpoints" or len(rest) < 3 or not SAVED.fullmatch(rest[1]):
            return False
        is_whole = "/".join((kind, *rest[:2])) in complete
        return not is_whole and saved_by(rest[1])[0] < newest

    return [name for name, parts in parts_of.items() if is_over(*parts)]


# -- what an attempt writes into its run's folder --------------------------------------------------


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

    def _claim(self) -> None:  # which a writer that only reads leaves out
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

    def recorded(self, step: int) -> list[Json]:
        """The attempts of a running evaluation that were saved so far."""
        return self.folder.attempts(step)

    def offer(self, offer: Json) -> None:
        self._write(f"keys/{self.epoch}.json", dump(offer))

    def listens(self, where: Json) -> None:
        self._write(f"listening.{self.epoch}.json", dump(where))

    def opens_gateway(self, ports: Sequence[int], key: str) -> None:
        """Say where agents outside ask this attempt for tasks: a port for each rank."""
        self._write(f"gateway.{self.epoch}.json", dump({"ports": ports, "key": key}))

    def take_sealed(self) -> bytes | None:
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
