"""TRAINING.md, and a short version of it as a prompt."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

SECTION = re.compile(r"^(?=## )", re.MULTILINE)
LINK = re.compile(r"\]\(#([a-z-]+)\)")

CALLS = re.compile(r"^\| \|.+?(?=\n\n)", re.MULTILINE | re.DOTALL)
"""The table of the calls in their order."""
SKILL = """\
---
name: train-a-model
description: Train, evaluate and serve a small language model with the flash-mcp tools. Use it \
when a model should learn a task (labels, formats, tools, SQL, text to structure) from rows or a \
reward, when a smaller or local model should replace a larger one, or when models or prompts are \
to be compared.
---

# Train a model

The tools catalog, env_setup, env_test, env_push, train, status, rollouts, evaluate, compare, deploy
and chat belong to the MCP server `flash`. Every result ends with `next`: the call to make now.
Without the tools, run `flash-mcp doctor`.

"""
ADDRESS = "flash://playbook"
FIRST = 2
"""Sections that the first page has whole; it names the others."""


@cache
def text() -> str:
    """TRAINING.md, as installed with the package or from the repository."""
    package = Path(__file__).parents[2]
    installed = package / "TRAINING.md"
    result = installed if installed.is_file() else package.parent / "TRAINING.md"
    return result.read_text(encoding="utf-8")


@cache
def sections() -> dict[str, str]:
    """The sections of the playbook by the names that links to them have, each a page of its own."""
    result: dict[str, str] = {}
    for part in SECTION.split(text())[1:]:
        name = part.partition("\n")[0].removeprefix("## ").lower().replace(" ", "-")
        result[name] = LINK.sub(rf"]({ADDRESS}/\1)", part).rstrip() + "\n"
    return result


def first_page() -> str:
    """What is enough to start, and the addresses of the other sections."""
    names = list(sections())
    title = SECTION.split(text())[0]
    others = "".join(f"- {ADDRESS}/{name}\n" for name in names[FIRST:])
    return title + "\n".join(map(sections().__getitem__, names[:FIRST])) + f"\n## More\n\n{others}"


def calls() -> str:
    """The calls in their order, and when to go on."""
    table = CALLS.search(text())
    assert table is not None
    return f"{table[0]}\n\nThe resource {ADDRESS} has the details.\n"


def skill() -> str:
    """SKILL.md for agents that take skills: when to use the tools, and the loop."""
    return f"{SKILL}\n{calls()}"


def loop(goal: str) -> str:
    advice = (
        "Train a model towards this goal with the flash-mcp tools. Change one thing per round, and "
        "note what you expect. Stop when the goal is met, or when two rounds in a row ended in "
        "`no_change`; report the numbers with their n."
    )
    return f"Goal: {goal.strip()}\n\n{advice}\n\n{calls()}"
