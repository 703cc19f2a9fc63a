"""Landlock: the files that environment code opens and the processes that it signals.

Landlock needs no privileges, and its rules hold for all that a process starts. A program that the
code starts for one rollout may get rules of its own within these (environments/agents/command.py).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from environments.sandbox.kernel import checked, libc
from environments.sandbox.namespaces import DEVICES, SHARED_MEMORY, Own
from environments.sandbox.needs import Bounds

LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
VERSION_FLAG = 1
PATH_BENEATH = 1
NET_PORT = 2
BIND_TCP = 1
CONNECT_TCP = 2
PORTS_SINCE = 4  # the version of Landlock that knows rules for ports (Linux 6.7)
TRUNCATE_SINCE = 3  # the version of Landlock that says which files may be emptied (Linux 6.2)
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
ALL = (1 << 16) - 1
OF_SHARED_MEMORY = READ | WRITE_FILE | TRUNCATE | REMOVE_FILE | MAKE_REG
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
SCOPE_ABSTRACT_SOCKETS = 1
SCOPE_SIGNALS = 2
SETTINGS = """
alternatives ca-certificates ca-certificates.conf debian_version fonts gai.conf group host.conf
hosts ld.so.cache ld.so.conf ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release
passwd pki/tls/certs pki/ca-trust protocols resolv.conf services ssl/certs ssl/openssl.cnf timezone
""".split()  # noqa: SIM905
"""What programs look up in /etc. The rest of it may be secret."""
TERMINALS = ("tty", "ptmx", "pts")
PACKAGE = Path(__file__).parents[1]
Right = tuple[str | Path, int]  # A path, and what may be done there


def knows_ports() -> bool:
    return landlock_version() >= PORTS_SINCE


def knows_truncation() -> bool:
    return landlock_version() >= TRUNCATE_SINCE


def restrict_files(bounds: Bounds, own: Own, port: int) -> tuple[str, str]:
    """Why files and signals are not protected, or "". With a `port`, TCP is limited to it."""
    version = landlock_version()
    if version < 1:
        why = f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
        return why, why
    if own.has_root:
        rights = [("/", READ), *_written(bounds, *TERMINALS), (SHARED_MEMORY, ALL)]
    else:
        rights = [*_package(bounds), *_written(bounds), (SHARED_MEMORY, OF_SHARED_MEMORY)]
        rights += [(bounds.folder, READ_DIR), *((path, READ) for path in readable(bounds))]
    try:
        rules = _ruleset(version, rights, port=port)
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
    # Without the names in shared memory it finds nothing of others.
    rights = [(SHARED_MEMORY, OF_SHARED_MEMORY & ~READ_DIR), *_package(bounds)]
    rights += _written(replace(bounds, written=(str(folder),)), *TERMINALS)
    rights += [(path, READ) for path in files]
    own = _real(bounds.folder), _real(bounds.scratch)
    for path in without(without(_installed(bounds), own[0]), own[1]):
        if not any(_real(path).is_relative_to(place) for place in own):
            rights.append((path, READ))
    return _ruleset(checked(landlock_version()), rights)


def landlock_version() -> int:
    return libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION_FLAG)


def _ruleset(version: int, rights: Iterable[Right], *, port: int = 0) -> int:
    """The descriptor of rules for paths. With a `port`, TCP reaches and serves no other one."""
    # A kernel accepts only the rights that it knows. It does not restrict the others.
    handled = ALL_OF_VERSION_1
    for right, since in ((REFER, 2), (TRUNCATE, TRUNCATE_SINCE), (IOCTL_DEV, 5)):
        if version >= since:
            handled |= right
    scoped = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS if version >= 6 else 0
    ports = BIND_TCP | CONNECT_TCP if port else 0
    # A kernel that does not know the later fields wants zeros there.
    attributes = struct.pack("QQQ", handled, ports, scoped)
    size = ctypes.c_size_t(len(attributes))
    result = checked(libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0))
    try:
        for path, right in rights:
            _allow(result, path, right & handled)
        if port:
            rule = struct.pack("=QQ", ports, port)
            checked(libc.syscall(LANDLOCK_ADD_RULE, result, NET_PORT, rule, 0))
    except BaseException:
        os.close(result)
        raise
    return result


def _written(bounds: Bounds, *terminals: str) -> Iterator[Right]:
    for name in (*DEVICES, *terminals):
        yield f"/dev/{name}", READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV
    for folder in bounds.writable:
        yield folder, ALL


def _package(bounds: Bounds) -> list[Right]:
    """The folder where Python looks for this package. There may be more in it than packages."""
    if _real(bounds.hidden).is_relative_to(_real(PACKAGE.parent)):
        return []
    return [(PACKAGE.parent, READ_DIR)]


def readable(bounds: Bounds) -> list[Path]:
    """What the code reads: nothing of it leads to what is hidden."""
    # A push leaves `.env` out, so code that reads it must fail before. Links could lead out of the
    # folder, and no push takes them.
    folder = Path(bounds.folder)
    own = [folder]
    if os.access(folder / ".env", os.F_OK):
        own = [path for path in folder.iterdir() if path.name != ".env" and not path.is_symlink()]
    return [*_installed(bounds), *without([*bounds.readable, *own], bounds.hidden)]


def _installed(bounds: Bounds) -> list[Path]:
    folder = str(Path(sys.executable).resolve().parent)
    installed = [sys.executable, folder, sys.prefix, sys.base_prefix, sys.exec_prefix]
    installed += [entry for entry in sys.path if entry and Path(entry) != PACKAGE.parent]
    installed += [*bounds.system, *(f"/etc/{name}" for name in SETTINGS), str(PACKAGE)]
    return without(installed, bounds.hidden)


def without(roots: Iterable[str | Path], hidden: str | Path) -> list[Path]:
    """These paths, or the parts of them that do not lead to `hidden`."""
    real = _real(hidden)
    return [part for root in roots for part in _without(Path(root), real)]


def _without(root: Path, hidden: Path) -> list[Path]:
    if not hidden.is_relative_to(_real(root)):
        return [root]
    paths: list[Path] = []
    try:
        for entry in root.iterdir():
            real = _real(entry)
            # A link is followed only if it leads neither into `hidden` nor above it.
            leads_above = entry.is_symlink() and hidden.is_relative_to(real)
            if not real.is_relative_to(hidden) and not leads_above:
                paths += _without(entry, hidden)
    except OSError:
        return []
    return paths


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _allow(rules: int, path: str | Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it does not exist
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= OF_A_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        checked(libc.syscall(LANDLOCK_ADD_RULE, rules, PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)
