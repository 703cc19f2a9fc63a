"""Several seeds in one call of train: a run for each."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from flash_mcp.judgement.statistics import MOST_MEASUREMENTS
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.spec import explain
from flash_mcp.state.queue import Label
from flash_mcp.tools.shared.configs import Configs
from flash_mcp.tools.training.plan import Plan, enqueue

COUNT = Field(min_length=2, max_length=MOST_MEASUREMENTS)
Seeds = Annotated[list[int], COUNT]
"""As the tool's schema has it; `seeds_of` checks each."""
VALID = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], COUNT])


def seeds_of(seeds: Sequence[int] | None, config: Configs, arguments: Json) -> list[int]:
    """The seeds of the call or its config files, the first put into `arguments`; else none."""
    if seeds is not None and "seed" in arguments:
        fix = "keep one of the two: seeds starts a run for each"
        raise FlashError("invalid_argument", "seed and seeds are both given", fix=fix)
    requested = seeds
    if seeds is None and "seed" not in arguments:
        requested = config.fields.get("seeds")
    if requested is None:
        return []
    fix = f"give 2 to {MOST_MEASUREMENTS} different seeds from 0 to 2147483647"
    try:
        numbers = VALID.validate_python(requested, strict=True)
    except ValidationError as error:
        raise FlashError("invalid_argument", f"seeds: {explain(error)}", fix=fix) from error
    if len({*numbers}) < len(numbers):
        raise FlashError("invalid_argument", f"seeds={numbers} names one twice", fix=fix)
    arguments["seed"] = numbers[0]
    return numbers


def key_of(idempotency_key: str | None, seeds: Sequence[int]) -> str | None:
    """The key of the run with the first of `seeds`; without any, the caller's own."""
    if idempotency_key and seeds:
        return f"{idempotency_key} seed={seeds[0]}"
    return idempotency_key


def enqueue_each(
    plan: Plan, seeds: Sequence[int], idempotency_key: str | None, label: Label
) -> tuple[list[Run], bool]:
    """Queue all or none; (runs in the order of `seeds`, whether they are new)."""
    runs: list[Run] = []
    created: set[bool] = set()
    resolved = plan.inputs.resolved
    group = secrets.token_hex(8)
    with plan.store.transaction():
        for seed in seeds:
            spec = resolved.spec.model_copy(update={"seed": seed})
            inputs = dataclasses.replace(
                plan.inputs, resolved=resolved.model_copy(update={"spec": spec})
            )
            one = dataclasses.replace(plan, inputs=inputs)
            run, is_new = enqueue(one, key_of(idempotency_key, [seed]), label, seed_group=group)
            runs.append(run)
            created.add(is_new)
        if len(created) > 1:
            what = "the key was used with other seeds"
            fix = "use a new key, or the seeds of the first call"
            raise FlashError("idempotency_conflict", what, seeds=list(seeds), fix=fix)
    return runs, created == {True}


def note_on(runs: Sequence[Run]) -> str:
    lines: list[str] = []
    for run in runs:
        lines.append(f"{run.id} (seed {run.training.seed})")
    return f"{', '.join(lines)}: status of any reports how far the seeds spread"
