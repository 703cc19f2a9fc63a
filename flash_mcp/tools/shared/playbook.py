"""TRAINING.md, and a short version of it as a prompt."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

SECTION = re.compile(r"^(?=## )", re.MULTILINE)
LINK = re.compile(r"\]\(#([a-z-]+)\)")

LOOP = """\
Goal: {goal}

Train a model towards this goal with the flash-mcp tools. Change one thing per round, and note what
you expect.

1. `catalog` lists models, environments and devices. Choose the smallest model that sometimes solves
   the task.
2. `env_setup` writes a starter environment. Change it to your task. Reward partial progress, keep
   `success` apart from the reward, and put other tasks into the eval split.
3. `env_test` until every check passes, then `env_push`.
4. `train` with `validate_only=true` and `sample=true` shows every value and whether there is
   anything to learn. If the model solves almost nothing and gold answers exist, run
   `algorithm="sft"` first, and grpo from it (`init_from_adapter`). Start with a short run: 10 to 20
   steps, `eval_before=true`, `eval_after=true`, and an `idempotency_key`.
5. `status` with `until="news"`, then each time the call that `next` names, until the run has ended.
   Act on its flags. `rollouts` with `which="worst"` and `which="best"` shows whether the reward
   pays for what you meant.
6. Judge by `verdict`: held-out success against its noise band, not the training reward. `evaluate`
   measures any model or checkpoint; `compare` says whether two evaluations differ.
7. If it improved: `checkpoints`, `deploy`, `chat` with `side_by_side=true`, `undeploy`.
8. Report the numbers with their n, what you tried and what did not work. Stop when the goal is met,
   or when two rounds in a row ended in `no_change`.

The resource flash://playbook has the details."""


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


def skill() -> str:
    """SKILL.md for agents that take skills: when to use the tools, and the loop."""
    return SKILL + LOOP.partition("\n\n")[2] + "\n"


def loop(goal: str) -> str:
    return LOOP.format(goal=goal.strip())
