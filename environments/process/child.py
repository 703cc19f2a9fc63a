"""The process that runs environment code.

    python -m environments.process.child BOUNDS REQUESTS REPLIES

environments.process.__main__ starts it inside the sandbox. It reads requests as JSON lines from the
descriptor REQUESTS and writes each reply to REPLIES as soon as it is ready:

    {"number": 7, "op": "step_episode", "episode": 3, "text": "..."}
    {"number": 7, "value": {...}}   or   {"number": 7, "fault": [code, what, traceback, refusals]}

What user code prints goes to stderr. Coroutine methods run in the event loop, all others in
threads, as many at once as the client sends. The main thread, the only one that may use signals,
runs load_environment and, with max_score_concurrency = 1, score_episode and score_group, also if
they are coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import functools
import importlib
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Never, cast

from environments import adapters, task_cache
from environments.agents.calls import ANSWER_ROLES, OPENING_ROLES, Usage
from environments.base import (
    ArgumentsError,
    ChatMessage,
    DatasetError,
    Environment,
    EnvironmentAgent,
    EnvironmentEpisode,
    EnvironmentSingleTurn,
    EnvironmentStepResult,
    Json,
    TaskExample,
    UnsupportedError,
)
from environments.faults import EnvironmentFault
from environments.judge import JudgeRubric, Rubric
from environments.process import returned
from environments.process.clock import SHIFT_VARIABLE, shift_clock
from environments.process.generators import Generators, switch_global_generators
from environments.process.replies import MAX_TURNS
from environments.process.returned import (
    as_task,
    assistant,
    chat_message,
    check_tasks,
    cut,
    dataset_invalid,
    digest,
    end_of,
    environment_error,
    environment_invalid,
    expected_of,
    kind_of,
    listed,
    messages_of,
    number_of,
    score_of,
    shown,
    task_id,
    text_of,
)
from environments.same_task import MOST_TASKS, is_permuted, same_tasks, words_of
from environments.sandbox import confinement, needs
from environments.sandbox.confinement import message_of
from environments.sandbox.needs import Bounds
from environments.tools import tool_schemas

MAX_THREADS = 4096
MAX_REPLY_BYTES = 8 << 20
GROUP_CHARACTERS = 200
PAGE_CHARACTERS = MAX_REPLY_BYTES // 16
"""Size of one page of the task list. In JSON a character takes up to 12 bytes."""
CANCEL_TIMEOUT_S = 1.0
INSTANT_METHODS = {
    Environment.episode_tools,
    Environment.normalize_response_text,
    Environment.sft_completion,
    EnvironmentSingleTurn.max_episode_turns,
}
"""Defaults of the contract that only return what is there, so that they need no thread."""
ALONE = "score_episode must return a RewardResult"


@dataclass
class Episode:
    """One conversation: the environment object that serves it, and its messages so far."""

    environment: Environment
    task: tuple[str, int]
    """Its split and its number in it. A dataset may build another `example` at each access."""
    example: TaskExample
    generators: Generators
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    prompt_length: int = 0
    final_text: str | None = None
    earned: float | None = None
    """The sum of the rewards of its turns, where the environment rewards turns."""
    metadata: Json = field(default_factory=Json)


class MainThread(Executor):
    """Runs calls on the main thread: functions one at a time, and coroutines between them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._loop = asyncio.new_event_loop()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(fn, *args, **kwargs)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        return future

    async def result(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def serve(self) -> Never:
        """Run the calls that come. The main thread calls this."""
        while True:
            # A function may start a loop of its own, so this one does not run meanwhile.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
            while not self._calls.empty():
                future, function = self._calls.get()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except BaseException as error:
                        future.set_exception(error)


@dataclass(eq=False)
class Child:
    """Serves requests: `op_NAME` those whose `op` is NAME. `_reply` sends one line."""

    folder: Path
    _main_thread: MainThread
    _reply: Callable[[Json], None]

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS)
        self._score_pool: Executor = self._pool
        self._loaded: Environment
        self._is_agent = False
        self._splits: dict[str, Sequence[TaskExample]] = {}
        self._episodes: dict[int, Episode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._threads: dict[asyncio.Task[Any], int] = {}
        self._generated: dict[str, str] = {}

    def receive(self, request: Json) -> None:
        number = request.pop("number")
        serving = self._serve(number, request.pop("op"), request)
        task = asyncio.get_running_loop().create_task(serving)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _serve(self, number: int, op: str, fields: Json) -> None:
        try:
            value = await getattr(self, f"op_{op}")(**fields)
        except EnvironmentFault as raised:
            fault = raised
        except Exception as error:
            # A returned object breaks the contract in a way that no check foresaw.
            fault = self._fault(f"using what {op} returned", error, "environment_error")
        else:
            self._reply({"number": number, "value": value})
            return
        said = [fault.code, fault.what, fault.traceback, fault.refusals]
        self._reply({"number": number, "fault": said})

    # -- requests ----------------------------------------------------------------------------------

    async def op_load(self, args: Json, secrets: list[str]) -> Json:
        """Load the environment with `args`; `secrets` are names of variables."""
        returned.hide(os.environ[name] for name in secrets)
        load = functools.partial(self._call, pool=self._main_thread, code="environment_invalid")
        environment = await load(self._import_and_load, args)
        if not isinstance(environment, Environment):
            raise environment_invalid(
                f"load_environment returned {kind_of(environment)}; it must return an object of a "
                "class that extends EnvironmentSingleTurn, EnvironmentMultiTurn or "
                "EnvironmentAgent; "
                "environments.adapters.gym.GymEnvironment wraps objects with reset and step"
            )
        scores_groups = type(environment).score_group is not Environment.score_group
        plays_gold = False
        if isinstance(environment, EnvironmentAgent):
            plays_gold = type(environment).gold_turn is not EnvironmentAgent.gold_turn
            environment = _served(environment, self._call)
            self._is_agent = True
        self._loaded = environment
        self._splits = await load(self._read_splits, environment)
        score_concurrency = max(1, int(environment.max_score_concurrency))
        if score_concurrency == 1:
            self._score_pool = self._main_thread
        return {
            "splits": {name: len(examples) for name, examples in self._splits.items()},
            "max_score_concurrency": score_concurrency,
            "scores_groups": scores_groups,
            "plays_gold": plays_gold,
            "generated": task_cache.names(),
        }

    def _import_and_load(self, args: Json) -> Any:
        if not (self.folder / "environment.py").is_file():
            raise environment_invalid(f"there is no environment.py in {self.folder}")
        task_cache.use(self.folder)
        module = importlib.import_module("environment")
        if not callable(getattr(module, "load_environment", None)):
            what = (
                "environment.py defines no load_environment(**kwargs) that returns an environment"
            )
            raise environment_invalid(what)
        return adapters.load(self.folder, module.load_environment, args)

    def _read_splits(self, environment: Environment) -> dict[str, Sequence[TaskExample]]:
        for attribute in ("dataset", "eval_dataset"):
            check_tasks(attribute, getattr(environment, attribute))
        if not environment.dataset:
            raise dataset_invalid("dataset is empty: an environment needs at least one task")
        return {"train": environment.dataset, "eval": environment.eval_dataset}

    async def op_list_tasks(self, split: str, first: int) -> list[tuple[str, str]]:
        """A page of the task list from `first` on: (id, digest of the task), which tasks that ask
        the same in the same words share. The rest of their rows may differ.
        """
        examples = self._splits[split]
        page: list[tuple[str, str]] = []
        length = 0
        while first + len(page) < len(examples) and length < PAGE_CHARACTERS:
            example = examples[first + len(page)]
            task = as_task(example)
            row = (task_id(example), digest(json.dumps([words_of(task.text), task.gold])))
            page.append(row)
            length += sum(map(len, row))
        return page

    async def op_reworded(self) -> list[tuple[int, int]]:
        """(place in train, place in eval) of eval tasks that are a train task in other words."""
        examples = [*self._splits["train"], *self._splits["eval"]]
        if len(examples) > MOST_TASKS:
            return []
        tasks = list(map(as_task, examples))
        same = await asyncio.to_thread(same_tasks, tasks)
        size = len(self._splits["train"])
        pairs: list[tuple[int, int]] = []
        for group in same.groups:
            train = [place for place in group if place < size]
            said = {words_of(tasks[place].text) for place in train}
            for place in group[len(train) :] if train else ():
                if words_of(tasks[place].text) in said:
                    continue
                other = (one for one in train if not is_permuted(tasks[one], tasks[place]))
                pairs += ((one, place - size) for one in itertools.islice(other, 1))
        return sorted(pairs, key=itemgetter(1))

    async def op_generated(self, name: str, first: int) -> str:
        """A page of the text of generated rows from `first` on; "" after the last one."""
        if name not in self._generated:
            self._generated[name] = await asyncio.to_thread(task_cache.text_of, name)
        return self._generated[name][first : first + PAGE_CHARACTERS]

    async def op_start_episode(self, episode: int, split: str, index: int, draw: int = 0) -> Json:
        example = self._example(split, index)
        suffix = f" {draw}" if draw else ""
        generators = Generators(f"{split} {task_id(example)}{suffix}")
        generators.use()
        environment = await self._call(self._loaded.new_episode, example)
        if not isinstance(environment, Environment):
            raise environment_error(
                f"new_episode must return an environment, got {kind_of(environment)}"
            )
        opened = Episode(environment, (split, index), example, generators)
        self._episodes[episode] = opened
        try:
            prompt = await self._call(environment.start_episode, example)
            opened.messages = messages_of(prompt, "start_episode", OPENING_ROLES)
            if not opened.messages:
                raise environment_error("start_episode returned no messages")
            declared = await self._call(environment.episode_tools, example)
            declared = listed(declared, "tools must be a list of functions or schemas")
            try:
                tools = tool_schemas(declared)
            except (TypeError, ValueError, NameError) as error:
                raise environment_error(f"tools: {cut(message_of(error), 300)}") from error
            opened.prompt_length = len(opened.messages)
            turns = await self._call(environment.max_episode_turns, example)
            if not isinstance(turns, int) or not 1 <= turns <= MAX_TURNS:
                must = f"max_episode_turns must return a whole number, 1 to {MAX_TURNS}"
                raise environment_error(f"{must}, got {shown(turns)}")
        except BaseException:
            await self.op_close_episode(episode)
            raise
        return {
            "task_id": task_id(example),
            "expected": expected_of(example),
            "group": None if example.group is None else str(example.group)[:GROUP_CHARACTERS],
            "messages": opened.messages,
            "max_turns": int(turns),
            "tools": tools,
            "is_agent": self._is_agent,
            "options": self._agent(episode).options.changed() if self._is_agent else {},
        }

    async def op_step_episode(
        self, episode: int, text: str | None, tool_calls: list[Json], usage: list[Any]
    ) -> Json:
        state = self._episode(episode)
        if self._is_agent:
            cast("Any", state.environment).usage = Usage(*usage)
        state.messages.append(assistant(text, tool_calls))
        step = state.environment.step_episode
        result = await self._call(step, state.example, list(state.messages), text)
        if not isinstance(result, EnvironmentStepResult):
            raise environment_error(
                f"step_episode must return an EnvironmentStepResult, got {kind_of(result)}"
            )
        final = result.final_response_text
        if final is not None:
            state.final_text = text_of(final, "step_episode's final_response_text")
        state.metadata.update(result.metadata)
        reward = None
        if result.reward is not None:
            reward = number_of(result.reward, "step_episode's reward")
            state.earned = (state.earned or 0.0) + reward
        if result.done:
            return {"done": True, "messages": [], "reward": reward}
        answers = messages_of(result.messages, "step_episode", ANSWER_ROLES)
        if not answers:
            why = "the model would have nothing to answer"
            raise environment_error(f"step_episode returned done=False without messages: {why}")
        state.messages += answers
        return {"done": False, "messages": answers, "reward": reward}

    async def op_next_call(self, episode: int) -> Json:
        """The agent's next request, or how the agent ended."""
        agent = self._agent(episode)
        call = await agent.next_call()
        if call is None:
            return {"ended": "max_turns" if agent.is_at_limit else "done"}
        messages = messages_of(call.messages, "a request", OPENING_ROLES)
        return {**vars(call), "messages": messages, "options": call.options.changed()}

    async def op_answer_call(
        self, episode: int, call: int, text: str, tool_calls: list[Json], usage: list[Any]
    ) -> None:
        turn = assistant(text, tool_calls)
        self._agent(episode).answer_call(call, turn, Usage(*usage))

    async def op_refuse_call(self, episode: int, call: int, code: str, what: str) -> None:
        self._agent(episode).refuse_call(call, code, what)

    def _agent(self, episode: int) -> Any:
        """The AgentEpisode, whose module only agents import."""
        return self._episode(episode).environment

    async def op_score_episode(self, episode: int, latency_ms: int, total_tokens: int) -> Json:
        state = self._episode(episode)
        try:
            result = await self._alone(state, latency_ms, total_tokens)
            return self._scored(state, result, ALONE)
        finally:
            await self.op_close_episode(episode)

    async def _alone(self, state: Episode, latency_ms: int, total_tokens: int) -> Any:
        finished = await self._finished(state, latency_ms, total_tokens)
        score = state.environment.score_episode
        # An agent's score comes from its `run`, which this event loop waits for.
        pool = None if self._is_agent else self._score_pool
        return await self._call(score, state.example, finished, pool=pool)

    async def op_score_group(self, episodes: list[tuple[int, int, int]]) -> list[Json]:
        """The scores of these episodes of one task: (episode, latency_ms, total_tokens) each."""
        finished: list[EnvironmentEpisode] = []
        async with AsyncExitStack() as closing:
            for number, *_ in episodes:
                closing.push_async_callback(self.op_close_episode, number)
            first = self._episode(episodes[0][0])
            for number, latency_ms, total_tokens in episodes:
                state = self._episode(number)
                if state.task != first.task:
                    raise environment_error("the episodes of a group must belong to one task")
                if self._is_agent:
                    result = await self._alone(state, latency_ms, total_tokens)
                    score_of(result, ALONE)
                    state.metadata.update(result.metadata)
                finished.append(await self._finished(state, latency_ms, total_tokens))
            # What the scorer draws does not depend on what the episodes drew.
            Generators(f"group {task_id(first.example)}").use()
            score = self._loaded.score_group
            results = await self._call(score, first.example, finished, pool=self._score_pool)
            must = f"score_group must return a list of {len(finished)} RewardResults"
            rewards = listed(results, f"{must}, one for each episode")
            if len(rewards) != len(finished):
                raise environment_error(f"{must}, one for each episode, got {len(rewards)}")
            states = [self._episode(number) for number, *_ in episodes]
            return [
                self._scored(state, result, must)
                for result, state in zip(rewards, states, strict=True)
            ]

    def _scored(self, state: Episode, result: Any, must: str) -> Json:
        score = score_of(result, must)
        if state.earned is not None:
            total = score["reward"] + state.earned
            score["reward"] = number_of(total, "the score with the rewards of the turns")
            score["metrics"]["turn_rewards"] = number_of(state.earned, "the rewards of the turns")
        agent: Any = state.environment
        return {**score, "refusals": agent.refusals if self._is_agent else {}}

    async def op_judge(self, split: str, index: int, answers: list[str]) -> list[int] | None:
        """How the environment's judge ranks these answers; None without a judge."""
        environment: Any = self._loaded
        if self._is_agent:
            environment = environment._agent
        attributes: dict[str, Any] = {}
        for holder in (*reversed(type(environment).__mro__), environment):
            attributes.update(vars(holder))
        values = list(attributes.values())
        values += [value.judge for value in values if isinstance(value, Rubric)]
        judges = [value for value in values if isinstance(value, JudgeRubric)]
        if not judges:
            return None
        question = self._example(split, index).input
        return await self._call(judges[0].ask, question, answers)

    async def _finished(
        self, state: Episode, latency_ms: int, total_tokens: int
    ) -> EnvironmentEpisode:
        text: Any = state.final_text
        if text is None:
            answer = ""
            for turn in state.messages[state.prompt_length :]:
                if turn["role"] == "assistant":
                    answer = turn["content"]
            normalize = state.environment.normalize_response_text
            text = await self._call(normalize, state.example, answer)
            # Only the gate answers None, and a scorer has to cope with that.
            if answer is not None or text is not None:
                text = text_of(text, "normalize_response_text")
        return EnvironmentEpisode(
            messages=tuple(state.messages),
            response_text=cast("Any", text),
            prompt_length=state.prompt_length,
            metadata=state.metadata,
            latency_ms=latency_ms,
            total_tokens=total_tokens,
        )

    async def op_close_episode(self, episode: int) -> None:
        state = self._episodes.pop(episode, None)
        if state is not None:
            state.generators.use()
        if state is None or type(state.environment).close_episode is Environment.close_episode:
            return
        await self._call(state.environment.close_episode)

    async def op_sft_completion(self, split: str, index: int) -> list[ChatMessage]:
        example = self._example(split, index)
        Generators(f"{split} {task_id(example)}").use()
        gold = await self._call(self._loaded.sft_completion, example)
        return messages_of(gold, "sft_completion", OPENING_ROLES)

    async def op_gold_turn(self, episode: int, call: int) -> ChatMessage | None:
        turn = await self._agent(episode).gold_turn(self._episode(episode).example, call)
        return None if turn is None else chat_message(turn, "gold_turn", ("assistant",))

    async def op_abandon(self, target: int) -> Json:
        """Cancel a call. `stuck`: it still runs, in a thread or ignoring its cancellation."""
        task = self._tasks.get(target)
        if task is None:
            return {"stuck": False, "method": "", "traceback": ""}
        method = self._methods.get(task, "")
        stack = self._stack(task)
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_TIMEOUT_S)
        stuck = not task.done() or task in self._threads
        return {"stuck": stuck, "method": method, "traceback": stack}

    # -- user code ---------------------------------------------------------------------------------

    async def _call(
        self,
        method: Callable[..., Any],
        *args: Any,
        pool: Executor | None = None,
        code: str = "environment_error",
    ) -> Any:
        """Run a method of the user's: a coroutine in this event loop, anything else in a thread of
        `pool`, by default any thread. Coroutines of an object with `main_thread` run on that one.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._methods[task] = method.__name__.lstrip("_")
        try:
            if inspect.iscoroutinefunction(method):
                owner = getattr(method, "__self__", None)
                if pool is self._main_thread or getattr(owner, "main_thread", False):
                    return await self._main_thread.result(method(*args))
                return await method(*args)
            if getattr(method, "__func__", None) in INSTANT_METHODS:
                return method(*args)
            value, error = await self._in_thread(
                pool or self._pool, task, functools.partial(method, *args)
            )
            if error is not None:
                raise error
            return await value if inspect.isawaitable(value) else value
        except EnvironmentFault:
            raise
        except DatasetError as error:
            raise EnvironmentFault("dataset_invalid", str(error)) from error
        except ArgumentsError as error:
            raise EnvironmentFault("invalid_argument", str(error)) from error
        except UnsupportedError as error:
            raise EnvironmentFault("environment_unsupported", str(error)) from error
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            raise self._fault(method.__name__, error, code) from error
        finally:
            del self._methods[task]

    async def _in_thread(
        self, pool: Executor, task: asyncio.Task[Any], function: Callable[[], Any]
    ) -> tuple[Any, BaseException | None]:
        def run() -> tuple[Any, BaseException | None]:
            self._threads[task] = threading.get_ident()
            try:
                return function(), None
            except BaseException as error:
                # Returned, not raised: a future refuses StopIteration, and SystemExit would end the
                # event loop.
                return None, error
            finally:
                del self._threads[task]

        # The context says whose generators the function draws from.
        in_context = functools.partial(contextvars.copy_context().run, run)
        return await asyncio.get_running_loop().run_in_executor(pool, in_context)

    def _fault(self, method: str, error: BaseException, code: str) -> EnvironmentFault:
        frame = error.__traceback__
        while frame is not None and not self._is_own(frame.tb_frame.f_code.co_filename):
            frame = frame.tb_next
        where = ""
        for place in traceback.extract_tb(frame):
            if self._is_own(place.filename):
                where = f" ({Path(place.filename).name} line {place.lineno})"
        called = "environment.py" if method == "_import_and_load" else method
        message = f"{called} raised {type(error).__name__}: {cut(message_of(error), 300)}{where}"
        if refused := confinement.refusal(error):
            code = refused[0]
            message = f"{message}; {refused[1]}"
        frames = frame
        # The frames of a syntax error are importlib's; it names the file and the line itself.
        if frame is None and not isinstance(error, SyntaxError):
            frames = error.__traceback__
        try:
            lines = traceback.format_exception(type(error), error, frames)
        except Exception:
            lines = ["its traceback could not be shown"]
        return EnvironmentFault(code, message, end_of("".join(lines)))

    def _stack(self, task: asyncio.Task[Any]) -> str:
        """The stack of a call from the user's first frame on, to report where it hangs."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        if (ident := self._threads.get(task)) in frames:
            places = traceback.extract_stack(frames[ident])
        else:
            # The place where a coroutine is suspended, then that of the one it awaits, and so on
            awaited: Any = task.get_coro()
            places = traceback.StackSummary()
            while inspect.iscoroutine(awaited) and awaited.cr_frame is not None:
                places += traceback.extract_stack(awaited.cr_frame, limit=1)
                awaited = awaited.cr_await
        for index, place in enumerate(places):
            if self._is_own(place.filename):
                return end_of("".join(traceback.format_list(places[index:])))
        return ""

    def _is_own(self, filename: str) -> bool:
        return Path(filename).is_relative_to(self.folder)

    def _example(self, split: str, index: int) -> TaskExample:
        examples = self._splits.get(split)
        if examples is None or not 0 <= index < len(examples):
            sizes = ", ".join(
                f"{name} has {len(rows)} tasks" for name, rows in self._splits.items()
            )
            raise environment_error(f"there is no task {index} in split {split!r}: {sizes}")
        return examples[index]

    def _episode(self, episode: int) -> Episode:
        if episode not in self._episodes:
            raise environment_error(f"episode {episode} is not open")
        state = self._episodes[episode]
        state.generators.use()
        return state


