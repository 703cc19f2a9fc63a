"""Environments that run in the test's own process.

Starting a process with a sandbox takes longer than what most tests of tools do with it. Here the host's requests go
straight to the program that the process would run, through the same JSON. tests/environments has the process."""

import json
import types
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from environments import adapters
from environments.process.child import Child
from environments.process.child_process import ChildProcess
from environments.process.host import EnvironmentHost
from tests.samples import ECHO, ENVIRONMENT


class MainThread(ThreadPoolExecutor):
    """In the place of a process's main thread."""

    def __init__(self) -> None:
        super().__init__(1)

    async def result(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await coroutine


class Program(Child):
    def _import_and_load(self, args: Any) -> Any:
        path = self.folder / "environment.py"
        module = types.ModuleType("environment")
        exec(compile(path.read_text(), path, "exec"), vars(module))
        return adapters.load(self.folder, module.load_environment, args)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for pool in (self._pool, self._main_thread):
            pool.shutdown(wait=False)


class NearChild(ChildProcess):
    """The host's side of a program of its own process."""

    def __init__(self, of: EnvironmentHost) -> None:
        super().__init__(of._redactor, ())
        self.sandbox = {"signals": "protected"}
        self._program = Program(of.folder, MainThread(), self._take)

    def _send(self, request: Any) -> None:
        if self.alive:
            self._program.receive(json.loads(json.dumps(request)))

    def _take(self, reply: Any) -> None:
        self._receive(json.dumps(reply).encode())

    def _end_process(self) -> None:
        self._program.close()
        self.gone.set()


def is_sample(folder: Path) -> bool:
    path = folder / "environment.py"
    if any((folder / name).exists() for name in ("environment.toml", "requirements.txt")):
        return False
    return path.is_file() and path.read_text(errors="replace") in (ENVIRONMENT, ECHO)


@contextmanager
def near() -> Generator[None]:
    """Run the samples' environments in this process, unless their folder says what they need."""
    start_process = EnvironmentHost._start_process

    async def start(self: EnvironmentHost, interpreter: Path) -> ChildProcess:
        return NearChild(self) if is_sample(self.folder) else await start_process(self, interpreter)

    with patch.object(EnvironmentHost, "_start_process", start):
        yield
