"""What the attempts of an evaluation come to, and what two evaluations have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from statistics import fmean
from typing import Any, Literal

from flash_mcp.judgement import statistics
from flash_mcp.protocol import base_models
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Evaluation, Run, Try
from flash_mcp.protocol.spec import EvalSpec

DEFAULT_MAX_LENGTH = 4096
Metric = Literal["success", "reward"]
Tasks = Mapping[str, Sequence[Try]]
"""Attempts by task id."""


def by_task(attempts: Sequence[Try]) -> dict[str, list[Try]]:
    """{task id: its attempts that the environment did not fail}, in order; none without any."""
    results: dict[str, list[Try]] = {}
    for attempt in attempts:
        if attempt.error is None:
            results.setdefault(attempt.task_id, []).append(attempt)
    return results


def mean(attempts: Iterable[Try], field: str) -> float:
    return fmean(map(attrgetter(field), attempts))


def means(tasks: Tasks, metric: Metric) -> dict[str, float]:
    """{task id: mean of success (as 0 and 1) or reward over its attempts}"""
    return {task: mean(attempts, metric) for task, attempts in tasks.items()}


def pass_at(tasks: Tasks) -> dict[str, float]:
    """{"1": pass@1, "2": ...} up to the most attempts, each over the tasks with so many."""
    most = max(map(len, tasks.values()), default=0)
    if most < 2:
        return {}
    powers = [2**power for power in range(most.bit_length())]
    shares: dict[str, float] = {}
    for k in sorted({*powers, most}):
        estimates: list[float] = []
        for attempts in tasks.values():
            won = sum(attempt.success for attempt in attempts)
            if len(attempts) >= k:
                estimates.append(statistics.pass_at_k(len(attempts), won, k))
        shares[str(k)] = fmean(estimates)
    return shares


def successes(tasks: Tasks) -> list[list[bool]]:
    """The outcomes that hang together: those of each kind of tasks, or of each task where there are
    too few kinds to tell how much kinds differ.
    """
    alone: list[list[bool]] = []
    kinds: dict[str, list[bool]] = {}
    for attempts in tasks.values():
        alone.append([attempt.success for attempt in attempts])
        kinds.setdefault(attempts[0].kind, []).extend(alone[-1])
    if len(kinds) < statistics.FEWEST_KINDS:
        return alone
    return [*kinds.values()]


def distinct(tasks: Tasks, metric: Metric) -> list[set[float]]:
    return [set(map(attrgetter(metric), attempts)) for attempts in tasks.values()]


def uniform_share(tasks: Tasks) -> float | None:
    """Share of tasks with several attempts whose rewards are all equal; None if there are none."""
    groups = {task: attempts for task, attempts in tasks.items() if len(attempts) > 1}
    rewards = distinct(groups, "reward")
    if rewards:
        return fmean(len(values) == 1 for values in rewards)
    return None


def first_checkpoint(run: Run) -> str:
    """How to come to a checkpoint of a run that has none."""
    if run.algorithm == "eval":
        model = run.evaluation.checkpoint or run.model
        return f"an evaluation saves none: name the model, {model!r}"
    if run.ended is None:
        every = f"one is saved every save_every={run.training.save_every} steps"
        return f"status(run_id={run.id!r}, until='news') waits for the first: {every}"
    if run.files_removed is not None:
        return "its files were removed: use another run"
    return f"it ended before it saved one: train(resume={run.id!r}) starts it over"


def unknown_checkpoint(run: Run, step: int | None, saved: Sequence[int]) -> FlashError:
    """The run has no checkpoint at `step`, or with None no good one; `saved` are its steps."""
    what = f"run {run.id} has no checkpoint"
    if step is not None:
        what += f" at step {step}"
    fix = f"use one of the steps {list(saved)}" if saved else first_checkpoint(run)
    return FlashError("unknown_checkpoint", what, run_id=run.id, step=step, fix=fix)


def evaluation_at(
    run: Run, evaluations: Sequence[Evaluation], step: int | None, checkpoints: Sequence[int]
) -> Evaluation:
    """The run's evaluation at `step`, or its newest. FlashError if it has none (yet) that can be
    judged. `checkpoints` are the steps that it has saved.
    """
    results = [row for row in evaluations if step is None or row.step == step]
    if results and results[-1].can_be_judged:
        return results[-1]
    run_id = run.id
    if results:
        shown = f"rollouts(run_id={run_id!r}, split='eval', step={results[-1].step})"
        what = f"every attempt of {run_id} failed in environment code"
        raise FlashError("environment_error", what, fix=f"{shown} shows why; fix the environment")
    if run.ended is None:
        what = f"{run_id} has not come to that evaluation yet"
        fix = f"status(run_id={run_id!r}, until='end') waits for it"
        raise FlashError("not_ready", what, run_id=run_id, step=step, fix=fix)
    if run.algorithm == "eval":
        what = f"the evaluation {run_id} {run.state} without a result"
        fix = f"status(run_id={run_id!r}) says why; call evaluate again"
        raise FlashError("not_ready", what, fix=fix)
    steps = ", ".join(str(row.step) for row in evaluations)
    fix = f"it has those of the steps {steps}; " if steps else ""
    if step == 0 or (checkpoints and (step is None or step in checkpoints)):
        model = run_id if step is None else f"{run_id}@{step}"
        fix += f"evaluate(model='{model}') makes one"
    elif checkpoints:
        fix += f"evaluate(model='{run_id}@{checkpoints[-1]}') measures its newest checkpoint"
    else:
        fix += f"evaluating it needs a checkpoint: {first_checkpoint(run)}"
    what = f"{run_id} has no such evaluation"
    raise FlashError("invalid_argument", what, run_id=run_id, step=step, fix=fix)


def settings(run: Run) -> dict[str, Any]:
    """What decides an evaluation's outcome but model and tasks. Those of training are greedy."""
    spec = run.spec
    temperature = 0.0
    tries = 1
    if isinstance(spec, EvalSpec):
        temperature = spec.temperature
        tries = spec.attempts
    length = spec.max_length or DEFAULT_MAX_LENGTH
    if not spec.max_length:  # then the worker takes what the model can, within the default
        with suppress(FlashError):  # the folder of a local model is gone
            length = min(base_models.find(run.model).context or length, length)
    return {
        "attempts": tries,
        "temperature": temperature,
        "top_p": spec.top_p if temperature else 1.0,  # greedy decoding has no nucleus
        "max_tokens": spec.max_tokens,
        "max_length": length,
        "stop_sequences": spec.stop_sequences,
        "thinking": spec.thinking,
        "system_prompt": getattr(spec, "system_prompt", None),
        "precision": run.precision or getattr(spec, "precision", None),
        "environment_args": spec.environment_args,
    }


def differing(base: Run, other: Run) -> list[str]:
    ours = settings(base)
    theirs = settings(other)
    names = [name for name in ours if name != "attempts" and ours[name] != theirs[name]]
    if not (ours["precision"] and theirs["precision"]):  # a run has none until it has begun
        return [name for name in names if name != "precision"]
    return names


def weights(run: Run, step: int) -> tuple[str, str | None, int | None]:
    """The model that an evaluation is of: base model, and run and step of the adapter on it."""
    if run.algorithm != "eval" and step:
        return run.model, run.id, step
    adapter = run.init_adapter or {}
    return run.model, adapter.get("run_id"), adapter.get("step")
