"""evaluate and compare: how good a model is on an environment's tasks, and whether another one is better."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from pydantic import Field

from flash_mcp import comparison, evaluations, judge, named, queue, stats, vault
from flash_mcp.errors import FlashError
from flash_mcp.evaluations import Subject, Try
from flash_mcp.runfolder import Json
from flash_mcp.spec import DEFAULT_MODEL, ResolvedEval
from flash_mcp.store import EnvironmentRow, EvalRow, RunRow, Store, open_store
from flash_mcp.supervisor import ensure_supervisor
from flash_mcp.tools import Part, Result, Tool, report, shorten, to_text
from flash_mcp.tools.loading import Arguments, Secrets, check_machine, loaded, secret_values

POLL_S = 0.25
WAIT_LIMIT_S = 42.0
LOAD_TIMEOUT_S = 20.0
MOST_ATTEMPTS = 50_000
FLIP_CHARACTERS = 4200
"""Of transcripts in one comparison."""


class Scores(Part):
    """What an evaluation found. Attempts that failed in environment code are counted in `errors` and nowhere else."""

    tasks: int = Field(description="Tasks with at least one attempt that the environment did not fail.")
    n: int = Field(description="Attempts that the rates are over.")
    success: float | None = Field(default=None, description="Share of attempts that succeeded.")
    low: float | None = Field(default=None, description="Wilson 95 % interval of success; tasks are the unit.")
    high: float | None = Field(default=None, description="Its upper end.")
    reward: float | None = Field(default=None, description="Mean reward.")
    pass_at: dict[str, float] | None = Field(
        default=None, description="pass@k, unbiased: chance that one of k attempts succeeds."
    )
    uniform_share: float | None = Field(
        default=None, description="Share of tasks whose attempts all got the same reward: nothing to learn for GRPO."
    )
    never_solved: int | None = Field(default=None, description="With several attempts: tasks without a success.")
    always_solved: int | None = Field(default=None, description="With several attempts: tasks without a failure.")
    tokens_mean: float | None = Field(default=None, description="Tokens that the model wrote in an attempt.")
    tokens_most: int | None = Field(default=None, description="In the longest attempt.")
    turns: float | None = Field(default=None, description="Mean number of model turns.")
    truncated: float | None = Field(default=None, description="Share cut off at max_tokens or max_length.")
    errors: int = Field(description="Attempts that failed in environment code; left out of all rates.")
    error_codes: dict[str, int] | None = Field(default=None, description="How often each error came.")
    tokens_per_s: float | None = Field(default=None, description="Generation speed.")


class Evaluate(Result):
    """An evaluation, finished or under way."""

    run_id: str = Field(description="The evaluation: a run like others; pass to status, rollouts, cancel, compare.")
    state: str = Field(description="queued, starting, running, succeeded, failed or cancelled.")
    created: bool = Field(description="False where idempotency_key found an earlier one.")
    environment: str = Field(description="NAME@DIGEST.")
    of: str = Field(description="The model that is evaluated, in words.")
    split: str
    tasks: int = Field(description="Tasks to be attempted.")
    attempts: int = Field(description="Attempts at each.")
    done: int = Field(description="Attempts made so far.")
    values: dict[str, Any] = Field(description="How it is sampled and limited.")
    scores: Scores | None = Field(default=None, description="Once it has finished.")
    error: str | None = Field(default=None, description="Why it failed.")
    notes: list[str] | None = Field(default=None, description="What is worth a thought.")


class Side(Part):
    """One side of a comparison."""

    run_id: str
    step: int = Field(description="Step that was evaluated; 0 is before training.")
    of: str = Field(description="The model, in words.")
    environment: str
    tasks: int
    attempts: int = Field(description="Attempts at each task.")
    success: float
    band: float = Field(description="Noise: 1.96 sqrt(p(1-p)/tasks).")
    reward: float
    errors: int | None = Field(default=None, description="Attempts left out because environment code failed.")


class Change(Part):
    """How much one metric differs: other - base."""

    outcome: comparison.Outcome = Field(
        description="no_change: smaller than min_change; underpowered: too few tasks to say anything."
    )
    change: float
    low: float = Field(description="95 % interval.")
    high: float
    test: comparison.Test
    p: float | None = Field(default=None, description="Of McNemar's exact test.")
    decide_n: int | None = Field(default=None, description="Where underpowered: tasks that would decide.")
    explanation: str


class Flip(Part):
    """A task that came out differently."""

    task_id: str
    base: float = Field(description="Share of successes, base.")
    other: float = Field(description="Share of successes, other.")
    base_index: int = Field(description="For rollouts: index of the attempt of base that is shown.")
    other_index: int
    prompt: str = Field(description="The last message before the model's first turn.")
    base_text: str = Field(description="What the model wrote and was answered, shortened.")
    other_text: str


class Compare(Result):
    """A comparison of two evaluations."""

    verdict: comparison.Outcome | Literal["contaminated", "confounded"] = Field(
        description="Of `metric`; contaminated: eval tasks were trained on; confounded: model and settings both differ."
    )
    metric: str
    base: Side
    other: Side
    paired_tasks: int = Field(description="Tasks on both sides that the tests pair; 0: the sides were not paired.")
    left_out: int | None = Field(default=None, description="Tasks on one side only.")
    success: Change
    reward: Change
    newly_solved: int = Field(description="Paired tasks with more successes than before.")
    no_longer: int = Field(description="Paired tasks with fewer.")
    flips: list[Flip] | None = Field(default=None, description="Some of both kinds, the largest changes first.")
    notes: list[str] | None = Field(default=None, description="What limits the comparison.")


# -- evaluate ---------------------------------------------------------------------------------------------------------


async def evaluate(
    environment: Annotated[
        str | None,
        Field(
            min_length=1,
            description="NAME, NAME@DIGEST or reasoning-gym:DATASET; default: the run's, where model is a run.",
        ),
    ] = None,
    model: Annotated[
        str,
        Field(
            min_length=1,
            description="A base model; a run's checkpoint as RUN@STEP (@0: before training) or, its newest, as RUN; or "
            "a deployment, for the base model and adapter that it serves.",
        ),
    ] = DEFAULT_MODEL,
    split: Annotated[Literal["eval", "train"], Field(description="Default eval.")] = "eval",
    task_ids: Annotated[
        list[str] | None, Field(min_length=1, max_length=1000, description="Only these tasks of the split.")
    ] = None,
    limit: Annotated[
        int | None, Field(ge=1, description="Only so many tasks, from the start of the split; default all.")
    ] = None,
    attempts: Annotated[int, Field(ge=1, le=256, description="Attempts at each task, for pass@k; default 1.")] = 1,
    temperature: Annotated[
        float | None, Field(ge=0, le=2, description="Default 0 (greedy) for one attempt, 1 for several.")
    ] = None,
    top_p: Annotated[float | None, Field(gt=0, le=1, description="Nucleus sampling mass; default 1.")] = None,
    max_tokens: Annotated[
        int | None, Field(ge=1, le=131_072, description="Tokens of one turn; default the run's, else 512.")
    ] = None,
    max_length: Annotated[
        int | None, Field(ge=16, description="Tokens of a conversation; default the run's, else at most 4096.")
    ] = None,
    stop_sequences: Annotated[list[str] | None, Field(max_length=16, description="Strings that end a turn.")] = None,
    thinking: Annotated[bool | None, Field(description="Chat template with thinking; default the run's.")] = None,
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1, description="Seed of sampling; default 0.")] = None,
    environment_args: Arguments = None,
    secrets: Secrets = None,
    idempotency_key: Annotated[
        str | None,
        Field(min_length=1, max_length=200, description="A second call with the same key returns the same evaluation."),
    ] = None,
    wait_s: Annotated[float, Field(ge=0, le=45, description="Seconds to wait for the scores; default 35.")] = 35.0,
) -> Evaluate:
    """Measure a model on an environment's tasks: success rate with its interval, mean reward, pass@k, length.

    An evaluation is a run: it is queued, goes on without the client, resumes after a crash, and keeps every transcript
    for rollouts (split='eval'). It samples as training does and trains nothing. Comparing two: compare.
    """
    started, store = time.monotonic(), open_store()
    subject = await anyio.to_thread.run_sync(evaluations.find_subject, store, model)
    row = await anyio.to_thread.run_sync(named.environment, store, _environment_of(environment, subject))
    check_machine()
    given: Json = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "stop_sequences": stop_sequences,
        "thinking": thinking,
        "seed": seed,
        "environment_args": environment_args,
        "secrets": secrets,
    }
    # Resolved once without tasks, for what the environment is loaded with.
    values = evaluations.resolve_eval(subject, row, split=split, tasks=[], attempts=attempts, given=given).spec
    await report("loading the environment in a child process")
    known = await task_names(row, split, values.environment_args, values.secrets)
    tasks = _chosen(known, split, task_ids, limit, attempts)
    resolved = evaluations.resolve_eval(subject, row, split=split, tasks=tasks, attempts=attempts, given=given)
    run, created, trouble = await submit(store, resolved, row, subject, idempotency_key)
    if trouble is None:
        run = await ended(store, run["id"], started + min(wait_s, WAIT_LIMIT_S))
    result = await anyio.to_thread.run_sync(_describe, store, run, subject, len(known), created)
    if trouble:
        again = f"status(run_id={run['id']!r}) tries to start the supervisor again"
        result.next = f"{trouble} The evaluation is queued; {again}"
    return result


def _environment_of(environment: str | None, subject: Subject) -> str:
    if environment is not None:
        return environment
    if subject.run is None:
        fix = "pass environment=NAME, as returned by env_push; catalog lists what was pushed"
        raise FlashError("invalid_argument", "a base model says nothing of the environment to use", fix=fix)
    return f"{subject.run['environment']}@{subject.run['environment_digest']}"


async def task_names(environment: EnvironmentRow, split: str, args: Json, secrets: Sequence[str]) -> list[str]:
    """The ids of a split's tasks, in order, by loading the environment. FlashError(dataset_invalid) for none."""
    async with loaded(
        environment,
        args=args,
        secrets=secrets,
        call_timeout_s=LOAD_TIMEOUT_S,
        start_timeout_s=LOAD_TIMEOUT_S,
        fix="mend the folder, env_test it, env_push it, and call again",
    ) as host:
        tasks = await host.tasks(split) if host.splits.get(split) else []
    reference = f"{environment['name']}@{environment['digest']}"
    if not tasks:
        fix = "add rows to that split (env.eval_dataset is the eval split), or name the other one"
        raise FlashError("dataset_invalid", f"{reference} has no task in its {split} split", split=split, fix=fix)
    return [name for name, _ in tasks]


