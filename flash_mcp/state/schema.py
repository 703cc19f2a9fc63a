"""The tables, their rows, and the migrations that lead to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, cast

from flash_mcp.protocol.records import Json
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.home_paths import make_relative
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.sqlite import Database, Migrations

RolloutOrder = Literal["worst", "best", "random", "index"]

JSON_COLUMNS = frozenset(
    [
        "spec",
        "sources",
        "init_adapter",
        "dataset",
        "lineage",
        "error",
        "metrics",
        "summary",
        "data",
        "body",
        "secrets",
    ]
)

migrations = Migrations("flash_mcp")


@migrations(name="0001_initial")
def _initial(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    for statement in _SCHEMA_1.split(";\n"):
        execute(db, statement)


@migrations(name="0002_dataset")
def _dataset(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    execute(db, "ALTER TABLE runs ADD COLUMN dataset TEXT")


@migrations(name="0003_lineage")
def _lineage(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    execute(db, "ALTER TABLE runs ADD COLUMN lineage TEXT NOT NULL DEFAULT '{}'")


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
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE rollouts (
    run_id TEXT NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL, position INTEGER NOT NULL,
    reward REAL NOT NULL, success INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (run_id, split, step, position));
CREATE INDEX rollouts_by_reward ON rollouts (run_id, split, reward);
CREATE TABLE evals (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL,
    summary TEXT NOT NULL,
    PRIMARY KEY (run_id, step));
CREATE TABLE events (
    run_id TEXT NOT NULL, name TEXT NOT NULL, time REAL NOT NULL, epoch INTEGER NOT NULL,
    kind TEXT NOT NULL, message TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (run_id, name));
CREATE TABLE checkpoints (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL,
    digest TEXT NOT NULL, size_bytes INTEGER NOT NULL, path TEXT NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (run_id, step));
CREATE TABLE environments (
    name TEXT NOT NULL, digest TEXT NOT NULL, path TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    pushed REAL NOT NULL, data TEXT NOT NULL, PRIMARY KEY (name, digest));
CREATE TABLE deployments (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, model TEXT NOT NULL, run_id TEXT, step INTEGER,
    adapter_path TEXT, state TEXT NOT NULL, error TEXT, base_url TEXT, pid INTEGER,
    data TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL)
"""


