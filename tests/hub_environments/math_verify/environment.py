"""Answers that math-verify compares, with its default time limits, which use signals."""

from math_verify import parse, verify

from environments.base import EnvironmentSingleTurn, RewardResult, TaskExample

GOLD = ["1/2", "x^2 + 2x + 1", "\\sqrt{2}", "(1, 2)", "7", "2\\pi", "\\{1, 3\\}", "10^3"]


class Equal(EnvironmentSingleTurn):
    max_score_concurrency = 1

    def __init__(self):
        self.dataset = [
            TaskExample({}, f"Write ${gold}$ in another way.", id=gold, output=f"${gold}$") for gold in GOLD
        ]

    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]

    def score_response(self, example, response_text):
        is_right = verify(parse(example.output), parse(response_text or ""))
        return RewardResult(score=float(is_right), success=is_right)


def load_environment():
    return Equal()
