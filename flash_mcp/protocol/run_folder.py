"""The run folder: the protocol between server and worker, as files under one prefix.

    job.json               what to do: {"run_id", "spec", "sources", "environment_path", ...}
    epoch/N                attempt N owns the run; created once, exclusively; the highest N wins
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
    cancel                 the server asks the worker to save and end
    result.N.json          {"state", "step", "error", ...}: ends the run if no attempt came after N

Files are replaced whole and atomically: an object store cannot append. A stopped attempt may resume
at any point, also between its last check that it owns the run and a write. So an attempt writes
only files that name it; readers check the epoch of beat.json, which all attempts share. Earlier
versions left N out of the names of results, metrics, rollouts and evaluations. The credentials of
an object store come from its own variables (AWS_ACCESS_KEY_ID and so on), never from the folder or
its URL.
"""

# RunWriter is the other half of RunFolder and uses its private methods.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import random
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import fsspec  # pyright: ignore[reportMissingTypeStubs]
import psutil

from environments.locks import lock
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import (
    MAX_BYTES,
    MAX_ROLLOUTS_BYTES,
    AttemptLine,
    Beat,
    Damaged,
    EvaluationFile,
    EventFile,
    FinalResult,
    Manifest,
    ManifestFile,
    Metrics,
    Result,
    RolloutLine,
    Shape,
    decoded,
    read_local,
)

log = logging.getLogger(__name__)
PATIENCE_S = 600.0
READ_S = 10.0
"""A store that is reached answers within this time; uploads may be long."""
RETRY_DELAY_S = (0.1, 15.0)
READ_BYTES = 8 << 20
ADAPTER = "adapter_"
"""How the files of a checkpoint begin that serving and a warm start need."""
OPTIMIZER = "optimizer.pt"
"""The optimizer's state, twice as large as the adapter. Only the newest good checkpoint keeps it.
Without it a checkpoint is complete: whoever resumes from it starts with a fresh optimizer."""
SAVED = re.compile(r"(\d+)-(\d+)")
"""EPOCH-N, the name of a checkpoint's folder."""
STEP_FILE = re.compile(r"(?P<step>\d+)\.(?P<epoch>\d+)(?P<suffix>\.[a-z]+)")
"""STEP.N.json or STEP.N.jsonl: what attempt N wrote of a step."""
STEP_FILES = ("metrics", "rollouts", "evals")
"""Folders of such files."""


def connect(url: str, patience_s: float) -> tuple[Any, str, bool]:
    """(the file system of a path or an fsspec URL, the path there, whether it is this machine's).

    FlashError(engine_missing) if packages for the URL are missing."""
    try:
        core: Any = fsspec.core  # untyped
        # Listings are never cached: other machines write there too.
        limits = _limits(url, patience_s)
        filesystem, root = core.url_to_fs(url, use_listings_cache=False, **limits)
        if limits:
            filesystem.retries = 1  # s3fs repeats calls too
    except ImportError as error:
        fix = "install flash-mcp with the extra s3, or the fsspec package for that store"
        raise FlashError("engine_missing", f"{error}", folder=url, fix=fix) from error
    protocols: str | tuple[str, ...] = filesystem.protocol
    is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)
    patient = filesystem if is_local else _Patient(filesystem, patience_s)
    return patient, root.rstrip("/"), is_local


def _limits(url: str, patience_s: float) -> Json:
    """Options of a file system for those that have little patience: S3's client waits for minutes
    otherwise where the store says nothing, and asks for the size of each file before it reads it.
    """
    if patience_s >= PATIENCE_S or not url.startswith("s3://"):
        return {}
    times = {"connect_timeout": patience_s, "read_timeout": max(patience_s, READ_S)}
    return {"max_concurrency": 1, "config_kwargs": {**times, "retries": {"max_attempts": 0}}}


class _Look(threading.local):
    """One look at all files of a store, by the thread that looks. The heartbeat's thread asks for
    the owner at the same time, and must not take a listing for the answer.
    """

    listing: dict[str, dict[str, Json]] | None = None
    """{folder: {name: entry}}, while it counts."""


