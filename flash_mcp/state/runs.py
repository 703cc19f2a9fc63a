"""Runs: one row each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import ACTIVE, Json, Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import LOCAL_TARGET, Precision
from flash_mcp.state.database import Connection, marks
from flash_mcp.state.owners import caller

LOOKED_AT = 50
"""Newest runs among which one like another is looked for."""
RunKind = Literal["trainings", "evaluations", "samples"]
RunOrder = Literal["newest", "success", "name", "longest"]
KINDS: dict[str, str] = {
    "trainings": "algorithm <> 'eval'",
    "evaluations": "algorithm = 'eval' AND json_extract(spec, '$.split') <> 'train'",
    "samples": "algorithm = 'eval' AND json_extract(spec, '$.split') = 'train'",
}
"""A sample evaluates on tasks of training: it shows what a run could learn from."""
ORDERS: dict[str, str] = {
    "newest": "created DESC",
    "success": """(SELECT json_extract(summary, '$.success') FROM evals
                   WHERE evals.run_id = runs.id ORDER BY step DESC LIMIT 1) DESC NULLS LAST""",
    "name": "json_extract(lineage, '$.name') NULLS LAST, environment, model",
    "longest": "used_s DESC",
}
RECENT_S = 7 * 86_400.0
REMOTE_RETRY_S = 5.0
"""How long the control plane retries while a store elsewhere does not answer."""

COUNTED = f"used_s > 0 AND (serves IS NULL OR target <> '{LOCAL_TARGET}')"
"""Runs whose hours count: a model server of this machine shares it with all that runs here."""


def folder_of(run: Run) -> RunFolder:
    """The run's folder, for the control plane: it waits for no store for long."""
    if run.target == LOCAL_TARGET:
        return RunFolder(run.folder)
    return RunFolder(run.folder, retry_s=REMOTE_RETRY_S)


