"""EnvironmentHost: runs environment code in a process of its own, called from asyncio.

The child (`environments.process.child`) loads the folder's environment.py and answers JSON lines.
It gets a minimal environment with only the named secrets, no inherited descriptors, its own process
group and a sandbox (`environments.sandbox.confinement`). It dies with its parent, and so does every
process that it started (`environments.sandbox.warden`).

This side enforces the deadline of every call. A child with a call that does not end is retired: it
serves its open episodes until they are closed, and new episodes open in a fresh child. If a child
stops answering or dies, its pending calls fail with `environment_error`, and the next `open` starts
another child."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from environments import task_cache
from environments.agents.calls import NO_OPTIONS, NO_USAGE, AgentCall, CallOptions, Usage
from environments.base import ChatMessage, Json
from environments.faults import EnvironmentFault
from environments.process import requirements
from environments.process.child_process import ChildProcess, UnansweredError
from environments.sandbox import scratch
from environments.sandbox.needs import FILE as NEEDS_FILE
from environments.sandbox.needs import READABLE_VARIABLE, WARDEN, Bounds, Needs
from environments.settings import FILE as SETTINGS_FILE
from environments.settings import LOCAL_OWNER, EnvironmentSettings, load_settings, state_directory
from environments.untrusted_text import Redactor

ABANDON_TIMEOUT_S = 5.0
"""A child that does not confirm within this time that it dropped a call is frozen, and killed."""
PLACE_POLL_S = 0.1
MOST_AGENTS = 128  # agents that run at once in one environment
THREADS_OF_AN_AGENT = 17
"""Its own; and for each of 8 requests at once, one that serves it and one of its client."""
MOST_CALL_S = 86_400.0  # no environment.toml makes a call longer
FROZEN = "its process answered no call any more (does code hold the interpreter?)"
STOPPED = "the environment host was stopped"


@dataclass(frozen=True)
class Opening:
    """A started episode. Later calls pass its handle, `episode`."""

    episode: int
    task_id: str
    messages: list[ChatMessage]
    max_turns: int
    tools: list[Json] = field(default_factory=list[Json])
    """OpenAI function schemas of what the model may call."""
    expected: str | None = None  # the beginning of the gold answer, if the task has one as text
    group: str | None = None  # what the task declares that it hangs together with
    options: CallOptions = NO_OPTIONS  # what an agent's first request asks of its answer
    is_agent: bool = False
    """Whether this is the first request of an agent, call 0: `next_call` has the others, and
    `answer_call` answers them."""

    @property
    def call(self) -> AgentCall:
        return AgentCall(0, None, self.messages, self.tools, self.options)


@dataclass(frozen=True)
class Step:
    """The environment's answer to a model turn; `messages` is empty when `done`."""

    done: bool
    messages: list[ChatMessage]
    reward: float | None = None  # what the turn earned, where the environment rewards turns


@dataclass(frozen=True)
class Ended:
    """An episode that waits for its score, and the time and the tokens that it took."""

    episode: int
    latency_ms: int = 0
    total_tokens: int = 0


@dataclass(frozen=True)
class Score:
    """The reward of a finished episode. It and the `metrics` are finite numbers."""

    reward: float
    success: bool
    metrics: dict[str, float]
    reason: str | None
    error: str | None
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """How often the API refused something to an agent or left it out, by what it was."""


@dataclass
class _Episode:
    child: ChildProcess | None = None
    calls: int = 1  # the requests of an agent that have no answer
    since: float = 0.0  # when the last one was answered, by the clock of the event loop


