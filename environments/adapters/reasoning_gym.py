"""reasoning-gym datasets: one question, one answer between <answer> and </answer>.

    return load("chain_sum", train_size=500, eval_size=100, seed=0, min_terms=3)   # the rest configures the dataset

What its scorers were seen to do, and what is done about it here:
- Raise on a wrong answer, pay 0.01 for any, or pay 1.0 for any. What a task pays for worthless answers is its floor:
  the reward counts from there, and where the floor is full pay the gold answer is compared instead.
- Reach 1.0 only for a right answer: so `success` is a full score, and a near miss earns reward without being one.
- Item `i` under seed `s` is item `i - 1` under seed `s + 1`: so the eval split is drawn a million seeds away, and a
  train question that stands in it, or stood before, is left out.
- Draw from the global generators, which differ between processes: these are seeded before each item.
"""

from __future__ import annotations

import copy
import difflib
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

from environments.base import (
    ChatMessage,
    DatasetError,
    EnvironmentSingleTurn,
    RewardMetric,
    RewardResult,
    TaskExample,
)

EVAL_SEED_OFFSET = 1_000_000
DRAWS_PER_TASK = 4
"""Items drawn for each task that is wanted, before a dataset counts as having no more distinct
questions.
"""
GENERATION_TIMEOUT_S = 15.0
SOLVED = 1.0 - 1e-6
WORTHLESS = ("", "?", "asdf qwer zxcv")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INSTRUCTION = "Write the final answer, and nothing else, in tags: <answer>your answer</answer>."


def load(
    dataset: str,
    *,
    train_size: int = 500,
    eval_size: int = 100,
    seed: int = 0,
    tag_reward: float = 0.1,
    instruction: str = INSTRUCTION,
    **config: Any,
) -> ReasoningGym:
    """The environment of a dataset by name; `config` is the dataset's own (its difficulty, as a
    rule).

    `tag_reward` of the reward is for an answer in tags, the rest for how right it is. What the
    instruction itself has in tags is no answer."""
    import reasoning_gym  # noqa: PLC0415  # pyright: ignore
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415  # pyright: ignore

    names = cast("list[str]", sorted(DATASETS))  # pyright: ignore
    if dataset not in names:
        near = ", ".join(difflib.get_close_matches(dataset, names)) or f"one of {', '.join(names)}"
        raise DatasetError(f"reasoning-gym has no dataset {dataset!r}; try {near}")
    if not 0.0 <= tag_reward <= 0.5:
        raise ValueError(f"tag_reward is {tag_reward}; it must lie between 0 and 0.5")

    def make(first_seed: int, size: int) -> Any:
        return reasoning_gym.create_dataset(dataset, seed=first_seed, size=size, **config)  # pyright: ignore

    deadline = time.monotonic() + GENERATION_TIMEOUT_S
    held_out = list(_tasks(make, seed + EVAL_SEED_OFFSET, eval_size, set(), deadline))
    train = list(_tasks(make, seed, train_size, {task.input for task in held_out}, deadline))
    if not train:
        raise DatasetError(
            f"{dataset}: every question that was drawn stands in the eval split; use a harder config"
        )
    return ReasoningGym(make(seed, 1), train, held_out, tag_reward, instruction)


class ReasoningGym(EnvironmentSingleTurn):
    """Tasks of one dataset; `scorer` is that dataset's own object."""

    max_score_concurrency = 1
    """Its scorers are not said to be thread-safe, and compute rather than wait."""

    def __init__(
        self,
        scorer: Any,
        train: list[TaskExample],
        held_out: list[TaskExample],
        tag_reward: float,
        instruction: str,
    ) -> None:
        self.dataset, self.eval_dataset = train, held_out
        self._scorer, self._tag_reward, self._instruction = scorer, tag_reward, instruction
        self._placeholders = {text.strip() for text in ANSWER.findall(instruction)}
        self._floors: dict[str, float] = {}

    def build_prompt_messages(self, example: TaskExample, prompt_text: str) -> list[ChatMessage]:
        return [{"role": "user", "content": f"{example.input}\n\n{self._instruction}"}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        found = [text.strip() for text in ANSWER.findall(response_text or "")]
        answer = found[-1] if found and found[-1] not in self._placeholders else ""
        right = self._rightness(answer, example) if answer else 0.0
        tagged = float(bool(answer))
        return RewardResult(
            score=self._tag_reward * tagged + (1 - self._tag_reward) * right,
            success=right >= SOLVED,
            reason=None if answer else "nothing between <answer> and </answer>",
            metrics=[RewardMetric("tagged", score=tagged), RewardMetric("right", score=right)],
        )

    def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        if example.output is None:
            raise ValueError("this dataset has no gold answers, several answers may be right")
        return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]

    def _rightness(self, answer: str, example: TaskExample) -> float:
        """0..1 between what a worthless answer is paid and full pay."""
        floor = self._floors.get(example.input)
        if floor is None:
            floor = self._floors[example.input] = max(
                self._paid(text, example) for text in WORTHLESS
            )
        if floor >= SOLVED:
            return float(example.output is not None and _same_text(answer, str(example.output)))
        return max(0.0, self._paid(answer, example) - floor) / (1.0 - floor)

    def _paid(self, answer: str, example: TaskExample) -> float:
        """What the dataset's scorer pays, within 0..1; 0 where it raises, as some do for answers of
        another form.
        """
        try:
            paid = float(self._scorer.score_answer(answer, copy.deepcopy(example.record)))
        except Exception:
            return 0.0
        return min(max(paid, 0.0), 1.0) if math.isfinite(paid) else 0.0


def _tasks(
    make: Any, first_seed: int, count: int, seen: set[str], deadline: float
) -> Iterator[TaskExample]:
    """Up to `count` tasks whose questions are not in `seen`; fewer where the dataset has not so
    many.
    """
    dataset, found = make(first_seed, max(1, count * DRAWS_PER_TASK)), 0
    for index in range(count * DRAWS_PER_TASK):
        if found == count:
            return
        if time.monotonic() > deadline:
            raise DatasetError(
                f"making the tasks takes longer than {GENERATION_TIMEOUT_S:g} s ({found} of {count} done); "
                "ask for fewer with environment_args {'train_size': ..., 'eval_size': ...}"
            )
        _seed_global_generators(first_seed + index)
        entry = dataset[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            found += 1
            yield TaskExample(record=entry, input=entry["question"], output=entry["answer"])


def _seed_global_generators(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _same_text(one: str, other: str) -> bool:
    return one.casefold().split() == other.casefold().split()
