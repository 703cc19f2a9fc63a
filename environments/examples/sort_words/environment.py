"""One prompt, one answer: put a few words into alphabetical order.

user       Sort alphabetically: pear, fig, apple
assistant  apple, fig, pear
"""

from __future__ import annotations

import operator
import re
from pathlib import Path

from environments import (
    EnvironmentSingleTurn,
    RewardMetric,
    RewardResult,
    TaskExample,
    load_dataset,
)

DATASETS = Path(__file__).parent / "datasets"
INSTRUCTIONS = (
    "Sort the words alphabetically. Answer with the same words, separated by commas, "
    "and nothing else."
)
EXAMPLE = (
    {"role": "user", "content": "Sort alphabetically: river, cloud, stone"},
    {"role": "assistant", "content": "cloud, river, stone"},
)
SAME_WORDS_WEIGHT = 0.2


class SortWords(EnvironmentSingleTurn):
    """The reward is mostly the share of words in the right place. `success` means exactly these
    words in order.
    """

    def __init__(self) -> None:
        self.dataset = load_dataset(DATASETS / "train.jsonl")
        self.eval_dataset = load_dataset(DATASETS / "eval.jsonl")

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": INSTRUCTIONS},
            *EXAMPLE,
            {"role": "user", "content": example.input},
        ]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        gold = words(example.output)
        given = words(response_text or "")
        # Divided by the longer of the two, so that a model gains nothing from listing more words.
        placed = sum(map(operator.eq, gold, given)) / max(len(gold), len(given))
        same_words = float(sorted(given) == gold)
        return RewardResult(
            score=round(SAME_WORDS_WEIGHT * same_words + (1 - SAME_WORDS_WEIGHT) * placed, 6),
            success=given == gold,
            metrics=[RewardMetric("same_words", same_words), RewardMetric("placed", placed)],
        )


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def load_environment() -> SortWords:
    return SortWords()
