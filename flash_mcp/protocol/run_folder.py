"""The run folder: the whole protocol between control plane and worker, as files under one prefix.

    job.json               what to do: {"run_id", "spec", "sources", "environment_path", "model_path", ...}
    epoch/N                attempt N owns the run; made once, exclusively; the highest N is the owner
    beat.json              {"epoch", "time", "step", "steps", "phase", "progress", "host", "pid", "held_bytes",
                           "available_bytes"}, every few seconds
    metrics/STEP.json      {"step", "epoch", "time", "metrics": {name: number}}
    rollouts/STEP.jsonl    one rollout a line, keyed by (step, index)
    evals/STEP.json        {"step", "epoch", "time", "summary": {...}, "rollouts": [...]}, one rollout an attempt
    evals/STEP/EPOCH-N     attempts of an evaluation under way, one a line; gone once evals/STEP.json is there
    events/EPOCH-N.json    {"time", "epoch", "kind", "message", ...}
    log.N                  what attempt N printed
    checkpoints/STEP/      a PEFT adapter and the trainer's state, with MANIFEST.json (sha256 of every file)
                           (in an object store the files stand in checkpoints/STEP/EPOCH/: it cannot rename a folder)
    checkpoints/LATEST     {"step", "digest"}, written last
    cancel                 the control plane asks the worker to save and end
    result.json            {"state", "step", "error", ...}: the only word that ends a run

Whole files only, each replaced atomically: an object store cannot append. A stopped attempt may
wake in the middle of anything, so what it can still replace is judged by its epoch when it is read.
Credentials of an object store come from its own variables (AWS_ACCESS_KEY_ID and so on), never from
the folder or its URL."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import fsspec  # pyright: ignore[reportMissingTypeStubs]
import psutil

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json

log = logging.getLogger(__name__)
PATIENCE_S = 600.0
RETRY_DELAY_S = (0.1, 15.0)
READ_BYTES = 8 << 20


class RunFolder:
    """Reads, and the control plane's few writes. `url` is a local path or any fsspec URL.

    While an object store cannot be reached, each call is tried again for `patience_s`; then it
    raises FlashError(store_unreachable). FlashError(engine_missing) where the packages for the URL
    are not installed."""

    def __init__(self, url: str | Path, *, patience_s: float = PATIENCE_S) -> None:
        self.url = str(url)
        try:
            # Without listings of its own: other machines write there too.
            core: Any = fsspec.core  # untyped
            filesystem, root = core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            fix = "install flash-mcp with the extra s3, or the fsspec package for that store"
            raise FlashError("engine_missing", f"{error}", folder=self.url, fix=fix) from error
        self.root = root.rstrip("/")
        protocols: str | tuple[str, ...] = filesystem.protocol
        self.is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)
        self._fs: Any = filesystem if self.is_local else _Patient(filesystem, patience_s)

    def path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    # -- control plane -----------------------------------------------------------------------------

    def create(self, job: Json) -> None:
        """Write job.json. Doing it again with the same job changes nothing."""
        self._write("job.json", _dump(job))

    def request_cancel(self, reason: str = "") -> None:
        self._write("cancel", _dump({"time": time.time(), "reason": reason}))

    def claim(self, epoch: int) -> RunWriter:
        """Become attempt `epoch`. FlashError(fenced) where it or a newer one was claimed before."""
        newest = self.newest_epoch()
        if newest >= epoch:
            raise FlashError(
                "fenced", "the run belongs to another attempt", epoch=epoch, newest=newest
            )
        claim = {
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claim": uuid4().hex,
        }
        try:
            if self.is_local:
                Path(self.path("epoch")).mkdir(parents=True, exist_ok=True)
                with Path(self.path("epoch", str(epoch))).open("xb") as stream:
                    stream.write(_dump(claim))
            else:
                self._fs.pipe_file(self.path("epoch", str(epoch)), _dump(claim), mode="create")
        except OSError as error:
            # A claim whose answer was lost, and that was tried again, finds itself. Stores refuse
            # in different words.
            owner = self.read_json("epoch", str(epoch)) if not self.is_local else None
            if owner is None and not isinstance(error, FileExistsError):
                raise disk_error(error, Path(self.path("epoch"))) from error
            if owner != claim:
                raise FlashError(
                    "fenced", "the run belongs to another attempt", epoch=epoch
                ) from error
        return RunWriter(self, epoch)

    # -- reading -----------------------------------------------------------------------------------

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
        """What the newest attempt left as the last word, or one before it where the newest has not
        claimed the run.
        """
        result = self.read_json("result.json")
        return result if result and result["epoch"] >= self.newest_epoch() else None

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
        # Not splitlines(): it also splits at U+2028 and others, which JSON leaves as they are
        # within a string.
        return [json.loads(line) for line in (text or "").split("\n") if line]

    def eval_steps(self) -> dict[int, str]:
        return self._versions("evals", ".json")

    def evaluation(self, step: int) -> Json | None:
        return self.read_json("evals", f"{step}.json")

    def attempts(self, step: int) -> list[Json]:
        """What an evaluation under way has recorded so far, by whichever attempt of the run; each
        once, in order.
        """
        names = [
            name for name in self._names("evals", str(step)) if name[0].isdigit()
        ]  # not one that was cut short
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
            if not size:  # object stores refuse an empty range
                return ""
            tail: bytes = self._fs.cat_file(
                self.path(f"log.{epoch}"), start=max(0, size - size_bytes), end=size
            )
        except FileNotFoundError:
            return ""
        return tail.decode(errors="replace")

    def checkpoint_steps(self) -> list[int]:
        """Steps whose checkpoint was written whole, oldest first."""
        steps = [int(name) for name in self._names("checkpoints") if name.isdigit()]
        return sorted(
            step
            for step in steps
            if self._fs.exists(self.path("checkpoints", str(step), "MANIFEST.json"))
        )

    def manifest(self, step: int) -> Json | None:
        """{"step", "epoch", "digest", "size_bytes", "files": {name: sha256}, "metrics": {...}}"""
        return self.read_json("checkpoints", str(step), "MANIFEST.json")

    def verify_checkpoint(self, step: int) -> Json:
        """The manifest, once every file was hashed; FlashError(checkpoint_corrupt |
        unknown_checkpoint) otherwise.
        """
        manifest = self.manifest(step)
        if manifest is None:
            raise FlashError(
                "unknown_checkpoint",
                "there is no checkpoint at that step",
                step=step,
                fix=f"use one of {self.checkpoint_steps()}",
            )
        folder = self._files_of(manifest)
        _check_files(manifest, lambda name: self._digest(f"{folder}/{name}"))
        return manifest

    def newest_good_checkpoint(self) -> int | None:
        """The newest step whose files match their checksums. A damaged one is passed over for the
        one before it.
        """
        for step in reversed(self.checkpoint_steps()):
            try:
                self.verify_checkpoint(step)
            except FlashError as error:
                if error.code == "store_unreachable":  # that says nothing of the checkpoint
                    raise
                continue
            return step
        return None

    def fetch_checkpoint(self, step: int, into: Path) -> Path:
        """Copy a checkpoint to a local folder, verify it and return that folder; local ones are
        used in place.
        """
        manifest = self.manifest(step)
        if self.is_local or manifest is None:
            self.verify_checkpoint(step)
            return Path(self.path("checkpoints", str(step)))
        local, folder = RunFolder(into), self._files_of(manifest)
        for name in manifest["files"]:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(f"{folder}/{name}", str(into / name))
            except FileNotFoundError:
                continue
        _check_files(manifest, lambda name: local._digest(str(into / name)))
        return into

    def read_json(self, *parts: str) -> Json | None:
        text = self._read(*parts)
        return None if text is None else cast(Json, json.loads(text))

    # -- files -------------------------------------------------------------------------------------

    def _files_of(self, manifest: Json) -> str:
        """The folder of a checkpoint's files. An object store's has one for each attempt that saved
        the step.

        There a folder does not come into being at once: an attempt that wakes in the middle of
        writing one must not meet the files of its successor."""
        step = self.path("checkpoints", str(manifest["step"]))
        return step if self.is_local else f"{step}/{manifest['epoch']}"

    def _digest(self, path: str) -> str | None:
        """sha256 of a file; None where there is none."""
        sha = hashlib.sha256()
        try:
            for start in range(0, size := self._fs.size(path), READ_BYTES):
                sha.update(self._fs.cat_file(path, start=start, end=min(start + READ_BYTES, size)))
        except FileNotFoundError:
            return None
        return sha.hexdigest()

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

    def _write(self, name: str, body: bytes, guard: Callable[[], None] = lambda: None) -> None:
        """Replace a file; `guard` is asked as late as can be, and raises where it must not be."""
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
            temporary.replace(target)
        except OSError as error:
            raise disk_error(error, target) from error
        finally:
            temporary.unlink(missing_ok=True)


class RunWriter:
    """The worker's side of the folder: what attempt `epoch` may write while it is the newest."""

    def __init__(self, folder: RunFolder, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch
        self._events = self._shards = 0

    def check_owner(self) -> None:
        """FlashError(fenced) once a newer attempt has claimed the run."""
        newest = self.folder.newest_epoch()
        if newest != self.epoch:
            raise FlashError(
                "fenced", "a newer attempt owns the run", epoch=self.epoch, newest=newest
            )

    def beat(self, step: int, phase: str, progress: int = 0, steps: int | None = None) -> None:
        """`progress` counts what was done so far; a step or count that moves is a sign that nothing
        stalls.

        `steps` is how many there will be, where the worker alone can tell.

        What the process holds of the machine's memory, and what is left, tells later why the kernel
        may have killed it."""
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        held, left = psutil.Process().memory_info().rss, psutil.virtual_memory().available
        body = {"step": step, "phase": phase, "progress": progress, "steps": steps, **place}
        self._put("beat.json", {**body, "held_bytes": held, "available_bytes": left})

    def metrics(self, step: int, metrics: Json) -> None:
        self._put(f"metrics/{step}.json", {"step": step, "metrics": metrics})

    def rollouts(self, step: int, rollouts: Iterable[Json]) -> None:
        body = "".join(_dump(rollout).decode() + "\n" for rollout in rollouts)
        self._write(f"rollouts/{step}.jsonl", body.encode())

    def evaluation(self, step: int, summary: Json, rollouts: Sequence[Json]) -> None:
        self._put(
            f"evals/{step}.json", {"step": step, "summary": summary, "rollouts": list(rollouts)}
        )
        self.folder._remove("evals", str(step))  # pyright: ignore[reportPrivateUsage]

    def attempts(self, step: int, rollouts: Sequence[Json]) -> None:
        """Keep attempts of an evaluation that goes on, for the attempt of the run that may have to
        finish it.
        """
        body = "".join(_dump(rollout).decode() + "\n" for rollout in rollouts)
        self._write(f"evals/{step}/{self.epoch:04d}-{self._shards:06d}", body.encode())
        self._shards += 1

    def event(self, kind: str, message: str, **values: Any) -> None:
        self._put(
            f"events/{self.epoch:04d}-{self._events:06d}.json",
            {"kind": kind, "message": message, **values},
        )
        self._events += 1

    def commit_checkpoint(self, step: int, source: Path, metrics: Json) -> Json:
        """Move the files of local folder `source` in as checkpoint `step` and return its manifest.

        MANIFEST.json comes after the files and LATEST last: a checkpoint without a manifest does
        not exist. The same step written twice is the newer one."""
        files = {
            str(path.relative_to(source)): path
            for path in sorted(source.rglob("*"))
            if path.is_file()
        }
        digests = {
            name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
        }
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
        self._write("checkpoints/LATEST", _dump({"step": step, "digest": digest}))
        return manifest

    def _put_local(self, target: Path, files: dict[str, Path], manifest: Json) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(f".{self.epoch}.{target.name}.{uuid4().hex}")
        try:
            for name, path in files.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, staging / name)
            (staging / "MANIFEST.json").write_bytes(_dump(manifest))
            _sync_tree(staging)
            self.check_owner()
            if target.exists():
                target.rename(staging.with_name(f"{staging.name}.old"))
            staging.rename(target)
        finally:
            # What earlier attempts began, too; but never what a newer one is writing while this one
            # wakes up.
            for stale in target.parent.glob(".*"):
                if (
                    stale.name.split(".")[1].isdigit()
                    and int(stale.name.split(".")[1]) <= self.epoch
                ):
                    shutil.rmtree(stale, ignore_errors=True)

    def _put_remote(self, target: str, files: dict[str, Path], manifest: Json) -> None:
        folder = self.folder
        fs = folder._fs  # pyright: ignore[reportPrivateUsage]
        known = folder.manifest(manifest["step"])
        if known and known["epoch"] == self.epoch:  # its files are about to be replaced
            fs.rm_file(f"{target}/MANIFEST.json")
        for name, path in files.items():
            fs.put_file(str(path), f"{folder._files_of(manifest)}/{name}")  # pyright: ignore[reportPrivateUsage]
        self.check_owner()
        fs.pipe_file(f"{target}/MANIFEST.json", _dump(manifest))

    def commit_result(
        self, state: str, step: int, error: FlashError | None = None, **values: Any
    ) -> None:
        """End the run: `state` is succeeded, failed, cancelled or (for the supervisor to retry)
        lost.
        """
        self._put(
            "result.json",
            {"state": state, "step": step, "error": error.to_dict() if error else None, **values},
        )

    def _put(self, name: str, body: Json) -> None:
        self._write(name, _dump({"epoch": self.epoch, "time": time.time(), **body}))

    def _write(self, name: str, body: bytes) -> None:
        self.folder._write(name, body, self.check_owner)  # pyright: ignore[reportPrivateUsage]


