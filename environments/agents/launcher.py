"""Starts the program of one rollout, bounds how many processes it has, and ends all of them.

    python -I -S launcher.py RULES MOST CALLS PROGRAM ARGUMENT...

It is outside of the program's Landlock rules (the descriptor RULES), so that the program does not
signal it, and takes in what the program's processes leave. It is asked by the kernel before each
of the system calls CALLS, with which processes and threads begin: where MOST are there, they get
EAGAIN, as at a resource limit, which would count all programs of the environment together. It ends
as the program did, or when its own input is closed. It imports nothing of ours: each rollout starts
one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import time

# The module socket takes 5 ms to import.
from _socket import AF_UNIX, CMSG_LEN, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket, socketpair
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LANDLOCK_RESTRICT_SELF = 446
SECCOMP = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER = 1
NEW_LISTENER = 1 << 3
WAIT_KILLABLE = 1 << 5
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ASK = 0x7FFF0000, 0x7FC00000
RECEIVE, SEND = 0xC0502100, 0xC0182101
NOTICE_BYTES = 80
COUNT_AGAIN_S = 0.05
END_S = 10.0
FULL = """\
This program has {} processes and threads, its part of the environment's. environment.toml may ask \
for more `processes`."""
libc = ctypes.CDLL(None, use_errno=True)
statuses: dict[int, int] = {}  # {pid: wait status} of what has ended


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main(rules: int, most: int, calls: list[int], command: list[str]) -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    child = os.fork()
    if child == 0:
        _become(rules, calls, command, theirs)
    theirs.close()
    if rules >= 0:
        os.close(rules)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ended = os.pidfd_open(child)
    # What the program sent before it began
    _, sent, _, _ = ours.recvmsg(1, CMSG_LEN(4))
    ours.close()
    listener = struct.unpack("i", sent[0][2])[0] if sent else -1
    _answer_until(ended, listener, most)
    if listener >= 0:
        os.close(listener)  # from here on the program starts nothing
    status = _end_all(child)
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


# -- the program -----------------------------------------------------------------------------------


def _become(rules: int, calls: list[int], command: list[str], parent: socket) -> None:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        if rules >= 0:
            if libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            os.close(rules)
        listener = _listen(calls)
        if listener >= 0:
            rights = (SOL_SOCKET, SCM_RIGHTS, struct.pack("i", listener))
            parent.sendmsg([b"."], [rights])
        parent.close()
        os.execvp(command[0], command)
    except OSError as error:
        os.write(1, f"{error}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)  # no exit code of the program's


def _listen(calls: list[int]) -> int:
    """The descriptor by which the kernel asks about these system calls of this process and all that
    it starts; -1 where it cannot be had: another program of the machine may listen already."""
    steps = [(LOAD, 0, 0, 0)]
    for place, number in enumerate(calls):
        steps.append((EQUAL, len(calls) - place, 0, number))
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ASK)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = ctypes.byref(_FilterProgram(len(steps), code))
    for flags in (NEW_LISTENER | WAIT_KILLABLE, NEW_LISTENER):  # the second one is of Linux 5.19
        number = SECCOMP[os.uname().machine]
        result = libc.syscall(number, SECCOMP_SET_MODE_FILTER, flags, program)
        if result >= 0:
            return result
    return -1


# -- its parent ------------------------------------------------------------------------------------


def _answer_until(ended: int, listener: int, most: int) -> None:
    """Answer the kernel until the program has ended, or nobody waits for it any more."""
    poll = select.poll()
    poll.register(0, 0)
    poll.register(ended, select.POLLIN)
    if listener >= 0:
        poll.register(listener, select.POLLIN)
    count, counted_at, has_told = 1, 0.0, False
    while True:
        for descriptor, event in poll.poll():
            if descriptor != listener:
                return
            if not event & select.POLLIN:
                poll.unregister(listener)
                continue
            if count >= most and time.monotonic() > counted_at + COUNT_AGAIN_S:
                count, counted_at = _count(most), time.monotonic()
            is_full = count >= most
            count += not is_full
            if is_full and not has_told:
                has_told = True
                os.write(1, f"{FULL.format(most)}\n".encode())
            notice = bytearray(NOTICE_BYTES)
            with suppress(OSError):  # the process that asked may have ended
                fcntl.ioctl(listener, RECEIVE, notice)
                [asked] = struct.unpack_from("Q", notice)
                error = -errno.EAGAIN if is_full else 0
                fcntl.ioctl(listener, SEND, struct.pack("QqiI", asked, 0, error, not is_full))


def _count(most: int) -> int:
    """Processes and threads of the program; `most` if some cannot be seen."""
    _reap()
    total = 0
    for pid in _tree():
        try:
            total += len(_threads(pid))
        except OSError:
            with suppress(ProcessLookupError):
                os.kill(pid, 0)
                return most
    return total


def _threads(pid: int) -> list[str]:
    with os.scandir(f"/proc/{pid}/task") as entries:
        return [entry.path for entry in entries]


def _tree() -> set[int]:
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        # One that has ended, or hides, leaves its children to this process at its end.
        with suppress(OSError):
            for thread in _threads(waiting.pop()):
                new = set(map(int, Path(thread, "children").read_text().split())) - found
                found |= new
                waiting += new
    return found


def _reap() -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]


def _end_all(child: int) -> int:
    """Kill all that the program has left, and itself if it runs. Its wait status."""
    stopped: set[int] = set()
    _reap()
    deadline = time.monotonic() + END_S
    # Where the kernel does not ask, only a process that is stopped starts no other.
    while (left := _tree()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if left <= stopped else signal.SIGSTOP)
        stopped |= left
        _reap()
        time.sleep(0.001)
    return statuses.get(child, signal.SIGKILL)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[3].split(",")]
    main(int(sys.argv[1]), int(sys.argv[2]), numbers, sys.argv[4:])
