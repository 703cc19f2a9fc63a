"""The sandbox of environment code: limits on what its process may open, reach and use up. It needs
Linux, no helper program and no root.

    results = confine(bounds, own)    # in the child, before user code

`results` maps each protection to "" if it works on this machine, and else to why it does not.
docs/security.md says what each is made of and stops, and what none of them stops. An endpoint is
TCP in an empty network namespace, where only the code's own processes listen. Without that, as in a
container without CAP_SYS_ADMIN, Landlock lets it serve and reach one port of TCP (Linux 6.7).

In any case seccomp allows the calls of seccomp.py alone. A program that the code starts for
one rollout may get rules of its own within these (environments/agents/command.py).
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

from environments.sandbox.kernel import PR_SET_NO_NEW_PRIVS, keep_capabilities, libc, set_dumpable
from environments.sandbox.landlock import knows_ports, knows_truncation, restrict_files
from environments.sandbox.namespaces import OLD, Own, become
from environments.sandbox.needs import FILE, READABLE_VARIABLE, Bounds, Needs
from environments.sandbox.seccomp import filter_calls
from environments.settings import FILE as SETTINGS_FILE

UNCOUNTED = (
    "neither another user nor a user namespace can be had, and without one all processes of the "
    "user count"
)
STACK_BYTES = 8 << 20
"""The stack of one thread. The kernel counts all of it as soon as the thread starts."""


def confine(bounds: Bounds, own: Own) -> dict[str, str]:
    """Confine this process for good: {protection: "" if it works, else why it does not}.

    The process must have a single thread. Raises nothing: a protection that cannot be had is left
    out and named."""
    needs = bounds.needs
    memory = bounds.memory_bytes + bounds.threads * STACK_BYTES
    results = {
        "memory": _limit(resource.RLIMIT_DATA, memory),
        "file_size": _limit(resource.RLIMIT_FSIZE, int(needs.file_gib * 2**30)),
        "processes": UNCOUNTED,
        "process_tree": own.process_tree,
        "proc": own.proc,
        "attributes": own.attributes,
    }
    if not sys.platform.startswith("linux"):
        why = f"{sys.platform} has no Landlock and no seccomp"
        return results | dict.fromkeys(("files", "signals", "network"), why)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        become(own)
    except OSError:  # root of a container that has no such user
        keep_capabilities()
    set_dumpable(True)  # else root would own its /proc/self
    is_counted = own.is_mapped or (os.getuid() != 0 and own.uid is not None)
    if is_counted:
        results["processes"] = _limit(resource.RLIMIT_NPROC, needs.processes + bounds.threads)
    # Where there is no network namespace with loopback, Landlock opens one port.
    port = 0
    if needs.endpoint and not (own.loopback or needs.network) and knows_ports():
        port = bounds.port
    results["files"], results["signals"] = restrict_files(bounds, own, port)
    has_port = bool(port) and not results["files"]
    if own.has_processes:
        results["signals"] = ""
    results["network"] = filter_calls(
        allow_sockets=needs.network,
        allow_tcp=own.loopback or has_port,
        has_processes=own.has_processes,
        allow_truncate=own.has_root or knows_truncation(),
    )
    if needs.network and not results["network"]:
        results["network"] = f"open: {FILE} asks for it and {SETTINGS_FILE} grants it"
    return results


def _limit(kind: int, most: int) -> str:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def describe(results: dict[str, str]) -> str:
    """What `confine` returned, as one line of text."""
    working = ", ".join(name for name, why in results.items() if not why) or "none"
    line = f"sandbox of environment code protects: {working}"
    missing = "; ".join(f"{name}: {why}" for name, why in results.items() if why)
    return f"{line}; not: {missing}" if missing else line


# How a refusal of the sandbox looks to environment code, and what the caller is told about it

OFFLINE = re.compile("on the Hub|offline mode is enabled")
"""What datasets and huggingface_hub say without network. Their own classes differ by version."""


class NetworkRefusedError(PermissionError):
    """Environment code used the network, but its environment.toml does not ask for it."""

    def __init__(self) -> None:
        what = (
            f"this environment has no network; network = true in its {FILE} asks for it, and the "
            f"operator grants it in {SETTINGS_FILE}"
        )
        super().__init__(errno.EACCES, what)


def explain_refusals(bounds: Bounds) -> None:
    """Make this interpreter explain a refused network where the kernel would only refuse it. The
    client of the Hugging Face hub would try again for half a minute.
    """
    if not bounds.needs.network:
        os.environ["HF_HUB_OFFLINE"] = "1"
        sys.addaudithook(partial(_explain_refusal, bounds.needs.endpoint))


def _explain_refusal(has_loopback: bool, event: str, args: tuple[Any, ...]) -> None:
    """An audit hook. It only explains; seccomp is what refuses."""
    host: Any = ""
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = cast("tuple[Any, ...]", args[1])[0]
    elif event != "socket.__new__" or args[1] not in (2, 10):
        return
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "localhost")
    if not (has_loopback and (name == "localhost" or name.startswith("127."))):
        raise NetworkRefusedError


def message_of(error: BaseException) -> str:
    """The message of an exception, whose own code may fail to write it."""
    try:
        return str(error) or "no message"
    except Exception:
        return "its message could not be shown"


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
    is_offline = isinstance(error, OSError) and OFFLINE.search(message_of(error))
    if is_offline or isinstance(error, NetworkRefusedError):
        about = f"it has no network unless its {FILE} says network = true"
        return "environment_network", f"{about} and the operator's {SETTINGS_FILE} grants it"
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        about = f"it may use the memory_gib of its {FILE} ({usual.memory_gib:g} if left out)"
        return "environment_memory", about
    if "can't start new thread" in message_of(error) or number == errno.EAGAIN:
        about = f"it may have the processes of its {FILE} ({usual.processes} if left out)"
        return "environment_processes", f"{about}, threads included"
    if number == errno.EFBIG:
        about = f"a file may have the file_gib of its {FILE} ({usual.file_gib:g} if left out)"
        return "environment_file_size", about
    is_refused = number in (errno.EACCES, errno.EPERM, errno.EROFS)
    if isinstance(error, OSError) and error.filename and (is_refused or _is_left_out(error)):
        return "environment_access", (
            "it may read its own folder and installed programs, and write to its temporary folder "
            f"(tempfile); the server's variable {READABLE_VARIABLE} names more folders to read"
        )
    return None


def _is_left_out(error: OSError) -> bool:
    """Whether a file is missing where the sandbox's own root leaves out what the machine has."""
    if error.errno != errno.ENOENT or not Path(OLD).exists():
        return False
    path = Path(os.path.realpath(os.fsdecode(error.filename)))
    folder = next(parent for parent in path.parents if parent.exists())
    return folder.stat().st_dev == Path("/").stat().st_dev
