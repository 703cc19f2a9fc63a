"""EnvironmentHost: environment code in a process of its own, called from asyncio.

The child (`environments.process.child`) loads the folder's environment.py and answers JSON lines.
It gets a minimal environment with the named secrets only, no inherited descriptors, its own process
group, the walls of `environments.process.sandbox`, and dies with its parent, as all does that it
started (`environments.process.warden`).

Every call has a deadline that is kept on this side. A child with a call that will not end is
retired: it serves the episodes that are open in it until they are closed, while new ones open in a
fresh child. A child that no longer answers at all, or that died, fails what was under way in it
with `environment_error`; the next `open` starts another."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from environments.base import ChatMessage
from environments.process import requirements
from environments.process.faults import EnvironmentFault
from environments.process.redaction import Redactor
from environments.process.sandbox import READABLE_VARIABLE, Bounds, Needs
from environments.process.warden import MEMORY_EXIT_CODE, SWEEP_TIMEOUT_S

ABANDON_TIMEOUT_S = 5.0
"""How long a child may take to confirm that it gave a call up; after that it counts as frozen and
is killed.
"""
METHODS = {
    "open": "start_episode",
    "step": "step_episode",
    "score": "score_episode",
    "close": "close_episode",
    "gold": "sft_completion",
    "tasks": "listing the tasks",
}
"""What a request calls, where the child cannot say more precisely."""
STDERR_TAIL_CHARACTERS = 4000
SCRATCH_PREFIX = "flash-environment-"
SCRATCH_MIN_AGE_S = 60.0
"""A younger scratch folder may be about to be locked by the process that made it."""
MAX_LINE_BYTES = 16 << 20
"""Of a reply. Longer ones do not come from environments.process.child; they could fill this
process's memory.
"""
MAX_PRINTED_BYTES = 8 << 20
"""What one child may print into our log; of what follows only the end is kept, as evidence."""


@dataclass(frozen=True)
class Opening:
    """A started episode. `episode` is the handle of the calls that follow."""

    episode: int
    task_id: str
    messages: list[ChatMessage]
    max_turns: int


@dataclass(frozen=True)
class Step:
    """The environment's answer to a model turn; `messages` is empty when `done`."""

    done: bool
    messages: list[ChatMessage]


@dataclass(frozen=True)
class Score:
    """A finished episode's reward, always finite. `metrics` holds the components that are finite
    numbers.
    """

    reward: float
    success: bool
    metrics: dict[str, float]
    reason: str | None
    error: str | None


