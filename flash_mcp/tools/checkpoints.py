"""checkpoints: the saved adapters of a run; and cancel, which ends a run after it saved."""

from __future__ import annotations

import time
from typing import Annotated

import anyio
import anyio.to_thread
from pydantic import Field

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.frame import Part, Result, RunId, report
from flash_mcp.tools.shared.next_steps import after_evaluation, going_on
from flash_mcp.tools.shared.waiting import look_after


class Cancel(Result):
    """A run that was asked to end."""

    run_id: str
    """The run."""
    state: str
    """cancelled, or still running while it saves."""
    step: int
    """Steps done."""
    checkpoint: int | None = None
    """Step of its newest checkpoint."""


class Checkpoint(Part):
    """An adapter saved during a run, in PEFT format."""

    step: int
    """Step at which it was saved."""
    reward: float | None = None
    """Mean training reward at that step."""
    success: float | None = None
    """Training success share at that step."""
    eval_success: float | None = None
    """Held-out success share, where it was evaluated."""
    loss: float | None = None
    """Loss at that step (sft)."""
    size_bytes: int
    """Size of its files."""
    digest: str
    """Digest of its files' checksums."""
    path: str
    """Its folder on the server."""
    saved: str
    """When, in UTC."""


class Checkpoints(Result):
    """Checkpoints of a run, the newest first."""

    run_id: str
    """The run."""
    state: str
    """The run's state."""
    checkpoints: list[Checkpoint]
    """The newest first."""
    has_more: bool
    """Whether older ones follow."""
    cursor: str | None = None
    """Pass as `cursor` for the next page."""


async def cancel(
    run_id: RunId,
    reason: Annotated[str, Field(max_length=500)] = "",
    wait_s: Annotated[float, Field(ge=0, le=45)] = 10.0,
) -> Cancel:
    """End a run: a queued one at once, a running one after it saved a checkpoint. It always ends as
    `cancelled`.

    Its metrics, rollouts and checkpoints stay. A run that has ended by itself is refused with
    run_finished; asking twice changes nothing more. Ending a deployment: undeploy.

    Args:
        reason: Kept with the run; default empty.
        wait_s: Seconds to wait for its end, 0 to 45; default 10.
    """
    store = open_store()
    run = await anyio.to_thread.run_sync(queue.request_cancel, store, run_id, reason)
    await look_after(store, run)  # status says what keeps a run from ending
    deadline = time.monotonic() + min(wait_s, 43.0)
    while run.state != "cancelled" and time.monotonic() < deadline:
        await report(f"{run_id}: {run.state}, asked to save and end")
        await anyio.sleep(0.2)
        run = await anyio.to_thread.run_sync(store.run, run_id)
    saved = await anyio.to_thread.run_sync(store.checkpoints, run_id)
    return Cancel(
        run_id=run_id,
        state=run.state,
        step=run.step,
        checkpoint=saved[-1].step if saved else None,
        next=_after_cancel(run, bool(saved)),
    )


def _after_cancel(run: Run, has_checkpoint: bool) -> str:
    if run.algorithm == "eval" and run.state == "cancelled":
        return after_evaluation(open_store(), run)
    if run.state != "cancelled":
        return f"it is saving; status(run_id={run.id!r}, wait_s=40) returns when it has ended"
    if has_checkpoint:
        return f"deploy(run_id={run.id!r}) serves its newest checkpoint; {going_on(run)} goes on from it"
    return "it had no checkpoint yet; train starts another run"


def checkpoints(
    run_id: RunId, limit: Annotated[int, Field(ge=1, le=30)] = 10, cursor: str | None = None
) -> Checkpoints:
    """List a run's checkpoints, the newest first: step, metrics, size, digest and folder (a PEFT
    adapter each).

    Serving one: deploy. Starting another run from one: train with init_from_adapter=RUN_ID@STEP.

    Args:
        limit: Checkpoints a page, 1 to 30; default 10.
        cursor: `cursor` of the page before.
    """
    store = open_store()
    run = store.run(run_id)
    if cursor is not None and not cursor.isdigit():
        raise FlashError(
            "invalid_argument",
            "that is no cursor of checkpoints",
            cursor=cursor,
            fix="pass it unchanged",
        )
    rows = [row for row in store.checkpoints(run_id) if cursor is None or row.step < int(cursor)][
        ::-1
    ]
    evaluated = {row.step: row.summary["success"] for row in store.evals(run_id)}
    found = [
        Checkpoint(
            step=row.step,
            reward=_rounded(row.metrics.get("reward/mean")),
            success=_rounded(row.metrics.get("success/rate")),
            eval_success=_rounded(evaluated.get(row.step)),
            loss=_rounded(row.metrics.get("loss")) if run.algorithm == "sft" else None,
            size_bytes=row.size_bytes,
            digest=row.digest,
            path=row.path,
            saved=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.time)),
        )
        for row in rows[:limit]
    ]
    if found:
        step = found[0].step
        next_step = f"deploy(run_id={run_id!r}, step={step}) serves the first; {going_on(run, step)} goes on from it"
    elif run.algorithm == "eval":
        next_step = f"an evaluation saves none; status(run_id={run_id!r}) has its scores"
    else:
        every = run.spec["save_every"]
        next_step = (
            f"none yet: one is saved every save_every={every} steps; status shows the progress"
        )
    has_more = len(rows) > limit
    more = str(found[-1].step) if has_more else None
    return Checkpoints(
        run_id=run_id,
        state=run.state,
        checkpoints=found,
        has_more=has_more,
        cursor=more,
        next=next_step,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
