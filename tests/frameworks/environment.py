"""Quickstarts of agent frameworks, each a program of its own that is run as it is."""

import sys
from pathlib import Path

from environments import EnvironmentCommand, RewardResult, TaskExample

QUICKSTARTS = Path(__file__).with_name("quickstarts")


class Quickstarts(EnvironmentCommand):
    max_calls = 30

    def __init__(self):
        names = sorted(path.stem for path in QUICKSTARTS.glob("*.py"))
        self.dataset = [TaskExample({}, name, id=name) for name in names]

    def command(self, example):
        return [sys.executable, str(QUICKSTARTS / f"{example.input}.py")]

    def variables(self, example):
        # What the packages would send elsewhere: traces, and a list of prices.
        return {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def reward(self, example, ended):
        return RewardResult(float(ended.code == 0), reason=ended.output[-3000:])


def load_environment():
    return Quickstarts()
