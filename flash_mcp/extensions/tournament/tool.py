"""tournament: which of several fixed policies is best, claimed only where there is evidence."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flash_mcp.extensions.tournament import rows
from flash_mcp.extensions.tournament.rows import NAME_CHARACTERS
from flash_mcp.extensions.tournament.standing import LEAST_TASKS, ROUNDS, Standing
from flash_mcp.judgement.statistics import ALPHA
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, without_none
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.protocol.spec import (
    AUTO,
    DEFAULT_MODEL,
    LOCAL_TARGET,
    EvalSpec,
    Precision,
    RunSpec,
    explain,
)
from flash_mcp.state import references
from flash_mcp.state.queue import Label
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.evaluate import SystemPrompt, environment_of, place, task_names
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.loading import Arguments, Secrets, check_target
from flash_mcp.tools.shared.resolve import TAKEN_FROM_RUN, read_configs, resolve_eval
from flash_mcp.tools.shared.scores import FailedAttempt, worst_attempts
from flash_mcp.tools.shared.tool_base import Result, Tool, report
from flash_mcp.tools.shared.truncation import error_text
from flash_mcp.tools.shared.waiting import deadline_after, look_after, wait_until
from flash_mcp.tools.train import enqueue, plan_of
from flash_mcp.tools.training.plan import Plan

MOST_ARMS = 12


class Arm(BaseModel):
    """What one arm is; the fields of evaluate."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str | None, Field(min_length=1, max_length=40)] = None
    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    system_prompt: SystemPrompt = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=131_072)] = None
    max_length: Annotated[int | None, Field(ge=16)] = None
    stop_sequences: Annotated[list[str] | None, Field(max_length=16)] = None
    thinking: bool | None = None
    precision: Precision | None = None
    environment_args: Arguments = None


FIELDS = ", ".join(Arm.model_fields)
Arms = Annotated[
    list[dict[str, Any]] | None,
    Field(min_length=2, max_length=MOST_ARMS, description=f"Each with some of: {FIELDS}."),
]


class ArmView(ResultModel):
    """One arm, as far as the rounds that have ended tell."""

    name: str
    of: str
    out: int | None = None
    success: Rounded | None = None
    tasks: int
    # Its success less the leader's: an interval that holds at every look.
    low: Rounded | None = None
    high: Rounded | None = None
    evidence: float | None = None  # that some rival is better: the arm goes at 1/alpha
    run_id: str | None = None


class TournamentView(Result):
    """A tournament, finished or under way."""

    tournament_id: str
    state: str
    """running, finished, failed or cancelled."""
    verdict: Literal["winner", "no_difference"] | None = None
    """Once finished. no_difference: none that this budget can show between the arms left."""
    winner: str | None = None
    """The only arm left."""
    explanation: str
    created: bool
    """False for one that exists."""
    environment: str
    """NAME@DIGEST."""
    split: str
    round: int
    tasks: int
    """Tasks of all rounds so far."""
    budget: int
    """Tasks there are."""
    attempts: int
    """Made in the rounds that have ended; all arms on all tasks would be `attempts_in_full`."""
    attempts_in_full: int
    arms: list[ArmView]
    """The leader first."""
    worst: list[FailedAttempt] | None = None
    """Failed attempts of the leader."""
    error: str | None = None


