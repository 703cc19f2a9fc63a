"""Tournaments: one row each, with its arms, the order of its tasks, and the outcomes of its rounds.

    running -> finished | failed | cancelled

Arms that learn are trained and evaluated in turns: a training run ends at a milestone, its
checkpoint is evaluated, and the run is resumed to the next one.

The runs of a round are queued in the transaction that adds the round to the row; their outcomes are
written in the one that adds the next. So every process may be killed at any moment,
and whoever looks next goes on."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from flash_mcp.extensions.tournament.standing import FINALISTS, Race, Standing, round_size
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import Json, Record, Run
from flash_mcp.protocol.spec import ResolvedEval
from flash_mcp.state import queue
from flash_mcp.state.owners import LOCAL, LOCAL_OWNER, Caller, Quotas, acting_as, caller
from flash_mcp.state.runs import folder_of
from flash_mcp.state.serving import saved_adapter
from flash_mcp.state.store import Store

log = logging.getLogger(__name__)
TournamentState = Literal["running", "finished", "failed", "cancelled"]
PASSING = ("quota_exceeded", "state_busy", "disk_full")
"""Errors that the next round waits out."""
NAME_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class Tournament(Record):
    id: str
    owner: str
    state: TournamentState
    spec: Json
    """`arms`: [{"name", "of", "resolved", "adapter", "env_files"}]; `order`: places of the tasks in
    the split; `environment`, `split`, `alpha`; `secrets` that the owner's token grants; `request`:
    a digest of what was passed. Where arms learn also `milestones`: steps; `held_back`: the first
    tasks of `order`, for the end; `round_tasks`."""
    rounds: list[Json]
    """{"tasks": number, "runs": {arm: evaluation}, "outcomes": {arm: {task: success}}, "kinds":
    {task: kind}}; the round under way has no outcomes yet. Where arms learn with the `step` of the
    milestone; before it comes {"tasks": 0, "step", "runs": {arm: training run}, "failed": [arm]}.
    """
    error: Json | None
    created: float
    ended: float | None

    @property
    def milestones(self) -> list[int]:
        """The steps after which its arms are evaluated, if they learn."""
        return self.spec.get("milestones", [])

    @cached_property
    def standing(self) -> Standing:
        """After the rounds that have ended; a Race, if its arms learn."""
        result = Standing(len(self.spec["arms"]), self.spec["alpha"])
        if self.milestones:
            result = Race(result.arms, result.alpha, rounds=len(self.milestones))
        for number, row in enumerate(self.rounds, start=1):
            if "step" in row:
                number = self.milestones.index(row["step"]) + 1
            result.out.update((int(arm), number) for arm in row.get("failed", ()))
            if "outcomes" in row:
                outcomes = {int(arm): tasks for arm, tasks in row["outcomes"].items()}
                result.add(number, outcomes, row.get("kinds"))
        return result

    @property
    def run_ids(self) -> list[str]:
        return list(self.rounds[-1]["runs"].values()) if self.rounds else []

    @property
    def round(self) -> int:
        """The newest round whose evaluations were started."""
        return sum(bool(row["tasks"]) for row in self.rounds)

    @property
    def used(self) -> int:
        return sum(row["tasks"] for row in self.rounds)

    def newest_run(self, arm: int) -> str | None:
        for row in reversed(self.rounds):
            if row["tasks"] and str(arm) in row["runs"]:
                return row["runs"][str(arm)]
        return None

    def checkpoint(self, arm: int) -> str | None:
        """RUN@STEP of an arm: of one that learns, where it is now."""
        for row in reversed(self.rounds):
            if not row["tasks"] and str(arm) in row["runs"]:
                return f"{row['runs'][str(arm)]}@{row['step']}"
        return self.spec["arms"][arm]["resolved"]["spec"]["checkpoint"]


def find_tournament(store: Store, tournament_id: str) -> Tournament:
    sql = "SELECT * FROM tournaments WHERE id = ?"
    if row := store.record(Tournament, sql, [tournament_id]):
        return row
    existing = store.column("SELECT id FROM tournaments ORDER BY created DESC LIMIT 100")
    raise FlashError(
        "unknown_tournament",
        f"there is no tournament {tournament_id!r}{did_you_mean(tournament_id, existing)}",
        fix=f"use one of: {', '.join(existing[:10])}" if existing else "start one with arms=[...]",
    )


def start(
    store: Store,
    spec: Json,
    target: str,
    key: str | None,
    train: Callable[[str], dict[str, str]] | None = None,
) -> tuple[Tournament, bool]:
    """Add a tournament of the caller, with its first round. With an idempotency key that was used
    before: (that one, False). Raises as `asked_before` and queue.enqueue do.

    `train` queues the training of arms that learn to their first milestone, for a tournament's id:
    {arm: run}.
    """
    spec = {**spec, "secrets": sorted(caller().secrets or ()), "client": surroundings.client()}
    with store.transaction():
        if first := asked_before(store, spec["request"], key):
            return first, False
        tournament_id = queue.new_id(store, "tour")
        row = {"id": tournament_id, "owner": caller().owner, "state": "running", "target": target}
        row |= {"spec": spec, "rounds": [], "idempotency_key": key, "created": time.time()}
        if train:
            first = {"step": spec["milestones"][0], "tasks": 0, "runs": train(tournament_id)}
            row["rounds"] = [first]
        store.insert("tournaments", row)
        advance(store, tournament_id)
    return find_tournament(store, tournament_id), True


def asked_before(store: Store, request: str, key: str | None) -> Tournament | None:
    """The caller's tournament with that idempotency key, if any. FlashError(idempotency_conflict)
    if its request had another digest.
    """
    sql = "SELECT * FROM tournaments WHERE idempotency_key = ? AND owner = ?"
    row = store.record(Tournament, sql, [key, caller().owner]) if key else None
    if row and row.spec.get("request") != request:
        what = f"the key was used for {row.id}, which asked for something else"
        fix = "use a new key, or repeat the first call's arguments"
        raise FlashError("idempotency_conflict", what, idempotency_key=key, fix=fix)
    return row


def advance_all(store: Store) -> None:
    """`advance` all owners' tournaments whose round has ended. One that cannot go on fails."""
    sql = """SELECT * FROM tournaments WHERE state = 'running' AND NOT EXISTS (
             SELECT 1 FROM json_each(rounds, '$[#-1].runs') JOIN runs ON runs.id = json_each.value
             WHERE runs.ended IS NULL)"""
    for row in store.records(Tournament, sql):
        owner = LOCAL
        if row.owner != LOCAL_OWNER:
            # What the server allows its owners was checked as it began.
            limits = Quotas(queued_runs=sys.maxsize)
            owner = Caller(row.owner, limits=limits, secrets=frozenset(row.spec["secrets"]))
        with acting_as(owner):
            try:
                advance(store, row.id)
            except FlashError as error:
                if error.code not in PASSING:
                    _write(store, row.id, state="failed", error=error.to_dict(), ended=time.time())
            except Exception:
                log.exception("trouble with %s", row.id)


