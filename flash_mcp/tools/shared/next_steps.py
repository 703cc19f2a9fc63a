"""All wording of `next`: what to do after a result. Pure functions of records and verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_mcp.judgement import attempts
from flash_mcp.judgement.comparison import Change
from flash_mcp.judgement.health import Flag
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import default_of
from flash_mcp.tools.shared.preflight import Sample

# -- a run -----------------------------------------------------------------------------------------


def after_status(
    run: Run, flags: Sequence[Flag], change: Change | None, has_checkpoint: bool
) -> str:
    """`change` is that of the held-out success, unless it cannot be trusted."""
    run_id = run.id
    if run.state == "failed":
        resume = f"; its checkpoints stay: {going_on(run)} goes on from the newest"
        return f"act on error.fix, then train again{resume if has_checkpoint else ''}"
    if run.state == "cancelled":
        return f"deploy(run_id={run_id!r}) or {going_on(run)}" if has_checkpoint else "train again"
    if any(flag.name == "contaminated_split" for flag in flags):
        cleaned = "take the shared tasks out of one of the splits, env_test, env_push"
        return f"{cleaned} and train again: see flags"
    problem = next((flag for flag in flags if flag.severity == "problem"), None)
    is_done = run.state == "succeeded"
    if is_done and (change or not problem):
        return _after_success(run, change)
    if problem:
        end = "train again with its remedy" if is_done else "cancel if it is not worth its time"
        return f"{problem.name}: see {_worst(run)}; {end}"
    return f"{waiting_for(run_id)} returns at news"


def waiting_for(run_id: str, until: str = "news", since: str | None = None) -> str:
    """The call of status that waits. With `since` it waits for news unless told otherwise."""
    given = [f"run_id={run_id!r}"]
    if since is None or until != "news":
        given.append(f"until={until!r}")
    if since is not None:
        given.append(f"since={since!r}")
    return f"status({', '.join(given)})"


def _after_success(run: Run, change: Change | None) -> str:
    run_id = run.id
    if change is None and run.algorithm == "sft":
        measured = f"evaluate(model={run_id!r}) measures it on held-out tasks"
        return f"{measured}, and compare sets it against the base model"
    if change is None:
        best = f"rollouts(run_id={run_id!r}, which='best') shows what was learnt"
        return f"{best}; deploy(run_id={run_id!r}) serves it"
    if change.outcome == "improved":
        return f"deploy(run_id={run_id!r}), then chat with the base model beside it"
    if change.outcome == "underpowered":
        call = f"evaluate(environment={run.environment!r}, model={run_id!r})"
        needed = f"about {change.decide_n} eval tasks would decide"
        return f"{needed}: {call} and with model='{run_id}@0', then compare"
    failing = f"rollouts(run_id={run_id!r}, which='worst', split='eval')"
    return f"{failing} shows what still fails; change one thing and train again"


def _worst(run: Run) -> str:
    return f"rollouts(run_id={run.id!r}, which='worst')"


def going_on(run: Run, step: int | None = None) -> str:
    """The call that starts another run of the same shape from an adapter of this one, by default
    the newest.
    """
    spec = run.training
    start = run.id if step is None else f"{run.id}@{step}"
    fields = {"environment": run.environment, "init_from_adapter": start}
    if run.model != default_of("model"):
        fields["model"] = run.model
    for name in ("environment_args", "secrets", "dataset"):
        if value := getattr(spec, name):
            fields[name] = value
    for name in ("algorithm", "max_tokens", "lora_rank", "lora_alpha"):
        if getattr(spec, name) != default_of(name):
            fields[name] = getattr(spec, name)
    return f"train({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


# -- an evaluation ---------------------------------------------------------------------------------


def after_evaluation(run: Run, near: Sequence[Run]) -> str:
    """What to do next with an evaluation; `near` are those of Store.near."""
    run_id = run.id
    earlier = [row for row in near if row.created < run.created]
    if run.ended is None:
        # Another owner's earlier run need not start first.
        own = (row for row in earlier if row.owner == run.owner)
        ahead = next((row for row in own if row.ended is None), None)
        waits = f"; it waits for {ahead.id}" if ahead and run.state == "queued" else ""
        return f"{waiting_for(run_id, 'end')} has the scores once they are there{waits}"
    if run.state == "failed":
        return f"status(run_id={run_id!r}) has the evidence; act on it, then evaluate again"
    if run.state == "cancelled":
        return "evaluate starts another; the attempts made so far are in no result"
    failures = f"{_worst(run)} shows what fails"
    partner = next((row for row in earlier if _differ_in_model_alone(row, run)), None)
    if partner is None:
        return f"{failures}; evaluate another model on the same tasks, then compare"
    # The less trained is the base: without an adapter, then before training, then the earlier.
    base, other = sorted((partner, run), key=_training)
    return f"compare(base={base.id!r}, other={other.id!r}) says whether it differs; {failures}"


def _training(evaluation: Run) -> tuple[bool, bool]:
    return bool(evaluation.init_adapter), evaluation.evaluation.step > 0


def _differ_in_model_alone(one: Run, other: Run) -> bool:
    """Whether `one` is a finished evaluation that compare can set against `other`."""
    if one.algorithm != "eval" or one.state != "succeeded":
        return False
    if _tasks(one) != _tasks(other) or attempts.differing(one, other):
        return False
    return attempts.weights(one, one.evaluation.step) != attempts.weights(
        other, other.evaluation.step
    )


def _tasks(evaluation: Run) -> tuple[str, str, str]:
    return evaluation.environment, evaluation.environment_digest, evaluation.evaluation.split


# -- a comparison ----------------------------------------------------------------------------------


def after_comparison(
    change: Change, other: Run, step: int, differing: Sequence[str], split_size: int | None
) -> str:
    """`split_size` is the number of tasks in the split, if it is known."""
    trained = other.evaluation.checkpoint if other.algorithm == "eval" else f"{other.id}@{step}"
    if change.outcome == "underpowered":
        more = _more_tasks(change.decide_n or 0, other, split_size)
        return f"claim no change; {more}, then compare"
    if differing:
        names = ", ".join(differing)
        return f"both are one model, so the change says nothing of training: it is of {names}"
    if change.outcome == "improved" and trained and step:
        name, _, at = trained.partition("@")
        return f"deploy(run_id={name!r}, step={at}) serves it"
    return "change one thing and train again"


def _task_count(run: Run) -> int:
    return len(run.evaluation.tasks) if run.algorithm == "eval" else 0


def _more_tasks(needed: int, run: Run, size: int | None) -> str:
    # The size was recorded by env_push: other environment_args may have given this run more tasks.
    if size is None or size >= needed or size < _task_count(run):
        return f"evaluate both on about {needed} tasks (several attempts at each narrow it too)"
    split = run.eval_split
    return (
        f"about {needed} tasks would decide and the {split} split has no more than {size}: "
        f"evaluate both on all {size} with more attempts at each and a temperature above 0, "
        f"or add tasks to the {split} split and env_push"
    )


def repeated(base: Run, step: int, other: Run, differing: Sequence[str]) -> str:
    """The call that evaluates base again with the settings of other."""
    model = f"{base.id}@{step}"
    if base.algorithm == "eval":
        model = base.evaluation.checkpoint or base.model
    chosen = {
        "environment": other.environment_reference,
        "model": model,
        "split": other.eval_split,
        **attempts.settings(other),
    }
    if other.spec.secrets:
        chosen["secrets"] = other.spec.secrets
    count = _task_count(other)
    if count and other.evaluation.tasks == list(range(count)):
        chosen["limit"] = count
    given: list[str] = []
    for name, value in chosen.items():
        text = repr(value)
        if len(text) > 300:  # environment_args
            text = f"<that of {other.id}>"
        given.append(f"{name}={text}")
    return (
        f"claim nothing and deploy nothing: the two differ in {', '.join(differing)}; "
        f"evaluate({', '.join(given)}) repeats base as other was made, "
        f"then compare(base=its run_id, other={other.id!r})"
    )


# -- a sample before training ----------------------------------------------------------------------


def after_sample(sampled: Sample) -> str:
    """What to do next with a sample of groups."""
    run_id = sampled.run_id
    state = sampled.state
    if state in ("failed", "cancelled"):
        why = f"status(run_id={run_id!r}) says why the sample {state}"
        return f"{why}; the same call tries again"
    if sampled.outlook is None:
        waits = f"{waiting_for(run_id, 'end')} waits for it"
        now = "is queued behind other runs" if state == "queued" else "is under way"
        return f"the sample {now}: {waits}; then the same call again reads it"
    if sampled.outlook == "hopeless" and sampled.findings:
        return f"do not start yet: {sampled.findings[0].remedy}"
    return f"rollouts(run_id={run_id!r}) shows what it wrote; train starts the run"


# -- an environment --------------------------------------------------------------------------------


def passed_on(secrets: Iterable[str] | None, environment_args: Mapping[str, Any] | None) -> str:
    """The arguments of this call that a call which loads the environment needs too; secrets by name
    alone.
    """
    names = list(secrets or ())
    given = f", secrets={names!r}" if names else ""
    if environment_args:
        given += f", environment_args={json.dumps(environment_args, ensure_ascii=False)}"
    return given


def after_test(failed: Sequence[str], environment: str | None, path: Path, needed: str) -> str:
    if failed:
        return f"mend what {failed[0]} says, then env_test again"
    if environment is None:
        return f"env_push(name=..., folder={str(path)!r}{needed})"
    return f"train(environment={environment!r}, validate_only=true{needed})"
