"""A few real groups from the model before any training: what GRPO would have to learn from, and how
long it would take.

The groups are an evaluation of the train split, sampled as training would: the same queue, engine
and scheduler. Asked for again with the same values, the same evaluation answers."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import anyio.to_thread
from pydantic import Field

from flash_mcp.judgement import attempts as evaluations
from flash_mcp.judgement import statistics
from flash_mcp.judgement.attempts import Try
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.fitting import shorten
from flash_mcp.tools.shared.frame import Part
from flash_mcp.tools.shared.scores import Scores, scores
from flash_mcp.tools.shared.waiting import ended, submit

GROUPS = 8
GROUP_SIZE = 8
SAMPLE_LIMIT_S = 40.0
"""Of a call that samples; the sample itself goes on."""
TRAINING_SHARE = 1.0
"""Seconds of training for one of generation, where no run of the model tells: 1.05 was measured for
SmolLM2-135M on a CPU. It may well be half or twice that elsewhere.
"""


class Finding(Part):
    """What speaks against starting."""

    name: Literal["environment_errors", "uniform_groups", "truncation", "solved"] = Field(
        description="What it is called in the playbook."
    )
    severity: Literal["warning", "hopeless"] = Field(
        description="hopeless: nothing can be learnt from such groups."
    )
    evidence: str
    remedy: str


class Sample(Part):
    """Groups that the untrained model generated."""

    run_id: str = Field(
        description="The evaluation that made them; rollouts shows the transcripts."
    )
    state: str
    done: int = Field(description="Rollouts made so far.")
    of: int = Field(description="Rollouts wanted.")
    groups: int = Field(description="Tasks of the train split, drawn at random.")
    group_size: int = Field(description="Rollouts of each.")
    scores: Scores | None = Field(default=None, description="Once all are made.")
    outlook: Literal["good", "doubtful", "hopeless"] | None = Field(
        default=None, description="Whether there is something to learn from."
    )
    findings: list[Finding] | None = Field(default=None, description="The gravest first.")
    error: str | None = None


class RunTime(Part):
    """How long a run will take, and what it costs; low and high are the error band."""

    seconds: int
    low_s: int
    high_s: int
    basis: str = Field(description="What it was computed from.")
    cost: float | None = Field(default=None, description="At price_per_hour, in its currency.")
    cost_low: float | None = None
    cost_high: float | None = None


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
    """GROUPS groups of the train split's `tasks`, waited for until `deadline` (of time.monotonic)."""
    chosen = sorted(random.Random(given.get("seed") or 0).sample(range(tasks), min(GROUPS, tasks)))
    resolved = resolve.resolve_eval(
        subject, environment, split="train", tasks=chosen, attempts=group_size, given=given
    )
    asked = json.dumps(
        [environment.digest, subject.adapter, resolved.spec.model_dump()], sort_keys=True
    )
    digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
    number = 1
    run, created, trouble = await submit(
        store, resolved, environment, subject, f"preflight-{digest}-1"
    )
    while not created and run.state in ("failed", "cancelled"):  # that one has no answer
        number += 1
        run, created, trouble = await submit(
            store, resolved, environment, subject, f"preflight-{digest}-{number}"
        )
    if trouble is None:
        run = await ended(store, run.id, deadline)
    return await anyio.to_thread.run_sync(_describe, store, run, trouble)


def _describe(store: Store, run: Run, trouble: FlashError | None) -> Sample:
    spec, error = (
        run.spec,
        run.error if run.state == "failed" else trouble and trouble.to_dict(),
    )
    found = scores(store, run) if run.ended else None
    findings = judge_groups(evaluations.tries(store, run.id, spec["step"])) if found else []
    outlook = "hopeless" if any(each.severity == "hopeless" for each in findings) else "doubtful"
    return Sample(
        run_id=run.id,
        state=run.state,
        done=run.step,
        of=spec["steps"],
        groups=len(spec["tasks"]),
        group_size=spec["attempts"],
        scores=found,
        outlook=None if found is None else outlook if findings else "good",
        findings=findings or None,
        error=shorten(f"[{error['code']}] {error['what']}", 1000) if error else None,
    )


def judge_groups(attempts: Sequence[Try]) -> list[Finding]:
    """What a sample of groups says against training on them; the gravest first."""
    tasks = evaluations.by_task(attempts)
    valid = [attempt for group in tasks.values() for attempt in group]
    found: list[Finding] = []
    if errors := len(attempts) - len(valid):
        share = errors / len(attempts)
        severity = "hopeless" if share > 0.5 else "warning"
        evidence = f"{errors} of {len(attempts)} rollouts failed in environment code"
        remedy = "read them with rollouts, mend environment.py, env_test, env_push"
        found.append(
            Finding(name="environment_errors", severity=severity, evidence=evidence, remedy=remedy)
        )
    if valid:
        found += [
            finding for check in (_uniform, _truncated, _solved) if (finding := check(tasks, valid))
        ]
    return sorted(found, key=lambda finding: finding.severity != "hopeless")


