"""GSM8K as verl asks and scores it: the number after the last "####".

The folder `datasets` gets train.jsonl and test.jsonl of github.com/openai/grade-school-math."""

from __future__ import annotations

import re
from pathlib import Path

from environments import EnvironmentSingleTurn, RewardResult, TaskExample, load_dataset

DATASETS = Path(__file__).parent / "datasets"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


class Gsm8k(EnvironmentSingleTurn):
    def __init__(self) -> None:
        keys = {"input_key": "question", "output_key": "answer"}
        self.dataset = load_dataset(DATASETS / "train.jsonl", **keys)
        self.eval_dataset = load_dataset(DATASETS / "test.jsonl", **keys)

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{example.input} {INSTRUCTION}"}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        is_right = number_of(response_text or "") == number_of(example.output)
        return RewardResult(score=float(is_right), success=is_right)


def number_of(text: str) -> str | None:
    """The number after the last "####", without commas between thousands."""
    found = re.findall(r"#### (-?[0-9.,]+)", text)
    return found[-1].replace(",", "") if found else None


def load_environment() -> Gsm8k:
    return Gsm8k()
