"""train: check, estimate and start a training run."""

from __future__ import annotations

import functools
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from pydantic import Field
from pydantic.fields import FieldInfo

from environments.checks.splits import Overlap, overlap
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.sandbox.needs import FILE as NEEDS_FILE
from environments.sandbox.needs import Needs
from environments.settings import load_settings
from environments.untrusted_text import plain_name
from flash_mcp.judgement import statistics
from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.judgement.curation import prompt_digest
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.credentials import TRACKERS
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, GateVerdict, Json, Run, text_of
from flash_mcp.protocol.spec import LOCAL_TARGET, RECIPES, ResolvedSpec, RunSpec, default_of
from flash_mcp.state import costs, queue, references
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.queue import Label
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.launch.devices import gpus, processor
from flash_mcp.supervisor.launch.memory_need import MemoryNeed, need_of
from flash_mcp.tools.shared import resume as resumption
from flash_mcp.tools.shared.disk_need import DiskNeed, disk_need
from flash_mcp.tools.shared.held_out import read_held_out
from flash_mcp.tools.shared.loading import (
    RunName,
    RunNote,
    check_logins,
    check_machine,
    check_target,
    contamination_note,
    loaded,
)
from flash_mcp.tools.shared.next_steps import after_sample, after_train
from flash_mcp.tools.shared.placing import check_gpus, placed
from flash_mcp.tools.shared.preflight import (
    GROUP_SIZE,
    SAMPLE_LIMIT_S,
    Sample,
    sample_groups,
)
from flash_mcp.tools.shared.resolve import adapter_name, init_adapter, resolved_spec
from flash_mcp.tools.shared.run_time import (
    RunTime,
    Work,
    expected_time,
    time_by_evaluation,
    work_of,
)
from flash_mcp.tools.shared.run_view import RunView, by_source, report_on
from flash_mcp.tools.shared.tool_base import Result, ResultModel, report, unwrapped
from flash_mcp.tools.shared.truncation import to_text, without_empty
from flash_mcp.tools.shared.waiting import look_after, tried_again

CHARACTERS_PER_TOKEN = 3.5
"""For English text in common vocabularies; the server has no tokenizer."""
PROBE_TIMEOUT_S = 20.0
OPENINGS_S = 12.0
"""Time to open a few tasks. Tasks that take longer are no reason to refuse a run."""


class Estimate(ResultModel):
    """How much work a run is."""

    steps: int
    """Optimizer steps."""
    rollouts: int | None = None
    """Conversations generated (grpo)."""
    examples: int | None = None
    """Conversations trained on, repeats counted (sft)."""
    held_out_examples: int | None = None
    """Held-out conversations whose loss is measured, all times together (sft)."""
    train_tasks: int
    """Rows of the train split."""
    eval_tasks: int
    """Rows of the eval split."""
    dataset_rows: int | None = None
    """Rows of the dataset, if there is one (sft)."""
    passes: float
    """Times that each row is seen."""
    prompt_tokens_about: int
    """First prompt of a few tasks, estimated from its characters; 0 if none opened in time."""
    tokens_at_most: int | None = None
    """Tokens generated if every rollout had one turn as long as max_tokens and max_length let
    it be."""
    disk: str | None = None
    """What checkpoints take, and what is free."""
    time: RunTime | None = None
    """From the sample's tokens and speed, else from earlier runs of the model on this machine;
    absent if there are none."""


class Train(Result):
    """A run as resolved."""

    run_id: str | None = None
    """The run; absent with validate_only."""
    state: str
    """queued; validated with validate_only; or the state of the earlier run with the same key."""
    created: bool
    """False with validate_only or resume, or if idempotency_key found an earlier run."""
    environment: str
    """NAME@DIGEST that the run uses."""
    model: str
    """Base model."""
    warm_start: str | None = None
    """Adapter that training starts from."""
    gate: str | None = None
    """What env_test last found of these files: passed, failed with its checks, or never run; absent
    with resume."""
    estimate: Estimate | None = None
    """How much work the run is; absent with resume."""
    resumed_at: int | None = None
    """With resume: the step that it goes on from."""
    values: dict[str, Any]
    """Every field of the run with its value."""
    sources: dict[str, list[str]]
    """Where values came from: argument, file, adapter, or auto for a target; all others from the
    recipe."""
    sample: Sample | None = None
    """With sample: what the model does now."""
    notes: list[str] | None = None
    """What to consider before it runs."""
    run: RunView | None = None
    """How it ended, if the client waits for it as a task."""


