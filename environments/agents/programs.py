"""Programs that environment code starts for one rollout, each kept from those of the others.

    async with room() as folder:
        process = await start(command, folder, os.environ, file_that_it_prints_to, files)

All programs of an environment run as one user. A program gets Landlock rules of its own, within
the sandbox of the environment: it opens its own folder, the files that its command names and
`files`, and nothing else of the environment's or of other rollouts'. It can neither trace nor
signal a process that it did not start. Where /proc is the sandbox's own, it does not see them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from environments.sandbox import scratch
from environments.sandbox.landlock import LANDLOCK_RESTRICT_SELF, landlock_version, program_rules
from environments.sandbox.needs import Bounds

LAUNCH = f"""
import ctypes, os, signal, sys
rules = int(sys.argv[1])
try:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall({LANDLOCK_RESTRICT_SELF}, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock refused the rules of this program")
    os.close(rules)
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(error, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # no exit code of the program's
"""
bounds: Bounds | None = None
"""Those of the sandbox that this process is in."""


@asynccontextmanager
async def room() -> AsyncGenerator[Path]:
    """A folder for one program: it has `work`, `home` and `tmp`. Removed afterwards."""
    folder = _made_room()
    try:
        yield folder
    finally:
        await asyncio.to_thread(scratch.remove, folder)


def _made_room() -> Path:
    rooms = Path(tempfile.gettempdir(), "programs")
    rooms.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=rooms))
    for name in ("work", "home", "tmp"):
        (folder / name).mkdir()
    return folder


def _opened(command: Sequence[str], files: Sequence[str], environment: str) -> list[str]:
    """The files that a command names, and those that its environment declares for it."""
    named: list[str] = []
    for path in map(Path, command):
        with suppress(OSError):  # an argument may be a text that is too long for a path
            if path.is_absolute() and path.is_file():
                named.append(str(path))
    return [*named, *(str(Path(environment, name)) for name in files)]


async def start(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    printed: IO[bytes],
    files: Sequence[str] = (),
) -> Process:
    """Start the program that has this room, in `work`, as the first process of a group. OSError if
    there is no such program; it is killed if it cannot be run or cannot be kept apart.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r:.200}")
    rules: tuple[int, ...] = ()
    # Without Landlock the operator has let code run unprotected.
    if bounds is not None and landlock_version() >= 1:
        rules = (program_rules(bounds, folder, _opened(command, files, bounds.folder)),)
        command = [sys.executable, "-I", "-S", "-c", LAUNCH, str(*rules), *command]
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=folder / "work", env=env, stdin=DEVNULL, stdout=printed, stderr=STDOUT,
            pass_fds=rules, start_new_session=True,
        )  # fmt: skip
    finally:
        for descriptor in rules:
            os.close(descriptor)
