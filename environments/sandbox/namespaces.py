"""The user, the namespaces and the root of environment code.

    own = enter_namespaces(bounds)    # in the warden: holds for the processes that it forks next
    own = enter_root(bounds, readable, own)     # in the first of these
    become(own)                       # in the process that runs environment code

The kernel never counts root's processes, so root makes the code another user, one that no other
process has. Other users get a user namespace, if that is allowed. A PID namespace ends as a whole
with its first process, and shows its processes no others."""

from __future__ import annotations

import os
import struct

# The module socket takes 5 ms to import.
from _socket import AF_INET, AF_UNIX, SOCK_DGRAM, SOCK_STREAM, socket
from collections.abc import Iterable
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
    pivot_root,
    set_mount_attributes,
    unmount,
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
    """The user that it becomes, if we are root. Only its processes have that user."""
    is_mapped: bool = False  # whether it has a user namespace
    owns_files: bool = False  # whether the folders that it writes to belong to that user
    loopback: bool = False
    """Whether it has an empty network namespace whose loopback interface is up."""
    process_tree: str = "this system has no PID namespaces"
    """"" if it has a PID namespace, else why not."""
    attributes: str = "this system has no mount namespaces"
    """"" if it has a root of its own, else why not."""
    proc: str = attributes  # "" if its /proc shows its own processes only, else why not

    @property
    def has_processes(self) -> bool:
        """Whether it has a PID namespace."""
        return not self.process_tree

    @property
    def has_root(self) -> bool:
        return not self.attributes


def enter_namespaces(bounds: Bounds) -> Own:
    """Give the processes that this one forks next a PID namespace, and a user of their own. Without
    network they also get an empty network namespace, which shows no connections of others, with a
    loopback interface of its own for an endpoint.
    """
    needs = bounds.needs
    own = Own()
    if bounds.user is not None:
        own = Own(uid=bounds.user, owns_files=True)
    elif os.getuid() == 0:
        own = Own(uid=exclusive_uid())
    elif works_in_a_fork(_enter_user_namespace):
        _enter_user_namespace()
        own = Own(is_mapped=True)
    if needs.endpoint and not needs.network and works_in_a_fork(_enter_loopback):
        _enter_loopback()
        own = replace(own, loopback=True)
    elif not needs.network and not needs.endpoint:
        # Seccomp refuses sockets also where this is refused.
        libc.unshare(CLONE_NEWNET)
    try:
        checked(libc.unshare(CLONE_NEWPID))
    except OSError as error:
        return replace(own, process_tree=f"no PID namespace can be had: {error}")
    return replace(own, process_tree="")


def _enter_loopback() -> None:
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

_taken: list[socket] = []  # keeps other wardens from taking the same user until this process ends


def exclusive_uid() -> int:
    """A user that no process has, taken until this process and its forks end. OSError if none."""
    used = pids_by_user()
    for number in range(len(UIDS)):
        uid = UIDS[(os.getpid() + number) % len(UIDS)]
        if uid in used:
            continue
        name = socket(AF_UNIX, SOCK_DGRAM)
        try:
            name.bind(f"\0flash-mcp-user-{uid}")
        except OSError:
            name.close()
            continue
        _taken.append(name)
        return uid
    raise OSError(f"all users from {UIDS[0]} to {UIDS[-1]} have processes")


def pids_by_user() -> dict[int, set[int]]:
    results: dict[int, set[int]] = {}
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdecimal():
                results.setdefault(entry.stat().st_uid, set()).add(int(entry.name))
    return results


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


# -- a root of its own -----------------------------------------------------------------------------

OLD = "/.machine"  # where the machine's root is while the new one is filled
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
}
"""{name in /dev: where the link leads}"""
TERMINALS = "/dev/pts"
SHARED_MEMORY = "/dev/shm"


