"""The sandbox of environment code: limits on what its process may open, reach and use up. It needs
Linux, no helper program and no root.

    needs = Needs.of(folder)     # from environment.toml, if the folder has one
    found = confine(bounds)      # in the child, before user code
    python -m environments.process.sandbox FOLDER SCRATCH     # prints `found`, for the doctor

`found` maps each protection to "" if it works on this machine, and else to why it does not:

- files (Landlock): the code reads its folder and the system's libraries, and writes to a temporary
  folder. It gets terminals if the mount namespace has its own.
- attributes (a read-only mount namespace, or another user): it changes no file's mode or time
  outside that temporary folder.
- network (seccomp): it can make no socket except pairs of connected ones.
- signals (Landlock): it signals and traces no process outside the sandbox.
- memory, file_size, processes (resource limits; root becomes another user first).

The sandbox does not limit CPU time, the number of files in the temporary folder, files in memory
that no process has mapped, what one episode learns of another in the same process, or, with
network, sockets of other programs on this machine. Environment code shares a kernel with its host.
"""

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from environments.settings import read_toml

FILE = "environment.toml"
UNCOUNTED = (
    "neither another user nor a user namespace can be had, and without one all processes of the "
    "user count"
)
STACK_BYTES = 8 << 20
"""The stack of one thread. The kernel counts all of it as soon as the thread starts."""
READABLE_VARIABLE = "FLASH_READABLE"
"""More folders that environment code may read, separated by colons: data sets too large to push."""


@dataclass(frozen=True)
class Needs:
    """What an environment asks for in environment.toml. The defaults suit most environments."""

    network: bool = False
    memory_gib: float = 8.0
    """For all its processes together."""
    processes: int = 512
    """Processes and threads, in addition to one thread for each running call."""
    file_gib: float = 4.0
    """The size of one file."""

    @classmethod
    def of(cls, folder: Path) -> Needs:
        """Read the folder's environment.toml. ValueError explains a file that cannot be used."""
        return read_toml(cls, folder / FILE)

    def asked(self) -> dict[str, Any]:
        """The values that differ from the defaults."""
        usual = asdict(Needs())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


@dataclass(frozen=True)
class Bounds:
    """The limits of one child. No rule opens what is in `hidden`, except `folder`."""

    folder: str
    scratch: str
    hidden: str
    needs: dict[str, Any] = field(default_factory=dict[str, Any])
    threads: int = 32
    readable: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """Folders in `scratch`, if the code may not write to all of it."""

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
    """Environment code used the network, but its environment.toml does not ask for it."""

    def __init__(self) -> None:
        what = f"this environment has no network; network = true in its {FILE} asks for it"
        super().__init__(errno.EACCES, what)


def confine(bounds: Bounds) -> dict[str, str]:
    """Confine this process for good: {protection: "" if it works, else why it does not}.

    The process must have a single thread. Raises nothing: a protection that cannot be had is left
    out and named.
    """
    needs = Needs(**bounds.needs)
    with suppress(OSError):
        # If memory runs out, the kernel kills this process before the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    mounts, is_counted = _leave_the_user(bounds)
    memory = bounds.memory_bytes + bounds.threads * STACK_BYTES
    found = {
        "memory": _limit(resource.RLIMIT_DATA, memory),
        "file_size": _limit(resource.RLIMIT_FSIZE, int(needs.file_gib * 2**30)),
        "processes": UNCOUNTED,
        "attributes": mounts.attributes,
    }
    if is_counted:
        found["processes"] = _limit(resource.RLIMIT_NPROC, needs.processes + bounds.threads)
    if not sys.platform.startswith("linux"):
        why = f"{sys.platform} has no Landlock and no seccomp"
        return found | dict.fromkeys(("files", "signals", "network"), why)
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    found["files"], found["signals"] = _restrict_files(bounds, mounts)
    found["network"] = _filter_calls(allow_sockets=needs.network)
    if needs.network:
        found["network"] = f"open: {FILE} asks for it"
    return found


