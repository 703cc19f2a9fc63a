"""Two turns, rewarded by their share of vowels: even a model that was taught nothing learns it in a few steps."""

from environments import EnvironmentMultiTurn, EnvironmentStepResult, RewardMetric, RewardResult, TaskExample


class Vowels(EnvironmentMultiTurn):
    def __init__(self, train: int, held_out: int, question: str) -> None:
        self.dataset = [TaskExample({}, f"{question} {i}", id=f"t{i}") for i in range(train)]
        self.eval_dataset = [TaskExample({}, f"{question}! {i}", id=f"v{i}") for i in range(held_out)]

    def start_episode(self, example):
        return [{"role": "user", "content": example.input}]

    def max_episode_turns(self, example):
        return 2

    def step_episode(self, example, messages, assistant_response):
        return EnvironmentStepResult(done=len(messages) >= 4, messages=[{"role": "user", "content": "more"}])

    def score_episode(self, example, episode):
        text = "".join(message["content"] for message in episode.messages if message["role"] == "assistant")
        share = sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))
        return RewardResult(share, success=share > 0.3, metrics=[RewardMetric("vowels", share)])


def load_environment(train=12, held_out=5, question="Write"):
    return Vowels(train, held_out, question)