async def tournament(
    environment: Annotated[str | None, Field(min_length=1)] = None,
    arms: Arms = None,
    settings: dict[str, Any] | None = None,
    tournament_id: Annotated[str | None, Field(min_length=1)] = None,
    split: Literal["eval", "train"] = "eval",
    limit: Annotated[int | None, Field(ge=2)] = None,
    alpha: Annotated[float, Field(gt=0, le=0.5)] = ALPHA,
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0,
    secrets: Secrets = None,
    target: Annotated[str | None, Field(min_length=1)] = None,
    idempotency_key: Annotated[str | None, Field(min_length=1, max_length=200)] = None,
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 35.0,
) -> TournamentView:
    """Find the best of several prompts, checkpoints, models or samplings, or of several ways to
    train.

    In each round the arms attempt the same new tasks, and an arm that has lost is eliminated. The
    best arm is eliminated with a chance of at most alpha, however many arms and looks. A winner is
    claimed only when one arm is left. With settings.steps the arms learn: they take fields of
    train, rounds train them further, and the winner is best at these steps. It goes on without the
    client. It also takes seed, secrets, target and idempotency_key, as evaluate does. For two arms
    on all tasks: evaluate and compare.

    Args:
        environment: As for evaluate.
        settings: The same fields, for every arm.
        tournament_id: One to wait for and report.
        split: The tasks' split.
        limit: Only so many tasks.
        alpha: Chance of a wrong elimination.
        seed: Of order and sampling.
        target: As for train.
        idempotency_key: A repeated key returns the first.
        wait_s: Seconds to wait for the end.
    """
    store = open_store()
    deadline = deadline_after(wait_s)
    created = False
    trouble = None
    if tournament_id is None:
        if arms is None:
            fix = "pass arms=[{...}, {...}] to start one, or tournament_id=... to follow it"
            raise FlashError("invalid_argument", "neither a new nor an old tournament", fix=fix)
        common = {"split": split, "limit": limit, "alpha": alpha, "seed": seed}
        common |= {"secrets": secrets, "target": target}
        row, created, trouble = await _begin(
            store, environment, arms, settings or {}, common, idempotency_key
        )
        tournament_id = row.id
    row = await wait_until(
        lambda: rows.find_tournament(store, tournament_id),
        lambda row: row.state != "running",
        0.0 if trouble else deadline,
        _progress,
    )
    return await run_sync(_view, store, row, created, trouble)


async def _begin(
    store: Store,
    environment: str | None,
    arms: Sequence[Json],
    settings: Json,
    common: Json,
    key: str | None,
) -> tuple[rows.Tournament, bool, FlashError | None]:
    """Start one, or find that of the key; (it, whether it is new, why nothing looks after it)."""
    # As it was passed: what it means may have changed since the first call with the key.
    passed = json.dumps([environment, arms, settings, common], sort_keys=True)
    request = hashlib.sha256(passed.encode()).hexdigest()
    first = await run_sync(rows.asked_before, store, request, key)
    if first:
        return first, False, await look_after(store, first)
    train = None
    if "steps" in settings:
        spec, train = await arms_that_learn(environment, arms, settings, common)
    else:
        spec = await _spec(store, environment, _arms(arms, settings), common)
    target = spec["arms"][0]["resolved"]["spec"]["target"]
    spec["request"] = request
    begin = functools.partial(rows.start, train=train)
    row, created = await run_sync(begin, store, spec, target, key)
    return row, created, await look_after(store, row)


def _arms(arms: Sequence[Json], settings: Json) -> list[Json]:
    """The arms, each with a name. FlashError(invalid_argument) for one that is there twice."""
    chosen: dict[str, Json] = {}
    for number, arm in enumerate(arms, start=1):
        try:
            fields = without_none(vars(Arm.model_validate({**settings, **arm})))
        except ValidationError as error:
            fix = f"use fields of: {FIELDS}"
            what = f"arm {number}: {explain(error)}"
            raise FlashError("invalid_argument", what, fix=fix) from error
        name = fields.pop("name", f"arm-{number}")
        if name in chosen or fields in chosen.values():
            what = f"arm {number} ({name}) is there twice"
            raise FlashError("invalid_argument", what, fix="give each another name and setting")
        chosen[name] = fields
    return [{"name": name, **fields} for name, fields in chosen.items()]


async def _spec(store: Store, environment: str | None, arms: Sequence[Json], common: Json) -> Json:
    """What is stored of a new tournament: every value of every arm, and the order of the tasks."""
    split = common["split"]
    if common["target"] != AUTO:
        check_target(store, common["target"] or LOCAL_TARGET)
    subjects = [await run_sync(references.find_subject, store, arm["model"]) for arm in arms]
    reference = environment_of(environment, subjects[0])
    row = await run_sync(references.environment, store, reference)
    entries: list[Json] = []
    for arm, subject in zip(arms, subjects, strict=True):
        arguments = {**common, **arm}
        resolved = resolve.resolve_eval(
            subject, row, split=split, tasks=[], attempts=1, arguments=arguments
        )
        resolved, _ = await run_sync(place, store, resolved, row)
        entry = {"name": arm["name"], "of": subject.name, "adapter": subject.adapter}
        entry["env_files"] = subject.env_files
        entries.append({**entry, "resolved": resolved.model_dump()})
    first = EvalSpec.model_construct(**entries[0]["resolved"]["spec"])
    await report("loading the environment in a child process")
    names = await task_names(row, first, subjects[0].env_files)
    order = random.Random(f"tournament/{common['seed']}").sample(range(len(names)), len(names))
    spec = {"arms": entries, "environment": row.reference, "order": order[: common["limit"]]}
    return {**spec, "split": split, "alpha": common["alpha"]}


