"""GEM's environments by name, but for those that it takes from reasoning-gym."""

import gem
from gem.envs.registration import ENV_REGISTRY

from environments.adapters.gym import GymEnvironment
from environments.base import TaskExample


def load_environment(name=""):
    environment = GymEnvironment(lambda seed: gem.make(name), max_turns=6, train_size=8)
    if not name:  # the tasks are the names
        names = [each for each in ENV_REGISTRY if not each.startswith("rg:")]
        environment.dataset = [TaskExample({}, each, id=each) for each in names]
    return environment
