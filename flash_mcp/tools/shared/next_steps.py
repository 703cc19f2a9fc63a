"""All wording of `next`: what to do after a result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flash_mcp.judgement import attempts as evaluations
from flash_mcp.judgement import health
from flash_mcp.judgement.comparison import Comparison
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import default_of
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.scores import Change


def after_evaluation(store: Store, run: Run) -> str:
    """What to do next with an evaluation."""
    run_id = run.id
    if run.ended is None:
        ahead = [
            row.id for row in store.active_runs() if row.id != run_id and row.created < run.created
        ]
        waits = f"; it waits for {ahead[0]}" if run.state == "queued" and ahead else ""
        return f"status(run_id={run_id!r}, wait_s=40) has the scores once they are there{waits}"
    if run.state == "failed":
        return f"status(run_id={run_id!r}) has the evidence; act on it, then evaluate again"
    if run.state == "cancelled":
        return "evaluate starts another; the attempts made so far are in no result"
    failures = f"rollouts(run_id={run_id!r}, which='worst') shows what fails"
    others = [
        row
        for row in store.runs("succeeded", limit=50)
        if row.algorithm == "eval"
        and row.created < run.created
        and _differ_in_model_alone(row, run)
    ]
    if others:
        # The less trained is the base: without an adapter, then before training, then the earlier.
        base, other = sorted(
            (others[0], run), key=lambda row: (bool(row.init_adapter), row.spec["step"] > 0)
        )
        return f"compare(base={base.id!r}, other={other.id!r}) says whether it differs; {failures}"
    return f"{failures}; evaluate another model on the same tasks, then compare"


def _differ_in_model_alone(one: Run, other: Run) -> bool:
    alike = (one.environment, one.environment_digest) == (
        other.environment,
        other.environment_digest,
    )
    models = [evaluations.weights(run, run.spec["step"]) for run in (one, other)]
    same_split = one.spec["split"] == other.spec["split"]
    return alike and same_split and models[0] != models[1] and not evaluations.differing(one, other)


def after_comparison(
    store: Store, found: Change, other: Run, step: int, differing: list[str]
) -> str:
    trained = other.spec["checkpoint"] if other.algorithm == "eval" else f"{other.id}@{step}"
    if found.outcome == "underpowered":
        return f"claim no change; {_more_tasks(store, found.decide_n or 0, other)}, then compare"
    if differing:
        return f"both are one model, so the change says nothing of training: it is of {', '.join(differing)}"
    if found.outcome == "improved" and trained and step:
        name, _, at = trained.partition("@")
        return f"deploy(run_id={name!r}, step={at}) serves it"
    return "change one thing and train again"


def _more_tasks(store: Store, needed: int, run: Run) -> str:
    split = run.spec.get("split", "eval")
    try:
        recorded = store.environment(f"{run.environment}@{run.environment_digest}").data
    except FlashError:  # it was removed
        recorded = {}
    size: int | None = recorded.get("tasks", {}).get(split)
    # Recorded when it was pushed: other environment_args may have given this evaluation more.
    if size is None or size >= needed or size < len(run.spec.get("tasks", ())):
        return f"evaluate both on about {needed} tasks (several attempts at each narrow it too)"
    return (
        f"about {needed} tasks would decide and the {split} split has no more than {size}: evaluate both on all {size} "
        f"with more attempts at each and a temperature above 0, or add tasks to the {split} split and env_push"
    )


def repeated(base: Run, step: int, other: Run, differing: list[str]) -> str:
    """The call that evaluates base again with the settings of other."""
    spec = base.spec
    model = (spec["checkpoint"] or base.model) if base.algorithm == "eval" else f"{base.id}@{step}"
    chosen = {
        "environment": f"{other.environment}@{other.environment_digest}",
        "model": model,
        "split": other.spec.get("split", "eval"),
        **evaluations.settings(other),
        **({"secrets": other.spec["secrets"]} if other.spec["secrets"] else {}),
    }
    tasks = other.spec.get("tasks")
    if tasks and tasks == list(range(len(tasks))):
        chosen["limit"] = len(tasks)
    long = f"<that of {other.id}>"  # environment_args may be too long to repeat
    given = ", ".join(
        f"{name}={text if len(text := repr(value)) <= 300 else long}"
        for name, value in chosen.items()
    )
    return (
        f"claim nothing and deploy nothing: the two differ in {', '.join(differing)}; evaluate({given}) "
        f"repeats base as other was made, then compare(base=its run_id, other={other.id!r})"
    )


def after_status(
    run: Run, flags: list[health.Flag], verdict: Comparison | None, has_checkpoint: bool
) -> str:
    run_id, state = run.id, run.state
    if state == "failed":
        resume = (
            f"; its checkpoints stay: {going_on(run)} goes on from the newest"
            if has_checkpoint
            else ""
        )
        return f"act on error.fix, then train again{resume}"
    if state == "cancelled":
        return f"deploy(run_id={run_id!r}) or {going_on(run)}" if has_checkpoint else "train again"
    if any(flag.name == "contaminated_split" for flag in flags):
        return "take the shared tasks out of one of the splits, env_test, env_push and train again: see flags"
    problem = next((flag for flag in flags if flag.severity == "problem"), None)
    if state == "succeeded" and (verdict or not problem):
        return _after_success(run, verdict)
    if problem:
        end = (
            "train again with its remedy"
            if state == "succeeded"
            else "cancel if it is not worth its time"
        )
        return f"{problem.name}: see rollouts(run_id={run_id!r}, which='worst'); {end}"
    return f"status(run_id={run_id!r}, wait_s=40) returns at the next change"


def going_on(run: Run, step: int | None = None) -> str:
    """The call that starts another run of the same shape from an adapter of this one, by default
    the newest.
    """
    spec = run.spec
    start = run.id if step is None else f"{run.id}@{step}"
    fields = {"environment": run.environment, "init_from_adapter": start}
    if run.model != default_of("model"):
        fields["model"] = run.model
    fields |= {
        name: spec[name] for name in ("environment_args", "secrets", "dataset") if spec.get(name)
    }
    shape = ("algorithm", "max_tokens", "lora_rank", "lora_alpha")
    fields |= {name: spec[name] for name in shape if spec[name] != default_of(name)}
    return f"train({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _after_success(run: Run, verdict: Comparison | None) -> str:
    run_id = run.id
    if verdict is None and run.algorithm == "sft":
        return f"evaluate(model={run_id!r}) measures it on held-out tasks, and compare sets it against the base model"
    if verdict is None:
        return f"rollouts(run_id={run_id!r}, which='best') shows what was learnt; deploy(run_id={run_id!r}) serves it"
    if verdict.outcome == "improved":
        return f"deploy(run_id={run_id!r}), then chat with the base model beside it"
    if verdict.outcome == "underpowered":
        call = f"evaluate(environment={run.environment!r}, model={run_id!r}) and with model='{run_id}@0'"
        return f"about {verdict.decide_n} eval tasks would decide: {call}, then compare"
    failing = f"rollouts(run_id={run_id!r}, which='worst', split='eval')"
    return f"{failing} shows what still fails; change one thing and train again"


def passed_on(secrets: Iterable[str] | None, environment_args: Mapping[str, Any] | None) -> str:
    """What a call that loads the environment has to be given as well, as this one was; secrets by
    name alone.
    """
    names = list(secrets or ())
    return (f", secrets={names!r}" if names else "") + (
        f", environment_args={json.dumps(environment_args, ensure_ascii=False)}"
        if environment_args
        else ""
    )


def after_test(failed: list[str], environment: str | None, path: Path, needed: str) -> str:
    if failed:
        return f"mend what {failed[0]} says, then env_test again"
    if environment is None:
        return f"env_push(name=..., folder={str(path)!r}{needed})"
    return f"train(environment={environment!r}, validate_only=true{needed})"
