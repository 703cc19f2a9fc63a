"""checkpoints: the saved adapters of a run; cancel: end a run after it saved."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from anyio.to_thread import run_sync
from pydantic import Field

from environments import doors
from flash_mcp.judgement.attempts import first_checkpoint
from flash_mcp.judgement.health import WORSE_ELSEWHERE
from flash_mcp.protocol import base_models, extensions, surroundings
from flash_mcp.protocol.checkpoints import LATEST
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import exports_dir
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.result_model import Agreement, ExportKind, rounded
from flash_mcp.protocol.surroundings import environment_for
from flash_mcp.state import queue, references
from flash_mcp.state.disk import check_quota, size_of
from flash_mcp.state.locks import try_lock
from flash_mcp.state.owners import caller, operator_settings, refuse_server_side
from flash_mcp.state.retention import better_than_newest
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.loading import check_logins
from flash_mcp.tools.shared.next_steps import (
    LIKE_ITS_OWN,
    RunContext,
    going_on,
    next_of,
    waiting_for,
)
from flash_mcp.tools.shared.scores import elsewhere
from flash_mcp.tools.shared.tool_base import Result, ResultModel, RunId, page_offset
from flash_mcp.tools.shared.waiting import deadline_after, look_after, wait_until

# -- exports that a tool call starts and later calls find: their process outlives the call ---------


class Export(ResultModel):
    """A checkpoint as files for other programs."""

    state: Literal["running", "ready"]
    folder: str
    pushed: str | None = None
    agreement: Agreement | None = None
    warnings: list[str] | None = None


@dataclass(frozen=True)
class Exporter:
    """One checkpoint in one format; `reference` is RUN@STEP, `push_to` a hub's OWNER/NAME."""

    base: Path
    reference: str
    kind: ExportKind
    push_to: str | None

    @property
    def folder(self) -> Path:
        name = f"{self.reference}-{self.kind}".replace("@", "-")
        return exports_dir(self.base) / name

    @property
    def _name(self) -> str:
        pushed = f"-{self.push_to.replace('/', '-')}" if self.push_to else ""
        return f"{self.folder}{pushed}"

    def look(self) -> Export | None:
        """The export as it is; None if it was never made or has failed: see `failure`."""
        with self._lock() as lock:
            if not try_lock(lock):
                return Export(state="running", folder=str(self.folder))
        body = self._printed()
        if not self.folder.is_dir() or "folder" not in body:
            return None
        return Export(
            state="ready",
            folder=str(self.folder),
            pushed=body.get("pushed"),
            agreement=body.get("agreement"),
            warnings=body.get("warnings") or None,
        )

    def start(self) -> None:
        """Start it, unless it runs. It holds the lock while it runs."""
        command = [sys.executable, "-P", "-m", "flash_mcp.cli", "export", self.reference]
        command += ["--format", self.kind, "--to", str(self.folder), "--json"]
        if self.push_to:
            command += ["--push-to", self.push_to]
        with self._lock() as lock:
            if not try_lock(lock):
                return
            with Path(f"{self._name}.json").open("wb") as printed:
                # The shell ends at once, so that the export is no child of this process.
                subprocess.run(
                    ["/bin/sh", "-c", '"$@" &', "sh", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env={
                        **environment_for(caller().secrets, os.environ),
                        "FLASH_HOME": str(self.base),
                    },
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                    check=True,
                )

    def check_quota(self, store: Store, size_bytes: int) -> None:
        """FlashError(quota_exceeded) if there is no room, or another export runs."""
        if caller().is_local:
            return
        folder, stored = self.folder.parent, 0
        own = set(store.column("SELECT id FROM runs"))
        for path in folder.glob("run-*"):
            if "-".join(path.name.split("-")[:2]) not in own:
                continue
            stored += size_of(path)
            if path.suffix == ".lock" and path != Path(f"{self._name}.lock"):
                with path.open("ab") as lock:
                    if not try_lock(lock):
                        what = f"{path.stem} is being written, and an owner has one at a time"
                        fix = "call again when it is ready"
                        raise FlashError("quota_exceeded", what, fix=fix)
        limit = int(operator_settings(self.base).disk.exports_gib * 2**30)
        check_quota("exports", stored, size_bytes, limit, "exports_gib")

    def failure(self) -> FlashError:
        body = self._printed()
        if "error" in body:
            return FlashError.from_dict(body["error"])
        what = "the export ended without a result"
        return FlashError("worker_failed", what, fix="call again; flash-mcp doctor finds causes")

    def _printed(self) -> dict[str, Any]:
        """The last line that the command printed, which is JSON unless it was killed."""
        with suppress(OSError, ValueError, IndexError):
            return json.loads(Path(f"{self._name}.json").read_text().splitlines()[-1])
        return {}

    def _lock(self) -> IO[bytes]:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(f"{self._name}.lock").open("ab")


BYTES_PER_PARAMETER: dict[ExportKind, int] = {
    "merged": 2,
    "adapter": 0,
    "gguf-f16": 2,
    "gguf-q8_0": 1,
}
EXPORT_WAIT_S = 38.0
"""How long a call waits for its export; the export itself goes on."""


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
        next_step = next_of(RunContext(run=run, checkpoint=checkpoint))
    else:
        next_step = f"{_ending(store, run)}; {waiting_for(run.id, 'end')} returns when it has ended"
    return Cancel(
        run_id=run.id,
        state=run.state,
        step=run.step,
        checkpoint=checkpoint,
        lost_steps=store.lost_steps(run) or None,
        next=next_step,
    )


def _ending(store: Store, run: Run) -> str:
    """What a run that was asked to end still does, and how long that takes."""
    if run.algorithm == "eval":
        return "it is ending"
    step_s = store.slowest_step_s(run.id)
    if not step_s:
        return "it ends before its first step"
    minutes = math.ceil(step_s / 60)
    return f"it is finishing step {run.step + 1} and saving, up to {minutes} min"


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
    exporter = Exporter(store.base, f"{run.id}@{step}", export, push_to)
    if await run_sync(exporter.look) is None:
        # A model of unknown size counts as its adapter.
        weights = (base_models.find(run.model).parameters or 0) * BYTES_PER_PARAMETER[export]
        size_bytes = max(result.checkpoints[0].size_bytes, weights)
        await run_sync(exporter.check_quota, store, size_bytes)
        await run_sync(exporter.start)
    result.export = await _exported(exporter)
    if result.export.state == "running":
        result.checkpoints = []
    result.next = f"the same call again waits for {result.export.folder}"
    if result.export.state == "ready":
        result.next = f"take {result.export.folder}: README.md there is its model card"
    return result


async def _exported(exporter: Exporter) -> Export:
    """The export, once it is there or after EXPORT_WAIT_S. The error of one that failed."""
    result = await wait_until(
        exporter.look,
        lambda seen: seen is None or seen.state == "ready",
        deadline_after(EXPORT_WAIT_S),
        lambda _: (f"writing {exporter.folder.name}", None),
    )
    if result is None:
        raise exporter.failure()
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
