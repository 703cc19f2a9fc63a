"""The environment contract. This package imports neither `flash_mcp` nor `worker`."""

from environments.agents.command import EnvironmentCommand as EnvironmentCommand
from environments.base import DatasetError as DatasetError
from environments.base import Environment as Environment
from environments.base import EnvironmentAgent as EnvironmentAgent
from environments.base import EnvironmentEpisode as EnvironmentEpisode
from environments.base import EnvironmentMultiTurn as EnvironmentMultiTurn
from environments.base import EnvironmentSingleTurn as EnvironmentSingleTurn
from environments.base import EnvironmentStepResult as EnvironmentStepResult
from environments.base import EnvironmentTurn as EnvironmentTurn
from environments.base import RewardMetric as RewardMetric
from environments.base import RewardResult as RewardResult
from environments.base import TaskExample as TaskExample
from environments.base import load_dataset as load_dataset
from environments.judge import JudgeRubric as JudgeRubric
from environments.tools import EnvironmentToolUse as EnvironmentToolUse
