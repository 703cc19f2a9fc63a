"""Held-out tasks before and after training: those that changed, and a few to show at once."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from flash_mcp.protocol.records import Try
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.scores import conversation, last_prompt

SHOWN = 6
"""Tasks on a run's page."""


@dataclass(frozen=True)
class Example:
    """One held-out task, answered before and after training."""

    task_id: str
    question: str
    before: str
    after: str
    expected: str | None
    solved: tuple[bool, bool]
    """Whether it was solved before and after."""


def changed(store: Store, run_id: str, first: int, last: int) -> list[tuple[Try, Try]]:
    """The attempts before and after whose success differs; none that environment code failed."""
    # The rollouts of one evaluation may have been lost in part.
    tries = zip(store.tries(run_id, first), store.tries(run_id, last), strict=False)
    pairs: list[tuple[Try, Try]] = []
    for before, after in tries:
        is_valid = before.error is None and after.error is None
        if is_valid and before.success != after.success:
            pairs.append((before, after))
    return pairs


def examples(store: Store, run_id: str) -> list[Example]:
    """A few of the tasks that changed; if none did, the first ones. Empty for a run without two
    held-out evaluations.
    """
    steps = [row.step for row in store.evals(run_id) if row.can_be_judged]
    if len(steps) < 2:
        return []
    pairs = changed(store, run_id, steps[0], steps[-1])
    stored = {row.index for row in store.tries(run_id, steps[0])}
    rows = [after for _, after in pairs] or store.tries(run_id, steps[-1])
    shown: list[Example] = []
    for index in map(attrgetter("index"), rows):
        if index not in stored or len(shown) == SHOWN:
            continue
        before = store.transcript(run_id, steps[0], index)
        after = store.transcript(run_id, steps[-1], index)
        example = Example(
            task_id=after.task_id,
            question=last_prompt(after),
            before=conversation(before),
            after=conversation(after),
            expected=after.expected,
            solved=(before.success, after.success),
        )
        shown.append(example)
    return shown
