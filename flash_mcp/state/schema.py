"""The tables, their rows, and the migrations that lead to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from flash_mcp.protocol.spec import LOCAL_TARGET
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
        "reported_error",
        "rounds",
        "metrics",
        "summary",
        "data",
        "body",
        "secrets",
    ]
)

SCHEMA = f"""
CREATE TABLE runs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL DEFAULT '{LOCAL_OWNER}', state TEXT NOT NULL,
    algorithm TEXT NOT NULL, model TEXT NOT NULL,
    environment TEXT NOT NULL DEFAULT '', environment_digest TEXT NOT NULL DEFAULT '',
    environment_path TEXT NOT NULL DEFAULT '', serves TEXT,
    spec TEXT NOT NULL, sources TEXT NOT NULL DEFAULT '{{}}', lineage TEXT NOT NULL DEFAULT '{{}}',
    init_adapter TEXT, dataset TEXT,
    idempotency_key TEXT, request_digest TEXT NOT NULL DEFAULT '',
    folder TEXT NOT NULL, files_removed REAL,
    target TEXT NOT NULL DEFAULT '{LOCAL_TARGET}', handle TEXT, pending_reason TEXT,
    attempt INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL,
    preemptions INTEGER NOT NULL DEFAULT 0,
    used_s REAL NOT NULL DEFAULT 0, used_before_s REAL NOT NULL DEFAULT 0,
    gpus INTEGER GENERATED ALWAYS AS (coalesce(json_extract(spec, '$.gpus'), 1)) STORED,
    steps INTEGER, step INTEGER NOT NULL DEFAULT 0, phase TEXT, beat REAL, progress REAL,
    cancel_requested REAL, cancel_reason TEXT, not_before REAL NOT NULL DEFAULT 0, error TEXT,
    reported_error TEXT, precision TEXT,
    created REAL NOT NULL, started REAL, ended REAL, updated REAL NOT NULL);
CREATE INDEX runs_by_state ON runs (state, created, id, serves);
CREATE INDEX runs_by_age ON runs (created, id);
CREATE UNIQUE INDEX runs_by_key ON runs (owner, idempotency_key);
-- Every claim reads from this index alone what each owner used lately.
CREATE INDEX runs_by_end ON runs (target, ended, owner, started, serves, used_s, gpus)
    WHERE ended IS NOT NULL;
-- A look at a target asks about its runs that have not ended: thousands may be queued, and hundreds
-- under way.
CREATE INDEX runs_queued ON runs (target, owner, created, id, not_before, serves, gpus)
    WHERE state = 'queued';
CREATE INDEX runs_taken ON runs (target, created, id, updated, owner, started, state, serves,
    used_s, gpus) WHERE state IN ('starting', 'running');
CREATE INDEX runs_with_secrets ON runs (state, target)
    WHERE json_array_length(spec, '$.secrets') > 0;
CREATE INDEX runs_put_off ON runs (state, target)
    WHERE json_extract(error, '$.code') IN ('disk_full', 'held');
