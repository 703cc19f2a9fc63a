"""train, cancel and checkpoints: starting runs, ending them, and what they leave behind."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from pydantic import Field
from pydantic.fields import FieldInfo

from environments.checks.splits import Overlap, overlap
from environments.process import sandbox
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.process.sandbox import Needs
from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.judgement.curation import prompt_digest, read_held_out
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion
from flash_mcp.protocol.spec import RECIPES, RunSpec, default_of
from flash_mcp.state import queue, references
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.fitting import to_text
from flash_mcp.tools.shared.frame import Part, Result, report, unwrapped
from flash_mcp.tools.shared.loading import check_machine, contamination_note, loaded
from flash_mcp.tools.shared.preflight import (
    GROUP_SIZE,
    SAMPLE_LIMIT_S,
    RunTime,
    Sample,
    after_sample,
    run_time,
    sample_groups,
)
from flash_mcp.tools.shared.resolve import adapter_name, init_adapter, resolved_spec
from flash_mcp.tools.shared.run_view import RunView, by_source
from flash_mcp.tools.shared.waiting import look_after, tried_again

CHARACTERS_PER_TOKEN = 3.5
"""Of English in common vocabularies; the control plane has no tokenizer."""
PROBE_TIMEOUT_S = 20.0
OPENINGS_S = 12.0
"""For the look at a few prompts: tasks that take longer to open are no reason to refuse a run."""


class Estimate(Part):
    """How much work a run is."""

    steps: int
    """Optimizer steps."""
    rollouts: int | None = None
    """Conversations generated (grpo)."""
    examples: int | None = None
    """Conversations trained on, repeats counted (sft)."""
    train_tasks: int
    """Rows of the train split."""
    eval_tasks: int
    """Rows of the eval split."""
    dataset_rows: int | None = None
    """Rows of the dataset, if there is one (sft)."""
    passes: float
    """How often each row is seen on average."""
    prompt_tokens_about: int
    """First prompt of a few tasks, estimated from its characters; 0 where none opened in time."""
    tokens_at_most: int | None = None
    """Tokens generated if every rollout had one turn, of max_tokens."""
    seconds_about: int | None = None
    """From the speed of `seconds_from`; else unknown."""
    seconds_from: str | None = None
    """The earlier run that the speed was taken from."""
    time: RunTime | None = None
    """From the sample's tokens and speed, with its error band."""


class Train(Result):
    """A run as resolved."""

    run_id: str | None = None
    """The run; absent with validate_only."""
    state: str
    """queued, or `validated` with validate_only, or the state of the run found again."""
    created: bool
    """False with validate_only, and where idempotency_key found an earlier run."""
    environment: str
    """NAME@DIGEST that the run is pinned to."""
    model: str
    """Base model."""
    warm_start: str | None = None
    """Adapter that training starts from."""
    estimate: Estimate
    """How much work it is."""
    values: dict[str, Any]
    """Every field of the run with its value."""
    sources: dict[str, list[str]]
    """Where values came from: argument, file; all others: recipe."""
    sample: Sample | None = None
    """With sample: what the model does now."""
    notes: list[str] | None = None
    """What is worth a thought before it runs."""
    run: RunView | None = None
    """How it ended; where the client waits for it as a task."""


def _with_fields_of_run_spec(
    function: Callable[..., Awaitable[Train]],
) -> Callable[..., Awaitable[Train]]:
    """Put RunSpec's fields, each optional, before the function's own arguments.

    An argument's own default is None, so that `resolve` can tell which ones were given; the schema
    shows the field's default."""
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = [
        inspect.Parameter(name, keyword, default=None, annotation=_argument(name, info))
        for name, info in RunSpec.model_fields.items()
    ]
    function.__signature__ = inspect.Signature([*fields, *own], return_annotation=Train)  # pyright: ignore[reportFunctionMemberAccess]
    function.__annotations__ = {p.name: p.annotation for p in (*fields, *own)} | {"return": Train}
    return function


def _argument(name: str, info: FieldInfo) -> Any:
    """The annotation of the argument that gives this field of RunSpec."""
    text = unwrapped(info.description or "")
    given = [
        f"{recipe[name]:g} ({algorithm})" for algorithm, recipe in RECIPES.items() if name in recipe
    ]
    if given:
        text += f" Default: {', '.join(given)}."
    default = default_of(name)
    shown: Any = None if default in (None, [], {}) else {"default": default}
    field = Field(description=text, json_schema_extra=shown)
    return Annotated[(info.annotation | None, field, *info.metadata)]  # pyright: ignore


