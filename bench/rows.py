"""From a CSV file of 500 rows to a verdict on a trained model, as an agent plays it, with its calls
counted: env_setup, env_test, env_push, train, status until the end.

    scripts/loop --only rows      # dates in words to dates in digits
    scripts/loop --only csv       # messages of customers and their labels
    scripts/loop --only sql       # questions about a table, and their SQL

Nothing is chosen by looking at the outcome: docs/loop.md holds what came out."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from bench.dates import ADAPTER, counted
from flash_mcp.cli.demo import DemoSession
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE

Json = dict[str, Any]
ROWS = 500
MOST_CALLS = 8
MOST_TOKENS = 6_000
"""Of all results together."""
SHOWN = 160
"""Characters of a call's arguments in the log."""
TRAIN: Json = {"steps": 40, "batch_size": 8, "max_tokens": 64, "eval_examples": 50, **ADAPTER}


def dates(source: random.Random) -> Iterator[Sequence[str]]:
    """Dates in words, and as year-month-day."""
    yield "question", "answer"
    for day in source.sample(range(36_500), ROWS):
        at = date(1930, 1, 1) + timedelta(days=day)
        yield f"Write {at.day} {at:%B} {at.year} as year-month-day.", at.isoformat()


MATTERS = {
    "billing": ("was charged twice", "got no invoice", "wants the money back"),
    "shipping": ("still waits for the parcel", "moved to another street", "got half of it"),
    "account": ("forgot the password", "cannot log in", "wants the account closed"),
}


def labels(source: random.Random) -> Iterator[Sequence[str]]:
    """Messages of customers, and whom they concern, with copies and other spellings of labels."""
    yield "text", "label"
    for number in source.sample(range(10_000, 100_000), ROWS):
        label = source.choice([*MATTERS])
        text = f"Order {number}: the customer {source.choice(MATTERS[label])}."
        yield text, label
        if number % 12 == 0:
            yield f"{text.lower()} Please help!", label
        if number % 90 == 0:
            yield f"About {text}", source.choice([label.title(), label[:3] + label[4:], "account"])


def sql(source: random.Random) -> Iterator[Sequence[str]]:
    """Questions about a table of orders, and what answers them."""
    yield "question", "answer"
    schema = "Table orders(id, city, price, year). Write SQL."
    cities = ("Berlin", "Lagos", "Lima", "Osaka", "Paris", "Quito")
    asked: set[str] = set()
    while len(asked) < ROWS:
        city, year = source.choice(cities), source.randrange(1980, 2026)
        word, function = source.choice([("highest", "max"), ("lowest", "min"), ("mean", "avg")])
        question = f"{schema} The {word} price in {city} in {year}?"
        if question not in asked:
            asked.add(question)
            where = f"city = '{city}' AND year = {year}"
            yield question, f"SELECT {function}(price) FROM orders WHERE {where}"


DAYS: dict[str, Callable[[random.Random], Iterator[Sequence[str]]]] = {
    "rows": dates,
    "csv": labels,
    "sql": sql,
}
"""{name: the rows of the CSV file, from its header on}."""


async def play(
    session: DemoSession,
    folder: Path,
    train: Json = TRAIN,
    model: str | None = None,
    day: str = "rows",
) -> Json:
    """{"log": [[call, tokens of its result]], "success", "verdict", "seconds"}."""
    path = folder / f"{day}.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(DAYS[day](random.Random(7)))
    target = str(folder / day)
    calls: list[tuple[str, Json]] = [
        ("env_setup", {"folder": target, "dataset": str(path)}),
        ("env_test", {"folder": target}),
        ("env_push", {"folder": target, "name": day}),
    ]
    with session.timed("all"):
        for tool, arguments in calls:
            await session.call(tool, **arguments)
        wanted: Json = {"environment": day, "algorithm": "sft", **train}
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
