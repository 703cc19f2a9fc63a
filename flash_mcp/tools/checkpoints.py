"""checkpoints: the saved adapters of a run; cancel: end a run after it saved."""

from __future__ import annotations

import functools
import time
from typing import Annotated

from anyio.to_thread import run_sync
from pydantic import Field

from flash_mcp.protocol.parts import rounded
from flash_mcp.protocol.records import Run
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.frame import Part, Result, RunId, page_offset
from flash_mcp.tools.shared.next_steps import Situation, going_on, next_of, waiting_for
from flash_mcp.tools.shared.waiting import deadline_after, look_after, wait_until


class Cancel(Result):
    """A cancelled run."""

    run_id: str
    """The run."""
    state: str
    """cancelled, or running while it still saves."""
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
    """Share of training successes at that step."""
    eval_success: float | None = None
    """Held-out success share, if evaluated at that step."""
    loss: float | None = None
    """Loss at that step (sft)."""
    size_bytes: int
    """Without optimizer."""
    digest: str
    """Digest of its files' checksums."""
    path: str
    """Its folder on the server."""
    saved: str
    """When, in UTC."""


class Checkpoints(Result):
    """Checkpoints of a run, newest first."""

    run_id: str
    """The run."""
    state: str
    """The run's state."""
    checkpoints: list[Checkpoint]
    """Newest first."""
    has_more: bool
    """Whether older ones follow."""
    cursor: str | None = None
    """Pass as `cursor` for the next page."""


async def cancel(
    run_id: RunId,
    reason: Annotated[str, Field(max_length=500)] = "",
    wait_s: Annotated[float, Field(ge=0, le=45)] = 10.0,
) -> Cancel:
    """End a run: a queued run at once, a running run after it saved a checkpoint. Its state becomes
    `cancelled`.

    Metrics, rollouts and checkpoints are kept. A run that already ended by itself is refused with
    run_finished; a second call changes nothing. To end a deployment, call undeploy.

    Args:
        reason: Text that is kept with the run.
        wait_s: Seconds to wait for its end.
    """
    store = open_store()
    run = await run_sync(queue.request_cancel, store, run_id, reason)
    await look_after(store, run)  # status says what keeps a run from ending
    run = await wait_until(
        functools.partial(store.run, run_id),
        lambda run: run.state == "cancelled",
        deadline_after(wait_s),
        lambda run: (f"{run_id}: {run.state}, asked to save and end", None),
    )
    saved = await run_sync(store.checkpoints, run_id)
    checkpoint = saved[-1].step if saved else None
    return Cancel(
        run_id=run_id,
        state=run.state,
        step=run.step,
        checkpoint=checkpoint,
        next=_after_cancel(run, checkpoint),
    )


def _after_cancel(run: Run, checkpoint: int | None) -> str:
    if run.state == "cancelled":
        return next_of(Situation(run=run, checkpoint=checkpoint))
    return f"it is saving; {waiting_for(run.id, 'end')} returns when it has ended"


def checkpoints(
    run_id: RunId, limit: Annotated[int, Field(ge=1, le=30)] = 10, cursor: str | None = None
) -> Checkpoints:
    """List a run's checkpoints, newest first: step, metrics, size, digest and folder. Each is a
    PEFT adapter.

    To serve one, call deploy. To train from one, call train with init_from_adapter=RUN_ID@STEP. In
    a shell, `flash-mcp export RUN_ID@STEP` writes one as merged safetensors or GGUF.

    Args:
        limit: Checkpoints per page.
        cursor: `cursor` of the previous page.
    """
    store = open_store()
    run = store.run(run_id)
    before = page_offset(cursor, "checkpoints")
    rows = list(reversed(store.checkpoints(run_id)))
    if cursor is not None:
        rows = [row for row in rows if row.step < before]
    evaluated = {row.step: row.summary["success"] for row in store.evals(run_id)}
    found = [
        Checkpoint(
            step=row.step,
            reward=rounded(row.metrics.get("reward/mean"), 4),
            success=rounded(row.metrics.get("success/rate"), 4),
            eval_success=rounded(evaluated.get(row.step), 4),
            loss=rounded(row.metrics.get("loss"), 4) if run.algorithm == "sft" else None,
            size_bytes=row.size_bytes,
            digest=row.digest,
            path=row.path,
            saved=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.time)),
        )
        for row in rows[:limit]
    ]
    if found:
        step = found[0].step
        serve = f"deploy(run_id={run_id!r}, step={step}) serves the first"
        next_step = f"{serve}; {going_on(run, step)} starts another run from it"
    elif run.algorithm == "eval":
        next_step = f"an evaluation saves none; status(run_id={run_id!r}) has its scores"
    else:
        every = f"save_every={run.training.save_every}"
        next_step = f"none yet: one is saved every {every} steps; status shows the progress"
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