def _chosen(known: list[str], split: str, task_ids: list[str] | None, limit: int | None, attempts: int) -> list[int]:
    places = {name: place for place, name in enumerate(known)}
    unknown = [name for name in task_ids or () if name not in places]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.5) or known[:3]
        what = f"{len(unknown)} of task_ids are not in the {split} split, the first: {unknown[0]!r}"
        raise FlashError("invalid_argument", what, fix=f"use ids like {', '.join(map(repr, near))}")
    tasks = list(dict.fromkeys(places[name] for name in task_ids)) if task_ids else list(range(len(known)))
    tasks = tasks[:limit]
    if len(tasks) * attempts > MOST_ATTEMPTS:
        what = f"{len(tasks)} tasks x {attempts} attempts are more than {MOST_ATTEMPTS:,}"
        raise FlashError("invalid_argument", what, fix="lower attempts, or set limit")
    return tasks


async def submit(
    store: Store, resolved: ResolvedEval, environment: EnvironmentRow, subject: Subject, key: str | None
) -> tuple[RunRow, bool, FlashError | None]:
    """Put an evaluation into the queue, and see that somebody looks after it; last, why nobody does."""
    run, created = await anyio.to_thread.run_sync(queue.enqueue, store, resolved, environment, subject.adapter, key)
    return run, created, await look_after(store, run)


