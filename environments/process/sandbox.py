"""The sandbox of environment code: limits on what its process may open, reach and use up. It needs
Linux, no helper program and no root.

    needs = Needs.of(folder)                # from environment.toml, if the folder has one
    found = confine(bounds, own, mounts)    # in the child, before user code
    python -m environments.process.probe FOLDER SCRATCH     # prints `found`, for the doctor

`found` maps each protection to "" if it works on this machine, and else to why it does not:

- files (Landlock): the code reads its folder and the system's libraries, and writes to a temporary
  folder. It gets terminals if the mount namespace has its own.
- attributes (a read-only mount namespace, or another user): it changes no file's mode or time
  outside that temporary folder.
- network (seccomp): it can make no socket except pairs of connected ones. With network, which
  environment.toml asks for and settings.toml grants, it makes IPv4 and IPv6 sockets too. Without,
  it also gets an empty network namespace, if it may have namespaces. With an endpoint it makes TCP
  sockets in that namespace, where only its own processes listen; without the namespace, none.
- process_tree (a PID namespace): all that it starts ends with it, and it finds no other process.
- proc: /proc shows its own processes only.
- signals (a PID namespace or Landlock): it signals and traces no process outside the sandbox.
- memory, file_size, processes (resource limits; root becomes another user first).
- kernel_memory (a cgroup): files in memory and socket buffers count as its memory.

In any case seccomp refuses changes of another process's limits, and without a PID namespace of its
priority and its processors too.

A program that the code starts for one rollout may get rules of its own within these
(environments/process/programs.py).

The sandbox does not limit CPU time, the number of files in the temporary folder, what one episode
learns of another in the same process, or, with network, servers that listen on this machine's own
addresses. Environment code shares a kernel with its host.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from environments.process.kernel import PR_SET_NO_NEW_PRIVS, checked, keep_capabilities, libc
from environments.process.namespaces import Mounts, Own, become
from environments.process.seccomp import filter_calls
from environments.settings import FILE as SETTINGS_FILE
from environments.settings import EnvironmentSettings, read_toml

FILE = "environment.toml"
OFFLINE = re.compile("on the Hub|offline mode is enabled")
"""What datasets and huggingface_hub say without network. Their own classes differ by version."""
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
    endpoint: bool = False
    """For an EnvironmentAgent: a loopback interface of its own, on which the model is served."""
    memory_gib: float = 8.0
    """For all its processes together."""
    processes: int = 512
    """Processes and threads, in addition to one thread for each running call."""
    file_gib: float = 4.0
    """The size of one file."""
    secrets: tuple[str, ...] = ()
    """Names of the server's variables that it needs. A caller has to pass each one."""

    @classmethod
    def of(cls, folder: Path) -> Needs:
        """Read the folder's environment.toml. ValueError explains a file that cannot be used."""
        return read_toml(cls, folder / FILE)

    def within(self, operator: EnvironmentSettings) -> Needs:
        """The same, with defaults lowered to the operator's limits. ValueError names a value that
        the file asks for and that is above them.
        """
        limits = {
            "memory_gib": operator.most_memory_gib,
            "processes": operator.processes,
            "file_gib": operator.file_gib,
        }
        requests = self.asked()
        for name, most in limits.items():
            if requests.get(name, 0) > most:
                what = (
                    f"{FILE}: {name} = {requests[name]:g} is more than the {most:g} of this machine"
                )
                raise ValueError(
                    f"{what}; the operator allows more with {name} under [environments] in "
                    f"{SETTINGS_FILE}"
                )
        lowered = {name: min(getattr(self, name), most) for name, most in limits.items()}
        return replace(self, **lowered)

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
    user: int | None = None
    """The user that the code becomes, if we are root and these folders are already that user's."""
    without_file_protection: bool = False
    """Run code also if `files` cannot be protected."""

    @property
    def writable(self) -> tuple[str, ...]:
        return self.written or (self.scratch,)

    @property
    def has_network(self) -> bool:
        return Needs(**self.needs).network

    @property
    def has_endpoint(self) -> bool:
        return Needs(**self.needs).endpoint

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
        what = (
            f"this environment has no network; network = true in its {FILE} asks for it, and the "
            f"operator grants it in {SETTINGS_FILE}"
        )
        super().__init__(errno.EACCES, what)


def confine(bounds: Bounds, own: Own, mounts: Mounts) -> dict[str, str]:
    """Confine this process for good: {protection: "" if it works, else why it does not}.

    The process must have a single thread. Raises nothing: a protection that cannot be had is left
    out and named."""
    needs = Needs(**bounds.needs)
    memory = bounds.memory_bytes + bounds.threads * STACK_BYTES
    results = {
        "memory": _limit(resource.RLIMIT_DATA, memory),
        "file_size": _limit(resource.RLIMIT_FSIZE, int(needs.file_gib * 2**30)),
        "processes": UNCOUNTED,
        "process_tree": own.process_tree,
        "proc": mounts.proc,
        "attributes": mounts.attributes,
    }
    if not sys.platform.startswith("linux"):
        why = f"{sys.platform} has no Landlock and no seccomp"
        return results | dict.fromkeys(("files", "signals", "network"), why)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        become(own)
    except OSError:  # root of a container that has no such user
        keep_capabilities()
    is_counted = own.is_mapped or (os.getuid() != 0 and own.uid is not None)
    if is_counted:
        results["processes"] = _limit(resource.RLIMIT_NPROC, needs.processes + bounds.threads)
    results["files"], results["signals"] = _restrict_files(bounds, mounts)
    if own.has_processes:
        results["signals"] = ""
    results["network"] = filter_calls(
        allow_sockets=needs.network,
        allow_tcp=own.loopback,
        has_processes=own.has_processes,
    )
    if needs.network and not results["network"]:
        results["network"] = f"open: {FILE} asks for it and {SETTINGS_FILE} grants it"
    return results


