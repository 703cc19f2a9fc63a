"""A run, resolved and checked before it is queued."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from anyio.to_thread import run_sync

from environments.settings import load_settings
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.credentials import TRACKERS
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, GateVerdict, Json, Run
from flash_mcp.protocol.spec import LOCAL_TARGET, ResolvedSpec, RunSpec
from flash_mcp.state import costs, queue, references
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.owners import caller
from flash_mcp.state.queue import Label
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.launch.devices import gpus, processor
from flash_mcp.supervisor.launch.memory_need import MemoryNeed, need_of
from flash_mcp.tools.shared.configs import Configs
from flash_mcp.tools.shared.loading import check_logins, check_machine, check_target
from flash_mcp.tools.shared.placing import check_architecture, check_gateway, check_gpus, placed
from flash_mcp.tools.shared.resolve import (
    differing_values,
    for_environment,
    init_adapter,
    resolved_spec,
    teacher_of,
)
from flash_mcp.tools.shared.tool_base import report
from flash_mcp.tools.training.disk_need import DiskNeed, disk_need
from flash_mcp.tools.training.estimate import Estimate, check_lengths, estimate_of
from flash_mcp.tools.training.probe import Probe, probe
from flash_mcp.tools.training.run_time import Work, expected_time, work_of

MOST_DIFFERING = 2
"""Values in which a run differs from one that it is nearly the same as."""
LOOKED_AT = 50
"""Newest runs that a new one is compared with."""
Like = tuple[Run, dict[str, list[Any]]]
"""A run, and {field: [its value there, its value here]} of the values that differ."""


@dataclass(frozen=True)
class Inputs:
    resolved: ResolvedSpec
    card: ModelCard
    dataset: Dataset | None
    environment: EnvironmentVersion
    adapter: Json | None
    teacher: Json | None
    placed: str | None
    """Why it is to run where it is, if nobody named the target."""
    is_repeated: bool
    """An earlier call with the same idempotency_key made this run."""
    like: Like | None
    """The earlier run that is the same, or nearly."""
    env_files: list[str]


@dataclass(frozen=True)
class Plan:
    """A run that was resolved and checked, and can be queued."""

    store: Store
    inputs: Inputs
    probe: Probe
    estimate: Estimate
    needs: list[MemoryNeed | DiskNeed]
    """What it takes of this machine, as far as that is known."""
    work: Work
    gate: GateVerdict

    @property
    def spec(self) -> RunSpec:
        return self.inputs.resolved.spec

    def check_gate(self) -> None:
        """FlashError(gate_failed) if env_test last found a fault in these files, or had no time for
        all checks.
        """
        if self.gate.is_refused and not self.inputs.is_repeated:
            raise self.gate_error()

    def gate_error(self) -> FlashError:
        reference = self.inputs.environment.reference
        what = f"env_test of {reference} {self.gate}"
        test = f"env_test(environment={reference!r}) says what to change"
        if not self.gate.failed:
            test = f"env_test(environment={reference!r}, time_s=...) with more seconds"
        fix = f"{test}; accept_failed_gate=true trains all the same, and is written on the report"
        return FlashError("gate_failed", what, fix=fix)


def enqueue(
    plan: Plan, idempotency_key: str | None, label: Label, seed_group: str | None = None
) -> tuple[Run, bool]:
    """Queue it; (run, whether this call made it)."""
    dataset = plan.inputs.dataset
    shared = plan.probe.shared
    lineage: Json = {"gate": str(plan.gate), "tasks": plan.probe.splits}
    if plan.inputs.teacher:
        lineage["teacher"] = plan.inputs.teacher
    if seed_group:
        lineage["seed_group"] = seed_group
    if plan.inputs.env_files:
        lineage["env_files"] = plan.inputs.env_files
    if plan.work.regression.startswith("on"):
        lineage["regression"] = references.regression_split(plan.store)
    if shared.shared:
        lineage["overlap"] = {
            "shared": shared.shared,
            "eval_tasks": shared.eval_tasks,
            "evidence": str(shared),
        }
    with plan.store.transaction():
        run, created = queue.enqueue(
            plan.store,
            plan.inputs.resolved,
            plan.inputs.environment,
            plan.inputs.adapter,
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
    spec, environment, dataset = inputs.resolved.spec, inputs.environment, inputs.dataset
    if sample:
        _check_sample(spec)
    check_target(store, spec.target, slurm=bool(spec.slurm))
    needs: list[MemoryNeed | DiskNeed] = []
    if memory := await run_sync(_memory_need, inputs):
        needs.append(memory)
    await report("loading the environment in a child process")
    shown = await probe(spec, environment, dataset, inputs.card, inputs.env_files)
    check_lengths(spec, inputs.card, shown.prompt_tokens)
    estimate = estimate_of(spec, shown, dataset)
    work = work_of(spec, environment.name, estimate.steps, estimate.eval_tasks)
    estimate.regression = work.regression or None
    if time := await run_sync(expected_time, store, work):
        estimate.time = time.priced(store, spec, None)
    if disk := await run_sync(_disk_need, store, inputs, estimate.steps):
        needs.append(disk)
        estimate.disk = str(disk)
    gate = await run_sync(store.gate, environment.digest, spec.environment_args)
    return Plan(store, inputs, shown, estimate, needs, work, gate)


def _inputs(store: Store, arguments: Json, config: Configs, idempotency_key: str | None) -> Inputs:
    resolved, card, dataset = resolved_spec(store, arguments, config)
    first = queue.asked_before(store, resolved, idempotency_key)
    need_on = functools.partial(need_of, resolved.spec)
    resolved, why = placed(store, resolved, need_on, first and first.target)
    spec = resolved.spec
    check_logins(TRACKERS[name] for name in spec.report_to if name in TRACKERS)
    costs.check(spec, store.base)
    # A repeat means the run that is there, also if the name has a newer version by now.
    if first:
        reference, adapter = first.environment_reference, first.init_adapter
        teacher = first.lineage.get("teacher")
    else:
        reference, adapter = spec.environment, init_adapter(store, spec, card)
        teacher = teacher_of(store, spec, card)
    environment = references.environment(store, reference)
    check_gateway(environment, spec.target)
    resolved = for_environment(resolved, environment)
    like = None if first else _likest(store, resolved.spec, environment)
    sources = (resolved, card, dataset, environment, adapter, teacher)
    return Inputs(*sources, why, first is not None, like, config.env_files if spec.secrets else [])


def _likest(store: Store, spec: RunSpec, environment: EnvironmentVersion) -> Like | None:
    """Of the caller's runs that differ in the fewest values an active one, or the newest."""
    ours = {**spec.model_dump(), "environment": environment.reference}
    likest = None
    fewest = (MOST_DIFFERING + 1, False)
    for run in store.trainings_on(environment.name, caller().owner, LOOKED_AT):
        differing = differing_values([run.spec.model_dump(), ours])
        key = (len(differing), run.ended is not None)
        if key < fewest:
            likest, fewest = (run, differing), key
    return likest


