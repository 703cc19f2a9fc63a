"""Trainings with no value set but the environment, the algorithm that the playbook leads to where a
base model solves next to nothing, and the evaluations before and after.

    scripts/loop --only bare [--seeds 3]

Nothing is chosen by looking at the outcome: docs/loop.md holds what came out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.dates import FOLDER as DATES
from flash_mcp.cli.demo import DemoSession, watch

Json = dict[str, Any]
STARTERS = ("calculator", "sort_words")
PACKAGED = ("family_relationships", "letter_counting", "spell_backward")
TASKS = (*STARTERS, "dates", *PACKAGED)


async def play(
    session: DemoSession,
    folder: Path,
    seeds: int = 1,
    tasks: Sequence[str] = TASKS,
    train: Json | None = None,
) -> Json:
    """{"rows": one for each run}. `train`: values for a test that has no time for the recipe's."""
    rows: list[Json] = []
    environments = {task: await _published(session, task, folder) for task in tasks}
    for seed in range(seeds):
        for task, environment in environments.items():
            arguments: Json = {"environment": environment, "algorithm": "sft", **(train or {})}
            arguments |= {"eval_before": True, "eval_after": True}
            if seed:
                arguments["seed"] = seed
            started = time.monotonic()
            run = await watch(session, (await session.call("train", **arguments))["run_id"])
            row = {"task": task, "seed": seed, "steps": run["step"], "verdict": run["verdict"]}
            row |= {"before": run["held_out"][0], "after": run["held_out"][-1]}
            rows.append({**row, "seconds": time.monotonic() - started})
            session.console.print(_line(rows[-1]), highlight=False)
    rows.sort(key=lambda row: tasks.index(row["task"]))
    return {"rows": rows}


async def _published(session: DemoSession, task: str, folder: Path) -> str:
    if task in PACKAGED:
        return f"reasoning-gym:{task}"
    source = str(DATES)
    if task in STARTERS:
        source = str(folder / task)
        await session.call("env_setup", folder=source, template=task)
    return (await session.call("env_push", folder=source, name=task))["environment"]


def markdown(result: Json) -> str:
    """The runs as a section of docs/loop.md."""
    lines = ["## With no value set", ""]
    lines += ["| task | seed | before | after | best constant | verdict | steps | minutes |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += map(_line, result["rows"])
    return "\n".join([*lines, ""])


def _line(row: Json) -> str:
    before, after = row["before"]["success"], row["after"]["success"]
    verdict = row["verdict"]["outcome"].replace("_", " ")
    shares = f"{before:.3f} | {after:.3f} of {row['after']['n']} | {row['after']['constant']:.3f}"
    length = f"{row['steps']} | {row['seconds'] / 60:.0f}"
    return f"| {row['task']} | {row['seed']} | {shares} | {verdict} | {length} |"