class RunFolder:
    """All reads, and the few writes of the server. `url` is a local path or any fsspec URL.

    While an object store is unreachable, each call is retried for `patience_s`; then it raises
    FlashError(store_unreachable). FlashError(engine_missing) if packages for the URL are missing.
    """

    def __init__(self, url: str | Path, *, patience_s: float = PATIENCE_S) -> None:
        self.url = str(url)
        self._fs, self.root, self.is_local = connect(self.url, patience_s)
        self.damaged: dict[str, str] = {}
        """Files that were found damaged when they were last read, and what is wrong with them."""
        self._files: dict[tuple[str, int], str] = {}
        """The file of a step in a folder: by the newest attempt, as last listed."""
        self._look = _Look()

    def path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    # -- server ------------------------------------------------------------------------------------

    def create(self, job: Json) -> None:
        """Write job.json. A second call with the same job changes nothing."""
        self._write("job.json", _dump(job))

    def request_cancel(self, reason: str = "") -> None:
        self._write("cancel", _dump({"time": time.time(), "reason": reason}))

    def claim(self, epoch: int) -> RunWriter:
        """Become attempt `epoch`. FlashError(fenced) if it or a newer one was claimed before."""
        what = "the run belongs to another attempt"
        newest = self.newest_epoch()
        if newest >= epoch:
            raise FlashError("fenced", what, epoch=epoch, newest=newest)
        claim: Json = {"time": time.time(), "claim": uuid4().hex, **_place()}
        path = self.path("epoch", str(epoch))
        try:
            if self.is_local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with Path(path).open("xb") as stream:
                    stream.write(_dump(claim))
            else:
                self._fs.pipe_file(path, _dump(claim), mode="create")
        except OSError as error:
            # A claim is retried if its response was lost, and then finds itself. The type of the
            # refusal differs between stores.
            owner = self.read_json("epoch", str(epoch)) if not self.is_local else None
            if owner is None and not isinstance(error, FileExistsError):
                raise disk_error(error, Path(self.path("epoch"))) from error
            if owner != claim:
                raise FlashError("fenced", what, epoch=epoch) from error
        return RunWriter(self, epoch)

    def reopen(self) -> int:
        """Let another attempt follow the one that ended the run; the number that it has to exceed.

        Neither the result nor a request to cancel counts any more, and no attempt that still runs
        can write.
        """
        epoch = self.newest_epoch() + 1
        self.claim(epoch)
        self._remove("cancel")
        return epoch

    # -- reading -----------------------------------------------------------------------------------

    @contextmanager
    def listed(self) -> Generator[None]:
        """Within, what an object store holds is what one listing of the whole folder shows: a
        request for each thousand files, instead of one for each question. Local disks are asked.
        """
        if self.is_local or self._look.listing is not None:
            yield
            return
        listing: dict[str, dict[str, Json]] = {}
        for name, entry in self._entries().items():
            folder, _, file = name.rpartition("/")
            listing.setdefault(folder, {})[file] = entry
            while folder:
                above, _, own = folder.rpartition("/")
                listing.setdefault(above, {})[own] = {}
                folder = above
        self._look.listing = listing
        try:
            yield
        finally:
            self._look.listing = None

    def newest_epoch(self) -> int:
        """The number of the owning attempt; 0 before the first claim."""
        return max((int(name) for name in self._names("epoch") if name.isdecimal()), default=0)

    def job(self) -> Json:
        job = self.read_json("job.json")
        if job is None:
            what = f"the run folder has no job.json{self._harm('job.json')}"
            raise FlashError("unknown_run", what, folder=self.url)
        return job

    def beat(self) -> Beat | None:
        return self._object(Beat, "beat.json")

    def result(self) -> Result | None:
        """The result of the owning attempt. A result of an earlier attempt does not count."""
        newest = self.newest_epoch()
        name = f"result.{newest}.json"
        result = self._object(Result, name) if name in self._names() else None
        return result if result and result["epoch"] == newest else None

    def put_probe(self, result: Json) -> None:
        """Write what a node says of itself: `flash-mcp target check` waits for it."""
        self._write("probe.json", _dump(result))

    def remove(self) -> None:
        """Delete the folder with all that it holds."""
        self._remove()

    def remove_checkpoint(self, step: int) -> None:
        """Delete all that was saved at that step. A checkpoint without its manifest does not exist,
        so that goes first.
        """
        names = self._find("checkpoints", str(step))
        self._remove_files([name for name in names if name.endswith("/MANIFEST.json")])
        self._remove("checkpoints", str(step))

    def drop_optimizers(self) -> int:
        """Delete the optimizer's state of every checkpoint; the bytes that it took."""
        result = self._find("checkpoints")
        states = {name: size for name, size in result.items() if name.endswith(f"/{OPTIMIZER}")}
        self._remove_files(list(states))
        return sum(states.values())

    def drop_superseded(self) -> None:
        """Delete what attempts that were replaced left and nobody reads."""
        self._remove_files(_superseded(list(self._find()), self.newest_epoch()))

    def offer(self, epoch: int) -> Json | None:
        """The public key of attempt `epoch`, while it waits for secrets."""
        return self.read_json("keys", f"{epoch}.json")

    def put_sealed(self, epoch: int, sealed: bytes) -> None:
        """Hand attempt `epoch` the secrets that it waits for."""
        self._write(f"sealed/{epoch}", sealed)

    def listening(self, epoch: int) -> Json | None:
        """Where the model server of attempt `epoch` listens, once it does."""
        return self.read_json(f"listening.{epoch}.json")

    def put_log(self, epoch: int, tail: bytes) -> None:
        """Replace the output of attempt `epoch`."""
        self._write(f"log.{epoch}", tail)

    def is_cancelled(self) -> bool:
        if self.is_local:
            return self._fs.exists(self.path("cancel"))
        return "cancel" in self._names()

    def metric_steps(self) -> dict[int, str]:
        """{step: version}; the version changes when the file is replaced."""
        return self._versions("metrics", ".json")

    def metrics(self, step: int) -> Metrics | None:
        return self._object(Metrics, self._newest("metrics", step, ".json"), step=step)

    def rollout_steps(self) -> dict[int, str]:
        return self._versions("rollouts", ".jsonl")

    def rollouts(self, step: int) -> list[Json]:
        name = self._newest("rollouts", step, ".jsonl")
        return cast("list[Json]", self._lines(RolloutLine, name))

    def eval_steps(self) -> dict[int, str]:
        return self._versions("evals", ".json")

    def evaluation(self, step: int) -> EvaluationFile | None:
        name = self._newest("evals", step, ".json")
        return self._object(EvaluationFile, name, max_bytes=MAX_ROLLOUTS_BYTES, step=step)

    def attempts(self, step: int) -> list[Json]:
        """The attempts that a running evaluation has recorded so far, each once and in order."""
        rows: dict[int, Json] = {}
        for name in sorted(self._names("evals", str(step))):
            if name[0].isdigit():  # others are temporary files
                for row in self._lines(AttemptLine, f"evals/{step}/{name}"):
                    rows[row["index"]] = cast(Json, row)
        return [rows[index] for index in sorted(rows)]

    def event_names(self) -> list[str]:
        return sorted(name for name in self._names("events") if name.endswith(".json"))

    def event(self, name: str) -> EventFile | None:
        return self._object(EventFile, f"events/{name}")

    def log_tail(self, epoch: int, size_bytes: int = 8192) -> str:
        """The end of the output of attempt `epoch`; empty if there is none that can be read."""
        try:
            path = self.path(f"log.{epoch}")
            if self.is_local:
                size = self._fs.size(path)
                tail: bytes = self._fs.cat_file(path, start=max(0, size - size_bytes), end=size)
            else:  # the wrapper on the node stores the end alone
                tail = self._fs.cat_file(path)[-size_bytes:]
        except REFUSALS:
            return ""
        return tail.decode(errors="replace")

    def checkpoint_versions(self) -> dict[int, str]:
        """{step: version} of checkpoints that may be complete. The version changes with each that
        an attempt completes.
        """
        versions: dict[int, str] = {}
        for step in sorted(int(name) for name in self._names("checkpoints") if name.isdecimal()):
            names = self._names("checkpoints", str(step))
            whole = [name for name in names if self._has_manifest(step, name)]
            if whole:
                versions[step] = ",".join(sorted(whole))
        return versions

    def _has_manifest(self, step: int, save: str) -> bool:
        is_save = SAVED.fullmatch(save) is not None
        return is_save and "MANIFEST.json" in self._names("checkpoints", str(step), save)

    def checkpoint_steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        steps = sorted(int(name) for name in self._names("checkpoints") if name.isdecimal())
        return [step for step in steps if self.manifest(step)]

    def manifest(self, step: int) -> Manifest | None:
        """The newest complete checkpoint of that step.

        Each attempt saves into folders of its own, and a complete checkpoint never changes, but for
        its optimizer's state. So an attempt that was stopped while it saved, and wakes later,
        cannot touch its successor's.
        """
        names = [name for name in self._names("checkpoints", str(step)) if SAVED.fullmatch(name)]
        for name in sorted(names, key=_saved_by, reverse=True):
            place = f"checkpoints/{step}/{name}"
            if manifest := self._object(ManifestFile, f"{place}/MANIFEST.json", step=step):
                return {**manifest, "path": self._address(place)}
        return None

    def verify_checkpoint(self, step: int) -> Manifest:
        """The manifest, if every file matches it; otherwise FlashError(checkpoint_corrupt) or
        FlashError(unknown_checkpoint).
        """
        manifest = self._manifest(step)
        place = self._within(manifest)
        _check_files(manifest, lambda name: self._digest(f"{place}/{name}"))
        return manifest

    def _manifest(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        if manifest is None:
            what = "there is no checkpoint at that step"
            fix = f"use one of {self.checkpoint_steps()}"
            raise FlashError("unknown_checkpoint", what, step=step, fix=fix)
        return manifest

    def newest_good_checkpoint(self) -> int | None:
        """The newest step whose files match their checksums."""
        for step in reversed(self.checkpoint_versions()):
            try:
                self.verify_checkpoint(step)
            except FlashError as error:
                if error.code == "store_unreachable":  # it says nothing about the checkpoint
                    raise
                continue
            return step
        return None

    def has_optimizer(self, step: int) -> bool:
        """Whether that checkpoint has the optimizer's state."""
        manifest = self.manifest(step)
        return bool(manifest and self._fs.exists(f"{self._within(manifest)}/{OPTIMIZER}"))

    def fetch_checkpoint(self, step: int, into: Path, *, whole: bool = True) -> Path:
        """The folder of a verified checkpoint: its own if it is local, else a copy beside `into`
        that is made once. Without `whole`, the copy has the adapter only.
        """
        if self.is_local:
            return Path(self.verify_checkpoint(step)["path"])
        manifest = self._manifest(step)
        if not whole:
            files = manifest["files"].items()
            adapter = {name: item for name, item in files if name.startswith(ADAPTER)}
            manifest = cast("Manifest", {**manifest, "files": adapter})
        target = into.with_name(f"{into.name}-{manifest['digest']}{'' if whole else '-adapter'}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("a") as file:
            lock(file)
            if not target.is_dir():
                part = tempfile.mkdtemp(prefix=".part-", dir=target.parent)
                try:
                    self._copy(manifest, Path(part))
                    Path(part).rename(target)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
        return target

    def _copy(self, manifest: Manifest, into: Path) -> None:
        """Copy a checkpoint's files and check them. The optimizer's state may be gone."""
        place = self._within(manifest)
        for name in manifest["files"]:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                self._fs.get_file(f"{place}/{name}", str(into / name))
        local = RunFolder(into)
        _check_files(manifest, lambda name: local._digest(str(into / name)))

    def _address(self, place: str) -> str:
        """The path or URL of a place in the folder."""
        return self.path(place) if self.is_local else f"{self.url.rstrip('/')}/{place}"

    def _within(self, manifest: Manifest) -> str:
        """Where the files of a checkpoint lie, as the file system takes it."""
        return self.path(manifest["path"].removeprefix(self._address("")))

    def read_json(self, *parts: str) -> Json | None:
        return self._object(dict[str, Any], "/".join(parts))

    def _object(
        self, shape: type[Shape], name: str, *, max_bytes: int = MAX_BYTES, step: int | None = None
    ) -> Shape | None:
        """The JSON object in a file; None if there is none, or it is damaged."""
        text = self._read(name, max_bytes)
        return None if text is None else self._decoded(shape, name, text, step)

    def _decoded(
        self, shape: type[Shape], name: str, text: str, step: int | None = None
    ) -> Shape | None:
        try:
            result = decoded(text, shape)
            if step is not None and (stated := cast(Json, result)["step"]) != step:
                raise Damaged(f"it is of step {stated}")
        except Damaged as error:
            self.damaged[name] = str(error)
            return None
        return result

    def _lines(self, shape: type[Shape], name: str) -> list[Shape]:
        """The JSON objects in the lines of a file; damaged lines are left out."""
        text = self._read(name, MAX_ROLLOUTS_BYTES) or ""
        shapes: list[Shape] = []
        # Not splitlines(): it also splits at U+2028, which JSON leaves unescaped within a string.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line:
                continue
            try:
                shapes.append(decoded(line, shape))
            except Damaged as error:
                self.damaged[name] = f"line {number}: {error}"
        return shapes

    # -- files -------------------------------------------------------------------------------------

    def _digest(self, path: str) -> str | None:
        """sha256 of a file; None if it does not exist."""
        sha = hashlib.sha256()
        try:
            for start in range(0, size := self._fs.size(path), READ_BYTES):
                sha.update(self._fs.cat_file(path, start=start, end=min(start + READ_BYTES, size)))
        except FileNotFoundError:
            return None
        return sha.hexdigest()

    def _names(self, *parts: str) -> list[str]:
        if self._look.listing is not None:
            return list(self._look.listing.get("/".join(parts), {}))
        try:
            listed = cast("list[str]", self._fs.ls(self.path(*parts), detail=False, refresh=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in listed]

    def _versions(self, folder: str, suffix: str) -> dict[int, str]:
        versions: dict[int, str] = {}
        newest: dict[int, int] = {}
        for name, entry in self._files_in(folder).items():
            match = STEP_FILE.fullmatch(name)
            if match is None or match["suffix"] != suffix:
                continue
            step = int(match["step"])
            epoch = int(match["epoch"])
            if epoch < newest.get(step, 0):
                continue
            newest[step] = epoch
            written = entry.get("ETag") or entry.get("mtime") or entry.get("created")
            versions[step] = f"{name}-{written}-{entry['size']}-{entry.get('ino', '')}"
            self._files[folder, step] = f"{folder}/{name}"
        return dict(sorted(versions.items()))

    def _files_in(self, folder: str) -> dict[str, Json]:
        """{name: entry} of what a folder holds."""
        if self._look.listing is not None:
            return self._look.listing.get(folder, {})
        try:
            listed = cast("list[Json]", self._fs.ls(self.path(folder), detail=True, refresh=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: entry for entry in listed}

    def _newest(self, folder: str, step: int, suffix: str) -> str:
        """The file of that step by the newest attempt that was known when the folder was last
        listed.
        """
        if (folder, step) not in self._files:
            self._versions(folder, suffix)
        return self._files.get((folder, step), f"{folder}/{step}{suffix}")

    def _read(self, name: str, max_bytes: int) -> str | None:
        """A file's text; None if there is none, or it is damaged."""
        self.damaged.pop(name, None)
        try:
            if self.is_local:
                body = read_local(Path(self.path(name)), max_bytes)
            else:
                body = cast(bytes, self._fs.cat_file(self.path(name)))
            return body.decode()
        except FileNotFoundError:
            return None
        except (Damaged, UnicodeDecodeError) as error:
            self.damaged[name] = str(error)
            return None

    def _harm(self, name: str) -> str:
        return f" that can be read: {self.damaged[name]}" if name in self.damaged else ""

    def _remove(self, *parts: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(self.path(*parts), recursive=True)

    def _find(self, *parts: str) -> dict[str, int]:
        """{name within the run folder: bytes} of every file in a folder and those below it."""
        return {name: entry["size"] for name, entry in self._entries(*parts).items()}

    def _entries(self, *parts: str) -> dict[str, Json]:
        result = cast("dict[str, Json]", self._fs.find(self.path(*parts), detail=True))
        start = len(self.root.lstrip("/")) + 1
        return {name.lstrip("/")[start:]: entry for name, entry in result.items()}

    def _remove_files(self, names: Sequence[str]) -> None:
        """Delete files, many with one request. One that is gone already is no error."""
        with suppress(FileNotFoundError):
            if names:
                self._fs.rm([self.path(name) for name in names])

    def _write(self, name: str, body: bytes, guard: Callable[[], None] = lambda: None) -> None:
        """Replace a file. `guard` runs as late as possible and raises if that is not allowed."""
        if not self.is_local:
            guard()
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
            guard()
            _replace(temporary, target)
        except OSError as error:
            raise disk_error(error, target) from error
        finally:
            temporary.unlink(missing_ok=True)


def final_result(folder: RunFolder) -> FinalResult | None:
    """What ends the run, if it is there: not an error that another attempt may cure."""
    result = folder.result()
    if result is None or result.get("retryable") or result["state"] == "lost":
        return None
    return cast(FinalResult, result)


class RunWriter:
    """The writes of the worker: what attempt `epoch` may write while it owns the run."""

    def __init__(self, folder: RunFolder, epoch: int) -> None:
        self.folder = folder
        self.epoch = epoch
        self._events = 0
        self._saves = 0
        self._writes = 0
        self._shards = 0

    def check_owner(self) -> None:
        """FlashError(fenced) once a newer attempt has claimed the run."""
        newest = self.folder.newest_epoch()
        if newest != self.epoch:
            what = "a newer attempt owns the run"
            raise FlashError("fenced", what, epoch=self.epoch, newest=newest)

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
            **_place(),
        }
        body["held_bytes"] = psutil.Process().memory_info().rss
        body["available_bytes"] = psutil.virtual_memory().available
        body["writes"] = self._writes
        self._put("beat.json", body)

    def metrics(self, step: int, metrics: Json) -> None:
        self._put(f"metrics/{step}.{self.epoch}.json", {"step": step, "metrics": metrics})

    def rollouts(self, step: int, rollouts: Iterable[Json]) -> None:
        body = b"".join(_dump(rollout) + b"\n" for rollout in rollouts)
        self._write(f"rollouts/{step}.{self.epoch}.jsonl", body)

    def evaluation(self, step: int, summary: Json, rollouts: Sequence[Json]) -> None:
        body = {"step": step, "summary": summary, "rollouts": list(rollouts)}
        self._put(f"evals/{step}.{self.epoch}.json", body)
        self.folder._remove("evals", str(step))

    def attempts(self, step: int, rollouts: Sequence[Json]) -> None:
        """Save attempts of a running evaluation, for a later attempt of the run to continue."""
        body = b"".join(_dump(rollout) + b"\n" for rollout in rollouts)
        self._write(f"evals/{step}/{self.epoch:04d}-{self._shards:06d}", body)
        self._shards += 1

    def offer(self, offer: Json) -> None:
        """Ask for secrets: store the attempt's public key."""
        self._write(f"keys/{self.epoch}.json", _dump(offer))

    def listens(self, where: Json) -> None:
        """Say where this attempt's model server listens."""
        self._write(f"listening.{self.epoch}.json", _dump(where))

    def take_sealed(self) -> bytes | None:
        """The secrets that were sealed for this attempt, once they are there. They are removed."""
        place = self.folder.path("sealed", str(self.epoch))
        try:
            sealed = cast(bytes, self.folder._fs.cat_file(place))
        except FileNotFoundError:
            return None
        self.folder._remove("sealed", str(self.epoch))
        self.folder._remove("keys", f"{self.epoch}.json")
        return sealed

    def event(self, kind: str, message: str, **values: Any) -> None:
        name = f"events/{self.epoch:04d}-{self._events:06d}.json"
        self._put(name, {"kind": kind, "message": message, **values})
        self._events += 1

    def commit_checkpoint(self, step: int, source: Path, metrics: Json) -> Manifest:
        """Copy the files of local folder `source` to a new checkpoint of `step`; its manifest.

        MANIFEST.json is written last: a checkpoint without it does not exist. The newest checkpoint
        of a step counts. The files of one that failed are removed."""
        self.check_owner()
        self._saves += 1
        place = f"checkpoints/{step}/{self.epoch}-{self._saves}"
        paths = {str(path.relative_to(source)): path for path in sorted(source.rglob("*"))}
        files = {name: path for name, path in paths.items() if path.is_file()}
        digests = {name: sha256_of(path) for name, path in files.items()}
        manifest: ManifestFile = {
            "step": step,
            "epoch": self.epoch,
            "time": time.time(),
            "digest": hashlib.sha256(_dump(digests)).hexdigest()[:16],
            "files": digests,
            "size_bytes": sum(path.stat().st_size for path in files.values()),
            "optimizer_bytes": files[OPTIMIZER].stat().st_size if OPTIMIZER in files else 0,
            "metrics": metrics,
        }
        try:
            self._put_files(place, files)
            self._write(f"{place}/MANIFEST.json", _dump(manifest))
        except BaseException as error:
            self.folder._remove(place)
            if isinstance(error, OSError):
                self.check_owner()  # a successor removes what it finds unfinished
                error = disk_error(error, Path(self.folder.path(place)))
            if isinstance(error, FlashError) and error.code == "disk_full":
                error.values["needed_bytes"] = manifest["size_bytes"]
            raise error
        with self.folder.listed():
            self._remove_unfinished(step)
            if self.folder.newest_good_checkpoint() == step:
                self._drop_older_optimizers(place)
        return {**manifest, "path": self.folder._address(place)}

    def _put_files(self, place: str, files: dict[str, Path]) -> None:
        target = self.folder.path(place)
        if not self.folder.is_local:
            for name, path in files.items():
                self.folder._fs.put_file(str(path), f"{target}/{name}")
            return
        for name, path in files.items():
            copy = Path(target, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        _sync_tree(Path(target))

    def _remove_unfinished(self, step: int) -> None:
        """Remove what attempts that are over left of a checkpoint of this step."""
        for name in self.folder._names("checkpoints", str(step)):
            place = f"checkpoints/{step}/{name}"
            is_over = SAVED.fullmatch(name) and _saved_by(name)[0] < self.epoch
            if is_over and not self.folder._has_manifest(step, name):
                self.folder._remove(place)

    def _drop_older_optimizers(self, newest: str) -> None:
        """Delete the optimizer's state of every checkpoint that this attempt or an earlier one
        saved, except `newest`.
        """
        for step in self.folder._names("checkpoints"):
            for name in self.folder._names("checkpoints", step):
                place = f"checkpoints/{step}/{name}"
                is_ours = SAVED.fullmatch(name) and _saved_by(name)[0] <= self.epoch
                has_state = OPTIMIZER in self.folder._names(*place.split("/"))
                if is_ours and place != newest and has_state:
                    self.folder._remove(place, OPTIMIZER)

    def commit_result(
        self, state: str, step: int, error: FlashError | None = None, **values: Any
    ) -> None:
        """End the run. `state` is succeeded, failed, cancelled, or lost, which the supervisor
        retries.
        """
        details = error.to_dict() if error else None
        body: Json = {"state": state, "step": step, "error": details, **values}
        self._put(f"result.{self.epoch}.json", body)

    def _put(self, name: str, body: Json) -> None:
        self._write(name, _dump({"epoch": self.epoch, "time": time.time(), **body}))

    def _write(self, name: str, body: bytes) -> None:
        self.folder._write(name, body, self.check_owner)
        self._writes += name != "beat.json"


def read_beats(folders: Sequence[RunFolder]) -> list[Beat | None]:
    """The heartbeats of runs in one store, all asked for at once. FlashError(store_unreachable)."""
    if not folders:
        return []
    paths = [folder.path("beat.json") for folder in folders]
    result = cast("dict[str, Any]", folders[0]._fs.cat(paths, on_error="return"))
    beats: list[Beat | None] = []
    for folder, path in zip(folders, paths, strict=True):
        body = result.get(path.lstrip("/"), result.get(path))
        if isinstance(body, Exception) and _may_pass(body):
            raise _unreachable(path, body)
        beats.append(_beat_in(folder, body))
    return beats


def _beat_in(folder: RunFolder, body: Any) -> Beat | None:
    if not isinstance(body, bytes):
        return None
    return folder._decoded(Beat, "beat.json", body.decode(errors="replace"))


class _Patient:
    """A remote file system. While it is unreachable, each call is retried with a growing delay."""

    def __init__(self, filesystem: Any, patience_s: float) -> None:
        self._filesystem = filesystem
        self._patience_s = patience_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._filesystem, name)

        @functools.wraps(call)
        def patient(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            delay_s, most_s = RETRY_DELAY_S
            while True:
                try:
                    return call(*arguments, **options)
                except Exception as error:
                    if not _may_pass(error):
                        raise
                    if time.monotonic() - began + delay_s > self._patience_s:
                        raise _unreachable(arguments[0], error) from error
                    log.warning("%s %s is tried again: %s", name, arguments[0], error)
                time.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, most_s)

        return patient


REFUSALS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


def _may_pass(error: Exception) -> bool:
    """Whether the store or the network failed; False if the store refused."""
    if isinstance(error, REFUSALS):
        return False
    if isinstance(error, OSError):
        return error.errno not in (errno.EINVAL, errno.ENOSPC)
    # Errors of botocore, which may not be installed, have no base in the standard library.
    names = {base.__name__ for base in type(error).__mro__}
    return not names.isdisjoint(("ConnectionError", "HTTPClientError"))


def _unreachable(path: str, error: Exception) -> FlashError:
    variables = "its variables (AWS_ENDPOINT_URL, ...)"
    fix = f"check that the store answers and that {variables} are right; the run resumes"
    what = f"the run folder's store does not answer: {error}"
    return FlashError("store_unreachable", what, path=path, fix=fix)


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
        if kind == "evals":
            return (kind, rest[0]) in versions
        if kind in ("keys", "sealed"):
            return int(rest[0].removesuffix(".json")) < newest
        if kind != "checkpoints" or len(rest) < 3 or not SAVED.fullmatch(rest[1]):
            return False
        is_whole = "/".join((kind, *rest[:2])) in complete
        return not is_whole and _saved_by(rest[1])[0] < newest

    return [name for name, parts in parts_of.items() if is_over(*parts)]


def _saved_by(name: str) -> tuple[int, int]:
    """The attempt that saved the checkpoint of this folder, and the number of its save."""
    epoch, _, number = name.partition("-")
    return int(epoch), int(number)


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_files(manifest: Manifest, digest_of: Callable[[str], str | None]) -> None:
    for name, digest in manifest["files"].items():
        result = digest_of(name)
        if result is None and name == OPTIMIZER:
            continue
        if result != digest:
            what, fix = f"{name} does not match its checksum", "use an earlier checkpoint"
            raise FlashError("checkpoint_corrupt", what, step=manifest["step"], fix=fix)


def _replace(temporary: Path, target: Path) -> None:
    """Rename, also over a folder that something made there: it is kept under another name."""
    try:
        temporary.replace(target)
    except IsADirectoryError:
        target.rename(target.with_name(f".{target.name}.{uuid4().hex}.folder"))
        temporary.replace(target)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _dump(body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    # Lone surrogates, which an environment may write, have no UTF-8 form.
    return text.encode(errors="replace")


def _place() -> Json:
    return {"host": socket.gethostname(), "pid": os.getpid()}
