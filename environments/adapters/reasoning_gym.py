"""reasoning-gym datasets: one question, one answer between <answer> and </answer>.

    return load("chain_sum", train_size=500, eval_size=100, seed=0, min_terms=3)

The other arguments configure the dataset. Some datasets and scorers have faults, which this adapter
corrects:

- Some scorers raise on a wrong answer, or pay 0.01 or 1.0 for any answer. What a task pays for
  worthless answers is its floor, and the reward counts from there. If the floor is full pay, the
  answer is compared with the gold answer instead.
- Some scorers pay part of the reward for a near miss. `success` means a full score.
- Item `i` under seed `s` is item `i - 1` under seed `s + 1`. So the eval split uses seeds that are
  a million away, and a train question that is in it, or that repeats, is left out.
- Some datasets use the global random generators, which differ between processes. They are seeded
  before each item.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import math
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, cast

from environments import task_cache
from environments.base import (
    FULL_SCORE,
    ArgumentsError,
    ChatMessage,
    DatasetError,
    EnvironmentSingleTurn,
    RewardMetric,
    RewardResult,
    TaskExample,
)

EVAL_SEED_OFFSET = 1_000_000
DRAWS_PER_TASK = 4
"""How many items are drawn for each wanted task before the dataset counts as exhausted."""
GENERATION_LIMIT_S = 20.0
"""CPU time for all tasks: what else runs on the machine must not decide whether a run starts."""
SIZES = (500, 100)
SIZES_OF_SLOW = {
    "advanced_geometry": (300, 60),
    "countdown": (150, 50),
    "futoshiki": (20, 10),
    "intermediate_integration": (100, 30),
    "knight_swap": (10, 6),
    "number_sequence": (120, 40),
    "polynomial_equations": (250, 60),
    "puzzle24": (80, 30),
    "quantum_lock": (150, 50),
    "rubiks_cube": (300, 60),
    "sokoban": (90, 30),
    "sudoku": (200, 50),
    "zebra_puzzles": (50, 20),
}
"""Sizes of the train and eval splits, by default: those of slow datasets take some 6 s to make."""
WORTHLESS = ("", "?", "asdf qwer zxcv")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INSTRUCTION = "Write the final answer, and nothing else, in tags: <answer>your answer</answer>."


def load(
    dataset: str,
    *,
    train_size: int | None = None,
    eval_size: int | None = None,
    seed: int = 0,
    tag_reward: float = 0.1,
    instruction: str = INSTRUCTION,
    **config: Any,
) -> ReasoningGym:
    """The environment of a dataset by name. `config` goes to the dataset; it sets the difficulty.

    Sizes that are left out are 500 and 100, or fewer for a dataset that is slow to make. An answer
    in tags earns `tag_reward`; the rest of the reward is for its correctness. Text between tags of
    the instruction is no answer, unless it is the gold answer of a task.

    Raises DatasetError, or ArgumentsError if an argument does not fit the dataset."""
    package = importlib.import_module("reasoning_gym")
    names: list[str] = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if dataset not in names:
        near = ", ".join(difflib.get_close_matches(dataset, names) or names)
        raise DatasetError(f"reasoning-gym has no dataset {dataset!r}; try one of: {near}")
    if not 0.0 <= tag_reward <= 0.5:
        raise ArgumentsError(f"tag_reward is {tag_reward}; it must lie between 0 and 0.5")
    sizes = list(SIZES_OF_SLOW.get(dataset, SIZES))
    if train_size is not None:
        sizes[0] = train_size
    if eval_size is not None:
        sizes[1] = eval_size

    def make(first_seed: int, size: int) -> Any:
        try:
            return package.create_dataset(dataset, seed=first_seed, size=size, **config)
        except (TypeError, ValueError, AssertionError) as error:
            raise ArgumentsError(
                f"{dataset} does not accept its options {config}: {error}"
            ) from error

    def generate() -> list[tuple[str, Any]]:
        deadline = time.thread_time() + GENERATION_LIMIT_S
        seen: set[str] = set()
        held_out = list(_entries(make, seed + EVAL_SEED_OFFSET, sizes[1], seen, deadline))
        train = list(_entries(make, seed, sizes[0], seen, deadline))
        while len(train) < sizes[0] and len(train) + 1 < len(held_out):
            # There are few different questions: each split gets half.
            train.append(held_out.pop())
        return [("train", item) for item in train] + [("eval", item) for item in held_out]

    tasks: dict[str, list[TaskExample]] = {"train": [], "eval": []}
    name = task_cache.name_of(dataset, train_size, eval_size, seed, sorted(config.items()))
    for split, entry in task_cache.rows(name, generate):
        task = TaskExample(record=entry, input=entry["question"], output=entry["answer"])
        tasks[split].append(task)
    if not tasks["train"]:
        what = "every question that was drawn is in the eval split"
        raise ArgumentsError(f"{dataset}: {what}; choose options with more different questions")
    return ReasoningGym(make(seed, 1), tag_reward, instruction, tasks["train"], tasks["eval"])


@dataclass(eq=False)
class ReasoningGym(EnvironmentSingleTurn):
    """The tasks of one dataset. `scorer` is an object of that dataset."""

    scorer: Any
    tag_reward: float
    instruction: str
    dataset: Sequence[TaskExample] = ()
    eval_dataset: Sequence[TaskExample] = ()
    floors: dict[str, float] = field(default_factory=dict[str, float])
    """What a worthless answer earns, by question."""

    placeholders: set[str] = field(init=False)
    """What the instruction shows between tags as an example."""

    max_score_concurrency = 1
    """The scorers may not be thread-safe, and they compute rather than wait."""

    def __post_init__(self) -> None:
        gold = {str(task.output).strip() for task in (*self.dataset, *self.eval_dataset)}
        self.placeholders = set(_tagged(self.instruction)) - gold

    def build_prompt_messages(self, example: TaskExample) -> list[ChatMessage]:
        return [{"role": "user", "content": f"{example.input}\n\n{self.instruction}"}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        result = _tagged(response_text or "")
        answer = result[-1] if result else ""
        if answer in self.placeholders:
            answer = ""
        right = self._rightness(answer, example) if answer else 0.0
        tagged = float(bool(answer))
        return RewardResult(
            score=self.tag_reward * tagged + (1 - self.tag_reward) * right,
            success=right >= FULL_SCORE,
            reason=None if answer else "nothing between <answer> and </answer>",
            metrics=[RewardMetric("tagged", score=tagged), RewardMetric("right", score=right)],
        )

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        if example.output is None:
            raise ValueError("this dataset has no gold answers, several answers may be right")
        return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]

    def _rightness(self, answer: str, example: TaskExample) -> float:
        """0 for the pay of a worthless answer, 1 for full pay."""
        if example.input not in self.floors:
            self.floors[example.input] = max(self._paid(text, example) for text in WORTHLESS)
        floor = self.floors[example.input]
        if floor >= FULL_SCORE:
            if example.output is None:
                return 0.0
            return float(answer.casefold().split() == str(example.output).casefold().split())
        return max(0.0, self._paid(answer, example) - floor) / (1.0 - floor)

    def _paid(self, answer: str, example: TaskExample) -> float:
        """The dataset's own score, within 0..1. It is 0 if the scorer raises on the answer."""
        try:
            paid = float(self.scorer.score_answer(answer, copy.deepcopy(example.record)))
        except Exception:
            return 0.0
        return min(max(paid, 0.0), 1.0) if math.isfinite(paid) else 0.0