def _progress(row: rows.Tournament) -> tuple[str, float]:
    left = len(row.standing.left)
    share = row.used / len(row.spec["order"])
    if row.milestones:
        share = row.rounds[-1]["step"] / row.milestones[-1]
    return f"{row.id}: round {row.round}, {left} arms left", share


def _view(
    store: Store, row: rows.Tournament, created: bool, trouble: FlashError | None
) -> TournamentView:
    standing = row.standing
    leader = standing.leader
    names = [arm["name"] for arm in row.spec["arms"]]
    is_over = row.state == "finished"
    one = is_over and standing.is_decided
    shown = row.newest_run(leader) if standing.attempted[leader] else None
    run = store.first("SELECT * FROM runs WHERE id = ?", [shown]) if shown else None
    budget = len(row.spec["order"])
    in_full = budget * len(names)
    if row.milestones:
        in_full = row.spec["held_back"] + row.spec["round_tasks"] * (len(row.milestones) - 1)
        in_full *= len(names)
    following = _following(row, one, is_over)
    if trouble:
        call = f"tournament(tournament_id={row.id!r})"
        following = f"{trouble} The server tries again every few seconds; {call} follows it"
    return TournamentView(
        tournament_id=row.id,
        state=row.state,
        verdict=("winner" if one else "no_difference") if is_over else None,
        winner=names[leader] if one else None,
        explanation=_explanation(row, standing, names) + _mixed_precision(store, row),
        created=created,
        environment=row.spec["environment"],
        split=row.spec["split"],
        round=row.round,
        tasks=row.used,
        budget=budget,
        attempts=sum(standing.attempted.values()),
        attempts_in_full=in_full,
        arms=list(map(functools.partial(_arm, row, standing), _order(standing))),
        worst=worst_attempts(store, store.run(shown)) if shown and run else None,
        error=error_text(row.error, 1500),
        next=following,
    )


def _following(row: rows.Tournament, winner: bool, is_over: bool) -> str:
    """What follows a tournament; `winner`: one arm is left."""
    call = f"tournament(tournament_id={row.id!r})"
    if row.state == "running":
        return f"{call} waits for the end; it goes on without you"
    if not is_over:
        return "act on error" if row.error else "tournament starts another"
    leader = row.standing.leader
    checkpoint = row.checkpoint(leader)
    run_id, _, step = (checkpoint or "").partition("@")
    prompt = "write a better system_prompt by `worst`, and set it against this one"
    if row.milestones:
        prompt = f"train(resume={run_id!r}, steps={2 * int(step)}) trains the leader further"
    if not winner:
        return f"take the cheapest of those left, or add tasks to the split; or {prompt}"
    if checkpoint and int(step):
        return f"deploy(run_id={run_id!r}, step={step}) serves the winner; or {prompt}"
    return f"use the winner's settings; or {prompt}; train goes beyond prompts"


def _order(standing: Standing) -> list[int]:
    """The leader, then those that are left, then those that went last."""

    def key(arm: int) -> tuple[bool, int, float]:
        return arm in standing.out, -standing.out.get(arm, 0), -standing.success(arm)

    return sorted(range(standing.arms), key=key)


def _arm(row: rows.Tournament, standing: Standing, arm: int) -> ArmView:
    entry = row.spec["arms"][arm]
    count = standing.attempted[arm]
    view = ArmView(name=entry["name"], of=entry["of"], out=standing.out.get(arm), tasks=count)
    view.run_id = row.newest_run(arm)
    if row.milestones:
        view.of += f" with {row.checkpoint(arm)}"
    if count:
        view.success = standing.success(arm)
        behind = standing.behind(arm)
        if not row.milestones:
            view.evidence = float(f"{standing.against(arm):.3g}")
        if behind:
            view.low, view.high = behind.low, behind.high
    return view


