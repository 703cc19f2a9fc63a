"""The whole loop as an agent plays it, with its calls and the tokens of their results counted:
base -> sft -> grpo -> compare -> export of the best. There are two tasks of 300 train and 100 eval
rows: dates, and JSON from a sentence.

    scripts/loop --only dates
    scripts/loop --only json

The client takes progress, so that one call waits to a run's end.

Nothing is chosen by looking at the outcome: docs/loop.md holds what came out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flash_mcp.cli.demo import DemoSession
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.records import ACTIVE
from flash_mcp.protocol.spec import DEFAULT_MODEL

Json = dict[str, Any]
FOLDER = Path(__file__).with_name("dates_environment")
JSON_FOLDER = Path(__file__).with_name("json_environment")
ABOUT = {
    "dates": "Write a date as year-month-day; 300 train and 100 eval tasks.",
    "json": "Write what a sentence says as JSON; 300 train and 100 eval tasks.",
}
MOST_CALLS = 24
MOST_TOKENS = 6_000


@dataclass(frozen=True)
class Plan:
    """How long the two runs are."""

    common: Json
    sft: Json
    grpo: Json
    export: str = "gguf-q8_0"


ADAPTER: Json = {"lora_rank": 16, "lora_alpha": 32, "learning_rate": 2e-4}
PLAN = Plan(
    {"max_tokens": 16, "eval_after": True},
    {"steps": 24, "batch_size": 8, "save_every": 12, "eval_before": True, **ADAPTER},
    {"steps": 10, "batch_size": 4, "group_size": 8, "save_every": 5, **ADAPTER},
)
JSON_PLAN = replace(PLAN, common={**PLAN.common, "max_tokens": 32})


async def play(
    session: DemoSession, plan: Plan = PLAN, model: str | None = None, folder: Path = FOLDER
) -> Json:
    """{"task", "calls", "tokens", "by_tool", "table", "best", "export", "seconds"}."""
    name = folder.name.partition("_")[0]
    base: Json = {"model": model} if model else {}
    with session.timed("all"):
        await session.call("catalog", kind="models")
        await session.call("env_test", folder=str(folder))
        pushed = await session.call("env_push", folder=str(folder), name=name)
        common: Json = {"environment": pushed["environment"], **plan.common, **base}
        wanted: Json = {"algorithm": "sft", **common, **plan.sft}
        await session.call("train", **wanted, validate_only=True)
        sft = await _trained(session, f"{name} sft", wanted)
        wanted = {**common, **plan.grpo, "init_from_adapter": sft}
        await session.call("train", **wanted, validate_only=True, sample=True)
        grpo = await _trained(session, f"{name} grpo", wanted)
        await session.call("rollouts", run_id=grpo, limit=3, max_characters=1200)
        found = await session.call("compare", base=f"{sft}@0", other=sft, more=[grpo], flips=1)
        best: Json = max(found["table"][1:], key=lambda row: row["success"])
        with session.timed("export"):
            export = await _exported(session, f"{best['run_id']}@{best['step']}", plan.export)
    return {
        "task": name,
        "calls": len(session.results),
        "tokens": sum(tokens for _, tokens in counted(session)),
        "by_tool": _by_tool(session),
        "table": found["table"],
        "best": found["best"],
        "export": export,
        "seconds": session.seconds,
    }


async def _trained(session: DemoSession, name: str, wanted: Json) -> str:
    """The run's id, once it has succeeded."""
    with session.timed(name.rpartition(" ")[2]):
        run_id = str((await session.call("train", **wanted, name=name))["run_id"])
        state = "queued"
        since: Json = {}  # of a problem that was told, and that the run goes on with
        while state in ACTIVE:
            body = await session.call("status", waits=True, run_id=run_id, until="end", **since)
            state = (body.get("run") or body.get("news") or {"state": state})["state"]
            if "since" in body:
                since = {"since": body["since"]}
    if state != "succeeded":
        raise FlashError("worker_failed", f"{run_id} {state}", fix="flash-mcp status")
    return run_id


async def _exported(session: DemoSession, checkpoint: str, kind: str) -> Json:
    while True:
        export = (await session.call("checkpoints", run_id=checkpoint, export=kind))["export"]
        if export["state"] == "ready":
            return export


def counted(session: DemoSession) -> list[tuple[str, int]]:
    """(tool, tokens of its result) of every call, as the default model's tokenizer counts."""
    tokenizer = Tokenizer.from_file(str(models_dir() / DEFAULT_MODEL / "tokenizer.json"))
    return [(tool, len(tokenizer.encode(text).ids)) for tool, text in session.results]


def _by_tool(session: DemoSession) -> dict[str, tuple[int, int]]:
    """{tool: (calls, tokens of their results)}"""
    found: dict[str, tuple[int, int]] = {}
    for tool, tokens in counted(session):
        calls, before = found.get(tool, (0, 0))
        found[tool] = (calls + 1, before + tokens)
    return found


def markdown(found: Json) -> str:
    """The figures as the tables of docs/loop.md."""
    lines = [f"## {found['task']}", "", ABOUT[found["task"]], ""]
    lines += ["| tool | calls | tokens of results |", "|---|---|---|"]
    lines += [
        f"| `{tool}` | {calls} | {tokens:,} |" for tool, (calls, tokens) in found["by_tool"].items()
    ]
    lines += [f"| all | {found['calls']} | {found['tokens']:,} |", ""]
    lines += ["| model | success | 95 % interval | against the base model |", "|---|---|---|---|"]
    for name, row in zip(("base", "sft", "grpo"), found["table"], strict=True):
        change = "-"
        if "change" in row:
            span = f"{row['change_low']:+.3f} to {row['change_high']:+.3f}"
            change = f"{row['verdict']}, {row['change']:+.3f} ({span})"
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"| {name} | {row['success']:.3f} | {interval} | {change} |")
    agreement = found["export"].get("agreement")
    if agreement:
        equal = f"{agreement['equal']} of {agreement['tokens']}"
        lines += ["", f"Read back, the exported file gave {equal} greedy tokens as trained."]
    times = ", ".join(f"{step} {seconds:.0f}" for step, seconds in found["seconds"].items())
    lines += ["", f"Seconds: {times}.", ""]
    return "\n".join(lines)