def _with_fields_of_run_spec(
    function: Callable[..., Awaitable[Train]],
) -> Callable[..., Awaitable[Train]]:
    """Put RunSpec's fields, each optional, before the function's own arguments.

    An argument's own default is None, so that `resolve` can tell which ones were given; the schema
    shows the field's default."""
    signature = inspect.signature(function, eval_str=True)
    own = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = [
        inspect.Parameter(name, keyword, default=None, annotation=_argument(name, info))
        for name, info in RunSpec.model_fields.items()
    ]
    signature = inspect.Signature([*fields, *own], return_annotation=Train)
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    function.__annotations__ = {p.name: p.annotation for p in (*fields, *own)} | {"return": Train}
    return function


def _argument(name: str, info: FieldInfo) -> Any:
    """The annotation of the argument that gives this field of RunSpec."""
    text = unwrapped(info.description or "")
    arguments = [
        f"{recipe[name]:g} ({algorithm})" for algorithm, recipe in RECIPES.items() if name in recipe
    ]
    if arguments:
        text += f" Default: {', '.join(arguments)}."
    default = default_of(name)
    shown: Any = None if default in (None, [], {}) else {"default": default}
    field = Field(description=text, json_schema_extra=shown)
    return Annotated[(info.annotation | None, field, *info.metadata)]  # pyright: ignore


@_with_fields_of_run_spec
async def train(
    *,
    resume: Annotated[str | None, Field(min_length=1)] = None,
    fresh_optimizer: bool = False,
    config: str | None = None,
    validate_only: bool = False,
    sample: bool = False,
    price_per_hour: Annotated[float | None, Field(ge=0)] = None,
    name: RunName = None,
    note: RunNote = None,
    idempotency_key: Annotated[str | None, Field(min_length=1, max_length=200)] = None,
    accept_failed_gate: bool = False,
    **fields: Any,
) -> Train:
    """Start a training run and return its run_id at once: GRPO on a reward, or SFT on gold answers
    or a curated dataset.

    Loads the environment in a child process first and refuses a broken one. Fields left out take
    the recipe's value; the result shows every value. The run continues when the client ends. To
    follow it, call status. To check an environment more thoroughly, call env_test; to publish one,
    env_push.

    Args:
        resume: An ended run, to continue from its newest checkpoint; only steps, counted from its
            start, may be given with it.
        fresh_optimizer: With resume: go on even if the optimizer's state was deleted.
        config: TOML file on the server with any of the fields above; arguments override it.
        validate_only: Check, resolve and estimate; start nothing.
        sample: With validate_only: let the model try a few train tasks, and report whether there is
            anything to learn and how long the run takes.
        price_per_hour: With sample: to estimate the cost.
        idempotency_key: A repeated key, with the same fields, returns the first run.
        accept_failed_gate: Train although env_test found the environment faulty; the lineage keeps
            that.
    """
    arguments = {field: value for field, value in fields.items() if value is not None}
    label = Label(name, note)
    if resume is not None:
        others = {"config": config, "validate_only": validate_only, "sample": sample}
        arguments |= {field: value for field, value in others.items() if value}
        return await _resumed(resume, arguments, label, fresh_optimizer=fresh_optimizer)
    if (sample or price_per_hour is not None) and not (validate_only and sample):
        what = "sample and price_per_hour need validate_only=true"
        fix = "pass validate_only=true and sample=true together; then train without them"
        raise FlashError("invalid_argument", what, fix=fix)
    started = time.monotonic()
    plan = await _plan(arguments, config, idempotency_key, sample=sample)
    if sample:
        tried = await _sampled(plan, price_per_hour, started + SAMPLE_LIMIT_S)
        return plan.result(state="validated", created=False, sample=tried, next=after_sample(tried))
    if validate_only:
        return plan.result(state="validated", created=False, next=_after_validation(plan))
    if not accept_failed_gate:
        plan.check_gate()
    run, created = await run_sync(_enqueue, plan, idempotency_key, label)
    next_step = await _followed(plan.store, run, is_own=created)
    return plan.result(run_id=run.id, state=run.state, created=created, next=next_step)


def _after_validation(plan: _Plan) -> str:
    if plan.gate.failed:
        return plan.gate_error().fix
    next_step = "call train again without validate_only to start it"
    if plan.spec.algorithm == "grpo":
        next_step += "; sample=true lets the model try it first"
    return next_step


