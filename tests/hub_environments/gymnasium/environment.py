"""The toy text games of gymnasium, played by naming an action."""

import gymnasium

from environments.adapters.gym import GymEnvironment

GAMES = ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v3")
ABOUT = "You play {name}. Each observation is a number or a few. Answer with an action, from 0 to {last}."


def load_environment(name=GAMES[0]):
    last = int(gymnasium.make(name).action_space.n) - 1

    def action(text):
        digits = [letter for letter in text or "" if letter.isdecimal()]
        return min(last, int(digits[-1])) if digits else 0

    return GymEnvironment(
        lambda seed: gymnasium.make(name), max_turns=8, to_action=action, instruction=ABOUT.format(name=name, last=last)
    )
