"""An evaluation from job.json to evals/STEP.json: a run that samples and scores, and does not
train.

The engine, the scheduler and the environment host are those of training. Attempts are recorded in
shards as they end, so that a later attempt of the run repeats none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from flash_mcp.protocol import records
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.spec import EvalSpec
from worker.exam import BASE_STEP, ExamWriter
from worker.heartbeat import Heartbeat
from worker.rollouts.metrics import summarize_evaluation
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, mixed_seed, task_groups
from worker.rollouts.task_choice import TaskPlace
from worker.session import Session, check_errors

log = logging.getLogger("worker")
AT_ONCE = 256 if torch.cuda.is_available() else 32
"""Conversations that the engine advances at once. On the CPU, where its cache takes memory for
each, this is the default number of a training step.
"""
SHARD_EVERY_S = 2.0


def evaluate(
    job: Json, spec: EvalSpec, writer: RunWriter, heartbeat: Heartbeat, cards: Sequence[str] = ("",)
) -> int:
    """Make the attempts that are not recorded yet; the total number of attempts. The engine is
    shared by `cards`, as CUDA_VISIBLE_DEVICES names them.

    Raises FlashError, or Cancelled once the finished attempts are recorded.
    """
    # The seeds do not depend on the model, so that two models are sampled alike.
    tasks = task_groups(
        spec.split,
        map(TaskPlace, spec.tasks),
        spec.attempts,
        lambda number, index, attempt: mixed_seed(spec.seed, number, attempt),
    )
    # An earlier attempt of the run may have ended after it wrote the result.
    if result := writer.folder.evaluation(spec.step):
        created = [records.Rollout.from_row(row) for row in result["rollouts"]]
        check_errors(created, spec.max_error_share)
        return len(tasks)
    recorder = EvalRecorder(writer, heartbeat, spec.step)
    recorders = [recorder]
    is_exam = isinstance(writer, ExamWriter)
    if is_exam and job["init_adapter"]:
        recorders.insert(0, EvalRecorder(writer, heartbeat, BASE_STEP))
    constant: dict[str, float] = {}
    if any(_missing(tasks, each) for each in recorders):
        at_once = min(len(tasks), AT_ONCE)
        with Session[EvalSpec].opened(
            job, spec, writer, heartbeat, at_once=at_once, trains=False, cards=cards
        ) as session:
            for each in recorders:
                if each.step == spec.step:
                    session.sync(spec.step)
                else:  # the base, before the engine has an adapter
                    session.start_engine()
                _make(session, tasks, each)
            if not is_exam:
                constant = session.constant_level(spec.split, spec.tasks)
    if is_exam and len(recorders) > 1:
        writer.base = [recorders[0].rows[task.index].fields() for task in tasks]
    rows = [recorder.rows[task.index] for task in tasks]
    if is_exam:  # before its totals are there: a look that fails shows none
        check_errors(rows, spec.max_error_share)
    summary = summarize_evaluation(rows, seconds=recorder.seconds)
    summary |= {"tokens_per_s": recorder.tokens_per_s, **constant}
    writer.evaluation(spec.step, summary, [row.fields() for row in rows])
    log.info("eval %s", summary)
    check_errors(rows, spec.max_error_share)
    return len(tasks)


def _missing(tasks: Sequence[RolloutTask], recorder: EvalRecorder) -> list[RolloutTask]:
    return [task for task in tasks if task.index not in recorder.rows]


def _make(session: Session[EvalSpec], tasks: Sequence[RolloutTask], recorder: EvalRecorder) -> None:
    """Make the attempts that the recorder lacks."""
    missing = _missing(tasks, recorder)
    if session.host.scores_groups:
        # An attempt that is scored with the others of its task is made again with them.
        unfinished = {task.group for task in missing}
        missing = [task for task in tasks if task.group in unfinished]
    session.heartbeat.enter("eval")
    done = len(recorder.rows)
    what = f"{done} of {len(tasks)} attempts are done"
    session.writer.event("sampling", what, step=done)
    recorder.start()
    try:
        limits = replace(session.limits, system_prompt=session.spec.system_prompt)
        session.collect_each(missing, limits, recorder.add)
    finally:
        recorder.flush()


class EvalRecorder:
    """Rows of attempts by index: those recorded earlier, and new ones, which it writes in shards.

    It writes on its own thread, so that calls into the environment do not time out while a remote
    store cannot be reached."""

    def __init__(self, writer: RunWriter, heartbeat: Heartbeat, step: int) -> None:
        self.writer = writer
        self.heartbeat = heartbeat
        self.step = step
        self.rows: dict[int, records.Rollout] = {}
        for row in writer.recorded(step):
            self.rows[row["index"]] = records.Rollout.from_row(row)
        self.heartbeat.step = len(self.rows)
        self.seconds = 0.0
        self._tokens = 0
        self._unwritten: list[Json] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._writing = Future[None]()
        self._writing.set_result(None)
        self.start()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated per second since `start`; None if there are none."""
        return self._tokens / self.seconds if self._tokens and self.seconds else None

    def start(self) -> None:
        self._started = self._written = time.monotonic()

    def add(self, rollout: PlayedRollout) -> None:
        row = rollout.record(self.step)
        self.rows[row.index] = row
        self.heartbeat.step = len(self.rows)
        self._tokens += row.completion_tokens
        self._unwritten.append(row.fields())
        if self._writing.done() and time.monotonic() - self._written > SHARD_EVERY_S:
            self._write()

    def flush(self) -> None:
        """Write everything; raises the first error of any write."""
        self.seconds = time.monotonic() - self._started
        self._write()
        self._writing.result()

    def _write(self) -> None:
        self._writing.result()
        self._written = time.monotonic()
        if rows := self._unwritten:
            self._unwritten = []
            self._writing = self._pool.submit(self.writer.attempts, self.step, rows)