@dataclass(eq=False)
class EnvironmentHost:
    """Episodes of one environment folder. No method blocks the event loop; each may raise
    EnvironmentFault.

    Call `open`, then `step` for every model turn (also for the last one), then `score`, which
    closes the episode, or `score_group` for several. After a fault call `close`. At most
    `concurrency` calls run at once; waiting for a free place does not count towards `timeout_s`.
    Start the host in a thread that outlives it: the child dies with the thread that made it."""

    folder: Path
    _known_as: str
    _python: Path
    _args: Mapping[str, Any]
    _secrets: Mapping[str, str]
    _variables: Mapping[str, str]
    _concurrency: int
    timeout_s: float  # the seconds of one call, with what environment.toml says of them
    _start_timeout_s: float
    _scratch: Path
    _scratch_lock: ExitStack
    splits: dict[str, int] = field(default_factory=dict[str, int])
    """The number of tasks of each split. It is 0 for eval if there is no eval split."""
    sandbox: dict[str, str] = field(default_factory=dict[str, str])
    """{protection: "" if it works, else why it does not}, as the warden found them."""
    scores_groups: bool = False  # whether the environment defines `score_group`
    plays_gold: bool = False
    """Whether it is an agent that defines `gold_turn`: `gold` then has nothing."""

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self._generated: list[str] = []
        self._redactor = Redactor(self._secrets.values())
        self._places = asyncio.Semaphore(self._concurrency)
        self._score_places = asyncio.Semaphore(self._concurrency)
        self._children: list[ChildProcess] = []
        self._episodes: dict[int, _Episode] = {}
        self._numbers = itertools.count(1)
        self._rooms = asyncio.Semaphore(sys.maxsize)
        self._starting = asyncio.Lock()
        self._stopped = False

    @classmethod
    async def start(
        cls,
        folder: Path,
        *,
        known_as: str = "",
        args: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        concurrency: int = 32,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        place_timeout_s: float = 10.0,
        install_timeout_s: float | None = None,
        on_progress: requirements.Listener | None = None,
    ) -> Self:
        """Load the environment with `load_environment(**args)`, after installing its packages.

        `known_as` is its name in settings.toml (environments.settings.identity). `variables` are
        variables of its process that are no secrets.
        `place_timeout_s` bounds the wait while as many environments run as settings.toml allows.
        `install_timeout_s` bounds the wait for these (environments.process.requirements); None
        waits as long as it takes."""
        python = await requirements.interpreter(
            folder, timeout_s=install_timeout_s, on_progress=on_progress
        )
        place = await _place(known_as, place_timeout_s)
        host = cls(
            folder, known_as, python, dict(args or {}), secrets or {}, variables or {},
            concurrency, timeout_s, start_timeout_s, *place,
        )  # fmt: skip
        try:
            if held := requirements.hold(python):
                host._scratch_lock.enter_context(held)
            await host._live_child()
        except BaseException:
            await host.stop()
            raise
        return host

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- episodes ----------------------------------------------------------------------------------

    async def open(self, split: str, index: int, draw: int = 0) -> Opening:
        """Begin an episode of task `index` of `split`. While MOST_AGENTS agents run, another one
        waits until an episode is closed. `draw` chooses its random numbers: training uses 0.
        """
        await self._rooms.acquire()
        episode = next(self._numbers)
        state = self._episodes[episode] = _Episode()
        try:
            async with self._places:
                child = state.child = await self._live_child()
                child.episodes.add(episode)
                task = {"episode": episode, "split": split, "index": index, "draw": draw}
                return Opening(episode, **await self._call(child, "start_episode", **task))
        except BaseException:
            self._forget(episode)
            raise

    async def step(
        self,
        episode: int,
        assistant_text: str | None,
        tool_calls: Sequence[Json] = (),
        usage: Usage = NO_USAGE,
    ) -> Step:
        """Give the episode one model turn. Only the gate passes None; models write text.
        `tool_calls` are in OpenAI's form. An agent learns the `usage`.
        """
        async with self._places:
            calls = list(tool_calls)
            turn = {"episode": episode, "text": assistant_text, "tool_calls": calls}
            facts = {**turn, "usage": astuple(usage)}
            return Step(**await self._call(self._home(episode), "step_episode", **facts))

    async def next_call(self, episode: int) -> AgentCall | Literal["done", "max_turns"]:
        """The next request of an agent, or how it ended. `timeout_s` is the time that it may take
        while none of its requests waits for an answer.
        """
        state = self._episodes[episode]
        clock = asyncio.get_running_loop().time

        def since() -> float:
            return clock() if state.calls else state.since

        # Its process works while the model answers: a place is not held for so long.
        value = await self._call(self._home(episode), "next_call", since, episode=episode)
        if "ended" in value:
            return value["ended"]
        state.calls += 1
        return AgentCall(**value)

    async def answer_call(
        self,
        episode: int,
        call: int,
        assistant_text: str,
        tool_calls: Sequence[Json] = (),
        usage: Usage = NO_USAGE,
    ) -> None:
        turn = {"text": assistant_text, "tool_calls": list(tool_calls), "usage": astuple(usage)}
        await self._settle(episode, "answer_call", call=call, **turn)

    async def refuse_call(self, episode: int, call: int, code: str, what: str) -> None:
        """Answer a request of an agent with an error of status 400."""
        await self._settle(episode, "refuse_call", call=call, code=code, what=what)

    async def _settle(self, episode: int, op: str, **fields: Any) -> None:
        await self._call(self._home(episode), op, episode=episode, **fields)
        state = self._episodes[episode]
        state.calls -= 1
        state.since = asyncio.get_running_loop().time()

    async def score(self, episode: int, *, latency_ms: int = 0, total_tokens: int = 0) -> Score:
        """Score the conversation so far and close the episode, also if scoring fails."""
        facts = {"episode": episode, "latency_ms": latency_ms, "total_tokens": total_tokens}
        try:
            async with self._score_places, self._places:
                return Score(**await self._call(self._home(episode), "score_episode", **facts))
        finally:
            self._forget(episode)

    async def score_group(self, ended: Sequence[Ended]) -> list[Score]:
        """Score these of one task together, in their order, and close them, also after a fault."""
        numbers = [item.episode for item in ended]
        child = self._home(numbers[0])
        if any(self._home(number) is not child for number in numbers):
            what = "a call that did not end made the environment start again"
            why = "score_group needs all episodes of the group in one process"
            raise EnvironmentFault("environment_error", f"{what}, and {why}")
        facts = [(item.episode, item.latency_ms, item.total_tokens) for item in ended]
        try:
            async with self._score_places, self._places:
                values = await self._call(child, "score_group", episodes=facts)
        finally:
            for number in numbers:
                self._forget(number)
        if len(values) != len(ended):
            raise child.end_as_forger()
        return [Score(**value) for value in values]

    async def judge(self, split: str, index: int, answers: Sequence[str]) -> list[int] | None:
        """The rank of each answer to a task, 0 for the best, when the environment's judge sees them
        in this order. None if it has no judge.
        """
        async with self._places:
            child = await self._live_child()
            request = {"split": split, "index": index, "answers": list(answers)}
            ranks = await self._call(child, "judge", **request)
        if ranks is not None and len(ranks) != len(answers):
            raise child.end_as_forger()
        return ranks

    async def close(self, episode: int) -> None:
        """Abandon an episode. Does nothing if it is closed or its process is gone."""
        state = self._episodes.get(episode)
        try:
            if state is not None and state.child is not None and state.child.alive:
                await self._call(state.child, "close_episode", episode=episode)
        finally:
            self._forget(episode)

    async def gold(self, split: str, index: int) -> list[ChatMessage]:
        """The gold messages that follow the prompt of task `index` (`sft_completion`)."""
        async with self._places:
            child = await self._live_child()
            return await self._call(child, "sft_completion", split=split, index=index)

    async def gold_turn(self, episode: int, call: int) -> ChatMessage | None:
        """The gold answer to a request of an agent; None if it has none."""
        async with self._places:
            return await self._call(self._home(episode), "gold_turn", episode=episode, call=call)

    async def tasks(self, split: str) -> list[tuple[str, str]]:
        """(task id, digest) of every task of a split, in order. The digest is of the question's
        words and the gold answer; without one, of the whole row but its id.
        """
        child = await self._live_child()
        tasks: list[tuple[str, str]] = []
        while len(tasks) < self.splits[split]:
            page = await self._call(child, "list_tasks", split=split, first=len(tasks))
            tasks += page
            if not page or len(tasks) > self.splits[split]:
                raise child.end_as_forger()
        return tasks

    async def reworded(self) -> list[tuple[int, int]]:
        """(place in train, place in eval) of eval tasks that are a train task in other words."""
        child = await self._live_child()
        pairs: list[tuple[int, int]] = []
        for train, held_out in await self._call(child, "reworded"):
            if not (0 <= train < self.splits["train"] and 0 <= held_out < self.splits["eval"]):
                raise child.end_as_forger()
            pairs.append((train, held_out))
        return pairs

    async def generated(self) -> dict[str, str]:
        """What loading generated that the version does not keep, by name, for `task_cache.keep`.
        Rows that hold a secret are left out.
        """
        child = await self._live_child()
        results: dict[str, str] = {}
        for name in self._generated:
            text = ""
            while page := await self._call(child, "generated", name=name, first=len(text)):
                text += page
                if len(text) > task_cache.MAX_BYTES:
                    raise child.end_as_forger()
            if text and self._redactor.text(text) == text:
                results[name] = text
        return results

    async def stop(self) -> None:
        """End every child and what it started. Pending calls fail.

        The host gives its place back also if this call is cancelled."""
        self._stopped = True
        for child in self._children:
            child.kill(STOPPED)

        async def leave() -> None:
            try:
                await asyncio.gather(*(child.gone.wait() for child in self._children))
                await asyncio.to_thread(scratch.remove, self._scratch)
            finally:
                self._scratch_lock.close()

        self._leaving = asyncio.create_task(leave())
        # A cancelled scope of anyio cancels every later await of its task, too.
        await asyncio.shield(self._leaving)

    # -- children ----------------------------------------------------------------------------------

    async def _live_child(self) -> ChildProcess:
        async with self._starting:
            current = self._children[-1] if self._children else None
            if current is not None and current.alive and not current.retiring:
                return current
            if self._stopped:
                raise EnvironmentFault("environment_error", STOPPED)
            child = await self._start_process(self._python)
            self._children = [*(old for old in self._children if old.alive), child]
            try:
                if self._stopped:
                    raise EnvironmentFault("environment_error", STOPPED)
                start = {"args": self._args, "secrets": list(self._secrets)}
                loaded = await child.call("load", self._start_timeout_s, **start)
            except BaseException as error:
                child.kill("it did not load")
                await child.gone.wait()
                if isinstance(error, UnansweredError):
                    what = f"loading environment.py took longer than {self._start_timeout_s:g} s"
                    error = EnvironmentFault("environment_timeout", what, child.stderr_tail)
                elif isinstance(error, EnvironmentFault) and error.code == "environment_error":
                    what = f"while it loaded, {error.what}"
                    error = error.reworded(what, "environment_invalid")
                raise error from None
            if not self.splits:
                most = min(self._concurrency, loaded["max_score_concurrency"])
                self._score_places = asyncio.Semaphore(most)
            self.splits = loaded["splits"]
            self.scores_groups = loaded["scores_groups"]
            self.plays_gold = loaded["plays_gold"]
            self._generated = loaded["generated"]
            self.sandbox = child.sandbox
            for surplus in self._children[:-2]:
                surplus.kill("its process had calls that did not end, and newer ones replaced it")
            return child

    async def _start_process(self, interpreter: Path) -> ChildProcess:
        """Start `interpreter` in the folder's sandbox. No user code has run when this returns."""
        needs, operator = _granted(self.folder, self._known_as)
        self.timeout_s = max(self.timeout_s, min(needs.call_timeout_s, MOST_CALL_S))
        threads = self._concurrency
        if needs.endpoint:
            threads += THREADS_OF_AN_AGENT * MOST_AGENTS
            if not self.splits:
                self._rooms = asyncio.Semaphore(MOST_AGENTS)
        port = 0
        if needs.endpoint:
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                port = unused.getsockname()[1]
        named = os.environ.get(READABLE_VARIABLE, "").split(os.pathsep)
        bounds = Bounds(
            folder=str(self.folder),
            scratch=str(self._scratch),
            hidden=str(state_directory()),
            needs=needs,
            without_file_protection=operator.without_file_protection,
            threads=threads,
            port=port,
            readable=(*filter(None, named), *requirements.prefix(interpreter)),
        )
        # With -P and PYTHONPATH `environments` is this package, whatever the folder holds.
        command = [*WARDEN, str(os.getpid()), bounds.dump(), str(interpreter)]
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: ChildProcess(self._redactor, needs.secrets),
            *command,
            cwd=self.folder if self.folder.is_dir() else self._scratch,
            env=self._child_environment(),
            start_new_session=True,
        )
        return child

    def _child_environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self._scratch),
            "TMPDIR": str(self._scratch),
            "USER": "environment",  # its user id may have no name
            "LANG": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",  # git stops at an /etc/gitconfig that it may not read
            "PYTHONPATH": str(requirements.contract_path(self._python)),
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._variables,
            **self._secrets,
        }

    # -- calls -------------------------------------------------------------------------------------

    async def _call(
        self,
        child: ChildProcess,
        op: str,
        since: Callable[[], float] | None = None,
        /,
        **fields: Any,
    ) -> Any:
        timeout_s = self.timeout_s
        try:
            return await child.call(op, timeout_s, since, **fields)
        except UnansweredError as unanswered:
            # They share one interpreter, so each of them slows the others down.
            others = child.calls_under_way
            dropped = await self._abandon(child, unanswered.number)
            what = f"{dropped.get('method') or op} took longer than {timeout_s:g} s"
            if op == "next_call":
                what = f"the agent neither asked the model nor ended within {timeout_s:g} s"
            if others:
                what += f", with {others} more calls under way in its process"
            raise EnvironmentFault("environment_timeout", what, dropped["traceback"]) from None
        finally:
            child.end_if_done()

    async def _abandon(self, child: ChildProcess, number: int) -> Json:
        """Make the child drop a call. Retire it if the call still runs; kill it if it is frozen."""
        try:
            answer = await child.call("abandon", ABANDON_TIMEOUT_S, target=number)
        except UnansweredError:
            await child.kill_with_evidence(FROZEN)
            return {"traceback": child.stderr_tail}
        except EnvironmentFault as fault:
            return {"traceback": fault.traceback}
        child.retiring = child.retiring or answer["stuck"]
        return answer

    def _home(self, episode: int) -> ChildProcess:
        state = self._episodes.get(episode)
        if state is None or state.child is None:
            raise EnvironmentFault("environment_error", f"episode {episode} is not open")
        return state.child

    def _forget(self, episode: int) -> None:
        state = self._episodes.pop(episode, None)
        if state is None:
            return
        self._rooms.release()
        if state.child is not None:
            state.child.episodes.discard(episode)
            state.child.end_if_done()


