"""The system calls that environment code may make: a seccomp filter that allows those of
system_calls.py, some of them only with some arguments."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

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
# Where the filter finds these in struct seccomp_data: of an argument, the lower half.
CALL_NUMBER = 0
ARCHITECTURE = 4
ARGUMENTS = (16, 24, 32)
WHOLE = 0xFFFFFFFF
AF_INET = 2
AF_INET6 = 10
SOCKET_TYPES = 0xF
SOCK_STREAM = 1
SOCK_SEQPACKET = 5
IPPROTO_TCP = 6
PRIO_PROCESS = 0
IOPRIO_WHO_PROCESS = 1
OF_A_PROCESS = (
    "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr", "prlimit64",
)  # fmt: skip
"""What changes the process that its first argument names, 0 for the caller."""
NAMESPACES = 0x7E020000
"""The flags of clone that ask for namespaces."""
LENGTH_FLAGS = os.O_ACCMODE | os.O_TRUNC
LENGTH_IS_KEPT = (0, 1, 2, 3, os.O_TRUNC | os.O_WRONLY, os.O_TRUNC | os.O_RDWR)
"""What these flags of an open may be where Landlock does not refuse to empty a file: only what asks
to write as well, which Landlock does refuse."""
CLONE3 = 435
"""Its flags are in memory, where no filter sees them. Where it is missing, programs call clone."""

Step = tuple[int, int, int, int]
"""Instruction, steps to skip if true, steps to skip if false, operand."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_calls(
    *, allow_sockets: bool, allow_tcp: bool, has_processes: bool, allow_truncate: bool = True
) -> str:
    """Why system calls cannot be refused; "" if they are. `allow_tcp` allows TCP over IPv4 alone.
    Sockets of Unix are never allowed alone: they reach other programs through files.

    `has_processes`: the code has a PID namespace, so that it finds no process of others.
    `allow_truncate`: something else decides which files may be emptied."""
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
    # Connected pairs stay connected to themselves. Datagram sockets can send to any address.
    pairs = (SOCK_STREAM, SOCK_SEQPACKET)
    conditions = {
        "socket": _must(errno.EACCES, 0, *families),
        "socketpair": _must(errno.EACCES, 1, *pairs, mask=SOCKET_TYPES),
        "clone": _must(errno.EPERM, 0, 0, mask=NAMESPACES),
    }
    if allow_tcp:
        conditions["socket"] = [
            *_must(errno.EACCES, 0, AF_INET),
            *_must(errno.EACCES, 1, SOCK_STREAM, mask=SOCKET_TYPES),
            *_must(errno.EACCES, 2, 0, IPPROTO_TCP),
        ]
    if not has_processes:
        conditions |= dict.fromkeys(OF_A_PROCESS, _must(errno.EPERM, 0, 0))
        for name, kind in (("setpriority", PRIO_PROCESS), ("ioprio_set", IOPRIO_WHO_PROCESS)):
            conditions[name] = [*_must(errno.EPERM, 0, kind), *_must(errno.EPERM, 1, 0)]
    if not allow_truncate:
        conditions["truncate"] = [_refuse(errno.EACCES)]
        # Its flags are in memory. Where it is missing, programs call openat.
        conditions["openat2"] = [_refuse(errno.ENOSYS)]
        for place, name in enumerate(("open", "openat"), start=1):
            conditions[name] = _must(errno.EACCES, place, *LENGTH_IS_KEPT, mask=LENGTH_FLAGS)
    for name, number in calls.items():
        # The kernel remembers which calls need no look at their arguments.
        steps += _for(number, [*conditions.get(name, ()), (RETURN, 0, 0, ALLOW)])
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


def _must(error: int, place: int, *values: int, mask: int = WHOLE) -> list[Step]:
    """Refuse the call with `error` unless what the mask leaves of an argument is one of these."""
    steps: list[Step] = [(LOAD, 0, 0, ARGUMENTS[place]), (AND, 0, 0, mask)]
    for number, value in enumerate(values):
        steps.append((EQUAL, len(values) - number, 0, value))
    return [*steps, _refuse(error)]
