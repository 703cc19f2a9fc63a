"""From what models wrote to what one can learn from: which tasks, which attempts of them, and which
are held back.

    curated = curate(attempts, Plan(keep=compile_filter("pass@4 < 0.9")), held_out)
    curated.train, curated.holdout, curated.counts

Pure functions; tools/curation.py reads the runs, and datasets.py keeps the result. Nothing depends
on the order of the attempts, on chance or on the clock: the same attempts and plan are the same
dataset, whenever it is made."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, Field

from environments.process.host import EnvironmentFault, EnvironmentHost
from flash_mcp.judgement.task_filter import TaskFilter, TaskScores
from flash_mcp.protocol.records import Json

Select = Literal["correct", "best", "best-n", "shortest", "all"]
Source = Literal["rollouts", "evaluations"]
MAX_OPENED = 1000
OPENING_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Attempt:
    """One conversation of a run; `run_id`, `source`, `step` and `index` tell it from every other.

    The first `prompt_messages` messages are the task's; all assistant messages after them are the
    model's."""

    run_id: str
    source: Source
    step: int
    index: int
    task_id: str
    split: str
    reward: float
    success: bool
    messages: list[Json] = field(hash=False)
    prompt_messages: int
    truncated: bool = False
    failed: bool = False
    """Environment code or its process failed: it says nothing about the model."""

    @property
    def task(self) -> tuple[str, str]:
        """An id alone is not enough: train and eval rows may be numbered alike."""
        return self.split, self.task_id

    @property
    def key(self) -> tuple[str, Source, int, int]:
        return self.run_id, self.source, self.step, self.index

    @property
    def answers(self) -> list[str]:
        """What the model wrote."""
        said = (
            message
            for message in self.messages[self.prompt_messages :]
            if message["role"] == "assistant"
        )
        return [str(message["content"]) for message in said]

    @property
    def is_learnable(self) -> bool:
        """Whether it can be learnt from: an answer that was cut off would teach to stop in the
        middle.
        """
        return not self.truncated and any(answer.strip() for answer in self.answers)

    def row(self) -> Json:
        """The attempt as a line of a dataset, without what the environment said after the last
        answer.
        """
        last = max(
            number for number, message in enumerate(self.messages) if message["role"] == "assistant"
        )
        provenance = {
            name: getattr(self, name)
            for name in (
                "run_id",
                "source",
                "step",
                "index",
                "task_id",
                "split",
                "reward",
                "success",
            )
        }
        return {
            "messages": self.messages[: last + 1],
            "prompt_messages": self.prompt_messages,
            "provenance": provenance,
        }


@dataclass(frozen=True)
class Plan:
    """What to keep. `success_threshold` decides what is correct, for the filter and for the
    selection alike.
    """

    keep: TaskFilter | None = None
    select: Select = "correct"
    max_per_task: int | None = None
    success_threshold: float | None = None
    holdout: float = 0.0
    deduplicate: bool = True
    allow_eval_tasks: bool = False

    def is_correct(self, attempt: Attempt) -> bool:
        """As the environment judged it, or by its reward where a threshold is given."""
        return (
            attempt.success
            if self.success_threshold is None
            else attempt.reward >= self.success_threshold
        )

    def to_dict(self) -> Json:
        values = {name: value for name, value in vars(self).items() if name != "keep"}
        return {"filter": self.keep.text if self.keep else None, **values}


class Counts(BaseModel):
    """Where every attempt and every task went."""

    attempts: int = Field(default=0, description="Attempts read.")
    repeated: int = Field(default=0, description="Left out: the same attempt a second time.")
    eval_attempts: int = Field(
        default=0, description="At tasks of the eval split; left out unless allowed."
    )
    eval_tasks: int = Field(default=0, description="Those tasks.")
    errors: int = Field(
        default=0, description="Left out: environment code failed, which says nothing of the model."
    )
    tasks: int = Field(default=0, description="Tasks with attempts that count.")
    always_solved: int = Field(default=0, description="Tasks whose attempts were all correct.")
    sometimes_solved: int = Field(
        default=0, description="Tasks of which some attempts were correct."
    )
    never_solved: int = Field(default=0, description="Tasks without a correct attempt.")
    insufficient: int = Field(
        default=0, description="Tasks left out: fewer attempts than the filter's pass@k needs."
    )
    filtered: int = Field(default=0, description="Tasks left out by the filter.")
    unselected: int = Field(
        default=0, description="Tasks that passed the filter without an attempt to select."
    )
    truncated: int = Field(
        default=0, description="Attempts at tasks that passed, left out: cut off or empty answers."
    )
    duplicates: int = Field(
        default=0, description="Attempts at tasks that passed, left out: word for word another one."
    )
    train_tasks: int = Field(default=0, description="Tasks to train on.")
    train_rows: int = Field(default=0, description="Conversations to train on.")
    holdout_tasks: int = Field(default=0, description="Tasks held back.")
    holdout_rows: int = Field(default=0, description="Conversations held back.")