def _served(agent: EnvironmentAgent, call: Callable[..., Coroutine[Any, Any, Any]]) -> Environment:
    # Imported here: a web server takes time to import, and only agents need it.
    from environments.agents.endpoint import AgentEpisode  # noqa: PLC0415
    from environments.agents.server import Endpoint  # noqa: PLC0415

    bounds = needs.own
    if bounds is not None and not bounds.needs.endpoint:
        what = "this environment calls the model's API, and its environment.toml"
        raise environment_invalid(f"{what} does not say endpoint = true")
    try:
        port = bounds.port if bounds else 0
        return AgentEpisode(agent, Endpoint(asyncio.get_running_loop(), port), call)
    except OSError as error:
        what = f"an EnvironmentAgent cannot be served here ({message_of(error)})"
        needed = "a machine that allows a network namespace with loopback, or Linux 6.7"
        raise environment_invalid(f"{what}: it needs {needed} with Landlock") from error


# -- the process -----------------------------------------------------------------------------------


def _line(message: Json) -> str:
    """The reply as JSON, or a fault with the same number if that is impossible."""
    try:
        line = json.dumps(message, separators=(",", ":"), allow_nan=False)
        if len(line) <= MAX_REPLY_BYTES:
            return line
        most = f"more than the {MAX_REPLY_BYTES:,} of one call"
        what = f"it returned {len(line):,} bytes of text, {most}"
    except Exception as error:
        what = f"a message holds something that JSON cannot represent: {message_of(error)}"
    return json.dumps({"number": message["number"], "fault": ["environment_error", what, "", {}]})


