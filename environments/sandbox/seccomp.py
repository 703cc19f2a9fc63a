"""The system calls that environment code may make: a seccomp filter."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass

from environments.sandbox.kernel import checked, libc

PR_SET_SECCOMP = 22
# The instructions of the filter, as in linux/bpf_common.h.
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
AT_LEAST = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
# Where the filter finds these in struct seccomp_data. An argument has two halves of 4 bytes.
CALL_NUMBER = 0
ARCHITECTURE = 4
ARGUMENTS = (16, 24, 32)
HIGH_HALF = 4
AF_INET = 2
AF_INET6 = 10
SOCKET_TYPES = 0xF
SOCK_STREAM = 1
IPPROTO_TCP = 6
SOCK_SEQPACKET = 5
PRIO_PROCESS = 0
IOPRIO_WHO_PROCESS = 1
CLONE_NEWUSER = 0x10000000
FIRST_X32_CALL = 0x40000000
IO_URING_SETUP = 425
"""io_uring makes sockets past any filter."""
CLONE3 = 435
"""Its flags are in memory, where no filter sees them. Where it is missing, programs call clone."""

Step = tuple[int, int, int, int]
"""Instruction, steps to skip if true, steps to skip if false, operand."""


@dataclass(frozen=True)
class _Calls:
    """An architecture's number, and its numbers of system calls."""

    architecture: int
    socket: int
    socketpair: int
    prlimit: int
    setpriority: int
    ioprio_set: int
    scheduling: tuple[int, ...]
    """sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr."""
    clone: int
    unshare: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl: the keys of the user's session. open_by_handle_at: a file by
    its number, past the folders that lead to it. inotify_init, inotify_init1: the names of files
    that others change, in folders that Landlock hides. perf_event_open, bpf, userfaultfd: parts of
    the kernel that attacks begin with. syslog: what the kernel says of other programs.
    """
    shared: tuple[int, ...]
    """shm*, sem*, msg* of System V, and mq_*. Their memory is counted for nobody, outlives the
    processes that made it, and may belong to others.
    """


MACHINES = {
    "x86_64": _Calls(
        0xC000003E,
        socket=41,
        socketpair=53,
        prlimit=302,
        setpriority=141,
        ioprio_set=251,
        scheduling=(142, 144, 203, 314),
        clone=56,
        unshare=272,
        refused=(248, 249, 250, 304, 253, 294, 298, 321, 323, 103),
        shared=(29, 30, 31, *range(64, 72), 220, 240, 241),
    ),
    "aarch64": _Calls(
        0xC00000B7,
        socket=198,
        socketpair=199,
        prlimit=261,
        setpriority=140,
        ioprio_set=30,
        scheduling=(118, 119, 122, 274),
        clone=220,
        unshare=97,
        refused=(217, 218, 219, 265, 26, 241, 280, 282, 116),
        shared=(180, 181, *range(186, 198)),
    ),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_calls(*, allow_sockets: bool, allow_tcp: bool, has_processes: bool) -> str:
    """Why system calls cannot be refused; "" if they are. `allow_tcp` allows TCP over IPv4 alone.

    `has_processes`: the code has a PID namespace, so that it finds no process of others."""
    machine = platform.machine()
    if machine not in MACHINES:
        return f"the system calls of {machine} are not known here"
    calls = MACHINES[machine]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, calls.architecture),
        _refuse(errno.ENOSYS),
        (LOAD, 0, 0, CALL_NUMBER),
        (AT_LEAST, 0, 1, FIRST_X32_CALL),
        _refuse(errno.ENOSYS),
    ]
    for number in (IO_URING_SETUP, CLONE3, *calls.shared):
        steps += _for(number, [_refuse(errno.ENOSYS)])
    for number in calls.refused:
        steps += _for(number, [_refuse(errno.EPERM)])
    for number in (calls.clone, calls.unshare):
        steps += _for(number, _without(CLONE_NEWUSER))
    families = (AF_INET, AF_INET6) if allow_sockets else ()
    steps += _for(calls.socket, _tcp_only() if allow_tcp else _families(families))
    steps += _for(calls.socketpair, _connected_pair())
    steps += _for(calls.prlimit, _limits_of_others())
    if not has_processes:
        for number in calls.scheduling:
            steps += _for(number, _only(0))
        steps += _for(calls.setpriority, _only(PRIO_PROCESS, 0))
        steps += _for(calls.ioprio_set, _only(IOPRIO_WHO_PROCESS, 0))
    steps += [(RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    try:
        checked(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))
    except OSError as error:
        return f"seccomp was refused: {error}"
    return ""


def _refuse(error: int) -> Step:
    return RETURN, 0, 0, REFUSE | error


def _for(number: int, steps: list[Step]) -> list[Step]:
    """The steps for one system call. They must end with a return."""
    return [(EQUAL, 0, len(steps), number), *steps]


def _families(allowed: tuple[int, ...]) -> list[Step]:
    """The families of sockets. Those of Unix reach other programs through files."""
    steps: list[Step] = [(LOAD, 0, 0, ARGUMENTS[0])]
    for family in allowed:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    return [*steps, _refuse(errno.EACCES)]


def _tcp_only() -> list[Step]:
    """TCP over IPv4: socket(AF_INET, SOCK_STREAM, 0 or IPPROTO_TCP)."""
    return [
        (LOAD, 0, 0, ARGUMENTS[0]),
        (EQUAL, 0, 6, AF_INET),
        (LOAD, 0, 0, ARGUMENTS[1]),
        (AND, 0, 0, SOCKET_TYPES),
        (EQUAL, 0, 3, SOCK_STREAM),
        (LOAD, 0, 0, ARGUMENTS[2]),
        (EQUAL, 2, 0, 0),
        (EQUAL, 1, 0, IPPROTO_TCP),
        _refuse(errno.EACCES),
        (RETURN, 0, 0, ALLOW),
    ]


def _connected_pair() -> list[Step]:
    """A pair of stream or sequential-packet sockets stays connected to itself. Datagram sockets can
    send to any address.
    """
    return [
        (LOAD, 0, 0, ARGUMENTS[1]),
        (AND, 0, 0, SOCKET_TYPES),
        (EQUAL, 2, 0, SOCK_STREAM),
        (EQUAL, 1, 0, SOCK_SEQPACKET),
        _refuse(errno.EACCES),
        (RETURN, 0, 0, ALLOW),
    ]


def _without(flag: int) -> list[Step]:
    """The first argument must not have this flag."""
    return [
        (LOAD, 0, 0, ARGUMENTS[0]),
        (AND, 0, 0, flag),
        (EQUAL, 1, 0, 0),
        _refuse(errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def _limits_of_others() -> list[Step]:
    """prlimit(pid, resource, new, old): `new` must be null unless `pid` is 0."""
    return [
        (LOAD, 0, 0, ARGUMENTS[0]),
        (EQUAL, 4, 0, 0),
        (LOAD, 0, 0, ARGUMENTS[2]),
        (EQUAL, 0, 3, 0),
        (LOAD, 0, 0, ARGUMENTS[2] + HIGH_HALF),
        (EQUAL, 0, 1, 0),
        (RETURN, 0, 0, ALLOW),
        _refuse(errno.EPERM),
    ]


def _only(*values: int) -> list[Step]:
    """The first arguments must have these values."""
    steps: list[Step] = []
    for place, value in zip(ARGUMENTS, values, strict=False):
        steps += [(LOAD, 0, 0, place), (EQUAL, 1, 0, value), _refuse(errno.EPERM)]
    return [*steps, (RETURN, 0, 0, ALLOW)]
