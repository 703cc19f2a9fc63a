"""The database: runs, environments and deployments in one SQLite file.

Every process may read and enqueue; only the supervisor writes all the time. All SQL goes through
`Store.query` (reads) and `Store.transaction` (writes); queue.py holds the transitions of a run's
state.

Owners are separated here and nowhere else. A caller other than the local owner gets a connection on
which a temporary view hides each table: it has the table's name and only the caller's rows, so
queries need no condition. Writes name main.TABLE, since views cannot be written, and select their
rows through the view."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote

from flash_mcp import __version__
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.paths import DATABASE, HomeError
from flash_mcp.protocol.records import Json, Record
from flash_mcp.state.disk import LEAST_FREE_BYTES, has_space
from flash_mcp.state.locks import lock
from flash_mcp.state.owners import caller
from flash_mcp.state.schema import (
    JSON_COLUMNS,
    columns,
    execute,
    known_columns,
    migrations,
    newer_migrations,
)
from flash_mcp.state.sqlite import Database, sqlite3  # pyright: ignore[reportPrivateImportUsage]

# Paths in the database below the state directory are relative, so that it can be moved. A stored
# path begins with HERE in its place. HERE differs from "./", so a user's own "./data" in
# environment_args is left alone.

HERE = ".//"
PATH_COLUMNS = {
    "runs": ("folder", "environment_path", "init_adapter", "dataset", "spec", "lineage"),
    "checkpoints": ("path",),
    "environments": ("path",),
    "deployments": ("adapter_path",),
    "tournaments": ("spec",),
}
NAMES = frozenset[str]().union(*PATH_COLUMNS.values())


def to_stored(base: Path, value: Any) -> Any:
    """`value` with HERE for the state directory at the beginning of every text in it."""
    return moved(value, f"{base}/", HERE)


def moved(value: Any, old: str, new: str) -> Any:
    """`value` with `new` for `old` at the beginning of every text in it."""
    if isinstance(value, str):
        if value.startswith(old):
            return new + value.removeprefix(old)
        return value
    if isinstance(value, dict):
        return {name: moved(item, old, new) for name, item in cast("Json", value).items()}
    if isinstance(value, list | tuple):
        return [moved(item, old, new) for item in cast("list[Any]", value)]
    return value


RecordKind = TypeVar("RecordKind", bound=Record)
BUSY_TIMEOUT_S = 10
THREADS_TIMEOUT_S = 60.0
"""How long a thread waits for the others of its process."""
SYNCHRONOUS = "FULL"
"""A caller was told that its run is queued: that has to survive a power cut."""
PAGES_AT_ONCE = 1000
ENCODED = JSON_COLUMNS | NAMES
"""Columns that are decoded when they are read."""
REBUILD = "rebuild it from the run folders with `flash-mcp recover`, or unpack a backup"


class Connection:
    """The database BASE/flash.db, created and migrated if needed; each thread has a connection."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.path = base / DATABASE
        self.is_read_only = self.path.is_file() and not os.access(base, os.W_OK)
        self._local = threading.local()
        self._writing = threading.Lock()
        """Threads queue for it: of many that poll SQLite's lock, some never get it."""
        if not self.is_read_only:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _named_errors(self.path):
            self._refuse_newer()
            # Reads only: another program's write transaction does not delay it.
            (journal,) = self._db.conn.execute("PRAGMA journal_mode").fetchone()
            if migrations.pending(self._db) or (journal != "wal" and not self.is_read_only):
                self._refuse_read_only()
                # Two processes that turn WAL on at once fail whatever their busy time-out.
                path = self.base / "flash.db.lock"
                with path.open("a") as held:
                    if not lock(held, BUSY_TIMEOUT_S):
                        raise _busy(path)
                    # It holds for a database that has no tables yet.
                    execute(self._db, "PRAGMA auto_vacuum=INCREMENTAL")
                    execute(self._db, "PRAGMA journal_mode=WAL")
                    self._refuse_newer()
                    with self.transaction():
                        migrations.apply(self._db)
            # The tables of a version change until it is released
            if lacking := sorted(known_columns() - columns(self._db)):
                table, column = lacking[0]
                what = f"the database is of an unreleased version: {table} has no column {column}"
                raise FlashError("state_corrupt", what, path=self.path, fix=REBUILD)

    def _refuse_newer(self) -> None:
        """Code that does not know all of a database's tables and columns could lose rows of it."""
        if newer := newer_migrations(self._db):
            other = f"another version of flash-mcp than this {__version__}"
            what = f"{other} made or changed the database"
            fix = "install that version or a newer one, or set FLASH_HOME to another folder"
            raise FlashError("state_newer", what, path=self.path, unknown=newer, fix=fix)

    def _refuse_read_only(self) -> None:
        if self.is_read_only:
            raise HomeError(errno.EROFS, os.strerror(errno.EROFS), str(self.base))

    @property
    def _db(self) -> Database:
        """This thread's connection: to all rows for the local owner, to their own for others."""
        kind = "all" if caller().is_local else "own"
        db: Database | None = getattr(self._local, kind, None)
        if db is None:
            with _named_errors(self.path), ExitStack() as on_error:
                db = _read_only(self.path) if self.is_read_only else Database(self.path)
                on_error.callback(db.close)
                # Transactions begin where `transaction` says so, not where the module guesses.
                db.conn.isolation_level = None
                _wait_for_locks(db, BUSY_TIMEOUT_S)
                execute(db, f"PRAGMA synchronous={SYNCHRONOUS}")
                if kind == "own":
                    _hide_what_is_not_the_callers(db)
                on_error.pop_all()
            setattr(self._local, kind, db)
        return db

    def close(self) -> None:
        """Close this thread's connections; the next use opens new ones."""
        for db in vars(self._local).values():
            cast(Database, db).close()
        vars(self._local).clear()

    def check(self) -> None:
        """Read the whole database; FlashError(state_corrupt) if a page is damaged."""
        with _named_errors(self.path):
            (result,) = self._db.conn.execute("PRAGMA integrity_check(1)").fetchone()
            if result != "ok":
                raise sqlite3.DatabaseError(f"malformed: {result}")

    def shrink(self) -> int:
        """Give the pages of deleted rows back to the disk, a few at a time, so that no writer waits
        for long; the bytes that the file lost.
        """
        before = self.path.stat().st_size
        db = self._db.conn
        with _named_errors(self.path):
            (free_pages,) = db.execute("PRAGMA freelist_count").fetchone()
            for _ in range(0, free_pages, PAGES_AT_ONCE):
                with self.transaction():
                    # Each fetched row is one page that was given back.
                    db.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return before - self.path.stat().st_size

    @contextmanager
    def transaction(self, wait_s: float | None = None) -> Generator[None, None, None]:
        """What `execute` and `query` do within is all or nothing, as the only writer. One within
        another joins it. Another writer is waited for up to `wait_s`, by default BUSY_TIMEOUT_S;
        then FlashError(state_busy).

        BEGIN IMMEDIATE: a plain BEGIN that reads and then writes fails at once when another process
        wrote in between."""
        self._refuse_read_only()
        db = self._db
        if db.conn.in_transaction:
            yield
            return
        if not self._writing.acquire(timeout=THREADS_TIMEOUT_S if wait_s is None else wait_s):
            raise _busy(self.path)
        try:
            with _named_errors(self.path):
                if wait_s is None:
                    execute(db, "BEGIN IMMEDIATE")
                else:
                    _wait_for_locks(db, wait_s)
                    try:
                        execute(db, "BEGIN IMMEDIATE")
                    finally:
                        _wait_for_locks(db, BUSY_TIMEOUT_S)
                try:
                    yield
                    execute(db, "COMMIT")
                except BaseException:
                    db.rollback()
                    raise
        finally:
            self._writing.release()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """One write; the number of rows that it changed."""
        with self.transaction():
            return execute(self._db, sql, values)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows as dicts: JSON columns decoded, paths absolute."""
        with _named_errors(self.path):
            result = cast("Iterable[Json]", self._db.query(sql, tuple(values)))  # pyright: ignore[reportUnknownMemberType]
            rows = list(result)
        for row in rows:
            for name in ENCODED.intersection(row):
                value = row[name]
                if value is not None and name in JSON_COLUMNS:
                    value = json.loads(value)
                if name in NAMES:
                    value = moved(value, HERE, f"{self.base}/")  # which may have moved since
                row[name] = value
        return rows

    def first(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any] | None:
        return next(iter(self.query(sql, values)), None)

    def column(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        return [next(iter(row.values())) for row in self.query(sql, values)]

    def two_columns(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, Any]]:
        return [cast("tuple[Any, Any]", tuple(row.values())) for row in self.query(sql, values)]

    def records(
        self, kind: type[RecordKind], sql: str, values: Sequence[Any] = ()
    ) -> list[RecordKind]:
        return list(map(kind.from_row, self.query(sql, values)))

    def record(
        self, kind: type[RecordKind], sql: str, values: Sequence[Any] = ()
    ) -> RecordKind | None:
        return next(iter(self.records(kind, sql, values)), None)

    def encode(self, name: str, value: Any) -> Any:
        """A column's value as SQLite takes it; paths in the state directory relative."""
        if isinstance(value, Path):
            value = os.fspath(value)
        if name in NAMES:
            value = to_stored(self.base, value)
        if isinstance(value, (dict, list, tuple)):
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        return value

    def insert(self, table: str, row: Mapping[str, Any]) -> None:
        """A new row; a repeated key is an error."""
        self._put(table, row, "INSERT")

    def update(
        self, table: str, row_id: str, values: Mapping[str, Any], states: Sequence[str] = ()
    ) -> bool:
        """Set columns of a row that the caller sees; with `states` only if it is in one of them.
        Whether it was set.
        """
        only = f"AND state IN ({marks(states)})" if states else ""
        assignments = ", ".join(f"{name} = ?" for name in values)
        sql = f"""UPDATE main.{table} SET {assignments}
                  WHERE id = (SELECT id FROM {table} WHERE id = ?) {only}"""
        encoded = [self.encode(name, value) for name, value in values.items()]
        return self.execute(sql, [*encoded, row_id, *states]) == 1

    def _put(self, table: str, row: Mapping[str, Any], verb: str = "INSERT OR REPLACE") -> None:
        sql = f"{verb} INTO main.{table} ({', '.join(row)}) VALUES ({marks(row)})"
        self.execute(sql, [self.encode(name, value) for name, value in row.items()])


