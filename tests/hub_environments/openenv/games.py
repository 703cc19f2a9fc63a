"""Two environments on OpenEnv's base classes."""

import random

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.rubrics import Rubric


class Number(Action):
    number: int


class Heard(Observation):
    text: str = ""


class Nearness(Rubric):
    def forward(self, action, observation):
        return 1.0 if observation.done else 0.0


class Guess(Environment):
    """Guess a number from 0 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__(rubric=Nearness())
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.wanted = random.Random(seed).randrange(10)
        return Heard(text="Guess a number from 0 to 9.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == self.wanted:
            heard = Heard(text="Right.", done=True, metadata={"success": True})
        else:
            is_low = action.number < self.wanted
            heard = Heard(text="Higher." if is_low else "Lower.", metadata={"is": self.wanted})
        heard.reward = self._apply_rubric(action, heard)
        return heard

    @property
    def state(self):
        return self._state


class Tools(MCPEnvironment):
    """One tool, called over MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def draw(text: str) -> str:
            """Draw a card."""
            self.drawn += 1
            return f"{text}: {self.chance.randrange(52)}, the card number {self.drawn}"

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.chance = random.Random(seed)
        self.drawn = 0
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError(f"there is no action {action!r}")

    @property
    def state(self):
        return self._state