def explain_refusals(bounds: Bounds) -> None:
    """Make this interpreter explain a refused network where the kernel would only refuse it. The
    client of the Hugging Face hub would try again for half a minute.
    """
    if not bounds.has_network:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if bounds.has_endpoint and not bounds.has_network:
        sys.addaudithook(_explain_refusal_of_others)
    elif not bounds.has_network:
        sys.addaudithook(_explain_refusal)


def _explain_refusal_of_others(event: str, args: tuple[Any, ...]) -> None:
    """The same for code that may reach its own loopback interface."""
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = cast("tuple[Any, ...]", args[1])[0]
    else:
        return
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "localhost")
    if name != "localhost" and not name.startswith("127."):
        raise NetworkRefusedError


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
SHARED_MEMORY = Path("/dev/shm")
ANSWERS = "datasets"
"""The folder of an environment that programs of its agents cannot read."""


def _restrict_files(bounds: Bounds, mounts: Mounts) -> tuple[str, str]:
    """Why files and signals are not protected; "" for each that is."""
    version = landlock_version()
    if version < 1:
        why = f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
        return why, why
    try:
        rules = _ruleset(version, partial(_rules, bounds, mounts))
        checked(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
        os.close(rules)
    except OSError as error:
        return str(error), str(error)
    if version >= 6:
        return "", ""
    return "", f"this kernel has Landlock {version}, which leaves signals alone; 6 does not"


def program_rules(bounds: Bounds, folder: Path, unseen: Path) -> int:
    """The descriptor of Landlock rules for a program that the code starts: it may do what the code
    may, but in the scratch folder it writes to `folder` alone, and opens nothing else of `unseen`
    and nothing of ANSWERS. The rules also keep it from all processes but those that it starts.
    OSError if this kernel has no Landlock.
    """
    # The code's own rules hold too, so these hide nothing else.
    inner = replace(bounds, hidden=os.devnull, written=(str(folder),))
    answers = _real(Path(bounds.folder, ANSWERS))

    def rules(handled: int) -> Iterator[tuple[Path, int]]:
        for path, rights in _rules(inner, Mounts(terminals=True), handled):
            if path == SHARED_MEMORY:
                rights &= ~READ_DIR  # without the names in there it finds nothing of others
            parts = [path]
            if rights & READ_FILE and answers.is_relative_to(path):
                # A folder that may not be listed is left whole.
                parts = _without(path, answers) or parts
            for part in parts:
                yield part, rights
        for entry in Path(bounds.scratch).iterdir():
            if entry != unseen:
                yield entry, READ

    return _ruleset(checked(landlock_version()), rules)


def landlock_version() -> int:
    return libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION_FLAG)


def _ruleset(version: int, rules: Callable[[int], Iterable[tuple[Path, int]]]) -> int:
    """The descriptor of a set of rules: `rules` gets all rights that are handled, and says which
    paths have which of them.
    """
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
    result = checked(libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    try:
        for path, rights in rules(handled):
            _allow(result, path, rights & handled)
    except BaseException:
        os.close(result)
        raise
    return result


def _rules(bounds: Bounds, mounts: Mounts, handled: int) -> Iterator[tuple[Path, int]]:
    """The paths that it may use, each with its rights."""
    package = Path(__file__).parents[1]
    hidden = _real(bounds.hidden)
    # Python looks for the package there. There may be more in it than packages.
    if not hidden.is_relative_to(_real(package.parent)):
        yield package.parent, READ_DIR
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
    yield SHARED_MEMORY, shared


def _without(root: Path, hidden: Path) -> list[Path]:
    """`root`, or the parts of it that do not lead to `hidden`. Both are free of symbolic links."""
    if not hidden.is_relative_to(root):
        return [root]
    paths: list[Path] = []
    try:
        for entry in root.iterdir():
            real = _real(entry) if entry.is_symlink() else entry
            # A link is followed only if it leads neither into `hidden` nor above it.
            leads_above = real is not entry and hidden.is_relative_to(real)
            if not real.is_relative_to(hidden) and not leads_above:
                paths += _without(real, hidden)
    except OSError:
        return []
    return paths


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
        checked(libc.syscall(LANDLOCK_ADD_RULE, rules, PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


# -- how a refusal looks from inside ---------------------------------------------------------------


def refusal(error: BaseException) -> tuple[str, str] | None:
    """(error code, explanation) if the sandbox caused an exception of environment code."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if result := _refusal(cause):
            return result
        cause = cause.__cause__ or cause.__context__
    return None


def _refusal(error: BaseException) -> tuple[str, str] | None:
    number = error.errno if isinstance(error, OSError) else None
    usual = Needs()
    is_offline = isinstance(error, OSError) and OFFLINE.search(str(error))
    if is_offline or isinstance(error, NetworkRefusedError):
        about = f"it has no network unless its {FILE} says network = true"
        return "environment_network", f"{about} and the operator's {SETTINGS_FILE} grants it"
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


def describe(results: dict[str, str]) -> str:
    """What `confine` returned, as one line of text."""
    working = ", ".join(name for name, why in results.items() if not why) or "none"
    line = f"sandbox of environment code protects: {working}"
    missing = "; ".join(f"{name}: {why}" for name, why in results.items() if why)
    return f"{line}; not: {missing}" if missing else line