@dataclass(frozen=True)
class Curated:
    train: list[Attempt]
    holdout: list[Attempt]
    counts: Counts


def curate(attempts: Iterable[Attempt], plan: Plan, held_out: HeldOut) -> Curated:
    """The attempts to learn from, by task, and what became of the others."""
    counts = Counts()
    tasks = _by_task(attempts, plan, held_out, counts)
    kept = [task for task in sorted(tasks) if _passes(tasks[task], plan, counts)]
    learnable = {task: [each for each in tasks[task] if each.is_learnable] for task in kept}
    counts.truncated = sum(len(tasks[task]) - len(learnable[task]) for task in kept)
    if plan.deduplicate:
        before = sum(map(len, learnable.values()))
        learnable = _without_duplicates(learnable)
        counts.duplicates = before - sum(map(len, learnable.values()))
    train, holdout = list[Attempt](), list[Attempt]()
    for task, candidates in learnable.items():
        chosen = _select(candidates, plan)
        counts.unselected += not chosen
        if is_held_back(task[1], plan.holdout):
            holdout += chosen
            counts.holdout_tasks += bool(chosen)
        else:
            train += chosen
            counts.train_tasks += bool(chosen)
    counts.train_rows, counts.holdout_rows = len(train), len(holdout)
    return Curated(train, holdout, counts)


def is_held_back(task_id: str, share: float) -> bool:
    """Whether a task belongs to the holdout. Its id alone decides, so that more runs or tasks move
    none across.
    """
    return (
        int.from_bytes(hashlib.sha256(task_id.encode(errors="replace")).digest()[:8])
        < share * 2**64
    )


def scores_of(attempts: list[Attempt], plan: Plan) -> TaskScores:
    """What the attempts at one task came to; at least one."""
    rewards = [attempt.reward for attempt in attempts]
    correct = sum(map(plan.is_correct, attempts))
    return TaskScores(len(attempts), correct, fmean(rewards), max(rewards), min(rewards))


def _by_task(
    attempts: Iterable[Attempt], plan: Plan, held_out: HeldOut, counts: Counts
) -> dict[tuple[str, str], list[Attempt]]:
    """The attempts that count, each once, by task and in an order of their own."""
    found: dict[tuple[str, Source, int, int], Attempt] = {}
    for attempt in attempts:
        counts.attempts += 1
        counts.repeated += attempt.key in found
        found.setdefault(attempt.key, attempt)
    tasks: dict[tuple[str, str], list[Attempt]] = {}
    eval_tasks: set[tuple[str, str]] = set()
    for key in sorted(found):
        attempt = found[key]
        if held_out.holds(attempt):
            counts.eval_attempts += 1
            eval_tasks.add(attempt.task)
            if not plan.allow_eval_tasks:
                continue
        if attempt.failed:
            counts.errors += 1
        else:
            tasks.setdefault(attempt.task, []).append(attempt)
    counts.eval_tasks, counts.tasks = len(eval_tasks), len(tasks)
    return tasks


def _passes(attempts: list[Attempt], plan: Plan, counts: Counts) -> bool:
    scores = scores_of(attempts, plan)
    counts.always_solved += scores.n_correct == scores.n
    counts.sometimes_solved += 0 < scores.n_correct < scores.n
    counts.never_solved += not scores.solved
    verdict = plan.keep(scores) if plan.keep else True
    counts.insufficient += verdict is None
    counts.filtered += verdict is False
    return verdict is True