def _check_sample(spec: RunSpec) -> None:
    """FlashError if the model cannot try tasks of the run on this machine."""
    if spec.algorithm != "grpo":
        what = "sample works with algorithm=grpo only"
        fix = "leave sample out; evaluate measures what the model does now"
        raise FlashError("invalid_argument", what, fix=fix)
    check_machine()


def _memory_need(inputs: Inputs) -> MemoryNeed | None:
    """On the largest GPU; on a machine without one, of its memory. None if that is not known, or
    the run goes elsewhere. FlashError if this machine cannot hold the run.
    """
    spec = inputs.resolved.spec
    if spec.target != LOCAL_TARGET:
        return None
    _check_gpus(spec, inputs.environment.owner)
    check_architecture(spec.model)
    # Which card it gets is decided later: refuse only what fits none.
    largest = max(gpus(), key=lambda gpu: gpu.memory_gib, default=processor())
    need = need_of(spec, largest)
    # A repeat starts nothing, so nothing has to fit.
    if need and not inputs.is_repeated:
        need.check()
    return need


def _disk_need(store: Store, inputs: Inputs, steps: int) -> DiskNeed | None:
    """None if it is not known, or the run goes elsewhere. FlashError if nothing fits."""
    spec = inputs.resolved.spec
    if spec.target != LOCAL_TARGET:
        return None
    need = disk_need(store, spec, inputs.card, steps)
    if need:
        need.check()
    return need


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