async def _followed(store: Store, run: Run, *, is_own: bool) -> str:
    """Make sure that a supervisor runs; what follows. `is_own`: the run was named, or made by this
    call, and not found by a key.
    """
    if trouble := await look_after(store, run):
        return f"{trouble} The run is queued. {tried_again(run.id)}"
    if run.ended is None:
        return after_train(run, "", created=is_own)
    report = await run_sync(report_on, store, run.id)
    return after_train(run, report.next_step, created=is_own)


async def _resumed(run_id: str, arguments: Json, label: Label, *, fresh_optimizer: bool) -> Train:
    """Continue a run."""
    if others := [name for name in arguments if name != "steps"]:
        what = f"resume goes on with the run's own values, so {', '.join(others)} cannot be given"
        fix = f"leave them out, or start another run: train(init_from_adapter={run_id!r}, ...)"
        raise FlashError("invalid_argument", what, resume=run_id, fix=fix)
    store = open_store()
    target = store.run(run_id).target
    check_target(store, target)
    again = functools.partial(resumption.resume, fresh_optimizer=fresh_optimizer)
    result = await run_sync(again, store, run_id, arguments.get("steps"))
    run = await run_sync(queue.label, store, result.run, label)
    next_step = await _followed(store, run, is_own=True)
    return Train(
        run_id=run.id,
        state=run.state,
        created=False,
        resumed_at=result.step,
        environment=run.environment_reference,
        model=run.model,
        warm_start=adapter_name(run.init_adapter),
        values=without_empty(run.spec.model_dump()),
        sources=by_source(run.sources),
        notes=result.notes or None,
        next=next_step,
    )


@dataclass(frozen=True)
class _Probe:
    """What loading the environment showed."""

    splits: dict[str, int]
    """{"train": rows, "eval": rows}"""
    prompt_tokens: int
    """The longest first prompt among a few."""
    shared: Overlap
    """The tasks that are in both splits."""


@dataclass(frozen=True)
class _Plan:
    """A run that was resolved and checked, and can be queued."""

    store: Store
    resolved: ResolvedSpec
    card: ModelCard
    dataset: Dataset | None
    environment: EnvironmentVersion
    adapter: Json | None
    probe: _Probe
    estimate: Estimate
    need: DiskNeed | None
    memory: MemoryNeed | None
    work: Work
    gate: GateVerdict
    placed: str | None
    """Why it is to run where it is, if nobody named the target."""
    is_repeated: bool
    """An earlier call with the same idempotency_key made this run."""

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    def result(self, **fields: Any) -> Train:
        return Train(
            environment=self.environment.reference,
            model=self.spec.model,
            warm_start=adapter_name(self.adapter),
            gate=str(self.gate),
            estimate=self.estimate,
            values=without_empty(self.spec.model_dump()),
            sources=by_source(self.resolved.sources),
            notes=[*_notes(self), *_more_notes(self)] or None,
            **fields,
        )

    def check_gate(self) -> None:
        """FlashError(gate_failed) if env_test last found a fault in these files."""
        if self.gate.failed and not self.is_repeated:
            raise self.gate_error()

    def gate_error(self) -> FlashError:
        reference = self.environment.reference
        what = f"env_test failed on {reference}: {', '.join(self.gate.failed)}"
        test = f"env_test(environment={reference!r}) says what to change"
        fix = f"{test}; accept_failed_gate=true trains all the same, and is written on the report"
        return FlashError("gate_failed", what, fix=fix)


