"""Evaluates and trains a small model in environments of packages that other people wrote.

    scripts/hubs --learn [--only PACKAGE] [--write]

Each environment is pushed, and the default model trains in it: a warm-up on gold answers if there
are some, and then GRPO, with the same held-out tasks evaluated before and after each. An environment
that is only for evaluation is evaluated. Everything goes through the product's tools, in the
interpreters that scripts/hubs installs. --write puts the rows into docs/hubs.md."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from flash_mcp.cli.demo import DemoSession, connected, watch
from flash_mcp.protocol.errors import FlashError
from tests import docs
from tests.hubs import FOLDERS
from tests.places import ROOT

DOCUMENT = ROOT / "docs" / "hubs.md"
HELD_OUT = 24
WAIT_S = 1800.0  # what the packages of an environment may take to be installed
COMMON: dict[str, Any] = {
    "lora_rank": 16, "lora_alpha": 32, "eval_after": True, "eval_examples": HELD_OUT, "accept_failed_gate": True,
}  # fmt: skip
GRPO: dict[str, Any] = {"batch_size": 4, "group_size": 8, "learning_rate": 1e-4}


@dataclass(frozen=True)
class Lesson:
    """One environment. Without steps it is evaluated."""

    hub: str
    name: str
    steps: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    split: str = "eval"  # what is evaluated where there are no steps

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.fields['seed']}" if "seed" in self.fields else self.name


TEAM = {"max_tokens": 24, "learning_rate": 2e-4, "eval_examples": 100}
LESSONS = [
    Lesson("verifiers", "one agent", steps=2, fields={"max_tokens": 8}),
    Lesson("inspect", "agent_threat_bench.agent_threat_bench_memory_poison", fields={"max_tokens": 64}, split="train"),
    *(
        Lesson("agents", name, steps=16, fields={**TEAM, "seed": seed})
        for seed in range(3)
        for name in ("roles and threads", "LangGraph")
    ),
]


@dataclass(frozen=True)
class Learned:
    """The figures of one lesson: scores of the held-out tasks at first and after each training, or of the tasks
    evaluated."""

    lesson: Lesson
    scores: Sequence[Mapping[str, Any]]
    minutes: float

    @property
    def row(self) -> tuple[object, ...]:
        lesson = self.lesson
        return (
            lesson.hub, lesson.title, f"{lesson.steps} GRPO" if lesson.steps else "-", self.scores[0]["n"],
            ", then ".join(map(_success, self.scores)),
            ", then ".join(f"{scores['reward']:.3f}" for scores in self.scores), f"{self.minutes:.0f}",
        )  # fmt: skip


def _success(scores: Mapping[str, Any]) -> str:
    return f"{scores['success']:.2f} ({scores['low']:.2f} to {scores['high']:.2f})"


async def learn(session: DemoSession, lesson: Lesson) -> Learned:
    started = time.monotonic()
    args = {"name": lesson.name}
    folder = str(FOLDERS / lesson.hub)
    pushed = await session.call("env_push", name=lesson.hub, folder=folder, environment_args=args, load=False)
    wanted = {"environment": pushed["environment"], "environment_args": args, **lesson.fields}
    if lesson.steps:
        scores = await _trained(session, lesson, {**COMMON, **wanted})
    else:
        wanted |= {"limit": HELD_OUT, "split": lesson.split}
        await watch(session, await _begun(session, "evaluate", **wanted))
        scores = [(await session.call("evaluate", **wanted))["scores"]]
    return Learned(lesson, scores, (time.monotonic() - started) / 60)


async def _begun(session: DemoSession, tool: str, **wanted: Any) -> str:
    """The id of a new run. Until the environment's packages are installed, and while others
    compute, it takes longer to load than a call may."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return (await session.call(tool, **wanted))["run_id"]
        except FlashError as error:
            is_slow = "not_ready" in error.what or "environment_timeout" in error.what
            if not is_slow or time.monotonic() > deadline:
                raise


async def _trained(session: DemoSession, lesson: Lesson, wanted: dict[str, Any]) -> list[Mapping[str, Any]]:
    """The scores before and after the training."""
    wanted = {**wanted, "steps": lesson.steps, "eval_before": True}
    view = await watch(session, await _begun(session, "train", **{**GRPO, **wanted}))
    return [view["held_out"][0], view["held_out"][-1]]


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
