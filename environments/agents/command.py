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
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.agents.programs import end, room, start
from environments.base import EnvironmentAgent, RewardResult, TaskExample
from environments.sandbox.kernel import signal_name

REWARD_FILE = "FLASH_REWARD_FILE"
REWARD_NAME = "reward.json"
SHOWN_CHARACTERS = 2000
MAX_OUTPUT_BYTES = 8 << 20
"""Of what a program printed, its `reward` gets the end."""


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
        # A file, as a program in the background may hold a pipe open.
        with tempfile.TemporaryFile() as printed:
            command, files = list(self.command(example)), self.files(example)
            process = await start(command, place, env, printed, files)
            try:
                code = await process.wait()
            finally:
                await end(process)
            size = printed.seek(0, os.SEEK_END)
            printed.seek(max(0, size - MAX_OUTPUT_BYTES))
            output = printed.read().decode(errors="replace")
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
