"""Tournaments of arms that learn: what is stored of one, and how it stands."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

from anyio.to_thread import run_sync

from flash_mcp.judgement.race import LEAST_TASKS, ROUNDS
from flash_mcp.judgement.tournament import Standing
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, without_none
from flash_mcp.protocol.spec import LOCAL_TARGET, RunSpec
from flash_mcp.state.queue import Label
from flash_mcp.state.references import Subject
from flash_mcp.state.tournaments import NAME_CHARACTERS, Tournament
from flash_mcp.tools.shared.resolve import TAKEN_FROM_RUN, read_configs, resolve_eval
from flash_mcp.tools.training.plan import Plan, enqueue, plan_of


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
    _check_fields(arms, settings, common["split"], own)
    plans: dict[str, Plan] = {}
    for number, arm in enumerate(arms, start=1):
        name = str(arm.get("name", f"arm-{number}"))
        if name in plans:
            what = f"two arms are called {name!r}"
            raise FlashError("invalid_argument", what, fix="give each another name")
        fields = without_none({**settings, **arm}) | own
        fields.pop("name", None)
        try:
            plan = await plan_of(fields, read_configs(None), None, sample=False)
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


def _check_fields(arms: Sequence[Json], settings: Json, split: str, own: Json) -> None:
    """FlashError(invalid_argument) for fields that all arms have alike."""
    fixed = own.keys() & {*settings.keys() - {"steps"}, *itertools.chain(*arms)}
    if split != "eval":
        fixed.add("split")
    if fixed:
        what = f"arms that learn cannot choose {', '.join(sorted(fixed))}"
        own_arguments = "environment, seed, secrets and target are arguments of tournament"
        fix = f"{own_arguments}, steps is one of settings; leave the others out"
        raise FlashError("invalid_argument", what, fix=fix)


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
    """An arm as the tournament keeps it, with how its checkpoints are evaluated."""
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


def explanation_of_race(row: Tournament, race: Standing, names: Sequence[str]) -> str:
    """How a tournament of arms that learn stands, in words."""
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
