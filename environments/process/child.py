"""The process that runs environment code: `python -m environments.process.child BOUNDS WALLS
REQUESTS REPLIES`.

environments.process.warden starts it behind its walls. Requests come as JSON lines from one
descriptor, replies go out on the other, in the order in which they are ready:

    {"number": 7, "op": "step", "episode": 3, "text": "..."}
    {"number": 7, "value": {...}}   or   {"number": 7, "fault": [code, what, traceback]}

What user code prints goes to stderr. Coroutine methods run in the event loop, all others in
threads, as many at once as the client sends."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from environments.adapters import freesolo
from environments.base import (
    ChatMessage,
    DatasetError,
    Environment,
    EnvironmentEpisode,
    EnvironmentStepResult,
    EnvironmentTurn,
    RewardMetric,
    RewardResult,
    TaskExample,
)
from environments.process import sandbox
from environments.process.faults import EnvironmentFault

MAX_THREADS = 4096
MAX_REPLY_BYTES = 8 << 20
PAGE_CHARACTERS = MAX_REPLY_BYTES // 16
"""Of a list of tasks; in JSON a character takes up to 12 bytes."""
EVIDENCE_CHARACTERS = 4000
CANCEL_TIMEOUT_S = 1.0
OPENING_ROLES = ("system", "user", "assistant", "tool")
ANSWER_ROLES = ("user", "tool", "system")


@dataclass
class Episode:
    """One conversation: the environment's object that serves it and what was said so far."""

    environment: Environment
    example: TaskExample
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    prompt_length: int = 0
    final_text: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