async def look_after(store: Store, run: RunRow) -> FlashError | None:
    """See that a supervisor looks after a run that was queued, with its secrets; why none does, where that is so.

    It is not raised: the run is there, and an error alone would have it asked for again.
    """
    try:
        if run["ended"] is None:
            await anyio.to_thread.run_sync(ensure_supervisor, store.base)
            if names := run["spec"]["secrets"]:
                await anyio.to_thread.run_sync(vault.give, store.base, run["id"], secret_values(names))
    except FlashError as error:
        return error
    return None


async def ended(store: Store, run_id: str, deadline: float) -> RunRow:
    """The run as soon as it has ended, or as it is at `deadline` (of time.monotonic)."""
    run = await anyio.to_thread.run_sync(store.run, run_id)
    while run["ended"] is None and time.monotonic() < deadline:
        await anyio.sleep(POLL_S)
        run = await anyio.to_thread.run_sync(store.run, run_id)
        share = run["step"] / run["steps"] if run["steps"] else 0.0
        await report(f"{run_id}: {run['phase'] or run['state']}, {run['step']} of {run['steps']} attempts", share)
    return run


def _describe(store: Store, run: RunRow, subject: Subject, known: int, created: bool) -> Evaluate:
    spec, found = run["spec"], scores(store, run)
    shown = ("temperature", "top_p", "max_tokens", "max_length", "stop_sequences", "thinking", "seed")
    notes: list[str] = []
    if subject.deployment:
        notes.append(f"this evaluates what {subject.deployment} serves, on an engine of its own, not its server")
    if len(spec["tasks"]) < known:
        notes.append(f"{len(spec['tasks'])} of the split's {known} tasks")
    if subject.adapter and spec["split"] == "eval" and (overlap := store.overlap(run)):
        notes.append(f"CONTAMINATED: {judge.contaminated(**overlap).evidence}")
    return Evaluate(
        run_id=run["id"],
        state=run["state"],
        created=created,
        environment=spec["environment"],
        of=subject.name,
        split=spec["split"],
        tasks=len(spec["tasks"]),
        attempts=spec["attempts"],
        done=run["step"],
        values={name: spec[name] for name in shown if spec[name] is not None and spec[name] != []},
        scores=found,
        error=shorten(f"[{run['error']['code']}] {run['error']['what']}", 1500) if run["error"] else None,
        notes=[*notes, *(thoughts(found) if found else ())] or None,
        next=after_evaluation(store, run),
    )


