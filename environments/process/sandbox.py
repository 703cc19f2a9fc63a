"""Walls around environment code: what its process may open, reach, use up and leave behind. Linux;
no helper, no root.

    needs = Needs.of(folder)                    # environment.toml, where the folder has one
    standing = confine(bounds)                  # in the child, before user code: {wall: "" or why it does not stand}
    python -m environments.process.sandbox              # the same on a machine, as JSON, for `flash-mcp doctor`

What stands where the kernel allows it: files (Landlock: the folder and the system's libraries to
read, a temporary folder to write to), attributes (a mount namespace, read-only but for that folder,
or another user: no file's mode or time is changed), network (seccomp: no socket can be made but
pairs of connected ones), signals (Landlock: no process outside is signalled or traced), memory,
file size and number of processes (limits of the kernel; as root by becoming another user first).
Terminals are there where the namespace gives it some of its own.

What does not: the CPU's time, the number of files in the temporary folder, files in memory that no
process has mapped, what one episode may learn of another in the same process, and, with network,
sockets of programs on this machine. Environment code shares a kernel with its host."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FILE = "environment.toml"
STACK_BYTES = 8 << 20
"""Of a thread; the kernel counts it in full as soon as the thread starts."""
READABLE_VARIABLE = "FLASH_READABLE"
"""Folders, separated by colons, that environment code may read besides: data sets too large to be
pushed.
"""


@dataclass(frozen=True)
class Needs:
    """What an environment asks for in environment.toml; left out, what suits most."""

    network: bool = False
    memory_gib: float = 8.0
    """Of all its processes together."""
    processes: int = 512
    """Processes and threads, besides one thread for each call under way."""
    file_gib: float = 4.0
    """Of one file."""

    @classmethod
    def of(cls, folder: Path) -> Needs:
        """ValueError, with a sentence, for a file that cannot be used."""
        try:
            document = tomllib.loads((folder / FILE).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{FILE} cannot be read: {error}") from error
        known: dict[str, type] = {each.name: type(each.default) for each in fields(cls)}
        if unknown := sorted(set(document) - set(known)):
            raise ValueError(
                f"{FILE} has unknown keys {', '.join(unknown)}; it may have: {', '.join(known)}"
            )
        for name, value in document.items():
            fits = (
                isinstance(value, bool)
                if known[name] is bool
                else type(value) in (int, known[name]) and value > 0
            )
            if not fits:
                kind = "true or false" if known[name] is bool else "a number above 0"
                raise ValueError(f"{FILE}: {name} must be {kind}, got {value!r:.80}")
        return cls(**document)

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults."""
        usual = asdict(Needs())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


@dataclass(frozen=True)
class Bounds:
    """What a child is confined to. `hidden` holds state that no rule may open, but for what lies at
    `folder`.
    """

    folder: str
    scratch: str
    hidden: str
    needs: dict[str, Any] = field(default_factory=dict[str, Any])
    threads: int = 32
    readable: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """Folders within `scratch`, where not all of it is to be written to."""

    @property
    def writable(self) -> tuple[str, ...]:
        return self.written or (self.scratch,)

    @property
    def memory_bytes(self) -> int:
        return int(Needs(**self.needs).memory_gib * 2**30)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Bounds:
        return cls(**json.loads(text))


class NetworkRefusedError(PermissionError):
    """Environment code wanted the network without having asked for it."""

    def __init__(self) -> None:
        super().__init__(
            errno.EACCES,
            f"this environment has no network; network = true in its {FILE} asks for it",
        )


def confine(bounds: Bounds) -> dict[str, str]:
    """Put up the walls around this process for good: {wall: "" where it stands, else why not}.

    Called with a single thread. Raises nothing: a wall that cannot be put up is left out and named.
    """
    needs = Needs(**bounds.needs)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(
            "1000"
        )  # where memory runs out, this goes before the trainer
    mounts, is_counted = _leave_the_user(bounds)
    walls = {
        "memory": _limit(resource.RLIMIT_DATA, bounds.memory_bytes + bounds.threads * STACK_BYTES),
        "file_size": _limit(resource.RLIMIT_FSIZE, int(needs.file_gib * 2**30)),
        "processes": _limit(resource.RLIMIT_NPROC, needs.processes + bounds.threads)
        if is_counted
        else "neither another user nor a user namespace can be had, and without one all processes of the user count",
        "attributes": mounts.attributes,
    }
    if not sys.platform.startswith("linux"):
        return walls | dict.fromkeys(
            ("files", "signals", "network"), f"{sys.platform} has no Landlock and no seccomp"
        )
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    walls["files"], walls["signals"] = _restrict_files(bounds, mounts)
    walls["network"] = _filter_calls(allow_sockets=needs.network)
    if needs.network:
        walls["network"] = f"open: {FILE} asks for it"
    return walls


