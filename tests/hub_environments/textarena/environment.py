"""TextArena's games by name, each in its first variant."""

import textarena
from textarena.envs.registration import ENV_REGISTRY

from environments.adapters.gym import GymEnvironment
from environments.base import TaskExample


def load_environment(name=""):
    environment = GymEnvironment(lambda seed: textarena.make(name), max_turns=6, train_size=8)
    if not name:  # the tasks are the names
        names = [each for each in ENV_REGISTRY if each.endswith("-v0")]
        environment.dataset = [TaskExample({}, each, id=each) for each in names]
    return environment
