"""The process between the host and environment code. It ends every process that the code started.

    # starts environments.process.child in the sandbox
    python -m environments.process.warden PARENT_PID BOUNDS INTERPRETER
    # the same from Python: goes on in a new process in the sandbox; the caller becomes its warden
    found = enclose(bounds)

A process that makes its own session outlives its process group. The kernel makes the warden the
parent of such orphans (PR_SET_CHILD_SUBREAPER), so it finds and kills them when environment code
ends or SIGTERM arrives, and then ends with the same status. Twice a second it adds up their memory.
It runs no user code.

The sandbox (environments.process.sandbox) is set up before INTERPRETER starts. An interpreter with
its own packages runs their code at once (.pth files), and a package's build may have written the
interpreter itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from environments.process.sandbox import Bounds, confine, die_with_parent, set_subreaper

CHECK_EVERY_S = 0.5
SWEEP_TIMEOUT_S = 5.0
MEMORY_EXIT_CODE = 97
"""The exit code that tells the host that the processes used too much memory."""
HEEDED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}


def enclose(bounds: Bounds) -> dict[str, str]:
    """Go on in a new process in the sandbox, with this one as its warden. Returns what `confine`
    found, in the new process only.
    """
    warden = _watch(bounds.memory_bytes)
    found = confine(bounds)
    die_with_parent(warden)  # again, because becoming another user undoes it
    return found


def _watch(memory_bytes: int) -> int:
    """Fork. Return the parent's pid in the child; never return in the parent."""
    if not sys.platform.startswith("linux"):
        return os.getppid()
    set_subreaper()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # memory may hold secrets
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    warden = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
        die_with_parent(warden)
        return warden
    try:
        _let_go_of_pipes()
        status = _wait(child, memory_bytes)
        _sweep()
        _end_as(status)
    finally:
        os._exit(1)


def _let_go_of_pipes() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _wait(child: int, memory_bytes: int) -> int:
    """The wait status of environment code, or the status with which it is to be ended."""
    while True:
        heard = signal.sigtimedwait(HEEDED, CHECK_EVERY_S)
        if heard is None:
            if _uses_more(list(_descendants(os.getpid())), memory_bytes):
                return MEMORY_EXIT_CODE << 8
        elif heard.si_signo == signal.SIGTERM:
            return signal.SIGKILL
        elif heard.si_signo == signal.SIGUSR1:
            os.kill(child, signal.SIGUSR1)
        elif (status := _reap().get(child)) is not None:
            return status


def _reap() -> dict[int, int]:
    """{pid: wait status} of all processes that ended."""
    statuses: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            statuses[pid] = status
    return statuses


def _sweep() -> None:
    """Kill until no process is left. The children of a killed process fall to this one, which
    finds them in the next round.
    """
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while (left := list(_descendants(os.getpid()))) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        _reap()


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in map(int, (thread / "children").read_text().split()):
                    yield child
                    yield from _descendants(child)


def _uses_more(pids: list[int], memory_bytes: int) -> bool:
    """Whether they use more together. Shared memory is divided among them only if that can change
    the answer, because it is slow.
    """
    return sum(map(_memory_of, pids)) > memory_bytes and sum(map(_share_of, pids)) > memory_bytes


def _memory_of(pid: int) -> int:
    """Bytes of its own memory and of the memory that it shares, without that of files."""
    return _kibibytes(pid, "status", "RssAnon", "RssShmem") << 10


def _share_of(pid: int) -> int:
    """The same, with only its share of each page; all of it if the shares cannot be read."""
    return _kibibytes(pid, "smaps_rollup", "Pss_Anon", "Pss_Shmem") << 10 or _memory_of(pid)


def _kibibytes(pid: int, file: str, *names: str) -> int:
    """The sum of the lines of /proc/PID/FILE that have these names."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in names:
                total += int(value.split()[0])
    return total


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _take_pipes() -> tuple[int, int]:
    """Move stdin and stdout to other descriptors. 0 becomes /dev/null and 1 becomes stderr, so
    that no print ends up among the replies.
    """
    requests = os.dup(0)
    replies = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return requests, replies


def main() -> None:
    bounds = Bounds.load(sys.argv[2])
    interpreter = sys.argv[3]
    die_with_parent(int(sys.argv[1]), by=signal.SIGTERM)
    found = enclose(bounds)
    arguments = [bounds.dump(), json.dumps(found)]
    for pipe in _take_pipes():
        os.set_inheritable(pipe, True)
        arguments.append(str(pipe))
    os.execv(interpreter, [interpreter, "-P", "-m", "environments.process.child", *arguments])


if __name__ == "__main__":
    main()