def scores(store: Store, run: RunRow) -> Scores | None:
    """What the newest evaluation of a run found; None before there is one."""
    rows = store.evals(run["id"])
    if not rows:
        return None
    found = evaluations.tries(store, run["id"], rows[-1]["step"])
    valid = [attempt for attempt in found if attempt.error is None]
    errors = Counter(attempt.error for attempt in found if attempt.error is not None)
    tasks = evaluations.by_task(found)
    if not valid:
        return Scores(tasks=0, n=0, errors=len(found), error_codes=dict(errors) or None)
    interval = stats.success_interval([[each.success for each in attempts] for attempts in tasks.values()])
    several = len(valid) > len(tasks)
    solved = [{each.success for each in attempts} for attempts in tasks.values()]
    speed = rows[-1]["summary"].get("tokens_per_s")
    return Scores(
        tasks=len(tasks),
        n=len(valid),
        success=round(fmean(each.success for each in valid), 4),
        low=round(interval.low, 4),
        high=round(interval.high, 4),
        reward=round(fmean(each.reward for each in valid), 4),
        pass_at={k: round(value, 4) for k, value in evaluations.pass_at(tasks).items()} or None,
        uniform_share=round(evaluations.uniform_share(tasks) or 0.0, 4) if several else None,
        never_solved=solved.count({False}) if several else None,
        always_solved=solved.count({True}) if several else None,
        tokens_mean=round(fmean(each.tokens for each in valid), 1),
        tokens_most=max(each.tokens for each in valid),
        turns=round(fmean(each.turns for each in valid), 2),
        truncated=round(fmean(each.truncated for each in valid), 4),
        errors=len(found) - len(valid),
        error_codes=dict(errors) or None,
        tokens_per_s=round(speed) if speed else None,
    )


