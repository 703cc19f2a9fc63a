"""The process between the host and environment code: it ends whatever that started, wherever it
went.

    walls = enclose(bounds) # returns in a new process, which is to run foreign code; the caller stays as its warden
    # does that, and starts environments.process.child
    python -m environments.process.warden PARENT_PID BOUNDS INTERPRETER

A process that made a session of its own would outlive its process group. The warden is the one whom
orphans fall to (PR_SET_CHILD_SUBREAPER), so it finds and kills them all when environment code ends
or SIGTERM comes, and then ends as environment code did. Twice a second it adds up their memory. It
runs nothing of the user's.

The walls (environments.process.sandbox) are put up before INTERPRETER starts: one that has packages
of its own runs their code at once (.pth files), and may itself have been written by a package's
build."""

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
"""Said to the host: its processes used more memory than they may."""
HEEDED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}


def enclose(bounds: Bounds) -> dict[str, str]:
    """Go on in a process with a warden and behind the walls: what `confine` found. The caller never
    returns.
    """
    warden = _watch(bounds.memory_bytes)
    walls = confine(bounds)
    die_with_parent(warden)  # once more: becoming another user undoes it
    return walls


def _watch(memory_bytes: int) -> int:
    """Fork: return the parent's pid in the child; in the parent, never return."""
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
    """The wait status of environment code; that of the kill which it is to get, where it has not
    ended by itself.
    """
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
    """{pid: wait status} of all that ended."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _sweep() -> None:
    """Kill until nobody is left. What is killed leaves its children to this process, which finds
    them next time.
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
    """Whether they use more together. What several share is divided among them only where it
    matters: that is slow.
    """
    return sum(map(_memory_of, pids)) > memory_bytes and sum(map(_share_of, pids)) > memory_bytes


def _memory_of(pid: int) -> int:
    """Bytes of its own and of memory that it shares, but for those of files."""
    return _kibibytes(pid, "status", "RssAnon", "RssShmem") << 10


def _share_of(pid: int) -> int:
    """The same, of each page only its share; all of it where the process or the kernel does not let
    that be seen.
    """
    return _kibibytes(pid, "smaps_rollup", "Pss_Anon", "Pss_Shmem") << 10 or _memory_of(pid)


def _kibibytes(pid: int, file: str, *names: str) -> int:
    with suppress(OSError):
        lines = (
            line.split()
            for line in Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines()
        )
        return sum(int(words[1]) for words in lines if words and words[0].rstrip(":") in names)
    return 0


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _take_pipes() -> tuple[int, int]:
    """Copies of stdin and stdout for who knows their numbers; they become /dev/null and stderr for
    everybody else.
    """
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return requests, replies


def main() -> None:
    parent_pid, bounds, interpreter = int(sys.argv[1]), Bounds.load(sys.argv[2]), sys.argv[3]
    die_with_parent(parent_pid, by=signal.SIGTERM)
    walls, pipes = enclose(bounds), _take_pipes()
    for pipe in pipes:
        os.set_inheritable(pipe, True)
    serve = (
        interpreter,
        "-P",
        "-m",
        "environments.process.child",
        bounds.dump(),
        json.dumps(walls),
        *map(str, pipes),
    )
    os.execv(interpreter, serve)


if __name__ == "__main__":
    main()