CREATE INDEX runs_evaluations ON runs (environment_digest, created, id) WHERE algorithm = 'eval';
CREATE INDEX runs_of_deployments ON runs (serves) WHERE serves IS NOT NULL;
CREATE TABLE metrics (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, time REAL NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE rollouts (
    run_id TEXT NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL, position INTEGER NOT NULL,
    reward REAL NOT NULL, success INTEGER NOT NULL,
    -- Parts of the body: whoever needs them alone reads no transcript.
    task_id TEXT NOT NULL, kind TEXT NOT NULL, code TEXT, truncated INTEGER NOT NULL,
    tokens INTEGER NOT NULL, turns INTEGER NOT NULL, expected TEXT,
    body TEXT NOT NULL,
    PRIMARY KEY (run_id, split, step, position));
CREATE INDEX rollouts_by_reward ON rollouts (run_id, split, reward);
-- Lists and verdicts read evaluations from this index alone.
CREATE INDEX rollouts_evaluated ON rollouts (run_id, split, step, position, success, code, kind,
    task_id, reward, truncated, tokens, turns, expected) WHERE split = 'eval';
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
-- The end of what the newest attempt printed, of runs whose folders are elsewhere.
CREATE TABLE logs (
    run_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, tail TEXT NOT NULL);
CREATE TABLE tournaments (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL DEFAULT '{LOCAL_OWNER}', state TEXT NOT NULL,
    target TEXT NOT NULL, spec TEXT NOT NULL, rounds TEXT NOT NULL, error TEXT,
    idempotency_key TEXT, created REAL NOT NULL, ended REAL);
-- A look at a sealed exam outlives its run.
CREATE TABLE exam_looks (
    run_id TEXT PRIMARY KEY, exam_id TEXT NOT NULL, owner TEXT NOT NULL, number INTEGER NOT NULL,
    policy TEXT NOT NULL, subject TEXT, summary TEXT);
CREATE INDEX tournaments_live ON tournaments (target) WHERE state = 'running';
-- Run folders in the storage of targets that are to be deleted.
CREATE TABLE removed_folders (
    place TEXT PRIMARY KEY, target TEXT NOT NULL, looks INTEGER NOT NULL, due REAL NOT NULL);
CREATE TABLE environments (
    owner TEXT NOT NULL DEFAULT '{LOCAL_OWNER}', name TEXT NOT NULL, digest TEXT NOT NULL,
    path TEXT NOT NULL, size_bytes INTEGER NOT NULL, pushed REAL NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (owner, name, digest));
-- The newest verdict of env_test on some files with some arguments.
CREATE TABLE gates (
    owner TEXT NOT NULL, digest TEXT NOT NULL, args TEXT NOT NULL, time REAL NOT NULL,
    data TEXT NOT NULL, PRIMARY KEY (owner, digest, args));
CREATE TABLE deployments (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL DEFAULT '{LOCAL_OWNER}', name TEXT NOT NULL,
    model TEXT NOT NULL, run_id TEXT, step INTEGER, adapter_path TEXT, state TEXT NOT NULL,
    error TEXT, base_url TEXT,
    target TEXT NOT NULL DEFAULT '{LOCAL_TARGET}', server_run TEXT, server_attempt INTEGER,
    lora_rank INTEGER NOT NULL DEFAULT 0, thinking INTEGER NOT NULL DEFAULT 0,
    port INTEGER, idle_minutes REAL, record INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, updated REAL NOT NULL);
CREATE TABLE tokens (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, access TEXT NOT NULL,
    secrets TEXT NOT NULL, created REAL NOT NULL, expires REAL, used REAL, revoked REAL)
"""

migrations = Migrations("flash_mcp")
"""A version that is released keeps its schema: a later one adds a migration and changes none."""


@migrations(name="0.1.0")
def _create(db: Database) -> None:  # pyright: ignore[reportUnusedFunction]
    for statement in SCHEMA.split(";\n"):
        execute(db, statement)


@cache
def schema() -> int:
    """The number of migrations that this code knows."""
    return len(_known_migrations())


def newer_migrations(db: Database) -> list[str]:
    existing = _known_migrations()
    return [row.name for row in migrations.applied(db) if row.name not in existing]


def columns(db: Database) -> set[tuple[str, str]]:
    sql = """SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c
             WHERE t.type = 'table'"""
    return set(db.execute(sql).fetchall())  # pyright: ignore[reportUnknownMemberType]


@cache
def known_columns() -> frozenset[tuple[str, str]]:
    db = Database(memory=True)
    migrations.apply(db)
    return frozenset(columns(db))


def _known_migrations() -> set[str]:
    return {migration.name for migration in migrations.pending(Database(memory=True))}


def execute(db: Database, sql: str, values: Sequence[Any] = ()) -> int:
    return int(db.execute(sql, values).rowcount)  # pyright: ignore[reportUnknownMemberType]