def thoughts(found: Scores) -> list[str]:
    """What the numbers of an evaluation ask for."""
    notes: list[str] = []
    if found.errors:
        share = found.errors / (found.errors + found.n)
        notes.append(f"{share:.0%} of the attempts failed in environment code and say nothing of the model; env_test")
    if (found.truncated or 0.0) >= 0.1:
        notes.append(f"{found.truncated:.0%} were cut off: raise max_tokens or max_length, or the rate is of the limit")
    if found.n and found.low is not None and found.high is not None and found.high - found.low > 0.2:
        notes.append(f"the interval is wide: {found.tasks} tasks tell little; more tasks narrow it, attempts hardly do")
    return notes


def after_evaluation(store: Store, run: RunRow) -> str:
    """What to do next with an evaluation."""
    run_id = run["id"]
    if run["ended"] is None:
        ahead = [row["id"] for row in store.active_runs() if row["id"] != run_id and row["created"] < run["created"]]
        waits = f"; it waits for {ahead[0]}" if run["state"] == "queued" and ahead else ""
        return f"status(run_id={run_id!r}, wait_s=40) has the scores once they are there{waits}"
    if run["state"] == "failed":
        return f"status(run_id={run_id!r}) has the evidence; act on it, then evaluate again"
    if run["state"] == "cancelled":
        return "evaluate starts another; the attempts made so far are in no result"
    failures = f"rollouts(run_id={run_id!r}, which='worst') shows what fails"
    others = [
        row
        for row in store.runs("succeeded", limit=50)
        if row["algorithm"] == "eval" and row["created"] < run["created"] and _differ_in_model_alone(row, run)
    ]
    if others:
        # The less trained is the base: without an adapter, then before training, then the earlier.
        base, other = sorted((others[0], run), key=lambda row: (bool(row["init_adapter"]), row["spec"]["step"] > 0))
        return f"compare(base={base['id']!r}, other={other['id']!r}) says whether it differs; {failures}"
    return f"{failures}; evaluate another model on the same tasks, then compare"


def _differ_in_model_alone(one: RunRow, other: RunRow) -> bool:
    alike = all(one[key] == other[key] for key in ("environment", "environment_digest"))
    models = [evaluations.weights(run, run["spec"]["step"]) for run in (one, other)]
    same_split = one["spec"]["split"] == other["spec"]["split"]
    return alike and same_split and models[0] != models[1] and not evaluations.differing(one, other)


# -- compare ----------------------------------------------------------------------------------------------------------


