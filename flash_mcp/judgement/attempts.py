"""Evaluations in the control plane: what can be evaluated, how one is asked for, and what its
attempts say.

An evaluation is a run of `algorithm` eval in the same queue as training. Its result is filed as
training's own evaluations are, so that whoever reads one reads the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flash_mcp.judgement import statistics
from flash_mcp.protocol import base_models
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Evaluation, Rollout, Run
from flash_mcp.state.store import Store

DEFAULT_MAX_LENGTH = 4096


# -- what is evaluated -----------------------------------------------------------------------------


# -- how it is asked for ---------------------------------------------------------------------------


# -- what came out ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Try:
    """One attempt at a task, without its transcript. `error`: code of what failed in environment
    code, else None.
    """

    index: int
    task_id: str
    success: bool
    reward: float
    error: str | None
    truncated: bool
    tokens: int
    turns: int


def tries(store: Store, run_id: str, step: int) -> list[Try]:
    """Every attempt of a run's evaluation at `step`, in order."""
    fields = ("task_id", "error.code", "truncated", "completion_tokens", "turns")
    columns = ", ".join(f"json_extract(body, '$.{field}') AS '{field}'" for field in fields)
    sql = f"""SELECT position, success, reward, {columns} FROM rollouts
              WHERE run_id = ? AND split = 'eval' AND step = ? ORDER BY position"""
    return [
        Try(
            index=row["position"],
            task_id=str(row["task_id"] if row["task_id"] is not None else row["position"]),
            success=bool(row["success"]),
            reward=row["reward"],
            error=row["error.code"],
            truncated=bool(row["truncated"]),
            tokens=int(row["completion_tokens"] or 0),
            turns=int(row["turns"] or 0),
        )
        for row in store.query(sql, [run_id, step])
    ]


def transcript(store: Store, run_id: str, step: int, index: int) -> Rollout:
    """One attempt with its messages."""
    sql = "SELECT body FROM rollouts WHERE run_id = ? AND split = 'eval' AND step = ? AND position = ?"
    return Rollout.of(store.query(sql, [run_id, step, index])[0]["body"])


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


def means(tasks: Mapping[str, Sequence[Try]], metric: str) -> dict[str, float]:
    """{task id: mean of success (as 0 and 1) or reward over its attempts}"""
    return {
        task: fmean(float(getattr(each, metric)) for each in attempts)
        for task, attempts in tasks.items()
    }


def pass_at(tasks: Mapping[str, Sequence[Try]]) -> dict[str, float]:
    """{"1": pass@1, "2": ..., up to the most attempts of a task}, each over the tasks with as many
    attempts.
    """
    most = max(map(len, tasks.values()), default=0)
    ks = [2**power for power in range(most.bit_length()) if 2**power <= most]
    found: dict[str, float] = {}
    for k in sorted({*ks, most}) if most > 1 else []:
        enough = [attempts for attempts in tasks.values() if len(attempts) >= k]
        chances = [
            statistics.pass_at_k(len(each), sum(attempt.success for attempt in each), k)
            for each in enough
        ]
        found[str(k)] = fmean(chances)
    return found


def uniform_share(tasks: Mapping[str, Sequence[Try]]) -> float | None:
    """Share of the tasks attempted more than once whose attempts all got the same reward; None
    where there are none.
    """
    groups = [
        {attempt.reward for attempt in attempts} for attempts in tasks.values() if len(attempts) > 1
    ]
    return fmean(len(rewards) == 1 for rewards in groups) if groups else None


def evaluation_at(store: Store, run: Run, step: int | None) -> Evaluation:
    """The run's evaluation at `step`, or its newest. FlashError where it has none (yet) that can be
    judged.
    """
    rows = store.evals(run.id)
    found = [row for row in rows if step is None or row.step == step]
    if found and found[-1].summary["n"]:
        return found[-1]
    run_id = run.id
    if found:
        fix = f"rollouts(run_id={run_id!r}, split='eval', step={found[-1].step}) shows why; mend the environment"
        raise FlashError(
            "environment_error", f"every attempt of {run_id} failed in environment code", fix=fix
        )
    if run.ended is None:
        fix = f"status(run_id={run_id!r}, wait_s=40) waits for it"
        raise FlashError(
            "not_ready",
            f"{run_id} has not come to that evaluation yet",
            run_id=run_id,
            step=step,
            fix=fix,
        )
    if run.algorithm == "eval":
        fix = f"status(run_id={run_id!r}) says why; call evaluate again"
        raise FlashError(
            "not_ready", f"the evaluation {run_id} {run.state} without a result", fix=fix
        )
    made = f"it has those of the steps {', '.join(str(row.step) for row in rows)}; " if rows else ""
    fix = f"{made}evaluate(model='{run_id}{'' if step is None else f'@{step}'}') makes one"
    raise FlashError(
        "invalid_argument", f"{run_id} has no such evaluation", run_id=run_id, step=step, fix=fix
    )


def settings(run: Run) -> dict[str, Any]:
    """What decides an evaluation's outcome beside model and tasks. Those within a training run are
    greedy.
    """
    spec, is_eval = run.spec, run.algorithm == "eval"
    temperature = spec["temperature"] if is_eval else 0.0
    return {
        "attempts": spec["attempts"] if is_eval else 1,
        "temperature": temperature,
        "top_p": spec["top_p"] if temperature else 1.0,  # no nucleus matters to greedy decoding
        "max_tokens": spec["max_tokens"],
        "max_length": spec["max_length"] or _default_length(run.model),
        "stop_sequences": spec["stop_sequences"],
        "thinking": spec["thinking"],
        "environment_args": spec["environment_args"],
    }


def _default_length(model: str) -> int:
    """What the worker takes where a training run leaves max_length open."""
    try:
        return min(base_models.find(model).context or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    except FlashError:  # the folder of a local model is gone
        return DEFAULT_MAX_LENGTH


def differing(base: Run, other: Run) -> list[str]:
    """Names of the settings that differ and change what is measured: attempts change only the
    noise.
    """
    ours, theirs = settings(base), settings(other)
    return [name for name in ours if name != "attempts" and ours[name] != theirs[name]]


def weights(run: Run, step: int) -> tuple[str, str | None, int | None]:
    """The model that an evaluation is of: base model, and run and step of the adapter on it."""
    if run.algorithm != "eval" and step:
        return run.model, run.id, step
    adapter = run.init_adapter or {}
    return run.model, adapter.get("run_id"), adapter.get("step")
