"""A run, resolved and checked before it is queued."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from anyio.to_thread import run_sync

from environments.settings import load_settings
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import LOCAL_TARGET, ResolvedSpec, RunSpec
from flash_mcp.protocol.surroundings import TRACKERS
from flash_mcp.state import costs, queue, references
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.owners import caller
from flash_mcp.state.queue import Label
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.launch.devices import gpus, processor
from flash_mcp.supervisor.launch.memory_need import MemoryNeed, need_of
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.loading import check_logins, check_machine, check_target
from flash_mcp.tools.shared.placing import check_architecture, check_gateway, check_gpus, placed
from flash_mcp.tools.shared.resolve import Configs
from flash_mcp.tools.shared.tool_base import report
from flash_mcp.tools.training.estimate import (
    DiskNeed,
    Estimate,
    check_lengths,
    disk_need,
    estimate_of,
)
from flash_mcp.tools.training.probe import NO_PROBE, Part, Probe, parts_of, probe, with_all_secrets
from flash_mcp.tools.training.run_time import Work, expected_time, work_of

MOST_DIFFERING = 2
"""Values in which a run differs from one that it is nearly the same as."""
Like = tuple[Run, dict[str, list[Any]]]
"""A run, and {field: [its value there, its value here]} of the values that differ."""


@dataclass(frozen=True)
class Inputs:
    resolved: ResolvedSpec
    card: ModelCard
    dataset: Dataset | None
    parts: list[Part]
    """Its environments."""
    adapter: Json | None
    teacher: Json | None
    placed: str | None
    """Why it is to run where it is, if nobody named the target."""
    is_repeated: bool
    """An earlier call with the same idempotency_key made this run."""
    like: Like | None
    """The earlier run that is the same, or nearly."""
    env_files: list[str]

    @property
    def environment(self) -> EnvironmentVersion:
        """The one that the run is named after."""
        return self.parts[0].environment

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    @property
    def probe(self) -> Probe:
        """Of all environments."""
        return sum((part.probe for part in self.parts), NO_PROBE)


@dataclass(frozen=True)
class Plan(Inputs):
    """A run that was resolved and checked, and can be queued."""

    store: Store
    estimate: Estimate
    needs: list[MemoryNeed | DiskNeed]
    """What it takes of this machine, as far as that is known."""
    work: Work

    @property
    def gate(self) -> str:
        parts = self.parts
        if len(parts) == 1:
            return str(parts[0].gate)
        return "; ".join(f"{part.environment.name}: {part.gate}" for part in parts)

    def check_gate(self) -> None:
        """FlashError(gate_failed) if env_test last found a fault, or had no time for all checks."""
        error = self.gate_error()
        if error and not self.is_repeated:
            raise error

    def gate_error(self) -> FlashError | None:
        """Of the first environment that is refused."""
        refused = [part for part in self.parts if part.gate.is_refused]
        if not refused:
            return None
        reference, gate = refused[0].environment.reference, refused[0].gate
        what = f"env_test of {reference} {gate}"
        test = f"env_test(environment={reference!r}) says what to change"
        if not gate.failed:
            test = f"env_test(environment={reference!r}, time_s=...) with more seconds"
        fix = f"{test}; accept_failed_gate=true trains all the same, and is written on the report"
        return FlashError("gate_failed", what, fix=fix)


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


async def plan_of(
    arguments: Json, config: Configs, idempotency_key: str | None, *, sample: bool
) -> Plan:
    """Resolve and check a run. FlashError if it cannot work."""
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
    estimate = estimate_of(spec, whole, dataset)
    work = work_of(spec, inputs.environment.name, estimate.steps, whole.evaluated)
    estimate.regression = work.regression or None
    if time := await run_sync(expected_time, store, work):
        estimate.time = time.priced(store, spec, None)
    is_here = spec.target == LOCAL_TARGET
    if is_here and (disk := await run_sync(disk_need, store, spec, inputs.card, estimate.steps)):
        disk.check()
        needs.append(disk)
        estimate.disk = str(disk)
    return Plan(**vars(inputs), store=store, estimate=estimate, needs=needs, work=work)


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
    like = None
    if first:
        adapter, teacher = first.init_adapter, first.lineage.get("teacher")
    else:
        adapter = resolve.init_adapter(store, spec, card)
        teacher = resolve.teacher_of(store, spec, card)
    parts = parts_of(store, own_spec, first)
    for part in parts:
        check_gateway(part.environment, spec.target)
        resolved = resolve.for_environment(resolved, part.environment)
    if first is None:
        # Of the caller's runs that differ in the fewest values an active one, or the newest
        environment = parts[0].environment
        ours = {**resolved.spec.model_dump(), "environment": environment.reference}
        like = None
        fewest = (MOST_DIFFERING + 1, False)
        for run in store.trainings_on(environment.name, caller().owner):
            differing = resolve.differing_values([run.spec.model_dump(), ours])
            key = (len(differing), run.ended is not None)
            if key < fewest:
                like, fewest = (run, differing), key
    sources = (resolved, card, dataset, parts, adapter, teacher)
    return Inputs(*sources, why, first is not None, like, config.env_files if spec.secrets else [])


def _memory_need(inputs: Inputs) -> MemoryNeed | None:
    """On the largest GPU, else of the memory; None if not known. FlashError if it does not fit."""
    spec = inputs.spec
    if spec.target != LOCAL_TARGET:
        return None
    check_gpus(spec.gpus)
    _check_places(max(spec.gpus, len(inputs.parts)), inputs.environment.owner)
    check_architecture(spec.model)
    # Which card it gets is decided later: refuse only what fits none.
    largest = max(gpus(), key=lambda gpu: gpu.memory_gib, default=processor())
    need = need_of(spec, largest)
    # A repeat starts nothing, so nothing has to fit.
    if need and not inputs.is_repeated:
        need.check()
    return need


def _check_places(count: int, owner: str) -> None:
    """FlashError(environments_busy) if so many environments of `owner` never run at once."""
    if count == 1:
        return
    try:
        most = load_settings().environments.most_of(owner)
    except ValueError:  # settings.toml cannot be used: loading the environment says so
        return
    if count > most:
        what = f"the run needs {count} environments at once, and {most} of one owner may run"
        fix = (
            f"use gpus={most}, or mix so many environments, or raise `at_once` and "
            "`at_once_per_owner` under [environments] in settings.toml of FLASH_HOME"
        )
        raise FlashError("environments_busy", what, fix=fix)
