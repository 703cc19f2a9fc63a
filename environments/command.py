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
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.base import EnvironmentAgent, RewardResult, TaskExample

REWARD_FILE = "FLASH_REWARD_FILE"
SHOWN_CHARACTERS = 2000


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
    ANTHROPIC_API_KEY), and its name in MODEL, OPENAI_MODEL and ANTHROPIC_MODEL. It ends with its
    rollout."""

    @abstractmethod
    def command(self, example: TaskExample) -> Sequence[str]:
        """The program and its arguments."""

    def variables(self, example: TaskExample) -> dict[str, str]:
        """Further environment variables of the program."""
        return {}

    def reward(self, example: TaskExample, ended: EndedCommand) -> RewardResult:
        """The reward. By default the program's own: it writes {"score": NUMBER} and the other
        fields of RewardResult, as JSON, to the file that $FLASH_REWARD_FILE names.
        """
        file = ended.folder / "reward.json"
        if not file.is_file():
            printed = ended.output[-SHOWN_CHARACTERS:]
            what = f"the command wrote no reward and ended with code {ended.code}"
            raise RuntimeError(f"{what}. It printed: {printed}")
        return RewardResult(**json.loads(file.read_text()))

    async def run(
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        command = list(self.command(example))
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            given = {REWARD_FILE: str(folder / "reward.json"), "MODEL": model}
            for firm in ("OPENAI", "ANTHROPIC"):
                given |= {f"{firm}_BASE_URL": base_url, f"{firm}_API_KEY": api_key}
                given[f"{firm}_MODEL"] = model
            env = {**os.environ, **given, **self.variables(example)}
            pipes: Any = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT}
            process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=env, **pipes)
            try:
                printed, _ = await process.communicate()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            output = printed.decode(errors="replace")
            ended = EndedCommand(process.returncode or 0, output, folder)
            return await asyncio.to_thread(self.reward, example, ended)
