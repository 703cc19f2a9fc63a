"""All wording of `next`: what to do after a result. Pure functions of records and verdicts.

What follows a run is decided by RULES, of which the first that applies counts; docs/next.md shows
them as a table.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.checks.report import Report as GateReport
from flash_mcp.judgement import attempts
from flash_mcp.judgement.comparison import Change
from flash_mcp.judgement.health import CONTAMINATED, DESTROYED, TRUNCATION, WORSE_ELSEWHERE
from flash_mcp.protocol.records import ACTIVE, Run
from flash_mcp.protocol.spec import default_of
from flash_mcp.state.owners import caller
from flash_mcp.tools.shared.playbook import ADDRESS
from flash_mcp.tools.shared.preflight import Sample
from flash_mcp.tools.shared.run_view import RunReport

LIKE_ITS_OWN = "where all tasks are like its own"
MOST_TRIES = 16
"""Attempts at a task beyond which only more tasks help."""

# -- a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One line of the table: where it applies, and what it says."""

    when: str
    then: str
    applies: Callable[[RunReport], Any]
    says: Callable[[RunReport], str]


def next_of(report: RunReport) -> str:
    return next(rule.says(report) for rule in RULES if rule.applies(report))


def _measurement(report: RunReport) -> Run | None:
    """The finished evaluation of the newest checkpoint."""
    if report.checkpoint is None:
        return None
    own_weights = attempts.weights(report.run, report.checkpoint)
    return next((row for row in _done(report) if _weights(row) == own_weights), None)


def _done(report: RunReport) -> list[Run]:
    """Finished evaluations of the environment that the run trained on."""
    digest = report.run.environment_digest
    results = [row for row in report.near if row.algorithm == "eval" and row.state == "succeeded"]
    return [row for row in results if row.environment_digest == digest]


def _measured(report: RunReport) -> int:
    """Tasks of the newest evaluation within the run."""
    return int(report.held_out[-1].summary["n"]) if report.held_out else 0


def _waiting(report: RunReport) -> str:
    return report.wait or waiting_for(report.run.id)


def command() -> str:
    """How a shell on this machine starts flash-mcp."""
    name = "flash-mcp"
    if shutil.which(name):
        return name
    return str(Path(sys.executable).with_name(name))


def waiting_for(run_id: str, until: str = "news", since: str | None = None) -> str:
    """The call of status that waits. With `since` it waits for news unless told otherwise."""
    arguments = [f"run_id={run_id!r}"]
    if since is None or until != "news":
        arguments.append(f"until={until!r}")
    if since is not None:
        arguments.append(f"since={since!r}")
    return f"status({', '.join(arguments)})"


def _resuming(report: RunReport) -> str:
    """The call that continues the run, and how."""
    run_id = report.run.id
    if report.run.files_removed is not None:
        return "train starts another run: the files of this one were removed"
    if report.checkpoint is None:
        return f"train(resume={run_id!r}) starts it over with its own values"
    if not report.has_optimizer:
        call = f"train(resume={run_id!r}, fresh_optimizer=true)"
        return f"{call} goes on from checkpoint {report.checkpoint} without the optimizer's state"
    return (
        f"train(resume={run_id!r}) goes on from checkpoint {report.checkpoint} with its own values"
    )


def going_on(run: Run, step: int) -> str:
    """The call that starts another run from an adapter of this one, on the same environment."""
    start = {"init_from_adapter": f"{run.id}@{step}"}
    return _train_call(run, start, ("algorithm", "max_tokens"))


def _train_call(run: Run, start: Mapping[str, Any], names: Sequence[str]) -> str:
    """The call that trains on a run's environment, without values that train takes by itself."""
    fields = {"environment": run.environment, **start}
    if run.model != default_of("model"):
        fields["model"] = run.model
    for name in ("environment_args", "dataset", "teacher"):
        fields[name] = getattr(run.spec, name, None)
    fields["secrets"] = run.own_secrets
    if run.mixture:
        fields["settings"] = {"mixture": run.training.mixture}
    for name in names:
        if getattr(run.spec, name) != default_of(name):
            fields[name] = getattr(run.spec, name)
    return f"train({', '.join(f'{name}={value!r}' for name, value in fields.items() if value)})"


def _worst(run: Run) -> str:
    return f"rollouts(run_id={run.id!r}, which='worst')"


def _failing(run: Run) -> str:
    return f"rollouts(run_id={run.id!r}, which='worst', split='eval')"


