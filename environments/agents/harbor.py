"""Tasks in Harbor's form (https://www.harborframework.com/docs/tasks): a folder for each, with
task.toml, instruction.md, environment/, tests/test.sh, which writes the reward, and for some
solution/solve.sh.

    def load_environment():
        return harbor.load(Path(__file__).with_name("tasks"))

A task whose image is a plain Python runs in our sandbox, each episode in a folder of its own: the
folders of ROOTS, such as /app, are there, and their names in commands, scripts and texts of the
task lead to them. Any other image needs a container: docs/terminal.md."""

# `run` is a coroutine here, as any method of an environment may be.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.adapters import HELD_OUT_EVERY
from environments.agents import terminal
from environments.agents.command import (
    REWARD_FILE,
    SHOWN_CHARACTERS,
    EnvironmentCommand,
    model_variables,
    room,
    run_program,
)
from environments.agents.terminal import ROOTS, TURNS, inward
from environments.base import (
    ChatMessage,
    DatasetError,
    EnvironmentSingleTurn,
    RewardResult,
    TaskExample,
    UnsupportedError,
)
from environments.sandbox import scratch
from environments.settings import read_small

PYTHON = re.compile(r"(docker\.io/)?(library/)?python(:[\w.-]+)?")
GATEWAY = "play it in a container by `flash-mcp gateway` (docs/terminal.md)"
FIELDS: Mapping[str, set[str]] = {
    "verifier": {"timeout_sec", "env"},
    "agent": {"timeout_sec"},
    "environment": {
        "docker_image", "build_timeout_sec", "cpus", "memory", "memory_mb", "storage", "storage_mb",
        "allow_internet", "workdir",
    },
}  # fmt: skip
"""What may stand in the tables of task.toml. Bounds of cores, memory and disk have no effect: those
of the environment's sandbox hold."""
DESCRIBES = {"version", "schema_version", "metadata", "task", "source"}


@dataclass(frozen=True)
class HarborTask:
    folder: Path
    instruction: str
    image: str | None  # one that is there already; else that of environment/Dockerfile
    workdir: str | None  # in place of the image's
    has_network: bool
    agent_s: float
    verifier_s: float
    build_s: float
    verifier_env: dict[str, str]

    @property
    def tests(self) -> Path:
        return self.folder / "tests"


def read_task(folder: Path) -> HarborTask:
    """DatasetError for a folder that is no task; UnsupportedError for what task.toml asks for and
    nobody here knows."""
    name = folder.name
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text().strip()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{name} is no task: {error}") from None
    if not (folder / "tests/test.sh").is_file():
        raise DatasetError(f"{name} is no task: it has no tests/test.sh")
    tables = {table: dict(settings.get(table, {})) for table in FIELDS}
    unknown = settings.keys() - FIELDS.keys() - DESCRIBES
    for table, fields in FIELDS.items():
        unknown |= {f"{table}.{field}" for field in tables[table].keys() - fields}
    if unknown:
        raise UnsupportedError(f"{name}: task.toml asks for {', '.join(sorted(unknown))}")
    environment, verifier = tables["environment"], tables["verifier"]
    return HarborTask(
        folder,
        instruction,
        environment.get("docker_image"),
        environment.get("workdir"),
        bool(environment.get("allow_internet")),
        float(tables["agent"].get("timeout_sec", 600)),
        float(verifier.get("timeout_sec", 600)),
        float(environment.get("build_timeout_sec", 600)),
        {name: str(value) for name, value in verifier.get("env", {}).items()},
    )


