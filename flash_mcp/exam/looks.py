"""Looks at exams: who took which tasks, and what the totals say.

A look is a run of evaluate and a row that outlives it. It is spent once its totals are there. While
its run goes on it counts as well; one that fails or is cancelled before has shown nothing, so its
tasks serve another look.

Each look takes tasks that no other look of its owner took, so what an agent learned from earlier
looks says nothing of them. All intervals of an owner's looks hold together, with a chance of
1 - ALPHA: each is made for ALPHA / (2 looks)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_mcp.exam.exams import Exam
from flash_mcp.judgement.statistics import ALPHA, difference
from flash_mcp.protocol import exams as sealing
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.protocol.spec import EvalSpec, ResolvedEval
from flash_mcp.state import queue
from flash_mcp.state.owners import caller
from flash_mcp.state.queue import Label
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store

TAKEN = """FROM exam_looks AS look LEFT JOIN runs ON runs.id = run_id WHERE exam_id = ?
           AND look.owner = ? AND (summary IS NOT NULL OR (runs.id IS NOT NULL
               AND (runs.ended IS NULL OR runs.state = 'succeeded')))"""
NOT_OF_POLICY = {"environment", "tasks", "steps", "precision", "max_attempts", "target"}


class Marks(ResultModel):
    """All that an exam says of a model."""

    look: str
    """Which of the owner's looks this is, as "2 of 5"."""
    tasks: int
    """That this model attempted in all its looks."""
    success: Rounded
    low: Rounded
    high: Rounded
    """low to high holds for all looks of the owner together, with 95 %."""
    base: Rounded | None = None
    """Success of the base model at the same tasks."""
    change: str | None = None
    """success less base, as "+0.21 (+0.02 to +0.38)"."""
    verdict: str | None = None
    """better, worse or undecided."""

    contaminated: str | None = None
    """What the model's run trained on of the exam."""

    def __str__(self) -> str:
        text = f"look {self.look}: {self.success:.2f} ({self.low:.2f} to {self.high:.2f})"
        if self.verdict:
            text += f"; the base model {self.base:.2f}: {self.verdict}"
        text += f", on {self.tasks} sealed tasks"
        return f"{text}; CONTAMINATED: {self.contaminated}" if self.contaminated else text


def take(
    store: Store,
    exam: Exam,
    subject: Subject,
    resolve: Callable[[list[int]], ResolvedEval],
    key: str | None,
    *,
    again: bool,
    label: Label,
) -> tuple[Run, bool]:
    """A look of the caller, as a queued run; without `again` the one that this model had, if any.
    FlashError(exam_spent).
    """
    policy = _policy(resolve([]).spec, subject.adapter)
    with store.transaction():
        mine = [exam.id, caller().owner]
        sql = f"SELECT number {TAKEN} AND idempotency_key = ?"
        repeated = store.column(sql, [*mine, key])
        sql = f"SELECT run_id {TAKEN} AND policy = ? AND runs.id IS NOT NULL ORDER BY number DESC"
        had = store.column(sql, [*mine, policy])
        if had and not again and not repeated:
            return queue.label(store, store.run(had[0]), label), False
        taken = store.column(f"SELECT number {TAKEN}", mine)
        left = sorted({*range(1, exam.looks + 1)} - {*taken})
        if not left and not repeated:
            what = f"all {exam.looks} looks at exam:{exam.name} are spent"
            fix = "status shows what they found; the operator may create another exam"
            raise FlashError("exam_spent", what, fix=fix)
        number = (repeated or left)[0]
        version = exam.version(store.base)
        named = {"name": exam.name, "id": exam.id, "number": number, "looks": exam.looks}
        lineage: Json = {"exam": named, "env_files": [exam.key_file] if exam.key_file else []}
        run, created = queue.enqueue(
            store, resolve(exam.slice(number)), version, subject.adapter, key, lineage=lineage
        )
        if created:
            record(store, run)
        return queue.label(store, run, label), created


