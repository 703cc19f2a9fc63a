"""What runs reported: metrics, rollouts, evaluations, events, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, get_args

from flash_mcp.judgement.attempts import unknown_checkpoint
from flash_mcp.judgement.comparison import Solved
from flash_mcp.judgement.curve import METRICS, Curve, drawn
from flash_mcp.judgement.health import WINDOW, Metrics
from flash_mcp.protocol.records import (
    ACTIVE,
    Checkpoint,
    Evaluation,
    Event,
    Json,
    Rollout,
    Run,
    StepMetrics,
    Try,
)
from flash_mcp.protocol.spec import LOCAL_TARGET, Precision
from flash_mcp.state.database import marks, pick
from flash_mcp.state.runs import RunTable, folder_of
from flash_mcp.state.schema import RolloutOrder

NEWEST_STEPS = WINDOW
"""Steps of which the speed is the mean; the newest steps of an outline are whole."""
OUTLINE_STEPS = 400
"""About the number of steps of a long run that an outline has."""


class HistoryTables(RunTable):
    """What runs reported: metrics, rollouts, evaluations, events, checkpoints."""

    def metrics(self, run_id: str, since: int = -1, limit: int = -1) -> list[StepMetrics]:
        """Steps after `since`, in order: the last `limit` of them, or all."""
        sql = """SELECT step, epoch, time, metrics FROM metrics
                 WHERE run_id = ? AND step > ? ORDER BY step DESC LIMIT ?"""
        return self.records(StepMetrics, sql, [run_id, since, limit])[::-1]

    def outline(self, run_id: str) -> list[Metrics]:
        """{metric: value, "step": number} in order, of about OUTLINE_STEPS steps of the whole
        run, those with a held-out loss, and the newest.
        """
        sql = """WITH last AS (SELECT max(step) AS step FROM metrics WHERE run_id = ?1)
                 SELECT m.step, m.metrics FROM metrics m, last
                 WHERE run_id = ?1 AND ((m.step - 1) % max(1, last.step / ?2) = 0
                 OR m.step > last.step - ?3
                 OR json_extract(m.metrics, '$.eval_loss') IS NOT NULL) ORDER BY m.step"""
        rows = self.query(sql, [run_id, OUTLINE_STEPS, NEWEST_STEPS])
        return [{**row["metrics"], "step": row["step"]} for row in rows]

    def last_metrics(self, run_id: str) -> StepMetrics | None:
        return next(iter(self.metrics(run_id, limit=1)), None)

    def slowest_step_s(self, run_id: str) -> float:
        """The longest of the newest steps; 0 if none was made."""
        rows = self.metrics(run_id, limit=NEWEST_STEPS)
        return max((row.metrics.get("time/step_s") or 0.0 for row in rows), default=0.0)

    def lost_steps(self, run: Run) -> int:
        """Steps that a cancelled run made after its newest checkpoint."""
        if run.state != "cancelled" or run.algorithm == "eval":
            return 0
        sql = "SELECT coalesce(max(step), 0) FROM checkpoints WHERE run_id = ?"
        return max(0, run.step - self.column(sql, [run.id])[0])

    def values(self, run_id: str, name: str, newest: int = -1) -> list[float]:
        """One metric at each step that has it, in order; with `newest` only at the last so many
        steps. A quotation mark would end `name`.
        """
        sql = """SELECT json_extract(metrics, ?) AS value FROM (
                     SELECT step, metrics FROM metrics
                     WHERE run_id = ? ORDER BY step DESC LIMIT ?)
                 WHERE value IS NOT NULL ORDER BY step"""
        return self.column(sql, [f'$."{name}"', run_id, newest])

    def usual_start_s(self, run: Run) -> float | None:
        """Seconds until the first step of the newest other run of the same model and algorithm."""
        sql = """SELECT m.time - r.started - coalesce(json_extract(metrics, '$."time/step_s"'), 0)
                 AS seconds FROM metrics m JOIN runs r ON r.id = m.run_id
                 WHERE m.step = 1 AND m.epoch = 1 AND r.id != ? AND r.model = ? AND r.algorithm = ?
                 ORDER BY r.created DESC LIMIT 1"""
        seconds = self.column(sql, [run.id, run.model, run.algorithm])
        # The clock may have been set back meanwhile.
        if seconds:
            return max(0.0, *seconds)
        return None

    def series(self, run_id: str, name: str, points: int = 64) -> list[tuple[int, float]]:
        """(first step, mean) of one metric over at most `points` equal stretches, without nulls."""
        sql = """
            SELECT min(step) AS step, avg(value) AS mean FROM (
                SELECT step, value, ntile(?) OVER (ORDER BY step) AS stretch FROM (
                    SELECT step, (SELECT value FROM json_each(metrics) WHERE key = ?) AS value
                    FROM metrics
                    WHERE run_id = ?)
                WHERE value IS NOT NULL)
            GROUP BY stretch ORDER BY stretch"""
        return self.two_columns(sql, [points, name, run_id])

    def rollouts(
        self,
        run_id: str,
        split: str = "train",
        step: int | None = None,
        order: RolloutOrder = "worst",
        contains: str | None = None,
        success: bool | None = None,
        limit: int = 10,
        offset: int = 0,
    ) -> list[Rollout]:
        """Transcripts of one step, or of all. `contains` looks into the messages' text, ignoring
        ASCII case. `random` is always the same order, so that pages of it fit together.
        """
        where, values = _rollout_filter(run_id, split, step, contains, success)
        orders = {
            "worst": "reward, step DESC, position",
            "best": "reward DESC, step DESC, position",
            "random": "(step * 48271 + position * 69621 + 11) * 16807 % 2147483647",
            "index": "step, position",
        }
        # Which ones first: sorted together with their bodies, all transcripts would be read.
        sql = f"""SELECT step, position, body FROM rollouts JOIN (
                      SELECT step, position FROM rollouts
                      WHERE {where} ORDER BY {orders[order]} LIMIT ? OFFSET ?)
                  USING (step, position)
                  WHERE run_id = ? AND split = ? ORDER BY {orders[order]}"""
        results: list[Rollout] = []
        for row in self.query(sql, [*values, limit, offset, run_id, split]):
            fields = {**row["body"], "step": row["step"], "index": row["position"]}
            results.append(Rollout.from_row(fields))
        return results

    def rollout_count(
        self,
        run_id: str,
        split: str = "train",
        step: int | None = None,
        contains: str | None = None,
        success: bool | None = None,
    ) -> int:
        where, values = _rollout_filter(run_id, split, step, contains, success)
        return int(self.query(f"SELECT count(*) AS n FROM rollouts WHERE {where}", values)[0]["n"])

    def rollout_steps(self, run_id: str, split: str = "train") -> list[int]:
        sql = "SELECT DISTINCT step FROM rollouts WHERE run_id = ? AND split = ? ORDER BY step"
        return self.column(sql, [run_id, split])

    def evals(self, run_id: str) -> list[Evaluation]:
        sql = """SELECT step, epoch, time, summary,
                 (SELECT json_extract(data, '$.answer') FROM events
                  WHERE events.run_id = evals.run_id AND kind = 'constant'
                  ORDER BY time DESC LIMIT 1) AS constant
                 FROM evals WHERE run_id = ? ORDER BY step"""
        return self.records(Evaluation, sql, [run_id])

    def events(self, run_id: str, limit: int = 20, kinds: Sequence[str] = ()) -> list[Event]:
        """The last `limit` events, oldest first."""
        only = f"AND kind IN ({marks(kinds)})" if kinds else ""
        sql = f"""SELECT name, time, epoch, kind, message, data FROM events
                  WHERE run_id = ? {only} ORDER BY time DESC, name DESC LIMIT ?"""
        return self.records(Event, sql, [run_id, *kinds, limit])[::-1]

    def model_commit(self, run_id: str) -> str | None:
        """The hub's commit of the run's base model; None before its fetch, and for other models."""
        for event in self.events(run_id, 1, ["model"]):
            return event.data.get("commit")
        return None

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        sql = """SELECT step, epoch, time, digest, size_bytes, path, metrics FROM checkpoints
                 WHERE run_id = ? ORDER BY step"""
        return self.records(Checkpoint, sql, [run_id])

    def checkpoint(self, run_id: str, step: int | None = None) -> Checkpoint:
        """The one at `step`, or the newest. FlashError(unknown_run | unknown_checkpoint)."""
        run, rows = self.run(run_id), self.checkpoints(run_id)
        results = [row for row in rows if step is None or row.step == step]
        if results:
            return results[-1]
        raise unknown_checkpoint(run, step, [row.step for row in rows])

    def _is_stale(self, table: str, run_id: str, row: Mapping[str, Any]) -> bool:
        """Whether a newer attempt reported that step: one that was replaced changes nothing."""
        sql = f"SELECT 1 FROM {table} WHERE run_id = ? AND step = ? AND epoch > ?"
        return bool(self.query(sql, [run_id, row["step"], row["epoch"]]))

    def put_metrics(self, run_id: str, row: Mapping[str, Any]) -> None:
        if self._is_stale("metrics", run_id, row):
            return
        self._put("metrics", {"run_id": run_id, **pick(row, "step", "epoch", "time", "metrics")})

    def put_rollouts(self, run_id: str, split: str, step: int, rollouts: Iterable[Json]) -> None:
        """All rollouts of a step: those of an attempt that wrote it before are gone."""
        with self.transaction():
            self.execute(
                "DELETE FROM main.rollouts WHERE run_id = ? AND split = ? AND step = ?",
                [run_id, split, step],
            )
            for position, rollout in enumerate(rollouts):
                row: Json = {"run_id": run_id, "split": split, "step": step, "body": rollout}
                row["position"] = position = rollout.get("index", position)
                row |= {"reward": float(rollout["reward"]), "success": int(rollout["success"])}
                read = Rollout.from_row(rollout)
                row |= pick(vars(read), "truncated", "turns", "expected")
                code = read.error and read.error.get("code", "unknown")
                row |= {"code": code, "tokens": read.completion_tokens}
                row["task_id"] = read.task_id or str(position)
                # One of an earlier version has no kind, and counts as its own.
                row["kind"] = read.kind or f"{read.task_id} {position}"
                self._put("rollouts", row)

    def put_evaluation(self, run_id: str, evaluation: Mapping[str, Any]) -> None:
        row: Json = {"run_id": run_id, **pick(evaluation, "step", "epoch", "time", "summary")}
        if self._is_stale("evals", run_id, row):
            return
        with self.transaction():
            sql = "UPDATE main.exam_looks SET summary = ? WHERE run_id = ?"
            if self.execute(sql, [self.encode("summary", row["summary"]), run_id]):
                return
            self.put_rollouts(run_id, "eval", row["step"], evaluation["rollouts"])
            self._put("evals", row)

    def put_event(self, run_id: str, name: str, row: Mapping[str, Any]) -> None:
        """An event never changes: the first of its name stays."""
        fields = pick(row, "time", "epoch", "kind", "message")
        data = {key: value for key, value in row.items() if key not in fields}
        self._put(
            "events", {"run_id": run_id, "name": name, **fields, "data": data}, "INSERT OR IGNORE"
        )
        if row["kind"] == "precision":
            self.put_precision(run_id, data["precision"])

    def put_precision(self, run_id: str, precision: str) -> None:
        if precision not in get_args(Precision):
            raise ValueError(f"no precision: {precision!r}")
        self.execute("UPDATE main.runs SET precision = ? WHERE id = ?", [precision, run_id])

    def put_log(self, run_id: str, attempt: int, tail: str) -> None:
        self._put("logs", {"run_id": run_id, "attempt": attempt, "tail": tail})

    def log(self, run_id: str) -> str:
        """What `put_log` kept; empty if there is nothing."""
        return "".join(self.column("SELECT tail FROM logs WHERE run_id = ?", [run_id]))

    def put_checkpoint(self, run_id: str, manifest: Mapping[str, Any], path: str) -> None:
        if self._is_stale("checkpoints", run_id, manifest):
            return
        fields = pick(manifest, "step", "epoch", "time", "digest", "size_bytes", "metrics")
        # Only the newest checkpoint keeps the optimizer's state.
        fields["size_bytes"] -= manifest["optimizer_bytes"]
        self._put("checkpoints", {"run_id": run_id, **fields, "path": path})

    def change_mark(self, run_id: str | None = None) -> Json:
        """A value that differs once the run changed, or any of the newest runs and deployments."""
        runs = "SELECT * FROM runs ORDER BY created DESC, id DESC LIMIT 50"
        values: list[str] = []
        if run_id:
            runs, values = "SELECT * FROM runs WHERE id = ?", [run_id]
        sql = f"""
            WITH chosen AS ({runs})
            SELECT group_concat(json_array(id, state, step, attempt, phase, cancel_requested,
                       json_extract(lineage, '$.name', '$.note'))) AS runs,
                   sum((SELECT max(step) FROM metrics WHERE run_id = chosen.id)) AS steps,
                   (SELECT count(*) FROM evals WHERE run_id IN (SELECT id FROM chosen)) AS evals,
                   (SELECT count(*) FROM events WHERE run_id IN (SELECT id FROM chosen)) AS events,
                   (SELECT max(updated) FROM deployments) AS deployments,
                   (SELECT count(*) FROM environments) AS environments
            FROM chosen"""
        return self.query(sql, values)[0]

    def pairs(
        self, run_id: str, evaluations: Sequence[Evaluation], environment: str = ""
    ) -> list[Solved]:
        """(success at the first evaluation, at the last, kind) of each example that environment
        code failed at neither; none if their files were lost. Only those of an `environment` of a
        mixture.
        """
        steps = [row.step for row in evaluations if row.can_be_judged]
        if len(steps) < 2:
            return []
        sql = """SELECT sum(success * (step = ?2)) * 1.0 AS before,
                 sum(success * (step = ?3)) * 1.0 AS after, max(kind) AS kind FROM rollouts
                 WHERE run_id = ?1 AND split = 'eval' AND step IN (?2, ?3)
                 AND instr(task_id, ?4) = 1
                 GROUP BY position HAVING count(*) = 2 AND count(code) = 0"""
        values = [run_id, steps[0], steps[-1], environment and f"{environment}/"]
        return list(map(itemgetter("before", "after", "kind"), self.query(sql, values)))

    def tries(self, run_id: str, step: int) -> list[Try]:
        """Every attempt of a run's evaluation at `step`, in order."""
        sql = """SELECT position AS "index", success, reward, kind, task_id, code, truncated,
                 tokens, turns, expected IS NOT NULL AS has_gold
                 FROM rollouts WHERE run_id = ? AND split = 'eval' AND step = ? ORDER BY position"""
        return self.records(Try, sql, [run_id, step])

    def solved_by_kind(self, run_id: str, step: int) -> list[list[bool]]:
        """Successes at the tasks of each kind in an evaluation, where environment code did not
        fail.
        """
        sql = """SELECT count(*) AS tasks, CAST(total(success) AS INTEGER) AS solved FROM rollouts
                 WHERE run_id = ? AND split = 'eval' AND step = ? AND code IS NULL GROUP BY kind"""
        kinds = map(itemgetter("tasks", "solved"), self.query(sql, [run_id, step]))
        return [[True] * solved + [False] * (tasks - solved) for tasks, solved in kinds]

    def golds(self, run_id: str, step: int) -> list[str]:
        sql = f"SELECT expected FROM rollouts WHERE {WITH_GOLD}"
        return self.column(sql, [run_id, step])

    def answers(self, run_id: str, step: int) -> list[Json]:
        """{task_id, expected, text, success} of the attempts of an evaluation that have a gold
        answer and were not failed by environment code; `text` is the last message."""
        sql = f"""SELECT task_id, expected, success,
                  CAST(coalesce(json_extract(body, '$.messages[#-1].content'), '') AS TEXT) AS text
                  FROM rollouts WHERE {WITH_GOLD}"""
        return [{**row, "success": bool(row["success"])} for row in self.query(sql, [run_id, step])]

    def transcript(self, run_id: str, step: int, index: int) -> Rollout:
        """One attempt of an evaluation with its messages."""
        sql = """SELECT body FROM rollouts
                 WHERE run_id = ? AND split = 'eval' AND step = ? AND position = ?"""
        return Rollout.from_row(self.query(sql, [run_id, step, index])[0]["body"])

    def curve(self, run_id: str, points: int = 400) -> Curve:
        run = self.run(run_id)
        names = METRICS[run.algorithm].items()
        lines = {name: self.series(run_id, metric, points) for name, metric in names}
        evaluations = self.evals(run_id)
        tries: dict[int, list[Try]] = {}
        if run.algorithm == "eval":  # in training, each task is attempted once
            tries = {row.step: self.tries(run_id, row.step) for row in evaluations}
        return drawn(run, lines, evaluations, tries)

    def near(self, run: Run) -> list[Run]:
        """Other runs that the advice on a run depends on: the owner's oldest active one, and the
        newest evaluations in its environment, those that are active first. Thousands may be queued.
        """
        # State by state, in the order of an index. Of all states at once SQLite reads every run.
        oldest = """SELECT * FROM runs WHERE state = ? AND +owner = ? AND id != ? AND serves IS NULL
                    ORDER BY created, id LIMIT 1"""
        firsts = [row for state in ACTIVE for row in self.query(oldest, [state, run.owner, run.id])]
        rows = sorted(firsts, key=lambda row: (row["created"], row["id"]))[:1]
        # A partial index has these.
        evaluations = f"""SELECT * FROM runs WHERE algorithm = 'eval' AND environment_digest = ?
                          AND state IN ({marks(ACTIVE)}, 'succeeded') AND id != ?
                          ORDER BY created DESC, id DESC LIMIT 50"""
        rows += self.query(evaluations, [run.environment_digest, *ACTIVE, run.id])
        results = list({row["id"]: Run.from_row(row) for row in rows}.values())
        active = [row for row in results if row.ended is None]
        ended = [row for row in results if row.ended is not None]
        return [*sorted(active, key=lambda row: (row.created, row.id)), *ended]


