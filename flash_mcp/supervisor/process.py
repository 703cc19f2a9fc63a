"""The supervisor as a process: one for each state directory, started when it is needed."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

import psutil

from flash_mcp import __version__
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import LIVE_DEPLOYMENT
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.locks import try_lock
from flash_mcp.state.owners import LOCAL, acting_as
from flash_mcp.state.schema import schema
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor import secrets
from flash_mcp.supervisor.launch.local import boot_id, started_ticks, wait_for

log = logging.getLogger(__name__)

LOCK = "supervisor.lock"
LOG = "supervisor.log"
TICK = "supervisor.tick"
SILENT_S = 120.0
"""A supervisor that has not ticked for so long hangs."""
TICK_EVERY_S = 1.0
LONGEST_TICK_S = 1800.0
"""What it does at once may take so long."""
# -P: the working directory is the state directory, whose folder `environments` is no package.
PYTHON = (sys.executable, "-P", "-m")
START_TIMEOUT_S = 10.0
STARTS = 2
MAX_LOG_BYTES = 10_000_000


def ensure_supervisor(base: Path) -> bool:
    """Start a supervisor for the state directory unless one is there; whether one was started.

    A supervisor that hangs or is of an older version is ended first; its runs continue. The
    supervisor is detached and outlives the caller. If it is killed while it starts, another one is
    started. Raises FlashError(internal) if none keeps running."""
    if is_supervised(base) and not replace_unfit(base):
        return False
    log_path = base / LOG
    for _ in range(STARTS):
        _start_detached(base, log_path)
        if wait_for(lambda: is_supervised(base), START_TIMEOUT_S):
            return True
    raise FlashError(
        "internal", "the supervisor did not start", log=log_path, fix=f"read the end of {log_path}"
    )


def _start_detached(base: Path, log_path: Path) -> None:
    is_long = log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES
    with log_path.open("wb" if is_long else "ab") as stream:
        # The shell ends at once. The supervisor is then no child of the caller, and leaves no
        # zombie there when it ends.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *PYTHON, "flash_mcp.supervisor", "--home", str(base)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=base,
            start_new_session=True,
            check=True,
        )


@dataclass(frozen=True)
class LockOwner:
    """The process that wrote supervisor.lock last, as JSON."""

    pid: int
    version: str = ""
    schema: int = 0
    """The number of migrations that its code knows; 0 if it did not say."""
    boot: str = ""
    started_ticks: int = 0
    """As the kernel counts: with `boot` and `pid`, it names one process for ever."""
    since: float = 0.0
    """CLOCK_MONOTONIC when it took the lock."""
    is_foreground: bool = False
    """Somebody started it in a terminal."""

    @classmethod
    def current(cls, *, is_foreground: bool = False) -> LockOwner:
        pid, now = os.getpid(), time.monotonic()
        ticks = started_ticks(pid) or 0
        return cls(pid, __version__, schema(), boot_id(), ticks, now, is_foreground)

    @classmethod
    def read(cls, base: Path) -> LockOwner | None:
        try:
            values = json.loads((base / LOCK).read_text())
            names = {field.name for field in fields(cls)}
            owner = cls(**{name: value for name, value in values.items() if name in names})
            return replace(owner, pid=int(owner.pid), version=str(owner.version))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def write(self, stream: IO[str]) -> None:
        """Write to the lock file. The caller holds the lock."""
        with suppress(OSError):  # a full disk: the lock counts without a name
            stream.truncate(0)
            stream.write(f"{json.dumps(asdict(self))}\n")
            stream.flush()

    def is_older(self) -> bool:
        """Whether it is older than this code. A newer one is kept: two installed versions would
        replace each other's supervisor in turn."""
        return self._code() < (_numbers(__version__), schema())

    def is_newer(self) -> bool:
        return self._code() > (_numbers(__version__), schema())

    def _code(self) -> tuple[tuple[int, ...], int]:
        return _numbers(self.version), self.schema or schema()

    def silent_s(self, base: Path) -> float:
        """Seconds since it last looked after anything; 0 if that is unknown."""
        if not self.boot or self.boot != boot_id():
            return 0.0
        return max(0.0, time.monotonic() - max(self.since, _ticked(base, self.pid)))

    def is_supervisor_of(self, base: Path) -> bool:
        """Whether that process holds the lock: a pid may be reused."""
        try:
            process = psutil.Process(self.pid)
            if process.uids().real != os.getuid():
                return False
            files = [file.path for file in process.open_files()]
        except psutil.Error:
            return False
        is_same = (self.boot, self.started_ticks) == (boot_id(), started_ticks(self.pid))
        return is_same and os.path.realpath(base / LOCK) in files

    def kill(self, base: Path) -> None:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.is_supervisor_of(base):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


class Ticker(threading.Thread):
    """Says in supervisor.tick that this process looks after the state directory: 'PID SECONDS'.

    Calling it says that work goes on. A thread repeats that every second, since a model server may
    take minutes to answer; after LONGEST_TICK_S without a call it stops. The same bytes are
    overwritten, which needs no space on the disk."""

    def __init__(self, base: Path) -> None:
        super().__init__(name="ticker", daemon=True)
        self._file = None
        with suppress(OSError):
            self._file = (base / TICK).open("wb", buffering=0)
        self._ended = threading.Event()
        self()
        self._write()
        self.start()

    def __call__(self) -> None:
        self._called = time.monotonic()

    def run(self) -> None:
        while not self._ended.wait(TICK_EVERY_S):
            if time.monotonic() - self._called < LONGEST_TICK_S:
                self._write()

    def close(self) -> None:
        self._ended.set()
        self.join()
        if self._file:
            self._file.close()

    def _write(self) -> None:
        if self._file:
            with suppress(OSError):
                line = f"{os.getpid()} {time.monotonic():.3f}".ljust(63)
                os.pwrite(self._file.fileno(), f"{line}\n".encode(), 0)


