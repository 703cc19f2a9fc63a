"""Following a run in a terminal until it ends: a line at every change, or the curve, redrawn."""

from __future__ import annotations

import asyncio
import functools
import math
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flash_mcp.cli.output import visible
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import number, percent
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import ensure_supervised

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