class EnvironmentHost:
    """Episodes of one environment folder. Every method may raise EnvironmentFault; none blocks the
    event loop.

    An episode: `open`, then for every model turn `step` (the last one too, cut short or not), then
    `score`, which also closes it; after a fault `close`. `concurrency` bounds the calls under way;
    waiting for a place does not count towards `timeout_s`. Start it in a thread that outlives it:
    the child dies with the thread that made it."""

    def __init__(
        self,
        folder: Path,
        *,
        args: Mapping[str, Any],
        secrets: Mapping[str, str],
        python: Path,
        concurrency: int,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.folder, self.timeout_s, self.start_timeout_s = (
            folder.absolute(),
            timeout_s,
            start_timeout_s,
        )
        self.splits: dict[str, int] = {}
        """Number of tasks of each split; eval is 0 where there is none."""
        self.walls: dict[str, str] = {}
        """{wall: why it does not stand}, as sandbox.confine found; empty strings for those that
        stand.
        """
        self._args, self._secrets, self._python = dict(args), dict(secrets), python
        self._redactor = Redactor(secrets.values())
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._score_places = asyncio.Semaphore(concurrency)
        self._children: list[_Child] = []
        self._homes: dict[int, _Child] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._stopped = False
        self._scratch, self._scratch_lock = _scratch_folder()

    @classmethod
    async def start(
        cls,
        folder: Path,
        *,
        args: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        concurrency: int = 32,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        install_timeout_s: float | None = None,
        on_progress: requirements.Listener | None = None,
    ) -> Self:
        """Load the folder's environment with `load_environment(**args)`, once the packages that it
        asks for are there.

        `install_timeout_s` bounds the wait for these (environments.process.requirements), None is
        as long as it takes."""
        python = await requirements.interpreter(
            folder, timeout_s=install_timeout_s, on_progress=on_progress
        )
        host = cls(
            folder,
            args=args or {},
            secrets=secrets or {},
            python=python,
            concurrency=concurrency,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )
        try:
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

    async def open(self, split: str, index: int) -> Opening:
        """Begin an episode of task `index` of `split`."""
        async with self._places:
            child = await self._live_child()
            episode = next(self._numbers)
            child.episodes.add(episode)
            self._homes[episode] = child
            try:
                value = await self._call(child, "open", episode=episode, split=split, index=index)
            except BaseException:
                self._forget(episode)
                raise
        return Opening(episode, value["task_id"], value["messages"], value["max_turns"])

    async def step(self, episode: int, assistant_text: str | None) -> Step:
        """Give the episode one model turn. Models write text; None is for the gate."""
        async with self._places:
            value = await self._call(
                self._home(episode), "step", episode=episode, text=assistant_text
            )
        return Step(value["done"], value["messages"])

    async def score(self, episode: int, *, latency_ms: int = 0, total_tokens: int = 0) -> Score:
        """Score the conversation so far and close the episode, whether or not that worked."""
        try:
            async with self._score_places, self._places:
                value = await self._call(
                    self._home(episode),
                    "score",
                    episode=episode,
                    latency_ms=latency_ms,
                    total_tokens=total_tokens,
                )
        finally:
            self._forget(episode)
        return Score(**value)

    async def close(self, episode: int) -> None:
        """Give an episode up. Closing one that is closed, or whose process is gone, does nothing."""
        child = self._homes.get(episode)
        try:
            if child is not None and child.alive:
                await self._call(child, "close", episode=episode)
        finally:
            self._forget(episode)

    async def gold(self, split: str, index: int) -> list[ChatMessage]:
        """The gold messages that follow the prompt of task `index` (`sft_completion`)."""
        async with self._places:
            return await self._call(await self._live_child(), "gold", split=split, index=index)

    async def tasks(self, split: str) -> list[tuple[str, str]]:
        """(task id, digest of what the model is asked) of every task of a split, in order."""
        child, tasks = await self._live_child(), list[tuple[str, str]]()
        while page := await self._call(child, "tasks", split=split, first=len(tasks)):
            tasks += map(tuple, page)
            if len(tasks) >= self.splits[split]:
                break
        return tasks

    async def stop(self) -> None:
        """End every child and what it started; calls under way fail."""
        self._stopped = True
        for child in self._children:
            child.kill("the environment host was stopped")
        await asyncio.gather(*(child.gone.wait() for child in self._children))
        await asyncio.to_thread(_remove, self._scratch)
        self._scratch_lock.close()

    # -- children ----------------------------------------------------------------------------------

    async def _live_child(self) -> _Child:
        async with self._starting:
            current = self._children[-1] if self._children else None
            if current is not None and current.alive and not current.retiring:
                return current
            if self._stopped:
                raise EnvironmentFault("environment_error", "the environment host was stopped")
            child = await self._spawn()
            for surplus in self._children[:-2]:
                surplus.kill("its process had calls that did not end, and newer ones replaced it")
            return child

    async def _spawn(self) -> _Child:
        child = await self._start_process(self._python)
        self._children = [*(old for old in self._children if old.alive), child]
        try:
            if self._stopped:
                raise EnvironmentFault("environment_error", "the environment host was stopped")
            loaded = await child.call("load", self.start_timeout_s, args=self._args)
        except BaseException as error:
            child.kill("it did not load")
            await child.gone.wait()
            raise self._load_fault(error, child) from None
        if not self.splits:
            self._score_places = asyncio.Semaphore(
                min(self._concurrency, loaded["max_score_concurrency"])
            )
        self.splits, self.walls = loaded["splits"], loaded["walls"]
        return child

    async def _start_process(self, interpreter: Path) -> _Child:
        """Start `interpreter` confined to the bounds of the folder; nothing of the user's has run
        when this returns.
        """
        try:
            needs = Needs.of(self.folder)
        except ValueError as error:
            raise EnvironmentFault("environment_invalid", str(error)) from error
        bounds = Bounds(
            folder=str(self.folder),
            scratch=str(self._scratch),
            hidden=str(_state_directory()),
            needs=needs.asked(),
            threads=self._concurrency,
            readable=(
                *filter(None, os.environ.get(READABLE_VARIABLE, "").split(os.pathsep)),
                *requirements.prefix(interpreter),
            ),
        )
        # -P and PYTHONPATH: `environments` is this package, whatever the environment's folder
        # holds.
        command = (
            sys.executable,
            "-P",
            "-m",
            "environments.process.warden",
            str(os.getpid()),
            bounds.dump(),
            str(interpreter),
        )
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Child(self._redactor),
            *command,
            cwd=self.folder if self.folder.is_dir() else self._scratch,
            env=self._child_environment(),
            start_new_session=True,
        )
        return child

    def _load_fault(self, error: BaseException, child: _Child) -> BaseException:
        if isinstance(error, _UnansweredError):
            what = f"loading environment.py took longer than {self.start_timeout_s:g} s"
            return EnvironmentFault("environment_timeout", what, child.stderr_tail)
        if isinstance(error, EnvironmentFault) and error.code == "environment_error":
            return EnvironmentFault(
                "environment_invalid", f"while it loaded, {error.what}", error.traceback
            )
        return error

    def _child_environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self._scratch),
            "TMPDIR": str(self._scratch),
            "USER": "environment",  # it may run as a user that no list knows
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(requirements.contract_path(self._python)),
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._secrets,
        }

    # -- calls -------------------------------------------------------------------------------------

    async def _call(self, child: _Child, op: str, **fields: Any) -> Any:
        try:
            return await child.call(op, self.timeout_s, **fields)
        except _UnansweredError as unanswered:
            others = (
                child.calls_under_way
            )  # they share one interpreter, and each makes the others wait
            given_up = await self._give_up(child, unanswered.number)
            what = f"{given_up.get('method') or METHODS[op]} took longer than {self.timeout_s:g} s"
            what += f", with {others} more calls under way in its process" if others else ""
            raise EnvironmentFault("environment_timeout", what, given_up["traceback"]) from None
        finally:
            child.end_if_done()

    async def _give_up(self, child: _Child, number: int) -> dict[str, Any]:
        """Make the child drop a call; retire it where the call goes on all the same, kill it where
        it is frozen.
        """
        try:
            answer = await child.call("abandon", ABANDON_TIMEOUT_S, target=number)
        except _UnansweredError:
            await child.kill_with_evidence(
                "its process answered no call any more (does code hold the interpreter?)"
            )
            return {"traceback": child.stderr_tail}
        except EnvironmentFault as fault:
            return {"traceback": fault.traceback}
        child.retiring = child.retiring or answer["stuck"]
        return answer

    def _home(self, episode: int) -> _Child:
        if episode not in self._homes:
            raise EnvironmentFault("environment_error", f"episode {episode} is not open")
        return self._homes[episode]

    def _forget(self, episode: int) -> None:
        child = self._homes.pop(episode, None)
        if child is not None:
            child.episodes.discard(episode)
            child.end_if_done()