def compare(
    base: Annotated[
        str,
        Field(
            min_length=1,
            description="An evaluation; a training run, for its newest evaluation; or RUN@STEP. Alone: a training run, "
            "whose first and newest evaluations are compared.",
        ),
    ],
    other: Annotated[str | None, Field(min_length=1, description="The same kinds; is it better than base?")] = None,
    metric: Annotated[
        Literal["success", "reward"], Field(description="What the verdict is on; both are shown. Default success.")
    ] = "success",
    min_change: Annotated[
        float, Field(gt=0, le=1, description="The smallest change that matters to you; default 0.05.")
    ] = 0.05,
    flips: Annotated[
        int, Field(ge=0, le=5, description="Tasks of each kind to show that came out differently; default 2.")
    ] = 2,
) -> Compare:
    """Say whether one evaluation is better than another: improved, no_change, regressed or underpowered.

    Tasks that stand on both sides are paired: exact McNemar test for success, paired bootstrap for rewards and for
    several attempts a task. Otherwise the noise bands decide. `underpowered` comes with the number of tasks that would
    decide. Evaluations are made by evaluate, or by train with eval_before, eval_after or eval_every. Two models are
    judged only where both were sampled alike.
    """
    store = open_store()
    (base_run, base_eval), (other_run, other_eval) = _sides(store, base, other)
    if base_run["environment"] != other_run["environment"]:
        fix = f"evaluate both on one of them: evaluate(environment={base_run['environment']!r}, model=...)"
        what = f"{base_run['id']} is of {base_run['environment']}, {other_run['id']} of {other_run['environment']}"
        raise FlashError("invalid_argument", f"different environments cannot be compared: {what}", fix=fix)
    places = (base_run["id"], base_eval["step"]), (other_run["id"], other_eval["step"])
    tries = [evaluations.tries(store, *place) for place in places]
    tasks = [evaluations.by_task(side) for side in tries]
    both = comparison.shared(*(evaluations.means(side, "success") for side in tasks))
    changes = {name: _change(tasks, both, name, min_change) for name in ("success", "reward")}
    differing = evaluations.differing(base_run, other_run)
    one_model = evaluations.weights(base_run, places[0][1]) == evaluations.weights(other_run, places[1][1])
    confounded = bool(differing) and not one_model
    if differing:
        whose = "the change may come from that" if one_model else "the change may come from that, not from the model"
        for found in changes.values():
            found.explanation += f"; but the two differ in {', '.join(differing)}: {whose}"
    moved = _moved(tasks, both)
    left_out = len({*tasks[0]} ^ {*tasks[1]}) if both else 0
    shown = [*[task for task in moved if moved[task] > 0][:flips], *[task for task in moved if moved[task] < 0][:flips]]
    each = FLIP_CHARACTERS // max(len(shown), 1)
    on_eval = all(run["spec"].get("split", "eval") == "eval" for run in (base_run, other_run))
    trained = _is_trained(base_run, base_eval) or _is_trained(other_run, other_eval)
    overlap = store.overlap(other_run) if on_eval and trained else None
    memory = judge.contaminated(**overlap) if overlap else None
    notes = [*([f"CONTAMINATED: {memory.evidence}"] if memory else []), *_limits(base_run, other_run, tasks, both)]
    more = f"rollouts(run_id={other_run['id']!r}, split='eval', step={places[1][1]}, index=other_index)"
    following = [
        _repeated(base_run, places[0][1], other_run, differing) if confounded
        else _after_comparison(store, changes[metric], other_run, places[1][1], differing),
        *([f"{more} shows a flip whole"] if shown else []),
    ]  # fmt: skip
    return Compare(
        verdict="contaminated" if memory else "confounded" if confounded else changes[metric].outcome,
        metric=metric,
        base=_side(base_run, base_eval, tries[0]),
        other=_side(other_run, other_eval, tries[1]),
        paired_tasks=len(both),
        left_out=left_out or None,
        success=changes["success"],
        reward=changes["reward"],
        newly_solved=sum(change > 0 for change in moved.values()),
        no_longer=sum(change < 0 for change in moved.values()),
        flips=[_flip(store, task, tasks, places, each) for task in shown] or None,
        notes=notes or None,
        next=memory.remedy if memory else "; ".join(following),
    )


def _sides(store: Store, base: str, other: str | None) -> tuple[tuple[RunRow, EvalRow], tuple[RunRow, EvalRow]]:
    if other is None:
        run, step = _reference(store, base)
        steps = [row["step"] for row in store.evals(run["id"])]
        if step is not None or len(steps) < 2:
            made = f"; it has evaluations of the steps {steps}" if steps else ""
            asked = [name for name in ("eval_before", "eval_after", "eval_every") if run["spec"].get(name)]
            code, what = "invalid_argument", f"{base} alone has no before and after{made}"
            fix = "name the other evaluation; evaluate makes one" if steps else "train with eval_before and eval_after"
            if step is None and run["ended"] is None and asked and asked != ["eval_before"]:
                code, what = "not_ready", f"{base} is {run['state']} and has no before and after yet{made}"
                fix = f"status(run_id={base!r}, wait_s=40) waits for it; compare again once it has ended"
            raise FlashError(code, what, base=base, fix=fix)
        first = evaluations.evaluation_at(store, run, steps[0])
        return (run, first), (run, evaluations.evaluation_at(store, run, None))
    first, second = ((run, evaluations.evaluation_at(store, run, step)) for run, step in (
        _reference(store, reference) for reference in (base, other)
    ))  # fmt: skip
    if (first[0]["id"], first[1]["step"]) == (second[0]["id"], second[1]["step"]):
        raise FlashError("invalid_argument", "both are the same evaluation", base=base, other=other, fix="name two")
    return first, second


