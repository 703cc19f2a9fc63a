from freesolo.datasets.types import TaskExample
from freesolo.environments import EnvironmentSingleTurn, RewardMetric, RewardResult


class Capitals(EnvironmentSingleTurn):
    def __init__(self, rows_from):
        assert rows_from.endswith("datasets/train.jsonl")

    def build_prompt_messages(self, example: TaskExample, prompt_text: str):
        return [{"role": "user", "content": example.input}]

    def normalize_response_text(self, example, response_text):
        assert not response_text.startswith("<<"), "normalized twice"
        return f"<<{response_text.strip()}"

    def score_response(self, example, response_text):
        right = response_text == f"<<{example.output}"
        return RewardResult(
            score=1.0 if right else 0.01, threshold=1.0, metrics=(RewardMetric("right", score=float(right)),)
        )


def load_environment(dataset_path):
    return Capitals(dataset_path)
