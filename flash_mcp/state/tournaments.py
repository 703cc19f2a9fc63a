"""Tournaments: one row each, with its arms, the order of its tasks, and the outcomes of its rounds.

    running -> finished | failed | cancelled

The evaluations of a round are queued in the transaction that adds the round to the row; their
outcomes are written in the one that adds the next. So every process may be killed at any moment,
and whoever looks next goes on."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from flash_mcp.judgement.tournament import Standing, round_size
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import Json, Record, Run
from flash_mcp.protocol.spec import ResolvedEval
from flash_mcp.state import queue
from flash_mcp.state.owners import LOCAL, LOCAL_OWNER, Caller, acting_as, caller
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
    """`arms`: [{"name", "of", "resolved", "adapter"}]; `order`: places of the tasks in the split;
    `environment`, `split`, `alpha`; `secrets` that the owner's token grants."""
    rounds: list[Json]
    """{"tasks": number, "runs": {arm: evaluation}, "outcomes": {arm: {task: success}}}; the round
    under way has no outcomes yet."""
    error: Json | None
    created: float
    ended: float | None

    @cached_property
    def standing(self) -> Standing:
        """After the rounds that have ended."""
        result = Standing(len(self.spec["arms"]), self.spec["alpha"])
        for number, row in enumerate(self.rounds, start=1):
            if "outcomes" in row:
                result.add(number, {int(arm): tasks for arm, tasks in row["outcomes"].items()})
        return result

    @property
    def run_ids(self) -> list[str]:
        return list(self.rounds[-1]["runs"].values()) if self.rounds else []

    @property
    def used(self) -> int:
        """Tasks of the rounds that were started."""
        return sum(row["tasks"] for row in self.rounds)

    def newest_run(self, arm: int) -> str | None:
        for row in reversed(self.rounds):
            if str(arm) in row["runs"]:
                return row["runs"][str(arm)]
        return None


def find_tournament(store: Store, tournament_id: str) -> Tournament:
    """FlashError(unknown_tournament)."""
    rows = store.query("SELECT * FROM tournaments WHERE id = ?", [tournament_id])
    if rows:
        return Tournament.from_row(rows[0])
    existing = store.column("SELECT id FROM tournaments ORDER BY created DESC LIMIT 100")
    raise FlashError(
        "unknown_tournament",
        f"there is no tournament {tournament_id!r}{did_you_mean(tournament_id, existing)}",
        fix=f"use one of: {', '.join(existing[:10])}" if existing else "start one with arms=[...]",
    )


def start(store: Store, spec: Json, target: str, key: str | None) -> tuple[Tournament, bool]:
    """Add a tournament of the caller, with its first round. With an idempotency key that was used
    before: (that one, False). Raises as queue.enqueue does.
    """
    spec = {**spec, "secrets": sorted(caller().secrets or ())}
    with store.transaction():
        sql = "SELECT * FROM tournaments WHERE idempotency_key = ? AND owner = ?"
        if key and (row := store.first(sql, [key, caller().owner])):
            if row["spec"] != spec:
                what = f"the key was used for {row['id']}, which asked for something else"
                fix = "use a new key, or repeat the first call's arguments"
                raise FlashError("idempotency_conflict", what, idempotency_key=key, fix=fix)
            return Tournament.from_row(row), False
        tournament_id = queue.new_id(store, "tour")
        row = {"id": tournament_id, "owner": caller().owner, "state": "running", "target": target}
        row |= {"spec": spec, "rounds": [], "idempotency_key": key, "created": time.time()}
        store.insert("tournaments", row)
        advance(store, tournament_id)
    return find_tournament(store, tournament_id), True