def _read_only(path: Path) -> Database:
    """A database in a folder that cannot be written, as after its last writer."""
    address = f"file:{quote(str(path))}?mode=ro"
    try:
        db = Database(sqlite3.connect(address, uri=True))
        execute(db, "SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:  # SQLite needs two files there, unless nobody else can write
        db = Database(sqlite3.connect(f"{address}&immutable=1", uri=True))
    return db


def _hide_what_is_not_the_callers(db: Database) -> None:
    """Hide every table behind a view of the caller's rows, also tables of later versions."""
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
        execute(db, f"CREATE TEMP VIEW [{table}] AS SELECT * FROM main.[{table}] WHERE {theirs}")


def _wait_for_locks(db: Database, seconds: float) -> None:
    execute(db, f"PRAGMA busy_timeout={round(seconds * 1000)}")


def _busy(path: Path) -> FlashError:
    fix = f"try again; if it stays so, end the program that `fuser -v {path}` names"
    return FlashError("state_busy", "another program keeps the database locked", path=path, fix=fix)


@contextmanager
def _named_errors(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        # What it says if it cannot make the files next to it
        is_vague = "disk I/O" in str(error) or "unable to open" in str(error)
        if "disk is full" in str(error) or (is_vague and not has_space([path], LEAST_FREE_BYTES)):
            raise disk_error(OSError(errno.ENOSPC, str(error)), path) from error
        if "locked" in str(error):
            raise _busy(path) from error
        raise
    except sqlite3.DatabaseError as error:
        if "malformed" not in str(error) and "not a database" not in str(error):
            raise
        what = f"the database is damaged: {error}"
        raise FlashError("state_corrupt", what, path=path, fix=REBUILD) from error


def pick(row: Mapping[str, Any], *names: str) -> Json:
    return {name: row[name] for name in names}


def marks(values: Collection[Any]) -> str:
    return ", ".join(["?"] * len(values))