async def _plan(
    arguments: Json, config: str | None, idempotency_key: str | None, *, sample: bool
) -> _Plan:
    store = open_store()
    resolved, card, dataset = await run_sync(resolved_spec, store, arguments, config)
    first = await run_sync(queue.asked_before, store, resolved, idempotency_key)
    need_on = functools.partial(need_of, resolved.spec)
    resolved, why = await run_sync(placed, store, resolved, need_on, first and first.target)
    spec = resolved.spec
    check_logins(TRACKERS[name] for name in spec.report_to if name in TRACKERS)
    costs.check(spec, store.base)
    if sample and spec.algorithm != "grpo":
        what = "sample works with algorithm=grpo only"
        fix = "leave sample out; evaluate measures what the model does now"
        raise FlashError("invalid_argument", what, fix=fix)
    if first:
        environment = await run_sync(references.environment, store, first.environment_reference)
        adapter = first.init_adapter
    else:
        environment = await run_sync(references.environment, store, spec.environment)
        adapter = await run_sync(init_adapter, store, spec, card)
    is_here = spec.target == LOCAL_TARGET
    if sample:
        check_machine()
    check_target(store, spec.target)
    if is_here:
        await run_sync(_check_gpus, spec, environment.owner)
    memory = await run_sync(_memory_need, spec) if is_here else None
    if memory and not first:
        memory.check()
    await report("loading the environment in a child process")
    probe = await _probe(spec, environment, dataset, card)
    _check_lengths(spec, card, probe.prompt_tokens)
    estimate = _estimate(spec, probe, dataset)
    work = work_of(spec, environment.name, estimate.steps, estimate.eval_tasks)
    if time := await run_sync(expected_time, store, work):
        estimate.time = time.priced(store, spec, None)
    need = await run_sync(disk_need, store, spec, card, estimate.steps) if is_here else None
    if need:
        need.check()
        estimate.disk = str(need)
    gate = await run_sync(store.gate, environment.digest, spec.environment_args)
    return _Plan(
        store=store,
        resolved=resolved,
        card=card,
        dataset=dataset,
        environment=environment,
        adapter=adapter,
        probe=probe,
        estimate=estimate,
        need=need,
        memory=memory,
        work=work,
        gate=gate,
        placed=why,
        is_repeated=first is not None,
    )


async def _sampled(plan: _Plan, price_per_hour: float | None, deadline: float) -> Sample:
    """What the model does on a few groups of tasks; also puts the expected time into the plan."""
    spec = plan.spec
    sampled = await sample_groups(
        plan.store,
        plan.environment,
        Subject(plan.card.name, plan.card.context, adapter=plan.adapter),
        tasks=plan.probe.splits["train"],
        group_size=spec.group_size or GROUP_SIZE,
        given=spec.model_dump(),
        deadline=deadline,
    )
    plan.estimate.time = await run_sync(_time_by_sample, plan, sampled, price_per_hour)
    return sampled


def _time_by_sample(plan: _Plan, sampled: Sample, price_per_hour: float | None) -> RunTime | None:
    """The time from the sample; while that is not ready, from earlier runs."""
    estimate = plan.estimate
    time = estimate.time
    if sampled.scores:
        run = plan.store.run(sampled.run_id)
        time = time_by_evaluation(plan.store, plan.work, run) or time
    return time and time.priced(plan.store, plan.spec, price_per_hour)


def _enqueue(plan: _Plan, idempotency_key: str | None, label: Label) -> tuple[Run, bool]:
    shared = plan.probe.shared
    lineage: Json = {"gate": str(plan.gate), "tasks": plan.probe.splits}
    if shared.shared:
        lineage["overlap"] = {
            "shared": shared.shared,
            "eval_tasks": shared.eval_tasks,
            "evidence": str(shared),
        }
    with plan.store.transaction():
        run, created = queue.enqueue(
            plan.store,
            plan.resolved,
            plan.environment,
            plan.adapter,
            idempotency_key,
            plan.dataset.pinned() if plan.dataset else None,
            lineage,
        )
        return queue.label(plan.store, run, label), created


async def _probe(
    spec: RunSpec, environment: EnvironmentVersion, dataset: Dataset | None, card: ModelCard
) -> _Probe:
    """Load the environment as a run does."""
    async with loaded(
        environment,
        args=spec.environment_args,
        secrets=spec.secrets,
        call_timeout_s=min(spec.env_timeout_s, PROBE_TIMEOUT_S),
        start_timeout_s=PROBE_TIMEOUT_S,
        fix="correct the folder, env_test it, env_push it, and train again",
    ) as host:
        gold = spec.algorithm == "sft" and not dataset
        longest = await _longest_prompt(host, card, gold=gold)
        if dataset:
            await _check_contamination(host, spec, environment, dataset)
        splits = dict(host.splits)
        shared = await overlap(host)
    if spec.evaluates and not splits.get("eval"):
        what = "the environment has no eval split to evaluate on"
        fix = "add eval rows (env.eval_dataset, usually datasets/eval.jsonl), or leave eval_* out"
        raise FlashError("dataset_invalid", what, fix=fix)
    return _Probe(splits, math.ceil(longest / CHARACTERS_PER_TOKEN), shared)


