"""Continue a training run that has ended: the same run goes on from its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flash_mcp.protocol import surroundings
from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.schedules import rate_factor
from flash_mcp.state import queue
from flash_mcp.state.store import Store

RETRY_S = 10.0
"""How long an object store may not answer before the call fails."""


@dataclass(frozen=True)
class Resumed:
    run: Run
    step: int
    """The step of the checkpoint that it goes on from; 0 for the start."""
    notes: list[str]


def resume_run(store: Store, run_id: str, steps: int | None, *, fresh_optimizer: bool) -> Resumed:
    """Queue the run again with its own values, up to `steps` or as far as it was to go. A repeat
    finds it under way, or at those steps already, and changes nothing.
    """
    run = store.run(run_id)
    if queue.is_held(run):
        return Resumed(queue.release(store, run_id), run.step, [])
    if run.ended is not None:
        _check_files(run)
    total = _total(run, steps)
    if run.ended is None or (run.state == "succeeded" and total == run.steps):
        return Resumed(run, run.step, [f"it is {run.state} already: nothing was changed"])
    # Before the transaction: it reads whole checkpoints, and others wait to write.
    folder = RunFolder(run.folder, retry_s=RETRY_S)
    step = folder.checkpoints.newest_good() or 0
    notes = _loss(folder, step, fresh_optimizer=fresh_optimizer)
    notes += _schedule(run, step, total)
    if step and total == step:
        notes.append(f"all {step} steps are made: it only evaluates, where it was asked to")
    with store.transaction():
        again = store.run(run_id)
        if again.ended == run.ended:
            _check_files(again)
            return Resumed(
                queue.resume(store, run, folder, total, surroundings.client()), step, notes
            )
    # Another call resumed it meanwhile.
    return resume_run(store, run_id, steps, fresh_optimizer=fresh_optimizer)


def _total(run: Run, steps: int | None) -> int | None:
    """The steps that it is to have; None until the worker has counted those of epochs."""
    run_id = run.id
    if run.algorithm == "eval":
        fix = "evaluate starts another; train(resume=...) takes a training run"
        raise FlashError("invalid_argument", f"{run_id} is an evaluation", fix=fix)
    if run.ended is None:
        if steps in (None, run.steps):
            return run.steps
        what = f"{run_id} is {run.state} and goes on to {run.steps} steps"
        fix = "repeat the call once it has ended, or cancel it first"
        raise FlashError("not_ready", what, run_id=run_id, steps=steps, fix=fix)
    if steps is None and run.state == "succeeded":
        what = f"{run_id} has made all its {run.steps} steps"
        checkpoints = RunFolder(run.folder, retry_s=RETRY_S).checkpoints
        fresh = ""
        if not checkpoints.has_optimizer(checkpoints.newest_good() or 0):
            fresh = ", fresh_optimizer=true"
        fix = f"name more: train(resume={run_id!r}, steps={2 * (run.steps or run.step)}{fresh})"
        raise FlashError("invalid_argument", what, fix=fix)
    if steps is not None and steps < run.step:
        what = f"{run_id} has made {run.step} steps"
        fix = f"name more, or start another from one of checkpoints(run_id={run_id!r})"
        raise FlashError("invalid_argument", what, steps=steps, fix=fix)
    return run.steps if steps is None else steps


def _check_files(run: Run) -> None:
    """FlashError(unknown_checkpoint) if what the run was made from, or saved, was removed."""
    sources = [source["path"] for source in (run.dataset, run.init_adapter, *run.mixture) if source]
    for path in (run.environment_path, *sources):
        if path and not Path(path).exists():
            what = f"{run.id} cannot go on: {path} was removed"
            raise FlashError("unknown_checkpoint", what, fix="start another run with train")
    # Retention keeps the row of an old run, so that its numbers can still be read.
    if run.files_removed is not None:
        what = f"the files of {run.id} were removed to make room"
        raise FlashError("unknown_checkpoint", what, fix="start another run with train")


def _schedule(run: Run, step: int, total: int | None) -> list[str]:
    """What another number of steps does to the learning rate, if it does anything."""
    if not step or total in (None, step) or run.steps in (None, total):
        return []
    spec = run.training
    before = spec.learning_rate * rate_factor(spec, step - 1, run.steps)
    after = spec.learning_rate * rate_factor(spec, step, total)
    if before == after:
        return []
    lengths = f"is of {total} steps now, and was of {run.steps}"
    return [
        f"the {spec.lr_schedule} schedule (warmup={spec.warmup:g}) {lengths}: the learning rate "
        f"goes from {before:.3g} in step {step} to {after:.3g} in step {step + 1}"
    ]


def _loss(folder: RunFolder, step: int, *, fresh_optimizer: bool) -> list[str]:
    """Notes on what is lost. FlashError if the optimizer's state is, unless that was allowed."""
    if not step:
        return ["it saved no checkpoint that can be read: it starts over"]
    if folder.checkpoints.has_optimizer(step):
        return []
    if fresh_optimizer:
        return [f"checkpoint {step} has no {OPTIMIZER}: it goes on with a fresh optimizer"]
    what = (
        f"the optimizer's state of checkpoint {step} was deleted: only the newest checkpoint keeps "
        "it, for as many days after the end as settings.toml says"
    )
    fix = "pass fresh_optimizer=true to go on without it; its first steps may be rougher"
    raise FlashError("invalid_argument", what, step=step, fix=fix)
