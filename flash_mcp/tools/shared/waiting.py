"""Waiting for runs and deployments, and making sure that a supervisor runs them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import anyio
from anyio.to_thread import run_sync

from flash_mcp.protocol import base_models
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import two_digits
from flash_mcp.protocol.records import ACTIVE, EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import LOCAL_TARGET, EvalSpec, ResolvedEval
from flash_mcp.state import costs, queue
from flash_mcp.state.disk import LEAST_FREE_BYTES, free_bytes
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target
from flash_mcp.supervisor import process, secrets
from flash_mcp.supervisor.launch.local import devices_in_use
from flash_mcp.supervisor.process import LOG, is_supervised, unfit
from flash_mcp.tools.shared.tool_base import longest_wait_s, report

T = TypeVar("T")

INDECISIVE = {
    "environment",
    "env_timeout_s",
    "env_concurrency",
    "max_error_share",
    "max_attempts",
    "stall_timeout_s",
    "target",
    "precision",
}
"""Fields of an evaluation that do not decide what it finds: the digest stands for the
environment, and `measured` looks at the precision.
"""

POLL_S = 0.25
SLOW_POLL_S = 1.0
"""After the first minute."""
PROGRESS_S = 5.0
"""A wait without news says so, which keeps its call alive."""
closing = threading.Event()
"""The server ends: calls that wait answer now."""


async def submit(
    store: Store,
    resolved: ResolvedEval,
    environment: EnvironmentVersion,
    subject: Subject,
    key: str | None = None,
    *,
    again: bool = False,
    any_name: bool = False,
    label: queue.Label = queue.NO_LABEL,
    lineage: Json | None = None,
) -> tuple[Run, bool, FlashError | None]:
    """Queue an evaluation and make sure that a supervisor runs; last, why none does. Unless
    `again`, one that measures the same and has not failed is returned instead; with `any_name` also
    one of the same files under another name. Either gets the label.
    """

    def find_or_enqueue() -> tuple[Run, bool]:
        with store.transaction():
            run, created = queue.asked_before(store, resolved, key), False
            if run is None and not again:
                result = measured(store, resolved.spec, environment, subject)
                same = (run for run in result if any_name or run.environment == environment.name)
                run = next(same, None)
            if run is None:
                run, created = queue.enqueue(
                    store, resolved, environment, subject.adapter, key, lineage=lineage
                )
            return queue.label(store, run, label), created

    run, created = await run_sync(find_or_enqueue)
    return run, created, await look_after(store, run)


def measured(
    store: Store, spec: EvalSpec, environment: EnvironmentVersion, subject: Subject
) -> Iterator[Run]:
    """Evaluations of the same weights on the same tasks of the same version, sampled alike, that
    have not failed, the newest first. A local folder's weights may have changed: none.
    """
    if base_models.is_folder(subject.model):
        return
    digest = (subject.adapter or {}).get("digest")
    for run in store.evaluations_of(environment.digest):
        if (run.init_adapter or {}).get("digest") != digest:
            continue
        asked = run.evaluation.precision
        if spec.precision not in ((asked, run.precision) if run.precision else (asked,)):
            continue
        if run.evaluation.model_dump(exclude=INDECISIVE) == spec.model_dump(exclude=INDECISIVE):
            yield run


class Ending(Protocol):
    """A run, or a job of an extension."""

    @property
    def ended(self) -> float | None: ...


async def look_after(store: Store, run: Ending) -> FlashError | None:
    """Make sure that a supervisor looks after what has not ended; the error if none does. It is not
    raised: the run exists, and a caller who saw only the error would ask again.
    """
    if run.ended is None:
        try:
            await run_sync(process.ensure_supervised, store)
        except FlashError as error:
            return error
    return None


def tried_again(run_id: str) -> str:
    """What follows where no supervisor could be started."""
    return f"The server tries again every few seconds; status(run_id={run_id!r}) tells how it goes"


def deadline_after(wait_s: float) -> float:
    """When a call that may wait `wait_s` has to answer, by time.monotonic()."""
    return time.monotonic() + min(wait_s, longest_wait_s())


async def wait_until(
    read: Callable[[], T],
    done: Callable[[T], bool],
    deadline: float,
    progress: Callable[[T], tuple[str, float | None]],
) -> T:
    """What `read` returns once it is `done`, or at `deadline`. `read` runs on a thread.

    `progress` says what to report of it meanwhile: a message and a share in 0..1."""
    result = await run_sync(read)
    began = time.monotonic()
    reported = None
    reported_at = began
    while not done(result) and time.monotonic() < deadline and not closing.is_set():
        now = time.monotonic()
        await anyio.sleep(POLL_S if now - began < 60 else SLOW_POLL_S)
        result = await run_sync(read)
        reached = progress(result)
        if reached != reported or now - reported_at > PROGRESS_S:
            await report(*reached)
            reported, reported_at = reached, now
    return result


async def ended(store: Store, run_id: str, deadline: float) -> Run:
    """The run as soon as it has ended, or as it is at `deadline` (of time.monotonic)."""

    def progress(run: Run) -> tuple[str, float]:
        share = 0.0
        if run.steps:
            share = run.step / run.steps
        at = f"{run.step} of {run.steps} attempts"
        return f"{run_id}: {run.phase or run.state}, {at}", share

    read = functools.partial(store.run, run_id)
    return await wait_until(read, lambda run: run.ended is not None, deadline, progress)


async def wait_for_change(store: Store, run_id: str, wait_s: float) -> bool:
    deadline = deadline_after(wait_s)

    def read() -> tuple[Run, object]:
        run = store.run(run_id)
        return run, fingerprint(store, run)

    run, seen = await run_sync(read)
    if run.state not in ACTIVE:
        return False
    _, result = await wait_until(
        read, lambda now: now[1] != seen, deadline, lambda now: progress_of(now[0])
    )
    return result != seen


def progress_of(
    run: Run, step_s: float | None = None, start_s: float | None = None
) -> tuple[str, float | None]:
    """How far an active run is: a message, and the share of its steps once it makes steps.
    `start_s` is what an earlier run of this kind needed until its first step.
    """
    what = f"{run.id}: {run.phase or run.state}"
    if run.step and run.steps:
        pace = f", usually {two_digits(step_s)} s each" if step_s else ""
        return f"{what}, {run.step} of {run.steps} steps{pace}", run.step / run.steps
    if run.started and start_s:
        elapsed = time.time() - run.started
        what += f", {elapsed:.0f} s of usually {start_s:.0f} s until the first step"
    return what, None


def fingerprint(store: Store, run: Run) -> tuple[str, int, int, int, int, str | None]:
    """What counts as a change: the phase, without its share, only before the first step, as it
    changes all the time later; of an evaluation a tenth of its attempts, many of which end each
    second.
    """
    newest = store.last_metrics(run.id)
    step = 0
    if newest:
        step = newest.step
    if run.algorithm == "eval" and run.steps:
        step = run.step - run.step % max(1, run.steps // 10)
    phase = run.phase and run.phase.partition(" ")[0]
    if step:
        phase = None
    evaluations = len(store.evals(run.id))
    return run.state, step, run.attempt, evaluations, len(store.checkpoints(run.id)), phase


def obstacle(store: Store) -> FlashError | None:
    """What keeps every run and deployment from going on: a full disk, or no supervisor."""
    free = free_bytes(store.base)
    if free < LEAST_FREE_BYTES:
        fix = "free space there: the run goes on from its newest checkpoint"
        what = "the disk is as good as full" if free else "the disk has no space or inodes left"
        return FlashError("disk_full", what, path=store.base, free_bytes=free, fix=fix)
    if (result := unfit(store.base)) and result.hangs:
        return FlashError("not_ready", result.what, fix=result.fix)
    if is_supervised(store.base):
        return None
    fix = (
        "wait a few seconds: a running server starts one, and so does `flash-mcp wait RUN`; if"
        f" none comes, read the end of {LOG} in the state directory"
    )
    return FlashError("not_ready", "no supervisor runs", fix=fix)


def obstacles(store: Store, run: Run) -> list[str]:
    """What keeps an active run from going on. Looking starts nothing and hands nothing over."""
    if run.state not in ACTIVE:
        return []
    if result := obstacle(store):
        return [str(result)]
    if run.state == "running" and run.phase != "secrets":
        return [run.pending_reason] if run.pending_reason else []
    if run.error and run.error["code"] in ("disk_full", "held"):
        return [str(FlashError.from_dict(run.error))]
    if run.target != LOCAL_TARGET:
        try:
            find_target(store.base, run.target)
        except FlashError as error:
            return [f"{error} Until then the run waits."]
    if run.state == "queued" and (limit := costs.limit_error(store, run.owner)):
        return [str(limit)]
    is_here = run.target == LOCAL_TARGET
    if is_here and run.state == "queued" and (users := devices_in_use(store.base)):
        what = f"every GPU is used by {', '.join(users)}"
        return [str(FlashError("not_ready", what, fix="wait until one is free"))]
    absent = secrets.lacking(store.base, run.id, run.spec.secrets)
    if absent:
        return [str(secrets.missing(run.id, absent))]
    return []
