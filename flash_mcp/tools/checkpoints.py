"""checkpoints: the saved adapters of a run; cancel: end a run after it saved."""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Annotated, Literal

from anyio.to_thread import run_sync
from pydantic import Field

from environments import doors
from flash_mcp.judgement.attempts import first_checkpoint
from flash_mcp.judgement.health import WORSE_ELSEWHERE
from flash_mcp.protocol import base_models, extensions, surroundings
from flash_mcp.protocol.checkpoints import LATEST
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.extensions import ExportKind
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.result_model import Agreement, rounded
from flash_mcp.state import queue, references
from flash_mcp.state.owners import refuse_server_side
from flash_mcp.state.retention import better_than_newest
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.loading import check_logins
from flash_mcp.tools.shared.next_steps import LIKE_ITS_OWN, going_on, next_of, waiting_for
from flash_mcp.tools.shared.run_view import RunReport
from flash_mcp.tools.shared.scores import elsewhere
from flash_mcp.tools.shared.tool_base import Result, ResultModel, RunId, page_offset
from flash_mcp.tools.shared.waiting import deadline_after, look_after, wait_until


class Export(ResultModel):
    """A checkpoint as files for other programs."""

    state: Literal["running", "ready"]
    folder: str
    pushed: str | None = None
    agreement: Agreement | None = None
    warnings: list[str] | None = None


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
    lost_steps: int | None = None
    """Steps made after it, which were lost as the attempt had to be killed."""


class CheckpointView(ResultModel):
    """An adapter saved during a run, in PEFT format."""

    step: int
    reward: float | None = None
    success: float | None = None
    eval_success: float | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    size_bytes: int
    digest: str
    path: str
    saved: str


class CheckpointList(Result):
    """Checkpoints of a run, newest first."""

    run_id: str
    """The run."""
    state: str
    """The run's state."""
    checkpoints: list[CheckpointView]
    """Newest first."""
    has_more: bool
    """Whether older ones follow."""
    cursor: str | None = None
    """Pass as `cursor` for the next page."""
    export: Export | None = None
    """With export."""


async def cancel(
    run_id: RunId,
    reason: Annotated[str, Field(max_length=500)] = "",
    wait_s: Annotated[float, Field(ge=0, le=45)] = 10.0,
) -> Cancel:
    """End a run: a queued run at once, a running run after it saved a checkpoint. Its state becomes
    `cancelled`. Also ends a tournament, by its id.

    Metrics, rollouts and checkpoints are kept. A run that already ended by itself is refused with
    run_finished; a second call changes nothing. To end a deployment, call undeploy.

    Args:
        reason: Text that is kept with the run.
        wait_s: Seconds to wait for its end.
    """
    store = open_store()
    prefix = run_id.partition("-")[0]
    if prefix in doors.brought("flash_mcp.jobs"):
        stop = extensions.find("flash_mcp.jobs", prefix).stop
        state, step, follows = await run_sync(stop, store, run_id)
        return Cancel(run_id=run_id, state=state, step=step, next=follows)
    run = await run_sync(queue.request_cancel, store, run_id, reason)
    await look_after(store, run)  # status says what keeps a run from ending
    run = await wait_until(
        functools.partial(store.run, run_id),
        lambda run: run.state == "cancelled",
        deadline_after(wait_s),
        lambda run: (f"{run_id}: {run.state}, asked to save and end", None),
    )
    return await run_sync(_cancelled, store, run)


def _cancelled(store: Store, run: Run) -> Cancel:
    saved = store.checkpoints(run.id)
    checkpoint = saved[-1].step if saved else None
    if run.state == "cancelled":
        next_step = next_of(RunReport(run=run, checkpoints=saved))
    else:
        still = "it ends before its first step"
        if run.algorithm == "eval":
            still = "it is ending"
        elif step_s := store.slowest_step_s(run.id):
            minutes = math.ceil(step_s / 60)
            still = f"it is finishing step {run.step + 1} and saving, up to {minutes} min"
        next_step = f"{still}; {waiting_for(run.id, 'end')} returns when it has ended"
    return Cancel(
        run_id=run.id,
        state=run.state,
        step=run.step,
        checkpoint=checkpoint,
        lost_steps=store.lost_steps(run) or None,
        next=next_step,
    )