async def _serve(folder: Path, main_thread: MainThread, requests: int, replies: int) -> None:
    """Serve until the parent is gone, and then end: the warden ends what this process started."""
    loop = asyncio.get_running_loop()
    replies_pipe = os.fdopen(replies, "wb", buffering=0)
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, replies_pipe)
    child = Child(folder, main_thread, lambda m: transport.write(_line(m).encode() + b"\n"))
    reader = asyncio.StreamReader(limit=sys.maxsize)
    requests_pipe = os.fdopen(requests, "rb", buffering=0)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests_pipe)
    try:
        async for line in reader:
            child.receive(json.loads(line))
    finally:
        os._exit(1)


def main() -> Never:
    bounds = Bounds.load(sys.argv[1])
    requests, replies = map(int, sys.argv[2:])
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    confinement.explain_refusals(bounds)
    needs.own = bounds
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.path.insert(0, bounds.folder)
    switch_global_generators()
    if shift := os.environ.get(SHIFT_VARIABLE):
        shift_clock(int(shift))
    main_thread = MainThread()
    serving = _serve(Path(bounds.folder), main_thread, requests, replies)
    threading.Thread(target=_run_or_exit, args=(serving,), daemon=True).start()
    main_thread.serve()


def _run_or_exit(serving: Coroutine[Any, Any, None]) -> None:
    """Run the event loop. The process ends if it fails."""
    try:
        asyncio.run(serving)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
