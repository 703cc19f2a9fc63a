"""How long a run will take, before it starts: from a sample, else from what this machine ran
before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from flash_mcp.judgement import attempts, statistics
from flash_mcp.protocol.parts import Part, Rounded
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state import costs
from flash_mcp.state.store import Store

TRAINING_SHARE = 1.0
"""Seconds of training for one of generation, until a run of the model has measured it: it was 1.05
for SmolLM2-135M on a CPU, and may be half or twice that elsewhere.
"""
LOOKED_AT = 50
"""Newest runs among which an earlier one of the model is looked for."""
SAME_FACTOR = 1.4
OTHER_FACTOR = 3.0
"""An estimate from an earlier run may be wrong by these factors: in the same environment, and in
another one. Both are guesses.
"""


class RunTime(Part):
    """How long a run will take, and what it costs; low and high are the error band."""

    seconds: int
    low_s: int
    high_s: int
    basis: str
    """What it was computed from."""
    cost: Rounded | None = None
    """At price_per_hour, else at the operator's price, in its currency."""
    cost_low: Rounded | None = None
    cost_high: Rounded | None = None

    def priced(self, store: Store, price_per_hour: float | None) -> RunTime:
        """The same with its cost, if a price is known."""
        price = price_per_hour
        if price is None:
            price = costs.price_of_hour(store.base).price_per_hour
        if price:
            self.cost = self.seconds / 3600 * price
            self.cost_low = self.low_s / 3600 * price
            self.cost_high = self.high_s / 3600 * price
        return self


@dataclass(frozen=True)
class Work:
    """What a run computes."""

    spec: RunSpec
    environment: str
    steps: int
    held_out: int
    """Held-out attempts of all its evaluations."""

    @property
    def rollouts(self) -> int:
        return self.steps * self.spec.conversations_per_step


def work_of(spec: RunSpec, environment: str, steps: int, eval_tasks: int) -> Work:
    """`eval_tasks` is the size of the eval split."""
    held_out = _evaluations(spec, steps) * min(spec.eval_examples, eval_tasks)
    return Work(spec, environment, steps, held_out)


def expected_time(store: Store, work: Work) -> RunTime | None:
    """From the newest run of the same model and algorithm, in this environment if there is one;
    else, with grpo, from the newest evaluation of the model. None if this machine ran neither.
    """
    ended = [run for run in store.runs(limit=LOOKED_AT) if run.model == work.spec.model]
    ended.sort(key=lambda run: run.environment != work.environment)
    for run in ended:
        if run.algorithm == work.spec.algorithm and (found := _as_before(store, work, run)):
            return found
    for run in ended:
        if run.algorithm == "eval" and (found := time_by_evaluation(store, work, run)):
            return found
    return None


def _as_before(store: Store, work: Work, run: Run) -> RunTime | None:
    """From the seconds of an earlier run's steps and evaluations; None if it took no step."""
    points = store.series(run.id, "time/step_s", points=1)
    if not points:
        return None
    step_s = points[0][1] * work.spec.conversations_per_step / run.training.conversations_per_step
    seconds = step_s * work.steps
    basis = f"{work.steps} steps of {step_s:.2g} s as in {run.id}"
    attempt_s = _attempt_s(store, run)
    if work.held_out and attempt_s is None:
        basis += ", without evaluations"
    elif work.held_out:
        seconds += work.held_out * (attempt_s or 0.0)
        basis += f" and {work.held_out} held-out attempts"
    return _banded(seconds, basis, work, run)


def _attempt_s(store: Store, run: Run) -> float | None:
    """Seconds for each attempt of the run's evaluations."""
    summaries = [each.summary for each in store.evals(run.id)]
    measured = [each for each in summaries if each.get("seconds") and each.get("n")]
    if not measured:
        return None
    return sum(each["seconds"] for each in measured) / sum(each["n"] for each in measured)


def _banded(seconds: float, basis: str, work: Work, run: Run) -> RunTime:
    factor = SAME_FACTOR
    if run.environment != work.environment:
        factor = OTHER_FACTOR
        basis += f", in another environment ({run.environment})"
    return RunTime(
        seconds=round(seconds),
        low_s=round(seconds / factor),
        high_s=round(seconds * factor),
        basis=basis,
    )


def time_by_evaluation(store: Store, work: Work, run: Run) -> RunTime | None:
    """The time of a GRPO run, from the tokens and the speed of an evaluation of its model; None if
    that has no speed.

    The band covers the scatter of the tokens over tasks, and the uncertainty of the optimizer's
    share."""
    rows = store.evals(run.id)
    if not rows or not rows[-1].summary.get("tokens_per_s") or work.spec.algorithm != "grpo":
        return None
    speed = float(round(rows[-1].summary["tokens_per_s"]))
    tasks = attempts.by_task(store.tries(run.id, run.evaluation.step))
    groups = [fmean(each.tokens for each in group) for group in tasks.values()]
    tokens = fmean(groups) if groups else 0.0
    if not tokens or not speed:
        return None
    scatter = statistics.Z95 * math.sqrt(statistics.spread(groups) / len(groups)) / tokens
    share = _training_share(store, work.spec)
    generate_s = work.rollouts * tokens / speed
    evaluate_s = work.held_out * tokens / speed
    least_s = generate_s * (1 + share.value / share.factor) + evaluate_s
    most_s = generate_s * (1 + share.value * share.factor) + evaluate_s
    evals = f" and {work.held_out} held-out attempts" if work.held_out else ""
    amount = f"{work.rollouts} rollouts{evals} of {tokens:.0f} tokens at {speed:.0f} tokens/s"
    basis = f"{amount} as in {run.id}, and {share.basis}"
    time = RunTime(
        seconds=round(generate_s * (1 + share.value) + evaluate_s),
        low_s=round(least_s * max(1 - scatter, 0.1)),
        high_s=round(most_s * (1 + scatter)),
        basis=basis,
    )
    if run.environment != work.environment:
        return _banded(time.seconds, basis, work, run)
    return time


@dataclass(frozen=True)
class TrainingShare:
    """Seconds of training for each of generation; it may be wrong by `factor`."""

    value: float
    factor: float
    basis: str


def _training_share(store: Store, spec: RunSpec) -> TrainingShare:
    for run in store.runs(limit=LOOKED_AT):
        if (run.model, run.algorithm) != (spec.model, spec.algorithm):
            continue
        train = store.series(run.id, "time/train_s", points=1)
        rollout = store.series(run.id, "time/rollout_s", points=1)
        if train and rollout and rollout[0][1]:
            share = train[0][1] / rollout[0][1]
            told = f"{share:.2g} s of training for each of generation as in {run.id}"
            return TrainingShare(share, SAME_FACTOR, told)
    told = f"a guess of {TRAINING_SHARE:g} s of training for each of generation"
    return TrainingShare(TRAINING_SHARE, 2.0, told)


def _evaluations(spec: RunSpec, steps: int) -> int:
    """How often a run of so many steps evaluates."""
    every = spec.eval_every
    is_due_at_end = bool(every) and steps % every == 0
    count = steps // every if every else 0
    if spec.eval_before:
        count += 1
    if spec.eval_after and not is_due_at_end:
        count += 1
    return count
