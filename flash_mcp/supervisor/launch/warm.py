"""Keeps a worker of this machine that has imported its packages, for the next attempt.

It is a process like those that are started for an attempt (worker/warm.py): with its own session,
and the same working directory, limits and variables. It serves one attempt, so that nothing of a
run can reach another. If it was killed, or differs from what the attempt is to have, a fresh worker
is started instead."""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from flash_mcp.protocol import surroundings
from flash_mcp.supervisor.launch.base import Launch

FRESH, WARM = "worker.main", "worker.warm"
LEAST_FREE_BYTES = 4 << 30
"""Memory that must be free for one to wait, of which it takes less than a quarter."""
READY_S = 60.0
"""An attempt waits so long for one that still imports."""
SEND_S = 5.0
OURS = Path(__file__).parents[3]
ROOMS = ("environments", "flash_mcp", "worker")


class WarmWorker:
    """At most one process, which waits for an attempt like the one before. `start` is the command
    before a program that makes it known as an attempt's first process."""

    def __init__(self, start: Sequence[str]) -> None:
        self._start = start
        self._expected: _Needs | None = None
        self._prepared: _Needs | None = None
        self._changed_at = 0
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_by: float | None = None
        """None once it is."""

    @property
    def is_due(self) -> bool:
        """Whether an attempt was expected since the last one was started, and memory is free."""
        # Asked twice a second: the memory only where something is expected.
        return self._expected is not None and psutil.virtual_memory().available > LEAST_FREE_BYTES

    @property
    def exists(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def is_coming(self) -> bool:
        """Whether it still imports: waiting for it takes less time than a fresh worker would."""
        ready_by = self._ready_by
        if ready_by is None or self._link is None or not self.exists:
            return False
        with suppress(OSError):
            if self._link.recv(1, socket.MSG_DONTWAIT):
                self._ready_by = None
                return False
        return time.monotonic() < ready_by

    def expect(self, launch: Launch) -> None:
        """Let the next process be for an attempt like this one."""
        self._expected = _needs(launch)

    def prepare(self) -> None:
        """Start it, once for each attempt that was expected."""
        assert self._expected
        self.close()
        self._prepared, self._expected = self._expected, None
        self._changed_at = _changed_at()
        self._ready_by = time.monotonic() + READY_S
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._start, *self._prepared.command, WARM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=self._prepared.variables,
                start_new_session=True,
            )

    def take(
        self, launch: Launch, register: Sequence[str], log: IO[bytes]
    ) -> subprocess.Popen[bytes] | None:
        process, link, needed = self._process, self._link, _needs(launch)
        if process is None or link is None or needed is None:
            return None
        with suppress(OSError):
            is_ready = not self.is_coming and self._ready_by is None and self.exists
            if is_ready and self._prepared == needed and self._changed_at == _changed_at():
                late = {name: launch.environment[name] for name in _late(launch)}
                order = {"command": launch.command, "variables": late, "register": register}
                line = json.dumps(order).encode() + b"\n"
                link.settimeout(SEND_S)
                sent = socket.send_fds(link, [line], [log.fileno()])
                if rest := line[sent:]:  # it may have closed its end once it has all
                    link.sendall(rest)
                link.close()
                self._process = self._link = None
                return process
        self.close()
        return None

    def close(self) -> None:
        if self._process and self._link:
            self._link.close()
            self._process.kill()
            self._process.wait()
        self._process = self._link = None


@dataclass(frozen=True)
class _Needs:
    """What an attempt's imports see: the command before its module, and the variables that hold no
    secret."""

    command: list[str]
    variables: dict[str, str]


def _needs(launch: Launch) -> _Needs | None:
    """None if an attempt like this one does not start from such a process."""
    command = list(launch.command)
    if FRESH not in command or launch.gpus != 1:  # ranks start each other
        return None
    late = _late(launch)
    variables = {name: value for name, value in launch.environment.items() if name not in late}
    return _Needs(command[: command.index(FRESH)], variables)


def _late(launch: Launch) -> set[str]:
    """The variables with secrets: they are given with the attempt, and no import reads them."""
    late = set(launch.secrets)
    for name, value in launch.environment.items():
        if surroundings.SECRET.fullmatch(name) or (
            surroundings.NAMES.fullmatch(name) and surroundings.is_secret(name, value)
        ):
            late.add(name)
    return late & launch.environment.keys()


def _changed_at() -> int:
    """When our code or the installed packages changed last, as the file system counts."""
    files = [path for room in ROOMS for path in (OURS / room).rglob("*.py")]
    files += map(Path, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return max(path.stat().st_ctime_ns for path in files)
