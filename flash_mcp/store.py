"""The store: what runs, environments and deployments there are, in one SQLite file.

Every process may read and enqueue; the supervisor is the only one that writes all the time. All SQL goes through
`Store.query` (reads) and `Store.transaction` (writes); queue.py holds the transitions of a run's state.

Owners are kept apart here and nowhere else. A caller who is not the local owner gets a connection on which every table
is hidden behind a temporary view of the same name with the rows that are theirs; SQL need not know. Writes name the
table as main.TABLE, since a view takes none, and pick their rows through the view.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from flash_mcp.callers import LOCAL_OWNER, caller
from flash_mcp.errors import FlashError
from flash_mcp.home import home
from flash_mcp.runfolder import Json

if TYPE_CHECKING:
    from flash_mcp.environments import Stage, Version

# sqlite-utils imports pandas and numpy where they are installed, which takes a second: hide them from it.
_HIDDEN = [name for name in ("numpy", "pandas") if name not in sys.modules]
sys.modules.update(dict.fromkeys(_HIDDEN))  # pyright: ignore[reportArgumentType, reportCallIssue]
try:
    from sqlite_utils import Database, Migrations
    from sqlite_utils.utils import sqlite3  # pyright: ignore[reportPrivateImportUsage]  # whichever it chose
finally:
    for _name in _HIDDEN:
        del sys.modules[_name]

RunState = Literal["queued", "starting", "running", "succeeded", "failed", "cancelled"]
DeploymentState = Literal["starting", "ready", "failed", "stopping", "stopped"]
RolloutOrder = Literal["worst", "best", "random", "index"]
ACTIVE: tuple[RunState, ...] = ("queued", "starting", "running")
LIVE_DEPLOYMENT: tuple[DeploymentState, ...] = ("starting", "ready", "stopping")
BUSY_TIMEOUT_S = 10


class RunRow(TypedDict):
    """A run. Times are unix seconds; `attempt` counts from 1 once claimed; `steps` is None where epochs decide."""

    id: str
    owner: str
    state: RunState
    algorithm: str
    """grpo, sft, or eval for an evaluation, whose steps are attempts at tasks."""
    model: str
    environment: str
    environment_digest: str
    environment_path: str
    spec: Json
    sources: Json
    init_adapter: Json | None
    dataset: Json | None
    """Of an sft run on curated rows: {"name", "digest", "path", "files": {file: sha256}}."""
    lineage: Json
    """`code` is the version that made it; `overlap`, where splits share tasks, {"shared", "eval_tasks", "evidence"}."""
    idempotency_key: str | None
    folder: str
    attempt: int
    max_attempts: int
    steps: int | None
    step: int
    phase: str | None
    beat: float | None
    """When the worker last wrote beat.json, by the supervisor's clock."""
    progress: float | None
    """When the step or phase last changed."""
    cancel_requested: float | None
    cancel_reason: str | None
    not_before: float
    error: Json | None
    """FlashError.to_dict() of a failed run, and of the last lost attempt while the run waits for the next."""
    created: float
    started: float | None
    ended: float | None
    updated: float


class MetricRow(TypedDict):
    step: int
    epoch: int
    time: float
    metrics: dict[str, float | None]


class RolloutRow(TypedDict, total=False):
    """One line of rollouts/STEP.jsonl or one rollout of evals/STEP.json."""

    step: int
    index: int
    group: int
    task_id: str
    split: str
    attempt: int
    messages: list[Json]
    reward: float
    success: bool
    advantage: float | None
    metrics: dict[str, float]
    reason: str | None
    error: Json | None
    turns: int
    prompt_tokens: int
    completion_tokens: int
    env_tokens: int
    truncated: bool
    finish: str
    seconds: float


class EvalRow(TypedDict):
    step: int
    epoch: int
    time: float
    summary: dict[str, float]


