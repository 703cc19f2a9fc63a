"""How long a run will take: from a sample, else from what this machine ran before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import psutil

from flash_mcp.judgement import attempts, statistics
from flash_mcp.protocol.base_models import find, parameters_in_name
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import percent, two_digits
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.protocol.spec import LOCAL_TARGET, RunSpec
from flash_mcp.state import costs
from flash_mcp.state.runs import LOOKED_AT
from flash_mcp.state.store import Store
from flash_mcp.supervisor.launch.devices import gpus, processor

TRAINING_SHARE = 1.0
"""Seconds of training for one of generation, until a run of the model has measured it: it was 1.05
for SmolLM2-135M on a CPU, and is not known elsewhere.
"""
REGRESSION_TASKS = 311
"""Those of the package, which are tried before and after."""
REGRESSION_SHARE = 0.1
"""Of the run's conversations: with more, fewer tasks are tried unless the caller says so."""
FEWEST_REGRESSION_TASKS = 120
"""They show 97 of 100 losses of half of what a model solves, if it solves a third. A run of sft
tries so many however small it is: it forgets most."""
USUALLY_SOLVED = 0.33
"""The share of these tasks that a small model solves, to say which loss will be seen."""
CORE_FLOPS, CARD_FLOPS = 5e10, 4e13
"""Operations of a training step in a second, where nothing has run yet: an order of magnitude.
Steps of SmolLM2-135M ran at 1.3e11 a core with AMX; one H100 at 0.5 to 1.5e14 is published."""
BUSY_LOAD = 1.5
"""Of a processor: one run by itself keeps the load at 1."""
SCATTERED = 3
"""So many earlier runs show how far their times scatter."""


class RunTime(ResultModel):
    """How long a run will take, and what it costs."""

    seconds: int
    low_s: int | None = None
    high_s: int | None = None
    basis: str
    cost: Rounded | None = None
    cost_low: Rounded | None = None
    cost_high: Rounded | None = None

    def priced(self, store: Store, spec: RunSpec, price_per_hour: float | None) -> RunTime:
        """The same with its cost, if a price is known: that of an hour of one GPU. It says if other
        work keeps this machine busy.
        """
        load, processors = psutil.getloadavg()[0], psutil.cpu_count() or 1
        is_told = "the machine is busy" in self.basis
        if spec.target == LOCAL_TARGET and load > BUSY_LOAD * processors and not is_told:
            busy = f"the machine is busy (load {load:.0f} on {processors} processors)"
            self.basis += f"; {busy}: perhaps {load / processors:.0f} times as long"
        price = price_per_hour
        if price is None:
            price = costs.price_of_hour(store.base, spec.target).price_per_hour
        price *= spec.gpus
        if price:
            self.cost = self.seconds / 3600 * price
        if price and self.low_s is not None and self.high_s is not None:
            self.cost_low = self.low_s / 3600 * price
            self.cost_high = self.high_s / 3600 * price
        return self

    def banded(self, low: float, high: float, why: str) -> RunTime:
        """The same with a band, of these shares of its seconds."""
        self.low_s = round(self.seconds * low)
        self.high_s = round(self.seconds * high)
        self.basis += f"; low and high: {why}"
        return self


@dataclass(frozen=True)
class Work:
    spec: RunSpec
    environment: str
    steps: int
    held_out: int
    """Held-out attempts of all its evaluations, and those at the regression split."""
    regression: str = ""
    """Why that is tried or not, in words; empty if the caller wants none."""
    regression_tasks: int = 0
    tokens: float = 0.0
    """Of all examples of a fine-tuning, about."""

    @property
    def rollouts(self) -> int:
        return self.steps * self.spec.conversations_per_step


