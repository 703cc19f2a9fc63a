"""Waiting for runs, and what keeps them from going on."""

from __future__ import annotations

import shutil
import time

import anyio
import anyio.to_thread

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE, EnvironmentVersion, Run
from flash_mcp.protocol.spec import ResolvedEval
from flash_mcp.state import queue
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store
from flash_mcp.supervisor import keeper, secrets
from flash_mcp.supervisor.process import LOG, is_supervised
from flash_mcp.tools.shared.frame import report

POLL_S = 0.25


WAIT_LIMIT_S = 42.0


async def submit(
    store: Store,
    resolved: ResolvedEval,
    environment: EnvironmentVersion,
    subject: Subject,
    key: str | None,
) -> tuple[Run, bool, FlashError | None]:
    """Put an evaluation into the queue, and see that somebody looks after it; last, why nobody
    does.
    """
    run, created = await anyio.to_thread.run_sync(
        queue.enqueue, store, resolved, environment, subject.adapter, key
    )
    return run, created, await look_after(store, run)


async def look_after(store: Store, run: Run) -> FlashError | None:
    """Make sure that a supervisor looks after an active run; the error if none does.

    The error is not raised: the run exists, and a caller who saw only the error would ask again.
    """
    if run.ended is None:
        try:
            await anyio.to_thread.run_sync(keeper.look_after, store)
        except FlashError as error:
            return error
    return None


def tried_again(run_id: str) -> str:
    """What follows where no supervisor could be started."""
    return f"The server tries again every few seconds; status(run_id={run_id!r}) tells how it goes"


async def ended(store: Store, run_id: str, deadline: float) -> Run:
    """The run as soon as it has ended, or as it is at `deadline` (of time.monotonic)."""
    run = await anyio.to_thread.run_sync(store.run, run_id)
    while run.ended is None and time.monotonic() < deadline:
        await anyio.sleep(POLL_S)
        run = await anyio.to_thread.run_sync(store.run, run_id)
        share = run.step / run.steps if run.steps else 0.0
        await report(
            f"{run_id}: {run.phase or run.state}, {run.step} of {run.steps} attempts", share
        )
    return run


MAX_WAIT_S = 43.0
"""Less than the 45 s after which a call is left: the answer takes time too."""


LEAST_FREE_BYTES = 16 * 2**20


async def wait_for_change(store: Store, run_id: str, wait_s: float) -> bool:
    deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
    seen = await anyio.to_thread.run_sync(_fingerprint, store, run_id)
    while time.monotonic() < deadline:
        if seen[0] not in ACTIVE:
            return False
        await anyio.sleep(POLL_S)
        now = await anyio.to_thread.run_sync(_fingerprint, store, run_id)
        if now != seen:
            return True
        await report(f"{run_id}: {now[0]}, step {now[1]}")
    return False


def _fingerprint(store: Store, run_id: str) -> tuple[str, int, int, int, int, str | None]:
    """What counts as a change. The phase only before the first step: later it changes all the time.

    An evaluation counts attempts instead of steps, many a second: a tenth of them is a change.
    """
    run = store.run(run_id)
    newest = store.last_metrics(run_id)
    step = newest.step if newest else 0
    if run.algorithm == "eval" and run.steps:
        step = run.step - run.step % max(1, run.steps // 10)
    return (
        run.state,
        step,
        run.attempt,
        len(store.evals(run_id)),
        len(store.checkpoints(run_id)),
        run.phase if not step else None,
    )


def obstacle(store: Store) -> FlashError | None:
    """What keeps every run and deployment from going on: a full disk, or no supervisor."""
    free = shutil.disk_usage(store.base).free
    if free < LEAST_FREE_BYTES:
        fix = "free space there: the run goes on from its newest checkpoint"
        what = "the disk is as good as full"
        return FlashError("disk_full", what, path=store.base, free_bytes=free, fix=fix)
    if is_supervised(store.base):
        return None
    fix = (
        "wait a few seconds: a running server starts one, and so does `flash-mcp wait RUN`; if none "
        f"comes, read the end of {LOG} in the state directory"
    )
    return FlashError("not_ready", "no supervisor runs", fix=fix)


def obstacles(store: Store, run: Run) -> list[str]:
    """What keeps an active run from going on. Looking starts nothing and hands nothing over."""
    if run.state not in ACTIVE:
        return []
    if found := obstacle(store):
        return [str(found)]
    if run.state == "running":
        return []
    absent = secrets.lacking(store.base, run.id, run.spec["secrets"])
    return [str(secrets.missing(run.id, absent))] if absent else []
