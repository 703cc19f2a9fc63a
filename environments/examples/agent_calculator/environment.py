"""The agent of agent.py, trained as it is: a model that it asks learns to use its tool.

user       What is 12 * 7?
assistant  calculate({"left": 12, "operator": "*", "right": 7})
tool       84
assistant  84
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent import MOST_CALLS, solve
from openai import OpenAI

from environments import EnvironmentAgent, RewardResult, TaskExample, load_dataset

DATASETS = Path(__file__).parent / "datasets"
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="each rollout has its own")
"""To make a client takes more time than a request does."""


class AgentCalculator(EnvironmentAgent):
    """The reward is 1 for the right number, and 0 for all else."""

    max_calls = MOST_CALLS

    def __init__(self) -> None:
        self.dataset = load_dataset(DATASETS / "train.jsonl")
        self.eval_dataset = load_dataset(DATASETS / "eval.jsonl")

    def run(self, example: TaskExample, base_url: str, api_key: str, model: str) -> RewardResult:
        client = CLIENT.with_options(base_url=base_url, api_key=api_key)
        right = solve(example.input, client, model).strip() == example.output
        return RewardResult(score=float(right), success=right)

    def sft_completion(self, example: TaskExample) -> list[dict[str, Any]]:
        """What the model has to say, with which `sft` warms it up: a small one calls no tool by
        itself.
        """
        call = {"name": "calculate", "arguments": example.record["call"]}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "content": example.output},
            {"role": "assistant", "content": example.output},
        ]


def load_environment() -> AgentCalculator:
    return AgentCalculator()