def _mixed_precision(store: Store, row: rows.Tournament) -> str:
    """A warning if the machines of the target computed the evaluations in different precisions."""
    sql = """SELECT precision, count(*) FROM runs JOIN json_each(?) AS run ON run.value = runs.id
             WHERE precision IS NOT NULL GROUP BY precision"""
    runs = [run for part in row.rounds for run in part["runs"].values()]
    counts = dict(store.two_columns(sql, [json.dumps(runs)]))
    if len(counts) < 2:
        return ""
    mixed = " and ".join(f"{count} in {name}" for name, count in counts.items())
    return f"; but runs of it were computed in different precisions: {mixed}, which may decide"


def _explanation(row: rows.Tournament, standing: Standing, names: Sequence[str]) -> str:
    if row.milestones:
        return explanation_of_race(row, standing, names)
    left = list(map(names.__getitem__, standing.left))
    order = len(row.spec["order"])
    used = f"{row.used} of {order} tasks"
    if row.state == "finished" and len(left) == 1:
        error = f"a better arm was eliminated with a chance of at most {row.spec['alpha']:g}"
        return f"{left[0]} is best: the others were eliminated on {used}; {error}"
    if row.state == "finished":
        what = f"no difference between {', '.join(left)} that {order} tasks can show"
        return f"{what}: low and high say how large it may be"
    if row.state == "running":
        return f"round {len(row.rounds)}, {used}: {len(left)} of {len(names)} arms are left"
    return f"it ended as {row.state} after {used}: {', '.join(left)} were left, nothing is claimed"


# -- tournaments of arms that learn: what is stored of one, and how it stands ----------------------


