"""Programs that environment code starts for one rollout, each kept from those of the others.

    async with room() as folder:
        process = await start(command, folder, os.environ, file_that_it_prints_to, files)

All programs of an environment run as one user. A program gets Landlock rules of its own, within
the sandbox of the environment: it opens its own folder, the files that its command names and
`files`, and nothing else of the environment's or of other rollouts'. It can neither trace nor
signal a process that it did not start. Where /proc is the sandbox's own, it does not see them. It
has a part of the environment's processes, and all that it starts ends with its rollout."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from environments.sandbox import scratch
from environments.sandbox.landlock import landlock_version, program_rules
from environments.sandbox.needs import Bounds
from environments.sandbox.seccomp import allowed_calls

LAUNCHER = Path(__file__).with_name("launcher.py")
BEGINNING = ("clone", "fork", "vfork")
"""The system calls with which processes and threads begin."""
SHARE = 4
"""A program has at most 1/SHARE of its environment's processes and threads."""
FEWEST = 32
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
    """Start the program that has this room, in `work`, by launcher.py; `end` has to be awaited.
    OSError if there is no such program; it is killed if it cannot be run or cannot be kept apart.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r:.200}")
    rules: list[int] = []
    stdin = DEVNULL
    if bounds is not None and sys.platform.startswith("linux"):
        # Without Landlock the operator has let code run unprotected.
        if landlock_version() >= 1:
            rules = [program_rules(bounds, folder, _opened(command, files, bounds.folder))]
        known = allowed_calls()[1]
        calls = ",".join(str(known[name]) for name in BEGINNING if name in known)
        most = max(FEWEST, bounds.needs.processes // SHARE)
        launcher = (sys.executable, "-I", "-S", str(LAUNCHER), str((*rules, -1)[0]), str(most))
        command, stdin = (*launcher, calls, *command), PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=folder / "work", env=env, stdin=stdin, stdout=printed, stderr=STDOUT,
            pass_fds=rules, start_new_session=True,
        )  # fmt: skip
    finally:
        for descriptor in rules:
            os.close(descriptor)


async def end(process: Process) -> None:
    """End a program that `start` returned, with all that it has started."""
    if process.stdin:
        process.stdin.close()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
