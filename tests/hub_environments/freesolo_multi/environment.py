from freesolo.datasets import TaskExample
from freesolo.environments import (
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    EnvironmentTurn,
    RewardResult,
)


class Guess(EnvironmentMultiTurn):
    max_score_concurrency = 1

    def __init__(self):
        gold = {"messages": [{"role": "assistant", "content": "5"}]}
        self.dataset = [{"input": "between 0 and 7", "output": gold}]

    def start_episode(self, example: TaskExample, prompt_text: str):
        return [{"role": "user", "content": f"Guess {example.input}."}]

    def max_episode_turns(self, example):
        return 3

    def step_episode(self, example, messages, assistant_response):
        assert messages[-1]["content"] == assistant_response
        said = assistant_response.strip()
        if said == "5":
            return EnvironmentStepResult(done=True, final_response_text="right", metadata={"turn": len(messages)})
        answer = {"role": "user", "content": "No."}
        return EnvironmentStepResult(done=False, messages=(answer,), metadata={"turn": len(messages)})

    def score_episode(self, example, episode):
        assert isinstance(episode, EnvironmentEpisode) and isinstance(episode.turns[0], EnvironmentTurn)
        right = episode.response_text == "right"
        steps = [step["turn"] for step in episode.metadata["steps"]]
        return RewardResult(score=float(right), success=right, reason=str(steps))


def load_environment():
    return Guess()