def explain_refusals(bounds: Bounds) -> None:
    """Have this interpreter say what a wall is where the kernel would only refuse."""
    if not Needs(**bounds.needs).network:
        sys.addaudithook(_explain_refusal)


def _explain_refusal(event: str, args: tuple[Any, ...]) -> None:
    """Say in Python what the kernel would say in one word. No wall: seccomp is."""
    if event.startswith("socket.") and (
        event in ("socket.getaddrinfo", "socket.gethostbyname")
        or (event == "socket.__new__" and args[1] in (2, 10))
    ):
        raise NetworkRefusedError


def _limit(kind: int, most: int) -> str:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError) as error:
        return str(error)
    return ""


# -- system calls ----------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
(
    PR_SET_SECUREBITS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_RAISE,
) = 28, 36, 38, 47, 2
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE, MS_BIND, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 0x1000, 2, 4
MOUNT_SETATTR, MOUNT_ATTR_RDONLY, AT_RECURSIVE, AT_FDCWD = 442, 1, 0x8000, -100

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Get signal `by` when the parent ends, and end now where that has happened already."""
    if sys.platform.startswith("linux"):
        _libc.prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:
        sys.exit("the process that asked for this one is gone")


def set_subreaper() -> None:
    """Be the one whom orphans among this process's descendants fall to."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# -- another user, so that processes can be counted; shared memory of its own ----------------------

UIDS = range(61184, 65520)
"""For processes of passing users; systemd takes its own from here too."""
CAP_DAC_OVERRIDE = 1
NO_SETUID_FIXUP, KEEP_CAPS = 1 << 2, 1 << 4
CAPABILITY_VERSION_3 = 0x20080522


def _leave_the_user(bounds: Bounds) -> tuple[Mounts, bool]:
    """(the mounts that it has now, whether RLIMIT_NPROC counts this process and what it starts, and
    no others).

    The kernel never counts root's processes: root becomes a user of its own, who opens files as
    root does and has no other power; the Landlock rules say which files. Others get a user
    namespace, where that is allowed."""
    if not sys.platform.startswith("linux"):
        return Mounts(), False
    if os.getuid() != 0:
        is_mapped = works_in_a_fork(_enter_user_namespace)
        if is_mapped:
            _enter_user_namespace()
        mounts = _own_mounts(bounds)
        _keep_capabilities(0)
        return mounts, is_mapped
    mounts = _own_mounts(bounds)
    with suppress(OSError):
        _become(UIDS[os.getpid() % len(UIDS)])
    return mounts, os.getuid() != 0