class Child:
    """Serves requests; `reply` sends one line."""

    def __init__(
        self, folder: Path, walls: dict[str, str], reply: Callable[[dict[str, Any]], None]
    ) -> None:
        self.folder, self._walls, self._reply = folder, walls, reply
        self._pool = ThreadPoolExecutor(MAX_THREADS)
        self._environment: Environment | None = None
        self._splits: dict[str, Sequence[TaskExample]] = {}
        self._episodes: dict[int, Episode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._threads: dict[asyncio.Task[Any], int] = {}
        self._ops: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "load": self._load,
            "tasks": self._list_tasks,
            "open": self._open,
            "step": self._step,
            "score": self._score,
            "close": self._close,
            "gold": self._gold,
            "abandon": self._abandon,
        }

    def receive(self, request: dict[str, Any]) -> None:
        number = request.pop("number")
        task = asyncio.get_running_loop().create_task(
            self._serve(number, request.pop("op"), request)
        )
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _serve(self, number: int, op: str, fields: dict[str, Any]) -> None:
        try:
            self._reply({"number": number, "value": await self._ops[op](**fields)})
        except EnvironmentFault as fault:
            self._reply({"number": number, "fault": [fault.code, fault.what, fault.traceback]})
        except (
            Exception
        ) as error:  # what was returned breaks the contract in a way that no check foresaw
            fault = self._fault(f"using what {op} returned", error, "environment_error")
            self._reply({"number": number, "fault": [fault.code, fault.what, fault.traceback]})

    # -- requests ----------------------------------------------------------------------------------

    async def _load(self, args: dict[str, Any]) -> dict[str, Any]:
        environment = await self._call(self._import_and_load, args, code="environment_invalid")
        if not isinstance(environment, Environment):
            raise EnvironmentFault(
                "environment_invalid",
                f"load_environment returned {_kind(environment)}; it must return an object of a class that extends "
                "EnvironmentSingleTurn or EnvironmentMultiTurn; environments.adapters.gym.GymEnvironment makes one of "
                "objects with reset and step",
            )
        self._environment = environment
        self._splits = await self._call(self._read_splits, environment, code="environment_invalid")
        return {
            "splits": {name: len(examples) for name, examples in self._splits.items()},
            "max_score_concurrency": max(1, int(environment.max_score_concurrency)),
            "walls": self._walls,
        }

    def _import_and_load(self, args: dict[str, Any]) -> Any:
        if not (self.folder / "environment.py").is_file():
            raise EnvironmentFault(
                "environment_invalid", f"there is no environment.py in {self.folder}"
            )
        module = importlib.import_module("environment")
        if not callable(getattr(module, "load_environment", None)):
            raise EnvironmentFault(
                "environment_invalid",
                "environment.py defines no load_environment(**kwargs) that returns an environment",
            )
        if "freesolo" in sys.modules:
            return freesolo.load(self.folder, module.load_environment, args)
        return module.load_environment(**args)

    def _read_splits(self, environment: Environment) -> dict[str, Sequence[TaskExample]]:
        splits: dict[str, Any] = {"train": environment.dataset, "eval": environment.eval_dataset}
        for name, examples in splits.items():
            attribute = "dataset" if name == "train" else "eval_dataset"
            if not isinstance(examples, Sequence):
                raise EnvironmentFault(
                    "dataset_invalid",
                    f"{attribute} must be a list of TaskExample, got {_kind(examples)}",
                )
            for index, example in enumerate(cast("Sequence[Any]", examples)):
                if not isinstance(example, TaskExample) or not isinstance(
                    cast("Any", example.input), str
                ):
                    raise EnvironmentFault(
                        "dataset_invalid",
                        f"{attribute}[{index}] must be a TaskExample whose input is a string, got {example!r:.200}",
                    )
        if not splits["train"]:
            raise EnvironmentFault(
                "dataset_invalid", "dataset is empty: an environment needs at least one task"
            )
        return splits

    async def _list_tasks(self, split: str, first: int) -> list[tuple[str, str]]:
        """(id, digest of the question, whatever its spacing and case) of tasks from `first` on: a
        page of them.
        """
        examples, page, length = self._splits[split], list[tuple[str, str]](), 0
        while first + len(page) < len(examples) and length < PAGE_CHARACTERS:
            example = examples[first + len(page)]
            page.append((_task_id(example), _digest(" ".join(example.input.casefold().split()))))
            length += sum(map(len, page[-1]))
        return page

    async def _open(self, episode: int, split: str, index: int) -> dict[str, Any]:
        example = self._example(split, index)
        environment = await self._call(self._loaded.new_episode, example)
        if not isinstance(environment, Environment):
            raise EnvironmentFault(
                "environment_error",
                f"new_episode must return an environment, got {_kind(environment)}",
            )
        opened = self._episodes[episode] = Episode(environment, example)
        try:
            opened.messages = _messages(
                await self._call(environment.start_episode, example, ""),
                "start_episode",
                OPENING_ROLES,
            )
            if not opened.messages:
                raise EnvironmentFault("environment_error", "start_episode returned no messages")
            opened.prompt_length = len(opened.messages)
            max_turns = await self._call(environment.max_episode_turns, example)
            if not isinstance(max_turns, int) or max_turns < 1:
                raise EnvironmentFault(
                    "environment_error",
                    f"max_episode_turns must return a whole number >= 1, got {max_turns!r:.100}",
                )
        except BaseException:
            await self._close(episode)
            raise
        return {"task_id": _task_id(example), "messages": opened.messages, "max_turns": max_turns}

    async def _step(self, episode: int, text: str | None) -> dict[str, Any]:
        state = self._episode(episode)
        state.messages.append({"role": "assistant", "content": text})
        result = await self._call(
            state.environment.step_episode, state.example, list(state.messages), text
        )
        if not isinstance(result, EnvironmentStepResult):
            raise EnvironmentFault(
                "environment_error",
                f"step_episode must return an EnvironmentStepResult, got {_kind(result)}",
            )
        if result.final_response_text is not None:
            state.final_text = _text(
                result.final_response_text, "step_episode's final_response_text"
            )
        state.metadata.update(result.metadata)
        if result.done:
            return {"done": True, "messages": []}
        answers = _messages(result.messages, "step_episode", ANSWER_ROLES)
        if not answers:
            raise EnvironmentFault(
                "environment_error",
                "step_episode returned done=False without messages: the model would have nothing to answer",
            )
        state.messages += answers
        return {"done": False, "messages": answers}

    async def _score(self, episode: int, latency_ms: int, total_tokens: int) -> dict[str, Any]:
        state = self._episode(episode)
        try:
            finished = EnvironmentEpisode(
                messages=tuple(state.messages),
                response_text=await self._response_text(state),
                turns=tuple(
                    EnvironmentTurn(message["role"], message["content"])
                    for message in state.messages[state.prompt_length :]
                ),
                metadata=state.metadata,
                latency_ms=latency_ms,
                total_tokens=total_tokens,
            )
            return _score(
                await self._call(state.environment.score_episode, state.example, finished)
            )
        finally:
            await self._close(episode)

    async def _response_text(self, state: Episode) -> Any:
        """The final answer; None, which only the gate gives, stays None for the scorer to cope
        with.
        """
        if state.final_text is not None:
            return state.final_text
        said = [
            turn["content"]
            for turn in state.messages[state.prompt_length :]
            if turn["role"] == "assistant"
        ]
        answer = said[-1] if said else ""
        normalized = await self._call(
            state.environment.normalize_response_text, state.example, answer
        )
        return (
            None
            if answer is None and normalized is None
            else _text(normalized, "normalize_response_text")
        )

    async def _close(self, episode: int) -> None:
        state = self._episodes.pop(episode, None)
        if (
            state is not None
            and type(state.environment).close_episode is not Environment.close_episode
        ):
            await self._call(state.environment.close_episode)

    async def _gold(self, split: str, index: int) -> list[ChatMessage]:
        gold = await self._call(self._loaded.sft_completion, self._example(split, index))
        return _messages(gold, "sft_completion", OPENING_ROLES)

    async def _abandon(self, target: int) -> dict[str, Any]:
        """Drop a call. `stuck` says that it goes on all the same: a thread, or a coroutine that
        ignores its end.
        """
        task = self._tasks.get(target)
        if task is None:
            return {"stuck": False, "method": "", "traceback": ""}
        method, stack = self._methods.get(task, ""), self._stack(task)
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_TIMEOUT_S)
        return {
            "stuck": not task.done() or task in self._threads,
            "method": method,
            "traceback": stack,
        }

    # -- user code ---------------------------------------------------------------------------------

    async def _call(
        self, method: Callable[..., Any], *args: Any, code: str = "environment_error"
    ) -> Any:
        """Run a method of the user's, here where it is a coroutine, in a thread otherwise."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._methods[task] = method.__name__.lstrip("_")
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*args)
            value, error = await self._in_thread(task, functools.partial(method, *args))
            if error is not None:
                raise error
            return await value if inspect.isawaitable(value) else value
        except (asyncio.CancelledError, EnvironmentFault):
            raise
        except DatasetError as error:
            raise EnvironmentFault("dataset_invalid", str(error)) from error
        except BaseException as error:
            raise self._fault(method.__name__, error, code) from error
        finally:
            del self._methods[task]

    async def _in_thread(
        self, task: asyncio.Task[Any], function: Callable[[], Any]
    ) -> tuple[Any, BaseException | None]:
        def run() -> tuple[Any, BaseException | None]:
            self._threads[task] = threading.get_ident()
            try:
                return function(), None
            except BaseException as error:
                # As a value: a future refuses StopIteration, and SystemExit would end the event
                # loop.
                return None, error
            finally:
                del self._threads[task]

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    def _fault(self, method: str, error: BaseException, code: str) -> EnvironmentFault:
        frame = error.__traceback__
        while frame is not None and not self._is_own(frame.tb_frame.f_code.co_filename):
            frame = frame.tb_next
        own = [place for place in traceback.extract_tb(frame) if self._is_own(place.filename)]
        where = f" ({Path(own[-1].filename).name} line {own[-1].lineno})" if own else ""
        called = "environment.py" if method == "_import_and_load" else method
        message = f"{called} raised {type(error).__name__}: {_message(error):.300}{where}"
        if wall := sandbox.hit(error):
            code, message = wall[0], f"{message}; {wall[1]}"
        lines = traceback.format_exception(type(error), error, frame or error.__traceback__)
        return EnvironmentFault(code, message, "".join(lines)[-EVIDENCE_CHARACTERS:])

    def _stack(self, task: asyncio.Task[Any]) -> str:
        """Where a call is, from the user's first frame on, for the report of its timeout."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        if (ident := self._threads.get(task)) in frames:
            places = traceback.extract_stack(frames[ident])
        else:
            places = traceback.StackSummary.from_list(list(_awaited_places(task.get_coro())))
        own = [index for index, place in enumerate(places) if self._is_own(place.filename)]
        return "".join(traceback.format_list(places[own[0] :] if own else []))[
            -EVIDENCE_CHARACTERS:
        ]

    def _is_own(self, filename: str) -> bool:
        return Path(filename).is_relative_to(self.folder)

    @property
    def _loaded(self) -> Environment:
        assert self._environment is not None
        return self._environment

    def _example(self, split: str, index: int) -> TaskExample:
        examples = self._splits.get(split)
        if examples is None or not 0 <= index < len(examples):
            sizes = ", ".join(
                f"{name} has {len(tasks)} tasks" for name, tasks in self._splits.items()
            )
            raise EnvironmentFault(
                "environment_error", f"there is no task {index} in split {split!r}: {sizes}"
            )
        return examples[index]

    def _episode(self, episode: int) -> Episode:
        if episode not in self._episodes:
            raise EnvironmentFault("environment_error", f"episode {episode} is not open")
        return self._episodes[episode]


