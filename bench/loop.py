"""The judged loop on a small real model, played through the tools: what each round was worth, with
its interval.

    scripts/loop [--only TASK] [--seeds N] [--json FILE] [--markdown FILE]

For each task: evaluate the base model on the eval split; sample several attempts at train tasks,
curate the right ones; sft on them, or on gold answers where none was right; evaluate; grpo from
there; evaluate; compare each round with the one before, and the last with the base model. Nothing
is chosen by looking at the outcome: docs/loop.md holds what came out."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import bare, dates, lessons, rows
from flash_mcp.cli.demo import DemoSession, connected, outcome, watch
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE

Json = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long. `environment` None: the calculator of env_setup."""

    about: str
    environment: str | None
    limits: Json
    """Of all attempts: environment_args, max_tokens."""
    sample: Json
    """The attempts at train tasks that sft learns from: limit, attempts."""
    sft: Json
    grpo: Json


SEEDED = {"bare": bare.play, "distill": lessons.distill, "useful": lessons.useful}
"""What is played with several seeds."""
ADAPTER: Json = {"lora_rank": 16, "lora_alpha": 32, "learning_rate": 2e-4}
TASKS = {
    "calculator": Task(
        "ask a calculator, then answer; several turns",
        None,
        {"max_tokens": 32},
        {"limit": 96, "attempts": 8},
        {"epochs": 2, "batch_size": 8, **ADAPTER},
        {"steps": 10, "batch_size": 4, "group_size": 8, "save_every": 5, **ADAPTER},
    ),
    "chain_sum": Task(
        "add or subtract two numbers of one or two digits without a tool; one turn",
        "reasoning-gym:chain_sum",
        {
            "max_tokens": 32,
            "environment_args": {
                "min_terms": 2,
                "max_terms": 2,
                "min_digits": 1,
                "max_digits": 2,
                "train_size": 400,
                "eval_size": 200,
            },
        },
        {"limit": 200, "attempts": 4},
        {"epochs": 2, "batch_size": 8, **ADAPTER},
        {"steps": 20, "batch_size": 8, "group_size": 8, "save_every": 10, **ADAPTER},
    ),
}


async def play(session: DemoSession, task: Task, model: str | None, folder: Path) -> Json:
    """The figures of one task: {"evaluations", "curated", "comparisons", "seconds"}."""
    session.seconds = {}
    common: Json = {
        "environment": task.environment or await _published(session, folder),
        **task.limits,
    }
    base = {"model": model} if model else {}
    evaluations: Json = {}
    with session.timed("all"):
        with session.timed("evaluate"):
            evaluations["base"] = await _evaluated(session, **common, **base)
        with session.timed("sample"):
            sampled = await _evaluated(session, **common, **base, split="train", **task.sample)
        curated = await _curated(session, sampled["run_id"])
        dataset = {"dataset": curated["dataset"]} if curated else {}
        adapter: Json = {}
        for algorithm, values in (("sft", {**task.sft, **dataset}), ("grpo", task.grpo)):
            with session.timed(algorithm):
                wanted = {**common, **base, **adapter, **values, "algorithm": algorithm}
                run_id = (await session.call("train", **wanted))["run_id"]
                view = await watch(session, run_id)
            session.console.print(
                f"  {run_id}: {view.get('outlook', view['state'])}", markup=False, highlight=False
            )
            adapter = {"init_from_adapter": f"{run_id}@{view['step']}"}
            with session.timed("evaluate"):
                evaluations[algorithm] = await _evaluated(session, **common, model=run_id)
    comparisons = [
        {
            "base": one,
            "other": other,
            **await _compared(session, evaluations[one], evaluations[other]),
        }
        for one, other in (("base", "sft"), ("sft", "grpo"), ("base", "grpo"))
    ]
    return {
        "about": task.about,
        "evaluations": evaluations,
        "sampled": sampled,
        "curated": curated and curated["counts"],
        "comparisons": comparisons,
        "seconds": session.seconds,
    }


async def _published(session: DemoSession, folder: Path) -> str:
    await session.call("env_setup", folder=str(folder), template="calculator")
    return (await session.call("env_push", folder=str(folder), name="calculator"))["environment"]


async def _evaluated(session: DemoSession, **wanted: Any) -> Json:
    """{"run_id", and the evaluation's scores}, once it has ended."""
    made = await session.call("evaluate", **wanted)
    while made["state"] in ACTIVE:
        made = (await session.call("status", quiet=True, run_id=made["run_id"], wait_s=20))["run"]
    if made["state"] != "succeeded":
        raise FlashError(
            "worker_failed", f"{made['run_id']} {made['state']}", fix="flash-mcp status says why"
        )
    scores: Json = made["scores"]
    found = f"{scores['success']:.3f} [{scores['low']:.3f}, {scores['high']:.3f}]"
    session.console.print(
        f"  success {found}, reward {scores['reward']:.3f} of {scores['tasks']} tasks"
    )
    return {"run_id": made["run_id"], **scores}


