"""A transcript for a reader: what several share is left out, and an agent's other conversations
stand where they left the main one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flash_mcp.protocol.records import Json, Rollout, text_of

MESSAGES = 12
"""Messages that are shown of each conversation, the last ones."""


@dataclass(frozen=True)
class Node:
    """A message; or, with `messages`, another conversation that begins there."""

    role: str
    text: str = ""
    bad_tool_call: str | None = None
    messages: list[Node] = field(default_factory=list["Node"])


@dataclass(frozen=True)
class Dialogue:
    """A transcript, with the last answer apart: the expected one stands next to it."""

    before: list[Node]
    answer: list[Node]
    left_out: int
    """Messages that are not shown."""


def nodes_of(messages: Sequence[Json]) -> list[Node]:
    return [Node(row["role"], text_of(row), row.get("bad_tool_call")) for row in messages]


def dialogue(row: Rollout, opening: int) -> Dialogue:
    """The rollout without its first `opening` messages."""
    left_out = max(0, len(row.messages) - opening - MESSAGES)
    start = opening + left_out
    nodes: list[Node] = []
    branches = sorted(row.branches, key=lambda branch: branch["after"])
    for number, message in enumerate(row.messages[start:], start):
        while branches and branches[0]["after"] <= number:
            nodes.append(_branch(branches.pop(0)))
        nodes += nodes_of([message])
    nodes += map(_branch, branches)
    answers = nodes[-1:] if nodes and nodes[-1].role == "assistant" else []
    return Dialogue(nodes[: len(nodes) - len(answers)], answers, left_out)


def _branch(branch: Json) -> Node:
    return Node("branch", messages=nodes_of(branch["messages"][-MESSAGES:]))