def _ticked(base: Path, pid: int) -> float:
    """CLOCK_MONOTONIC of the last tick of that process; 0 if it has not ticked."""
    try:
        writer, ticked = (base / TICK).read_text().split()
        return float(ticked) if int(writer) == pid else 0.0
    except (OSError, ValueError):
        return 0.0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


@dataclass(frozen=True)
class Unfit:
    """What is wrong with a supervisor, and what a person can do."""

    holder: LockOwner
    what: str
    fix: str
    hangs: bool = False
    may_be_killed: bool = False


def unfit(base: Path) -> Unfit | None:
    holder = LockOwner.read(base)
    if holder is None or not is_supervised(base):
        return None
    named = f"the supervisor (pid {holder.pid})"
    silent_s = holder.silent_s(base)
    if silent_s > SILENT_S:
        what = f"{named} has done nothing for {silent_s:.0f} s"
        if holder.is_supervisor_of(base):
            fix = "any running server ends it and starts another; so does `flash-mcp supervise`"
            return Unfit(holder, what, fix, hangs=True, may_be_killed=True)
        fix = f"end process {holder.pid} on the machine or in the container where it runs"
        return Unfit(holder, what, fix, hangs=True)
    if holder.is_older():
        what = f"{named} is of version {holder.version or 'unknown'}; this is {__version__}"
        if holder.is_foreground or not holder.is_supervisor_of(base):
            fix = f"end process {holder.pid}, and start it again with this version"
            return Unfit(holder, what, fix)
        fix = "any running server replaces it; what it started goes on"
        return Unfit(holder, what, fix, may_be_killed=True)
    if holder.is_newer():
        what = f"{named} is of version {holder.version}; this is only {__version__}"
        return Unfit(holder, what, "restart this program with the newer version")
    return None


def replace_unfit(base: Path) -> bool:
    """End a supervisor that hangs or is of an older version; whether the lock is free now.

    A healthy one in a terminal is left alone."""
    result = unfit(base)
    if result is None or not result.may_be_killed:
        return False
    log.warning("%s: it is replaced", result.what)
    if not result.hangs:
        with suppress(ProcessLookupError):
            os.kill(result.holder.pid, signal.SIGTERM)
        if wait_for(lambda: not is_supervised(base), START_TIMEOUT_S):
            return True
    result.holder.kill(base)
    return bool(wait_for(lambda: not is_supervised(base), START_TIMEOUT_S))


def is_supervised(base: Path) -> bool:
    """Whether a supervisor holds the state directory's lock. Looking changes no file.

    FlashError(locks_unsupported)."""
    try:
        with (base / LOCK).open() as stream:
            return not try_lock(stream, shared=True)  # shared: others may look as well
    except FileNotFoundError:
        return False


def take_lock(base: Path) -> IO[str] | None:
    """The lock file, locked until it is closed; None if another process holds it.

    FlashError(locks_unsupported)."""
    with ExitStack() as stack:
        stream = stack.enter_context((base / LOCK).open("a+"))
        if not try_lock(stream):
            return None
        stack.pop_all()
    return stream


# -- keeps a supervisor running while there is work ------------------------------------------------
# Tools that change something call `ensure_supervised`. A server also calls it every few seconds on
# a thread (`supervised`), so that `status` starts no process for an agent that only polls.

EVERY_S = 3.0
MAX_DELAY_S = 60.0
"""The longest pause after attempts that failed."""


def ensure_supervised(store: Store) -> None:
    """Start the supervisor if a run is active or a deployment is live, and give it the secrets that
    active runs lack and this process's environment has, the variables that the runs of this process
    use, and its keys of the targets' stores.

    It covers the whole state directory, not only the caller's runs. FlashError(internal) if no
    supervisor keeps running.
    """
    with acting_as(LOCAL):
        if store.is_read_only:
            return
        targets = store.active_targets()
        if not targets and not store.deployments(LIVE_DEPLOYMENT):
            return
        ensure_supervisor(store.base)
        for run in store.active_with_secrets():
            secrets.hand_over(store.base, run)
        if surroundings.IN_USE.is_set():
            holder = LockOwner.read(store.base)
            is_elsewhere = holder is not None and holder.pid != os.getpid()
            secrets.give_surroundings(store.base, secrets.TIMEOUT_S if is_elsewhere else 0.0)
        if targets - {LOCAL_TARGET}:
            secrets.offer_store_keys(store.base)


@contextmanager
def supervised(every_s: float = EVERY_S) -> Generator[None, None, None]:
    """Call `ensure_supervised` every few seconds within, on a daemon thread."""
    stop = threading.Event()
    threading.Thread(
        target=_ensure_until, args=(stop, every_s), name="supervised", daemon=True
    ).start()
    try:
        yield
    finally:
        stop.set()


def _ensure_until(stop: threading.Event, every_s: float) -> None:
    delay_s = every_s
    trouble = ""
    while not stop.wait(delay_s):
        try:
            ensure_supervised(open_store())
        except Exception as error:
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            if repr(error) != trouble:
                is_foreseen = isinstance(error, FlashError)
                log.error("no supervisor could be started: %s", error, exc_info=not is_foreseen)
            trouble = repr(error)
        else:
            delay_s = every_s
            trouble = ""
