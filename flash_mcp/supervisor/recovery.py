"""Rebuild a lost or damaged database from the folders of a state directory.

Run folders hold the spec, metrics, rollouts, evaluations, events and checkpoints of every run that
was started. What only the database held is lost; `Recovered.lost` names it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flash_mcp.exam import looks
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.paths import environments_dir, runs_dir
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunFolder, final_result
from flash_mcp.state.database import moved
from flash_mcp.state.disk import size_of
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.store import Store
from flash_mcp.state.versions import DIGEST_LENGTH, digest_of
from flash_mcp.supervisor.attempt import Reader
from flash_mcp.supervisor.process import take_lock

log = logging.getLogger(__name__)
DATABASE = "flash.db"
LOST = (
    "tokens and deployments",
    "idempotency keys: a repeated call starts another run",
    "what env_push recorded about environments",
    "runs that were queued and never started",
    "the hours that runs have worked",
    "looks at exams whose runs were removed",
)


@dataclass
class Recovered:
    runs: list[str] = field(default_factory=list[str])
    environments: list[str] = field(default_factory=list[str])
    """OWNER/NAME@DIGEST, without the owner for the local one."""
    kept: int = 0
    """Runs and environments that the database had already; nothing of them changed."""
    problems: list[str] = field(default_factory=list[str])
    """Folders that could not be taken in, and why."""
    damaged: str | None = None
    """Where the damaged database lies now."""
    lost: tuple[str, ...] = ()
    """What no folder holds."""


def recover(base: Path) -> Recovered:
    """Take runs and environments that the database does not know from their folders.

    Rows that exist are left as they are. A damaged database is moved aside first. A run that had
    not ended is queued, and continues with its next attempt. FlashError(state_busy) while a
    supervisor looks after the state directory, FlashError(disk_full)."""
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = take_lock(base)
    if lock is None:
        fix = "wait until it has left, about a minute after its last run ended, or end its process"
        what = "a supervisor looks after this state directory"
        raise FlashError("state_busy", what, path=base, fix=fix)
    with lock:
        try:
            result = Recovered(damaged=_set_aside(base))
            store = Store(base)
            _take_runs(store, result)
            rows = store.query("SELECT owner, name, digest FROM main.environments")
            existing = {(row["owner"], row["name"], row["digest"]) for row in rows}
            for owner, path in _versions(environments_dir(store.base)):
                name = path.parent.name
                reference = f"{name}@{path.name}"
                if owner != LOCAL_OWNER:
                    reference = f"{owner}/{reference}"
                if (owner, name, path.name) in existing:
                    result.kept += 1
                elif digest_of(path) != path.name:
                    what = "its files were changed since it was pushed"
                    result.problems.append(f"environment {reference}: {what}")
                else:
                    row: Json = {"owner": owner, "name": name, "digest": path.name, "path": path}
                    row |= {"size_bytes": size_of(path), "pushed": path.stat().st_mtime, "data": {}}
                    store.insert("environments", row)
                    result.environments.append(reference)
        except OSError as error:
            raise disk_error(error, base) from error
    if result.runs or result.environments or result.damaged:
        result.lost = LOST
    return result


def _set_aside(base: Path) -> str | None:
    """Move a damaged database away, for a person to look at; where it lies now."""
    try:
        Store(base).check()
    except FlashError as error:
        if error.code != "state_corrupt":
            raise
    else:
        return None
    name = f"{DATABASE}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    # The database last: while it is there, a second call finds it damaged again.
    for suffix in ("-wal", "-shm", ""):
        path = base / f"{DATABASE}{suffix}"
        if path.exists():
            path.replace(base / f"{name}{suffix}")
    return str(base / name)


# -- runs ------------------------------------------------------------------------------------------


def _take_runs(store: Store, result: Recovered) -> None:
    existing = set(store.column("SELECT id FROM main.runs"))
    folders = runs_dir(store.base)
    for path in sorted(folders.iterdir()) if folders.is_dir() else ():
        # Model servers start anew.
        if path.name.startswith((".", "srv-")) or not path.is_dir():
            continue
        if path.name in existing:
            result.kept += 1
            continue
        try:
            # A run is taken in whole or not at all: a second call looks only at those without row.
            with store.transaction():
                store.insert("runs", _row(store, path))
                if "exam" in (run := store.run(path.name)).lineage:
                    looks.record(store, run)
                Reader(store, path.name, RunFolder(path)).read(now=True)
        except (FlashError, KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, FlashError) and error.code == "disk_full":
                raise
            log.debug("%s", path, exc_info=True)
            result.problems.append(f"runs/{path.name}: {error}")
        else:
            result.runs.append(path.name)


def _row(store: Store, path: Path) -> Json:
    folder = RunFolder(path)
    job = folder.job()
    # It holds absolute paths; the state directory may have moved since.
    environment = job["environment"]
    home, marker, rest = str(environment["path"]).partition("/environments/")
    if marker and rest.endswith(f"{environment['name']}/{environment['digest']}"):
        job = moved(job, f"{home}/", f"{store.base}/")
    if job["run_id"] != path.name:
        raise ValueError(f"its job.json is that of {job['run_id']}")
    spec = job["spec"]
    environment = job["environment"]
    beat = folder.read_json("beat.json") or {}
    attempt = folder.newest_epoch()
    now = time.time()
    row: Json = {"id": path.name, "owner": job.get("owner", LOCAL_OWNER), "state": "queued"}
    row |= {"folder": str(path), "request_digest": "", "updated": now, "attempt": attempt}
    row |= {"spec": spec, "algorithm": spec["algorithm"], "max_attempts": spec["max_attempts"]}
    row |= {"environment": environment["name"], "environment_digest": environment["digest"]}
    row |= {"environment_path": environment["path"], "lineage": job.get("lineage", {})}
    for name in ("model", "sources", "init_adapter", "dataset", "created"):
        row[name] = job[name]
    row["steps"] = spec.get("steps") or beat.get("steps")
    row["step"] = max([beat.get("step", 0), *folder.metric_steps()])
    row["started"] = (folder.read_json(f"epoch/{attempt}") or {}).get("time")
    if result := final_result(folder):
        row["state"] = result["state"]
        row["error"] = result["error"]
        row["step"] = max(row["step"], int(result["step"]))
        row["ended"] = result["time"]
    elif folder.is_cancelled():
        row["state"] = "cancelled"
        row["ended"] = now
    if row["state"] == "cancelled":
        row["cancel_requested"] = row["ended"]
    return row


# -- environments ----------------------------------------------------------------------------------


def _versions(root: Path) -> Iterator[tuple[str, Path]]:
    """(owner, folder) of every version, whoever pushed it."""
    for folder in sorted(root.glob("[!.]*")):
        is_owner = folder.name.startswith("@")
        owner = folder.name[1:] if is_owner else LOCAL_OWNER
        for path in sorted(folder.glob("[!.]*/*" if is_owner else "*")):
            if len(path.name) == DIGEST_LENGTH and path.is_dir():
                yield owner, path