WITH_GOLD = """run_id = ? AND split = 'eval' AND step = ? AND expected IS NOT NULL
               AND code IS NULL ORDER BY position"""
SAYS = """EXISTS (
    SELECT 1 FROM (
        SELECT value AS message FROM json_each(body, '$.messages')
        UNION ALL
        SELECT said.value FROM json_each(body, '$.branches') AS branch,
            json_each(branch.value, '$.messages') AS said)
    WHERE instr(lower(json_extract(message, '$.content')), lower(?))
    OR EXISTS (
        SELECT 1 FROM json_each(message, '$.tool_calls')
        WHERE instr(lower(json_extract(value, '$.function.name')
            || '(' || json_extract(value, '$.function.arguments') || ')'), lower(?))))"""
"""Whether a message of a rollout, or of a branch of it, has a text as `text_of` shows it."""


def _rollout_filter(
    run_id: str, split: str, step: int | None, contains: str | None, success: bool | None
) -> tuple[str, list[Any]]:
    where, values = ["run_id = ?", "split = ?"], list[Any]([run_id, split])
    if step is not None:
        where.append("step = ?")
        values.append(step)
    if success is not None:
        where.append("success = ?")
        values.append(int(success))
    if contains:
        where.append(SAYS)
        values += [contains, contains]
    return " AND ".join(where), values


def read_log(store: HistoryTables, run: Run, size_bytes: int = 8192) -> str:
    """The end of what the newest attempt printed. That of a run elsewhere comes from the database:
    its store may not answer.
    """
    if run.target == LOCAL_TARGET:
        return folder_of(run).log_tail(run.attempt, size_bytes)
    return store.log(run.id)
