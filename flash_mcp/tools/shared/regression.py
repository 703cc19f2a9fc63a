"""Whether a run made its model worse at other kinds of tasks, by the test of the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean

from flash_mcp.judgement import comparison
from flash_mcp.protocol.records import Run
from flash_mcp.state.store import Store


def regression_of(store: Store, run: Run) -> str | None:
    """What the regression split shows, in words; None where it was not tried."""
    events = store.events(run.id, kinds=["regression"])
    before: Mapping[str, bool] = {}
    after: Mapping[str, bool] = {}
    for event in events:
        if event.data["step"]:
            after = event.data["outcomes"]
        else:
            before = event.data["outcomes"]
    tasks = comparison.shared(before, after)
    if not tasks:
        if before:
            return f"{fmean(before.values()):.2f} of {len(before)} other tasks before training"
        return None
    pairs = [(float(before[task]), float(after[task])) for task in tasks]
    old, new = zip(*pairs, strict=True)
    change = comparison.compare_paired(old, new, effect=comparison.MIN_CHANGE)
    lost = Counter(task.rpartition("-")[0] for task in tasks if before[task] and not after[task])
    where = ", ".join(f"{kind} {count}" for kind, count in lost.most_common())
    text = f"{change.outcome} on {len(tasks)} other tasks, {fmean(old):.2f} -> {fmean(new):.2f}"
    return f"{text}: {change.explanation}{f'; no longer solved: {where}' if where else ''}"
