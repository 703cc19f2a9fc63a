"""The environment contract. This package imports neither `flash_mcp` nor `worker`, and only the
standard library: an interpreter of an environment's own has no other package.

Its names are imported when they are needed: what encloses an environment's process starts in
half the time without them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from environments.agents.command import EnvironmentCommand
    from environments.base import (
        DatasetError,
        Environment,
        EnvironmentAgent,
        EnvironmentEpisode,
        EnvironmentMultiTurn,
        EnvironmentSingleTurn,
        EnvironmentStepResult,
        RewardMetric,
        RewardResult,
        TaskExample,
        load_dataset,
    )
    from environments.judge import JudgeRubric, Rubric
    from environments.tools import EnvironmentToolUse

__all__ = [
    "DatasetError", "Environment", "EnvironmentAgent", "EnvironmentCommand", "EnvironmentEpisode",
    "EnvironmentMultiTurn", "EnvironmentSingleTurn", "EnvironmentStepResult", "EnvironmentToolUse",
    "JudgeRubric", "RewardMetric", "RewardResult", "Rubric", "TaskExample", "load_dataset",
]  # fmt: skip

ELSEWHERE = {
    "EnvironmentCommand": "environments.agents.command",
    "EnvironmentToolUse": "environments.tools",
    "JudgeRubric": "environments.judge",
    "Rubric": "environments.judge",
}
"""The names that are not in environments.base."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(ELSEWHERE.get(name, "environments.base")), name)
