"""The sandbox of environment code: limits on what its process may open, reach and use up. It needs
Linux, no helper program and no root.

    results = confine(bounds, own)    # in the child, before user code

`results` maps each protection to "" if it works on this machine, and else to why it does not.
docs/security.md says what each is made of and stops, and what none of them stops. An endpoint is
TCP in an empty network namespace, where only the code's own processes listen. Without that, as in a
container without CAP_SYS_ADMIN, Landlock lets it serve and reach one port of TCP (Linux 6.7).

In any case seccomp allows the calls of system_calls.py alone. A program that the code starts for
one rollout may get rules of its own within these (environments/agents/command.py).
"""

from __future__ import annotations

import os
import resource
import sys

from environments.sandbox.kernel import PR_SET_NO_NEW_PRIVS, keep_capabilities, libc, set_dumpable
from environments.sandbox.landlock import knows_ports, knows_truncation, restrict_files
from environments.sandbox.namespaces import Own, become
from environments.sandbox.needs import FILE, Bounds
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
