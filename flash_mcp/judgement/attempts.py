"""What the attempts of an evaluation come to, and what two evaluations have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from flash_mcp.judgement import statistics
from flash_mcp.protocol import base_models
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Evaluation, Rollout, Run, Try
from flash_mcp.protocol.spec import EvalSpec

DEFAULT_MAX_LENGTH = 4096
Tasks = Mapping[str, Sequence[Try]]
"""Attempts by task id."""


def prompt_length(row: Rollout) -> int:
    """Messages before the model's first turn; examples within the prompt are assistant messages
    too.
    """
    messages = row.messages
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turns = min(row.turns, len(answers))
    return answers[-turns] if turns else len(messages) - 1


def by_task(attempts: Sequence[Try]) -> dict[str, list[Try]]:
    """{task id: its attempts that the environment did not fail}, in order; tasks without any are
    left out.
    """
    found: dict[str, list[Try]] = {}
    for attempt in attempts:
        if attempt.error is None:
            found.setdefault(attempt.task_id, []).append(attempt)
    return found


def means(tasks: Tasks, metric: Literal["success", "reward"]) -> dict[str, float]:
    """{task id: mean of success (as 0 and 1) or reward over its attempts}"""
    return {
        task: fmean(float(getattr(each, metric)) for each in attempts)
        for task, attempts in tasks.items()
    }


def pass_at(tasks: Tasks) -> dict[str, float]:
    """{"1": pass@1, "2": ..., up to the most attempts of a task}, each over the tasks with as many
    attempts.
    """
    counts = [
        (len(attempts), sum(each.success for each in attempts)) for attempts in tasks.values()
    ]
    most = max((made for made, _ in counts), default=0)
    if most < 2:
        return {}
    powers = [2**power for power in range(most.bit_length())]
    return {
        str(k): fmean(statistics.pass_at_k(made, won, k) for made, won in counts if made >= k)
        for k in sorted({*powers, most})
    }


def uniform_share(tasks: Tasks) -> float | None:
    """Share of the tasks attempted more than once whose attempts all got the same reward; None
    if there are none.
    """
    groups = [attempts for attempts in tasks.values() if len(attempts) > 1]
    same = [len({each.reward for each in attempts}) == 1 for attempts in groups]
    return fmean(same) if same else None


def evaluation_at(run: Run, evaluations: Sequence[Evaluation], step: int | None) -> Evaluation:
    """The run's evaluation at `step`, or its newest. FlashError if it has none (yet) that can be
    judged.
    """
    found = [row for row in evaluations if step is None or row.step == step]
    if found and found[-1].summary["n"]:
        return found[-1]
    run_id = run.id
    if found:
        shown = f"rollouts(run_id={run_id!r}, split='eval', step={found[-1].step})"
        raise FlashError(
            "environment_error",
            f"every attempt of {run_id} failed in environment code",
            fix=f"{shown} shows why; fix the environment",
        )
    if run.ended is None:
        raise FlashError(
            "not_ready",
            f"{run_id} has not come to that evaluation yet",
            run_id=run_id,
            step=step,
            fix=f"status(run_id={run_id!r}, wait_s=40) waits for it",
        )
    if run.algorithm == "eval":
        raise FlashError(
            "not_ready",
            f"the evaluation {run_id} {run.state} without a result",
            fix=f"status(run_id={run_id!r}) says why; call evaluate again",
        )
    steps = ", ".join(str(row.step) for row in evaluations)
    made = f"it has those of the steps {steps}; " if steps else ""
    model = run_id if step is None else f"{run_id}@{step}"
    raise FlashError(
        "invalid_argument",
        f"{run_id} has no such evaluation",
        run_id=run_id,
        step=step,
        fix=f"{made}evaluate(model='{model}') makes one",
    )


def settings(run: Run) -> dict[str, Any]:
    """What decides an evaluation's outcome, apart from model and tasks. Evaluations within a
    training run are greedy.
    """
    spec = run.spec
    temperature = 0.0
    tries = 1
    if isinstance(spec, EvalSpec):
        temperature = spec.temperature
        tries = spec.attempts
    return {
        "attempts": tries,
        "temperature": temperature,
        "top_p": spec.top_p if temperature else 1.0,  # greedy decoding has no nucleus
        "max_tokens": spec.max_tokens,
        "max_length": spec.max_length or _default_length(run.model),
        "stop_sequences": spec.stop_sequences,
        "thinking": spec.thinking,
        "environment_args": spec.environment_args,
    }


def _default_length(model: str) -> int:
    """What the worker takes if a training run leaves max_length open."""
    try:
        return min(base_models.find(model).context or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    except FlashError:  # the folder of a local model is gone
        return DEFAULT_MAX_LENGTH


def differing(base: Run, other: Run) -> list[str]:
    """Names of the settings that differ and change what is measured: attempts change only the
    noise.
    """
    ours = settings(base)
    theirs = settings(other)
    return [name for name in ours if name != "attempts" and ours[name] != theirs[name]]


def weights(run: Run, step: int) -> tuple[str, str | None, int | None]:
    """The model that an evaluation is of: base model, and run and step of the adapter on it."""
    if run.algorithm != "eval" and step:
        return run.model, run.id, step
    adapter = run.init_adapter or {}
    return run.model, adapter.get("run_id"), adapter.get("step")