def _awaited_places(awaited: Any) -> Iterator[traceback.FrameSummary]:
    """Where a suspended coroutine stands, and the one that it awaits, and so on."""
    while inspect.iscoroutine(awaited) and awaited.cr_frame is not None:
        yield from traceback.extract_stack(awaited.cr_frame, limit=1)
        awaited = awaited.cr_await


# -- checks of what user code returned -------------------------------------------------------------


def _messages(value: Any, method: str, roles: Sequence[str]) -> list[ChatMessage]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise EnvironmentFault(
            "environment_error", f"{method} must return a list of messages, got {_kind(value)}"
        )
    return [_chat_message(message, method, roles) for message in cast("Sequence[Any]", value)]


def _chat_message(message: Any, method: str, roles: Sequence[str]) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise EnvironmentFault(
            "environment_error", f"a message of {method} must be a dict, got {_kind(message)}"
        )
    fields = dict(cast("Mapping[str, Any]", message))
    if fields.get("role") not in roles:
        raise EnvironmentFault(
            "environment_error",
            f"a message of {method} has role {fields.get('role')!r:.100}; expected one of: {', '.join(roles)}",
        )
    fields["content"] = _text(
        fields.get("content"), f"the content of a {fields['role']} message of {method}"
    )
    return fields


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFault("environment_error", f"{what} must be a string, got {_kind(value)}")
    # A lone surrogate, as from a badly decoded file, could not be written down anywhere.
    return value if value.isascii() else value.encode(errors="replace").decode()