def explain_refusals(bounds: Bounds) -> None:
    """Make this interpreter explain a refused network where the kernel would only refuse it."""
    if not Needs(**bounds.needs).network:
        sys.addaudithook(_explain_refusal)


def _explain_refusal(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook. It only explains; seccomp is what refuses."""
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

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MOUNT_SETATTR = 442
MOUNT_ATTR_RDONLY = 1
AT_RECURSIVE = 0x8000
AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Get signal `by` when the parent ends. End now if it has ended already."""
    if sys.platform.startswith("linux"):
        _libc.prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:
        sys.exit("the process that asked for this one is gone")


def set_subreaper() -> None:
    """Make this process the parent of all orphans among its descendants."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# -- another user, so that processes can be counted; its own shared memory -------------------------

UIDS = range(61184, 65520)
"""The range for users that live as long as a process; systemd takes its own from here too."""
CAP_DAC_OVERRIDE = 1
NO_SETUID_FIXUP = 1 << 2
KEEP_CAPS = 1 << 4
CAPABILITY_VERSION_3 = 0x20080522


def _leave_the_user(bounds: Bounds) -> tuple[Mounts, bool]:
    """The new mounts, and whether RLIMIT_NPROC counts only this process and what it starts.

    The kernel never counts root's processes. So root becomes another user, which can open files as
    root does and has no other capability; the Landlock rules say which files. Other users get a
    user namespace, if that is allowed."""
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
    """Whether the action succeeds, tried in a fork because half of it could not be undone."""
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
    """Whether /dev/shm and the terminals are its own. `attributes` is "" if modes and times of
    other files are protected, else why not.
    """

    shm: bool = False
    terminals: bool = False
    attributes: str = "this system has no mount namespaces"


def _own_mounts(bounds: Bounds) -> Mounts:
    """Make every mount read-only except `scratch`. Landlock does not forbid changes of modes and
    times.

    /dev/shm, where multiprocessing keeps its locks, also holds the shared memory of all other
    programs, and /dev/pts their terminals."""
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
    options = f"size={bounds.memory_bytes // 2},mode=1777"
    shm = _is_mounted("/dev/shm", MS_NOSUID | MS_NODEV, kind="tmpfs", options=options)
    options = "newinstance,ptmxmode=0666,mode=0600"
    terminals = _is_mounted("/dev/pts", MS_NOSUID, kind="devpts", options=options)
    terminals = terminals and _is_mounted("/dev/ptmx", MS_BIND, source="/dev/pts/ptmx")
    return Mounts(shm, terminals, attributes)


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
    size = ctypes.c_size_t(len(attributes))
    _checked(_libc.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, attributes, size))


def _become(uid: int) -> None:
    _checked(_libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    # Without these bits access(2) would ignore the capability that open(2) has. Compilers call it
    # for their temporary folder.
    _libc.prctl(PR_SET_SECUREBITS, NO_SETUID_FIXUP | KEEP_CAPS, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _keep_capabilities(1 << CAP_DAC_OVERRIDE)
    # Ambient, so that the programs that it starts can open the same files.
    _checked(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0))
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else root would own its /proc/self


def _keep_capabilities(kept: int) -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, struct.pack("6I", kept, kept, kept, 0, 0, 0)))


# -- Landlock: files and signals -------------------------------------------------------------------

LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
VERSION_FLAG = 1
PATH_BENEATH = 1
EXECUTE = 1
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_FILE = 1 << 5
MAKE_REG = 1 << 8
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
ALL_OF_VERSION_1 = (1 << 13) - 1
READ = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
SCOPE_ABSTRACT_SOCKETS = 1
SCOPE_SIGNALS = 2
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix", "/proc", "/sys",
)  # fmt: skip
SETTINGS = """
alternatives ca-certificates ca-certificates.conf debian_version fonts gai.conf group host.conf
hosts ld.so.cache ld.so.conf ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release
passwd pki/tls/certs pki/ca-trust protocols resolv.conf services ssl/certs ssl/openssl.cnf timezone
""".split()  # noqa: SIM905
"""What programs look up in /etc. The rest of it may be secret."""
DEVICES = ("null", "zero", "full", "random", "urandom")
TERMINALS = ("tty", "ptmx", "pts")


def _restrict_files(bounds: Bounds, mounts: Mounts) -> tuple[str, str]:
    """Why files and signals are not protected; "" for each that is."""
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION_FLAG)
    if version < 1:
        why = f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
        return why, why
    # A kernel accepts only the rights that it knows. It does not restrict the others.
    handled = ALL_OF_VERSION_1
    for right, since in ((REFER, 2), (TRUNCATE, 3), (IOCTL_DEV, 5)):
        if version >= since:
            handled |= right
    scoped = 0
    size = 8
    if version >= 4:
        size = 16
    if version >= 6:
        size = 24
        scoped = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS
    attributes = struct.pack("QQQ", handled, 0, scoped)
    try:
        rules = _checked(
            _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
        )
        for path, rights in _rules(bounds, mounts, handled):
            _allow(rules, path, rights & handled)
        _checked(_libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
        os.close(rules)
    except OSError as error:
        return str(error), str(error)
    if scoped:
        return "", ""
    return "", f"this kernel has Landlock {version}, which leaves signals alone; 6 does not"


def _rules(bounds: Bounds, mounts: Mounts, handled: int) -> Iterator[tuple[Path, int]]:
    """The paths that it may use, each with its rights."""
    package = Path(__file__).parents[1]
    # Python looks for the package there. There may be more in it than packages.
    yield package.parent, READ_DIR
    hidden = _real(bounds.hidden)
    executable = Path(sys.executable).resolve().parent
    readable = [*SYSTEM, *(f"/etc/{name}" for name in SETTINGS)]
    readable += [sys.prefix, sys.base_prefix, sys.exec_prefix, str(executable)]
    readable += [entry for entry in sys.path if entry and Path(entry) != package.parent]
    readable += [*bounds.readable, str(package), bounds.folder]
    for root in readable:
        for path in _without(_real(root), hidden):
            yield path, READ
    yield Path(bounds.folder), READ_DIR
    devices = DEVICES
    if mounts.terminals:
        devices += TERMINALS
    for name in devices:
        yield Path("/dev", name), READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV
    for folder in bounds.writable:
        yield Path(folder), handled
    shared = READ | WRITE_FILE | TRUNCATE | REMOVE_FILE | MAKE_REG
    if mounts.shm:
        shared = handled
    yield Path("/dev/shm"), shared


def _without(root: Path, hidden: Path) -> list[Path]:
    """`root`, or the parts of it that do not lead to `hidden`. Both are free of symbolic links."""
    if not hidden.is_relative_to(root):
        return [root]
    found: list[Path] = []
    try:
        for entry in root.iterdir():
            real = _real(entry) if entry.is_symlink() else entry
            # A link is followed only if it leads neither into `hidden` nor above it.
            leads_above = real is not entry and hidden.is_relative_to(real)
            if not real.is_relative_to(hidden) and not leads_above:
                found += _without(real, hidden)
    except OSError:
        return []
    return found


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it does not exist
        return
    try:
        if not path.is_dir():
            rights &= OF_A_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        _checked(_libc.syscall(LANDLOCK_ADD_RULE, rules, PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


# -- seccomp: sockets ------------------------------------------------------------------------------

# The instructions of the filter, as in linux/bpf_common.h.
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
AT_LEAST = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
# Where the filter finds these in struct seccomp_data.
CALL_NUMBER = 0
ARCHITECTURE = 4
SECOND_ARGUMENT = 24
SOCKET_TYPES = 0xF
SOCK_STREAM = 1
SOCK_SEQPACKET = 5
FIRST_X32_CALL = 0x40000000
IO_URING_SETUP = 425
"""io_uring makes sockets past any filter."""


class _Calls(NamedTuple):
    """An architecture's number, and its numbers of system calls."""

    architecture: int
    socket: int
    socketpair: int
    keys: tuple[int, ...]
    """add_key, request_key, keyctl: the keys of the user's session."""
    shared: tuple[int, ...]
    """shm*, sem*, msg* of System V, and mq_*. Their memory is counted for nobody, outlives the
    processes that made it, and may belong to others.
    """


MACHINES = {
    "x86_64": _Calls(
        0xC000003E, 41, 53, (248, 249, 250), (29, 30, 31, *range(64, 72), 220, 240, 241)
    ),
    "aarch64": _Calls(0xC00000B7, 198, 199, (217, 218, 219), (180, 181, *range(186, 198))),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter_calls(*, allow_sockets: bool) -> str:
    """Why the network is not refused; "" if it is."""
    machine = platform.machine()
    if machine not in MACHINES:
        return f"the system calls of {machine} are not known here"
    calls = MACHINES[machine]
    # A step: instruction, steps to skip if true, steps to skip if false, operand.
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, calls.architecture),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (LOAD, 0, 0, CALL_NUMBER),
        (AT_LEAST, 0, 1, FIRST_X32_CALL),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
    ]
    refused = dict.fromkeys((IO_URING_SETUP, *calls.shared), errno.ENOSYS)
    refused |= dict.fromkeys(calls.keys, errno.EPERM)
    if not allow_sockets:
        refused[calls.socket] = errno.EACCES
    for number, error in refused.items():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | error)]
    if not allow_sockets:
        # A pair of stream or sequential-packet sockets stays connected to itself. Datagram sockets
        # can send to any address.
        steps += [
            (EQUAL, 0, 5, calls.socketpair),
            (LOAD, 0, 0, SECOND_ARGUMENT),
            (AND, 0, 0, SOCKET_TYPES),
            (EQUAL, 2, 0, SOCK_STREAM),
            (EQUAL, 1, 0, SOCK_SEQPACKET),
            (RETURN, 0, 0, REFUSE | errno.EACCES),
        ]
    steps += [(RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    try:
        _checked(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))
    except OSError as error:
        return f"seccomp was refused: {error}"
    return ""


# -- how a refusal looks from inside ---------------------------------------------------------------


def refusal(error: BaseException) -> tuple[str, str] | None:
    """(error code, explanation) if the sandbox caused an exception of environment code."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if found := _refusal(cause):
            return found
        cause = cause.__cause__ or cause.__context__
    return None


def _refusal(error: BaseException) -> tuple[str, str] | None:
    number = error.errno if isinstance(error, OSError) else None
    usual = Needs()
    if isinstance(error, NetworkRefusedError):
        return "environment_network", f"it has no network unless its {FILE} says network = true"
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        about = f"it may use the memory_gib of its {FILE} ({usual.memory_gib:g} if left out)"
        return "environment_memory", about
    if "can't start new thread" in str(error) or number == errno.EAGAIN:
        about = f"it may have the processes of its {FILE} ({usual.processes} if left out)"
        return "environment_processes", f"{about}, threads included"
    if number == errno.EFBIG:
        about = f"a file may have the file_gib of its {FILE} ({usual.file_gib:g} if left out)"
        return "environment_file_size", about
    is_refused = number in (errno.EACCES, errno.EPERM, errno.EROFS)
    if isinstance(error, OSError) and is_refused and error.filename:
        return "environment_access", (
            "it may read its own folder and installed programs, and write to its temporary folder "
            f"(tempfile); the server's variable {READABLE_VARIABLE} names more folders to read"
        )
    return None


def describe(found: dict[str, str]) -> str:
    """What `confine` returned, as one line of text."""
    working = ", ".join(name for name, why in found.items() if not why) or "none"
    line = f"sandbox of environment code protects: {working}"
    missing = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
    return f"{line}; not: {missing}" if missing else line


def main() -> None:
    assert threading.active_count() == 1
    folder, scratch = sys.argv[1:]
    sys.stdout.write(json.dumps(confine(Bounds(folder, scratch, hidden=folder))))


if __name__ == "__main__":
    main()
