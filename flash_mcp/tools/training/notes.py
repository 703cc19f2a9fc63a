"""What the caller should consider before a run."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

from environments.sandbox.needs import FILE as NEEDS_FILE
from environments.sandbox.needs import PLAYS_OUTSIDE, Needs
from flash_mcp.exam import exams
from flash_mcp.judgement import health, statistics
from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.judgement.health import Metrics
from flash_mcp.protocol.base_models import parameters_in_name
from flash_mcp.protocol.numbers import percent, two_digits
from flash_mcp.protocol.spec import default_learning_rate
from flash_mcp.state.references import OF_THE_PACKAGE
from flash_mcp.tools.shared.loading import contamination_note
from flash_mcp.tools.shared.table import FROM_ROWS
from flash_mcp.tools.shared.truncation import to_text
from flash_mcp.tools.training import probe
from flash_mcp.tools.training.plan import Plan

MOVING_PROMPTS = 8
"""Prompts, at the recipe's learning rate, with which a run visibly changed a model: at a twentieth
of that rate, 42 steps of 4 prompts took SmolLM2-135M on the calculator to a mean reward of 0.48.
"""
DESTROYING = 10
"""So many times the recipe's learning rate, a rate is far outside what was measured: SmolLM2-135M
learns at 1 (0.0005), and the first step at 200 or 1,000 destroys it; 40 destroys a tiny model."""
STANDING = 100
NOISY_ROLLOUTS = 16
LONG_S = 4 * 3600.0


def notes_on(plan: Plan) -> list[str]:
    # The adapter or teacher whose model was destroyed by then
    notes: list[str] = []
    for field, start in (("init_from_adapter", plan.adapter), ("teacher", plan.teacher)):
        if not start or not start.get("run_id"):
            continue
        metrics: list[Metrics] = []
        for row in plan.store.metrics(start["run_id"]):
            if row.step <= start["step"]:
                metrics.append({**row.metrics, "step": row.step})
        for flag in health.flags(metrics):
            if flag.name == health.DESTROYED:
                what = f"{field}={start['run_id']}@{start['step']} is flagged {flag.name}"
                fix = "take an earlier checkpoint, or the base model"
                notes.append(f"{what}: {flag.evidence}; {fix}")
    notes += [*_of_earlier(plan), *_of_tasks(plan), *_of_steps(plan), *_of_evaluations(plan)]
    notes += filter(None, [plan.placed, *_of_model(plan), *(need.warning() for need in plan.needs)])
    packages = {"tensorboard": ("tensorboard", "tensorboardX")}
    wanted = {name: packages.get(name, (name,)) for name in plan.spec.report_to}
    if missing := [name for name, ways in wanted.items() if not any(map(find_spec, ways))]:
        notes.append(f"not installed here, so it gets no metrics: {', '.join(missing)}")
    return notes + _of_gate(plan)


def _of_earlier(plan: Plan) -> list[str]:
    """The run that this one is the same as, or nearly."""
    if plan.like is None:
        return []
    run, differing = plan.like
    name = run.id
    if run.name:
        name += f" ({run.name})"
    if differing:
        fields: list[str] = []
        for field, (theirs, ours) in differing.items():
            fields.append(f"{field} ({to_text(theirs)} there, {to_text(ours)} here)")
        return [f"{name}, {run.state}, differs only in {' and '.join(fields)}"]
    if run.ended is None:
        same = f"{name} is {run.state} with the same values"
        return [f"{same}: cancel one of the two; an idempotency_key makes no second run"]
    became = f"status(run_id={run.id!r}) says what came of it"
    return [f"{name} {run.state} before with the same values: {became}"]


def _of_tasks(plan: Plan) -> list[str]:
    notes: list[str] = []
    spec = plan.spec
    dataset = plan.dataset
    estimate = plan.estimate
    for part in plan.parts:
        needs = Needs.from_folder(Path(part.environment.path))
        if request := needs.requested():
            notes.append(f"{part.environment.name}'s {NEEDS_FILE} asks for {to_text(request)}")
        if needs.gateway:
            notes.append(f"its rollouts wait for agents outside: {PLAYS_OUTSIDE}")
        if contamination := contamination_note(part.probe.shared[0]):
            notes.append(contamination)
        notes += exams.notes(part.probe.exams)
    room = spec.max_length or DEFAULT_MAX_LENGTH
    prompt_tokens = plan.probe.prompt_tokens
    if spec.algorithm != "sft" and prompt_tokens + spec.max_tokens > room:
        requested = f"a prompt of about {prompt_tokens} tokens and max_tokens={spec.max_tokens}"
        exceed = f"exceed the {room} tokens of a conversation"
        notes.append(f"{requested} {exceed}: answers will be cut off")
    manifest = dataset and dataset.manifest
    if dataset and manifest and manifest["allow_eval_tasks"] and manifest["counts"]["eval_tasks"]:
        risk = "a better evaluation afterwards may be memory"
        notes.append(f"{dataset.reference} may hold eval tasks: {risk}")
    if manifest and (source := manifest.get("source")):
        notes.append(f"the rows are of {source['said']}")
    if manifest and manifest["environment"]["digest"] == FROM_ROWS:
        if empty := manifest["counts"]["truncated"]:
            notes.append(f"{empty} rows without a question or an answer were left out")
        if copies := manifest["counts"]["duplicates"]:
            notes.append(f"{copies} rows that repeat another were left out")
    if not estimate.prompt_tokens_about:
        risk = "steps will be slow, and prompts may be too long"
        notes.append(f"no task opened within {probe.OPENINGS_S:g} s: {risk}")
    if estimate.passes > 20:
        passes = f"{estimate.passes:.0f}"
        notes.append(f"each row will be seen {passes} times: more rows would be better")
    return notes


def _of_steps(plan: Plan) -> list[str]:
    """Whether the run is long enough to change the model, and its steps more than noise."""
    spec = plan.spec
    notes = [*_of_duration(plan), *_of_deadline(plan)]
    card = plan.card
    parameters = card.parameters or parameters_in_name(card.name) or 0
    usual = default_learning_rate(spec.algorithm, parameters)
    times = spec.learning_rate / usual
    if times >= DESTROYING:
        notes.append(
            f"learning_rate={spec.learning_rate:g} is {two_digits(times)} times the {usual:g} that "
            "moves models of this size: rates of 200 times it left models whose answers did not "
            f"depend on what was asked; take {usual:g}"
        )
    elif spec.algorithm == "sft" and times <= 1 / STANDING:
        notes.append(
            f"learning_rate={spec.learning_rate:g} is {two_digits(times)} of the {usual:g} that "
            f"moves models of this size: little will be learnt; take {usual:g}"
        )
    if spec.algorithm != "grpo" or spec.steps is None:
        return notes
    share = spec.learning_rate * spec.steps * spec.batch_size / (usual * MOVING_PROMPTS)
    if share < 1:
        remedy = f"{math.ceil(spec.steps / share)} steps"
        if spec.learning_rate < usual:
            remedy = f"learning_rate={usual:g}, or {remedy}"
        notes.append(
            f"learning_rate x steps x batch_size is {percent(share)} of the least that moved a "
            f"model of this size: take {remedy}"
        )
    if spec.conversations_per_step < NOISY_ROLLOUTS:
        rollouts = f"a step of {spec.conversations_per_step} rollouts"
        notes.append(f"{rollouts} is mostly noise: raise batch_size or group_size")
    return notes


def _of_duration(plan: Plan) -> list[str]:
    """What a run that takes most of a day may be replaced by."""
    time = plan.estimate.time
    if time is None or time.seconds < LONG_S:
        return []
    spec = plan.spec
    hours = time.seconds / 3600
    within = math.floor(plan.estimate.steps / hours)
    shorter = "a smaller model, or lower max_tokens, batch_size or eval_examples"
    if within:
        shorter = f"about {within} steps take an hour and show whether it learns"
    if not spec.max_hours and not spec.finish_by:
        shorter += "; max_hours or finish_by ends it in time"
    return [f"it takes about {two_digits(hours)} hours: {shorter}"]


def _of_deadline(plan: Plan) -> list[str]:
    """How many of the steps fit into finish_by."""
    finish_s = plan.spec.finish_s
    if finish_s is None:
        return []
    steps, expected = plan.estimate.steps, plan.estimate.time
    if expected is None:
        return [f"finish_by={plan.spec.finish_by}: how many of {steps} steps fit is not known yet"]
    fitting = min(steps, int(steps * finish_s / max(1, expected.seconds)))
    return [f"finish_by={plan.spec.finish_by}: about {fitting} of {steps} steps fit"]


def _of_evaluations(plan: Plan) -> list[str]:
    notes: list[str] = []
    spec = plan.spec
    estimate = plan.estimate
    judged = spec.eval_before and spec.eval_after
    if spec.algorithm != "sft" and estimate.eval_tasks and not judged:
        notes.append("without eval_before and eval_after the run gets no verdict")
    rows = min(part.probe.evaluated for part in plan.parts)
    if (spec.eval_before or spec.eval_after) and rows < 50:
        interval = statistics.wilson(rows / 2, rows)
        half = (interval.high - interval.low) / 2
        notes.append(f"{rows} eval rows tell the success rate to ±{half:.2f}")
    return notes


def _of_model(plan: Plan) -> list[str]:
    """What nobody looks at in the model before the run, or does nothing with it."""
    card = plan.card
    if card.scheme == "hub" and card.parameters is None:
        unseen = "whether the hub has it and how large it is shows when the run starts"
        return [f"{card.name} is not in the catalog: {unseen}"]
    if plan.spec.thinking and not card.thinking:
        return [f"thinking=true has no effect: {card.name}'s template has no switch for it"]
    return []


def _of_gate(plan: Plan) -> list[str]:
    notes: list[str] = []
    for part in plan.parts:
        version, gate = part.environment, part.gate
        tested = f"env_test(environment={version.reference!r})"
        if version.data == OF_THE_PACKAGE:
            continue
        if gate.time is None:
            risk = "a reward that pays for the wrong thing wastes a run"
            notes.append(f"{tested} was never run: {risk}")
        elif gate.is_refused:
            notes.append(f"env_test {gate}: train refuses that without accept_failed_gate=true")
    return notes
