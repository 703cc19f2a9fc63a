"""The user and the namespaces of environment code.

    own = enter_namespaces(...)       # in the warden: holds for the processes that it forks next
    mounts = own_mounts(bounds, own)  # in the first of these
    become(own)                       # in the process that runs environment code

The kernel never counts root's processes, so root makes the code another user, one that no other
process has. Other users get a user namespace, if that is allowed. A PID namespace ends as a whole
with its first process, and shows its processes no others."""

from __future__ import annotations

import os
import struct

# The module socket takes 5 ms to import.
from _socket import AF_INET, AF_UNIX, SOCK_DGRAM, SOCK_STREAM, socket
from contextlib import suppress
from dataclasses import dataclass, replace
from fcntl import ioctl
from pathlib import Path

from environments.sandbox.kernel import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    checked,
    keep_capabilities,
    libc,
    mount,
    set_dumpable,
    set_mount_attributes,
    works_in_a_fork,
)
from environments.sandbox.needs import Bounds

PR_SET_KEEPCAPS = 8
PR_SET_SECUREBITS = 28
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
NO_SETUID_FIXUP = 1 << 2
KEEP_CAPS = 1 << 4
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MOUNT_ATTR_RDONLY = 1
AT_RECURSIVE = 0x8000
UIDS = range(61184, 65520)
"""The range for users that live as long as a process; systemd takes its own from here too."""


@dataclass(frozen=True)
class Own:
    """What environment code has for itself."""

    uid: int | None = None
    """The user that it becomes, if we are root."""
    exclusive_uid: int | None = None
    """The same, if only its processes have that user."""
    is_mapped: bool = False
    """Whether it has a user namespace."""
    owns_files: bool = False
    """Whether the folders that it writes to belong to that user."""
    loopback: bool = False
    """Whether it has an empty network namespace whose loopback interface is up."""
    process_tree: str = "this system has no PID namespaces"
    """"" if it has a PID namespace, else why not."""

    @property
    def has_processes(self) -> bool:
        """Whether it has a PID namespace."""
        return not self.process_tree


def enter_namespaces(user: int | None = None, *, network: bool, loopback: bool = False) -> Own:
    """Give the processes that this one forks next a PID namespace, and a user of their own: `user`,
    if it is given. Without network they also get an empty network namespace, which shows no
    connections of others, with a loopback interface of its own if `loopback`.
    """
    own = Own()
    if user is not None:
        own = Own(uid=user, exclusive_uid=user, owns_files=True)
    elif os.getuid() == 0:
        uid = exclusive_uid()
        own = Own(uid=uid or UIDS[os.getpid() % len(UIDS)], exclusive_uid=uid)
    elif works_in_a_fork(_enter_user_namespace):
        _enter_user_namespace()
        own = Own(is_mapped=True)
    if loopback and not network and works_in_a_fork(_enter_loopback):
        _enter_loopback()
        own = replace(own, loopback=True)
    elif not network and not loopback:
        # Seccomp refuses sockets also where this is refused.
        libc.unshare(CLONE_NEWNET)
    try:
        checked(libc.unshare(CLONE_NEWPID))
    except OSError as error:
        return replace(own, process_tree=f"no PID namespace can be had: {error}")
    return replace(own, process_tree="")


