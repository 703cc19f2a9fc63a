"""train: check, estimate and start a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any

from anyio.to_thread import run_sync
from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema

from environments.settings import load_settings
from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.judgement.statistics import MOST_MEASUREMENTS
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import Json, Run, without_none
from flash_mcp.protocol.spec import (
    LOCAL_TARGET,
    OTHER_NAMES,
    RECIPES,
    RunSpec,
    default_of,
    explain,
    validate,
)
from flash_mcp.protocol.surroundings import TRACKERS
from flash_mcp.state import costs, queue, references
from flash_mcp.state.owners import caller
from flash_mcp.state.queue import Label
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.launch.devices import MemoryNeed, gpus, need_of, processor
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.loading import (
    RunName,
    RunNote,
    check_logins,
    check_machine,
    check_target,
)
from flash_mcp.tools.shared.next_steps import after_sample, after_train, next_of
from flash_mcp.tools.shared.placing import check_architecture, check_gateway, check_gpus, placed
from flash_mcp.tools.shared.preflight import GROUP_SIZE, SAMPLE_LIMIT_S, Sample, sample_groups
from flash_mcp.tools.shared.resolve import (
    ConfigFiles,
    Configs,
    adapter_name,
    changed_values,
    read_configs,
)
from flash_mcp.tools.shared.rows import Preview, preview_of, tokens_about
from flash_mcp.tools.shared.run_view import RunView, by_source, report_on
from flash_mcp.tools.shared.tool_base import Result, report, unwrapped
from flash_mcp.tools.shared.waiting import look_after, tried_again
from flash_mcp.tools.training.notes import notes_on
from flash_mcp.tools.training.plan import (
    DiskNeed,
    Estimate,
    Inputs,
    Plan,
    check_lengths,
    disk_need,
    estimate_of,
    resume_run,
)
from flash_mcp.tools.training.probe import parts_of, probe, with_all_secrets
from flash_mcp.tools.training.run_time import RunTime, expected_time, time_by_evaluation, work_of


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
    """The values that are not the recipe's; of a run that was just created, those that are no
    arguments of this call. status with detail=detailed has all."""
    sources: dict[str, list[str]] | None = None
    """Where those came from that are no arguments: file, adapter, or auto for a target."""
    sample: Sample | None = None
    """With sample: what the model does now."""
    preview: Preview | None = None
    """With dataset and validate_only: the shortest row, a typical one and the longest, with what is
    learnt."""
    notes: list[str] | None = None
    """What to consider before it runs."""
    run: Annotated[RunView | None, WithJsonSchema({"type": "object"})] = None
    """How it ended, as status has it, if the client waits for it as a task."""


def _with_fields_of_run_spec(
    function: Callable[..., Awaitable[Train]],
) -> Callable[..., Awaitable[Train]]:
    """Put RunSpec's fields before the function's own arguments. Each is None where it was not
    given; the schema shows the field's default.
    """
    signature = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for name, info in RunSpec.model_fields.items():
        # The annotation of the argument that gives this field of RunSpec
        text = unwrapped(info.description or "")
        arguments: list[str] = []
        for algorithm, recipe in RECIPES.items():
            if name in recipe:
                value = recipe[name]
                shown_value = f"{value:g}" if isinstance(value, float) else value
                arguments.append(f"{shown_value} ({algorithm})")
        if arguments:
            text += f" Default: {', '.join(arguments)}."
        default = default_of(name)
        shown: Any = None if default in (None, [], {}) else {"default": default}
        field = Field(description=text, json_schema_extra=shown)
        annotation = Annotated[(info.annotation | None, field, *info.metadata)]  # pyright: ignore
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
    signature = inspect.Signature(parameters, return_annotation=Train)
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return function


COMMON = (
    "environment",
    "model",
    "algorithm",
    "teacher",
    "dataset",
    "steps",
    "epochs",
    "batch_size",
    "group_size",
    "learning_rate",
    "lora_rank",
    "max_tokens",
    "temperature",
    "thinking",
    "seed",
    "eval_every",
    "eval_before",
    "eval_after",
    "eval_examples",
    "init_from_adapter",
    "environment_args",
    "secrets",
    "target",
    "gpus",
    "max_hours",
    "finish_by",
)
"""Fields that the tool's schema shows each for itself; `settings` takes all others."""
RARE = tuple(name for name in RunSpec.model_fields if name not in COMMON)
COUNT = Field(min_length=2, max_length=MOST_MEASUREMENTS)
Seeds = Annotated[list[int], COUNT]
"""As the tool's schema has it; `_seeds_of` checks each."""
VALID = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], COUNT])
Settings = Annotated[
    dict[str, Any] | None, Field(description=f"Rarer fields by name: {', '.join(RARE)}.")
]


