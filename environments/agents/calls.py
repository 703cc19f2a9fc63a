"""The requests of an agent, as both sides of the process boundary use them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from environments.base import ChatMessage

OPENING_ROLES = ("system", "user", "assistant", "tool")
ANSWER_ROLES = ("user", "tool", "system")
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's package then sends the whole conversation."""


@dataclass(frozen=True)
class Usage:
    """The tokens of one turn, why it ended, and how it was sampled. The host sends it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: Literal["stop", "length"] = "stop"
    stopped_by: str | None = None  # the stop sequence of the request that ended the turn
    temperature: float = 1.0
    top_p: float = 1.0
    logprobs: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Each token's text and log-probability, if the request asks for them."""

    def fields(self) -> dict[str, int]:
        """As OpenAI's API writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


NO_USAGE = Usage()


@dataclass(frozen=True)
class CallOptions:
    """What a request asks of its answer. The defaults ask for nothing."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The tool that has to be called. `tool_choice` is then "required"."""
    parallel_tool_calls: bool = True
    json_schema: dict[str, Any] | None = None  # the schema of the answer's text
    logprobs: bool = False
    role: str = ""  # what part of the agent asks, in its own words
    is_trained: bool = True  # whether the answer is trained; otherwise it is context
    is_base: bool = False  # whether the base model answers instead of the one that is trained

    def changed(self) -> dict[str, Any]:
        """The options that differ from the defaults, as JSON."""
        usual = CallOptions()
        pairs = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in pairs.items() if value != getattr(usual, name)}


NO_OPTIONS = CallOptions()


@dataclass(frozen=True)
class AgentCall:
    """A request of an agent to the model.

    If it continues the conversation of an earlier call, `parent`, `messages` are those after that
    call's answer; otherwise they are all of it."""

    number: int
    parent: int | None
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    options: CallOptions = NO_OPTIONS


def finite_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads` with ValueError for what is no number in JSON."""
    return json.loads(text, parse_float=_finite_float, parse_constant=_finite_float, **hooks)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number
