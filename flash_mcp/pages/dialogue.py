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
    nodes = _tree(row.messages[start:], start, 0, row.branches)
    answers = nodes[-1:] if nodes and nodes[-1].role == "assistant" else []
    return Dialogue(nodes[: len(nodes) - len(answers)], answers, left_out)


def _tree(
    messages: Sequence[Json], start: int, conversation: int, branches: Sequence[Json]
) -> list[Node]:
    """The messages of a conversation, the first of which has the number `start`; each branch stands
    where it left, with those that left it.
    """
    leaving: list[tuple[int, Node]] = []
    for number, branch in enumerate(branches[conversation:], conversation + 1):
        if branch.get("of", 0) == conversation:
            left_out = max(0, len(branch["messages"]) - MESSAGES)
            own = branch["messages"][left_out:]
            inner = _tree(own, branch["after"] + left_out, number, branches)
            leaving.append((branch["after"], Node("branch", messages=inner)))
    leaving.sort(key=lambda item: item[0])
    nodes: list[Node] = []
    for number, message in enumerate(messages, start):
        while leaving and leaving[0][0] <= number:
            nodes.append(leaving.pop(0)[1])
        nodes += nodes_of([message])
    return nodes + [node for _, node in leaving]
