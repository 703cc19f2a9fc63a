"""Environments of verifiers from 0.4 on: a taskset, and the agents that play its tasks.

    import verifiers.v1 as vf

    def load_environment(**args):
        config = {"taskset": {"id": "wordle-v1", **args}, "agent": {"harness": {"id": "null"}}}
        return vf.load_environment(vf.resolve_env_config(config))

or a Taskset, which is played by its own environment or by one agent with its default harness. Every
model call goes to the rollout's endpoint. Programs of a harness run in this sandbox: the runtime
that verifiers has by default is a service. Seen to work with verifiers 0.4.0."""

# Any method of an environment may be `async def`.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import hashlib
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from environments.adapters import Row, tasks_of
from environments.base import (
    EnvironmentAgent,
    RewardMetric,
    RewardResult,
    TaskExample,
    UnsupportedError,
)

MOST_TASKS = 1000  # taken from a taskset that has no end
MAX_CALLS = 64
HERE = ("subprocess", "prime")
"""Runtimes that a seat may name: this sandbox, and the default one, which it stands in for."""
MESSAGES_FILE = "--initial-messages-file"


def adapt(loaded: Any) -> TasksetEnvironment:
    """The environment of an Env or a Taskset. Raises UnsupportedError."""
    if hasattr(loaded, "run_rollout"):
        what = f"{type(loaded).__name__} is an environment of verifiers before 0.4"
        fix = "write it as a Taskset of 0.4, or play it from `run` of an EnvironmentAgent"
        raise UnsupportedError(f"{what}: {fix}")
    vf = importlib.import_module("verifiers.v1")
    if isinstance(loaded, vf.Taskset):
        id = loaded.config.id or type(loaded).__module__.partition(".")[0]
        taskset = {**loaded.config.model_dump(), "id": id}
        loaded = vf.load_environment(vf.resolve_env_config({"taskset": taskset}))
    if not isinstance(loaded, vf.Env):
        what = f"{type(loaded).__module__}.{type(loaded).__qualname__}"
        raise UnsupportedError(f"{what} of verifiers is neither an Env nor a Taskset")
    _run_programs_here()
    runtimes = importlib.import_module("verifiers.v1.runtimes")
    placed: dict[str, Any] = {}
    for name, seat in _seats(loaded.config).items():
        if seat.runtime.type not in HERE:
            raise UnsupportedError(f"the agent {name!r} needs the runtime {seat.runtime.type!r}")
        placed[name] = seat.model_copy(update={"runtime": runtimes.SubprocessConfig()})
    result: Any = type(loaded)(loaded.config.model_copy(update=placed))
    for harness in result._harnesses.values():
        if harness.NEEDS_CONTAINER:
            raise UnsupportedError(f"the harness {harness.config.id!r} needs a container")
    taskset: Any = result.taskset
    if taskset.task_type().NEEDS_CONTAINER:
        raise UnsupportedError("the tasks of its taskset need a container")
    return TasksetEnvironment(result)


def _seats(config: Any) -> dict[str, Any]:
    agents = importlib.import_module("verifiers.v1.configs.agent")
    return agents.agent_config_fields(config)