def _without_duplicates(
    tasks: dict[tuple[str, str], list[Attempt]],
) -> dict[tuple[str, str], list[Attempt]]:
    """Of attempts with the same words the one that was rewarded best, whatever tasks they were made
    at.
    """
    first: dict[str, Attempt] = {}
    for attempt in sorted(
        (each for attempts in tasks.values() for each in attempts), key=_best_first
    ):
        first.setdefault(_digest(attempt.row()["messages"]), attempt)
    kept = {attempt.key for attempt in first.values()}
    return {
        task: [attempt for attempt in attempts if attempt.key in kept]
        for task, attempts in tasks.items()
    }


def _select(attempts: list[Attempt], plan: Plan) -> list[Attempt]:
    """In the order of preference; ties are broken by a hash, which favours neither early steps nor
    short answers.
    """
    correct = [attempt for attempt in attempts if plan.is_correct(attempt)]
    match plan.select:
        case "correct":
            return sorted(correct, key=_best_first)[: plan.max_per_task]
        case "best":
            return sorted(attempts, key=_best_first)[:1]
        case "best-n":
            return sorted(attempts, key=_best_first)[: plan.max_per_task]
        case "shortest":
            return sorted(correct, key=_shortest_first)[: plan.max_per_task or 1]
        case "all":
            return sorted(attempts, key=lambda attempt: _digest(attempt.key))[: plan.max_per_task]


def _best_first(attempt: Attempt) -> tuple[float, str]:
    return -attempt.reward, _digest(attempt.key)


def _shortest_first(attempt: Attempt) -> tuple[int, str]:
    """By characters: attempts of models with different tokenizers may be pooled."""
    return sum(map(len, attempt.answers)), _digest(attempt.key)


# -- contamination ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """What an environment holds back for evaluation, so that a task can be told by its id, its
    question or its prompt.

    `questions` and `prompts` are digests of texts in lower case with single spaces. A question that
    several eval tasks share does not tell them apart and is not among them; their prompts do.
    `opened` of the `total` eval tasks were asked for their prompts."""

    ids: frozenset[str] = frozenset()
    questions: frozenset[str] = frozenset()
    prompts: frozenset[str] = frozenset()
    train_questions: Mapping[str, str] = field(default_factory=dict[str, str])
    opened: int = 0
    total: int = 0

    def holds(self, attempt: Attempt) -> bool:
        """Whether it is an attempt at a task of the eval split, under whatever name."""
        question = self.train_questions.get(attempt.task_id)
        return (
            attempt.split == "eval"
            or (question is None and attempt.task_id in self.ids)
            or question in self.questions
            or prompt_digest(attempt.messages[: attempt.prompt_messages]) in self.prompts
        )


async def read_held_out(host: EnvironmentHost) -> HeldOut:
    """Ask a loaded environment. Raises EnvironmentFault where it cannot list its tasks.

    Prompts are asked for MAX_OPENED tasks at most and for OPENING_TIMEOUT_S: environments may be
    slow to open one."""
    train, held_out = await host.tasks("train"), await host.tasks("eval")
    asked = Counter(question for _, question in held_out)
    prompts: list[str] = []

    async def look(index: int) -> None:
        with suppress(EnvironmentFault):  # a task that cannot be opened cannot be trained on either
            opening = await host.open("eval", index)
            prompts.append(prompt_digest(opening.messages))
            await host.close(opening.episode)

    with suppress(TimeoutError):
        async with asyncio.timeout(OPENING_TIMEOUT_S), asyncio.TaskGroup() as group:
            for index in range(min(len(held_out), MAX_OPENED)):
                group.create_task(look(index))
    return HeldOut(
        ids=frozenset(task_id for task_id, _ in held_out),
        questions=frozenset(question for question, times in asked.items() if times == 1),
        prompts=frozenset(prompts),
        train_questions=dict(train),
        opened=len(prompts),
        total=len(held_out),
    )


def prompt_digest(messages: Iterable[Json]) -> str:
    """Of what a task shows the model, whatever its spacing and case."""
    text = "\n".join(str(message.get("content")) for message in messages)
    return hashlib.sha256(" ".join(text.casefold().split()).encode(errors="replace")).hexdigest()


# -- files -----------------------------------------------------------------------------------------


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
