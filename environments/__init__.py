"""The environment contract: a task, how it is presented, how its answers are rewarded. Imports no
other ring.
"""

from environments.base import (
    DatasetError,
    Environment,
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentSingleTurn,
    EnvironmentStepResult,
    EnvironmentTurn,
    RewardMetric,
    RewardResult,
    TaskExample,
    load_dataset,
)

__all__ = [
    "DatasetError",
    "Environment",
    "EnvironmentEpisode",
    "EnvironmentMultiTurn",
    "EnvironmentSingleTurn",
    "EnvironmentStepResult",
    "EnvironmentTurn",
    "RewardMetric",
    "RewardResult",
    "TaskExample",
    "load_dataset",
]