async def _curated(session: DemoSession, run_id: str) -> Json | None:
    """A dataset of the right attempts; None where there are none, and sft learns the environment's
    gold answers.
    """
    chosen: Json = {
        "runs": [run_id],
        "name": "right",
        "filter": "solved",
        "max_per_task": 2,
        "holdout": 0.1,
    }
    try:
        return await session.call("curate", **chosen)
    except FlashError as error:
        if "[dataset_invalid]" not in error.what:
            raise
        session.console.print(f"  {error.what}", markup=False, highlight=False)
        return None


async def _compared(session: DemoSession, base: Json, other: Json) -> Json:
    found = await session.call("compare", base=base["run_id"], other=other["run_id"], flips=0)
    session.console.print(
        f"  [bold]{found['verdict']}[/]: {found['success']['explanation']}", highlight=False
    )
    return {
        "verdict": found["verdict"],
        "newly_solved": found["newly_solved"],
        "no_longer": found["no_longer"],
        **{key: found["success"].get(key) for key in ("change", "low", "high", "test", "p")},
    }


def markdown(figures: Json) -> str:
    """The figures as the tables of docs/loop.md."""
    lines: list[str] = []
    for name, found in figures.items():
        counts, sampled = found["curated"], found["sampled"]
        attempts = ", ".join(
            f"pass@{k} {value:.3f}" for k, value in (sampled.get("pass_at") or {}).items()
        )
        lines += [f"## {name}", "", f"{found['about'][0].upper()}{found['about'][1:]}.", ""]
        lines += ["| model | success | 95 % interval | reward | tokens |", "|---|---|---|---|---|"]
        for model, row in found["evaluations"].items():
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            lines.append(
                f"| {model} | {row['success']:.3f} | {interval} | {row['reward']:.3f} | "
                f"{row['tokens_mean']:.1f} |"
            )
        curated = (
            "No rollout was correct, so there was nothing to curate, and `sft` trained on the gold "
            "answers."
        )
        if counts:
            curated = (
                f"`curate` kept {counts['train_rows']} conversations of {counts['train_tasks']} "
                f"tasks for training and held {counts['holdout_rows']} out."
            )
        lines += [
            "",
            f"The base model sampled {sampled['n']} rollouts on {sampled['tasks']} train tasks "
            f"({attempts}). {curated}",
            "",
            "| compared | verdict | change of success | 95 % interval | newly solved, no longer "
            "| test |",
            "|---|---|---|---|---|---|",
        ]
        for row in found["comparisons"]:
            chance = "" if row["p"] is None else f", p = {row['p']:.2g}"
            lines.append(
                f"| {row['base']} to {row['other']} | {row['verdict']} | {row['change']:+.3f} | "
                f"{row['low']:+.3f} to {row['high']:+.3f} | "
                f"{row['newly_solved']}, {row['no_longer']} | {row['test']}{chance} |"
            )
        times = ", ".join(f"{step} {seconds:.0f}" for step, seconds in found["seconds"].items())
        lines += ["", f"Seconds: {times}.", ""]
    return "\n".join(lines)


async def run(console: Console, names: list[str], model: str | None, seeds: int = 1) -> Json:
    figures: Json = {}
    if names[0] in SEEDED:
        with tempfile.TemporaryDirectory(prefix="flash-seeded-") as folder:
            async with connected(console) as session:
                return {names[0]: await SEEDED[names[0]](session, Path(folder), seeds)}
    if names == ["dates"]:
        async with connected(console) as session:
            return {"dates": await dates.play(session, model=model)}
    if names == ["json"]:
        async with connected(console) as session:
            played = await dates.play(session, dates.JSON_PLAN, model, dates.JSON_FOLDER)
            return {"json": played}
    if names[0] in rows.DAYS:
        with tempfile.TemporaryDirectory(prefix="flash-rows-") as folder:
            async with connected(console) as session:
                played = await rows.play(session, Path(folder), model=model, day=names[0])
                return {names[0]: played}
    with tempfile.TemporaryDirectory(prefix="flash-loop-") as folder:
        async with connected(console) as session:
            for name in names:
                console.rule(name)
                figures[name] = await play(session, TASKS[name], model, Path(folder, name))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = [*TASKS, *dates.ABOUT, *rows.DAYS, *SEEDED]
    parser.add_argument("--only", choices=choices, help="this task alone")
    parser.add_argument(
        "--seeds", type=int, default=1, help="with --only bare, distill, useful: runs a task"
    )
    parser.add_argument("--model", help="base model (default: the catalog's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    options = parser.parse_args()
    console, started = Console(soft_wrap=True), time.monotonic()
    names = [options.only] if options.only else list(TASKS)
    figures = outcome(console, run, names, options.model, options.seeds)
    if figures is None:
        return 1
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.markdown:
        own = {"bare": bare.markdown, **dict.fromkeys(rows.DAYS, rows.markdown)}
        own |= {"distill": lessons.markdown_of_distill, "useful": lessons.markdown_of_useful}
        own |= dict.fromkeys(dates.ABOUT, dates.markdown)
        pages = [own[name](value) for name, value in figures.items() if name in own]
        options.markdown.write_text("".join(pages) or markdown(figures))
    console.print(f"\n{(time.monotonic() - started) / 60:.1f} minutes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