def record(store: Store, run: Run) -> None:
    """The row of a look, also of one whose database was lost."""
    exam = run.lineage["exam"]
    row = {"run_id": run.id, "exam_id": exam["id"], "owner": run.owner}
    row |= {"number": exam["number"], "subject": run.evaluation.checkpoint}
    store.insert("exam_looks", {**row, "policy": _policy(run.evaluation, run.init_adapter)})


def _policy(spec: EvalSpec, adapter: Json | None) -> str:
    """A digest of what is examined: the weights and how they are sampled."""
    body = [spec.model_dump(exclude=NOT_OF_POLICY), (adapter or {}).get("digest")]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def marks_of(store: Store, run: Run) -> Marks | None:
    """What all looks of the run's model at its exam found; None before there are totals."""
    named = run.lineage["exam"]
    sql = """SELECT summary FROM exam_looks WHERE summary IS NOT NULL AND owner = ? AND exam_id = ?
             AND policy = (SELECT policy FROM exam_looks WHERE run_id = ?)"""
    totals = Counter[str]()
    for summary in store.column(sql, [run.owner, named["id"], run.id]):
        totals.update(summary)
    if not totals["tasks"]:
        return None
    alpha = ALPHA / (2 * named["looks"])
    tasks, solved = totals["tasks"], totals["solved"]
    # As outcomes of +1 and -1, whose mean is 2 success - 1
    around = difference(solved, tasks - solved, 0, alpha)
    fields: dict[str, Any] = {"success": solved / tasks, "tasks": tasks}
    fields["look"] = f"{named['number']} of {named['looks']}"
    fields |= {"low": (around.low + 1) / 2, "high": (around.high + 1) / 2}
    if "base_solved" in totals:
        wins, losses = totals["wins"], totals["losses"]
        change = difference(wins, losses, tasks - wins - losses, alpha)
        fields["base"] = totals["base_solved"] / tasks
        mean = (wins - losses) / tasks
        fields["change"] = f"{mean:+.2f} ({change.low:+.2f} to {change.high:+.2f})"
        fields["verdict"] = "undecided"
        if change.low > 0:
            fields["verdict"] = "better"
        elif change.high < 0:
            fields["verdict"] = "worse"
    if trained := (run.evaluation.checkpoint or "").partition("@")[0]:
        sql = "SELECT lineage FROM runs WHERE id = ?"
        for lineage in store.column(sql, [trained]):
            if rows := lineage.get("exam_rows", {}).get(named["name"]):
                fields["contaminated"] = f"it trained on {rows} rows that ask the same"
    return Marks(**fields)


def results(store: Store, exam: Exam) -> list[Json]:
    """Every look of every owner, for the operator."""
    sql = """SELECT look.owner, number AS look, run_id AS run, subject, state, summary
             FROM exam_looks AS look LEFT JOIN runs ON runs.id = run_id
             WHERE exam_id = ? ORDER BY look.owner, number"""
    rows = store.query(sql, [exam.id])
    for row in rows:
        row |= row.pop("summary") or {}
    return rows


def transcripts(run: Run, key: bytes) -> Json:
    """{"model": attempts, "base": attempts} of a look. FlashError(exam_locked)."""
    (path,) = Path(run.folder).glob(f"evals/{run.evaluation.step}.*.sealed")
    return sealing.unseal_json(key, path.read_text(), run.environment_digest)


def lines(store: Store, run: Run) -> list[str]:
    """What exams said of a run's checkpoints, or of the model that an evaluation took there."""
    sql = (
        "SELECT run_id FROM exam_looks WHERE run_id = ? OR subject LIKE ? ORDER BY exam_id, number"
    )
    result: list[str] = []
    for run_id in store.column(sql, [run.id, f"{run.id}@%"]):
        for look in store.records(Run, "SELECT * FROM runs WHERE id = ?", [run_id]):
            exam, of = look.lineage["exam"], look.evaluation.checkpoint or look.model
            found = marks_of(store, look) or f"look {exam['number']}: {look.state}"
            result.append(f"exam:{exam['name']}, {of}, {found}")
    return result