async def _longest_prompt(host: EnvironmentHost, card: ModelCard, *, gold: bool) -> int:
    """Characters of the longest first prompt among the train tasks that open within OPENINGS_S.

    With `gold`, also asks for their gold answers. Raises EnvironmentFault only if every task fails:
    a run continues without tasks that fail.
    """
    longest = 0
    tasks = min(4, host.splits["train"])
    faults: list[EnvironmentFault] = []
    with anyio.move_on_after(OPENINGS_S):
        for index in range(tasks):
            try:
                opening = await host.open("train", index)
                length = sum(len(text_of(message)) for message in opening.messages)
                if opening.tools:
                    _check_tools(card)
                    length += len(json.dumps(opening.tools))
                longest = max(longest, length)
                await host.close(opening.episode)
                if gold:
                    await host.gold("train", index)
            except EnvironmentFault as fault:
                faults.append(fault)
    if len(faults) == tasks:
        raise faults[0]
    return longest


def _check_tools(card: ModelCard) -> None:
    """FlashError(tools_unsupported) if the model is known to see no tools."""
    if card.chat_template and card.tools is None:
        what = "the tasks have tools, which the model's chat template cannot show"
        fix = "use a model whose template knows tools, or a ChatML one, which gets ours"
        raise FlashError("tools_unsupported", what, model=card.name, fix=fix)


async def _check_contamination(
    host: EnvironmentHost, spec: RunSpec, environment: EnvironmentVersion, dataset: Dataset
) -> None:
    """FlashError(dataset_invalid) if the dataset contains eval prompts of another environment than
    the one that it was curated with.
    """
    made_with = dataset.manifest["environment"]
    args = spec.environment_args
    current = {"name": environment.name, "digest": environment.digest, "args": args}
    if made_with == current or dataset.manifest["allow_eval_tasks"]:
        return
    held_out = (await read_held_out(host)).prompts
    rows: list[Json] = []
    for row in dataset.rows():
        prompt = row["messages"][: row["prompt_messages"]]
        if prompt_digest(prompt) in held_out:
            rows.append(row)
    if rows:
        task = rows[0]["provenance"]["task_id"]
        what = (
            f"{len(rows)} rows show prompts of the eval split of {environment.reference}, for "
            f"instance task {plain_name(task)}; the dataset was made with "
            f"{made_with['name']}@{made_with['digest']}"
        )
        fix = "train on the version that it was made with, or curate it from runs of this one"
        raise FlashError("dataset_invalid", what, dataset=dataset.reference, fix=fix)


def _notes(plan: _Plan) -> list[str]:
    """What the caller should consider before the run."""
    notes: list[str] = []
    spec = plan.spec
    dataset = plan.dataset
    estimate = plan.estimate
    if request := Needs.of(Path(plan.environment.path)).asked():
        notes.append(f"the environment's {NEEDS_FILE} asks for {to_text(request)}")
    if contamination := contamination_note(plan.probe.shared):
        notes.append(contamination)
    room = spec.max_length or DEFAULT_MAX_LENGTH
    prompt_tokens = plan.probe.prompt_tokens
    if spec.algorithm == "grpo" and prompt_tokens + spec.max_tokens > room:
        requested = f"a prompt of about {prompt_tokens} tokens and max_tokens={spec.max_tokens}"
        exceed = f"exceed the {room} tokens of a conversation"
        notes.append(f"{requested} {exceed}: answers will be cut off")
    manifest = dataset.manifest if dataset else None
    if dataset and manifest and manifest["allow_eval_tasks"] and manifest["counts"]["eval_tasks"]:
        risk = "a better evaluation afterwards may be memory"
        notes.append(f"{dataset.reference} may hold eval tasks: {risk}")
    if not estimate.prompt_tokens_about:
        risk = "steps will be slow, and prompts may be too long"
        notes.append(f"no task opened within {OPENINGS_S:g} s: {risk}")
    if estimate.passes > 20:
        passes = f"{estimate.passes:.0f}"
        notes.append(f"each row will be seen {passes} times: more rows would be better")
    judged = spec.eval_before and spec.eval_after
    if spec.algorithm == "grpo" and estimate.eval_tasks and not judged:
        notes.append("without eval_before and eval_after the run gets no verdict")
    rows = min(estimate.eval_tasks, spec.eval_examples)
    if (spec.eval_before or spec.eval_after) and rows < 50:
        interval = statistics.wilson(rows / 2, rows)
        half = (interval.high - interval.low) / 2
        notes.append(f"{rows} eval rows give a success rate to within up to ±{half:.2f}")
    return notes


