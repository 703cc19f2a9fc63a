"""How much is learnt from a number of rollouts.

    scripts/loop --only distill [--seeds 3]
    scripts/loop --only useful [--seeds 3]

`distill`: a teacher is trained on the calculator by GRPO, and an adapter of a quarter of its rank
is distilled from it, with a fifth of its rollouts.

`useful`: GRPO with each task once a pass, and with tasks chosen by what they teach, on the
calculator, on one half of whose questions have numbers in words, and, from an adapter that was
fine-tuned on a few gold answers, on two tasks of reasoning-gym. Each has TRAIN_TASKS train tasks,
so that they come back. What counts is the rollouts until the held-out success is each of TARGETS of
the best that choosing nothing reached with the same seed.

Nothing is chosen by looking at the outcome: docs/loop.md holds what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp.types import TextResourceContents

from flash_mcp.cli.demo import DemoSession, watch

Json = dict[str, Any]
COMMON: Json = {"max_tokens": 32, "eval_before": True, "eval_after": True, "eval_examples": 200}
TEACHER: Json = {"steps": 20, "batch_size": 4, "group_size": 8, "lora_rank": 16, "lora_alpha": 32}
STUDENT: Json = {"steps": 8, "batch_size": 16, "group_size": 1, "lora_rank": 4, "lora_alpha": 8}
CHOOSING: Json = {**TEACHER, "steps": 16, "eval_every": 4, "eval_examples": 100}
"""status shows five evaluations, so no more are made."""
TRAIN_TASKS = 32
WARM: Json = {"algorithm": "sft", "steps": 24, "batch_size": 8, "lora_rank": 16, "lora_alpha": 32}
WORDS = "calculator in words"
REASONING = ("number_filtering", "family_relationships")
TASKS = ("calculator", WORDS, *REASONING)
SAMPLINGS = ("passes", "useful")
TARGETS = (0.9, 1.0)
SYMBOLS = {"+": "plus", "-": "minus", "*": "times"}
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


async def distill(
    session: DemoSession, folder: Path, seeds: int = 1, quick: Json | None = None
) -> Json:
    """{"rows": [{"seed", "base", "teacher", "student", "rollouts": [teacher's, student's]}]}.
    `quick`: values for a test that has no time for these."""
    place = {"environment": await _published(session, folder, TASKS[0])}
    rows: list[Json] = []
    for seed in range(seeds):
        common: Json = {**COMMON, "seed": seed}
        fields = {**common, **TEACHER, **(quick or {})}
        teacher = await _trained(session, {**place, **fields})
        fields = {**common, **STUDENT, **(quick or {}), "algorithm": "distill"}
        fields |= {"eval_before": False, "teacher": teacher["run_id"], "group_size": 1}
        student = await _trained(session, {**place, **fields})
        row = {"seed": seed, "base": teacher["held_out"][0]["success"]}
        row |= {"teacher": _last(teacher), "student": _last(student)}
        sizes = (TEACHER["batch_size"] * TEACHER["group_size"], STUDENT["batch_size"])
        steps = (teacher["step"], student["step"])
        row["rollouts"] = [size * step for size, step in zip(sizes, steps, strict=True)]
        rows.append(row)
        session.console.print(f"  {row}", highlight=False)
    return {"rows": rows}


async def useful(
    session: DemoSession, folder: Path, seeds: int = 1, quick: Json | None = None
) -> Json:
    """{"rows": [{"task", "seed", "passes", "useful", "shares"}]}: the first two are curves of
    (rollouts, held-out success); `shares` are those of the rollouts to each target."""
    rows: list[Json] = []
    for seed in range(seeds):
        for task in TASKS:
            start = await _start(session, folder, task, seed, quick or {})
            row: Json = {"task": task, "seed": seed}
            for sampling in SAMPLINGS:
                fields = {**COMMON, **CHOOSING, **start, "seed": seed, "task_sampling": sampling}
                run = await _trained(session, {**fields, **(quick or {})})
                row[sampling] = await _curve(session, run)
            row["shares"] = [_share(row["passes"], row["useful"], target) for target in TARGETS]
            rows.append(row)
            session.console.print(f"  {row}", highlight=False)
    return {"rows": sorted(rows, key=lambda row: TASKS.index(row["task"]))}


async def _start(session: DemoSession, folder: Path, task: str, seed: int, quick: Json) -> Json:
    """The environment of both runs, and the adapter that they begin with."""
    if task not in REASONING:
        return {"environment": await _published(session, folder, task, TRAIN_TASKS)}
    sizes = {"train_size": TRAIN_TASKS, "eval_size": CHOOSING["eval_examples"]}
    start: Json = {"environment": f"reasoning-gym:{task}", "environment_args": sizes}
    start["max_tokens"] = 2 * COMMON["max_tokens"]
    fields = {**start, "seed": seed, **WARM, **quick}
    return {**start, "init_from_adapter": (await _trained(session, fields))["run_id"]}


async def _published(
    session: DemoSession, folder: Path, task: str, train_tasks: int | None = None
) -> str:
    """The reference of a calculator with its first `train_tasks` tasks, or with all."""
    name = task.replace(" ", "-")
    source = folder / name
    if not source.is_dir():
        await session.call("env_setup", folder=str(source), template="calculator")
        for path in source.glob("datasets/*.jsonl"):
            lines = path.read_text().splitlines()
            if path.stem == "train":
                lines = lines[:train_tasks]
            if task == WORDS:
                rows = map(json.loads, lines)
                lines = [json.dumps(_in_words(row) if n % 2 else row) for n, row in enumerate(rows)]
            path.write_text("\n".join(lines) + "\n")
    return (await session.call("env_push", folder=str(source), name=name))["environment"]


def _in_words(row: Json) -> Json:
    left, symbol, right = row["expression"].split()
    words = " ".join((_words(int(left)), SYMBOLS[symbol], _words(int(right))))
    return {**row, "input": row["input"].replace(row["expression"], words)}


def _words(number: int) -> str:
    """A number below 100."""
    if number < len(ONES):
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


async def _trained(session: DemoSession, fields: Json) -> Json:
    started = await session.call("train", settings=fields)
    return {**await watch(session, started["run_id"]), "run_id": started["run_id"]}


def _last(run: Json) -> float:
    return run["held_out"][-1]["success"]


async def _curve(session: DemoSession, run: Json) -> list[tuple[int, float]]:
    """Held-out success by the rollouts that the training had tried."""
    read = await session.client.read_resource(f"flash://runs/{run['run_id']}/metrics")
    contents = read.contents[0]
    assert isinstance(contents, TextResourceContents)
    size, batch = CHOOSING["group_size"], CHOOSING["batch_size"]
    tried = {0: 0}
    for row in json.loads(contents.text):
        groups = row.get("groups/tried", batch)
        tried[row["step"]] = max(tried.values()) + int(groups * size)
    return [(tried[row["step"]], row["success"]) for row in run["held_out"]]


def _share(
    plain: Sequence[tuple[int, float]], chosen: Sequence[tuple[int, float]], target: float
) -> float | None:
    """The rollouts to this share of the best success of `plain`, over those of `plain`; None where
    `chosen` did not reach it."""
    target *= max(success for _, success in plain)
    needed = _rollouts_to(target, chosen)
    reference = _rollouts_to(target, plain)
    return needed / reference if needed is not None and reference else None


def _rollouts_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """On the line between two evaluations; None where the curve stays below."""
    count, reached = curve[0]
    for rollouts, success in curve[1:]:
        if success >= target:
            part = 1.0 if success == reached else max((target - reached) / (success - reached), 0)
            return count + part * (rollouts - count)
        count, reached = rollouts, success
    return None


def markdown_of_distill(result: Json) -> str:
    lines = ["## From a teacher", ""]
    lines += ["| seed | base | teacher | student | rollouts: teacher, student |"]
    lines += ["|---|---|---|---|---|"]
    for row in result["rows"]:
        shares = " | ".join(f"{row[name]:.3f}" for name in ("base", "teacher", "student"))
        lines.append(f"| {row['seed']} | {shares} | {', '.join(map(str, row['rollouts']))} |")
    return "\n".join([*lines, ""])


def markdown_of_useful(result: Json) -> str:
    lines = ["## Tasks that teach", ""]
    lines += ["| task | seed | passes | useful | rollouts to 0.9 of the best | to the best |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in result["rows"]:
        curves: list[str] = []
        for sampling in SAMPLINGS:
            points = [f"{rollouts}: {success:.2f}" for rollouts, success in row[sampling]]
            curves.append(", ".join(points))
        cells = ["not reached" if share is None else f"{share:.2f}" for share in row["shares"]]
        lines.append(f"| {row['task']} | {row['seed']} | {' | '.join([*curves, *cells])} |")
    return "\n".join([*lines, ""])