def _granted(folder: Path, known_as: str) -> tuple[Needs, EnvironmentSettings]:
    operator = _allowed()
    try:
        needs = Needs.from_folder(folder).within(operator)
    except ValueError as error:
        raise EnvironmentFault("environment_invalid", str(error), is_foreign=True) from error
    if needs.network and not operator.grants_network(known_as):
        what = f"its {NEEDS_FILE} asks for network, which {SETTINGS_FILE} does not grant"
        raise EnvironmentFault("network_not_granted", f"{what} to {known_as!r}")
    return needs, operator


def _allowed() -> EnvironmentSettings:
    try:
        return load_settings().environments
    except ValueError as error:
        what = f"the settings of this server cannot be used: {error}"
        raise EnvironmentFault("invalid_argument", what) from error


async def _place(known_as: str, timeout_s: float) -> tuple[Path, ExitStack]:
    """A scratch folder, which is also a place among the environments that may run at once."""
    operator = _allowed()
    owner = known_as.rpartition("/")[0] or LOCAL_OWNER
    most_of_owner = operator.most_of(owner)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return scratch.scratch_folder(owner, operator.most_at_once, most_of_owner)
        except scratch.BusyError as busy:
            if time.monotonic() > deadline:
                what = f"{busy}; waited {timeout_s:g} s"
                raise EnvironmentFault("environments_busy", what) from busy
        await asyncio.sleep(PLACE_POLL_S)