def _more_notes(plan: _Plan) -> list[str]:
    needs = [need for need in (plan.memory, plan.need) if need]
    notes = [plan.placed] if plan.placed else []
    notes += [shortage for need in needs if (shortage := need.warning())]
    if missing := _missing(plan.spec.report_to):
        notes.append(f"not installed here, so it gets no metrics: {', '.join(missing)}")
    tested = f"env_test(environment={plan.environment.reference!r})"
    if plan.gate.time is None:
        notes.append(f"{tested} was never run: a reward that pays for the wrong thing wastes a run")
    elif plan.gate.failed:
        notes.append(
            f"env_test failed ({', '.join(plan.gate.failed)}): train needs that mended, "
            "or accept_failed_gate=true"
        )
    return notes


def _missing(report_to: Sequence[str]) -> list[str]:
    """The trackers whose packages are not installed beside this server."""
    packages = {"tensorboard": ("tensorboard", "tensorboardX")}
    return [name for name in report_to if not any(map(find_spec, packages.get(name, (name,))))]


def _memory_need(spec: RunSpec) -> MemoryNeed | None:
    """On the largest GPU; on a machine without one, of its memory."""
    return need_of(spec, max(gpus(), key=lambda gpu: gpu.memory_gib, default=processor()))


def _check_gpus(spec: RunSpec, owner: str) -> None:
    """`check_gpus`; FlashError(environments_busy) if this machine never runs an environment of
    `owner` for each of them.
    """
    check_gpus(spec.gpus)
    if spec.gpus == 1:
        return
    try:
        most = load_settings().environments.most_of(owner)
    except ValueError:  # settings.toml cannot be used: loading the environment says so
        return
    if spec.gpus > most:
        what = f"each GPU needs an environment, and {most} of one owner may run at once"
        fix = (
            f"use gpus={most}, or raise `at_once` and `at_once_per_owner` under [environments] "
            "in settings.toml of FLASH_HOME"
        )
        raise FlashError("environments_busy", what, gpus=spec.gpus, fix=fix)


def _check_lengths(spec: RunSpec, card: ModelCard, prompt_tokens: int) -> None:
    """FlashError for lengths that cannot work. The worker checks with real tokens."""
    context = card.context
    if context and spec.max_length and spec.max_length > context:
        what = f"max_length={spec.max_length} is more than the model's context of {context}"
        raise FlashError("invalid_argument", what, fix=f"use max_length={context} or less")
    room = spec.max_length or DEFAULT_MAX_LENGTH
    if prompt_tokens > 2 * room:  # an estimate from characters may be wrong by half, not by twice
        what = f"a prompt of about {prompt_tokens} tokens does not fit into {room}"
        fix = "shorten the prompts, raise max_length, or choose a model with a longer context"
        raise FlashError("prompt_too_long", what, fix=fix)


def _estimate(spec: RunSpec, probe: _Probe, dataset: Dataset | None) -> Estimate:
    dataset_rows = len(dataset.rows()) if dataset else None
    tasks = dataset_rows or probe.splits["train"]
    batch = spec.batch_size or 1
    steps = spec.steps or math.ceil(tasks * (spec.epochs or 1.0) / batch)
    estimate = Estimate(
        steps=steps,
        train_tasks=probe.splits["train"],
        eval_tasks=probe.splits.get("eval", 0),
        dataset_rows=dataset_rows,
        passes=round(steps * batch / tasks, 2),
        prompt_tokens_about=probe.prompt_tokens,
    )
    if spec.algorithm == "grpo":
        estimate.rollouts = steps * batch * (spec.group_size or 1)
        room = (spec.max_length or DEFAULT_MAX_LENGTH) - probe.prompt_tokens
        estimate.tokens_at_most = estimate.rollouts * max(1, min(spec.max_tokens, room))
    else:
        estimate.examples = steps * batch
        rows = estimate.eval_tasks if spec.evaluates else 0
        if dataset:
            rows = dataset.manifest["counts"]["holdout_rows"]
        every = spec.eval_every or spec.save_every
        measurements = math.ceil(steps / every)
        estimate.held_out_examples = measurements * min(rows, spec.eval_examples) or None
    return estimate