def _is(*states: str) -> Callable[[RunReport], bool]:
    return lambda item: item.run.algorithm != "eval" and item.run.state in states


def _is_evaluation(*states: str) -> Callable[[RunReport], bool]:
    return lambda item: item.run.algorithm == "eval" and item.run.state in states


def _succeeded(outcome: str | None) -> Callable[[RunReport], bool]:
    """Of a training run whose held-out success changed so; None: it was not measured twice."""

    def applies(report: RunReport) -> bool:
        judged = report.change.outcome if report.change else None
        return _is("succeeded")(report) and judged == outcome

    return applies


def _problem(report: RunReport) -> str:
    assert report.problem is not None
    seen = f"{report.problem.name}: see {_worst(report.run)} and {ADDRESS}/reading-a-run"
    if report.problem.name == DESTROYED:
        seen = f"{DESTROYED}: its flag says what to change"
    if report.run.state == "succeeded":
        if report.problem.name == TRUNCATION and _measurement(report):
            return f"{TRUNCATION}: {_against_the_start(report)}"
        if report.problem.name == TRUNCATION and _measured(report) and report.checkpoint:
            model, tokens = f"{report.run.id}@{report.checkpoint}", report.run.spec.max_tokens
            return f"{TRUNCATION}: evaluate(model={model!r}, max_tokens={4 * tokens}) has room"
        return f"{seen}; train again with its remedy"
    if report.change and report.change.outcome == "improved":
        return f"the held-out success rose; mind {seen}; {_waiting(report)}"
    return (
        f"{seen}; cancel(run_id={report.run.id!r}) if it is not worth its time; {_waiting(report)}"
    )


def _after_cancel(report: RunReport) -> str:
    if report.checkpoint is None or report.run.files_removed is not None:
        return _resuming(report)
    return f"{_resuming(report)}; {_serving(report)} serves it"


def _unmeasured(report: RunReport) -> str:
    run = report.run
    if _measurement(report):
        return _against_the_start(report)
    if _measured(report) and run.training.eval_after and report.checkpoint is not None:
        start = f"evaluate(model='{run.id}@0', limit={_measured(report)})"
        then = f"compare(base=its run_id, other={run.id!r})"
        return f"it was measured at its end; {start} measures the start alike, then {then}"
    if report.split_size != 0 and report.checkpoint is not None:
        measured = f"evaluate(model={run.id!r}) measures it on held-out tasks"
        return f"{measured}, and compare sets it against the base model"
    serves = f"deploy(run_id={run.id!r}) serves it"
    if report.checkpoint is None:
        serves = "it saved no checkpoint that could be served"
    if run.algorithm == "sft":  # it has no rollouts
        return serves
    return f"rollouts(run_id={run.id!r}, which='best') shows what was learnt; {serves}"


def _against_the_start(report: RunReport) -> str:
    trained = _measurement(report)
    assert trained is not None
    start = attempts.weights(report.run, 0)
    comparable = (row for row in _done(report) if _weights(row) == start)
    base = next((row for row in comparable if _differ_in_model_alone(row, trained)), None)
    if base:
        call = f"compare(base={base.id!r}, other={trained.id!r})"
        return f"{call} says whether training helped: both were measured"
    same = measuring(f"{report.run.id}@0", trained)
    return f"{trained.id} measured it; {same} measures the start alike, then compare"


def _undecided(report: RunReport) -> str:
    if _measurement(report):
        return _against_the_start(report)
    assert report.change is not None
    run = report.run
    models = (f"{run.id}@0", f"{run.id}@{report.checkpoint}")
    if report.checkpoint is None:
        return f"about {report.change.decide_n} tasks would decide, and it saved no checkpoint"
    return _more(models, run, report.change, _measured(report), report.split_size)


def _unchanged(report: RunReport) -> str:
    advice = f"{_failing(report.run)} shows what still fails; change one thing and train again"
    if report.best:
        advice += f"; {_serving(report)} serves the best checkpoint"
    return advice


def _forgot(report: RunReport) -> str:
    advice = f"{WORSE_ELSEWHERE}: train again with its remedy (see flags)"
    if _succeeded("improved")(report) and report.checkpoint is not None:
        advice += f"; {_serving(report)} serves it {LIKE_ITS_OWN}"
    return advice


def _improved(report: RunReport) -> str:
    if report.deployment:
        return f"chat(deployment={report.deployment!r}, side_by_side=true) shows the base too"
    return f"{_serving(report)}, then chat with the base model beside it"