def work_of(spec: RunSpec, environment: str, steps: int, eval_tasks: int) -> Work:
    """`eval_tasks` are those of one evaluation."""
    held_out = _evaluations(spec, steps) * eval_tasks
    work = Work(spec, environment, steps, held_out)
    if spec.regression == "off":
        return work
    conversations = work.rollouts + held_out
    tasks = REGRESSION_TASKS
    if spec.regression == "auto":
        tasks = min(tasks, int(REGRESSION_SHARE * conversations / 2))
        if spec.algorithm == "sft":
            tasks = max(tasks, FEWEST_REGRESSION_TASKS)
    if tasks < FEWEST_REGRESSION_TASKS:
        what = f"off: {FEWEST_REGRESSION_TASKS} short tasks before and after are "
        what += f"{2 * FEWEST_REGRESSION_TASKS} rollouts beside {conversations}"
        return replace(work, regression=f"{what}; regression='on' tries all")
    cost = f"{2 * tasks} rollouts beside {conversations}"
    if not spec.generates:
        cost = "for which an engine starts"
    text = f"on: {tasks} short tasks before and after, {cost}; "
    loss = statistics.visible_loss(tasks, USUALLY_SOLVED * tasks)
    text += f"of {percent(USUALLY_SOLVED)} that the model solves, a loss of {percent(loss)} is seen"
    return replace(work, held_out=held_out + 2 * tasks, regression=text, regression_tasks=tasks)


def expected_time(store: Store, work: Work) -> RunTime | None:
    """From the newest run of the same model, algorithm and target, in this environment if possible;
    else from an evaluation of the model, or a run of another model there; of a fine-tuning else
    from its size. None if nothing is known.
    """
    place = (work.spec.target, work.spec.gpus)
    recent = [run for run in store.runs(limit=LOOKED_AT) if (run.target, run.spec.gpus) == place]
    ended = [run for run in recent if run.model == work.spec.model]
    # Those of this environment first: their conversations are as long.
    ended.sort(key=lambda run: run.environment != work.environment)
    if result := _as_before(store, work, ended):
        return result
    for run in ended:
        if run.algorithm == "eval" and (result := time_by_evaluation(store, work, run)):
            return result
    return _by_size(store, work, recent) or _by_arithmetic(work)


def _by_size(store: Store, work: Work, others: Sequence[Run]) -> RunTime | None:
    """From a run of another model, as if time grew with the parameters that a token passes."""
    parameters = _passed_parameters(work.spec.model)
    for run in sorted(others, key=lambda run: run.environment != work.environment):
        its_parameters = _passed_parameters(run.model)
        if not parameters or not its_parameters or not (time := _as_before(store, work, [run])):
            continue
        ratio = parameters / its_parameters
        size = f"{two_digits(ratio)} times the parameters of {run.model}"
        basis = f"a guess, as no run of this model was measured: {size}; {time.basis}"
        return RunTime(seconds=round(ratio * time.seconds), basis=basis)
    return None


def _by_arithmetic(work: Work) -> RunTime | None:
    """Of a fine-tuning on this machine: from the operations that it needs."""
    parameters = _passed_parameters(work.spec.model)
    if not parameters or not work.tokens or work.spec.target != LOCAL_TARGET:
        return None
    cards = min(len(gpus()), work.spec.gpus)
    rate = cards * CARD_FLOPS or (processor().cores or 1) * CORE_FLOPS
    basis = (
        f"a guess, as nothing was run here: {work.tokens:,.0f} tokens, {parameters / 1e6:,.0f} "
        f"million parameters, {two_digits(rate / 1e9)} GFLOP/s; without loading"
    )
    if work.held_out:
        basis += " and evaluations"
    return RunTime(seconds=math.ceil(6 * parameters * work.tokens / rate), basis=basis)


def _passed_parameters(model: str) -> float | None:
    try:
        card = find(model)
    except FlashError:  # a folder that was removed
        return None
    return card.active or card.parameters or parameters_in_name(model)


