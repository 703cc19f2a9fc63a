"""A package of somebody else: an engine that starts jobs as processes of this machine and notes them in a folder,
and an adapter for the quizzes that it has."""

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from environments import EnvironmentSingleTurn, RewardResult, TaskExample
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher


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
