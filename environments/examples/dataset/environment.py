"""A dataset of questions and answers: one prompt, one answer in tags.

user       How many minutes are 2 hours and 5 minutes?
           Write your answer as <answer>...</answer>.
assistant  <answer>125</answer>
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from environments import EnvironmentSingleTurn, RewardResult, TaskExample, load_dataset

DATASETS = Path(__file__).parent / "datasets"
INSTRUCTIONS = "Write your answer as <answer>...</answer>."
FORM = 0.1
"""What a wrong answer in the right form earns, so that the form is learnt first."""
NUMBER = r"[-+]?[0-9]{1,15}([.][0-9]{1,15})?"
TOLERANCE = 1e-6
"""How far a number may be from the right one, as a share of it."""


class Questions(EnvironmentSingleTurn):
    """The last answer in tags counts. It is right if it is the row's answer, whatever its case and
    spacing; numbers may differ by TOLERANCE.
    """

    def __init__(self) -> None:
        self.dataset = load_dataset(DATASETS / "train.jsonl")
        self.eval_dataset = load_dataset(DATASETS / "eval.jsonl")

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        question = f"{example.input}\n{INSTRUCTIONS}"
        return [{"role": "user", "content": question}]

    def sft_completion(self, example: TaskExample) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        answers = re.findall(r"<answer>(.*?)</answer>", response_text or "", re.DOTALL)
        if not answers:
            return RewardResult(score=0.0, success=False)
        right = is_right(answers[-1], example.output)
        return RewardResult(score=1.0 if right else FORM, success=right)


def is_right(answer: str, gold: str) -> bool:
    answer, gold = plain(answer), plain(gold)
    if re.fullmatch(NUMBER, answer) and re.fullmatch(NUMBER, gold):
        return math.isclose(float(answer), float(gold), rel_tol=TOLERANCE)
    return answer == gold


def plain(text: str) -> str:
    return " ".join(text.casefold().split())


def load_environment() -> Questions:
    return Questions()
