"""logs and wait: one run."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

from flash_mcp.cli.output import say
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, flag, option
from flash_mcp.cli.tool_commands import stay
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.runs import REMOTE_RETRY_S
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import supervised

LOG_BYTES = 64 << 10
"""Nodes store no more of an attempt's output."""
LOG_OVERLAP = 1000
"""Characters by which the end of a log is found in the next tail."""
LOG_EVERY_S = 2.0
RUN_ID = option("run_id", "run id, as returned by train", "RUN_ID")


def write_file(path: Path, text: str) -> None:
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        fix = "choose a file that you may write with --to"
        what = f"cannot write there: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error


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