def _reference(store: Store, text: str) -> tuple[RunRow, int | None]:
    named = evaluations.RUN.fullmatch(text)
    if named is None:
        fix = "name a run as RUN or RUN@STEP; evaluate makes an evaluation of any model and returns its run_id"
        raise FlashError("invalid_argument", f"{text!r} is no run", fix=fix)
    return store.run(named["run"]), int(named["step"]) if named["step"] else None


def _is_trained(run: RunRow, row: EvalRow) -> bool:
    """Whether the model had learnt here: a base model remembers no task, whatever the splits share."""
    return bool(run["init_adapter"]) or (run["algorithm"] != "eval" and row["step"] > 0)


def _change(tasks: list[dict[str, list[Try]]], both: list[str], metric: str, effect: float) -> Change:
    base, other = (evaluations.means(side, metric) for side in tasks)
    if both:
        found = comparison.compare_paired([base[task] for task in both], [other[task] for task in both], effect=effect)
    else:
        found = comparison.compare_unpaired([*base.values()], [*other.values()], effect=effect)
    return Change(
        outcome=found.outcome,
        change=round(found.change, 4),
        low=round(found.low, 4),
        high=round(found.high, 4),
        test=found.test,
        p=None if found.p is None else float(f"{found.p:.3g}"),
        decide_n=found.decide_n,
        explanation=found.explanation,
    )


def _side(run: RunRow, row: EvalRow, found: list[Try]) -> Side:
    tasks = evaluations.by_task(found)
    success, reward = (fmean(evaluations.means(tasks, metric).values()) for metric in ("success", "reward"))
    return Side(
        run_id=run["id"],
        step=row["step"],
        of=_name(run, row["step"]),
        environment=f"{run['environment']}@{run['environment_digest']}",
        tasks=len(tasks),
        attempts=evaluations.settings(run)["attempts"],
        success=round(success, 4),
        band=round(judge.noise_band(success, len(tasks)), 4),
        reward=round(reward, 4),
        errors=sum(attempt.error is not None for attempt in found) or None,
    )


def _name(run: RunRow, step: int) -> str:
    if run["algorithm"] == "eval":
        checkpoint = run["spec"]["checkpoint"]
        return f"{run['model']} with {checkpoint}" if checkpoint else run["model"]
    return f"{run['model']} with {run['id']}@{step}" if step else f"{run['model']} before the training of {run['id']}"


def _moved(tasks: list[dict[str, list[Try]]], both: list[str]) -> dict[str, float]:
    """{task id: change of its share of successes} where there is one, the largest first."""
    base, other = (evaluations.means(side, "success") for side in tasks)
    changes = {task: other[task] - base[task] for task in both if other[task] != base[task]}
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))