def advance(store: Store, tournament_id: str) -> None:
    """Once all runs of the round have ended: count them, eliminate, and queue the next round or end
    the tournament.
    """
    with store.transaction():
        row = find_tournament(store, tournament_id)
        if row.state != "running":
            return
        runs = list(map(store.run, row.run_ids))
        if any(run.ended is None for run in runs):
            return
        if runs:
            _read(store, row, runs)
        result = row.standing
        if isinstance(result, Race):
            goes_on = _continue_race(store, row, result)
        else:
            order = row.spec["order"]
            goes_on = len(result.left) > 1 and row.used < len(order)
            if goes_on:
                size = round_size(row.used, len(order))
                _add_round(store, row, result.left, order[row.used : row.used + size])
        if goes_on:
            _write(store, row.id, rounds=row.rounds)
        else:
            _write(store, row.id, state="finished", rounds=row.rounds, ended=time.time())


def stop(store: Store, tournament_id: str) -> tuple[str, int, str]:
    """Its state, its rounds and what reports it: what `cancel` says."""
    with store.transaction():
        row = find_tournament(store, tournament_id)
        if row.state == "running":
            _write(store, row.id, state="cancelled", ended=time.time())
            for run_id in row.run_ids:
                if store.run(run_id).ended is None:
                    queue.request_cancel(store, run_id, f"{tournament_id} was stopped")
    row = find_tournament(store, tournament_id)
    return row.state, len(row.rounds), f"tournament(tournament_id={row.id!r}) reports its rounds"


