"""Run a command where the kernel refuses system calls, as some containers do.

python -m tests.refusing landlock,namespaces COMMAND..."""

import ctypes
import errno
import os
import platform
import struct
import sys

from environments.sandbox import seccomp
from environments.sandbox.kernel import PR_SET_NO_NEW_PRIVS, checked, libc

CALLS = {
    "landlock": {"x86_64": 444, "aarch64": 444},  # landlock_create_ruleset
    "namespaces": {"x86_64": 272, "aarch64": 97},  # unshare
    "mount": {"x86_64": 165, "aarch64": 40},
    "pivot_root": {"x86_64": 155, "aarch64": 41},
    "mount_setattr": {"x86_64": 442, "aarch64": 442},
}


def refuse(*names: str) -> None:
    steps = [(seccomp.LOAD, 0, 0, seccomp.CALL_NUMBER)]
    for name in names:
        number = CALLS[name][platform.machine()]
        steps += seccomp._for(number, [seccomp._refuse(errno.EPERM)])
    steps.append((seccomp.RETURN, 0, 0, seccomp.ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = seccomp._Program(len(steps), code)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    checked(libc.prctl(seccomp.PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))


if __name__ == "__main__":
    refuse(*sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
