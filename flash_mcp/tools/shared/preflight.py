"""A few groups of rollouts before any training: what GRPO can learn from, and how long it takes.

The groups are an evaluation of the train split, sampled as in training: with the same queue, engine
and scheduler. A second call with the same values finds the same evaluation."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from anyio.to_thread import run_sync

from flash_mcp.judgement import attempts, health, statistics
from flash_mcp.judgement.health import Flag
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.parts import Part, Rounded
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.fitting import error_text
from flash_mcp.tools.shared.scores import Scores, scores_of
from flash_mcp.tools.shared.waiting import ended, submit

GROUPS = 8
GROUP_SIZE = 8
SAMPLE_LIMIT_S = 40.0
"""How long a call waits for its sample; the sample itself goes on."""
TRAINING_SHARE = 1.0
"""Seconds of training for one of generation, until a run of the model has measured it: it was 1.05
for SmolLM2-135M on a CPU, and may be half or twice that elsewhere.
"""


class Sample(Part):
    """Groups that the untrained model generated."""

    run_id: str
    """The evaluation that made them; rollouts shows the transcripts."""
    state: str
    done: int
    """Rollouts made so far."""
    of: int
    """Rollouts wanted."""
    groups: int
    """Tasks of the train split, drawn at random."""
    group_size: int
    """Rollouts of each."""
    made_before: bool | None = None
    """An earlier call made it, on the same files with the same values: another seed draws anew."""
    scores: Scores | None = None
    """Once all are made."""
    outlook: Literal["good", "doubtful", "hopeless"] | None = None
    """Whether there is something to learn from."""
    findings: list[Flag] | None = None
    """The gravest first."""
    error: str | None = None


class RunTime(Part):
    """How long a run will take, and what it costs; low and high are the error band."""

    seconds: int
    low_s: int
    high_s: int
    basis: str
    """What it was computed from."""
    cost: Rounded | None = None
    """At price_per_hour, in its currency."""
    cost_low: Rounded | None = None
    cost_high: Rounded | None = None


async def sample_groups(
    store: Store,
    environment: EnvironmentVersion,
    subject: Subject,
    *,
    tasks: int,
    group_size: int,
    given: Json,
    deadline: float,
) -> Sample:
    """GROUPS groups of the train split's `tasks`; waits until `deadline` (of time.monotonic)."""
    chosen = sorted(random.Random(given.get("seed") or 0).sample(range(tasks), min(GROUPS, tasks)))
    resolved = resolve.resolve_eval(
        subject, environment, split="train", tasks=chosen, attempts=group_size, given=given
    )
    run, created, trouble = await submit(store, resolved, environment, subject, any_name=True)
    if trouble is None:
        run = await ended(store, run.id, deadline)
    sampled = await run_sync(_describe, store, run, trouble)
    sampled.made_before = None if created else True
    return sampled


def _describe(store: Store, run: Run, trouble: FlashError | None) -> Sample:
    spec = run.evaluation
    sample = Sample(
        run_id=run.id,
        state=run.state,
        done=run.step,
        of=spec.steps,
        groups=len(spec.tasks),
        group_size=spec.attempts,
    )
    error = trouble.to_dict() if trouble else None
    if run.state == "failed":
        error = run.error
    sample.error = error_text(error, 1000)
    evaluations = store.evals(run.id) if run.ended else []
    if evaluations:
        tries = store.tries(run.id, evaluations[-1].step)
        findings = health.sample_flags(tries, evaluations[-1].summary)
        sample.scores = scores_of(evaluations[-1], tries)
        sample.findings = findings or None
        sample.outlook = "doubtful" if findings else "good"
        if any(flag.severity == "problem" for flag in findings):
            sample.outlook = "hopeless"
    return sample


# -- how long it will take -------------------------------------------------------------------------


def run_time(
    store: Store, spec: RunSpec, found: Sample, *, eval_tasks: int, price_per_hour: float | None
) -> RunTime | None:
    """The time of a GRPO run, from the sample's tokens and speed; None if the sample has no speed.

    The band covers the scatter of the tokens over tasks, and the uncertainty of the optimizer's
    share."""
    speed = found.scores.tokens_per_s if found.scores else None
    if not speed or spec.algorithm != "grpo":
        return None
    run = store.run(found.run_id)
    tasks = attempts.by_task(store.tries(run.id, run.evaluation.step))
    groups = [fmean(each.tokens for each in group) for group in tasks.values()]
    tokens = fmean(groups) if groups else 0.0
    if not tokens:
        return None
    scatter = statistics.Z95 * math.sqrt(statistics.spread(groups) / len(groups)) / tokens
    share = _training_share(store, spec)
    rollouts = spec.steps_of(rows=0) * spec.conversations_per_step
    held_out = _evaluations(spec) * min(spec.eval_examples, eval_tasks)
    generate_s = rollouts * tokens / speed
    evaluate_s = held_out * tokens / speed
    least_s = generate_s * (1 + share.value / share.factor) + evaluate_s
    most_s = generate_s * (1 + share.value * share.factor) + evaluate_s
    evals = f" and {held_out} held-out attempts" if held_out else ""
    work = f"{rollouts} rollouts{evals} of {tokens:.0f} tokens at {speed:.0f} tokens/s"
    time = RunTime(
        seconds=round(generate_s * (1 + share.value) + evaluate_s),
        low_s=round(least_s * max(1 - scatter, 0.1)),
        high_s=round(most_s * (1 + scatter)),
        basis=f"{work}, and {share.basis}",
    )
    if price_per_hour is not None:
        time.cost = time.seconds / 3600 * price_per_hour
        time.cost_low = time.low_s / 3600 * price_per_hour
        time.cost_high = time.high_s / 3600 * price_per_hour
    return time


@dataclass(frozen=True)
class TrainingShare:
    """Seconds of training for each of generation; it may be wrong by `factor`."""

    value: float
    factor: float
    basis: str


def _training_share(store: Store, spec: RunSpec) -> TrainingShare:
    for run in store.runs(limit=50):
        if (run.model, run.algorithm) != (spec.model, spec.algorithm):
            continue
        train = store.series(run.id, "time/train_s", points=1)
        rollout = store.series(run.id, "time/rollout_s", points=1)
        if train and rollout and rollout[0][1]:
            share = train[0][1] / rollout[0][1]
            told = f"{share:.2g} s of training for each of generation as in {run.id}"
            return TrainingShare(share, 1.4, told)
    told = f"a guess of {TRAINING_SHARE:g} s of training for each of generation"
    return TrainingShare(TRAINING_SHARE, 2.0, told)


def _evaluations(spec: RunSpec) -> int:
    """How often a run with this spec evaluates."""
    steps = spec.steps_of(rows=0)  # a grpo run's steps do not depend on its rows
    every = spec.eval_every
    is_due_at_end = bool(every) and steps % every == 0
    count = steps // every if every else 0
    if spec.eval_before:
        count += 1
    if spec.eval_after and not is_due_at_end:
        count += 1
    return count
