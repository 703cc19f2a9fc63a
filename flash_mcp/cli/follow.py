"""Following a run in a terminal until it ends: a line at every change, or the curve, redrawn; and
its log."""

from __future__ import annotations

import asyncio
import functools
import math
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flash_mcp.cli.output import say, visible
from flash_mcp.cli.parsing import JSON, RUN_ID, Arguments, Command, Group, flag, option
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import number, percent
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.runs import REMOTE_RETRY_S
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import ensure_supervised, supervised

if TYPE_CHECKING:
    from flash_mcp.tools.status import Status

Found = TypeVar("Found")
ENDED = {"succeeded": 0, "failed": 3, "cancelled": 4}
"""Exit codes by how a run ended."""
TIMED_OUT = 5
INTERRUPTED = 130


def run(function: Callable[..., Awaitable[Found]], *arguments: Any) -> Found:
    """Run a coroutine function to its end. Raises KeyboardInterrupt on Ctrl-C at any moment."""
    import anyio  # noqa: PLC0415

    try:
        return anyio.run(function, *arguments)
    except asyncio.CancelledError as error:
        # asyncio loses a signal that arrives while its loop starts.
        raise KeyboardInterrupt from error


def until_ended(
    run_id: str, *, timeout_s: float | None = None, quiet: bool = False
) -> tuple[int, Status | None]:
    """Wait until the run ends or `timeout_s` passes: (exit code, the run's last report).

    Ctrl-C only detaches. Progress goes to stderr. FlashError(unknown_run)."""
    from flash_mcp.tools.status import status  # noqa: PLC0415

    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    show = Screen() if sys.stderr.isatty() else Lines()
    wait_s = 0.0
    try:
        while True:
            with suppress(FlashError):  # status says what holds the run up
                ensure_supervised(open_store())
            report = run(functools.partial(status, run_id, wait_s=wait_s))
            view = cast("dict[str, Any]", report.model_dump(mode="json")["run"])
            if not quiet:
                show(view)
            if view["state"] in ENDED:
                return ENDED[view["state"]], report
            left = deadline - time.monotonic()
            if left <= 0:
                return TIMED_OUT, report
            wait_s = min(show.wait_s, left)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"\ndetached; the run goes on. Follow it again: flash-mcp status {run_id} --follow\n"
            f"Cancel it: flash-mcp cancel {run_id}\n"
        )
        return INTERRUPTED, None


def stay(run_id: str, as_json: bool, **options: Any) -> int:
    from flash_mcp.cli.views import show  # noqa: PLC0415

    code, report = until_ended(run_id, **options)
    if report is not None:
        show(report, as_json)
    return code


class Lines:
    """A line at every change, for logs and pipes."""

    wait_s = 30.0
    _seen = ""

    def __call__(self, view: dict[str, Any]) -> None:
        line = progress_line(view)
        if line != self._seen:
            sys.stderr.write(f"{visible(line)}\n")
            self._seen = line


class Screen:
    """The curve and the newest line below it, each drawn over the one before."""

    wait_s = 5.0
    """What changes between two waits, as while the curve is drawn, is seen after the next one."""
    _height = 0

    def __call__(self, view: dict[str, Any]) -> None:
        from flash_mcp.judgement import curve  # noqa: PLC0415

        columns, rows = shutil.get_terminal_size()
        points = open_store().curve(view["run_id"])
        height = max(8, min(rows - 4, 18))
        lines = curve.terminal(points, min(columns - 1, 100), height).splitlines()
        lines.append(progress_line(view, has_bars=False)[: columns - 1])
        up = f"\033[{self._height}F\033[J" if self._height else ""
        sys.stderr.write(up + visible("\n".join(lines)) + "\n")
        sys.stderr.flush()
        self._height = len(lines)


def progress_line(view: dict[str, Any], *, has_bars: bool = True) -> str:
    """State, step, trends and the time left, of a run as status reports it. `has_bars`: with all
    steps of a trend as bars.
    """
    steps = f"/{view['steps']}" if view.get("steps") else ""
    parts = [view["state"], f"step {view['step']}{steps}"]
    phase = view.get("phase") or ""
    if not view["step"] or phase.startswith("eval "):
        parts.append(phase)
    for name in ("reward", "success", "loss", "held_out_loss"):
        if name in view:
            label = name.replace("held_out_", "held-out ")
            bars = f" {view[name]['spark']}" if has_bars else ""
            last: float = view[name]["last"]
            parts.append(f"{label} {percent(last) if name == 'success' else number(last)}{bars}")
    if held_out := view.get("held_out"):
        parts.append(f"held-out success {percent(held_out[-1]['success'])}")
    if "hours" in view:
        parts.append(", ".join([f"{view['hours']} h", *filter(None, [view.get("cost")])]))
    if "eta_s" in view:
        parts.append(f"{view['eta_s'] // 60} min {view['eta_s'] % 60:02} s left")
    return "  ".join(filter(None, parts))


# -- the commands logs and wait --------------------------------------------------------------------

LOG_BYTES = 64 << 10
"""Nodes store no more of an attempt's output."""
LOG_OVERLAP = 1000
"""Characters by which the end of a log is found in the next tail."""
LOG_EVERY_S = 2.0


def logs(arguments: Arguments) -> None:
    """Print the end of what a run's newest attempt printed, as its node stores it.

    With --follow also what comes, until the run has ended."""
    store = open_store()
    attempt, before = 0, ""
    with supervised() if arguments.follow else nullcontext():
        while True:
            run = store.run(arguments.run_id)
            folder = RunFolder(run.folder, retry_s=REMOTE_RETRY_S)
            tail = folder.log_tail(run.attempt, LOG_BYTES)
            news = _after(before if attempt == run.attempt else "", tail)
            if news:
                say(news.rstrip("\n"))
            if run.ended or not arguments.follow:
                break
            attempt, before = run.attempt, tail
            time.sleep(LOG_EVERY_S)
    if not tail:
        why = f"see why with `flash-mcp status {run.id}`"
        sys.stderr.write(f"{run.id}, which is {run.state}, has no log: {why}\n")


def _after(before: str, tail: str) -> str:
    """What of a log's tail comes after the tail that was read before, whose start may be gone."""
    if tail.startswith(before):
        return tail[len(before) :]
    end = before[-LOG_OVERLAP:]
    if end and end in tail:
        return tail.rpartition(end)[2]
    return tail


def wait(arguments: Arguments) -> int:
    """Return when a run has ended; the exit code says how.

    0 succeeded, 3 failed, 4 cancelled, 5 --timeout-s passed. Prints the run's report."""
    return stay(arguments.run_id, arguments.json, timeout_s=arguments.timeout_s, quiet=True)


COMMANDS: dict[str, Command | Group] = {
    "wait": Command(
        wait,
        ("flash-mcp wait run-2f9k1c8d --timeout-s 3600",),
        (RUN_ID, option("--timeout-s", "stop waiting after S seconds", "S", type=float), JSON),
    ),
    "logs": Command(
        logs,
        ("flash-mcp logs run-2f9k1c8d --follow",),
        (RUN_ID, flag("--follow", "print what comes until the run has ended")),
    ),
}
