"""The process between the host and environment code. It ends every process that the code started.

    # goes on in a new process in the sandbox; the caller becomes its warden
    results = enclose(bounds)

    host --starts--> warden --forks--> first process --forks--> environment code
                                       (pid 1 of a PID namespace)

The first process is ours: it takes in orphans, passes SIGUSR1 on, tells the warden how environment
code ended, and dies with the warden. The kernel ends a PID namespace as a whole with its first
process. Where none can be had, the warden takes in what the first process leaves
(PR_SET_CHILD_SUBREAPER): when environment code ends or SIGTERM arrives, it stops all of them, so
that they start no others, and kills them. The warden ends with the status of environment code.
Twice a second it adds up the memory of the processes. Where a cgroup can be made, it bounds what
they keep in the kernel too. Neither of the two runs user code."""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from environments.sandbox.confinement import confine
from environments.sandbox.kernel import (
    CAP_KILL,
    die_with_parent,
    end_with_parent,
    keep_capabilities,
    set_dumpable,
    set_subreaper,
)
from environments.sandbox.landlock import readable
from environments.sandbox.namespaces import Own, enter_namespaces, enter_root, pids_by_user
from environments.sandbox.needs import Bounds

CHECK_EVERY_S = 0.5
SWEEP_TIMEOUT_S = 5.0
MEMORY_EXIT_CODE = 97  # the exit code that tells the host that the processes used too much memory
UNPROTECTED_EXIT_CODE = 96
"""The exit code that tells the host that files cannot be protected. stderr says why."""
KERNEL_BYTES = 64 << 20
"""What a cgroup may take beyond the memory of the processes: page tables, open files."""
STATUS = struct.Struct("i")
HEEDED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}


def enclose(bounds: Bounds) -> dict[str, str]:
    """Go on in a new process in the sandbox, with this one as its warden. What `confine` returned,
    in the new process only.
    """
    if not sys.platform.startswith("linux"):
        return _protected(confine(bounds, Own()), bounds)
    set_subreaper()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # memory may hold secrets
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    group = make_group(bounds.memory_bytes + KERNEL_BYTES)
    own = enter_namespaces(bounds)
    ended, ending = os.pipe()
    first = os.fork()
    if first:
        os.close(ending)
        _watch(first, own, group, bounds.memory_bytes, ended)
    os.close(ended)
    # Die with the parent, which holds the other end. A namespace hides the parent's pid
    end_with_parent()
    poll = select.poll()
    poll.register(ending, 0)
    if poll.poll(0):
        os._exit(1)
    with suppress(OSError):
        # If memory runs out, the kernel kills these processes before the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    is_grouped = group is not None and group.enter()
    own = enter_root(bounds, readable(bounds), own)
    parent = os.getpid()
    child = os.fork()
    if child:
        _be_first(child, ending)
    os.close(ending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
    result = confine(bounds, own)
    result["kernel_memory"] = "" if is_grouped else "no memory cgroup can be made"
    die_with_parent(parent)  # not earlier, because becoming another user undoes it
    return _protected(result, bounds)


def _protected(results: dict[str, str], bounds: Bounds) -> dict[str, str]:
    """What was found. Ends this process if the code could open any file."""
    if results["files"] and not bounds.without_file_protection:
        sys.stderr.write(f"{results['files']}\n")
        sys.exit(UNPROTECTED_EXIT_CODE)
    return results


# -- the first process -----------------------------------------------------------------------------


def _be_first(child: int, ending: int) -> NoReturn:
    """Reap until `child` ends, write its wait status to `ending`, and end all others."""
    try:
        _let_go_of_pipes()
        set_subreaper()
        set_dumpable(False)
        keep_capabilities(*([CAP_KILL] if os.getuid() == 0 else []))
        while True:
            heard = signal.sigwaitinfo(HEEDED)
            if heard.si_signo == signal.SIGUSR1:
                os.kill(child, signal.SIGUSR1)
            elif (status := _reap().get(child)) is not None:
                os.write(ending, STATUS.pack(status))
                break
    finally:
        os._exit(0)


# -- the warden ------------------------------------------------------------------------------------


def _watch(
    first: int, own: Own, group: MemoryGroup | None, memory_bytes: int, ended: int
) -> NoReturn:
    """Wait for environment code, end all that it started, and end as it did."""
    try:
        _let_go_of_pipes()
        set_dumpable(False)
        ended_by = _wait(first, group, memory_bytes)
        if ended_by is not None:
            os.kill(first, signal.SIGKILL)
        _sweep(own)
        if group is not None:
            if group.has_killed():
                ended_by = MEMORY_EXIT_CODE << 8
            group.remove()
        status = signal.SIGKILL if ended_by is None else ended_by
        if ended_by is None and (report := os.read(ended, STATUS.size)):
            # The status of environment code, from the first process; never a code of the warden's
            (status,) = STATUS.unpack(report)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == MEMORY_EXIT_CODE:
                status = 1 << 8
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            with suppress(OSError):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status))
    finally:
        os._exit(1)