def works_in_a_fork(action: Callable[[], None]) -> bool:
    """Whether it can be done: half done it could not be undone."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    _checked(_libc.unshare(CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


@dataclass(frozen=True)
class Mounts:
    """Whether /dev/shm and terminals are its own, and why it can change modes and times of its
    user's files.
    """

    shm: bool = False
    terminals: bool = False
    attributes: str = "this system has no mount namespaces"


def _own_mounts(bounds: Bounds) -> Mounts:
    """Leave everything but `scratch` read-only, which Landlock cannot: it lets modes and times be
    changed.

    Multiprocessing keeps its locks in /dev/shm, where the shared memory of all other programs is
    too, as the terminals of all others are in /dev/pts."""
    try:
        _checked(_libc.unshare(CLONE_NEWNS))
        _mount("/", MS_REC | MS_PRIVATE)
    except OSError as error:
        return Mounts(attributes=f"no mount namespace can be had: {error}")
    try:
        for folder in bounds.writable:
            _mount(folder, MS_BIND, source=folder)
        _set_attributes("/", AT_RECURSIVE, on=MOUNT_ATTR_RDONLY)
        for folder in bounds.writable:
            _set_attributes(folder, 0, off=MOUNT_ATTR_RDONLY)
        attributes = ""
    except OSError as error:
        attributes = f"mounts cannot be made read-only: {error}"
    shm = f"size={bounds.memory_bytes // 2},mode=1777"
    return Mounts(
        shm=_is_mounted("/dev/shm", MS_NOSUID | MS_NODEV, kind="tmpfs", options=shm),
        terminals=_is_mounted(
            "/dev/pts", MS_NOSUID, kind="devpts", options="newinstance,ptmxmode=0666,mode=0600"
        )
        and _is_mounted("/dev/ptmx", MS_BIND, source="/dev/pts/ptmx"),
        attributes=attributes,
    )


def _mount(
    target: str, flags: int, *, source: str = "none", kind: str = "", options: str = ""
) -> None:
    encoded = (os.fsencode(source), os.fsencode(target), kind.encode() or None)
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None))


def _is_mounted(target: str, flags: int, **options: str) -> bool:
    with suppress(OSError):
        _mount(target, flags, **options)
        return True
    return False


def _set_attributes(path: str, flags: int, *, on: int = 0, off: int = 0) -> None:
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    _checked(
        _libc.syscall(
            MOUNT_SETATTR,
            AT_FDCWD,
            os.fsencode(path),
            flags,
            attributes,
            ctypes.c_size_t(len(attributes)),
        )
    )


def _become(uid: int) -> None:
    _checked(_libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    # access(2), which compilers ask about their temporary folder, would leave out the power that
    # open(2) has.
    _libc.prctl(PR_SET_SECUREBITS, NO_SETUID_FIXUP | KEEP_CAPS, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _keep_capabilities(1 << CAP_DAC_OVERRIDE)
    # Ambient: a program that it starts needs to open the same files.
    _checked(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0))
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self would be root's


def _keep_capabilities(kept: int) -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, struct.pack("6I", kept, kept, kept, 0, 0, 0)))


# -- Landlock: files and signals -------------------------------------------------------------------

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
REFER = 1 << 13
READ = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt",
    "/nix",
    "/proc",
    "/sys",
)
SETTINGS = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts", "gai.conf", "group",
    "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "mime.types",
    "nsswitch.conf", "os-release", "passwd", "pki/tls/certs", "pki/ca-trust", "protocols", "resolv.conf", "services",
    "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
"""Of /etc, what programs look up; the rest may be secret."""
DEVICES = ("null", "zero", "full", "random", "urandom")
TERMINALS = ("tty", "ptmx", "pts")


def _restrict_files(bounds: Bounds, mounts: Mounts) -> tuple[str, str]:
    """Why the walls around files and signals do not stand; empty where they do."""
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION_FLAG)
    if version < 1:
        why = f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
        return why, why
    # What an older kernel does not know of, it cannot refuse.
    handled = (1 << 13) - 1 | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled |= IOCTL_DEV if version >= 5 else 0
    scoped = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS if version >= 6 else 0
    size = 8 if version < 4 else 16 if version < 6 else 24
    try:
        rules = _checked(
            _libc.syscall(
                LANDLOCK_CREATE_RULESET,
                struct.pack("QQQ", handled, 0, scoped),
                ctypes.c_size_t(size),
                0,
            )
        )
        for path, rights in _rules(bounds, mounts, handled):
            _allow(rules, path, rights & handled)
        _checked(_libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
        os.close(rules)
    except OSError as error:
        return str(error), str(error)
    return (
        "",
        ""
        if scoped
        else f"this kernel has Landlock {version}, which leaves signals alone; 6 does not",
    )


def _rules(bounds: Bounds, mounts: Mounts, handled: int) -> Iterator[tuple[Path, int]]:
    package = Path(__file__).parents[1]
    yield (
        package.parent,
        READ_DIR,
    )  # where Python looks for it; there may be more there than packages
    hidden = _real(bounds.hidden)
    python = (
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        str(Path(sys.executable).resolve().parent),
    )
    imported = (entry for entry in sys.path if entry and Path(entry) != package.parent)
    settings = (f"/etc/{name}" for name in SETTINGS)
    for root in (
        *SYSTEM,
        *settings,
        *python,
        *imported,
        *bounds.readable,
        str(package),
        bounds.folder,
    ):
        for path in _without(_real(root), hidden):
            yield path, READ
    yield Path(bounds.folder), READ_DIR
    for name in (*DEVICES, *(TERMINALS if mounts.terminals else ())):
        yield Path("/dev", name), READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV
    for folder in bounds.writable:
        yield Path(folder), handled
    yield (
        Path("/dev/shm"),
        handled if mounts.shm else READ | WRITE_FILE | TRUNCATE | 1 << 5 | 1 << 8,
    )


def _without(root: Path, hidden: Path) -> Iterable[Path]:
    """`root`, or what of it does not lead to `hidden`; both without links on the way."""
    if not hidden.is_relative_to(root):
        return (root,)
    with suppress(OSError):
        inside = [
            (entry, _real(entry) if entry.is_symlink() else entry) for entry in root.iterdir()
        ]
        return [
            path
            for entry, real in inside
            if not real.is_relative_to(hidden)
            and (real is entry or not hidden.is_relative_to(real))
            for path in _without(real, hidden)
        ]
    return ()


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not there: nothing to open
        return
    try:
        rights &= -1 if path.is_dir() else OF_A_FILE
        _checked(
            _libc.syscall(
                LANDLOCK_ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0
            )
        )
    finally:
        os.close(descriptor)


# -- seccomp: sockets ------------------------------------------------------------------------------

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
SECOND_ARGUMENT = 24
SOCKET_TYPES, SOCK_STREAM, SOCK_SEQPACKET = 0xF, 1, 5
IO_URING_SETUP = 425
"""It would make sockets past any filter."""
# The machine's own calls, and the numbers of: socket; socketpair; add_key, request_key, keyctl
# (keys of the user's session); shm*, sem*, msg* of System V and mq_*, whose memory nobody counts,
# outlives its makers, may be others'.
MACHINES = {
    "x86_64": (0xC000003E, 41, 53, (248, 249, 250), (29, 30, 31, *range(64, 72), 220, 240, 241)),
    "aarch64": (0xC00000B7, 198, 199, (217, 218, 219), (180, 181, *range(186, 198))),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter_calls(*, allow_sockets: bool) -> str:
    """Why the network wall does not stand; empty where it does."""
    machine = platform.machine()
    if machine not in MACHINES:
        return f"the system calls of {machine} are not known here"
    own, socket, pair, keys, shared = MACHINES[machine]
    refused = [(number, errno.ENOSYS) for number in (IO_URING_SETUP, *shared)]
    refused += [(number, errno.EPERM) for number in keys]
    refused += [] if allow_sockets else [(socket, errno.EACCES)]
    steps = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, own),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (LOAD, 0, 0, 0),
    ]
    steps += [
        (AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
    ]  # the numbers of the x32 calls
    for number, error in refused:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | error)]
    if (
        not allow_sockets
    ):  # streams and sequences of packets stay with each other, datagrams go to any address
        steps += [(EQUAL, 0, 5, pair), (LOAD, 0, 0, SECOND_ARGUMENT), (AND, 0, 0, SOCKET_TYPES)]
        steps += [(EQUAL, 2, 0, SOCK_STREAM), (EQUAL, 1, 0, SOCK_SEQPACKET)]
        steps += [(RETURN, 0, 0, REFUSE | errno.EACCES)]
    steps += [(RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    try:
        _checked(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))
    except OSError as error:
        return f"seccomp was refused: {error}"
    return ""


# -- what a wall looks like from inside ------------------------------------------------------------


def hit(error: BaseException) -> tuple[str, str] | None:
    """(error code, what to know) where an exception of environment code comes from a wall."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if found := _wall(cause):
            return found
        cause = cause.__cause__ or cause.__context__
    return None


