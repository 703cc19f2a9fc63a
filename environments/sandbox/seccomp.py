"""The system calls that environment code may make: a seccomp filter that allows those of
system_calls.py, some of them only with some arguments."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable

from environments.sandbox.kernel import checked, libc
from environments.sandbox.system_calls import allowed_calls

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
CONNECTED = (SOCK_STREAM, SOCK_SEQPACKET)
"""A pair of these stays connected to itself. Datagram sockets can send to any address."""
PRIO_PROCESS = 0
IOPRIO_WHO_PROCESS = 1
SCHEDULING = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
NAMESPACES = 0x7E020000
"""The flags of clone that ask for namespaces."""
CLONE3 = 435
"""Its flags are in memory, where no filter sees them. Where it is missing, programs call clone."""
PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, Linux with 32 bits, both also with the kernel's name as 2.6, and to ask which it is."""

Step = tuple[int, int, int, int]
"""Instruction, steps to skip if true, steps to skip if false, operand."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_calls(*, allow_sockets: bool, allow_tcp: bool, has_processes: bool) -> str:
    """Why system calls cannot be refused; "" if they are. `allow_tcp` allows TCP over IPv4 alone.
    Sockets of Unix are never allowed alone: they reach other programs through files.

    `has_processes`: the code has a PID namespace, so that it finds no process of others."""
    try:
        architecture, calls = allowed_calls()
    except KeyError as machine:
        return f"the system calls of {machine} are not known here"
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        _refuse(errno.ENOSYS),
        (LOAD, 0, 0, CALL_NUMBER),
        *_for(CLONE3, [_refuse(errno.ENOSYS)]),
    ]
    families = (AF_INET, AF_INET6) if allow_sockets else ()
    conditions = {
        "socket": _tcp_only() if allow_tcp else _one_of(families, errno.EACCES),
        "socketpair": _one_of(CONNECTED, errno.EACCES, argument=1, mask=SOCKET_TYPES),
        "clone": _one_of((0,), errno.EPERM, mask=NAMESPACES),
        "personality": _one_of(PERSONALITIES, errno.EPERM),
        "prlimit64": _limits_of_others(),
    }
    if not has_processes:
        conditions |= dict.fromkeys(SCHEDULING, _only(0))
        conditions["setpriority"] = _only(PRIO_PROCESS, 0)
        conditions["ioprio_set"] = _only(IOPRIO_WHO_PROCESS, 0)
    for name, condition in conditions.items():
        steps += _for(calls[name], condition)
    for first, last in _runs(calls.values()):
        steps += [(AT_LEAST, 0, 2, first), (AT_LEAST, 1, 0, last + 1), (RETURN, 0, 0, ALLOW)]
    # A program takes a call that is newer than all of these for missing and does without.
    steps += [(AT_LEAST, 0, 1, max(calls.values())), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
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


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers without a gap."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _one_of(
    values: tuple[int, ...], error: int, *, argument: int = 0, mask: int = 0xFFFFFFFF
) -> list[Step]:
    """What the mask leaves of an argument must be one of these."""
    steps: list[Step] = [(LOAD, 0, 0, ARGUMENTS[argument]), (AND, 0, 0, mask)]
    for value in values:
        steps += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*steps, _refuse(error)]


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