def enter_root(bounds: Bounds, readable: Iterable[Path], own: Own) -> Own:
    """Enter a root in which nothing exists but what the code reads and writes. Landlock alone would
    show whether other files exist, and let their modes and times be changed.

    It is read-only except for what the code writes. /dev/shm, where multiprocessing keeps its
    locks, is its own, and so are the terminals."""
    paths = [str(path) for path in readable if os.access(path, os.F_OK)]
    place, working = os.path.realpath(bounds.scratch), Path.cwd()
    try:
        checked(libc.unshare(CLONE_NEWNS))
        mount("/", MS_REC | MS_PRIVATE)
        mount(place, MS_NOSUID | MS_NODEV, kind="tmpfs", options="size=1m,mode=755")
    except OSError as error:
        why = f"no mount namespace can be had: {error}"
        return replace(own, attributes=why, proc=why)
    try:
        Path(place + OLD).mkdir()
        pivot_root(place, place + OLD)
        proc = _fill(bounds, paths, own)
        unmount(OLD)
    except OSError as error:
        with suppress(OSError):
            pivot_root(OLD, OLD + place)
        unmount(place)
        why = f"no root of its own can be had: {error}"
        return replace(own, attributes=why, proc=why)
    finally:
        os.chdir("/")
        with suppress(OSError):
            os.chdir(working)
    return replace(own, attributes="", proc=proc)


def _fill(bounds: Bounds, paths: list[str], own: Own) -> str:
    """Fill the new root with what the code may use. Why /proc shows other processes, or ""."""
    written = [_way(path) for path in bounds.writable]
    outer = OLD
    for path in sorted({*map(_way, paths)} - {"/proc"}):
        if not path.startswith(f"{outer}/"):
            _show(path)
            outer = path
    for path in (*written, *(f"/dev/{name}" for name in (*DEVICES, "tty"))):
        _show(path)
    for name, target in LINKS.items():
        Path("/dev", name).symlink_to(target)
    for path in ("/proc", SHARED_MEMORY, TERMINALS):
        Path(path).mkdir()
    proc = own.process_tree
    if own.has_processes:
        # Where a container hides parts of /proc, the kernel refuses a user namespace a whole one.
        # A program with rules of its own (agents/command.py) finds no process of others in it.
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
        proc = _refused("/proc", flags, kind="proc", options="hidepid=ptraceable")
    if proc:
        _show("/proc")
    set_mount_attributes("/", AT_RECURSIVE, on=MOUNT_ATTR_RDONLY)
    for path in written:
        set_mount_attributes(path, 0, off=MOUNT_ATTR_RDONLY)
    options = f"size={bounds.memory_bytes // 2},mode=1777"
    mount(SHARED_MEMORY, MS_NOSUID | MS_NODEV, kind="tmpfs", options=options)
    _refused(TERMINALS, MS_NOSUID, kind="devpts", options="newinstance,ptmxmode=0666,mode=0600")
    return proc


def _way(path: str) -> str:
    """Make the links of the machine that `path` goes through. Returns its real path."""
    real = ""
    parts = path.split("/")[::-1]
    while parts:
        part = parts.pop()
        if part == "..":
            real = real.rpartition("/")[0]
        elif part not in ("", "."):
            place = f"{real}/{part}"
            try:
                target = str(Path(OLD + place).readlink())
            except OSError:  # it is no link
                real = place
                continue
            Path(real or "/").mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                Path(place).symlink_to(target)
            if target.startswith("/"):
                real = ""
            parts += target.split("/")[::-1]
    return real


def _show(path: str) -> None:
    """Mount a folder or file of the machine at the same place, if it exists. `path` has no link."""
    source, place = Path(OLD + path), Path(path)
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif source.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.touch()
    else:
        return
    mount(path, MS_BIND | MS_REC, source=OLD + path)


def _refused(target: str, flags: int, **options: str) -> str:
    """Why something cannot be mounted there; "" if it is."""
    try:
        mount(target, flags, **options)
    except OSError as error:
        return f"{target} cannot be mounted anew: {error}"
    return ""
