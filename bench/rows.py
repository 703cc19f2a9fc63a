"""From a CSV file of 500 rows to a verdict on a trained model, as an agent plays it, with its calls
counted: env_setup, env_test, env_push, train, status until the end.

    scripts/loop --only rows

Nothing is chosen by looking at the outcome: docs/loop.md holds what came out."""

from __future__ import annotations

import csv
import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from bench.dates import ADAPTER, counted
from flash_mcp.cli.demo import Session
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE

Json = dict[str, Any]
ROWS = 500
MOST_CALLS = 8
SHOWN = 160
"""Characters of a call's arguments in the log."""
TRAIN: Json = {"steps": 40, "batch_size": 8, "max_tokens": 24, "eval_examples": 50, **ADAPTER}


def write_csv(path: Path) -> None:
    """Dates in words, and as year-month-day."""
    source = random.Random(7)
    days = source.sample(range(36_500), ROWS)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["question", "answer"])
        for day in days:
            at = date(1930, 1, 1) + timedelta(days=day)
            question = f"Write {at.day} {at:%B} {at.year} as year-month-day."
            writer.writerow([question, at.isoformat()])


async def play(
    session: Session, folder: Path, train: Json = TRAIN, model: str | None = None
) -> Json:
    """{"log": [[call, tokens of its result]], "success", "verdict", "seconds"}."""
    path = folder / "dates.csv"
    write_csv(path)
    target = str(folder / "dates")
    calls: list[tuple[str, Json]] = [
        ("env_setup", {"folder": target, "data": str(path)}),
        ("env_test", {"folder": target}),
        ("env_push", {"folder": target, "name": "dates"}),
    ]
    with session.timed("all"):
        for tool, arguments in calls:
            await session.call(tool, **arguments)
        wanted: Json = {"environment": "dates", "algorithm": "sft", **train}
        wanted |= {"eval_before": True, "eval_after": True, **({"model": model} if model else {})}
        run_id = (await session.call("train", **wanted))["run_id"]
        calls.append(("train", wanted))
        run: Json = {}
        while run.get("state", "queued") in ACTIVE:
            look: Json = {"run_id": run_id, "until": "end"}
            run = (await session.call("status", waits=True, **look)).get("run", {})
            calls.append(("status", look))
    if run["state"] != "succeeded":
        raise FlashError("worker_failed", f"{run_id} {run['state']}", fix="flash-mcp status")
    tokens = [tokens for _, tokens in counted(session)]
    shown = [_shown(tool, arguments, folder) for tool, arguments in calls]
    return {"log": list(zip(shown, tokens, strict=True)), "run": run, "seconds": session.seconds}


def _shown(tool: str, arguments: Json, folder: Path) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    text = f"{tool}({values})".replace(f"{folder}/", "")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}...)"


def markdown(result: Json) -> str:
    """The log as a section of docs/loop.md."""
    lines = ["## From rows to a verdict", ""]
    lines += ["| call | tokens of its result |", "|---|---|"]
    lines += [f"| `{call}` | {tokens:,} |" for call, tokens in result["log"]]
    total = sum(tokens for _, tokens in result["log"])
    lines += [f"| {len(result['log'])} calls | {total:,} |", ""]
    lines += [f"`status`: {result['run'].get('outlook')}", ""]
    lines += [f"Seconds: {result['seconds']['all']:.0f}.", ""]
    return "\n".join(lines)