def _serving(report: RunReport) -> str:
    step = f", step={report.best}" if report.best else ""
    return f"deploy(run_id={report.run.id!r}{step})"


def _awaited(report: RunReport) -> str:
    run = report.run
    earlier = [row for row in report.near if row.created < run.created]
    # Another owner's earlier run need not start first.
    own = (row for row in earlier if row.owner == run.owner)
    ahead = next((row for row in own if row.ended is None), None)
    waits = f"; it waits for {ahead.id}" if ahead and run.state == "queued" else ""
    call = report.wait or waiting_for(run.id, "end")
    return f"{call} has the scores once they are there{waits}"


def _repeated_evaluation(report: RunReport) -> str:
    run = report.run
    again = f"{measuring(model_of(run, 0), run)} measures it again"
    if run.state == "failed":
        return f"act on error, then {again}"
    return again


def _after_scores(report: RunReport) -> str:
    run = report.run
    if "exam" in run.lineage:
        return (
            "train on, and take the exam again with a checkpoint that your own eval split favours"
        )
    failures = f"{_worst(run)} shows what fails"
    earlier = [row for row in report.near if row.created < run.created]
    partner = next((row for row in earlier if _differ_in_model_alone(row, run)), None)
    if run.evaluation.is_sample and report.problem:
        return f"do not train on these yet: {report.problem.remedy}; {failures}"
    if run.evaluation.split == "train":
        start = {"init_from_adapter": run.evaluation.checkpoint}
        return f"{failures}; {_train_call(run, start, ('max_tokens',))} trains on these tasks"
    if partner is None:
        return f"{failures}; evaluate another model on the same tasks, then compare"
    # The less trained is the base: without an adapter, then before training, then the earlier.
    pair = (partner, run)
    base, other = sorted(pair, key=lambda it: (bool(it.init_adapter), it.evaluation.step > 0))
    return f"compare(base={base.id!r}, other={other.id!r}) says whether it differs; {failures}"


RULES = (
    Rule(
        "something holds it up: no supervisor, a full disk, secrets",
        "do what `warnings` says, then wait",
        lambda item: item.blocked,
        lambda item: f"do what the first of warnings says; then {_waiting(item)}",
    ),
    Rule("an evaluation that has not ended", "wait for its end", _is_evaluation(*ACTIVE), _awaited),
    Rule(
        "an evaluation that failed or was cancelled",
        "`evaluate` with the same values",
        _is_evaluation("failed", "cancelled"),
        _repeated_evaluation,
    ),
    Rule(
        "an evaluation",
        "`compare` with a stored one that differs in the model alone; `rollouts`",
        _is_evaluation("succeeded"),
        _after_scores,
    ),
    Rule(
        "failed",
        "act on the error's fix, `train(resume=...)`",
        _is("failed"),
        lambda item: f"act on error.fix, then {_resuming(item)}",
    ),
    Rule(
        "cancelled",
        "`train(resume=...)`; `deploy` if it saved a checkpoint",
        _is("cancelled"),
        _after_cancel,
    ),
    Rule(
        "the splits share tasks",
        "take them out, `env_test`, `env_push`, train again",
        lambda item: item.has(CONTAMINATED),
        lambda item: (
            "take the shared tasks out of one of the splits, env_test, env_push and train again:"
            " see flags"
        ),
    ),
    Rule(
        "under way, with a new problem",
        "`rollouts`; `cancel`, or wait on",
        lambda item: _is(*ACTIVE)(item) and item.problem,
        _problem,
    ),
    Rule(
        "under way, with a new warning",
        "`rollouts`, then wait on",
        lambda item: _is(*ACTIVE)(item) and item.flags,
        lambda item: (
            f"{', '.join(flag.name for flag in item.flags)}: {_worst(item.run)} shows why; "
            f"{_waiting(item)} waits on"
        ),
    ),
    Rule("under way", "wait for news", _is(*ACTIVE), _waiting),
    Rule(
        "succeeded, and got worse at other kinds of tasks",
        "train again with the remedy; `deploy` if it is `improved`",
        lambda item: _is("succeeded")(item) and item.has(WORSE_ELSEWHERE),
        _forgot,
    ),
    Rule(
        "succeeded with a problem, and held-out success was not measured or is `underpowered`",
        "`rollouts`, train again with the remedy; where held-out answers were cut off, `evaluate` "
        "with more room",
        lambda item: item.problem and (_succeeded(None)(item) or _succeeded("underpowered")(item)),
        _problem,
    ),
    Rule(
        "succeeded, and held-out success was not measured",
        "`evaluate`; where the newest checkpoint was evaluated, the start alike; where both were, "
        "`compare`; without an eval split `rollouts` and `deploy`",
        _succeeded(None),
        _unmeasured,
    ),
    Rule(
        "`improved`",
        "`deploy` of the best checkpoint, or `chat` if it is served",
        _succeeded("improved"),
        _improved,
    ),
    Rule(
        "`constant`: it rose no further than one constant answer does",
        "`rollouts`; balance the tasks, `env_push` and train again",
        _succeeded("constant"),
        lambda item: (
            f"{_failing(item.run)} shows what it says; serve nothing yet: let no answer be right "
            "more often than others in the tasks, env_push and train again, or take a larger model"
        ),
    ),
    Rule(
        "`underpowered`",
        "`evaluate` both on the tasks that would decide; where the split has no more, with more "
        f"attempts at each, up to {MOST_TRIES}; then more tasks. Where both were evaluated, "
        "`compare`",
        _succeeded("underpowered"),
        _undecided,
    ),
    Rule("`no_change` or `regressed`", "`rollouts`", _is("succeeded"), _unchanged),
)


