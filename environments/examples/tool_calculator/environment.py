"""Arithmetic with a tool that the model calls in its own format of tool calls.

user       What is 12 * 7?
assistant  calculate({"left": 12, "operator": "*", "right": 7})
tool       84
assistant  84
"""

from __future__ import annotations

import operator
import random
from typing import Any, Literal

from environments import (
    EnvironmentEpisode,
    EnvironmentToolUse,
    RewardMetric,
    RewardResult,
    TaskExample,
)

SIZES = {"train": 500, "eval": 200}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
INSTRUCTIONS = "Call calculate first. Then answer with the number alone."
WEIGHTS = {"called": 0.3, "right_call": 0.3, "answered": 0.05, "right_answer": 0.35}
"""The reward of each part of a solution, in the order in which a beginner learns them. An answer
earns nothing until the tool was called; otherwise the model would stop there.
"""


def call(left: int, symbol: str, right: int) -> dict[str, Any]:
    """The message of a model that asks for this calculation."""
    arguments = {"left": left, "operator": symbol, "right": right}
    calls = [{"name": "calculate", "arguments": arguments}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answer(number: int) -> list[dict[str, Any]]:
    """What follows a call: its result, and the model's answer."""
    return [
        {"role": "tool", "tool_call_id": "call00000", "name": "calculate", "content": str(number)},
        {"role": "assistant", "content": str(number)},
    ]


class ToolCalculator(EnvironmentToolUse):
    """Each part earns a share of the reward. `success` means that the tool found the right number
    and the model gave it.
    """

    max_turns = 3

    def __init__(self) -> None:
        source = random.Random(7)
        seen: set[str] = set()
        self.dataset = [_task(source, seen, "train", number) for number in range(SIZES["train"])]
        self.eval_dataset = [_task(source, seen, "eval", number) for number in range(SIZES["eval"])]

    def episode_tools(self, example: TaskExample) -> list[Any]:
        return [self.calculate]

    def calculate(self, left: int, operator: Literal["+", "-", "*"], right: int) -> int:
        """Calculate with two numbers."""
        result = OPERATORS[operator](left, right)
        self.results.append(result)
        return result

    def start_episode(self, example: TaskExample) -> list[dict[str, Any]]:
        # Each episode has its own copy of this object, so this list belongs to one conversation.
        self.results: list[int] = []
        return [
            {"role": "system", "content": INSTRUCTIONS},
            # A small model imitates turns far better than it follows a description.
            {"role": "user", "content": "What is 3 + 4?"},
            call(3, "+", 4),
            *answer(7),
            {"role": "user", "content": example.input},
        ]

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        given = (episode.response_text or "").strip()
        is_number = given.removeprefix("-").isdecimal()
        parts = {
            "called": bool(self.results),
            "right_call": example.output in self.results,
            "answered": bool(self.results) and is_number,
            "right_answer": bool(self.results) and given == str(example.output),
        }
        missing = [name for name, reached in parts.items() if not reached]
        return RewardResult(
            score=round(sum(WEIGHTS[name] for name in parts if name not in missing), 6),
            success=parts["right_call"] and parts["right_answer"],
            metrics=[RewardMetric(name, score=float(reached)) for name, reached in parts.items()],
            reason=f"not {missing[0]}" if missing else None,
        )

    def sft_completion(self, example: TaskExample) -> list[dict[str, Any]]:
        return [call(**example.record), *answer(example.output)]


def _task(source: random.Random, seen: set[str], split: str, number: int) -> TaskExample:
    """A calculation that is not among those `seen`, so that the splits are disjoint."""
    while True:
        symbol = source.choice(list(OPERATORS))
        left = source.randint(12, 99)
        right = source.randint(3, 99)
        question = f"What is {left} {symbol} {right}?"
        if question not in seen:
            break
    seen.add(question)
    record = {"left": left, "symbol": symbol, "right": right}
    output = OPERATORS[symbol](left, right)
    return TaskExample(record, question, f"{split}-{number:03}", output=output)


def load_environment() -> ToolCalculator:
    return ToolCalculator()
