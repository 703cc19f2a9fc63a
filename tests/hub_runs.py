"""Evaluates and trains a small model in environments of packages that other people wrote.

    scripts/hubs --learn [--only PACKAGE] [--write]

Each environment is pushed, and the default model trains in it for some steps, with the same held-out
tasks evaluated before and after; an environment that is only for evaluation is evaluated. Everything
goes through the product's tools, in the interpreters that scripts/hubs installs. The rows that
--write puts into docs/hubs.md are those of one run each."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from flash_mcp.cli.demo import Session, connected, watch
from tests import docs
from tests.hubs import FOLDERS
from tests.places import ROOT

DOCUMENT = ROOT / "docs" / "hubs.md"
HELD_OUT = 40
TRAINING: dict[str, Any] = {
    "batch_size": 4,
    "group_size": 8,
    "learning_rate": 2e-4,
    "lora_rank": 16,
    "lora_alpha": 32,
    "eval_before": True,
    "eval_after": True,
    "eval_examples": HELD_OUT,
}


@dataclass(frozen=True)
class Lesson:
    """One environment. `args` go to its load_environment; without `steps` it is evaluated."""

    hub: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    split: str = "eval"
    """What is evaluated where there are no steps."""


SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
WORDS = {"min_word_len": 3, "max_word_len": 3}
LESSONS = [
    Lesson("verifiers", "SingleTurnEnv chain_sum", SUMS, steps=8, fields={"max_tokens": 24}),
    Lesson(
        "verifiers",
        "SingleTurnEnv spell_backward",
        WORDS,
        steps=3,
        fields={"max_tokens": 24, "eval_examples": 20},
    ),
    Lesson("verifiers", "MultiTurnEnv GuessTheNumber", fields={"max_tokens": 48}),
    Lesson("verifiers", "ToolEnv chain_sum", fields={"max_tokens": 64}),
    Lesson(
        "inspect",
        "agent_threat_bench.agent_threat_bench_memory_poison",
        fields={"max_tokens": 64},
        split="train",
    ),
]


@dataclass(frozen=True)
class Learned:
    """The figures of one lesson: scores of the held-out tasks, and of the tasks evaluated."""

    lesson: Lesson
    before: Mapping[str, Any]
    after: Mapping[str, Any] | None
    minutes: float

    @property
    def row(self) -> tuple[object, ...]:
        success = [_success(self.before)]
        rewards = [f"{self.before['reward']:.3f}"]
        if self.after:
            success.append(_success(self.after))
            rewards.append(f"{self.after['reward']:.3f}")
        return (
            self.lesson.hub,
            self.lesson.name,
            self.lesson.steps or "-",
            self.before["n"],
            ", then ".join(success),
            ", then ".join(rewards),
            f"{self.minutes:.0f}",
        )


def _success(scores: Mapping[str, Any]) -> str:
    return f"{scores['success']:.2f} ({scores['low']:.2f} to {scores['high']:.2f})"


async def learn(session: Session, lesson: Lesson) -> Learned:
    started = time.monotonic()
    args = {"name": lesson.name, **lesson.args}
    folder = str(FOLDERS / lesson.hub)
    pushed = await session.call(
        "env_push", name=lesson.hub, folder=folder, environment_args=args, load=False
    )
    wanted = {
        "environment": pushed["environment"],
        "environment_args": args,
        **lesson.fields,
    }
    if lesson.steps:
        run = await session.call(
            "train", **{**TRAINING, **wanted}, steps=lesson.steps, accept_failed_gate=True
        )
        view = await watch(session, run["run_id"])
        before, after = view["held_out"][0], view["held_out"][-1]
    else:
        run = await session.call("evaluate", **wanted, limit=HELD_OUT, split=lesson.split)
        await watch(session, run["run_id"])
        found = await session.call("evaluate", **wanted, limit=HELD_OUT, split=lesson.split)
        before, after = found["scores"], None
    return Learned(lesson, before, after, (time.monotonic() - started) / 60)


def table(found: list[Learned]) -> str:
    head = ("package", "environment", "steps", "tasks", "success", "mean reward", "minutes")
    return docs.table(head, [each.row for each in found])


async def run(only: list[str]) -> list[Learned]:
    console = Console(file=sys.stderr)
    found: list[Learned] = []
    async with connected(console) as session:
        for lesson in LESSONS:
            if not only or {lesson.hub, lesson.name} & set(only):
                found.append(await learn(session, lesson))
                console.print(table(found))
    return found