def _entries(
    make: Any, first_seed: int, count: int, seen: set[str], deadline: float
) -> Iterator[Any]:
    """Up to `count` items whose questions are not in `seen`, which gets them."""
    dataset = make(first_seed, max(1, count * DRAWS_PER_TASK))
    result = 0
    for index in range(count * DRAWS_PER_TASK):
        if result == count:
            return
        if time.thread_time() > deadline:
            what = f"making the tasks takes longer than {GENERATION_LIMIT_S:g} s of CPU time"
            fix = "ask for fewer with train_size and eval_size"
            raise ArgumentsError(f"{what} ({result} of {count} done); {fix}")
        seed = first_seed + index
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        entry = dataset[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            result += 1
            yield _plain(entry)


def _plain(value: Any) -> Any:
    """The value with the numbers and texts of numpy as Python's own, which can be kept. Fractions
    become texts: they are in metadata that no scorer reads.
    """
    match value:
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return {_plain(key): _plain(item) for key, item in items}
        case list() | tuple():
            created = [_plain(item) for item in cast("list[Any]", value)]
            return created if isinstance(value, list) else tuple(created)
        case bool():
            return value
        case str() | Fraction():
            return str(value)
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case _:
            return value


def _tagged(text: str) -> list[str]:
    return [result.strip() for result in ANSWER.findall(text)]