def after_train(run: Run, after: str, *, created: bool) -> str:
    """`after` is what follows a run that has ended."""
    if run.ended is None:
        shell = f"; in a shell: `{command()} wait {run.id}`" if caller().is_local else ""
        return f"{waiting_for(run.id)} follows it{shell}; cancel ends it"
    result = f"{run.id} {run.state} before"
    if created:
        return f"{result}: {after}"
    return f"{result}, and the key stands for it: {after}; another idempotency_key starts another"


# -- evaluations -----------------------------------------------------------------------------------


def _weights(evaluation: Run) -> tuple[str, str | None, int | None]:
    return attempts.weights(evaluation, evaluation.evaluation.step)


def _differ_in_model_alone(one: Run, other: Run) -> bool:
    """Whether `one` is a finished evaluation that compare can set against `other`."""
    if one.algorithm != "eval" or one.state != "succeeded":
        return False
    if _tasks(one) != _tasks(other) or attempts.differing(one, other):
        return False
    return _weights(one) != _weights(other)


def _tasks(evaluation: Run) -> tuple[str, str, str]:
    return evaluation.environment, evaluation.environment_digest, evaluation.evaluation.split


def model_of(run: Run, step: int) -> str:
    """How evaluate names what was evaluated."""
    if run.algorithm == "eval":
        return run.evaluation.checkpoint or run.model
    return f"{run.id}@{step}"


def measuring(model: str, like: Run, *, count: int | None = None, tries: int | None = None) -> str:
    """The call that evaluates `model` as `like` was made, on `count` tasks with `tries` attempts at
    each, where they are given. What evaluate takes by itself is left out.
    """
    chosen = attempts.settings(like)
    if tries is not None:
        chosen |= {"attempts": tries, "temperature": 1.0}
    if count is None and like.algorithm == "eval":
        tasks = like.evaluation.tasks
        if tasks == list(range(len(tasks))):  # the first of the split
            count = len(tasks) or None
    usual = _usual(model, like, chosen)
    for name, value in usual.items():
        if chosen.get(name) == value:
            del chosen[name]
    places = {
        "environment": None if model.startswith(f"{like.id}@") else like.environment_reference,
        "model": model,
        "split": None if like.eval_split == "eval" else like.eval_split,
        "limit": count,
        "secrets": like.own_secrets or None,
    }
    arguments: list[str] = []
    for name, value in (places | chosen).items():
        if value is None:
            continue
        text = repr(value)
        if len(text) > 300:  # environment_args
            text = f"<that of {like.id}>"
        arguments.append(f"{name}={text}")
    return f"evaluate({', '.join(arguments)})"


def _usual(model: str, like: Run, chosen: dict[str, Any]) -> dict[str, Any]:
    """What evaluate takes by itself for `model`, as far as that does not depend on a run."""
    temperature = 0.0 if chosen["attempts"] == 1 else 1.0
    usual: dict[str, Any] = {"attempts": 1, "temperature": temperature}
    if not chosen["temperature"]:
        usual["top_p"] = chosen["top_p"]  # greedy decoding has no nucleus
    if model.startswith(f"{like.id}@"):
        return chosen | usual
    if "@" in model:
        return usual
    fields = ("top_p", "max_tokens", "stop_sequences", "thinking", "environment_args")
    return {name: default_of(name) for name in fields} | usual