async def checkpoints(
    run_id: RunId,
    export: ExportKind | None = None,
    push_to: str | None = None,
    limit: Annotated[int, Field(ge=1, le=30)] = 10,
    cursor: str | None = None,
) -> CheckpointList:
    """List a run's checkpoints, newest first: step, metrics, size, digest and folder. Each is a
    PEFT adapter. With export, write one as files for other programs.

    To serve one, call deploy. To train from one, call train with init_from_adapter=RUN_ID@STEP.

    Args:
        run_id: Run id; with export also RUN@STEP.
        export: Write the newest, or RUN@STEP, in this format.
        push_to: With export: upload it to this private hub model, OWNER/NAME.
        limit: Checkpoints per page.
        cursor: `cursor` of the previous page.
    """
    store = open_store()
    if export is None and push_to is not None:
        what = f"push_to={push_to!r} needs export"
        fix = "say in which format, for example export='merged'"
        raise FlashError("invalid_argument", what, fix=fix)
    if export is None:
        return await run_sync(_listed, store, run_id, limit, cursor)
    start_or_find = extensions.find("flash_mcp.checkpoints", "export")
    if push_to is not None:
        check_logins([surroundings.HUB])
    else:
        fix = "give push_to=OWNER/NAME too, and take it from the hub"
        refuse_server_side("an export's folder", fix, argument="export")
    subject = await run_sync(references.find_subject, store, run_id)
    if subject.run is None or subject.adapter is None or not subject.step:
        fix = "name a run with a checkpoint, as RUN or RUN@STEP"
        raise FlashError("invalid_argument", f"{run_id!r} names no checkpoint to export", fix=fix)
    run, step = subject.run, subject.step
    result = await run_sync(_listed, store, run.id, 1, str(step + 1))
    result.has_more, result.cursor = False, None
    # A model of unknown size counts as its adapter.
    least, parameters = result.checkpoints[0].size_bytes, base_models.find(run.model).parameters
    exported: Export = await start_or_find(
        store, f"{run.id}@{step}", export, push_to, parameters or 0, least
    )
    result.export = exported
    if exported.state == "running":
        result.checkpoints = []
    result.next = f"the same call again waits for {exported.folder}"
    if exported.state == "ready":
        result.next = f"take {exported.folder}: README.md there is its model card"
    return result


def _listed(store: Store, run_id: str, limit: int, cursor: str | None) -> CheckpointList:
    run = store.run(run_id)
    before = page_offset(cursor, "checkpoints")
    saved = store.checkpoints(run_id)
    rows = saved[::-1]
    if cursor is not None:
        rows = [row for row in rows if row.step < before]
    evaluations = [row for row in store.evals(run_id) if row.can_be_judged]
    evaluated = {row.step: row.summary["success"] for row in evaluations}
    results: list[CheckpointView] = []
    for row in rows[:limit]:
        listed = CheckpointView(
            step=row.step,
            reward=rounded(row.metrics.get("reward/mean"), 4),
            success=rounded(row.metrics.get("success/rate"), 4),
            eval_success=rounded(evaluated.get(row.step), 4),
            loss=rounded(row.metrics.get("loss"), 4) if run.algorithm == "sft" else None,
            held_out_loss=rounded(row.metrics.get("eval_loss"), 4),
            size_bytes=row.size_bytes,
            digest=row.digest,
            path=row.path,
            saved=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.time)),
        )
        results.append(listed)
    if results:
        step = results[0].step
        serve = f"deploy(run_id={run_id!r}, step={step}) serves the first"
        if better := better_than_newest(store, run, saved, evaluations):
            step, why = better
            serve = f"deploy(run_id={run_id!r}, step={step}) serves the best, {why}"
        if elsewhere(store, run)[1]:
            serve = f"{WORSE_ELSEWHERE}: status has the remedy; {serve} {LIKE_ITS_OWN}"
        next_step = f"{serve}; {going_on(run, step)} starts another run from it"
        link = Path(run.folder, LATEST)
        if link.is_symlink():
            next_step += f"; {link} leads to the newest, also later"
    elif run.algorithm == "eval":
        next_step = f"an evaluation saves none; status(run_id={run_id!r}) has its scores"
    else:
        next_step = first_checkpoint(run)
    has_more = len(rows) > limit
    more = str(results[-1].step) if has_more else None
    return CheckpointList(
        run_id=run_id,
        state=run.state,
        checkpoints=results,
        has_more=has_more,
        cursor=more,
        next=next_step,
    )
