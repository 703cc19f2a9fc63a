"""Tasks in a terminal, in Harbor's form (tasks/). The agent has a tool bash."""

from pathlib import Path

from environments.agents import harbor


def load_environment() -> harbor.HarborTasks | harbor.HarborPrompts:
    return harbor.load(Path(__file__).with_name("tasks"))