def _more(models: Sequence[str], like: Run, change: Change, measured: int, size: int | None) -> str:
    """How to measure two models, made as `like` and `measured` tasks of it were, so that the change
    is decided. `size` is that of the split, if it is known.
    """
    needed = change.decide_n or 0
    split = like.eval_split
    tries: int = attempts.settings(like)["attempts"]
    # env_push recorded the size: other environment_args may have given this run more tasks.
    size = None if size is not None and size < measured else size
    has_more = size is None or size > measured
    if has_more and (size is None or size >= needed):
        both = _all(measuring(model, like, count=needed) for model in models)
        unsure = " (if the split has so many)" if size is None else ""
        return f"about {needed} tasks would decide{unsure}: {both}, then compare"
    adding = f"add tasks to the {split} split and env_push"
    few = f"about {needed} tasks would decide and the {split} split has no more than {size}"
    if tries >= MOST_TRIES:
        return f"{few}: {adding}"
    count = size if has_more else None
    tries = min(MOST_TRIES, max(4, 2 * tries))
    both = _all(measuring(model, like, count=count, tries=tries) for model in models)
    return f"{few}: {both}, then compare; or {adding}"


def _all(calls: Iterable[str]) -> str:
    """Each call once: both sides may be of one model."""
    return " and ".join(dict.fromkeys(calls))


# -- a comparison ----------------------------------------------------------------------------------


def after_comparison(
    change: Change,
    models: tuple[str, str],
    like: Run,
    differing: Sequence[str],
    measured: int,
    split_size: int | None,
    is_worse: bool = False,
) -> str:
    """`measured` tasks were compared; `split_size` is the number in the split, if it is known.
    `is_worse`: the second model got worse at other kinds of tasks.
    """
    if change.outcome == "underpowered":
        more = _more(models, like, change, measured, split_size)
        return f"claim no change ({ADDRESS}/evaluate); {more}"
    if differing:
        names = ", ".join(differing)
        return f"both are one model, so the change says nothing of training: it is of {names}"
    name, at, step = models[1].partition("@")
    if change.outcome == "improved" and at and int(step):
        serves = f"deploy(run_id={name!r}, step={step}) serves it"
        if is_worse:
            remedy = f"status(run_id={name!r}) has the remedy"
            return f"{WORSE_ELSEWHERE}: {remedy}; {serves} {LIKE_ITS_OWN}"
        return serves
    return "change one thing and train again"


def repeated(model: str, like: Run, differing: Sequence[str], *, is_base: bool = True) -> str:
    """The call that evaluates one side again, by its model, as the other side was made."""
    side, other = ("base", "other") if is_base else ("other", "base")
    return (
        f"claim nothing and deploy nothing: the two differ in {', '.join(differing)}; "
        f"{measuring(model, like)} repeats {side} as {other} was made, "
        f"then compare({side}=its run_id, {other}={like.id!r})"
    )


# -- a sample before training ----------------------------------------------------------------------


def after_sample(sampled: Sample) -> str:
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
        return f"do not start yet: {sampled.findings[0].remedy} ({ADDRESS}/sample)"
    return f"rollouts(run_id={run_id!r}) shows what it wrote; train starts the run"


# -- an environment --------------------------------------------------------------------------------


def passed_on(secrets: Iterable[str] | None, environment_args: Mapping[str, Any] | None) -> str:
    """Arguments that a call which loads the environment needs too; secrets by name alone."""
    names = list(secrets or ())
    arguments = f", secrets={names!r}" if names else ""
    if environment_args:
        arguments += f", environment_args={json.dumps(environment_args, ensure_ascii=False)}"
    return arguments


def after_test(report: GateReport, environment: str | None, path: Path, needed: str) -> str:
    if report.failed:
        return f"correct what {report.failed[0]} says, then env_test again ({ADDRESS}/environment)"
    if report.unfinished:
        tested = f"environment={environment!r}" if environment else f"folder={str(path)!r}"
        call = f"env_test({tested}, time_s=600{needed})"
        return f"{call} finishes {', '.join(report.unfinished)}; or make its calls faster"
    if environment is None:
        return f"env_push(name=..., folder={str(path)!r}{needed})"
    return f"train(environment={environment!r}, validate_only=true{needed})"