class TasksetEnvironment(EnvironmentAgent):
    """An Env. The reward is the mean of its trained agents'; `success` is at least 1."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        taskset = loaded.taskset if loaded.taskset.bounded else loaded.taskset.take(MOST_TASKS)
        self._tasks = list(taskset)
        if any(task.data.image for task in self._tasks):
            raise UnsupportedError("the tasks of its taskset need images of containers")
        rows: list[Row] = [
            {**task.data.model_dump(mode="json"), "idx": index}
            for index, task in enumerate(self._tasks)
        ]
        self.dataset, self.eval_dataset = tasks_of(rows, [], self._question, {"idx"})
        turns = [seat.max_turns or MAX_CALLS for seat in _seats(loaded.config).values()]
        self.max_calls = sum(turns)
        self._keys = itertools.count()
        self._serving = asyncio.Lock()
        self._served: list[Any] = []
        """What the rollouts, whose objects are copies of this one, share."""

    def _question(self, row: Row) -> str:
        data = self._tasks[row["idx"]].data
        return data.prompt_text or data.description or data.name or ""

    async def run(
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        vf = importlib.import_module("verifiers.v1")
        async with self._serving:  # what the rollouts share; it ends with this process
            if not self._served:
                served = self._loaded.serving()
                await served.__aenter__()
                self._served.append(served)
        # verifiers reads keys from variables. It gives none of this name to its programs.
        variable = f"FLASH_API_KEY_{next(self._keys)}"
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(model=model, client=client)
            episode = await self._loaded.run_episode(self._tasks[example.record["idx"]], context)
        finally:
            del os.environ[variable]
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        for part in (episode, *traces):
            if not part.ok and part.errors:
                error = part.errors[-1]
                raise RuntimeError(f"the rollout failed: {error.type}: {error.message:.1000}")
        return _result(traces)


def _result(traces: Sequence[Any]) -> RewardResult:
    if not traces:
        raise RuntimeError("no agent that is trained has played")
    values: dict[str, list[float]] = {}
    for trace in traces:
        rewards = {name: reward and reward.value for name, reward in trace.rewards.items()}
        for name, value in {**trace.metrics, **rewards}.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    reward = fmean(trace.reward for trace in traces)
    return RewardResult(
        reward,
        reason=", ".join(trace.stop_condition for trace in traces if trace.stop_condition) or None,
        metrics=[RewardMetric(name, score=fmean(result)) for name, result in values.items()],
    )


# -- programs of a harness -------------------------------------------------------------------------


def _run_programs_here() -> None:
    """Run verifiers' programs by this interpreter: uv would download the packages of each."""
    runtimes = importlib.import_module("verifiers.v1.runtimes")
    launching = importlib.import_module("verifiers.v1.harnesses.utils.launch")
    chat = _Chat(launching.CHAT_PROGRAM_SOURCE)
    start = runtimes.SubprocessRuntime.run

    async def prepare(
        self: Any, script: str | bytes, env: object = None, *, activate: bool = True
    ) -> list[str]:
        data = script if isinstance(script, bytes) else script.encode()
        path = Path(self.scripts_dir) / f"{hashlib.sha256(data).hexdigest()}.py"
        await self.write(str(path), data)
        return [sys.executable, str(path)]

    async def run_program(self: Any, argv: list[str], env: dict[str, str]) -> Any:
        # A chat without a shell leaves its process alone, which would take seconds to start.
        if "--bash" in argv or not chat.is_in(Path(argv[1])):
            return await start(self, argv, env)
        code, printed = await chat.run(argv[2:], self.workdir)
        return runtimes.ProgramResult(exit_code=code, stdout="", stderr=printed)

    runtimes.SubprocessRuntime.prepare_uv_script = prepare
    runtimes.SubprocessRuntime.run_program = run_program


class _Chat:
    """The program of verifiers' harnesses that chats until the model calls no tool."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        module = ModuleType("chat_program")
        exec(compile(source, "chat_program.py", "exec"), vars(module))
        self._program: Any = module
        self._parse_args: Callable[[], Any] = self._program.parse_args

    def is_in(self, file: Path) -> bool:
        return file.stem == hashlib.sha256(self._source).hexdigest()

    async def run(self, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
        """The exit code of the program in `folder`, and what it would have printed."""
        arguments_before = sys.argv
        sys.argv = ["chat_program"]
        for argument in arguments:
            name, _, file = argument.partition("=")
            sys.argv.append(f"{name}={folder / file}" if name == MESSAGES_FILE else argument)
        try:
            parsed = self._parse_args()
        finally:
            sys.argv = arguments_before
        self._program.parse_args = lambda: parsed  # `main` calls it before it first waits
        try:
            await self._program.main()
        except SystemExit as ended:
            return int(ended.code or 0), traceback.format_exc()
        except Exception:
            return 1, traceback.format_exc()
        return 0, ""