def _as_before(store: Store, work: Work, ended: Sequence[Run]) -> RunTime | None:
    """From the seconds of the first of these runs that is alike; None if none took a step."""
    paces: list[tuple[Run, float]] = []
    for run in ended:
        if run.algorithm == work.spec.algorithm:
            for _, step_s in store.series(run.id, "time/step_s", points=1):
                if step_s:
                    paces.append((run, step_s / run.training.conversations_per_step))
    if not paces:
        return None
    run, pace = paces[0]
    step_s = pace * work.spec.conversations_per_step
    seconds = step_s * work.steps
    basis = f"{work.steps} steps of {two_digits(step_s)} s as in {run.id}"
    summaries = [item.summary for item in store.evals(run.id)]
    measured = [summary for summary in summaries if summary.get("seconds") and summary.get("n")]
    if work.held_out and not measured:
        basis += ", without evaluations"
    elif work.held_out:
        attempt_s = sum(item["seconds"] for item in measured) / sum(item["n"] for item in measured)
        seconds += work.held_out * attempt_s
        basis += f" and {work.held_out} held-out attempts"
    time = RunTime(seconds=round(seconds), basis=basis)
    if run.environment != work.environment:
        return _elsewhere(time, run)
    alike = [item for other, item in paces if other.environment == run.environment]
    if len(alike) < SCATTERED:
        return time
    why = f"the fastest and the slowest of {len(alike)} such runs"
    return time.banded(min(alike) / pace, max(alike) / pace, why)


def _elsewhere(time: RunTime, run: Run) -> RunTime:
    """A time from a run in another environment, where nobody knows how far it is off."""
    time.basis += f", in another environment ({run.environment})"
    return time


def time_by_evaluation(store: Store, work: Work, run: Run) -> RunTime | None:
    """The time of a GRPO run, from the tokens and the speed of an evaluation of its model; None if
    that has no speed.

    Where the share of training was measured, the band is the scatter of the tokens over tasks."""
    rows = store.evals(run.id)
    if not rows or not rows[-1].summary.get("tokens_per_s") or work.spec.algorithm == "sft":
        return None
    speed = float(round(rows[-1].summary["tokens_per_s"]))
    tasks = attempts.by_task(store.tries(run.id, run.evaluation.step))
    groups = [attempts.mean(group, "tokens") for group in tasks.values()]
    tokens = 0.0
    if groups:
        tokens = fmean(groups)
    if not tokens or not speed:
        return None
    scatter = statistics.Z95 * math.sqrt(statistics.spread(groups) / len(groups)) / tokens
    guess = "training guessed as long"
    measured = _training_share(store, work.spec)
    share, basis = measured or (TRAINING_SHARE, guess)
    generate_s = work.rollouts * tokens / speed
    evaluate_s = work.held_out * tokens / speed
    evals = ""
    if work.held_out:
        evals = f" and {work.held_out} held-out attempts"
    amount = f"{work.rollouts} rollouts{evals} of {tokens:.0f} tokens at {speed:.0f} tokens/s"
    time = RunTime(
        seconds=round(generate_s * (1 + share) + evaluate_s),
        basis=f"{amount} as in {run.id}, and {basis}",
    )
    if run.environment != work.environment:
        return _elsewhere(time, run)
    if not measured:
        return time
    return time.banded(max(1 - scatter, 0.1), 1 + scatter, "by the scatter of the tokens")


def _training_share(store: Store, spec: RunSpec) -> tuple[float, str] | None:
    """Seconds of training for one of generation, and of which run; None if none was measured."""
    for run in store.runs(limit=LOOKED_AT):
        if (run.model, run.algorithm) != (spec.model, spec.algorithm):
            continue
        train = store.series(run.id, "time/train_s", points=1)
        rollout = store.series(run.id, "time/rollout_s", points=1)
        if train and rollout and rollout[0][1]:
            share = train[0][1] / rollout[0][1]
            basis = f"{two_digits(share)} s of training for each of generation as in {run.id}"
            return share, basis
    return None


def _evaluations(spec: RunSpec, steps: int) -> int:
    """How often a run of so many steps evaluates."""
    every = spec.eval_every
    is_due_at_end = bool(every) and steps % every == 0
    count = 0
    if every:
        count = steps // every
    if spec.eval_before:
        count += 1
    if spec.eval_after and not is_due_at_end:
        count += 1
    return count