@_with_fields_of_run_spec
async def train(
    *,
    config: str | None = None,
    validate_only: bool = False,
    sample: bool = False,
    price_per_hour: Annotated[float | None, Field(ge=0)] = None,
    idempotency_key: Annotated[str | None, Field(min_length=1, max_length=200)] = None,
    **fields: Any,
) -> Train:
    """Start a training run, GRPO on a reward or SFT on gold answers or a curated dataset; returns
    its run_id at once.

    Loads the environment in a child process first, so that a broken one is refused here. Fields
    left out take the recipe's value; the result says which value each has. The run goes on when the
    client ends. Progress: status. Checking an environment more thoroughly: env_test. Publishing
    one: env_push.

    Args:
        config: Path of a TOML file on the server with any of the fields above; arguments override
            it.
        validate_only: Check, resolve and estimate, and create nothing; default false.
        sample: With validate_only: let the model generate a few groups of train tasks first, and
            judge from them whether there is something to learn and how long it will take; default
            false.
        price_per_hour: With sample: of the machine, for an estimate of the cost.
        idempotency_key: Any text of yours. A second call with the same key and the same fields
            returns the first run instead of starting another.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if (sample or price_per_hour is not None) and not (validate_only and sample):
        fix = "pass validate_only=true and sample=true together; then train without them"
        raise FlashError(
            "invalid_argument", "sample and price_per_hour go with validate_only", fix=fix
        )
    return await start(
        given,
        config=config,
        validate_only=validate_only,
        sample=sample,
        price_per_hour=price_per_hour,
        idempotency_key=idempotency_key,
    )


async def start(
    given: dict[str, Any],
    *,
    config: str | None,
    validate_only: bool,
    idempotency_key: str | None,
    sample: bool = False,
    price_per_hour: float | None = None,
) -> Train:
    """`train`, with its fields as a dict."""
    started = time.monotonic()
    resolved, card, dataset = await anyio.to_thread.run_sync(resolved_spec, given, config)
    spec, store = resolved.spec, open_store()
    if sample and spec.algorithm != "grpo":
        fix = "leave sample out; evaluate says what the model does before"
        raise FlashError(
            "invalid_argument", "sample says whether there is something for grpo to learn", fix=fix
        )
    first = await anyio.to_thread.run_sync(queue.asked_before, store, resolved, idempotency_key)
    reference = f"{first.environment}@{first.environment_digest}" if first else spec.environment
    environment = await anyio.to_thread.run_sync(references.environment, store, reference)
    adapter = (
        first.init_adapter
        if first
        else await anyio.to_thread.run_sync(init_adapter, store, spec, card)
    )
    check_machine()
    await report("loading the environment in a child process")
    splits, prompt_tokens, shared = await _probe(spec, environment, dataset)
    contamination = contamination_note(shared)
    notes = [
        *([contamination] if contamination else []),
        *_check_lengths(spec, card, prompt_tokens),
    ]
    rows = len(dataset.rows()) if dataset else None
    estimate = await anyio.to_thread.run_sync(
        _estimate, store, spec, environment, splits, prompt_tokens, rows
    )
    if (
        dataset
        and dataset.manifest["allow_eval_tasks"]
        and dataset.manifest["counts"]["eval_tasks"]
    ):
        notes.append(
            f"{dataset.reference} may hold eval tasks: a better evaluation afterwards may be memory"
        )
    result = functools.partial(
        Train,
        environment=f"{environment.name}@{environment.digest}",
        model=spec.model,
        warm_start=adapter_name(adapter),
        estimate=estimate,
        values={
            name: value for name, value in spec.model_dump().items() if value not in (None, [], {})
        },
        sources=by_source(resolved.sources),
        notes=[*_asks(environment), *notes, *_advice(spec, estimate)] or None,
    )
    if validate_only and not sample:
        tries = "; sample=true lets the model try it first" if spec.algorithm == "grpo" else ""
        next_step = f"call train again without validate_only to start it{tries}"
        return result(state="validated", created=False, next=next_step)
    if sample:
        subject = Subject(card.name, card.context, adapter=adapter)
        sampled = await sample_groups(
            store,
            environment,
            subject,
            tasks=splits["train"],
            group_size=spec.group_size or GROUP_SIZE,
            given=spec.model_dump(),
            deadline=started + SAMPLE_LIMIT_S,
        )
        expected = await anyio.to_thread.run_sync(
            _time, store, spec, sampled, estimate, price_per_hour
        )
        kept = estimate.model_copy(update={"time": expected})
        return result(
            state="validated",
            created=False,
            estimate=kept,
            sample=sampled,
            next=after_sample(sampled),
        )
    pinned = dataset.pinned() if dataset else None
    lineage = {
        "overlap": {
            "shared": shared.shared,
            "eval_tasks": shared.eval_tasks,
            "evidence": str(shared),
        }
    }
    run, created = await anyio.to_thread.run_sync(
        queue.enqueue,
        store,
        resolved,
        environment,
        adapter,
        idempotency_key,
        pinned,
        lineage if shared.shared else None,
    )
    next_step = f"status(run_id={run.id!r}, wait_s=40) follows it; cancel ends it"
    if trouble := await look_after(store, run):
        next_step = f"{trouble} The run is queued. {tried_again(run.id)}"
    return result(run_id=run.id, state=run.state, created=created, next=next_step)


def _time(
    store: Store, spec: RunSpec, sampled: Sample, estimate: Estimate, price: float | None
) -> RunTime | None:
    return run_time(store, spec, sampled, eval_tasks=estimate.eval_tasks, price_per_hour=price)


async def _probe(
    spec: RunSpec, environment: EnvironmentVersion, dataset: Dataset | None
) -> tuple[dict[str, int], int, Overlap]:
    """The environment's split sizes, the tokens of its longest prompt among a few, and the tasks
    that its splits share, by loading it for real.
    """
    async with loaded(
        environment,
        args=spec.environment_args,
        secrets=spec.secrets,
        call_timeout_s=min(spec.env_timeout_s, PROBE_TIMEOUT_S),
        start_timeout_s=PROBE_TIMEOUT_S,
        fix="mend the folder, env_test it, env_push it, and train again",
    ) as host:
        longest = await _longest_prompt(host, gold=spec.algorithm == "sft" and not dataset)
        if dataset:
            await _check_contamination(host, spec, environment, dataset)
        splits, shared = dict(host.splits), await overlap(host)
    wants_eval = spec.eval_before or spec.eval_after or spec.eval_every
    if wants_eval and not splits.get("eval"):
        fix = "add eval rows (env.eval_dataset, as a rule datasets/eval.jsonl), or leave eval_* out"
        raise FlashError(
            "dataset_invalid", "the environment has no eval split to evaluate on", fix=fix
        )
    return splits, math.ceil(longest / CHARACTERS_PER_TOKEN), shared


async def _longest_prompt(host: EnvironmentHost, *, gold: bool) -> int:
    """Characters of the longest first prompt of a few train tasks, as far as they open in time;
    with a look at `gold`.

    EnvironmentFault where each of them fails: the run, too, goes on without one that does.
    """
    longest, looks, faults = 0, min(4, host.splits["train"]), list[EnvironmentFault]()
    with anyio.move_on_after(OPENINGS_S):
        for index in range(looks):
            try:
                opening = await host.open("train", index)
                longest = max(
                    longest, sum(len(str(message.get("content"))) for message in opening.messages)
                )
                await host.close(opening.episode)
                if gold:
                    await host.gold("train", index)
            except EnvironmentFault as fault:
                faults.append(fault)
    if len(faults) == looks:
        raise faults[0]
    return longest


def _asks(environment: EnvironmentVersion) -> list[str]:
    asked = Needs.of(Path(environment.path)).asked()
    return [f"the environment's {sandbox.FILE} asks for {to_text(asked)}"] if asked else []


async def _check_contamination(
    host: EnvironmentHost, spec: RunSpec, environment: EnvironmentVersion, dataset: Dataset
) -> None:
    """FlashError(dataset_invalid) where the dataset shows eval prompts of an environment it was not
    curated with.
    """
    made_with = dataset.manifest["environment"]
    here = {
        "name": environment.name,
        "digest": environment.digest,
        "args": spec.environment_args,
    }
    if made_with == here or dataset.manifest["allow_eval_tasks"]:
        return
    prompts = (await read_held_out(host)).prompts
    rows = [
        row
        for row in dataset.rows()
        if prompt_digest(row["messages"][: row["prompt_messages"]]) in prompts
    ]
    if rows:
        raise FlashError(
            "dataset_invalid",
            f"{len(rows)} rows show prompts of the eval split of {here['name']}@{here['digest']}, for instance task "
            f"{rows[0]['provenance']['task_id']}; the dataset was made with {made_with['name']}@{made_with['digest']}",
            dataset=dataset.reference,
            fix="train on the version that it was made with, or curate it from runs of this one",
        )


def _check_lengths(spec: RunSpec, card: ModelCard, prompt_tokens: int) -> list[str]:
    """Notes on lengths that are doubtful; FlashError for those that cannot work. The worker checks
    with real tokens.
    """
    context = card.context
    if context and spec.max_length and spec.max_length > context:
        fix = f"use max_length={context} or less"
        raise FlashError(
            "invalid_argument",
            f"max_length={spec.max_length} is more than the model's context of {context}",
            fix=fix,
        )
    room = spec.max_length or DEFAULT_MAX_LENGTH
    if prompt_tokens > 2 * room:  # an estimate from characters may be wrong by half, not by twice
        raise FlashError(
            "prompt_too_long",
            f"a prompt of about {prompt_tokens} tokens does not fit into {room}",
            fix="shorten the prompts, raise max_length, or choose a model with a longer context",
        )
    if spec.algorithm == "grpo" and prompt_tokens + spec.max_tokens > room:
        return [
            f"a prompt of about {prompt_tokens} tokens and max_tokens={spec.max_tokens} exceed the {room} tokens of a "
            "conversation: answers will be cut off"
        ]
    return []


def _estimate(
    store: Store,
    spec: RunSpec,
    environment: EnvironmentVersion,
    splits: dict[str, int],
    prompt_tokens: int,
    dataset_rows: int | None,
) -> Estimate:
    tasks = dataset_rows or splits["train"]
    steps = spec.steps_of(tasks)
    conversations = steps * spec.conversations_per_step
    rollouts = conversations if spec.algorithm == "grpo" else None
    seconds, basis = _speed(store, spec, environment)
    return Estimate(
        steps=steps,
        rollouts=rollouts,
        examples=conversations if rollouts is None else None,
        train_tasks=splits["train"],
        eval_tasks=splits.get("eval", 0),
        dataset_rows=dataset_rows,
        passes=round(steps * spec.batch_size / tasks, 2),
        prompt_tokens_about=prompt_tokens,
        tokens_at_most=rollouts * spec.max_tokens if rollouts else None,
        seconds_about=round(seconds * steps) if seconds else None,
        seconds_from=basis,
    )


def _speed(
    store: Store, spec: RunSpec, environment: EnvironmentVersion
) -> tuple[float | None, str | None]:
    """Seconds a step will about take, from the newest run of the same kind, scaled by the rollouts
    of a step.
    """
    for run in store.runs(limit=50):
        same = (run.model, run.algorithm, run.environment) == (
            spec.model,
            spec.algorithm,
            environment.name,
        )
        points = store.series(run.id, "time/step_s", points=1) if same else []
        if points:
            earlier = run.spec["batch_size"] * (run.spec["group_size"] or 1)
            return points[0][1] * spec.conversations_per_step / earlier, run.id
    return None, None


def _advice(spec: RunSpec, estimate: Estimate) -> list[str]:
    notes: list[str] = []
    if not estimate.prompt_tokens_about:
        notes.append(
            f"no task opened within {OPENINGS_S:g} s: steps will be slow, and prompts may be too long"
        )
    if estimate.passes > 20:
        notes.append(
            f"each row will be seen {estimate.passes:.0f} times: more rows would be better"
        )
    if (
        spec.algorithm == "grpo"
        and not (spec.eval_before and spec.eval_after)
        and estimate.eval_tasks
    ):
        notes.append(
            "without eval_before and eval_after nothing will tell whether held-out success changed"
        )
    rows = min(estimate.eval_tasks, spec.eval_examples)
    if (spec.eval_before or spec.eval_after) and rows < 50:
        notes.append(f"{rows} eval rows give a noise band of up to ±{0.98 / math.sqrt(rows):.2f}")
    return notes


# -- warm start ------------------------------------------------------------------------------------


# -- cancel and checkpoints ------------------------------------------------------------------------
