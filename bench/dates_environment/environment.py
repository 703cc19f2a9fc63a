"""One prompt, one answer: write a date as year-month-day. 300 train and 100 eval tasks.

user       March 5th, 2021
assistant  2021-03-05
"""

from __future__ import annotations

import random
import re
from datetime import date, timedelta

from environments import EnvironmentSingleTurn, RewardResult, TaskExample

INSTRUCTIONS = "Write the date as YYYY-MM-DD and nothing else."
FORMS = ("{d.day} {d:%B} {d.year}", "{d:%B} {d.day}, {d.year}", "{d:%b} {d.day} {d.year}")
FIRST = date(1950, 1, 1)
DAYS = 100 * 365
TRAIN = 300
EVAL = 100


class Dates(EnvironmentSingleTurn):
    """Half of the reward is the share of year, month and day that are right, half is for all of
    them: `success`.
    """

    def __init__(self) -> None:
        draw = random.Random(0)
        days = draw.sample(range(DAYS), TRAIN + EVAL)
        rows = [_task(FIRST + timedelta(days=day), draw) for day in days]
        self.dataset = rows[:TRAIN]
        self.eval_dataset = rows[TRAIN:]

    def build_prompt_messages(self, example: TaskExample) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": example.input},
        ]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        answer = (response_text or "").strip()
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", answer):
            return RewardResult(score=0.0, success=False)
        pairs = zip(answer.split("-"), example.output.split("-"), strict=True)
        share = sum(given == gold for given, gold in pairs) / 3
        success = answer == example.output
        return RewardResult(score=0.5 * share + 0.5 * success, success=success)


def _task(day: date, draw: random.Random) -> TaskExample:
    text = draw.choice(FORMS).format(d=day)
    gold = day.isoformat()
    return TaskExample({"input": text, "output": gold}, input=text, id=gold, output=gold)


def load_environment() -> Dates:
    return Dates()