def _enter_loopback() -> None:
    """Enter a network namespace and bring its loopback interface up."""
    checked(libc.unshare(CLONE_NEWNET))
    any_socket = socket(AF_INET, SOCK_STREAM)
    try:
        ioctl(any_socket.fileno(), SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    finally:
        any_socket.close()


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


# -- another user ----------------------------------------------------------------------------------

_taken: list[socket] = []
"""Keeps other wardens from taking the same user until this process ends."""


def exclusive_uid() -> int | None:
    """A user that no process has. It is taken until this process and its forks end."""
    used = pids_by_user()
    for number in range(len(UIDS)):
        uid = UIDS[(os.getpid() + number) % len(UIDS)]
        if uid not in used and _take(uid):
            return uid
    return None


def pids_by_user() -> dict[int, set[int]]:
    """{uid: pids} of all processes."""
    results: dict[int, set[int]] = {}
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdecimal():
                results.setdefault(entry.stat().st_uid, set()).add(int(entry.name))
    return results


def _take(uid: int) -> bool:
    name = socket(AF_UNIX, SOCK_DGRAM)
    try:
        name.bind(f"\0flash-mcp-user-{uid}")
    except OSError:
        name.close()
        return False
    _taken.append(name)
    return True


def become(own: Own) -> None:
    """Take the user of environment code. As root's deputy it opens files as root does and has no
    other capability; the Landlock rules say which files. If the folders that it writes to are its
    own, it only reads as root does. OSError if it stays root.
    """
    if own.uid is None:
        keep_capabilities()
        return
    checked(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    # Without these bits access(2) would ignore the capability that open(2) has. Compilers call it
    # for their temporary folder.
    libc.prctl(PR_SET_SECUREBITS, NO_SETUID_FIXUP | KEEP_CAPS, 0, 0, 0)
    os.setgroups([])
    os.setresgid(own.uid, own.uid, own.uid)
    os.setresuid(own.uid, own.uid, own.uid)
    kept = CAP_DAC_READ_SEARCH if own.owns_files else CAP_DAC_OVERRIDE
    keep_capabilities(kept)
    # Ambient, so that the programs that it starts can open the same files.
    checked(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, kept, 0, 0))
    set_dumpable(True)  # else root would own its /proc/self


# -- mounts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mounts:
    """Whether /dev/shm and the terminals are its own. `attributes` is "" if modes and times of
    other files are protected, `proc` if /proc shows its own processes only; else why not.
    """

    shm: bool = False
    terminals: bool = False
    attributes: str = "this system has no mount namespaces"
    proc: str = attributes


def own_mounts(bounds: Bounds, read: list[str], own: Own) -> Mounts:
    """Make every mount read-only except what the code writes, and let nothing be in what is hidden
    but what it writes and reads. Landlock does not forbid changes of modes and times, and shows
    whether a file exists.

    /dev/shm, where multiprocessing keeps its locks, also holds the shared memory of all other
    programs, and /dev/pts their terminals."""
    try:
        checked(libc.unshare(CLONE_NEWNS))
        mount("/", MS_REC | MS_PRIVATE)
    except OSError as error:
        why = f"no mount namespace can be had: {error}"
        return Mounts(attributes=why, proc=why)
    proc = own.process_tree
    if own.has_processes:
        # Where a container hides parts of /proc, the kernel refuses a user namespace a whole one.
        # A program with rules of its own (programs.py) finds no process of others in it.
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
        proc = _refused("/proc", flags, kind="proc", options="hidepid=ptraceable")
    attributes = ""
    writable = bounds.writable
    try:
        _hide(bounds, [*read, *writable])
        for folder in writable:
            mount(folder, MS_BIND, source=folder)
        set_mount_attributes("/", AT_RECURSIVE, on=MOUNT_ATTR_RDONLY)
        for folder in writable:
            set_mount_attributes(folder, 0, off=MOUNT_ATTR_RDONLY)
    except OSError as error:
        attributes = f"mounts cannot be made read-only: {error}"
    options = f"size={bounds.memory_bytes // 2},mode=1777"
    shm = not _refused("/dev/shm", MS_NOSUID | MS_NODEV, kind="tmpfs", options=options)
    options = "newinstance,ptmxmode=0666,mode=0600"
    terminals = not _refused("/dev/pts", MS_NOSUID, kind="devpts", options=options)
    terminals = terminals and not _refused("/dev/ptmx", MS_BIND, source="/dev/pts/ptmx")
    return Mounts(shm, terminals, attributes, proc)


def _hide(bounds: Bounds, kept: list[str]) -> None:
    """Put an empty folder in place of what is hidden, with those folders in it that are `kept`."""
    hidden, working = os.path.realpath(bounds.hidden), Path.cwd()
    sources: dict[str, int] = {}
    for path in kept:
        # It may lie elsewhere and be reached by a link in there, or the other way round.
        if path.startswith((hidden, bounds.hidden)) or os.path.realpath(path).startswith(hidden):
            with suppress(OSError):
                sources[path] = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mount(hidden, MS_NOSUID | MS_NODEV, kind="tmpfs", options="size=1m,mode=755")
    for path, descriptor in sources.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        mount(path, MS_BIND | MS_REC, source=f"/proc/self/fd/{descriptor}")
        os.close(descriptor)
    os.chdir("/")
    with suppress(OSError):
        os.chdir(working)  # until now it was the folder that is covered


def _refused(target: str, flags: int, **options: str) -> str:
    """Why something cannot be mounted there; "" if it is."""
    try:
        mount(target, flags, **options)
    except OSError as error:
        return f"{target} cannot be mounted anew: {error}"
    return ""