async def arms_that_learn(
    environment: str | None, arms: Sequence[Json], settings: Json, common: Json
) -> tuple[Json, Callable[[str], dict[str, str]]]:
    """What is stored of a new tournament, and what queues the training of its arms to their first
    milestone. `arms` and `settings` are fields of train. FlashError as of train.
    """
    steps = settings["steps"]
    if not isinstance(steps, int) or steps < 2:
        fix = "give the steps of each arm's whole training, such as settings={'steps': 60}"
        raise FlashError("invalid_argument", f"settings.steps={steps!r} is too few", fix=fix)
    milestones = sorted({math.ceil(steps * number / ROUNDS) for number in range(1, ROUNDS + 1)})
    own = {"steps": milestones[0], "seed": common["seed"], "regression": "off"}
    own |= {"early_stopping": False, "environment": environment, "secrets": common["secrets"] or []}
    own["target"] = common["target"] or LOCAL_TARGET
    fixed = own.keys() & {*settings.keys() - {"steps"}, *itertools.chain(*arms)}
    if common["split"] != "eval":
        fixed.add("split")
    if fixed:
        what = f"arms that learn cannot choose {', '.join(sorted(fixed))}"
        own_arguments = "environment, seed, secrets and target are arguments of tournament"
        fix = f"{own_arguments}, steps is one of settings; leave the others out"
        raise FlashError("invalid_argument", what, fix=fix)
    plans: dict[str, Plan] = {}
    for number, arm in enumerate(arms, start=1):
        name = str(arm.get("name", f"arm-{number}"))
        if name in plans:
            what = f"two arms are called {name!r}"
            raise FlashError("invalid_argument", what, fix="give each another name")
        fields = without_none({**settings, **arm}) | own
        fields.pop("name", None)
        try:
            plan = await plan_of(fields, read_configs(None), None)
            _check(plan.spec)
        except FlashError as error:
            raise FlashError(error.code, f"{name}: {error.what}", fix=error.fix) from error
        plan.check_gate()
        plans[name] = plan
    first = next(iter(plans.values()))
    part = first.parts[0]
    tasks = part.probe.splits.get("eval", 0)
    order = random.Random(f"tournament/{common['seed']}").sample(range(tasks), tasks)
    order = order[: common["limit"]]
    held_back = len(order) // 2
    if held_back < LEAST_TASKS:
        what = f"arms that learn need {2 * LEAST_TASKS} eval tasks, and there are {len(order)}"
        raise FlashError("dataset_invalid", what, fix="add eval tasks, or raise limit")
    pool = len(order) - held_back
    size = min(pool, max(LEAST_TASKS, pool // (len(milestones) - 1)))
    entries = [await run_sync(_entry, name, plan) for name, plan in plans.items()]
    spec = {"arms": entries, "environment": part.environment.reference, "order": order}
    spec |= {"split": "eval", "alpha": common["alpha"], "milestones": milestones}
    spec |= {"held_back": held_back, "round_tasks": size}
    return spec, functools.partial(_train, plans)


def _check(spec: RunSpec) -> None:
    """FlashError(invalid_argument) for a run that cannot go on in rounds as it would in one go."""
    wrong: list[str] = []
    if (spec.lr_schedule, spec.kl_schedule, spec.warmup) != ("constant", "constant", 0):
        wrong.append("lr_schedule, kl_schedule and warmup: a round does not know the next")
    if spec.evaluates or spec.finish_by:
        wrong.append("eval_before, eval_after, eval_every and finish_by: the rounds evaluate")
    if spec.mixture or spec.target != LOCAL_TARGET:
        wrong.append(f"mixture, and any target but {LOCAL_TARGET}")
    if wrong:
        fix = "use lr_schedule='constant' and warmup=0, and leave the others out"
        what = f"arms that learn cannot have {'; '.join(wrong)}"
        raise FlashError("invalid_argument", what, fix=fix)


def _entry(name: str, plan: Plan) -> Json:
    spec = plan.parts[0].spec(plan.spec)
    same = {field: getattr(spec, field) for field in (*TAKEN_FROM_RUN, "seed", "max_error_share")}
    card = plan.card
    resolved = resolve_eval(
        Subject(card.name, card.context),
        plan.environment,
        split="eval",
        tasks=[],
        attempts=1,
        arguments=same,
    )
    shape = {"lora_rank": spec.lora_rank, "lora_alpha": spec.lora_alpha}
    resolved = resolved.model_copy(update={"spec": resolved.spec.model_copy(update=shape)})
    training = {**plan.spec.model_dump(), "environment": plan.environment.reference}
    entry: Json = {"name": name, "of": card.name, "adapter": None, "training": training}
    return {**entry, "resolved": resolved.model_dump()}


def _train(plans: Mapping[str, Plan], tournament_id: str) -> dict[str, str]:
    runs: dict[str, str] = {}
    for number, (name, plan) in enumerate(plans.items()):
        label = Label(f"{tournament_id}: {name}"[:NAME_CHARACTERS])
        run, _ = enqueue(plan, None, label, tournament=tournament_id)
        runs[str(number)] = run.id
    return runs


def explanation_of_race(row: rows.Tournament, race: Standing, names: Sequence[str]) -> str:
    left = ", ".join(names[arm] for arm in race.left)
    last = row.milestones[-1]
    trained = before = 0
    for item in row.rounds:
        if not item["tasks"]:
            trained += (item["step"] - before) * len(item["runs"])
            before = item["step"]
    spent = f"{trained} of {last * len(names)} steps"
    if row.state == "running":
        return f"step {before} of {last}: {len(race.left)} of {len(names)} arms are left"
    if row.state != "finished":
        return f"it ended as {row.state} after {spent}: {left} were left, nothing is claimed"
    tasks = row.spec["held_back"]
    cut = "an arm that was cut might have overtaken later"
    if race.is_decided:
        best = names[race.leader]
        test = f"McNemar's exact test on {tasks} held-back tasks"
        return f"{best} is best at {last} steps, by {test}; {cut}; {spent} were trained"
    what = f"no difference between {left} at {last} steps that {tasks} held-back tasks can show"
    return f"{what}: low and high say how large it may be; {spent} were trained"


TOOL = Tool(
    tournament,
    title="Find the best of several",
    example='tournament calculator --arms \'[{"model": "run-2f9k1c8d@100"}, {}]\'',
    words=("environment",),
    open_world=True,
    changes_with=("arms",),
    unlisted=("seed", "secrets", "target", "idempotency_key"),
)
