"""The requests of an agent, as both sides of the process boundary use them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from environments.base import ChatMessage

OPENING_ROLES = ("system", "user", "assistant", "tool")
ANSWER_ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Usage:
    """The tokens of one turn, and why it ended. The host sends it with the turn."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: Literal["stop", "length"] = "stop"

    def fields(self) -> dict[str, int]:
        """As OpenAI's API writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


NO_USAGE = Usage()


@dataclass(frozen=True)
class AgentCall:
    """A request of an agent to the model.

    If it continues the conversation of an earlier call, `parent`, `messages` are those after that
    call's answer; otherwise they are all of it."""

    number: int
    parent: int | None
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]


def finite_float(text: str) -> float:
    """For json.loads. ValueError for what is no number in JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number
