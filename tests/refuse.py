"""Runs a command for which the kernel refuses some system calls, also in all processes that it
starts: `python -m tests.refuse link,flock COMMAND...`, as on a file system that lacks them."""

import ctypes
import errno
import os
import platform
import struct
import sys

import pytest

NUMBERS = {
    "x86_64": {"link": 86, "linkat": 265, "flock": 73, "fcntl": 72},
    "aarch64": {"linkat": 37, "flock": 32, "fcntl": 25},
}
ERRORS = {"flock": errno.ENOLCK, "fcntl": errno.ENOLCK}  # the others are not permitted
OFD_SETLK = 37
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER, SECOND_ARGUMENT = 0, 24  # where in seccomp_data; of an argument the low half


def program(names: list[str]) -> bytes:
    """A filter that fails these system calls; of fcntl, only locks of an open file."""
    numbers = NUMBERS[platform.machine()]
    rules: list[tuple[int, int, int, int]] = []
    for name in names:
        if name in numbers:
            fail = (RETURN, 0, 0, FAIL | ERRORS.get(name, errno.EPERM))
            rest = [fail]
            if name == "fcntl":
                rest = [(LOAD, 0, 0, SECOND_ARGUMENT), (EQUAL, 0, 1, OFD_SETLK), fail]
            rules += [(LOAD, 0, 0, NUMBER), (EQUAL, 0, len(rest), numbers[name]), *rest]
    rules.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def refuse(names: list[str]) -> None:
    """For this process and those that it starts."""
    code = ctypes.create_string_buffer(program(names))
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = struct.pack("HxxxxxxP", (len(code) - 1) // 8, ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(filter_)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, pointer):
        raise OSError(ctypes.get_errno(), "this kernel takes no seccomp filter")


def refusing(names: str) -> list[str]:
    """The beginning of a command for which these are refused; skips the test where none can be."""
    if platform.machine() not in NUMBERS:
        pytest.skip(f"no system call numbers are listed for {platform.machine()}")
    return [sys.executable, "-m", "tests.refuse", names]


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