def reward_in(folder: Path) -> dict[str, Any]:
    """The reward that tests left, as fields of RewardResult. RuntimeError if they left none."""
    try:
        if (folder / "reward.json").is_file():
            named = json.loads(read_small(folder / "reward.json"))
        else:
            named = {"reward": read_small(folder / "reward.txt")}
        [name] = [*named] if len(named) == 1 else ["reward"]
        value = float(named[name])
        if not math.isfinite(value):
            raise ValueError(f"it is {value}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"the tests wrote no reward: {error}") from None
    return {"score": value, "success": value >= 1}


# -- in our sandbox --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Image:
    """What a Dockerfile of a plain Python makes."""

    workdir: str
    variables: dict[str, str]
    copies: list[tuple[list[str], str]]
    """Sources in environment/, and where they go, an absolute path."""


def _image_of(task: HarborTask) -> _Image:
    """UnsupportedError for an image that is more than a Python and files of the task."""
    name, file = task.folder.name, task.folder / "environment/Dockerfile"
    if task.has_network:
        raise UnsupportedError(
            f"{name}: task.toml asks for the network (allow_internet): {GATEWAY}"
        )
    image = _Image(task.workdir or "/app", {}, [])
    lines = [f"FROM {task.image}"] if task.image else ["FROM python"]
    if file.is_file() and not task.image:
        lines = re.sub(r"\\\s*\n", " ", file.read_text()).splitlines()
    for line in lines:
        words = [] if line.lstrip().startswith("#") else shlex.split(line)
        match [words[0].upper(), *words[1:]] if words else []:
            case []:
                pass
            case ["FROM", base] if PYTHON.fullmatch(base):
                pass
            case ["WORKDIR", path] if path.startswith("/"):
                image = _Image(path, image.variables, image.copies)
            case ["ENV", *pairs] if all("=" in pair for pair in pairs):
                image.variables.update(dict(pair.split("=", 1) for pair in pairs))
            case ["COPY", *sources, to] if _are_files(sources, file.parent):
                to = to if to.startswith("/") else f"{image.workdir}/{to}"
                image.copies.append((sources, to))
            case _:
                what = f"{name}: its image needs `{line.strip():.100}`"
                raise UnsupportedError(f"{what}, and only a plain Python runs here: {GATEWAY}")
    if task.workdir:
        image = _Image(task.workdir, image.variables, image.copies)
    for place in (image.workdir, *(to for _, to in image.copies)):
        if place.split("/")[1] not in ROOTS:
            roots = ", ".join(f"/{root}" for root in ROOTS)
            what = f"{name}: its files are in {place}, and here only {roots} can be had"
            raise UnsupportedError(f"{what}: {GATEWAY}")
    return image


def _are_files(sources: list[str], folder: Path) -> bool:
    whole = folder.resolve()
    places = [(whole / source).resolve() for source in sources]
    return bool(places) and all(p.exists() and p.is_relative_to(whole) for p in places)


def _lay_out(task: HarborTask, image: _Image, root: Path) -> None:
    """Make the folders that the task's image has, below `root`."""
    for name in ROOTS:
        (root / name).mkdir()
    Path(f"{root}{image.workdir}").mkdir(parents=True, exist_ok=True)
    for sources, to in image.copies:
        for source in [task.folder / "environment" / source for source in sources]:
            into = source.is_file() and (to.endswith("/") or Path(f"{root}{to}").is_dir())
            _copy(source, Path(f"{root}{to}", source.name if into else ""), root)


def _copy(source: Path, to: Path, root: Path) -> None:
    """A file or folder of a task, with the paths in its texts led to `root`."""
    if source.is_dir():
        for path in source.iterdir():
            _copy(path, to / path.name, root)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    content = read_small(source)
    with suppress(UnicodeDecodeError):
        content = inward(content.decode(), root).encode()
    to.write_bytes(content)
    shutil.copymode(source, to)


class HarborTasks(EnvironmentCommand):
    """An agent with a terminal (environments/agents/terminal.py) on tasks of Harbor's form."""

    max_calls = TURNS

    def __init__(self, folder: Path) -> None:
        self.dataset, self.eval_dataset, tasks = _splits(folder)
        self._tasks = {name: (task, _image_of(task)) for name, task in tasks.items()}

    def _of(self, example: TaskExample) -> tuple[HarborTask, _Image]:
        return self._tasks[str(example.id)]

    def command(self, example: TaskExample) -> list[str]:
        task, image = self._of(example)
        instruction = str(task.folder / "instruction.md")
        return [sys.executable, terminal.__file__, instruction, image.workdir]

    def variables(self, example: TaskExample) -> dict[str, str]:
        return self._of(example)[1].variables

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        """The gold session: solution/solve.sh as one command."""
        solution = self._of(example)[0].folder / "solution/solve.sh"
        if not solution.is_file():
            return []
        command = re.sub(r"\A#!.*\n", "", solution.read_text()).strip()
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "[exit code 0]"},
            {"role": "assistant", "content": "It is done."},
        ]

    async def run(
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        task, image = self._of(example)
        async with room() as place:
            await asyncio.to_thread(_lay_out, task, image, place / "work")
            asks = self._ended(example, place, model_variables(base_url, api_key, model))
            try:
                ended = await asyncio.wait_for(asks, task.agent_s)
            except TimeoutError:
                raise TimeoutError(f"the agent took longer than {task.agent_s:g} s") from None
            if ended.code:
                what = f"the agent ended with code {ended.code}"
                raise RuntimeError(f"{what}. It printed: {ended.output[-SHOWN_CHARACTERS:]}")
            return await self._judged(task, image, place)

    async def _judged(self, task: HarborTask, image: _Image, place: Path) -> RewardResult:
        """What the tests say, which the agent has not seen. What it may have laid where they look
        goes first."""
        root, home = place / "work", place / "home"
        for folder in (root / "tests", root / "logs", home, place / "tmp"):
            await asyncio.to_thread(scratch.remove, folder)
        for folder in (root / "logs/verifier", home, place / "tmp"):
            folder.mkdir(parents=True)
        await asyncio.to_thread(_copy, task.tests, root / "tests", root)
        own = {"HOME": str(home), "TMPDIR": str(place / "tmp")}
        env = {**os.environ, **image.variables, **task.verifier_env, **own}
        script = ["bash", "-c", 'cd "$0" && exec bash "$1"', f"{root}{image.workdir}"]
        tests = run_program([*script, str(root / "tests/test.sh")], place, env)
        try:
            _, output = await asyncio.wait_for(tests, task.verifier_s)
        except TimeoutError:
            raise TimeoutError(f"the tests took longer than {task.verifier_s:g} s") from None
        try:
            return RewardResult(**reward_in(root / "logs/verifier"))
        except RuntimeError as error:
            raise RuntimeError(f"{error}. They printed: {output[-SHOWN_CHARACTERS:]}") from None


# -- in a container -------------------------------------------------------------------------------


class HarborPrompts(EnvironmentSingleTurn):
    """The same tasks where `flash-mcp gateway` plays them in containers, and gives their reward."""

    def __init__(self, folder: Path) -> None:
        self.dataset, self.eval_dataset, _ = _splits(folder)

    def build_prompt_messages(self, example: TaskExample) -> list[ChatMessage]:
        return [{"role": "user", "content": example.input}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        return RewardResult(0.0, success=False, reason="only the container's tests can score it")


def in_container(engine: str, folder: Path) -> dict[str, Any]:
    """Play the task of this folder in a container of its image, and run its tests there. Its
    reward, as REWARD_FILE wants it."""
    task = read_task(folder)

    def engine_says(*words: str, timeout_s: float = terminal.COMMAND_S) -> str:
        done = subprocess.run(
            [engine, *words], check=True, capture_output=True, text=True, timeout=timeout_s
        )
        return done.stdout.strip()

    image = task.image or engine_says(
        "build", "--quiet", str(folder / "environment"), timeout_s=task.build_s
    )
    container = engine_says("run", "--detach", image, "sleep", "infinity")

    inside = [engine, "exec"]
    if task.workdir:
        inside.append(f"--workdir={task.workdir}")

    def shell(command: str) -> str:
        return terminal.run([*inside, container, "bash", "-c", command])

    try:
        terminal.solve(task.instruction, shell, terminal.asking)
        # What the agent left running, or laid where the tests look, is gone before they come.
        engine_says("restart", "--time", "0", container)
        engine_says("exec", container, "rm", "-rf", "/tests", "/logs")
        engine_says("exec", container, "mkdir", "-p", "/logs/verifier")
        engine_says("cp", f"{task.tests}/.", f"{container}:/tests")
        variables = [f"--env={name}={value}" for name, value in task.verifier_env.items()]
        subprocess.run(
            [*inside, *variables, container, "bash", "/tests/test.sh"],
            check=False, stdout=subprocess.DEVNULL, timeout=task.verifier_s,
        )  # fmt: skip
        verdict = Path(os.environ[REWARD_FILE]).parent / "verifier"
        engine_says("cp", f"{container}:/logs/verifier/.", str(verdict))
        return reward_in(verdict)
    finally:
        engine_says("rm", "--force", container)


# -- the tasks of a folder ------------------------------------------------------------------------


def load(folder: Path, *, gateway: bool = False) -> HarborTasks | HarborPrompts:
    """The tasks in `folder`: those below `eval/` are held out, else every fifth, or the last."""
    return HarborPrompts(folder) if gateway else HarborTasks(folder)


def _splits(folder: Path) -> tuple[list[TaskExample], list[TaskExample], dict[str, HarborTask]]:
    """The tasks to train on, those that are held out, and all of them by name."""
    folders = sorted(path.parent for path in folder.rglob("task.toml"))
    if len(folders) < 2:
        what = f"{folder.name} has {len(folders)} folders with a task.toml, and two are needed"
        raise DatasetError(what)
    tasks = {path.name: read_task(path) for path in folders}
    if len(tasks) < len(folders):
        raise DatasetError(f"{folder.name} has two tasks of one name")
    examples = [TaskExample({}, task.instruction, id=name) for name, task in tasks.items()]
    held_out = [at for at, path in enumerate(folders) if path.parent.name == "eval"]
    held_out = held_out or [*range(len(folders))][HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or [-1]
    held_out_examples = [examples[at] for at in held_out]
    train = [example for example in examples if example not in held_out_examples]
    return train, held_out_examples, tasks


if __name__ == "__main__":  # for `flash-mcp gateway`: ENGINE TASKS
    program, tasks = sys.argv[1:]
    name = json.load(sys.stdin)["task_id"]
    task_folder = next(
        path.parent for path in Path(tasks).rglob("task.toml") if path.parent.name == name
    )
    Path(os.environ[REWARD_FILE]).write_text(json.dumps(in_container(program, task_folder)))
