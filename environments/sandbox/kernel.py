"""System calls of Linux that Python has no function for."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_KILL = 5
CAPABILITY_VERSION_3 = 0x20080522
MOUNT_SETATTR = 442
AT_FDCWD = -100
MNT_DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    """The result of a system call. OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def works_in_a_fork(action: Callable[[], None]) -> bool:
    """Whether the action succeeds, tried in a fork because half of it could not be undone."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


# -- processes -------------------------------------------------------------------------------------


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Get signal `by` when the parent ends. End now if it has ended already."""
    end_with_parent(by)
    if os.getppid() != parent_pid:
        sys.exit("the process that asked for this one is gone")


def end_with_parent(by: int = signal.SIGKILL) -> None:
    """Get signal `by` when the parent ends, if it has not ended yet."""
    if sys.platform.startswith("linux"):
        libc.prctl(PR_SET_PDEATHSIG, by)


def signal_name(number: int) -> str:
    """SIGKILL for 9. A real-time signal has no name: SIG40 for 40."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def set_subreaper() -> None:
    """Make this process the parent of all orphans among its descendants."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_dumpable(is_dumpable: bool) -> None:
    """Whether other processes of the user may trace this one."""
    libc.prctl(PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0)


def keep_capabilities(*kept: int) -> None:
    """Drop all capabilities of this process but these."""
    mask = 0
    for capability in kept:
        mask |= 1 << capability
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    checked(libc.capset(header, struct.pack("6I", mask, mask, mask, 0, 0, 0)))


# -- mounts ----------------------------------------------------------------------------------------


def mount(
    target: str, flags: int, *, source: str = "none", kind: str = "", options: str = ""
) -> None:
    encoded = (os.fsencode(source), os.fsencode(target), kind.encode() or None)
    checked(libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None))


def unmount(target: str) -> None:
    checked(libc.umount2(os.fsencode(target), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root, and `old`, a folder in it, the place of the former one."""
    checked(libc.pivot_root(os.fsencode(new), os.fsencode(old)))


def set_mount_attributes(path: str, flags: int, *, on: int = 0, off: int = 0) -> None:
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, attributes, size))