class EventRow(TypedDict):
    """`kind`: phase, warning, checkpoint, error (from the worker), attempt (from the supervisor)."""

    name: str
    time: float
    epoch: int
    kind: str
    message: str
    data: Json


class CheckpointRow(TypedDict):
    step: int
    epoch: int
    time: float
    digest: str
    size_bytes: int
    path: str
    metrics: dict[str, float | None]


class EnvironmentRow(TypedDict):
    """`data` is whatever the pusher recorded beside it (splits, kind, files)."""

    owner: str
    name: str
    digest: str
    path: str
    size_bytes: int
    pushed: float
    data: Json


class DeploymentRow(TypedDict):
    """`data` is the deployment manager's own. The owner is that of the run."""

    id: str
    owner: str
    name: str
    model: str
    run_id: str | None
    step: int | None
    adapter_path: str | None
    state: DeploymentState
    error: Json | None
    base_url: str | None
    pid: int | None
    data: Json
    created: float
    updated: float


JSON_COLUMNS = frozenset(
    {"spec", "sources", "init_adapter", "dataset", "lineage", "error", "metrics", "summary", "data", "body", "secrets"}
)
migrations = Migrations("flash_mcp")


@migrations(name="0001_initial")
def _initial(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    for statement in _SCHEMA_1.split(";\n"):
        _execute(db, statement)


@migrations(name="0002_dataset")
def _dataset(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    _execute(db, "ALTER TABLE runs ADD COLUMN dataset TEXT")


@migrations(name="0003_lineage")
def _lineage(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    _execute(db, "ALTER TABLE runs ADD COLUMN lineage TEXT NOT NULL DEFAULT '{}'")


_SCHEMA_1 = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, algorithm TEXT NOT NULL, model TEXT NOT NULL,
    environment TEXT NOT NULL, environment_digest TEXT NOT NULL, environment_path TEXT NOT NULL,
    spec TEXT NOT NULL, sources TEXT NOT NULL, init_adapter TEXT,
    idempotency_key TEXT UNIQUE, request_digest TEXT NOT NULL, folder TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL,
    steps INTEGER, step INTEGER NOT NULL DEFAULT 0, phase TEXT, beat REAL, progress REAL,
    cancel_requested REAL, cancel_reason TEXT, not_before REAL NOT NULL DEFAULT 0, error TEXT,
    created REAL NOT NULL, started REAL, ended REAL, updated REAL NOT NULL);
CREATE INDEX runs_by_state ON runs (state, created, id);
CREATE INDEX runs_by_age ON runs (created, id);
CREATE TABLE metrics (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE rollouts (
    run_id TEXT NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL, position INTEGER NOT NULL,
    reward REAL NOT NULL, success INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (run_id, split, step, position));
CREATE INDEX rollouts_by_reward ON rollouts (run_id, split, reward);
CREATE TABLE evals (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL, summary TEXT NOT NULL,
    PRIMARY KEY (run_id, step));
CREATE TABLE events (
    run_id TEXT NOT NULL, name TEXT NOT NULL, time REAL NOT NULL, epoch INTEGER NOT NULL,
    kind TEXT NOT NULL, message TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (run_id, name));
CREATE TABLE checkpoints (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL, digest TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, path TEXT NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (run_id, step));
CREATE TABLE environments (
    name TEXT NOT NULL, digest TEXT NOT NULL, path TEXT NOT NULL, size_bytes INTEGER NOT NULL, pushed REAL NOT NULL,
    data TEXT NOT NULL, PRIMARY KEY (name, digest));
CREATE TABLE deployments (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, model TEXT NOT NULL, run_id TEXT, step INTEGER, adapter_path TEXT,
    state TEXT NOT NULL, error TEXT, base_url TEXT, pid INTEGER, data TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL)
"""


@migrations(name="owners")
def _owners(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """Give all there is to the local owner. Names and idempotency keys are each owner's own from now on."""
    column = f"owner TEXT NOT NULL DEFAULT '{LOCAL_OWNER}'"
    _execute(db, f"ALTER TABLE deployments ADD COLUMN {column}")
    _rebuild(db, "environments", "PRIMARY KEY (name, digest)", f"{column}, PRIMARY KEY (owner, name, digest)")
    _rebuild(db, "runs", "idempotency_key TEXT UNIQUE", f"{column}, idempotency_key TEXT")
    _execute(db, "CREATE UNIQUE INDEX runs_by_key ON runs (owner, idempotency_key)")
    _execute(
        db,
        """CREATE TABLE tokens (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, access TEXT NOT NULL,
        secrets TEXT NOT NULL, created REAL NOT NULL, expires REAL, used REAL, revoked REAL)""",
    )


def _rebuild(db: Database, table: str, old: str, new: str) -> None:
    """Make a table anew with `new` for `old` in its definition, rows, indexes and later columns kept."""
    sql = "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql > ''"
    rows = cast("Iterable[Json]", db.query(sql, [table]))  # pyright: ignore[reportUnknownMemberType]
    schema = [str(row["sql"]) for row in rows]
    columns = ", ".join(db[table].columns_dict)
    definition = next(sql for sql in schema if sql.startswith("CREATE TABLE"))
    assert old in definition
    _execute(db, f"ALTER TABLE {table} RENAME TO {table}_before")
    _execute(db, definition.replace(old, new))
    _execute(db, f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}_before")
    _execute(db, f"DROP TABLE {table}_before")
    for sql in schema:
        if sql != definition:
            _execute(db, sql)


def open_store() -> Store:
    """The store of FLASH_HOME; the same object for as long as that stays the same."""
    return _store_at(home())


@lru_cache(maxsize=8)
def _store_at(base: Path) -> Store:
    return Store(base)


class Store:
    """The database at BASE/flash.db, made and migrated if need be. Any thread may use it; each has its connection."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.path = base / "flash.db"
        self._local = threading.local()
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Two processes that turn WAL on at once fail whatever their busy time-out.
        with (base / "flash.db.lock").open("a") as lock, _named_errors(self.path):
            fcntl.flock(lock, fcntl.LOCK_EX)
            _execute(self._db, "PRAGMA journal_mode=WAL")
            with self.transaction():
                migrations.apply(self._db)

    @property
    def _db(self) -> Database:
        """This thread's connection: to everything for the local owner, to what is theirs for all other callers."""
        kind = "all" if caller().is_local else "own"
        db: Database | None = getattr(self._local, kind, None)
        if db is None:
            db = Database(self.path)
            db.conn.isolation_level = None
            _execute(db, f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}")
            _execute(db, "PRAGMA synchronous=FULL")
            if kind == "own":
                _hide_what_is_not_the_callers(db)
            setattr(self._local, kind, db)
        return db

    def close(self) -> None:
        """Close this thread's connections; the next use opens others."""
        for db in vars(self._local).values():
            cast(Database, db).close()
        vars(self._local).clear()

    def copy_to(self, path: Path) -> None:
        """A consistent, checked copy of the database, while others write. FlashError(state_corrupt | state_busy)."""
        with _named_errors(self.path), closing(sqlite3.connect(path)) as copy:
            self._db.conn.backup(copy)
            _check(copy)

    def check(self) -> None:
        """FlashError(state_corrupt) where a page of the database is damaged. Reads all of it."""
        with _named_errors(self.path):
            _check(self._db.conn)

    @contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """What `execute` and `query` do within is all or nothing, as the only writer. One within another joins it.

        BEGIN IMMEDIATE: a plain BEGIN that reads and then writes fails at once when another process wrote in between.
        """
        db = self._db
        if db.conn.in_transaction:
            yield
            return
        with _named_errors(self.path):
            _execute(db, "BEGIN IMMEDIATE")
            try:
                yield
                _execute(db, "COMMIT")
            except BaseException:
                db.rollback()
                raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """One write; the number of rows that it changed."""
        with self.transaction():
            return _execute(self._db, sql, values)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows as dicts, JSON columns decoded."""
        with _named_errors(self.path):
            found = cast("Iterable[Json]", self._db.query(sql, tuple(values)))  # pyright: ignore[reportUnknownMemberType]
            return [{name: _decode(name, value) for name, value in row.items()} for row in found]

    # -- runs ---------------------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> RunRow:
        """FlashError(unknown_run) where there is none of that id."""
        rows = self.query("SELECT * FROM runs WHERE id = ?", [run_id])
        if rows:
            return cast(RunRow, rows[0])
        recent = [row["id"] for row in self.query("SELECT id FROM runs ORDER BY created DESC LIMIT 1000")]
        raise FlashError(
            "unknown_run",
            f"there is no run {run_id!r}{_nearest(run_id, recent)}",
            run_id=run_id,
            fix="call status without run_id for the list of runs",
        )

    def runs(self, state: str | None = None, limit: int = 20, cursor: str | None = None) -> list[RunRow]:
        """The newest runs first. `cursor` is the id of the last run of the page before."""
        where, values = ["1"], list[Any]()
        if state is not None:
            where, values = ["state = ?"], [state]
        if cursor is not None:
            where.append("(created, id) < (?, ?)")
            values += [self.run(cursor)["created"], cursor]
        sql = f"SELECT * FROM runs WHERE {' AND '.join(where)} ORDER BY created DESC, id DESC LIMIT ?"
        return cast("list[RunRow]", self.query(sql, [*values, limit]))

    def active_runs(self) -> list[RunRow]:
        """Runs that have not ended, oldest first."""
        sql = f"SELECT * FROM runs WHERE state IN ({_marks(ACTIVE)}) ORDER BY created, id"
        return cast("list[RunRow]", self.query(sql, ACTIVE))

    def overlap(self, run: RunRow) -> Json | None:
        """What the splits of a run's environment version share, as a run that trained on it recorded; None: nothing."""
        sql = """SELECT lineage FROM runs WHERE environment = ? AND environment_digest = ?
                 AND json_extract(lineage, '$.overlap') IS NOT NULL ORDER BY created DESC LIMIT 1"""
        rows = self.query(sql, [run["environment"], run["environment_digest"]])
        return rows[0]["lineage"]["overlap"] if rows else None

    def run_counts(self) -> dict[str, int]:
        """{state: number of runs}"""
        rows = self.query("SELECT state, count(*) AS n FROM runs GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    # -- what a run reported ------------------------------------------------------------------------------------------

    def metrics(self, run_id: str, since: int = -1, limit: int | None = None) -> list[MetricRow]:
        """Steps after `since`, in order; with `limit` only the last so many of them."""
        sql = "SELECT step, epoch, time, metrics FROM metrics WHERE run_id = ? AND step > ? ORDER BY step DESC LIMIT ?"
        rows = self.query(sql, [run_id, since, -1 if limit is None else limit])
        return cast("list[MetricRow]", rows[::-1])

    def outline(self, run_id: str, every: int, after: int) -> list[MetricRow]:
        """Every `every`-th step from the first on, those with a held-out loss, and all after `after`, in order."""
        sql = """SELECT step, epoch, time, metrics FROM metrics WHERE run_id = ? AND ((step - 1) % ? = 0 OR step > ?
                 OR json_extract(metrics, '$.eval_loss') IS NOT NULL) ORDER BY step"""
        return cast("list[MetricRow]", self.query(sql, [run_id, every, after]))

    def last_metrics(self, run_id: str) -> MetricRow | None:
        rows = self.metrics(run_id, limit=1)
        return rows[0] if rows else None

    def values(self, run_id: str, name: str) -> list[float]:
        """One metric at each step that has it, in order. `name` is one of ours: a quotation mark would end it."""
        sql = (
            "SELECT json_extract(metrics, ?) AS value FROM metrics WHERE run_id = ? AND value IS NOT NULL ORDER BY step"
        )
        return [row["value"] for row in self.query(sql, [f'$."{name}"', run_id])]

    def series(self, run_id: str, name: str, points: int = 64) -> list[tuple[int, float]]:
        """One metric over the run as at most `points` (first step, mean) of equal stretches; nulls are left out."""
        sql = """
            SELECT min(step) AS step, avg(value) AS mean FROM (
                SELECT step, value, ntile(?) OVER (ORDER BY step) AS stretch FROM (
                    SELECT step, (SELECT value FROM json_each(metrics) WHERE key = ?) AS value FROM metrics
                    WHERE run_id = ?)
                WHERE value IS NOT NULL)
            GROUP BY stretch ORDER BY stretch"""
        rows = self.query(sql, [points, name, run_id])
        return [(row["step"], row["mean"]) for row in rows]

    def rollouts(
        self,
        run_id: str,
        split: str = "train",
        step: int | None = None,
        order: RolloutOrder = "worst",
        contains: str | None = None,
        success: bool | None = None,
        limit: int = 10,
        offset: int = 0,
        seed: int = 0,
    ) -> list[RolloutRow]:
        """Transcripts of one step, or of all. `contains` looks into the messages' text, ignoring ASCII case.

        `random` is an order of its own for each seed, so that pages of it fit together.
        """
        where, values = _rollout_filter(run_id, split, step, contains, success)
        orders = {
            "worst": "reward, step DESC, position",
            "best": "reward DESC, step DESC, position",
            "random": f"((step + {int(seed)}) * 48271 + position * 69621 + 11) * 16807 % 2147483647",
            "index": "step, position",
        }
        sql = f"SELECT step, position, body FROM rollouts WHERE {where} ORDER BY {orders[order]} LIMIT ? OFFSET ?"
        rows = self.query(sql, [*values, limit, offset])
        return [cast(RolloutRow, {**row["body"], "step": row["step"], "index": row["position"]}) for row in rows]

    def rollout_count(
        self,
        run_id: str,
        split: str = "train",
        step: int | None = None,
        contains: str | None = None,
        success: bool | None = None,
    ) -> int:
        where, values = _rollout_filter(run_id, split, step, contains, success)
        return int(self.query(f"SELECT count(*) AS n FROM rollouts WHERE {where}", values)[0]["n"])

    def rollout_steps(self, run_id: str, split: str = "train") -> list[int]:
        """Steps that have rollouts, in order."""
        sql = "SELECT DISTINCT step FROM rollouts WHERE run_id = ? AND split = ? ORDER BY step"
        return [row["step"] for row in self.query(sql, [run_id, split])]

    def evals(self, run_id: str) -> list[EvalRow]:
        """In order of steps; step 0 is the untrained model."""
        sql = "SELECT step, epoch, time, summary FROM evals WHERE run_id = ? ORDER BY step"
        return cast("list[EvalRow]", self.query(sql, [run_id]))

    def events(self, run_id: str, limit: int = 20, kinds: Sequence[str] = ()) -> list[EventRow]:
        """The last `limit` events, oldest first."""
        only = f"AND kind IN ({_marks(kinds)})" if kinds else ""
        sql = f"""SELECT name, time, epoch, kind, message, data FROM events
                  WHERE run_id = ? {only} ORDER BY time DESC, name DESC LIMIT ?"""
        return cast("list[EventRow]", self.query(sql, [run_id, *kinds, limit])[::-1])

    def checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """In order of steps."""
        sql = """SELECT step, epoch, time, digest, size_bytes, path, metrics FROM checkpoints
                 WHERE run_id = ? ORDER BY step"""
        return cast("list[CheckpointRow]", self.query(sql, [run_id]))

    def checkpoint(self, run_id: str, step: int | None = None) -> CheckpointRow:
        """The one at `step`, or the newest. FlashError(unknown_run | unknown_checkpoint)."""
        run, rows = self.run(run_id), self.checkpoints(run_id)
        found = [row for row in rows if step is None or row["step"] == step]
        if found:
            return found[-1]
        wait = (
            "wait for the first one: status shows the run's progress" if run["state"] in ACTIVE else "use another run"
        )
        raise FlashError(
            "unknown_checkpoint",
            f"run {run_id} has no checkpoint" + (f" at step {step}" if step is not None else ""),
            run_id=run_id,
            step=step,
            fix=f"use one of the steps {[row['step'] for row in rows]}" if rows else wait,
        )

    # -- what the supervisor writes; each may be done again -----------------------------------------------------------

    def _is_stale(self, table: str, run_id: str, row: Json) -> bool:
        """Whether a newer attempt reported that step: an attempt that was replaced, and woke, changes nothing."""
        sql = f"SELECT 1 FROM {table} WHERE run_id = ? AND step = ? AND epoch > ?"
        return bool(self.query(sql, [run_id, row["step"], row["epoch"]]))

    def put_metrics(self, run_id: str, row: Json) -> None:
        if self._is_stale("metrics", run_id, row):
            return
        self._put("metrics", {"run_id": run_id, **_pick(row, "step", "epoch", "time", "metrics")})

    def put_rollouts(self, run_id: str, split: str, step: int, rollouts: Iterable[Json]) -> None:
        """All rollouts of a step: those of an attempt that wrote it before are gone."""
        rows = [
            {
                "run_id": run_id,
                "split": split,
                "step": step,
                "position": rollout.get("index", position),
                "reward": float(rollout["reward"]),
                "success": int(rollout["success"]),
                "body": rollout,
            }
            for position, rollout in enumerate(rollouts)
        ]
        with self.transaction():
            self.execute("DELETE FROM main.rollouts WHERE run_id = ? AND split = ? AND step = ?", [run_id, split, step])
            for row in rows:
                self._put("rollouts", row)

    def put_evaluation(self, run_id: str, evaluation: Json) -> None:
        row: Json = {"run_id": run_id, **_pick(evaluation, "step", "epoch", "time", "summary")}
        if self._is_stale("evals", run_id, row):
            return
        with self.transaction():
            self.put_rollouts(run_id, "eval", row["step"], evaluation["rollouts"])
            self._put("evals", row)

    def put_event(self, run_id: str, name: str, row: Json) -> None:
        """An event never changes: the first of its name stays."""
        known = _pick(row, "time", "epoch", "kind", "message")
        data = {key: value for key, value in row.items() if key not in known}
        self._put("events", {"run_id": run_id, "name": name, **known, "data": data}, "INSERT OR IGNORE")

    def put_checkpoint(self, run_id: str, manifest: Json, path: str) -> None:
        if self._is_stale("checkpoints", run_id, manifest):
            return
        known = _pick(manifest, "step", "epoch", "time", "digest", "size_bytes", "metrics")
        self._put("checkpoints", {"run_id": run_id, **known, "path": path})

    def insert(self, table: str, row: Mapping[str, Any]) -> None:
        """A new row; a repeated key is an error."""
        self._put(table, row, "INSERT")

    def _put(self, table: str, row: Mapping[str, Any], verb: str = "INSERT OR REPLACE") -> None:
        sql = f"{verb} INTO main.{table} ({', '.join(row)}) VALUES ({_marks(row)})"
        self.execute(sql, [_encode(value) for value in row.values()])

    # -- environments -------------------------------------------------------------------------------------------------

    def add_environment(
        self, *, name: str, digest: str, path: str, size_bytes: int, data: Json | None = None
    ) -> EnvironmentRow:
        """Record a version as the caller's; it becomes the newest of its name, also when it had been pushed before.

        FlashError(quota_exceeded) where a caller who is not the local owner would have too much stored.
        """
        row = EnvironmentRow(
            owner=caller().owner,
            name=name,
            digest=digest,
            path=path,
            size_bytes=size_bytes,
            pushed=time.time(),
            data=data or {},
        )
        with self.transaction():
            self._check_room(row)
            self._put("environments", row)
        return row

    def publish(self, stage: Stage, data: Json | None = None) -> tuple[EnvironmentRow, Version]:
        """Row and files of a version together: a refused row leaves no files. Raises as `add_environment` does."""
        path, size = str(stage.parent / stage.digest), stage.size_bytes
        with self.transaction():
            row = self.add_environment(
                name=stage.parent.name, digest=stage.digest, path=path, size_bytes=size, data=data
            )
            return row, stage.commit()

    def _check_room(self, row: EnvironmentRow) -> None:
        others = "SELECT coalesce(sum(size_bytes), 0) AS n FROM environments WHERE (name, digest) != (?, ?)"
        stored, limit = self.query(others, [row["name"], row["digest"]])[0]["n"], caller().limits.environment_bytes
        if not caller().is_local and stored + row["size_bytes"] > limit:
            what = f"your environments take {stored:,} of {limit:,} bytes, and this one {row['size_bytes']:,} more"
            fix = "push fewer or smaller files; whoever runs the server can remove versions or raise the limit"
            raise FlashError("quota_exceeded", what, stored=stored, limit=limit, fix=fix)

    def environments(self) -> list[EnvironmentRow]:
        """All versions, the caller's own first, by name, the newest of a name first."""
        sql = "SELECT * FROM environments ORDER BY owner != ?, owner, name, pushed DESC"
        return cast("list[EnvironmentRow]", self.query(sql, [caller().owner]))

    def environment(self, reference: str) -> EnvironmentRow:
        """NAME is its newest version; in NAME@DIGEST six characters of the digest do. The caller's own come first.

        Raises FlashError(unknown_environment).
        """
        name, _, digest = reference.partition("@")
        sql = "SELECT * FROM environments WHERE name = ? ORDER BY owner != ?, pushed DESC"
        versions = cast("list[EnvironmentRow]", self.query(sql, [name, caller().owner]))
        if versions and not digest:
            return versions[0]
        found = [row for row in versions if len(digest) >= 6 and row["digest"].startswith(digest)]
        if len({row["digest"] for row in found}) == 1:
            return found[0]
        if versions:
            what = f"{name!r} has no version {digest!r}"
            fix = f"use {name!r} or one of: {', '.join(row['digest'] for row in versions[:5])}"
        else:
            names = [row["name"] for row in self.query("SELECT DISTINCT name FROM environments")]
            what = f"no environment {name!r} was pushed{_nearest(name, names)}"
            fix = "publish it with env_push" if names else "publish one with env_push; env_setup writes a starter"
        raise FlashError("unknown_environment", what, environment=reference, fix=fix)

    # -- deployments --------------------------------------------------------------------------------------------------

    def add_deployment(self, row: Mapping[str, Any]) -> DeploymentRow:
        """`row` holds id, owner, name and model at least; state is starting unless given."""
        now = time.time()
        blank = dict.fromkeys(("run_id", "step", "adapter_path", "error", "base_url", "pid"))
        self.insert("deployments", {**blank, "state": "starting", "data": {}, "created": now, "updated": now, **row})
        return self.deployment(str(row["id"]))

    def deployments(self, states: Sequence[str] = ()) -> list[DeploymentRow]:
        """Of these states, or all; oldest first."""
        only = f"WHERE state IN ({_marks(states)})" if states else ""
        return cast("list[DeploymentRow]", self.query(f"SELECT * FROM deployments {only} ORDER BY created, id", states))

    def deployment(self, deployment_id: str) -> DeploymentRow:
        """FlashError(unknown_deployment) where there is none of that id."""
        rows = self.query("SELECT * FROM deployments WHERE id = ?", [deployment_id])
        if rows:
            return cast(DeploymentRow, rows[0])
        live = [row["id"] for row in self.deployments(LIVE_DEPLOYMENT)]
        raise FlashError(
            "unknown_deployment",
            f"there is no deployment {deployment_id!r}{_nearest(deployment_id, live)}",
            deployment_id=deployment_id,
            fix=f"use one of: {', '.join(live)}" if live else "start one with deploy",
        )

    def update_deployment(self, deployment_id: str, *, expected_states: Sequence[str] = (), **values: Any) -> bool:
        """Set columns, if the caller sees it and its state is one of `expected_states`, where given; whether it was."""
        only = f"AND state IN ({_marks(expected_states)})" if expected_states else ""
        values["updated"] = time.time()
        assignments = ", ".join(f"{name} = ?" for name in values)
        sql = f"UPDATE main.deployments SET {assignments} WHERE id = (SELECT id FROM deployments WHERE id = ?) {only}"
        encoded = [_encode(value) for value in values.values()]
        return self.execute(sql, [*encoded, deployment_id, *expected_states]) == 1


def _hide_what_is_not_the_callers(db: Database) -> None:
    """Put a view of the caller's rows before every table, also before those that later versions will add."""
    db.conn.create_function("caller", 0, lambda: caller().owner, deterministic=True)
    for table in db.table_names():
        if table.startswith("sqlite_"):  # SQLite's own notes, which take no view
            continue
        columns = db[table].columns_dict
        if "owner" in columns:
            theirs = "owner = caller()"
        elif "run_id" in columns:
            theirs = "run_id IN (SELECT id FROM main.runs WHERE owner = caller())"
        else:
            theirs = "false"
        _execute(db, f"CREATE TEMP VIEW [{table}] AS SELECT * FROM main.[{table}] WHERE {theirs}")


def _execute(db: Database, sql: str, values: Sequence[Any] = ()) -> int:
    return int(db.execute(sql, values).rowcount)  # pyright: ignore[reportUnknownMemberType]


def _check(connection: Any) -> None:
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"malformed: {found}")


@contextmanager
def _named_errors(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "disk is full" in str(error):
            fix = "free space there, or set FLASH_HOME to a folder on another disk"
            raise FlashError("disk_full", "no space is left on the disk", path=path, fix=fix) from error
        if "locked" in str(error):
            fix = "try again; if it stays so, find the program that holds the file open"
            raise FlashError("state_busy", "another program keeps the database locked", path=path, fix=fix) from error
        raise
    except sqlite3.DatabaseError as error:
        if "malformed" not in str(error) and "not a database" not in str(error):
            raise
        fix = "bring back a backup with `flash-mcp restore`; what runs reported stays in their folders"
        raise FlashError("state_corrupt", f"the database is damaged: {error}", path=path, fix=fix) from error


def _rollout_filter(
    run_id: str, split: str, step: int | None, contains: str | None, success: bool | None
) -> tuple[str, list[Any]]:
    where, values = ["run_id = ?", "split = ?"], list[Any]([run_id, split])
    if step is not None:
        where.append("step = ?")
        values.append(step)
    if success is not None:
        where.append("success = ?")
        values.append(int(success))
    if contains:
        where.append("""EXISTS (SELECT 1 FROM json_each(body, '$.messages')
                        WHERE instr(lower(json_extract(value, '$.content')), lower(?)))""")
        values.append(contains)
    return " AND ".join(where), values


def _pick(row: Mapping[str, Any], *names: str) -> Json:
    return {name: row[name] for name in names}


def _marks(values: Iterable[Any]) -> str:
    return ", ".join("?" for _ in values)


def _encode(value: Any) -> Any:
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return os.fspath(value) if isinstance(value, Path) else value


def _decode(name: str, value: Any) -> Any:
    return json.loads(value) if name in JSON_COLUMNS and value is not None else value


def _nearest(wanted: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(wanted, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
