"""The agent beside this file, rewarded by the share of vowels in what it wrote."""

from agent import write

from environments import EnvironmentAgent, RewardResult, TaskExample


class Vowels(EnvironmentAgent):
    def __init__(self) -> None:
        self.dataset = [TaskExample({}, f"Write {i}", id=f"t{i}") for i in range(12)]
        self.eval_dataset = [TaskExample({}, f"Write! {i}", id=f"v{i}") for i in range(5)]

    def run(self, example, base_url, api_key, model):
        text = "".join(write(example.input, base_url, api_key, model))
        share = sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))
        return RewardResult(share, success=share > 0.3)


def load_environment():
    return Vowels()
