"""Landlock: the files that environment code opens and the processes that it signals.

Landlock needs no privileges, and its rules hold for all that a process starts. A program that the
code starts for one rollout may get rules of its own within these (environments/agents/programs.py).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from environments.sandbox.kernel import checked, libc
from environments.sandbox.namespaces import Mounts
from environments.sandbox.needs import Bounds

LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
VERSION_FLAG = 1
PATH_BENEATH = 1
NET_PORT = 2
BIND_TCP = 1
CONNECT_TCP = 2
PORTS_SINCE = 4
"""The version of Landlock that knows rules for ports (Linux 6.7)."""
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
SETTINGS = """
alternatives ca-certificates ca-certificates.conf debian_version fonts gai.conf group host.conf
hosts ld.so.cache ld.so.conf ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release
passwd pki/tls/certs pki/ca-trust protocols resolv.conf services ssl/certs ssl/openssl.cnf timezone
""".split()  # noqa: SIM905
"""What programs look up in /etc. The rest of it may be secret."""
DEVICES = ("null", "zero", "full", "random", "urandom")
TERMINALS = ("tty", "ptmx", "pts")
SHARED_MEMORY = Path("/dev/shm")
PACKAGE = Path(__file__).parents[1]


def knows_ports() -> bool:
    return landlock_version() >= PORTS_SINCE


def restrict_files(bounds: Bounds, mounts: Mounts, port: int) -> tuple[str, str]:
    """Why files and signals are not protected; "" for each that is. With a `port`, TCP is limited
    to it.
    """
    version = landlock_version()
    if version < 1:
        why = f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
        return why, why
    try:
        rules = _ruleset(version, partial(_rules, bounds, mounts), port=port)
        checked(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
        os.close(rules)
    except OSError as error:
        return str(error), str(error)
    if version >= 6:
        return "", ""
    return "", f"this kernel has Landlock {version}, which leaves signals alone; 6 does not"


def program_rules(bounds: Bounds, folder: Path, files: Sequence[str]) -> int:
    """The descriptor of Landlock rules for a program that the code starts: it may run what is
    installed and write to `folder`. Of the environment's folder, of the scratch folder and of what
    the operator opens to the code it reads only `files`. The rules also keep it from all processes
    but those that it starts. OSError if this kernel has no Landlock.
    """
    inner = replace(bounds, folder=str(folder), written=(str(folder),), readable=tuple(files))
    opened = {_real(folder), *map(_real, files)}
    closed = (_real(bounds.folder), _real(bounds.scratch))

    def rules(handled: int) -> Iterator[tuple[Path, int]]:
        for path, rights in _rules(inner, Mounts(terminals=True), handled):
            if path == SHARED_MEMORY:
                rights &= ~READ_DIR  # without the names in there it finds nothing of others
            parts = [path]
            if _real(path) not in opened:
                parts = _outside(path, closed)
            for part in parts:
                yield part, rights

    return _ruleset(checked(landlock_version()), rules)


def landlock_version() -> int:
    return libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION_FLAG)


def _ruleset(
    version: int, rules: Callable[[int], Iterable[tuple[Path, int]]], *, port: int = 0
) -> int:
    """The descriptor of a set of rules: `rules` gets all rights that are handled, and says which
    paths have which of them. With a `port`, TCP reaches and serves no other one.
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
    ports = BIND_TCP | CONNECT_TCP if port else 0
    attributes = struct.pack("QQQ", handled, ports, scoped)
    result = checked(libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    try:
        for path, rights in rules(handled):
            _allow(result, path, rights & handled)
        if port:
            rule = struct.pack("=QQ", ports, port)
            checked(libc.syscall(LANDLOCK_ADD_RULE, result, NET_PORT, rule, 0))
    except BaseException:
        os.close(result)
        raise
    return result


def _rules(bounds: Bounds, mounts: Mounts, handled: int) -> Iterator[tuple[Path, int]]:
    """The paths that it may use, each with its rights."""
    hidden = _real(bounds.hidden)
    # Python looks for the package there. There may be more in it than packages.
    if not hidden.is_relative_to(_real(PACKAGE.parent)):
        yield PACKAGE.parent, READ_DIR
    system = [*bounds.system, *(f"/etc/{name}" for name in SETTINGS)]
    for root in (*system, *read_by(bounds)):
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


def read_by(bounds: Bounds) -> list[str]:
    """What the code reads beside the system's folders. What is hidden may lie within it."""
    executable = Path(sys.executable).resolve().parent
    readable = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(executable)]
    readable += [entry for entry in sys.path if entry and Path(entry) != PACKAGE.parent]
    return [*readable, *bounds.readable, str(PACKAGE), bounds.folder]


def installed(bounds: Bounds) -> tuple[str, ...]:
    """The folders of installed programs, or their parts that do not lead to what is hidden. Within
    the sandbox a folder that holds it cannot be listed.
    """
    hidden = _real(bounds.hidden)
    return tuple(str(part) for root in bounds.system for part in _without(_real(root), hidden))


def _outside(path: Path, places: tuple[Path, ...]) -> list[Path]:
    """The parts of `path` that lie in none of these places."""
    parts = [path]
    for place in places:
        outer = [part for part in parts if not part.is_relative_to(place)]
        parts = [part for root in outer for part in _without(root, place)]
    return parts


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