class _Patient:
    """A file system of elsewhere, whose every call is tried again, ever more slowly, while it
    cannot be reached.
    """

    def __init__(self, filesystem: Any, patience_s: float) -> None:
        self._filesystem, self._patience_s = filesystem, patience_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._filesystem, name)

        @functools.wraps(call)
        def patient(*arguments: Any, **options: Any) -> Any:
            began, (delay_s, most_s) = time.monotonic(), RETRY_DELAY_S
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


def _may_pass(error: Exception) -> bool:
    """Whether the store, or the way there, failed; not that it refused."""
    if isinstance(error, OSError):
        refused = (
            FileNotFoundError,
            FileExistsError,
            PermissionError,
            IsADirectoryError,
            NotADirectoryError,
        )
        return not isinstance(error, refused) and error.errno not in (errno.EINVAL, errno.ENOSPC)
    # botocore's have no ancestor in the standard library, and it may not be installed.
    return any(
        base.__name__ in ("ConnectionError", "HTTPClientError") for base in type(error).__mro__
    )


def _unreachable(path: str, error: Exception) -> FlashError:
    fix = "see that the store answers and that its variables (AWS_ENDPOINT_URL, ...) are right; the run resumes"
    return FlashError(
        "store_unreachable", f"the run folder's store does not answer: {error}", path=path, fix=fix
    )


def _check_files(manifest: Json, digest_of: Callable[[str], str | None]) -> None:
    for name, digest in manifest["files"].items():
        if digest_of(name) != digest:
            what, fix = f"{name} does not match its checksum", "use an earlier checkpoint"
            raise FlashError("checkpoint_corrupt", what, step=manifest["step"], fix=fix)


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
    return text.encode(
        errors="replace"
    )  # lone surrogates, which an environment may write, have no UTF-8 form
