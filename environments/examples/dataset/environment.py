"""A dataset of questions and answers: one prompt, one answer in tags.

user       How many minutes are 2 hours and 5 minutes?
           Write your answer as <answer>...</answer>.
assistant  <answer>125</answer>
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from environments import EnvironmentSingleTurn, JudgeRubric, RewardResult, TaskExample, load_dataset

DATASETS = Path(__file__).parent / "datasets"
INSTRUCTIONS = "Write your answer as <answer>...</answer>."
LABELS: list[str] = []
"""If answers are labels: all of them, which each prompt lists."""
SCORER: str = "tolerant"
"""exact: the answer is the row's, letter by letter. tolerant: whatever its case and spacing;
numbers may differ by TOLERANCE and have commas between thousands. judge: as tolerant, and then a
language model says whether another answer means the same.
"""
JUDGE: dict[str, Any] = {"base_url": "http://127.0.0.1:8000/v1", "model": "a-model", "criteria": ""}
"""With SCORER = "judge": an OpenAI-compatible endpoint, such as a deployment, and what counts. Its
key comes from the variable that `secret` names here and in environment.toml."""
FORM = 0.1
"""What a wrong answer in the right form earns, so that the form is learnt first."""
NUMBER = r"[-+]?[0-9]{1,15}([.][0-9]{1,15})?"
TOLERANCE = 1e-6
"""How far a number may be from the right one, as a share of it."""


class Questions(EnvironmentSingleTurn):
    """The last answer in tags counts."""

    def __init__(self, **judge: Any) -> None:
        self.dataset = load_dataset(DATASETS / "train.jsonl")
        self.eval_dataset = load_dataset(DATASETS / "eval.jsonl")
        self.judge = JudgeRubric(**{**JUDGE, **judge}) if SCORER == "judge" else None

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        choice = f"\nThe answer is one of: {', '.join(LABELS)}." if LABELS else ""
        question = f"{example.input}{choice}\n{INSTRUCTIONS}"
        return [{"role": "user", "content": question}]

    def sft_completion(self, example: TaskExample) -> list[dict[str, str]]:
        answer = {"role": "assistant", "content": f"<answer>{example.output}</answer>"}
        thought = example.record.get("reasoning_content")
        return [{**answer, "reasoning_content": thought} if thought else answer]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        answers = re.findall(r"<answer>(.*?)</answer>", response_text or "", re.DOTALL)
        if not answers:
            return RewardResult(score=0.0, success=False)
        right = is_right(answers[-1], example.output)
        if self.judge and answers[-1].strip() and not right:
            right = self.judge.agrees(example.input, example.output, answers[-1])
        return RewardResult(score=1.0 if right else FORM, success=right)


def is_right(answer: str, gold: str) -> bool:
    if SCORER == "exact":
        return answer == gold
    answer, gold = plain(answer), plain(gold)
    if re.fullmatch(NUMBER, answer) and re.fullmatch(NUMBER, gold):
        return math.isclose(float(answer), float(gold), rel_tol=TOLERANCE)
    return answer == gold


def plain(text: str) -> str:
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}\b)", "", text)
    return " ".join(text.casefold().split())


def load_environment(**judge: Any) -> Questions:
    return Questions(**judge)