class RunTable(Connection):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._taken: dict[tuple[str, str], dict[str, Run]] = {}
        """Of an owner's look at a target: its runs as they were read last."""

    def run(self, run_id: str) -> Run:
        """FlashError(unknown_run) where there is none of that id. See `server_run`."""
        sql = "SELECT * FROM runs WHERE id = ? AND serves IS NULL"
        if run := self.record(Run, sql, [run_id]):
            return run
        sql = "SELECT id FROM runs WHERE serves IS NULL ORDER BY created DESC LIMIT 1000"
        recent = self.column(sql)
        fix = "call status without run_id for the list of runs"
        plain, _, step = run_id.partition("@")
        if step:
            fix = f"pass run_id={plain!r}, and step={step} where the tool takes a step"
        what = f"there is no run {run_id!r}{did_you_mean(run_id, recent)}"
        raise FlashError("unknown_run", what, run_id=run_id, fix=fix)

    def server_run(self, run_id: str) -> Run:
        """As `run`, also if it is the model server of a deployment."""
        sql = "SELECT * FROM runs WHERE id = ? AND serves IS NOT NULL"
        return self.record(Run, sql, [run_id]) or self.run(run_id)

    def precision_of(self, run_id: str | None) -> Precision | None:
        """In which a run or a model server computes. A server may be another owner's: they share
        it.
        """
        sql = "SELECT precision FROM main.runs WHERE id = ?"
        return next(iter(self.column(sql, [run_id])), None)

    def runs(
        self, state: str | None = None, limit: int = 20, cursor: str | None = None
    ) -> list[Run]:
        """The newest runs first. `cursor` is the id of the last run of the page before."""
        where, values = ["serves IS NULL"], list[Any]()
        if state is not None:
            where.append("state = ?")
            values.append(state)
        if cursor is not None:
            where.append("(created, id) < (?, ?)")
            values += [self.run(cursor).created, cursor]
        sql = (
            f"SELECT * FROM runs WHERE {' AND '.join(where)} ORDER BY created DESC, id DESC LIMIT ?"
        )
        return self.records(Run, sql, [*values, limit])

    def trainings_on(self, environment: str, owner: str) -> list[Run]:
        """An owner's newest training runs on any version of the environment, the newest first."""
        sql = """SELECT * FROM runs WHERE environment = ? AND owner = ? AND algorithm != 'eval'
                 AND serves IS NULL ORDER BY created DESC LIMIT ?"""
        return self.records(Run, sql, [environment, owner, LOOKED_AT])

    def listed_runs(
        self,
        kind: RunKind,
        state: str | None = None,
        contains: str = "",
        order: RunOrder = "newest",
        limit: int = 20,
        offset: int = 0,
    ) -> list[Run]:
        """Runs of one kind whose id, name, note, model or environment contains a text."""
        sql = f"""SELECT * FROM runs WHERE serves IS NULL AND {KINDS[kind]}
                  AND (?1 IS NULL OR state = ?1)
                  AND instr(lower(json_array(id, algorithm, model, environment,
                      json_extract(lineage, '$.name'), json_extract(lineage, '$.note'))), lower(?2))
                  ORDER BY {ORDERS[order]}, created DESC, id DESC LIMIT ?3 OFFSET ?4"""
        return self.records(Run, sql, [state, contains, limit, offset])

    def evaluations_of(self, environment_digest: str) -> list[Run]:
        """Evaluations on that version that succeeded or have not ended, the newest first."""
        sql = """SELECT * FROM runs WHERE algorithm = 'eval' AND environment_digest = ?
                 AND state NOT IN ('failed', 'cancelled') AND cancel_requested IS NULL
                 AND files_removed IS NULL ORDER BY created DESC, id DESC"""
        return self.records(Run, sql, [environment_digest])

    def seed_runs(self, run: Run) -> list[Run]:
        """All runs that one call started with several seeds, `run` among them, by seed."""
        sql = """SELECT * FROM runs WHERE environment = ? AND environment_digest = ?
                 AND json_extract(lineage, '$.seed_group') = ?
                 ORDER BY json_extract(spec, '$.seed')"""
        return self.records(Run, sql, [run.environment, run.environment_digest, run.seed_group])

    def active_runs(self) -> list[Run]:
        sql = f"""SELECT * FROM runs WHERE state IN ({marks(ACTIVE)}) AND serves IS NULL
                  ORDER BY created, id"""
        return self.records(Run, sql, ACTIVE)

    def taken_runs(self, target: str) -> list[Run]:
        """Runs of the target with an attempt under way, oldest first. Only rows that have changed
        since the last call are read: hundreds may be under way.
        """
        sql = """SELECT id, updated FROM runs WHERE state IN ('starting', 'running') AND target = ?
                 ORDER BY created, id"""
        updated = dict(self.two_columns(sql, [target]))
        before = self._taken.get((caller().owner, target), {})
        taken: dict[str, Run] = {}
        for run_id, run in before.items():
            if updated.get(run_id) == run.updated:
                taken[run_id] = run
        rows = """SELECT * FROM runs WHERE id IN (SELECT value FROM json_each(?))
                  AND state IN ('starting', 'running')"""
        for run in self.records(Run, rows, [json.dumps(list(updated.keys() - taken.keys()))]):
            taken[run.id] = run
        self._taken[caller().owner, target] = taken
        return [taken[run_id] for run_id in updated if run_id in taken]

    def live_attempts(self) -> set[str]:
        """RUN-ATTEMPT of every attempt under way, of all owners and on all targets, and what its
        engine calls it: a job that was started again has the number of its first attempt.
        """
        under_way = "FROM main.runs WHERE state IN ('starting', 'running')"
        sql = f"SELECT id || '-' || attempt {under_way} UNION SELECT handle {under_way}"
        return set(self.column(sql))

    def active_with_secrets(self) -> list[Run]:
        sql = f"""SELECT * FROM runs WHERE state IN ({marks(ACTIVE)})
                  AND json_array_length(spec, '$.secrets') > 0"""
        return self.records(Run, sql, ACTIVE)

    def may_have_to_wait(self, target: str) -> list[Run]:
        """The target's queued runs that need secrets, found a disk full, or are held."""
        sql = """SELECT * FROM runs WHERE state = 'queued' AND target = ?1
                 AND json_array_length(spec, '$.secrets') > 0
                 UNION
                 SELECT * FROM runs WHERE state = 'queued' AND target = ?1
                 AND json_extract(error, '$.code') IN ('disk_full', 'held')"""
        return self.records(Run, sql, [target])

    def active_targets(self) -> set[str]:
        """Targets with runs or tournaments of any owner that have not ended. Only indexes are read:
        many may be queued.
        """
        sql = """SELECT DISTINCT target FROM main.runs INDEXED BY runs_queued
                 WHERE state = 'queued'
                 UNION
                 SELECT DISTINCT target FROM main.runs INDEXED BY runs_taken
                 WHERE state IN ('starting', 'running')
                 UNION
                 SELECT target FROM main.tournaments WHERE state = 'running'"""
        return set(self.column(sql))

    def overlap(self, run: Run) -> Json | None:
        """What the splits of a run's environment share, if a run that trained on it with the same
        arguments recorded it.
        """
        sql = """SELECT * FROM runs WHERE environment = ? AND environment_digest = ?
                 AND json_extract(lineage, '$.overlap') IS NOT NULL ORDER BY created DESC"""
        for row in self.records(Run, sql, [run.environment, run.environment_digest]):
            if row.spec.environment_args == run.spec.environment_args:
                return row.lineage["overlap"]
        return None

    def counts_by_target(self) -> dict[tuple[str, str], int]:
        """{(target, state): number of runs}, of active runs of all owners."""
        sql = f"""SELECT target, state, count(*) AS n FROM main.runs
                  WHERE state IN ({marks(ACTIVE)}) AND serves IS NULL GROUP BY target, state"""
        return {(row["target"], row["state"]): row["n"] for row in self.query(sql, ACTIVE)}

    def targets_with_waiting(self) -> set[str]:
        """Targets that have given some attempt, of any owner, no machine yet."""
        sql = """SELECT DISTINCT target FROM main.runs
            WHERE state = 'starting' AND pending_reason <> ''"""
        return set(self.column(sql))

    def active_servers(self) -> list[Run]:
        """Model servers that have not ended, and that nobody ends."""
        sql = f"""SELECT * FROM runs WHERE serves IS NOT NULL AND cancel_requested IS NULL
                  AND state IN ({marks(ACTIVE)})"""
        return self.records(Run, sql, ACTIVE)

    def shared_server(self, model: str) -> Run | None:
        """The one that all deployments of a model on this machine share."""
        shared = [run for run in self.active_servers() if run.serves == model]
        return max(shared, key=lambda run: run.created, default=None)

    def used_s_by_target(self, deployment_id: str | None = None) -> dict[str, float]:
        """{target: seconds of GPUs} that all runs and servers worked, or one deployment's."""
        sql = f"""SELECT target, sum(used_s * gpus) FROM runs
                 WHERE {COUNTED} AND (?1 IS NULL OR serves = ?1) GROUP BY target"""
        return dict(self.two_columns(sql, [deployment_id]))

    def ledger(self, by: Literal["day", "name"]) -> list[Json]:
        """What runs and servers took, of each day on which they started (UTC), or of each name and
        tournament: {"what", "runs", "used_s": {target: seconds}}; the newest or dearest first.
        """
        name = "json_extract(lineage, '$.tournament'), json_extract(lineage, '$.name'), serves"
        what, order = f"coalesce({name}, 'without a name')", "sum(gpu_s) DESC, what"
        if by == "day":
            what, order = "date(started, 'unixepoch')", "what DESC"
        sql = f"""SELECT what, sum(runs) AS runs, json_group_object(target, gpu_s) AS used_s FROM (
                    SELECT {what} AS what, target, count(*) AS runs, sum(used_s * gpus) AS gpu_s
                    FROM runs WHERE used_s > 0 GROUP BY what, target)
                  GROUP BY what ORDER BY {order}"""
        return [{**row, "used_s": json.loads(row["used_s"])} for row in self.query(sql)]

    def recent_targets(self) -> set[str]:
        sql = "SELECT DISTINCT target FROM runs WHERE started > ?"
        return set(self.column(sql, [time.time() - RECENT_S]))

    def run_counts(self, kind: RunKind | None = None) -> dict[str, int]:
        only = f"AND {KINDS[kind]}" if kind else ""
        sql = f"SELECT state, count(*) FROM runs WHERE serves IS NULL {only} GROUP BY state"
        return dict(self.two_columns(sql))