def _read(store: Store, row: Tournament, runs: list[Run]) -> None:
    """Put the outcomes of the round into the row. FlashError if one of its evaluations failed; an
    arm whose training failed is out.
    """
    if not row.rounds[-1]["tasks"]:
        arms = zip(row.rounds[-1]["runs"], runs, strict=True)
        row.rounds[-1]["failed"] = [arm for arm, run in arms if run.state != "succeeded"]
        return
    outcomes: Json = {}
    kinds: dict[str, str] = {}
    for arm, run in zip(row.rounds[-1]["runs"], runs, strict=True):
        if run.state != "succeeded":
            name = row.spec["arms"][int(arm)]["name"]
            why = f": {FlashError.from_dict(run.error).account}" if run.error else ""
            what = f"{run.id}, the evaluation of {name!r}, {run.state}{why}"
            fix = "start another tournament, without that arm or with other settings"
            raise FlashError("not_ready", what, run_id=run.id, fix=fix)
        tries = store.tries(run.id, run.evaluation.step)
        outcomes[arm] = {item.task_id: item.success for item in tries if item.error is None}
        kinds.update((item.task_id, item.kind) for item in tries)
    row.rounds[-1] |= {"outcomes": outcomes, "kinds": kinds}


def _continue_race(store: Store, row: Tournament, race: Race) -> bool:
    """Queue what comes after a round of arms that learn; whether there is anything. FlashError if
    fewer than two of them can go on.
    """
    newest = row.rounds[-1]
    place = row.milestones.index(newest["step"])
    is_last = place == race.rounds - 1
    if len(race.left) < FINALISTS:
        what = "the training of the arms failed, and fewer than two are left"
        fix = "status of their runs says why; start another with other settings"
        raise FlashError("not_ready", what, runs=", ".join(row.rounds[0]["runs"].values()), fix=fix)
    if newest["tasks"]:
        if is_last:
            return False
        step = row.milestones[place + 1]
        runs: Json = {}
        client = row.spec.get("client", "")
        for arm in race.left:
            run = store.run(str(row.checkpoint(arm)).partition("@")[0])
            runs[str(arm)] = queue.resume(store, run, folder_of(run), step, client).id
        row.rounds.append({"step": step, "tasks": 0, "runs": runs})
        return True
    held_back = row.spec["held_back"]
    tasks = row.spec["order"][:held_back]
    if not is_last:  # where there are fewer tasks than rounds need, they come again
        tasks = row.spec["order"][held_back:]
        size = row.spec["round_tasks"]
        tasks = (tasks * (place * size // len(tasks) + 2))[place * size :][:size]
    _add_round(store, row, race.left, tasks)
    row.rounds[-1]["step"] = newest["step"]
    return True


def _add_round(store: Store, row: Tournament, arms: Sequence[int], tasks: Sequence[int]) -> None:
    """Queue an evaluation on these tasks for each of the arms."""
    environment = store.environment(row.spec["environment"])
    changes: Json = {"tasks": list(tasks), "steps": len(tasks), "environment": environment.name}
    runs: Json = {}
    for arm in arms:
        entry = row.spec["arms"][arm]
        adapter = entry["adapter"]
        if row.milestones:
            reference = str(row.checkpoint(arm))
            run_id, _, step = reference.partition("@")
            saved = store.checkpoint(run_id, int(step))
            adapter = saved_adapter(store, store.run(run_id), saved)
            changes |= {"checkpoint": reference, "step": saved.step}
        resolved = ResolvedEval.model_validate(entry["resolved"])
        resolved = resolved.model_copy(update={"spec": resolved.spec.model_copy(update=changes)})
        name = f"{row.id} round {row.round + 1}: {entry['name']}"[:NAME_CHARACTERS]
        lineage = {"tournament": row.id, "name": name, "env_files": entry.get("env_files")}
        if "client" in row.spec:  # who asks here may be the supervisor
            lineage["client"] = row.spec["client"]
        run, _ = queue.enqueue(store, resolved, environment, adapter, lineage=lineage)
        runs[str(arm)] = run.id
    row.rounds.append({"tasks": len(tasks), "runs": runs})


def _write(store: Store, tournament_id: str, **values: Any) -> None:
    store.update("tournaments", tournament_id, values, ("running",))