def _uniform(tasks: dict[str, list[Try]], valid: list[Try]) -> Finding | None:
    """Groups in which all rollouts score the same have no advantage: GRPO's gradient is zero."""
    share = evaluations.uniform_share(tasks)
    if share is None or share < 0.5:
        return None
    success, reward = fmean(each.success for each in valid), fmean(each.reward for each in valid)
    same = round(share * len(tasks))
    evidence = (
        f"in {same} of {len(tasks)} groups all rollouts scored the same (mean reward {reward:.2f})"
    )
    if success > 0.8:
        remedy = "the tasks are solved: take harder ones, or leave it"
    elif reward == 0:
        remedy = (
            "nothing is ever paid: give partial progress a reward, take easier tasks, show the format in the prompt, "
            "or start with algorithm='sft' on gold answers and go on from its adapter"
        )
    else:
        remedy = "make partial progress pay in finer steps, take tasks of mixed difficulty, or raise group_size"
    return Finding(
        name="uniform_groups",
        severity="hopeless" if share == 1 else "warning",
        evidence=evidence,
        remedy=remedy,
    )


def _truncated(tasks: dict[str, list[Try]], valid: list[Try]) -> Finding | None:
    share = fmean(each.truncated for each in valid)
    if share < 0.2:
        return None
    return Finding(
        name="truncation",
        severity="hopeless" if share > 0.9 else "warning",
        evidence=f"{share:.0%} of the rollouts were cut off at max_tokens or max_length",
        remedy="raise max_tokens (and max_length), ask for shorter answers in the prompt, or set stop_sequences",
    )


def _solved(tasks: dict[str, list[Try]], valid: list[Try]) -> Finding | None:
    success = fmean(each.success for each in valid)
    if success < 0.9:
        return None
    return Finding(
        name="solved",
        severity="warning",
        evidence=f"{success:.0%} of the rollouts succeed already, before any training",
        remedy="take harder tasks: there is little left to learn from these",
    )


def after_sample(sampled: Sample) -> str:
    """What to do next with a sample."""
    if sampled.state in ("failed", "cancelled"):
        return f"status(run_id={sampled.run_id!r}) says why the sample {sampled.state}; the same call tries again"
    if sampled.outlook is None:
        waits = f"status(run_id={sampled.run_id!r}, wait_s=40) waits for it"
        now = "is queued behind other runs" if sampled.state == "queued" else "is under way"
        return f"the sample {now}: {waits}; then the same call again reads it"
    if sampled.outlook == "hopeless":
        return f"do not start yet: {sampled.findings[0].remedy if sampled.findings else 'see findings'}"
    look = f"rollouts(run_id={sampled.run_id!r}) shows what it wrote"
    return f"{look}; train starts the run"


# -- how long it will take -------------------------------------------------------------------------


def run_time(
    store: Store, spec: RunSpec, found: Sample, *, eval_tasks: int, price_per_hour: float | None
) -> RunTime | None:
    """The time of a GRPO run, from the sample's tokens and speed; None where the sample has no
    speed.

    The band holds the scatter of the tokens over tasks, and what is not known of the optimizer's
    share."""
    run = store.run(found.run_id)
    attempts = evaluations.tries(store, run.id, run.spec["step"])
    groups = [
        fmean(each.tokens for each in group) for group in evaluations.by_task(attempts).values()
    ]
    speed = found.scores.tokens_per_s if found.scores else None
    if not speed or not groups or not fmean(groups) or spec.algorithm != "grpo":
        return None
    tokens = fmean(groups)
    scatter = statistics.Z95 * math.sqrt(statistics.spread(groups) / len(groups)) / tokens
    share, error, told = _training_share(store, spec)
    rollouts = spec.steps_of(rows=0) * spec.conversations_per_step
    held_out = _evaluations(spec) * min(spec.eval_examples, eval_tasks)
    generate_s, evaluate_s = rollouts * tokens / speed, held_out * tokens / speed
    seconds = generate_s * (1 + share) + evaluate_s
    low = (generate_s * (1 + share / error) + evaluate_s) * max(1 - scatter, 0.1)
    high = (generate_s * (1 + share * error) + evaluate_s) * (1 + scatter)
    evals = f" and {held_out} held-out attempts" if held_out else ""
    return priced(
        RunTime(
            seconds=round(seconds),
            low_s=round(low),
            high_s=round(high),
            basis=f"{rollouts} rollouts{evals} of {tokens:.0f} tokens at {speed:.0f} tokens/s, and {told}",
        ),
        price_per_hour,
    )


def priced(time: RunTime, price_per_hour: float | None) -> RunTime:
    """With what it costs, where a price is given."""
    if price_per_hour is None:
        return time
    cost, low, high = (
        round(seconds / 3600 * price_per_hour, 4)
        for seconds in (time.seconds, time.low_s, time.high_s)
    )
    return time.model_copy(update={"cost": cost, "cost_low": low, "cost_high": high})


def _training_share(store: Store, spec: RunSpec) -> tuple[float, float, str]:
    """(seconds of training for one of generation, factor that it may be wrong by, where that is
    from)
    """
    for run in store.runs(limit=50):
        if (run.model, run.algorithm) != (spec.model, spec.algorithm):
            continue
        train, rollout = (
            store.series(run.id, name, points=1) for name in ("time/train_s", "time/rollout_s")
        )
        if train and rollout and rollout[0][1]:
            share = train[0][1] / rollout[0][1]
            return share, 1.4, f"{share:.2g} s of training for each of generation as in {run.id}"
    return (
        TRAINING_SHARE,
        2.0,
        f"a guess of {TRAINING_SHARE:g} s of training for each of generation",
    )


def _evaluations(spec: RunSpec) -> int:
    """How many evaluations a grpo run makes."""
    steps = spec.steps_of(rows=0)  # those of a grpo run do not depend on its rows
    count = 0
    if spec.eval_every:
        count += steps // spec.eval_every
    if spec.eval_before:
        count += 1
    if spec.eval_after and not (spec.eval_every and steps % spec.eval_every == 0):
        count += 1
    return count