@_with_fields_of_run_spec
async def train(
    *,
    settings: Settings = None,
    seeds: Seeds | None = None,
    resume: Annotated[str | None, Field(min_length=1)] = None,
    fresh_optimizer: bool = False,
    config: ConfigFiles = None,
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
    the recipe's value. The run continues when the client ends. To follow it, call status. To check
    an environment more thoroughly, call env_test; to publish one, env_push.

    Args:
        seeds: A run for each; status reports their spread.
        resume: An ended run, to continue from its newest checkpoint; takes only steps, counted
            from its start.
        fresh_optimizer: With resume: go on even if the optimizer's state was deleted.
        config: TOML files on the server with fields of a run; a later one wins, and arguments.
        validate_only: Check, resolve and estimate; start nothing.
        sample: With validate_only: the model tries a few train tasks; reports what there is to
            learn and how long the run takes.
        price_per_hour: With sample: to estimate the cost.
        idempotency_key: A repeated key, with the same fields, returns the first run.
        accept_failed_gate: Train although env_test found the environment faulty; the lineage keeps
            that.
    """
    arguments = _arguments(fields, settings or {})
    label = Label(name, note)
    if resume is not None:
        more = {"config": config, "validate_only": validate_only, "sample": sample, "seeds": seeds}
        arguments |= {field: value for field, value in more.items() if value}
        return await _resumed(resume, arguments, label, fresh_optimizer=fresh_optimizer)
    if (sample or price_per_hour is not None) and not (validate_only and sample):
        what = "sample and price_per_hour need validate_only=true"
        fix = "pass validate_only=true and sample=true together; then train without them"
        raise FlashError("invalid_argument", what, fix=fix)
    started = time.monotonic()
    configs = await run_sync(read_configs, config)
    # The seeds of the call or its config files, the first put into `arguments`; else none
    if seeds is not None and "seed" in arguments:
        fix = "keep one of the two: seeds starts a run for each"
        raise FlashError("invalid_argument", "seed and seeds are both given", fix=fix)
    requested = seeds
    if seeds is None and "seed" not in arguments:
        requested = configs.fields.get("seeds")
    if requested is None:
        several = []
    else:
        fix = f"give 2 to {MOST_MEASUREMENTS} different seeds from 0 to 2147483647"
        try:
            numbers = VALID.validate_python(requested, strict=True)
        except ValidationError as error:
            raise FlashError("invalid_argument", f"seeds: {explain(error)}", fix=fix) from error
        if len({*numbers}) < len(numbers):
            raise FlashError("invalid_argument", f"seeds={numbers} names one twice", fix=fix)
        arguments["seed"] = numbers[0]
        several = numbers
    key = _key_of(idempotency_key, several)
    plan = await plan_of(arguments, configs, key, sample=sample, preview=validate_only)
    if sample:
        sampled = await _sampled(plan, price_per_hour, started + SAMPLE_LIMIT_S)
        return _result(plan, sample=sampled, next=after_sample(sampled))
    if validate_only:
        return _result(plan, preview=plan.preview, next=_after_validation(plan))
    if not accept_failed_gate:
        plan.check_gate()
    return await _started(plan, several, idempotency_key, label)


def _arguments(fields: Json, settings: Json) -> Json:
    arguments = without_none(fields)
    for name, value in settings.items():
        if name not in RunSpec.model_fields:
            guess = did_you_mean(name, RunSpec.model_fields, count=1, also=OTHER_NAMES)
            what = f"settings has no field {name!r}; nothing was done{guess}"
            fix = f"settings accepts: {', '.join(RARE)}"
            raise FlashError("unknown_argument", what, argument=f"settings.{name}", fix=fix)
        if name in arguments:
            what = f"{name} is given twice, as an argument and in settings"
            raise FlashError("invalid_argument", what, fix="keep one of the two")
        arguments[name] = value
    return without_none(arguments)


def _key_of(idempotency_key: str | None, seeds: Sequence[int]) -> str | None:
    """The key of the run with the first of `seeds`; without any, the caller's own."""
    if idempotency_key and seeds:
        return f"{idempotency_key} seed={seeds[0]}"
    return idempotency_key


# -- checked against the environment, and estimated ------------------------------------------------


ANSWER_TOKENS = 64
"""Of a gold answer, which nobody has read yet."""
MOST_DIFFERING = 2
"""Values in which a run differs from one that it is nearly the same as."""


async def plan_of(
    arguments: Json,
    config: Configs,
    idempotency_key: str | None,
    *,
    sample: bool = False,
    preview: bool = False,
) -> Plan:
    """Resolve and check a run, with a preview of its dataset. FlashError if it cannot work."""
    store = open_store()
    inputs = await run_sync(_inputs, store, arguments, config, idempotency_key)
    spec, dataset = inputs.spec, inputs.dataset
    if sample:
        if spec.algorithm != "grpo" or spec.mixture:
            what = "sample works with algorithm=grpo and one environment only"
            fix = "leave sample out; evaluate measures what the model does now"
            raise FlashError("invalid_argument", what, fix=fix)
        check_machine()
    check_target(store, spec.target, slurm=bool(spec.slurm))
    needs: list[MemoryNeed | DiskNeed] = []
    if memory := await run_sync(_memory_need, inputs):
        needs.append(memory)
    for part in inputs.parts:
        version = part.environment
        await report(f"loading {version.name} in a child process")
        part.probe = await probe(part.spec(spec), version, dataset, inputs.card, inputs.env_files)
        part.gate = await run_sync(store.gate, version.digest, part.args)
    whole = inputs.probe
    check_lengths(spec, inputs.card, whole.prompt_tokens)
    rows = dataset.rows() if dataset else []
    sizes = list(map(tokens_about, rows))
    made = None
    room = spec.max_length or DEFAULT_MAX_LENGTH
    if dataset and (preview or max(sizes) > room):
        await report("rendering rows")
        counts = dataset.manifest["counts"]
        options: Json = {"card": inputs.card, "max_length": room, "thinking": spec.thinking}
        made = await run_sync(functools.partial(preview_of, rows, counts, **options))
    estimate = estimate_of(spec, whole, dataset, made)
    work = work_of(spec, inputs.environment.name, estimate.steps, whole.evaluated)
    if estimate.examples:
        row = whole.prompt_tokens + ANSWER_TOKENS
        if sizes:
            row = fmean(sizes)
        work = dataclasses.replace(work, tokens=estimate.examples * row)
    estimate.regression = work.regression or None
    if time := await run_sync(expected_time, store, work):
        estimate.time = time.priced(store, spec, None)
    is_here = spec.target == LOCAL_TARGET
    if is_here and (disk := await run_sync(disk_need, store, spec, inputs.card, estimate.steps)):
        disk.check()
        needs.append(disk)
        if disk.total > disk.free / 1000:  # less is not worth an agent's tokens
            estimate.disk = str(disk)
    more: Json = {"estimate": estimate, "needs": needs, "work": work, "preview": made}
    return Plan(**vars(inputs), store=store, **more)


def _inputs(store: Store, arguments: Json, config: Configs, idempotency_key: str | None) -> Inputs:
    resolved, card, dataset = resolve.resolved_spec(store, arguments, config)
    own_spec = resolved.spec
    resolved = with_all_secrets(resolved)
    first = queue.asked_before(store, resolved, idempotency_key)
    need_on = functools.partial(need_of, resolved.spec)
    resolved, why = placed(store, resolved, need_on, first and first.target)
    spec = resolved.spec
    check_logins(TRACKERS[name] for name in spec.report_to if name in TRACKERS)
    costs.check(spec, store.base)
    # A repeat means the run that is there, also if the name has a newer version by now.
    if first:
        adapter, teacher = first.init_adapter, first.lineage.get("teacher")
    else:
        adapter = resolve.init_adapter(store, spec, card)
        teacher = resolve.teacher_of(store, spec, card)
    parts = parts_of(store, own_spec, first)
    for part in parts:
        check_gateway(part.environment, spec.target)
        resolved = resolve.for_environment(resolved, part.environment)
    like = None
    if first is None:
        # Of the caller's runs that differ in the fewest values an active one, or the newest
        environment = parts[0].environment
        ours = {**resolved.spec.model_dump(), "environment": environment.reference}
        fewest = (MOST_DIFFERING + 1, False)
        for run in store.trainings_on(environment.name, caller().owner):
            differing = resolve.differing_values([run.spec.model_dump(), ours])
            key = (len(differing), run.ended is not None)
            if key < fewest:
                like, fewest = (run, differing), key
    sources = (resolved, card, dataset, parts, adapter, teacher)
    return Inputs(*sources, why, first is not None, like, config.env_files if spec.secrets else [])


def _memory_need(inputs: Inputs) -> MemoryNeed | None:
    """On the largest GPU, else of the memory; None if not known. FlashError if it does not fit,
    or if as many environments of one owner never run at once."""
    spec = inputs.spec
    if spec.target != LOCAL_TARGET:
        return None
    check_gpus(spec.gpus)
    count, owner = max(spec.gpus, len(inputs.parts)), inputs.environment.owner
    most = count
    if count > 1:
        with contextlib.suppress(ValueError):  # of settings.toml: loading an environment says so
            most = load_settings().environments.most_of(owner)
    if count > most:
        what = f"the run needs {count} environments at once, and {most} of one owner may run"
        fix = (
            f"use gpus={most}, or mix so many environments, or raise `at_once` and "
            "`at_once_per_owner` under [environments] in settings.toml of FLASH_HOME"
        )
        raise FlashError("environments_busy", what, fix=fix)
    check_architecture(spec.model)
    # Which card it gets is decided later: refuse only what fits none.
    largest = max(gpus(), key=lambda gpu: gpu.memory_gib, default=processor())
    need = need_of(spec, largest)
    # A repeat starts nothing, so nothing has to fit.
    if need and not inputs.is_repeated:
        need.check()
    return need


# -- tried on a few tasks --------------------------------------------------------------------------


async def _sampled(plan: Plan, price_per_hour: float | None, deadline: float) -> Sample:
    """What the model does on a few groups of tasks; also puts the expected time into the plan."""
    spec = plan.spec
    sampled = await sample_groups(
        plan.store,
        plan.environment,
        Subject(plan.card.name, plan.card.context, adapter=plan.adapter),
        tasks=plan.probe.splits["train"],
        group_size=spec.group_size or GROUP_SIZE,
        arguments=spec.model_dump(),
        deadline=deadline,
        env_files=plan.env_files,
    )
    plan.estimate.time = await run_sync(_time_by_sample, plan, sampled, price_per_hour)
    return sampled


def _time_by_sample(plan: Plan, sampled: Sample, price_per_hour: float | None) -> RunTime | None:
    """The time from the sample; while that is not ready, from earlier runs."""
    estimate = plan.estimate
    time = estimate.time
    if sampled.scores:
        run = plan.store.run(sampled.run_id)
        time = time_by_evaluation(plan.store, plan.work, run) or time
    return time and time.priced(plan.store, plan.spec, price_per_hour)


def _after_validation(plan: Plan) -> str:
    if error := plan.gate_error():
        return error.fix
    next_step = "call train again without validate_only to start it"
    if plan.spec.algorithm == "grpo":
        next_step += "; sample=true lets the model try it first"
    return next_step


# -- queued and followed ---------------------------------------------------------------------------


async def _started(
    plan: Plan, seeds: Sequence[int], idempotency_key: str | None, label: Label
) -> Train:
    if seeds:
        runs, created = await run_sync(_enqueue_each, plan, seeds, idempotency_key, label)
    else:
        run, created = await run_sync(enqueue, plan, idempotency_key, label)
        runs = [run]
    run = runs[0]
    next_step = await _followed(plan.store, run, is_own=created)
    plan.estimate.disk = None  # it was enough
    result = _result(plan, run_id=run.id, state=run.state, created=created, next=next_step)
    if seeds:
        listed = ", ".join(f"{run.id} (seed {run.training.seed})" for run in runs)
        note = f"{listed}: status of any reports how far the seeds spread"
        result.notes = [note, *(result.notes or ())]
    return result


def _enqueue_each(
    plan: Plan, seeds: Sequence[int], idempotency_key: str | None, label: Label
) -> tuple[list[Run], bool]:
    """Queue all or none; (runs in the order of `seeds`, whether they are new)."""
    runs: list[Run] = []
    created: set[bool] = set()
    group = secrets.token_hex(8)
    with plan.store.transaction():
        for seed in seeds:
            spec = plan.spec.model_copy(update={"seed": seed})
            one = dataclasses.replace(
                plan, resolved=plan.resolved.model_copy(update={"spec": spec})
            )
            run, is_new = enqueue(one, _key_of(idempotency_key, [seed]), label, seed_group=group)
            runs.append(run)
            created.add(is_new)
        if len(created) > 1:
            what = "the key was used with other seeds"
            fix = "use a new key, or the seeds of the first call"
            raise FlashError("idempotency_conflict", what, seeds=list(seeds), fix=fix)
    return runs, created == {True}


def enqueue(plan: Plan, idempotency_key: str | None, label: Label, **more: str) -> tuple[Run, bool]:
    """Queue it; (run, whether it is new). `more` goes into its lineage."""
    dataset = plan.dataset
    first = plan.parts[0].probe
    lineage: Json = {"gate": plan.gate, "tasks": first.splits, **more}
    if plan.spec.mixture:
        lineage["mixture"] = [part.pinned() for part in plan.parts]
    if plan.teacher:
        lineage["teacher"] = plan.teacher
    if plan.env_files:
        lineage["env_files"] = plan.env_files
    if tasks := plan.work.regression_tasks:
        lineage["regression"] = references.regression_split(plan.store) | {"tasks": tasks}
    if plan.probe.exams:
        lineage["exam_rows"] = plan.probe.exams
    if first.overlap:
        lineage["overlap"] = first.overlap
    with plan.store.transaction():
        run, created = queue.enqueue(
            plan.store,
            plan.resolved,
            plan.environment,
            plan.adapter,
            idempotency_key,
            dataset.pinned() if dataset else None,
            lineage,
        )
        return queue.label(plan.store, run, label), created


async def _followed(store: Store, run: Run, *, is_own: bool) -> str:
    """Make sure that a supervisor runs; what follows. `is_own`: no key led to the run."""
    if trouble := await look_after(store, run):
        return f"{trouble} The run is queued. {tried_again(run.id)}"
    if run.ended is None:
        return after_train(run, "", created=is_own)
    ended = await run_sync(report_on, store, run.id)
    return after_train(run, next_of(ended), created=is_own)


# -- resumed ---------------------------------------------------------------------------------------


async def _resumed(run_id: str, arguments: Json, label: Label, *, fresh_optimizer: bool) -> Train:
    if others := [name for name in arguments if name != "steps"]:
        what = f"resume goes on with the run's own values, so {', '.join(others)} cannot be given"
        fix = f"leave them out, or start another run: train(init_from_adapter={run_id!r}, ...)"
        raise FlashError("invalid_argument", what, resume=run_id, fix=fix)
    store = open_store()
    run = store.run(run_id)
    check_target(store, run.target)
    steps = arguments.get("steps")
    if steps is not None:
        steps = validate({"environment": run.environment, "steps": steps}).steps
    again = functools.partial(resume_run, fresh_optimizer=fresh_optimizer)
    result = await run_sync(again, store, run_id, steps)
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
        **_values(run.training, run.sources),
        notes=result.notes or None,
        next=next_step,
    )


# -- shown -----------------------------------------------------------------------------------------


def _result(plan: Plan, *, state: str = "validated", created: bool = False, **fields: Any) -> Train:
    shown = _values(plan.spec, plan.resolved.sources)
    if created:
        for name, source in plan.resolved.sources.items():
            if source == "argument" and name != "dataset":  # it is NAME@DIGEST now
                shown["values"].pop(name, None)
    return Train(
        state=state,
        created=created,
        environment=plan.environment.reference,
        model=plan.spec.model,
        warm_start=adapter_name(plan.adapter),
        gate=plan.gate,
        estimate=plan.estimate,
        **shown,
        notes=notes_on(plan) or None,
        **fields,
    )


def _values(spec: RunSpec, sources: Mapping[str, str]) -> dict[str, Any]:
    """`values` and `sources`, without what the result has anyhow."""
    values = changed_values(spec, sources)
    elsewhere = by_source(sources)
    for name in ("environment", "model"):
        values.pop(name, None)
    elsewhere.pop("argument", None)
    return {"values": values, "sources": elsewhere or None}
