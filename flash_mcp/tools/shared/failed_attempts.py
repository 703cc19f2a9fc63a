"""The worst attempts of an evaluation, short: what a better prompt has to put right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from flash_mcp.protocol.records import Json, Rollout, Run, text_of
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.truncation import shorten, shorten_as_json

SHOWN = 2
CHARACTERS = 700
"""Of one attempt."""


class FailedAttempt(ResultModel):
    """An attempt that failed."""

    task_id: str
    index: int
    """For rollouts, which shows it whole."""
    reward: Rounded
    prompt: str
    """The last message before the model's first turn."""
    text: str
    """What the model wrote and was answered."""
    reason: str | None = None
    """The scorer's."""


def worst_attempts(store: Store, run: Run) -> list[FailedAttempt] | None:
    """The failed attempts of an evaluation with the lowest rewards; None if there are none."""
    step = run.evaluation.step
    rows = store.rollouts(run.id, "eval", step, "worst", success=False, limit=SHOWN)
    return [_shown(row) for row in rows] or None


def _shown(row: Rollout) -> FailedAttempt:
    return FailedAttempt(
        task_id=row.task_id,
        index=row.index,
        reward=row.reward,
        prompt=shorten_as_json(last_prompt(row), CHARACTERS // 3),
        text=shorten_as_json(conversation(row), CHARACTERS // 2),
        reason=shorten(row.reason or "", CHARACTERS // 6) or None,
    )


def last_prompt(row: Rollout) -> str:
    """The last message before the model's first turn."""
    prompt = row.messages[: row.prompt_messages]
    return text_of(prompt[-1]) if prompt else ""


def conversation(row: Rollout) -> str:
    """The model's turns as they are, what answered them in brackets."""
    messages: Sequence[Json] = row.messages[row.prompt_messages :]
    turns: list[str] = []
    for message in messages:
        text = text_of(message)
        turns.append(text if message["role"] == "assistant" else f"[{text}]")
    return "\n".join(turns)


def shared_beginning(prompts: Iterable[Sequence[Json]]) -> list[Json]:
    """The messages with which all of them begin."""
    columns = takewhile(
        lambda column: all(item == column[0] for item in column), zip(*prompts, strict=False)
    )
    return [column[0] for column in columns]
