"""logs, report, export, wait, gateway and recordings: one run or deployment."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from flash_mcp.cli import follow
from flash_mcp.cli.output import answer, render_all, say
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, flag, option
from flash_mcp.cli.tool_commands import stay
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.recordings import Recording, pseudonym, rating_of
from flash_mcp.protocol.records import Json, text_of
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.runs import REMOTE_RETRY_S
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import supervised
from flash_mcp.tools.shared.truncation import shorten, utc

QUESTION_CHARACTERS = 80
LOG_BYTES = 64 << 10
"""Nodes store no more of an attempt's output."""
LOG_OVERLAP = 1000
"""Characters by which the end of a log is found in the next tail."""
LOG_EVERY_S = 2.0
RUN_ID = option("run_id", "run id, as returned by train", "RUN_ID")


def report(arguments: Arguments) -> None:
    """Write a run as one HTML page: health, curves, rollouts, lineage, values.

    The page needs no network and no other file."""
    from flash_mcp.pages.report import html  # noqa: PLC0415

    out = arguments.to or Path(f"{arguments.run_id}.html")
    write_file(out, html(open_store(), arguments.run_id))
    answer(arguments, {"path": str(out.absolute())}, str(out))


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


def gateway(arguments: Arguments) -> int:
    """Play the rollouts of a run with a program of yours, outside the sandbox.

    The run's environment.toml says gateway = true: the environment has the tasks and scores
    answers, and a training run or an evaluation waits until somebody plays them. This command does
    it until the run has ended: it asks for a task, starts PROGRAM in this folder, and sends back
    what comes of it.

    PROGRAM finds the model in OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, and its name in MODEL. {prompt} in its arguments becomes the task's last
    message. Its standard input is the task as JSON: {"task_id", "split", "messages"}. What it
    prints is the answer, which the environment scores. If it writes {"score": NUMBER} to the file
    that FLASH_REWARD_FILE names, that is the reward; "success": true or false may be with it.

    A program that fails, or takes longer than call_timeout_s of environment.toml, drops its
    rollout, which status counts. Without --url the run is one of this machine. With it, the run is
    one of a server that `flash-mcp serve --http` started there. The exit code says how the run
    ended, as that of wait."""
    from flash_mcp.cli.gateway import Player  # noqa: PLC0415

    run_id = arguments.run_id
    player = Player(run_id, arguments.program, arguments.at_once, arguments.url, arguments.token)
    # The run of another machine has its supervisor there.
    with nullcontext() if arguments.url else supervised():
        follow.run(player.play)
    body = {"run_id": run_id, "state": player.state}
    body |= {"played": player.played, "dropped": player.dropped}
    words = f"{player.played} rollouts played, {player.dropped} dropped"
    answer(arguments, body, f"{run_id} {player.state}: {words}")
    return follow.ENDED[player.state]


def recordings(arguments: Arguments) -> None:
    """List what a deployment recorded, newest first, or delete it with --delete.

    The options narrow it down: an answer has to match all of them."""
    store = open_store()
    recording = Recording(store.base, store.deployment(arguments.deployment).id)
    matches = _matcher(arguments)
    if arguments.delete:
        deleted = recording.delete(matches)
        answer(arguments, {"deleted": deleted}, f"deleted {deleted}")
        return
    rows: list[Json] = []
    for line in filter(matches, recording.answers()):
        question = shorten(text_of(line["messages"][-1]), QUESTION_CHARACTERS)
        shown = {name: line.get(name) for name in ("id", "user", "rating")}
        rows.insert(0, {"time": utc(line.get("time", 0.0)), **shown, "question": question})
    answer(arguments, rows, "\n".join(render_all(rows, "")) if rows else "nothing matches")


def _matcher(arguments: Arguments) -> Callable[[Json], bool]:
    user = arguments.user
    names = None if user is None else (user, pseudonym(user))
    rating = rating_of(arguments.rating)
    if arguments.rating not in (None, "none") and rating is None:
        what = f"--rating: {arguments.rating!r:.40} is no rating"
        raise FlashError("invalid_argument", what, fix="give up, down, none or a number")

    def matches(line: Json) -> bool:
        is_users = names is None or line.get("user") in names
        return is_users and (arguments.rating is None or line["rating"] == rating)

    return matches


COMMANDS: dict[str, Command | Group] = {
    "recordings": Command(
        recordings,
        (
            "flash-mcp recordings dep-4k2j9x1c --rating down",
            "flash-mcp recordings dep-4k2j9x1c --user alice@example.com --delete",
        ),
        (
            option("deployment", "a deployment that records its requests", "DEPLOYMENT"),
            option("--user", "of this user", "USER"),
            option("--rating", "rated so: up, down, a number, or none", "RATING"),
            flag("--delete", "delete them and their ratings"),
            JSON,
        ),
    ),
    "wait": Command(
        wait,
        ("flash-mcp wait run-2f9k1c8d --timeout-s 3600",),
        (RUN_ID, option("--timeout-s", "stop waiting after S seconds", "S", type=float), JSON),
    ),
    "gateway": Command(
        gateway,
        (
            "flash-mcp gateway run-2f9k1c8d -- python agent.py {prompt}",
            "FLASH_TOKEN=... flash-mcp gateway run-2f9k1c8d --url https://box -- ./agent.sh",
        ),
        (
            RUN_ID,
            option("program", "the program and its arguments, after --", "PROGRAM", nargs="+"),
            option("--at-once", "programs at the same time (default 4)", "N", type=int, default=4),
            option("--url", "the run is one of the server that listens there", "URL"),
            option("--token", "a token of that server (default: that in FLASH_TOKEN)", "TOKEN"),
            JSON,
        ),
    ),
    "logs": Command(
        logs,
        ("flash-mcp logs run-2f9k1c8d --follow",),
        (RUN_ID, flag("--follow", "print what comes until the run has ended")),
    ),
    "report": Command(
        report,
        ("flash-mcp report run-2f9k1c8d --to report.html",),
        (RUN_ID, option("--to", "file to write (default ./RUN_ID.html)", "FILE", type=Path), JSON),
    ),
}
