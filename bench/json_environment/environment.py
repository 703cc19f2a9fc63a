"""One prompt, one answer: write what a sentence says as JSON. 300 train and 100 eval tasks.

user       Ines, who is 34, lives in Lisbon.
assistant  {"name": "Ines", "age": 34, "city": "Lisbon"}
"""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

from environments import EnvironmentSingleTurn, RewardResult, TaskExample

INSTRUCTIONS = "Write what the sentence says as JSON with name, age and city, and nothing else."
FORMS = (
    "{name}, who is {age}, lives in {city}.",
    "{city} is where {name} lives, aged {age}.",
    "At {age}, {name} moved to {city}.",
)
NAMES = ("Ines", "Omar", "Lena", "Kofi", "Mira", "Jonas", "Aiko", "Pablo", "Nadia", "Tom")
CITIES = ("Lisbon", "Oslo", "Accra", "Kyoto", "Quito", "Cairo", "Riga", "Pune")
TRAIN = 300
EVAL = 100


class Sentences(EnvironmentSingleTurn):
    """Half of the reward is the share of keys that are right, half is for all: `success`."""

    def __init__(self) -> None:
        draw = random.Random(0)
        facts = draw.sample(list(product(NAMES, range(18, 90), CITIES)), TRAIN + EVAL)
        rows = [_task(*fact, draw) for fact in facts]
        self.dataset = rows[:TRAIN]
        self.eval_dataset = rows[TRAIN:]

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": example.input},
        ]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        gold: dict[str, Any] = json.loads(example.output)
        try:
            answer = json.loads(response_text or "")
        except (ValueError, RecursionError):
            return RewardResult(score=0.0, success=False)
        if not isinstance(answer, dict) or answer.keys() != gold.keys():
            return RewardResult(score=0.0, success=False)
        # 34.0 and True equal numbers in Python, and are other JSON.
        share = sum(json.dumps(answer[key]) == json.dumps(gold[key]) for key in gold) / len(gold)
        return RewardResult(score=0.5 * share + 0.5 * (share == 1), success=share == 1)


def _task(name: str, age: int, city: str, draw: random.Random) -> TaskExample:
    text = draw.choice(FORMS).format(name=name, age=age, city=city)
    gold = json.dumps({"name": name, "age": age, "city": city})
    return TaskExample({"input": text, "output": gold}, input=text, output=gold)


def load_environment() -> Sentences:
    return Sentences()
