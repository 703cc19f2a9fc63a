"""TRAINING.md, and its loop in short as a prompt."""

from __future__ import annotations

from functools import cache
from pathlib import Path

LOOP = """\
Goal: {goal}

Train a model towards this goal with the flash-mcp tools. Work in rounds of one hypothesis and one changed value each.

1. `catalog` shows models, environments and this machine. Prefer the smallest model that can sometimes do the task.
2. Write the task as an environment (`env_setup` writes a starter that runs as it is). Grade in parts, keep `success`
   apart from the reward, and hold rows back for the eval split.
3. `env_test` until nothing fails, then `env_push`.
4. `train` with `validate_only=true` shows every value and where it came from, and with `sample=true` whether there is
   anything to learn from. Then a short run: 10 to 20 steps,
   `eval_before=true`, `eval_after=true`, and an `idempotency_key`.
5. `status` with `wait_s=40` until it ended. Act on its flags; `rollouts` with `which="worst"` and `"best"` shows
   whether the reward pays for what was meant.
6. Judge by the held-out evaluation and its noise band, not by the training reward. Within the band means no change.
   `evaluate` measures any model or checkpoint; `compare` says whether two evaluations differ.
7. When it improved: `checkpoints`, `deploy`, `chat` with the base model beside the adapter, `undeploy`.
8. Report the numbers, what was tried and what did not work. Stop when the goal is met, or when two rounds in a row
   changed nothing.

The resource flash://playbook has the details."""


@cache
def text() -> str:
    """The playbook, as installed with the package or as it lies in the repository."""
    package = Path(__file__).parents[2]
    found = next(
        path for path in (package / "TRAINING.md", package.parent / "TRAINING.md") if path.is_file()
    )
    return found.read_text(encoding="utf-8")


def loop(goal: str) -> str:
    """The prompt for a goal in words."""
    return LOOP.format(goal=goal.strip())