class _UnansweredError(Exception):
    """Call `number` passed its deadline."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Child(asyncio.SubprocessProtocol):
    """One process: requests out on its stdin, replies in on its stdout, what user code prints in on
    its stderr.
    """

    def __init__(self, redactor: Redactor) -> None:
        self.alive, self.retiring = True, False
        self.episodes: set[int] = set()
        self.gone = asyncio.Event()
        self._ended_because, self._death_code = "", "environment_error"
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._rest = bytearray()
        self._redactor = redactor
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unprinted = self.stderr_tail = ""
        self._printed_bytes = 0

    # -- calls -------------------------------------------------------------------------------------

    async def call(self, op: str, timeout_s: float, **fields: Any) -> Any:
        """The child's answer; _UnansweredError after `timeout_s`, EnvironmentFault for a failure."""
        if not self.alive:
            raise self._death()
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        self._send({"number": number, "op": op, **fields})
        try:
            done, _ = await asyncio.wait((future,), timeout=timeout_s)
        except asyncio.CancelledError:
            self._send({"number": 0, "op": "abandon", "target": number})
            raise
        finally:
            del self._pending[number]
        if not done:
            raise _UnansweredError(number)
        return future.result()

    @property
    def calls_under_way(self) -> int:
        return len(self._pending)

    def end_if_done(self) -> None:
        """End a retired process that has no episode left."""
        if self.retiring and self.alive and not self.episodes and not self._pending:
            self.kill("its process had a call that did not end")

    def kill(self, because: str) -> None:
        if self.alive:
            self.alive, self._ended_because = False, because
            self._fail_pending()
        if not self.gone.is_set():
            self._end_process()

    async def kill_with_evidence(self, because: str) -> None:
        """Kill a frozen process, once it wrote to stderr where each of its threads is."""
        self.alive, self._ended_because = False, because
        with contextlib.suppress(ProcessLookupError):
            known = self.stderr_tail, self._unprinted
            self._transport.send_signal(signal.SIGUSR1)
            for _ in range(10):  # on a busy machine it may come late
                await asyncio.sleep(0.2)
                if (self.stderr_tail, self._unprinted) != known or self.gone.is_set():
                    break
        self._fail_pending()
        self._end_process()

    def _send(self, request: dict[str, Any]) -> None:
        if self.alive:
            pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
            pipe.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")

    def _fail_pending(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._death())

    def _death(self) -> EnvironmentFault:
        self._print("", is_end=True)
        return EnvironmentFault(
            self._death_code,
            f"the environment's process ended: {self._ended_because}",
            self.stderr_tail,
        )

    def _end_process(self) -> None:
        """Let the warden kill all there is; without it, at least the process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._transport.send_signal(signal.SIGTERM)
            self._transport.send_signal(signal.SIGCONT)
        asyncio.get_running_loop().call_later(
            2 * SWEEP_TIMEOUT_S, lambda: self.gone.is_set() or self._kill_group()
        )

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    # -- asyncio.SubprocessProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._print(self._decoder.decode(data))
            return
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._receive(bytes(self._rest) + line)
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest.clear()
            self.kill(f"it sent a message longer than {MAX_LINE_BYTES:,} bytes")

    def _receive(self, line: bytes) -> None:
        try:
            reply = json.loads(line)
            number, is_fault = reply["number"], "fault" in reply
            value = self._redactor.value(reply["fault" if is_fault else "value"])
            future = self._pending.get(number)
        except (ValueError, KeyError, TypeError, RecursionError):
            self.kill(
                "it sent what is no reply: code wrote to the descriptor that answers go through"
            )
            return
        if future is None or future.done():
            return
        if is_fault:
            future.set_exception(EnvironmentFault(*value))
        else:
            future.set_result(value)

    def _print(self, text: str, *, is_end: bool = False) -> None:
        """Pass what user code printed on to our own stderr, and keep the end of it as evidence."""
        told, self._unprinted = self._redactor.split(self._unprinted + text)
        if is_end:
            told, self._unprinted = told + self._redactor.text(self._unprinted), ""
        self.stderr_tail = (self.stderr_tail + told)[-STDERR_TAIL_CHARACTERS:]
        room = MAX_PRINTED_BYTES - self._printed_bytes
        self._printed_bytes += len(told)
        if room > 0:
            sys.stderr.write(told[:room])
            if len(told) >= room:
                sys.stderr.write(
                    "\n[the environment printed more than it may; the rest is left out]\n"
                )

    def process_exited(self) -> None:
        if self.alive:
            code = self._transport.get_returncode()
            self.alive, self._ended_because = False, _exit_reason(code)
            if code == MEMORY_EXIT_CODE:
                self._death_code = "environment_memory"
        self._kill_group()
        # Its last words may still be in the pipe; something that it started may hold that open for
        # ever.
        asyncio.get_running_loop().call_later(1.0, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.gone.is_set():
            self._print("", is_end=True)
            self._fail_pending()
            self._transport.close()
            self.gone.set()


def _scratch_folder() -> tuple[Path, ExitStack]:
    """A private folder, locked as long as this process lives or the stack is open; removes those
    whose owner died.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError), ExitStack() as stack:
            if time.time() - old.stat().st_mtime > SCRATCH_MIN_AGE_S:
                _lock(old, stack)
                _remove(old)
    folder, stack = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX)), ExitStack()
    _lock(folder, stack)
    return folder, stack


def _state_directory() -> Path:
    """FLASH_HOME, which environment code may not read."""
    return Path(os.environ.get("FLASH_HOME") or "~/.flash-mcp").expanduser().absolute()


def _remove(folder: Path) -> None:
    """Remove what user code made, folders that it locked against its own user too."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(place, name)
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, stack: ExitStack) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _exit_reason(code: int | None) -> str:
    if code == MEMORY_EXIT_CODE:
        limit = f"memory_gib in environment.toml ({Needs().memory_gib:g} if left out)"
        return f"its processes used more memory than {limit}"
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"it exited with code {code}"