def _let_go_of_pipes() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _wait(first: int, group: MemoryGroup | None, memory_bytes: int) -> int | None:
    """None once the first process has ended, else the status with which it is to be ended."""
    next_check = time.monotonic() + CHECK_EVERY_S
    while True:
        heard = signal.sigtimedwait(HEEDED, max(0.0, next_check - time.monotonic()))
        if time.monotonic() >= next_check:
            has_killed = group is not None and group.has_killed()
            if has_killed or _uses_more(_descendants(first), memory_bytes):
                return MEMORY_EXIT_CODE << 8
            next_check = time.monotonic() + CHECK_EVERY_S
        if heard is None:
            continue
        if heard.si_signo == signal.SIGTERM:
            return signal.SIGKILL
        if heard.si_signo == signal.SIGUSR1:
            os.kill(first, signal.SIGUSR1)
        elif first in _reap():
            return None


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


def _sweep(own: Own) -> None:
    """Kill until no process is left. The children of a killed process fall to this one, which
    finds them in the next round. Those of a PID namespace are ended by the kernel already.
    """
    uid = None if own.has_processes else own.uid
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while (left := _stopped(deadline)) and time.monotonic() < deadline:
        if uid and pids_by_user().get(uid, left) <= left:
            # Kill all of the user at once: none of them can start another meanwhile.
            killer = os.fork()
            if killer == 0:
                try:
                    os.setresuid(uid, uid, uid)
                    os.kill(-1, signal.SIGKILL)
                finally:
                    os._exit(0)
            os.waitpid(killer, 0)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        _reap()


def _stopped(deadline: float) -> set[int]:
    """All descendants, stopped: only those that run start others, so the last round is safe."""
    stopped: set[int] = set()
    while (new := _descendants(os.getpid()) - stopped) and time.monotonic() < deadline:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    return stopped


def _descendants(pid: int) -> set[int]:
    results: set[int] = set()
    waiting = [pid]
    while waiting:
        with suppress(OSError):
            for thread in Path(f"/proc/{waiting.pop()}/task").iterdir():
                with suppress(OSError):
                    children = set(map(int, (thread / "children").read_text().split()))
                    waiting += children - results
                    results |= children
    return results


def _uses_more(pids: set[int], memory_bytes: int) -> bool:
    """Whether they use more together, without the memory of files. Shared memory is divided among
    them only if that can change the answer, because it is slow.
    """
    if sum(map(_resident, pids)) << 10 <= memory_bytes:
        return False
    # A process that starts or ends between two reads makes the sum too large. That hardly happens
    # in two looks in a row.
    return all(sum(map(_share, pids)) << 10 > memory_bytes for _ in range(2))


def _resident(pid: int) -> int:
    """KiB of the process, all of what it shares included."""
    return _kibibytes(pid, "status", "RssAnon", "RssShmem")


def _share(pid: int) -> int:
    """KiB of the process, what it shares divided; all of it if that cannot be read."""
    return _kibibytes(pid, "smaps_rollup", "Pss_Anon", "Pss_Shmem") or _resident(pid)


def _kibibytes(pid: int, file: str, *names: str) -> int:
    """The sum of the lines of /proc/PID/FILE that have these names."""
    total = 0
    with suppress(OSError):
        # The process chose its own name, which may hold any line end but this one.
        for line in Path(f"/proc/{pid}/{file}").read_bytes().split(b"\n"):
            name, _, value = line.partition(b":")
            if name.decode(errors="replace") in names:
                total += int(value.split()[0])
    return total


# -- A memory cgroup for environment code, where one may be made: usually as root ------------------
#     group = make(limit_bytes)           # in the warden
#     group.enter()                       # in its child: this process and what it starts
#     group.has_killed(), group.remove()  # in the warden
#
# The kernel counts what no process shows as its own: files in memory, socket buffers. When a group
# needs more than its limit, the kernel kills a process of it.

PREFIX = "flash-environment-"


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup of version 1 or 2."""

    folder: Path
    events: str  # the file with the number of processes that the kernel killed

    def enter(self) -> bool:
        """Put this process into the group. Whether that worked."""
        with suppress(OSError):
            (self.folder / "cgroup.procs").write_text("0")
            return True
        return False

    def has_killed(self) -> bool:
        with suppress(OSError):
            for line in (self.folder / self.events).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and int(count):
                    return True
        return False

    def remove(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()


def make_group(limit_bytes: int) -> MemoryGroup | None:
    """A new group with this limit; None where none can be made."""
    for parent, limit, events in _parents():
        # Remove the groups of wardens that were killed
        for folder in parent.glob(f"{PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(PREFIX)).exists():
                with suppress(OSError):
                    folder.rmdir()
        group = MemoryGroup(parent / f"{PREFIX}{os.getpid()}", events)
        with suppress(OSError):
            group.folder.mkdir()
            try:
                (group.folder / limit).write_text(str(limit_bytes))
            except OSError:
                group.remove()
            else:
                return group
    return None


def _parents() -> list[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the events), best first. Where processes are in the group
    itself, version 2 allows no groups in it; root may use the topmost one.
    """
    own: dict[str, str] = {}
    results: list[tuple[Path, str, str]] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            place = Path(mount.split()[4])
            kind, _, options = system.split(maxsplit=2)
            if kind == "cgroup" and "memory" in options.split(","):
                files = ("memory.limit_in_bytes", "memory.oom_control")
                results.append((place / own.get("memory", "/").lstrip("/"), *files))
            elif kind == "cgroup2":
                files = ("memory.max", "memory.events")
                results.append((place / own.get("", "/").lstrip("/"), *files))
                results.append((place, *files))
    return results