def _wall(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, NetworkRefusedError):
        return "environment_network", f"it has no network unless its {FILE} says network = true"
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return (
            "environment_memory",
            f"it may use the memory_gib of its {FILE} ({Needs().memory_gib:g} if left out)",
        )
    if "can't start new thread" in str(error) or (
        isinstance(error, OSError) and error.errno == errno.EAGAIN
    ):
        about = f"it may have the processes of its {FILE} ({Needs().processes} if left out), threads included"
        return "environment_processes", about
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (
            "environment_file_size",
            f"a file may have the file_gib of its {FILE} ({Needs().file_gib:g} if left out)",
        )
    if (
        isinstance(error, OSError)
        and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        and error.filename
    ):
        about = (
            "it may read its own folder and installed programs, and write to its temporary folder (tempfile); the "
            f"server's variable {READABLE_VARIABLE} names folders to read besides"
        )
        return "environment_access", about
    return None


def describe(walls: dict[str, str]) -> str:
    """One line for people: which walls stand, and why others do not."""
    standing = ", ".join(name for name, why in walls.items() if not why) or "none"
    missing = "; ".join(f"{name}: {why}" for name, why in walls.items() if why)
    return f"walls around environment code: {standing}" + (f"; not: {missing}" if missing else "")


def main() -> None:
    assert threading.active_count() == 1
    folder, scratch = sys.argv[1:]
    sys.stdout.write(json.dumps(confine(Bounds(folder, scratch, hidden=folder))))


if __name__ == "__main__":
    main()