def advance_all(store: Store) -> None:
    """`advance` all owners' tournaments whose round has ended. One that cannot go on fails."""
    sql = """SELECT * FROM tournaments WHERE state = 'running' AND NOT EXISTS (
             SELECT 1 FROM json_each(rounds, '$[#-1].runs') JOIN runs ON runs.id = json_each.value
             WHERE runs.ended IS NULL)"""
    for row in store.records(Tournament, sql):
        owner = LOCAL
        if row.owner != LOCAL_OWNER:
            owner = Caller(row.owner, secrets=frozenset(row.spec["secrets"]))
        with acting_as(owner):
            try:
                advance(store, row.id)
            except FlashError as error:
                if error.code not in PASSING:
                    _write(store, row.id, state="failed", error=error.to_dict(), ended=time.time())
            except Exception:
                log.exception("trouble with %s", row.id)


def advance(store: Store, tournament_id: str) -> None:
    """Once all evaluations of the round have ended: count them, eliminate, and queue the next round
    or end the tournament.
    """
    with store.transaction():
        row = find_tournament(store, tournament_id)
        if row.state != "running":
            return
        runs = [store.run(run_id) for run_id in row.run_ids]
        if any(run.ended is None for run in runs):
            return
        if runs:
            _read(store, row, runs)
        result = row.standing
        if len(result.left) > 1 and row.used < len(row.spec["order"]):
            _add_round(store, row, result)
            _write(store, row.id, rounds=row.rounds)
        else:
            _write(store, row.id, state="finished", rounds=row.rounds, ended=time.time())


def stop(store: Store, tournament_id: str) -> None:
    row = find_tournament(store, tournament_id)
    if row.state == "running":
        _write(store, row.id, state="cancelled", ended=time.time())
        for run_id in row.run_ids:
            if store.run(run_id).ended is None:
                queue.request_cancel(store, run_id, f"{tournament_id} was stopped")


def _read(store: Store, row: Tournament, runs: list[Run]) -> None:
    """Put the outcomes of the round into the row. FlashError if one of its evaluations failed."""
    outcomes: Json = {}
    for arm, run in zip(row.rounds[-1]["runs"], runs, strict=True):
        if run.state != "succeeded":
            name = row.spec["arms"][int(arm)]["name"]
            why = f": {FlashError.from_dict(run.error).account}" if run.error else ""
            what = f"{run.id}, the evaluation of {name!r}, {run.state}{why}"
            fix = "start another tournament, without that arm or with other settings"
            raise FlashError("not_ready", what, run_id=run.id, fix=fix)
        tries = store.tries(run.id, run.evaluation.step)
        outcomes[arm] = {item.task_id: item.success for item in tries if item.error is None}
    row.rounds[-1]["outcomes"] = outcomes


def _add_round(store: Store, row: Tournament, result: Standing) -> None:
    """Queue an evaluation for each arm that is left, on tasks that no earlier round used."""
    order = row.spec["order"]
    size = round_size(row.used, len(order))
    environment = store.environment(row.spec["environment"])
    changes = {"tasks": order[row.used : row.used + size], "steps": size}
    changes |= {"environment": environment.name}
    runs: Json = {}
    for arm in result.left:
        entry = row.spec["arms"][arm]
        resolved = ResolvedEval.model_validate(entry["resolved"])
        resolved = resolved.model_copy(update={"spec": resolved.spec.model_copy(update=changes)})
        name = f"{row.id} round {len(row.rounds) + 1}: {entry['name']}"[:NAME_CHARACTERS]
        lineage = {"tournament": row.id, "name": name}
        run, _ = queue.enqueue(store, resolved, environment, entry["adapter"], lineage=lineage)
        runs[str(arm)] = run.id
    row.rounds.append({"tasks": size, "runs": runs})


def _write(store: Store, tournament_id: str, **values: Any) -> None:
    assignments = ", ".join(f"{name} = ?" for name in values)
    sql = f"""UPDATE main.tournaments SET {assignments} WHERE state = 'running'
              AND id = (SELECT id FROM tournaments WHERE id = ?)"""
    encoded = [store.encode(name, value) for name, value in values.items()]
    store.execute(sql, [*encoded, tournament_id])
