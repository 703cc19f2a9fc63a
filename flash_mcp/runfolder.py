"""The run folder: the whole protocol between control plane and worker, as files under one prefix.

    job.json               what to do: {"run_id", "spec", "sources", "environment_path", "model_path", ...}
    epoch/N                attempt N owns the run; made once, exclusively; the highest N is the owner
    beat.json              {"epoch", "time", "step", "phase", "progress", "host", "pid", "held_bytes",
                           "available_bytes"}, every few seconds
    metrics/STEP.json      {"step", "epoch", "time", "metrics": {name: number}}
    rollouts/STEP.jsonl    one rollout a line, keyed by (step, index)
    evals/STEP.json        {"step", "epoch", "time", "summary": {...}, "rollouts": [...]}, one rollout an attempt
    evals/STEP/EPOCH-N     attempts of an evaluation under way, one a line; gone once evals/STEP.json is there
    events/EPOCH-N.json    {"time", "epoch", "kind", "message", ...}
    log.N                  what attempt N printed
    checkpoints/STEP/      a PEFT adapter and the trainer's state, with MANIFEST.json (sha256 of every file)
    checkpoints/LATEST     {"step", "digest"}, written last
    cancel                 the control plane asks the worker to save and end
    result.json            {"state", "step", "error", ...}: the only word that ends a run

Whole files only, each replaced atomically: an object store cannot append.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import fsspec  # pyright: ignore[reportMissingTypeStubs]
import psutil

from flash_mcp.errors import FlashError

Json = dict[str, Any]


class RunFolder:
    """Reads, and the control plane's few writes. `url` is a local path or any fsspec URL."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        filesystem, root = cast("tuple[Any, str]", fsspec.core.url_to_fs(self.url))  # pyright: ignore[reportUnknownMemberType]
        self._fs: Any = filesystem
        self.root = root.rstrip("/")
        protocols: str | tuple[str, ...] = self._fs.protocol
        self.is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    # -- control plane ------------------------------------------------------------------------------------------------

    def create(self, job: Json) -> None:
        """Write job.json. Doing it again with the same job changes nothing."""
        self._write("job.json", _dump(job))

    def request_cancel(self, reason: str = "") -> None:
        self._write("cancel", _dump({"time": time.time(), "reason": reason}))

    def claim(self, epoch: int) -> RunWriter:
        """Become attempt `epoch`. FlashError(fenced) where it or a newer one was claimed before."""
        newest = self.newest_epoch()
        if newest >= epoch:
            raise FlashError("fenced", "the run belongs to another attempt", epoch=epoch, newest=newest)
        body = _dump({"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()})
        try:
            if self.is_local:
                Path(self.path("epoch")).mkdir(parents=True, exist_ok=True)
                with Path(self.path("epoch", str(epoch))).open("xb") as stream:
                    stream.write(body)
            else:
                self._fs.pipe_file(self.path("epoch", str(epoch)), body, mode="create")
        except FileExistsError as error:
            raise FlashError("fenced", "the run belongs to another attempt", epoch=epoch) from error
        return RunWriter(self, epoch)

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest_epoch(self) -> int:
        """The owner's number; 0 before the first claim."""
        return max((int(name) for name in self._names("epoch") if name.isdigit()), default=0)

    def job(self) -> Json:
        job = self.read_json("job.json")
        if job is None:
            raise FlashError("unknown_run", "the run folder has no job.json", folder=self.url)
        return job

    def beat(self) -> Json | None:
        return self.read_json("beat.json")

    def result(self) -> Json | None:
        return self.read_json("result.json")

    def is_cancelled(self) -> bool:
        return self._fs.exists(self.path("cancel"))

    def metric_steps(self) -> dict[int, str]:
        """{step: version}; the version changes when the file is written anew."""
        return self._versions("metrics", ".json")

    def metrics(self, step: int) -> Json | None:
        return self.read_json("metrics", f"{step}.json")

    def rollout_steps(self) -> dict[int, str]:
        return self._versions("rollouts", ".jsonl")

    def rollouts(self, step: int) -> list[Json]:
        text = self._read("rollouts", f"{step}.jsonl")
        # Not splitlines(): it also splits at U+2028 and others, which JSON leaves as they are within a string.
        return [json.loads(line) for line in (text or "").split("\n") if line]

    def eval_steps(self) -> dict[int, str]:
        return self._versions("evals", ".json")

    def evaluation(self, step: int) -> Json | None:
        return self.read_json("evals", f"{step}.json")

    def attempts(self, step: int) -> list[Json]:
        """What an evaluation under way has recorded so far, by whichever attempt of the run; each once, in order."""
        names = [name for name in self._names("evals", str(step)) if name[0].isdigit()]  # not one that was cut short
        texts = [self._read("evals", str(step), name) or "" for name in sorted(names)]
        rows = [json.loads(line) for text in texts for line in text.split("\n") if line]
        return [row for _, row in sorted({row["index"]: row for row in rows}.items())]

    def event_names(self) -> list[str]:
        return sorted(name for name in self._names("events") if name.endswith(".json"))

    def event(self, name: str) -> Json | None:
        return self.read_json("events", name)

    def log_tail(self, epoch: int, size_bytes: int = 8192) -> str:
        """The end of what attempt `epoch` printed; empty where nothing was."""
        try:
            size = self._fs.size(self.path(f"log.{epoch}"))
            tail: bytes = self._fs.cat_file(self.path(f"log.{epoch}"), start=max(0, size - size_bytes), end=size)
        except FileNotFoundError:
            return ""
        return tail.decode(errors="replace")

    def checkpoint_steps(self) -> list[int]:
        """Steps whose checkpoint was written whole, oldest first."""
        steps = [int(name) for name in self._names("checkpoints") if name.isdigit()]
        return sorted(step for step in steps if self._fs.exists(self.path("checkpoints", str(step), "MANIFEST.json")))

    def manifest(self, step: int) -> Json | None:
        """{"step", "epoch", "digest", "size_bytes", "files": {name: sha256}, "metrics": {...}}"""
        return self.read_json("checkpoints", str(step), "MANIFEST.json")

    def verify_checkpoint(self, step: int) -> Json:
        """The manifest, once every file was hashed; FlashError(checkpoint_corrupt | unknown_checkpoint) otherwise."""
        manifest = self.manifest(step)
        if manifest is None:
            raise FlashError(
                "unknown_checkpoint",
                "there is no checkpoint at that step",
                step=step,
                fix=f"use one of {self.checkpoint_steps()}",
            )
        for name, digest in manifest["files"].items():
            try:
                data: bytes = self._fs.cat_file(self.path("checkpoints", str(step), name))
            except FileNotFoundError:
                data = b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise FlashError(
                    "checkpoint_corrupt",
                    f"{name} does not match its checksum",
                    step=step,
                    fix="use an earlier checkpoint",
                )
        return manifest

    def newest_good_checkpoint(self) -> int | None:
        """The newest step whose files match their checksums. A damaged one is passed over for the one before it."""
        for step in reversed(self.checkpoint_steps()):
            try:
                self.verify_checkpoint(step)
            except FlashError:
                continue
            return step
        return None

    def fetch_checkpoint(self, step: int, into: Path) -> Path:
        """Copy a verified checkpoint to a local folder and return that folder; local ones are used in place."""
        self.verify_checkpoint(step)
        if self.is_local:
            return Path(self.path("checkpoints", str(step)))
        self._fs.get(self.path("checkpoints", str(step)), str(into), recursive=True)
        return into

    def read_json(self, *parts: str) -> Json | None:
        text = self._read(*parts)
        return None if text is None else cast(Json, json.loads(text))

    # -- files --------------------------------------------------------------------------------------------------------

    def _names(self, *parts: str) -> list[str]:
        try:
            listed = cast("list[str]", self._fs.ls(self.path(*parts), detail=False, refresh=True))
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in listed]

    def _versions(self, folder: str, suffix: str) -> dict[int, str]:
        try:
            listed = cast("list[Json]", self._fs.ls(self.path(folder), detail=True, refresh=True))
        except FileNotFoundError:
            return {}
        versions: dict[int, str] = {}
        for entry in listed:
            stem, dot, ending = entry["name"].rsplit("/", 1)[-1].partition(".")
            if stem.isdigit() and dot + ending == suffix:
                written = entry.get("ETag") or entry.get("mtime") or entry.get("created")
                versions[int(stem)] = f"{written}-{entry['size']}-{entry.get('ino', '')}"
        return dict(sorted(versions.items()))

    def _read(self, *parts: str) -> str | None:
        try:
            return cast(bytes, self._fs.cat_file(self.path(*parts))).decode()
        except FileNotFoundError:
            return None

    def _remove(self, *parts: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(self.path(*parts), recursive=True)

    def _write(self, name: str, body: bytes) -> None:
        if not self.is_local:
            self._fs.pipe_file(self.path(*name.split("/")), body)
            return
        target = Path(self.path(name))
        temporary = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(body)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise disk_error(error, target) from error


class RunWriter:
    """The worker's side of the folder: what attempt `epoch` may write while it is the newest."""

    def __init__(self, folder: RunFolder, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch
        self._events = self._shards = 0

    def check_owner(self) -> None:
        """FlashError(fenced) once a newer attempt has claimed the run."""
        newest = self.folder.newest_epoch()
        if newest != self.epoch:
            raise FlashError("fenced", "a newer attempt owns the run", epoch=self.epoch, newest=newest)

    def beat(self, step: int, phase: str, progress: int = 0) -> None:
        """`progress` counts what was done so far; a step or count that moves is a sign that nothing stalls.

        What the process holds of the machine's memory, and what is left, tells later why the kernel may have killed it.
        """
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        held, left = psutil.Process().memory_info().rss, psutil.virtual_memory().available
        body = {"step": step, "phase": phase, "progress": progress, **place}
        self._put("beat.json", {**body, "held_bytes": held, "available_bytes": left})

    def metrics(self, step: int, metrics: Json) -> None:
        self._put(f"metrics/{step}.json", {"step": step, "metrics": metrics})

    def rollouts(self, step: int, rollouts: Iterable[Json]) -> None:
        self.check_owner()
        body = "".join(_dump(rollout).decode() + "\n" for rollout in rollouts)
        self.folder._write(f"rollouts/{step}.jsonl", body.encode())  # pyright: ignore[reportPrivateUsage]

    def evaluation(self, step: int, summary: Json, rollouts: Sequence[Json]) -> None:
        self._put(f"evals/{step}.json", {"step": step, "summary": summary, "rollouts": list(rollouts)})
        self.folder._remove("evals", str(step))  # pyright: ignore[reportPrivateUsage]

    def attempts(self, step: int, rollouts: Sequence[Json]) -> None:
        """Keep attempts of an evaluation that goes on, for the attempt of the run that may have to finish it."""
        self.check_owner()
        body = "".join(_dump(rollout).decode() + "\n" for rollout in rollouts)
        self.folder._write(f"evals/{step}/{self.epoch:04d}-{self._shards:06d}", body.encode())  # pyright: ignore[reportPrivateUsage]
        self._shards += 1

    def event(self, kind: str, message: str, **values: Any) -> None:
        self._put(f"events/{self.epoch:04d}-{self._events:06d}.json", {"kind": kind, "message": message, **values})
        self._events += 1

    def commit_checkpoint(self, step: int, source: Path, metrics: Json) -> Json:
        """Move the files of local folder `source` in as checkpoint `step` and return its manifest.

        MANIFEST.json comes after the files and LATEST last: a checkpoint without a manifest does not exist. The same
        step written twice is the newer one.
        """
        files = {str(path.relative_to(source)): path for path in sorted(source.rglob("*")) if path.is_file()}
        digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        digest = hashlib.sha256(_dump(digests)).hexdigest()[:16]
        manifest: Json = {
            "step": step,
            "epoch": self.epoch,
            "time": time.time(),
            "digest": digest,
            "files": digests,
            "size_bytes": sum(path.stat().st_size for path in files.values()),
            "metrics": metrics,
        }
        self.check_owner()
        folder = self.folder
        try:
            if folder.is_local:
                self._put_local(Path(folder.path("checkpoints", str(step))), files, manifest)
            else:
                self._put_remote(folder.path("checkpoints", str(step)), files, manifest)
        except OSError as error:
            raise disk_error(error, source) from error
        self.check_owner()  # a zombie that wakes here must not point back to its own step
        folder._write("checkpoints/LATEST", _dump({"step": step, "digest": digest}))  # pyright: ignore[reportPrivateUsage]
        return manifest

    def _put_local(self, target: Path, files: dict[str, Path], manifest: Json) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            for name, path in files.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, staging / name)
            (staging / "MANIFEST.json").write_bytes(_dump(manifest))
            _sync_tree(staging)
            self.check_owner()
            if target.exists():
                target.rename(target.with_name(f".old-{target.name}.{uuid4().hex}"))
            staging.rename(target)
        finally:
            for stale in (*target.parent.glob(".old-*"), *target.parent.glob(".[0-9]*")):
                shutil.rmtree(stale, ignore_errors=True)

    def _put_remote(self, target: str, files: dict[str, Path], manifest: Json) -> None:
        fs = self.folder._fs  # pyright: ignore[reportPrivateUsage]
        if fs.exists(f"{target}/MANIFEST.json"):
            fs.rm(f"{target}/MANIFEST.json")
        for name, path in files.items():
            fs.put_file(str(path), f"{target}/{name}")
        self.check_owner()
        fs.pipe_file(f"{target}/MANIFEST.json", _dump(manifest))

    def commit_result(self, state: str, step: int, error: FlashError | None = None, **values: Any) -> None:
        """End the run: `state` is succeeded, failed, cancelled or (for the supervisor to retry) lost."""
        self._put("result.json", {"state": state, "step": step, "error": error.to_dict() if error else None, **values})

    def _put(self, name: str, body: Json) -> None:
        self.check_owner()
        self.folder._write(name, _dump({"epoch": self.epoch, "time": time.time(), **body}))  # pyright: ignore[reportPrivateUsage]


def disk_error(error: OSError, path: Path) -> FlashError | OSError:
    """FlashError(disk_full) where that is what happened, the error itself otherwise."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FlashError(
            "disk_full",
            "no space is left on the disk",
            path=path,
            fix="free space there, or set FLASH_HOME to a folder on another disk; the run resumes",
        )
    return error


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _dump(body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    return text.encode(errors="replace")  # lone surrogates, which an environment may write, have no UTF-8 form