def _flip(
    store: Store,
    task: str,
    tasks: list[dict[str, list[Try]]],
    places: tuple[tuple[str, int], tuple[str, int]],
    characters: int,
) -> Flip:
    """A task that moved, with a typical attempt of each side: a failure where it failed more, a success otherwise."""
    base, other = (side[task] for side in tasks)
    shares = [fmean(each.success for each in side) for side in (base, other)]
    indices = [
        next(each.index for each in side if each.success == (share == max(shares)))
        for side, share in zip((base, other), shares, strict=True)
    ]
    rows = [evaluations.transcript(store, *place, index) for place, index in zip(places, indices, strict=True)]
    prompts = [evaluations.prompt_length(row) for row in rows]
    first: list[Json] = rows[0]["messages"][: prompts[0]]
    texts = [_conversation(row["messages"][start:]) for row, start in zip(rows, prompts, strict=True)]
    return Flip(
        task_id=task,
        base=round(shares[0], 4),
        other=round(shares[1], 4),
        base_index=indices[0],
        other_index=indices[1],
        prompt=_excerpt(str(first[-1].get("content")) if first else "", characters // 4),
        base_text=_excerpt(texts[0], characters * 3 // 8),
        other_text=_excerpt(texts[1], characters * 3 // 8),
    )


def _excerpt(text: str, characters: int) -> str:
    """The text within so many characters of JSON, where line ends and quotes take two."""
    cost = len(to_text(text)) - 2
    return text if cost <= characters else shorten(text, characters * len(text) // cost)


def _conversation(messages: list[Json]) -> str:
    """The model's turns as they are, what answered them in brackets."""
    texts = [(message["role"] == "assistant", str(message.get("content"))) for message in messages]
    return "\n".join(text if mine else f"[{text}]" for mine, text in texts)


def _limits(base: RunRow, other: RunRow, tasks: list[dict[str, list[Try]]], both: list[str]) -> list[str]:
    notes: list[str] = []
    if base["environment_digest"] != other["environment_digest"]:
        notes.append("the two are of different versions of the environment: tasks and scorer may differ")
    ours, theirs = evaluations.settings(base), evaluations.settings(other)
    differing = [
        f"{name} {shorten(str(ours[name]), 100)} and {shorten(str(theirs[name]), 100)}"
        for name in ours
        if ours[name] != theirs[name]
    ]
    if differing:
        notes.append(f"the two were not made alike: {'; '.join(differing)}")
    if not both:
        notes.append("the sides have too few tasks in common to be paired: the same tasks on both sides tell far more")
    if not any(attempt.success for side in tasks for attempts in side.values() for attempt in attempts):
        notes.append("nothing succeeded on either side: reward tells more than success here")
    return notes


def _after_comparison(store: Store, found: Change, other: RunRow, step: int, differing: list[str]) -> str:
    trained = other["spec"]["checkpoint"] if other["algorithm"] == "eval" else f"{other['id']}@{step}"
    if found.outcome == "underpowered":
        return f"claim no change; {_more_tasks(store, found.decide_n or 0, other)}, then compare"
    if differing:
        return f"both are one model, so the change says nothing of training: it is of {', '.join(differing)}"
    if found.outcome == "improved" and trained and step:
        name, _, at = trained.partition("@")
        return f"deploy(run_id={name!r}, step={at}) serves it"
    return "change one thing and train again"


def _more_tasks(store: Store, needed: int, run: RunRow) -> str:
    split = run["spec"].get("split", "eval")
    try:
        recorded = store.environment(f"{run['environment']}@{run['environment_digest']}")["data"]
    except FlashError:  # it was removed
        recorded = {}
    size: int | None = recorded.get("tasks", {}).get(split)
    # Recorded when it was pushed: other environment_args may have given this evaluation more.
    if size is None or size >= needed or size < len(run["spec"].get("tasks", ())):
        return f"evaluate both on about {needed} tasks (several attempts at each narrow it too)"
    return (
        f"about {needed} tasks would decide and the {split} split has no more than {size}: evaluate both on all {size} "
        f"with more attempts at each and a temperature above 0, or add tasks to the {split} split and env_push"
    )


def _repeated(base: RunRow, step: int, other: RunRow, differing: list[str]) -> str:
    """The call that evaluates base again with the settings of other."""
    spec = base["spec"]
    model = (spec["checkpoint"] or base["model"]) if base["algorithm"] == "eval" else f"{base['id']}@{step}"
    chosen = {
        "environment": f"{other['environment']}@{other['environment_digest']}",
        "model": model,
        "split": other["spec"].get("split", "eval"),
        **evaluations.settings(other),
        **({"secrets": other["spec"]["secrets"]} if other["spec"]["secrets"] else {}),
    }
    tasks = other["spec"].get("tasks")
    if tasks and tasks == list(range(len(tasks))):
        chosen["limit"] = len(tasks)
    long = f"<that of {other['id']}>"  # environment_args may be too long to repeat
    given = ", ".join(f"{name}={text if len(text := repr(value)) <= 300 else long}" for name, value in chosen.items())
    return (
        f"claim nothing and deploy nothing: the two differ in {', '.join(differing)}; evaluate({given}) "
        f"repeats base as other was made, then compare(base=its run_id, other={other['id']!r})"
    )


TOOLS = [
    Tool(evaluate, title="Evaluate a model", open_world=True),
    Tool(compare, title="Compare two evaluations", read_only=True),
]
