"""Arithmetic with a tool: the model asks for a calculation, reads the result, and gives the answer.

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
    "Solve the problem with the calculator. First write only <calc>calculation</calc>. "
    "You are told the result. Then write only <answer>number</answer>."
)
# A small model imitates turns far better than it follows a description.
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
    "answered": 0.05,
    "right_answer": 0.35,
}
"""The reward of each part of a solution, in the order in which a beginner learns them. An answer in
the right form earns nothing until the calculator was used; otherwise the model would stop there.
"""


class Calculator(EnvironmentMultiTurn):
    """Each part earns a share of the reward. `success` means that the calculator found the right
    answer and the model gave it.
    """

    def __init__(self) -> None:
        self.dataset = load_dataset(DATASETS / "train.jsonl")
        self.eval_dataset = load_dataset(DATASETS / "eval.jsonl")

    def start_episode(self, example: TaskExample) -> list[dict[str, str]]:
        # Each episode has its own copy of this object, so this list belongs to one conversation.
        self.results: list[Fraction] = []
        return [
            {"role": "system", "content": INSTRUCTIONS},
            *EXAMPLE,
            {"role": "user", "content": example.input},
        ]

    def max_episode_turns(self, example: TaskExample) -> int:
        return MAX_TURNS

    def step_episode(
        self, example: TaskExample, messages: list[dict[str, str]], assistant_response: str
    ) -> EnvironmentStepResult:
        text = assistant_response or ""
        call = CALC.search(text)
        answer = ANSWER.search(text)
        # An answer before the first calculation was written without its result.
        if call is None or (answer and answer.start() < call.start()):
            return EnvironmentStepResult(done=True)
        try:
            self.results.append(calculate(call[1]))
            reply = f"The result is {number_text(self.results[-1])}."
        except ValueError as error:
            reply = f"The calculator cannot do that: {error}."
        return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": reply}])

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        gold = Fraction(str(example.output))
        turns = episode.messages[episode.prompt_length :]
        said = [turn["content"] or "" for turn in turns if turn["role"] == "assistant"]
        answer = ANSWER.search(said[-1]) if said else None
        parts = {
            "asked": any(CALC.search(text) for text in said),
            "calculated": bool(self.results),
            "right_calculation": gold in self.results,
            "answered": answer is not None and bool(self.results),
            "right_answer": answer is not None and read_number(answer[1]) == gold,
        }
        missing = [name for name, reached in parts.items() if not reached]
        return RewardResult(
            score=round(sum(WEIGHTS[name] for name in parts if name not in missing), 6),
            success=parts["right_calculation"] and parts["right_answer"],
            metrics=[RewardMetric(name, score=float(reached)) for name, reached in parts.items()],
            reason=f"not {missing[0]}" if missing else None,
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
OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": Fraction.__add__,
    "-": Fraction.__sub__,
    "*": Fraction.__mul__,
    "/": Fraction.__truediv__,
}
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
        symbol = tokens.pop(0)
        right = operand(tokens)
        if symbol == "/" and right == 0:
            raise ValueError("it divides by zero")
        value = OPERATORS[symbol](value, right)
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
    try:
        return Fraction(text.replace(",", ""))
    except ValueError:  # no digits, or thousands of them
        return None