def _score(result: Any) -> dict[str, Any]:
    if not isinstance(result, RewardResult):
        raise EnvironmentFault(
            "environment_error",
            f"score_episode must return a RewardResult, got {_kind(result)}; write RewardResult(score=...)",
        )
    reward = _finite(result.score)
    if reward is None:
        raise EnvironmentFault(
            "environment_error", f"the score must be a finite number, got {result.score!r:.100}"
        )
    metrics = {
        metric.name: value
        for metric in result.metrics
        if (value := _metric_value(metric)) is not None
    }
    return {
        "reward": reward,
        "success": bool(result.resolved_success()),
        "metrics": metrics,
        "reason": None if result.reason is None else _text(str(result.reason), "reason"),
        "error": None if result.error is None else _text(str(result.error), "error"),
    }


def _metric_value(metric: RewardMetric) -> float | None:
    return next(
        (
            number
            for given in (metric.score, metric.value, metric.success)
            if (number := _finite(given)) is not None
        ),
        None,
    )


def _finite(value: Any) -> float | None:
    """A number as float; numpy's and the like too. None for what is none, or is NaN or infinite."""
    with suppress(TypeError, ValueError, OverflowError):
        number = None if value is None or isinstance(value, str) else float(value)
        return number if number is not None and math.isfinite(number) else None
    return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.100}"


def _message(error: BaseException) -> str:
    try:
        return str(error) or "no message"
    except Exception:
        return "its message could not be shown"


def _task_id(example: TaskExample) -> str:
    return str(example.id) if example.id is not None else _digest(example.input)[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


# -- the process -----------------------------------------------------------------------------------


class _Requests(asyncio.Protocol):
    """Splits what arrives into lines; ends the process when the parent is gone, and so what it
    started (warden).
    """

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self._receive, self._rest = receive, b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._receive(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(1)


async def _serve(folder: Path, walls: dict[str, str], requests: int, replies: int) -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(replies, "wb", buffering=0)
    )

    def reply(message: dict[str, Any]) -> None:
        try:
            line = json.dumps(message, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            what = f"a message holds something that JSON cannot: {error}"
            line = json.dumps(
                {"number": message["number"], "fault": ["environment_error", what, ""]}
            )
        if len(line) > MAX_REPLY_BYTES:
            what = f"it returned {len(line):,} bytes of text, more than the {MAX_REPLY_BYTES:,} of one call"
            line = json.dumps(
                {"number": message["number"], "fault": ["environment_error", what, ""]}
            )
        transport.write(line.encode() + b"\n")

    child = Child(folder, walls, reply)
    await loop.connect_read_pipe(
        lambda: _Requests(child.receive), os.fdopen(requests, "rb", buffering=0)
    )
    await asyncio.Event().wait()


def main() -> None:
    bounds, walls = sandbox.Bounds.load(sys.argv[1]), json.loads(sys.argv[2])
    requests, replies = map(int, sys.argv[3:])
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    sandbox.explain_refusals(bounds)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.path.insert(0, bounds.folder)
    asyncio.run(_serve(Path(bounds.folder), walls, requests, replies))


if __name__ == "__main__":
    main()