@migrations(name="owners")
def _owners(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """Give all there is to the local owner. Names and idempotency keys are each owner's own from
    now on.
    """
    column = f"owner TEXT NOT NULL DEFAULT '{LOCAL_OWNER}'"
    execute(db, f"ALTER TABLE deployments ADD COLUMN {column}")
    _rebuild(
        db,
        "environments",
        "PRIMARY KEY (name, digest)",
        f"{column}, PRIMARY KEY (owner, name, digest)",
    )
    _rebuild(db, "runs", "idempotency_key TEXT UNIQUE", f"{column}, idempotency_key TEXT")
    execute(db, "CREATE UNIQUE INDEX runs_by_key ON runs (owner, idempotency_key)")
    execute(
        db,
        """CREATE TABLE tokens (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, access TEXT NOT NULL,
        secrets TEXT NOT NULL, created REAL NOT NULL, expires REAL, used REAL, revoked REAL)""",
    )


@migrations(name="relative_paths")
def _relative_paths(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    make_relative(db)


@migrations(name="files_removed")
def _files_removed(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    execute(db, "ALTER TABLE runs ADD COLUMN files_removed REAL")


@migrations(name="runs_by_end")
def _runs_by_end(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """What each owner used lately is read from this index alone, at every claim."""
    execute(db, "CREATE INDEX runs_by_end ON runs (ended, owner, started) WHERE ended IS NOT NULL")


@migrations(name="gates")
def _gates(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """The newest verdict of env_test on some files with some arguments."""
    execute(
        db,
        """CREATE TABLE gates (
        owner TEXT NOT NULL, digest TEXT NOT NULL, args TEXT NOT NULL, time REAL NOT NULL,
        data TEXT NOT NULL, PRIMARY KEY (owner, digest, args))""",
    )


@migrations(name="used_s")
def _used_s(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    execute(db, "ALTER TABLE runs ADD COLUMN used_s REAL NOT NULL DEFAULT 0")
    execute(db, "ALTER TABLE runs ADD COLUMN used_before_s REAL NOT NULL DEFAULT 0")


@migrations(name="targets")
def _targets(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """Where a run's attempts run, and what the engine there calls the newest one."""
    execute(db, f"ALTER TABLE runs ADD COLUMN target TEXT NOT NULL DEFAULT '{LOCAL_TARGET}'")
    execute(db, "ALTER TABLE runs ADD COLUMN handle TEXT")
    execute(db, "ALTER TABLE runs ADD COLUMN pending_reason TEXT")
    execute(db, "ALTER TABLE runs ADD COLUMN preemptions INTEGER NOT NULL DEFAULT 0")


@migrations(name="logs")
def _logs(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """The end of what the newest attempt printed, of runs whose folders lie elsewhere."""
    execute(
        db,
        """CREATE TABLE logs (
        run_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, tail TEXT NOT NULL)""",
    )


@migrations(name="removed_folders")
def _removed_folders(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """Run folders in the storage of targets that are to be deleted."""
    execute(
        db,
        """CREATE TABLE removed_folders (
        place TEXT PRIMARY KEY, target TEXT NOT NULL, looks INTEGER NOT NULL, due REAL NOT NULL)""",
    )


@migrations(name="runs_by_end_on_target")
def _runs_by_end_on_target(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """As before, for each target."""
    execute(db, "DROP INDEX runs_by_end")
    columns = "ended, owner, started, target"
    execute(db, f"CREATE INDEX runs_by_end ON runs ({columns}) WHERE ended IS NOT NULL")


@migrations(name="active_runs")
def _active_runs(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """What a look at a target asks about its runs that have not ended: thousands may be queued, and
    hundreds under way.
    """
    indexes = {
        "runs_queued": "(target, owner, created, id, not_before) WHERE state = 'queued'",
        "runs_taken": """(target, created, id, updated, owner, started, state)
            WHERE state IN ('starting', 'running')""",
        "runs_with_secrets": "(state, target) WHERE json_array_length(spec, '$.secrets') > 0",
        "runs_short_of_space": """(state, target)
            WHERE json_extract(error, '$.code') = 'disk_full'""",
    }
    for name, what in indexes.items():
        execute(db, f"CREATE INDEX {name} ON runs {what}")


@migrations(name="runs_by_target_and_end")
def _runs_by_target_and_end(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    """As before, without the runs of other targets."""
    execute(db, "DROP INDEX runs_by_end")
    columns = "target, ended, owner, started"
    execute(db, f"CREATE INDEX runs_by_end ON runs ({columns}) WHERE ended IS NOT NULL")


@cache
def schema() -> int:
    """The number of migrations that this code knows."""
    return len(_known_migrations())


def newer_migrations(db: Database) -> list[str]:
    """Migrations of the database that this code does not know."""
    known = _known_migrations()
    return [applied.name for applied in migrations.applied(db) if applied.name not in known]


def _known_migrations() -> set[str]:
    return {migration.name for migration in migrations.pending(Database(memory=True))}


def _rebuild(db: Database, table: str, old: str, new: str) -> None:
    """Make a table anew with `new` for `old` in its definition, rows, indexes and later columns
    kept.
    """
    sql = "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql > ''"
    rows = cast("Iterable[Json]", db.query(sql, [table]))  # pyright: ignore[reportUnknownMemberType]
    schema = [str(row["sql"]) for row in rows]
    columns = ", ".join(db[table].columns_dict)
    definition = next(sql for sql in schema if sql.startswith("CREATE TABLE"))
    assert old in definition
    execute(db, f"ALTER TABLE {table} RENAME TO {table}_before")
    execute(db, definition.replace(old, new))
    execute(db, f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}_before")
    execute(db, f"DROP TABLE {table}_before")
    for sql in schema:
        if sql != definition:
            execute(db, sql)


def execute(db: Database, sql: str, values: Sequence[Any] = ()) -> int:
    return int(db.execute(sql, values).rowcount)  # pyright: ignore[reportUnknownMemberType]
