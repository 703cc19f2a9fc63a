"""One process that runs environment code, as its host sees it: calls go to its stdin, and replies,
which are checked, come from its stdout.

What user code prints comes from its stderr: it goes to our log in marked lines, without secrets."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from environments.base import Json
from environments.faults import EnvironmentFault
from environments.process.replies import ForgedError, ReplyReader, parse, protections
from environments.sandbox.kernel import signal_name
from environments.sandbox.needs import Needs
from environments.sandbox.warden import MEMORY_EXIT_CODE, SWEEP_TIMEOUT_S, UNPROTECTED_EXIT_CODE
from environments.untrusted_text import Redactor, marked

STDERR_TAIL_CHARACTERS = 4000
MAX_LINE_BYTES = 16 << 20
"""Size of a reply. environments.process.child sends no longer ones; they could fill our memory."""
MAX_PRINTED_LINE_CHARACTERS = 10_000  # A longer line of what a child prints is broken
MAX_PRINTED_BYTES = 8 << 20
"""How much of one child's output goes to our log. Only the end of the rest is kept, as evidence."""
FORGED = "it sent what is no reply: code wrote to the descriptor that answers go through"


@dataclass(eq=False)
class UnansweredError(Exception):
    """Call `number` passed its deadline."""

    number: int


class ChildProcess(asyncio.SubprocessProtocol):
    """One process: requests to stdin, replies from stdout, what user code prints from stderr."""

    def __init__(self, redactor: Redactor, declared: Sequence[str]) -> None:
        self.alive = True
        self.retiring = False
        self.sandbox: dict[str, str] = {}
        """Its first line, which the warden writes; later ones may be foreign code's."""
        self.episodes: set[int] = set()
        self.gone = asyncio.Event()
        self._printed_tail = ""
        self._ended_because = ""
        self._death_code = "environment_error"
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._last_number = 0
        self._rest = bytearray()
        self._redactor = redactor
        self._reader = ReplyReader(redactor)
        self._declared = declared
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unprinted = ""
        self._line = ""
        self._printed_bytes = 0

    # -- calls -------------------------------------------------------------------------------------

    async def call(
        self, op: str, timeout_s: float, since: Callable[[], float] | None = None, /, **fields: Any
    ) -> Any:
        """The child's answer. UnansweredError after `timeout_s`, EnvironmentFault if it failed.
        `since` says, once that time is over, from when on it really counts.
        """
        if not self.alive:
            raise self._death()
        self._last_number += 1
        number = self._last_number
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending[number] = (op, future)
        self._send({"number": number, "op": op, **fields})
        left = timeout_s
        try:
            while left > 0 and not future.done():
                await asyncio.wait((future,), timeout=left)
                left = since() + timeout_s - loop.time() if since else 0.0
        except asyncio.CancelledError:
            self._send({"number": 0, "op": "abandon", "target": number})
            # The answer may have come meanwhile: asyncio reports exceptions that nobody reads.
            if future.done():
                future.exception()
            raise
        finally:
            del self._pending[number]
        if not future.done():
            raise UnansweredError(number)
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
            self._mark_dead(because)
            self._fail_pending()
        if not self.gone.is_set():
            self._end_process()

    def end_as_forger(self) -> EnvironmentFault:
        self.kill(FORGED)
        return self._death()

    async def kill_with_evidence(self, because: str) -> None:
        """Kill a frozen process after it has written the stack of each thread to stderr."""
        self._mark_dead(because)
        with contextlib.suppress(ProcessLookupError):
            before = self.stderr_tail
            self._transport.send_signal(signal.SIGUSR1)
            for _ in range(10):  # on a busy machine the stacks may come late
                await asyncio.sleep(0.2)
                if self.stderr_tail != before or self.gone.is_set():
                    break
        self._fail_pending()
        self._end_process()

    def _mark_dead(self, because: str) -> None:
        self.alive = False
        self._ended_because = because

    def _send(self, request: Json) -> None:
        if self.alive:
            pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
            pipe.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")

    def _fail_pending(self) -> None:
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(self._death())

    def _death(self) -> EnvironmentFault:
        what = f"the environment's process ended: {self._ended_because}"
        return EnvironmentFault(self._death_code, what, self.stderr_tail)

    def _end_process(self) -> None:
        """Make the warden kill every process. Kill the process group if the warden does not end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._transport.send_signal(signal.SIGTERM)
            self._transport.send_signal(signal.SIGCONT)
        loop = asyncio.get_running_loop()
        loop.call_later(2 * SWEEP_TIMEOUT_S, lambda: self.gone.is_set() or self._kill_group())

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
        if not self.sandbox:
            self.sandbox = protections(line)
            return
        try:
            reply = parse(line)
            number = reply["number"]
            if number > self._last_number:
                raise ForgedError
            op, future = self._pending.get(number, ("", None))
            if future is None or future.done():
                return
            if "fault" in reply:
                code, what, traceback, refusals = self._reader.fault(reply["fault"])
                fault = EnvironmentFault(
                    code,
                    what,
                    traceback,
                    is_foreign=True,
                    declared=self._declared,
                    refusals=refusals,
                )
                future.set_exception(fault)
            else:
                future.set_result(self._reader.value(op, reply["value"]))
        except ForgedError:
            self.kill(FORGED)

    @property
    def stderr_tail(self) -> str:
        """The end of what user code printed, as evidence."""
        text = self._printed_tail + self._redactor.ending(self._unprinted)
        return text[-STDERR_TAIL_CHARACTERS:]

    def _print(self, text: str, *, is_end: bool = False) -> None:
        """Write what user code printed to our stderr, in whole marked lines, and keep its end."""
        printed, self._unprinted = self._redactor.split(self._unprinted + text)
        if is_end:
            printed += self._redactor.ending(self._unprinted)
            self._unprinted = ""
        self._printed_tail = (self._printed_tail + printed)[-STDERR_TAIL_CHARACTERS:]
        room = MAX_PRINTED_BYTES - self._printed_bytes
        self._printed_bytes += len(printed)
        *lines, self._line = (self._line + printed[: max(0, room)]).split("\n")
        is_last = 0 < room <= len(printed)
        is_whole = is_end or is_last or len(self._line) > MAX_PRINTED_LINE_CHARACTERS
        if self._line and is_whole:
            lines.append(self._line)
            self._line = ""
        for line in lines:
            sys.stderr.write(f"{marked(line)}\n")
        if is_last:
            sys.stderr.write("[the environment printed too much; the rest is left out]\n")

    def process_exited(self) -> None:
        if self.alive:
            code = self._transport.get_returncode()
            because = f"it exited with code {code}"
            if code is not None and code < 0:
                because = f"killed by {signal_name(-code)}"
            if code == MEMORY_EXIT_CODE:
                self._death_code = "environment_memory"
                limit = f"memory_gib in environment.toml ({Needs().memory_gib:g} if left out)"
                because = f"its processes used more memory than {limit}"
            # Later it is environment code that ended with this code.
            if code == UNPROTECTED_EXIT_CODE and not self.sandbox:
                self._death_code = "environment_unprotected"
                because = "this machine cannot keep it from the user's files"
            self._mark_dead(because)
        self._kill_group()
        # Its last output may still be in the pipe. Another process may hold the pipe open for ever.
        asyncio.get_running_loop().call_later(1.0, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.gone.is_set():
            self._print("", is_end=True)
            self._fail_pending()
            self._transport.close()
            self.gone.set()
