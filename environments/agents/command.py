"""An agent that is a program of its own: started once for each rollout, it asks the model and ends.

class Solver(EnvironmentCommand):
    def command(self, example):
        return ["python", str(Path(__file__).with_name("solve.py")), example.input]

    def reward(self, example, ended):
        return RewardResult(float(ended.output.strip() == example.output))
"""

# `run` is a coroutine here, as any method of an environment may be.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from abc import abstractmethod
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from environments.base import EnvironmentAgent, RewardResult, TaskExample
from environments.sandbox import needs, scratch
from environments.sandbox.kernel import signal_name
from environments.sandbox.landlock import landlock_version, program_rules
from environments.sandbox.seccomp import allowed_calls

REWARD_FILE = "FLASH_REWARD_FILE"
REWARD_NAME = "reward.json"
SHOWN_CHARACTERS = 2000
MAX_OUTPUT_BYTES = 8 << 20  # of what a program printed, its `reward` gets the end


@dataclass(frozen=True)
class EndedCommand:
    """A program that has ended: its exit code, what it printed, and the folder that it ran in."""

    code: int
    output: str
    folder: Path


class EnvironmentCommand(EnvironmentAgent):
    """An EnvironmentAgent whose agent is a command line: implement `command`.

    The program runs in an empty folder. It finds the model in the variables that the packages of
    OpenAI and Anthropic read (OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
    ANTHROPIC_API_KEY), and its name in MODEL, OPENAI_MODEL and ANTHROPIC_MODEL. Of the environment
    it reads the files that its command names, and `files`. It has a quarter of the environment's
    processes and threads, and all that it started ends with its rollout."""

    @abstractmethod
    def command(self, example: TaskExample) -> Sequence[str]:
        """The program and its arguments."""

    def files(self, example: TaskExample) -> Sequence[str]:
        """Further files and folders that the program reads, as paths from the environment's folder
        or absolute ones. Python imports modules only from a folder that is named as a whole.
        """
        return ()

    def variables(self, example: TaskExample) -> dict[str, str]:
        """Further environment variables of the program."""
        return {}

    def reward(self, example: TaskExample, ended: EndedCommand) -> RewardResult:
        """The reward. By default the program's own: it writes {"score": NUMBER} and the other
        fields of RewardResult, as JSON, to the file that $FLASH_REWARD_FILE names.
        """
        file = ended.folder / REWARD_NAME
        if not file.is_file():
            printed = ended.output[-SHOWN_CHARACTERS:]
            what = f"the command wrote no reward and ended with code {ended.code}"
            raise RuntimeError(f"{what}. It printed: {printed}")
        return RewardResult(**json.loads(file.read_text()))

    async def run(
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        async with room() as place:
            ended = await self._ended(example, place, model_variables(base_url, api_key, model))
            return await asyncio.to_thread(self.reward, example, ended)

    async def _ended(
        self, example: TaskExample, place: Path, model_variables: dict[str, str]
    ) -> EndedCommand:
        folder = place / "work"
        arguments = {
            "HOME": str(place / "home"),
            "TMPDIR": str(place / "tmp"),
            REWARD_FILE: str(folder / REWARD_NAME),
            **model_variables,
            **self.variables(example),
        }
        env = {**os.environ, **arguments}
        code, output = await run_program(self.command(example), place, env, self.files(example))
        if code < 0:
            what = f"the command was killed by {signal_name(-code)}"
            raise RuntimeError(f"{what}. It printed: {output[-SHOWN_CHARACTERS:]}")
        return EndedCommand(code, output, folder)


def model_variables(base_url: str, api_key: str, model: str) -> dict[str, str]:
    """The environment variables in which a program finds the model."""
    results = {"MODEL": model}
    for firm in ("OPENAI", "ANTHROPIC"):
        # LlamaIndex, CAMEL and others have names of their own for what the firms' packages read.
        for variable in ("BASE_URL", "API_BASE", "API_BASE_URL"):
            results[f"{firm}_{variable}"] = base_url
        results[f"{firm}_API_KEY"] = api_key
        results[f"{firm}_MODEL"] = model
    return results


# -- programs that environment code starts for one rollout, each kept from those of the others -----
#     async with room() as folder:
#         process = await start(command, folder, os.environ, file_that_it_prints_to, files)
#
# All programs of an environment run as one user. A program gets Landlock rules of its own, within
# the sandbox of the environment: it opens its own folder, the files that its command names and
# `files`, and nothing else of the environment's or of other rollouts'. It can neither trace nor
# signal a process that it did not start. Where /proc is the sandbox's own, it does not see them. It
# has a part of the environment's processes, and all that it starts ends with its rollout.

LAUNCHER = Path(__file__).with_name("launcher.py")
BEGINNING = ("clone", "fork", "vfork")  # the system calls with which processes and threads begin
SHARE = 4  # A program has at most 1/SHARE of its environment's processes and threads
FEWEST = 32


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
    bounds = needs.own
    if bounds is not None and sys.platform.startswith("linux"):
        # Without Landlock the operator has let code run unprotected.
        if landlock_version() >= 1:
            rules = [program_rules(bounds, folder, _opened(command, files, bounds.folder))]
        numbers = allowed_calls()[1]
        calls = ",".join(str(numbers[name]) for name in BEGINNING if name in numbers)
        most = max(FEWEST, bounds.needs.processes // SHARE)
        opened = rules[0] if rules else -1
        launcher = (sys.executable, "-I", "-S", str(LAUNCHER), str(opened), str(most))
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


async def run_program(
    command: Sequence[str], folder: Path, env: Mapping[str, str], files: Sequence[str] = ()
) -> tuple[int, str]:
    """`start` a program, and `end` it once it has ended or nobody waits any more. Its exit code,
    and the end of what it printed.
    """
    # A file, as a program in the background may hold a pipe open.
    with tempfile.TemporaryFile() as printed:
        process = await start(list(command), folder, env, printed, files)
        try:
            code = await process.wait()
        finally:
            await end(process)
        size = printed.seek(0, os.SEEK_END)
        printed.seek(max(0, size - MAX_OUTPUT_BYTES))
        return code, printed.read().decode(errors="replace")


async def end(process: Process) -> None:
    """End a program that `start` returned, with all that it has started."""
    if process.stdin:
        process.stdin.close()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
