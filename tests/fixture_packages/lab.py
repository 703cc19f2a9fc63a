"""A package of somebody else: an engine that starts jobs as processes of this machine and notes them in a folder, with
a tool, a command and an address that tell of them; an adapter for its quizzes; and a form of models for its printer."""

import json
import os
import signal
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from environments import EnvironmentSingleTurn, RewardResult, TaskExample
from flash_mcp.cli.output import answer
from flash_mcp.cli.parsing import JSON, Arguments, Command, option
from flash_mcp.protocol.result_model import ExportJob
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher
from flash_mcp.tools.shared.tool_base import Result, Tool


class LabLauncher(Launcher):
    """The target's address is the folder of the notes: the pid of each job, by its key."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    @classmethod
    def of(cls, settings: TargetSettings, tag: str = "") -> Self:
        return cls(settings.address)

    @classmethod
    def check(cls, settings: TargetSettings) -> None:
        if not Path(settings.address or "-").is_dir():
            raise ValueError("the address of a lab is a folder")

    def submit(self, launch: Launch) -> Handle:
        note = self.folder / launch.key
        if not note.exists():
            variables = {**os.environ, **launch.environment}
            process = subprocess.Popen(launch.command, env=variables, start_new_session=True)
            note.write_text(str(process.pid))
        return Handle(launch.key, launch.key)

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        return {handle.key: JobStatus("alive" if self._process(handle) else "gone") for handle in handles}

    def cancel(self, handle: Handle) -> None:
        if process := self._process(handle):
            os.killpg(process.pid, signal.SIGKILL)

    def _process(self, handle: Handle) -> psutil.Process | None:
        try:
            process = psutil.Process(int((self.folder / handle.key).read_text()))
            return process if process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, psutil.NoSuchProcess):
            return None


@dataclass
class Quiz:
    """What its users write."""

    answers: dict[str, str]


def adapt(quiz: Quiz) -> EnvironmentSingleTurn:
    return QuizEnvironment(quiz)


class QuizEnvironment(EnvironmentSingleTurn):
    def __init__(self, quiz: Quiz) -> None:
        tasks = [TaskExample({}, question, id=question, output=answer) for question, answer in quiz.answers.items()]
        self.dataset, self.eval_dataset = tasks[::2], tasks[1::2]

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        return [{"role": "user", "content": example.input}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        return RewardResult(float(response_text == example.output))


class Jobs(Result):
    """What the lab has noted."""

    jobs: list[str]


def lab_jobs(folder: str) -> Jobs:
    """List the jobs that a lab has started.

    Args:
        folder: The address of its target.
    """
    return Jobs(jobs=sorted(note.name for note in Path(folder).iterdir()), next="status says how their runs are")


TOOL = Tool(lab_jobs, title="Jobs of a lab", example="lab-jobs ./notes", read_only=True)


def forget(arguments: Arguments) -> None:
    """Remove the notes of a lab."""
    jobs = lab_jobs(arguments.folder).jobs
    for job in jobs:
        Path(arguments.folder, job).unlink()
    answer(arguments, {"removed": jobs}, f"removed {len(jobs)}")


FORGET = Command(forget, ("flash-mcp lab-forget ./notes",), (option("folder", "its address", "FOLDER"), JSON))


async def printed(request: Request) -> JSONResponse:
    return JSONResponse({"printer": "ready"})


ROUTES = [Route("/lab/printer", printed)]


def shapes(folder: Path, job: ExportJob, prompts: Sequence[list[int]]) -> None:
    """The weights' names and shapes alone, of the merged model in the folder."""
    weights: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        weights |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    (job.folder / "shapes.json").write_text(json.dumps(weights))
