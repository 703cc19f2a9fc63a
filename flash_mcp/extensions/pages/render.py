"""Templates made into pages. A page asks for nothing outside and runs no script but ours.

What a model or an environment wrote is hostile text: the template engine escapes every value, and a
content security policy allows our own style sheet, and on a served page our own scripts, each known
by its hash. That policy forbids style attributes, so charts are plain SVG with classes, which also
follow a dark colour scheme."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from environments.untrusted_text import visible
from flash_mcp.extensions.pages.charts import Axis
from flash_mcp.protocol.numbers import duration, number
from flash_mcp.protocol.records import Json, Rollout, text_of
from flash_mcp.tools.shared.truncation import shorten, utc

TEMPLATES = Path(__file__).with_name("templates")
UPLOT = Path(__file__).with_name("uplot")
"""uPlot's own files (MIT), as its npm package has them."""
MESSAGE_CHARACTERS = 4000
BRIEF_CHARACTERS = 400


def render(template: str, *, live: str | None = "", **values: object) -> str:
    """The page. `live` is None for a file; on a server it is the address of the events that tell
    the page to load itself anew, or empty where it should not.
    """
    files = [TEMPLATES / "live.js"] if live else []
    style = ""
    if live and values.get("data"):
        files = [UPLOT / "uPlot.iife.min.js", TEMPLATES / "chart.js", *files]
        style = (UPLOT / "uPlot.min.css").read_text(encoding="utf-8")
    script = "\n".join(file.read_text(encoding="utf-8") for file in files)
    page = _environment().get_template(template)
    theme = (TEMPLATES / "theme.js").read_text(encoding="utf-8")
    assets = {"script": Markup(script), "theme": Markup(theme), "chart_style": Markup(style)}
    text = page.render(live=live, now=time.time(), **assets, **values)
    return f"{text}\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cast(Any, environment).globals.update(
        across=Axis(0.0, 1.0, 4.0, 156.0),
        as_data=_as_data,
        as_dialogue=dialogue,
        as_json=partial(json.dumps, ensure_ascii=False, default=str),
        clock=_clock,
        duration=duration,
        number=number,
        policy=_policy,
        brief=partial(shorten, limit=BRIEF_CHARACTERS),
        shorten=partial(shorten, limit=MESSAGE_CHARACTERS),
        utc=utc,
    )
    return environment


def _as_data(value: object) -> Markup:
    """JSON that can end no script element."""
    text = visible(json.dumps(value))
    return Markup(text.replace("<", "\\u003c"))


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(moment))


def _policy(style: str, scripts: Sequence[str], is_served: bool) -> str:
    """The content security policy: this style sheet, and on a served page these scripts, known by
    their hashes."""
    rules = f"default-src 'none'; style-src {_hash(style)}; base-uri 'none'"
    forms = "'none'"
    if is_served:
        forms = "'self'"
        rules += f"; script-src {' '.join(map(_hash, scripts))}; connect-src 'self'"
    return f"{rules}; form-action {forms}"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _shown(value: object) -> object:
    """A value on its way to the page: Markup is the template's own, all else becomes text."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return ""
    return visible(str(value))


# A transcript for a reader: what several share is left out, and an agent's other conversations
# stand where they left the main one

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
    """The messages of a conversation, the first of which has the place `start`; each branch stands
    where it left, with those that left it.
    """
    leaving: list[tuple[int, Node]] = []
    for place, branch in enumerate(branches[conversation:], conversation + 1):
        if branch.get("of", 0) == conversation:
            left_out = max(0, len(branch["messages"]) - MESSAGES)
            own = branch["messages"][left_out:]
            inner = _tree(own, branch["after"] + left_out, place, branches)
            leaving.append((branch["after"], Node("branch", messages=inner)))
    leaving.sort(key=lambda item: item[0])
    nodes: list[Node] = []
    for place, message in enumerate(messages, start):
        while leaving and leaving[0][0] <= place:
            nodes.append(leaving.pop(0)[1])
        nodes += nodes_of([message])
    return nodes + [node for _, node in leaving]
