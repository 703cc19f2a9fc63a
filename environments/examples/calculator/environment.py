"""Arithmetic with a tool: the model asks for a calculation, is told the result, and gives the
answer.

user       What is 12 * 7?
assistant  <calc>12 * 7</calc>
user       The result is 84.
assistant  <answer>84</answer>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from environments import (
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    RewardMetric,
    RewardResult,
    TaskExample,
    load_dataset,
)

DATASETS = Path(__file__).parent / "datasets"
MAX_TURNS = 3
INSTRUCTIONS = (
    "Solve the problem with the calculator. First write only <calc>calculation</calc>. You are told the result. "
    "Then write only <answer>number</answer>."
)
# As a conversation rather than in words: a small model imitates turns far better than it follows a
# description.
EXAMPLE = (
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "<calc>3 + 4</calc>"},
    {"role": "user", "content": "The result is 7."},
    {"role": "assistant", "content": "<answer>7</answer>"},
)
CALC = re.compile(r"<calc>([^<>]*)</calc>")
ANSWER = re.compile(r"<answer>\s*(-?[\d,]+(?:\.\d+)?)\s*</answer>")
WEIGHTS = {
    "asked": 0.1,
    "calculated": 0.2,
    "right_calculation": 0.3,
    "answered": 0.1,
    "right_answer": 0.3,
}
"""What each part of a solution is worth, in the order in which a beginner reaches them. The form of
an answer earns nothing before the calculator was used: it would be the easy way out.
"""


class Calculator(EnvironmentMultiTurn):
    """The reward grows with every part of the way; `success` asks for the right answer by way of
    the calculator.
    """

    def __init__(self) -> None:
        self.dataset = load_dataset(DATASETS / "train.jsonl")
        self.eval_dataset = load_dataset(DATASETS / "eval.jsonl")

    def start_episode(self, example: TaskExample, prompt_text: str) -> list[dict[str, str]]:
        # Each episode is served by its own copy of this object, so this list belongs to one
        # conversation.
        self.results: list[Fraction] = []
        return [
            {"role": "system", "content": prompt_text or INSTRUCTIONS},
            *EXAMPLE,
            {"role": "user", "content": example.input},
        ]

    def max_episode_turns(self, example: TaskExample) -> int:
        return MAX_TURNS

    def step_episode(
        self, example: TaskExample, messages: list[dict[str, str]], assistant_response: str
    ) -> EnvironmentStepResult:
        text = assistant_response or ""
        call, answer = CALC.search(text), ANSWER.search(text)
        # An answer in the same turn as the first calculation was written before the result was
        # known.
        if call is None or (answer and answer.start() < call.start()):
            return EnvironmentStepResult(done=True)
        try:
            result = calculate(call[1])
        except ValueError as error:
            return EnvironmentStepResult(
                done=False,
                messages=[{"role": "user", "content": f"The calculator cannot do that: {error}."}],
            )
        self.results.append(result)
        return EnvironmentStepResult(
            done=False,
            messages=[{"role": "user", "content": f"The result is {number_text(result)}."}],
        )

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        gold = Fraction(str(example.output))
        said = [turn.content or "" for turn in episode.turns if turn.role == "assistant"]
        answer = ANSWER.search(said[-1]) if said else None
        parts = {
            "asked": any(CALC.search(text) for text in said),
            "calculated": bool(self.results),
            "right_calculation": gold in self.results,
            "answered": answer is not None and bool(self.results),
            "right_answer": answer is not None and read_number(answer[1]) == gold,
        }
        return RewardResult(
            score=round(sum(WEIGHTS[name] for name, reached in parts.items() if reached), 6),
            success=parts["right_calculation"] and parts["right_answer"],
            metrics=[RewardMetric(name, score=float(reached)) for name, reached in parts.items()],
            reason=next((f"not {name}" for name, reached in parts.items() if not reached), None),
        )

    def sft_completion(self, example: TaskExample) -> list[dict[str, str]]:
        return [
            {"role": "assistant", "content": f"<calc>{example.record['expression']}</calc>"},
            {"role": "user", "content": f"The result is {example.output}."},
            {"role": "assistant", "content": f"<answer>{example.output}</answer>"},
        ]


def load_environment() -> Calculator:
    return Calculator()


# -- the calculator: numbers, + - * / and parentheses, exact; no eval ------------------------------

MAX_CHARACTERS = 64
TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")


def calculate(expression: str) -> Fraction:
    """The value of an arithmetic expression; ValueError with a reason for anything else."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_CHARACTERS} characters")
    tokens = TOKEN.findall(expression)
    if TOKEN.sub("", expression).strip() or not tokens:
        raise ValueError("it takes numbers, + - * / and parentheses")
    value = _sum(tokens)
    if tokens:
        raise ValueError(f"{tokens[0]} is in the wrong place")
    return value


def _sum(tokens: list[str]) -> Fraction:
    return _chain(tokens, _product, "+", "-")


def _product(tokens: list[str]) -> Fraction:
    return _chain(tokens, _factor, "*", "/")


def _chain(
    tokens: list[str], operand: Callable[[list[str]], Fraction], *operators: str
) -> Fraction:
    value = operand(tokens)
    while tokens and tokens[0] in operators:
        operator, right = tokens.pop(0), operand(tokens)
        if operator == "/" and right == 0:
            raise ValueError("it divides by zero")
        value = {
            "+": value.__add__,
            "-": value.__sub__,
            "*": value.__mul__,
            "/": value.__truediv__,
        }[operator](right)
    return value


def _factor(tokens: list[str]) -> Fraction:
    token = tokens.pop(0) if tokens else ""
    if token == "-":
        return -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
        return value
    if not token[:1].isdigit():
        raise ValueError("a number is missing")
    return Fraction(token)


def number_text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def read_number(text: str) -> Fraction | None:
    digits = text.replace(",", "")
    return Fraction(digits) if digits.strip("-") else None
