"""An evaluation from job.json to evals/STEP.json: a run that samples and scores, and trains
nothing.

The engine, the scheduler and the environment host are those of training. Attempts are recorded in
shards as they end, so that whoever goes on after a crash repeats none of them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from worker.heartbeat import Pulse
from worker.rollouts.metrics import summarize_evaluation
from worker.rollouts.scheduler import Limits, Rollout, Task
from worker.session import check_errors, opened
from worker.settings import Settings

log = logging.getLogger("worker")
AT_ONCE = 256 if torch.cuda.is_available() else 32
"""Conversations that the engine advances at once: on the CPU as many as a step of training has by
default, since its cache takes memory for each.
"""
SHARD_EVERY_S = 2.0


def evaluate(job: Json, spec: Settings, writer: RunWriter, pulse: Pulse, scratch: Path) -> int:
    """Make the attempts that are not recorded yet, and return how many there are in all.

    Raises FlashError, or Cancelled once what was done is recorded.
    """
    tasks = _tasks(spec)
    if found := writer.folder.evaluation(
        spec.step
    ):  # an attempt of the run came as far as this before
        check_errors(found["rollouts"], spec.max_error_share)
        return len(tasks)
    recorder = Recorder(writer, pulse, spec.step)
    missing = [task for task in tasks if task.index not in recorder.rows]
    if missing:
        with opened(
            job, spec, writer, pulse, at_once=min(len(missing), AT_ONCE), trains=False
        ) as session:
            session.sync(spec.step)
            pulse.enter("eval")
            limits = Limits(
                spec.max_tokens,
                session.limits.max_length,
                spec.temperature,
                spec.top_p,
                tuple(spec.stop_sequences),
            )
            done = len(recorder.rows)
            writer.event("sampling", f"{done} of {len(tasks)} attempts are done", step=done)
            recorder.start()
            try:
                session.collect_blocks(missing, limits, recorder.add)
            finally:
                recorder.flush()
    rows = [recorder.rows[task.index] for task in tasks]
    summary = summarize_evaluation(rows, seconds=recorder.seconds)
    writer.evaluation(spec.step, {**summary, "tokens_per_s": recorder.tokens_per_s}, rows)
    log.info("eval %s", summary)
    check_errors(rows, spec.max_error_share)
    return len(tasks)


class Recorder:
    """Rows of attempts by index: those that were recorded before, and those that end now, soon
    written down.

    On a thread of its own: while a store of elsewhere cannot be reached, calls into the environment
    must not time out."""

    def __init__(self, writer: RunWriter, pulse: Pulse, step: int) -> None:
        self.writer, self.pulse, self.step = writer, pulse, step
        self.rows: dict[int, Json] = {row["index"]: row for row in writer.folder.attempts(step)}
        self.pulse.step = len(self.rows)
        self.seconds = 0.0
        self._tokens = 0
        self._unwritten: list[Json] = []
        self._pool, self._writing = (
            ThreadPoolExecutor(1, thread_name_prefix="recorder"),
            Future[None](),
        )
        self._writing.set_result(None)
        self.start()

    @property
    def tokens_per_s(self) -> float | None:
        """Of what was generated since `start`; None where nothing was."""
        return self._tokens / self.seconds if self._tokens and self.seconds else None

    def start(self) -> None:
        """Time what follows."""
        self._started = self._written = time.monotonic()

    def add(self, rollout: Rollout) -> None:
        row = rollout.row(self.step)
        self.rows[row["index"]] = row
        self.pulse.step = len(self.rows)
        self._tokens += row["completion_tokens"]
        self._unwritten.append(row)
        if self._writing.done() and time.monotonic() - self._written > SHARD_EVERY_S:
            self._write()

    def flush(self) -> None:
        """Have everything written; raises what any of it met."""
        self.seconds = time.monotonic() - self._started
        self._write()
        self._writing.result()

    def _write(self) -> None:
        self._writing.result()
        self._written = time.monotonic()
        if rows := self._unwritten:
            self._unwritten = []
            self._writing = self._pool.submit(self.writer.attempts, self.step, rows)


def _tasks(spec: Settings) -> list[Task]:
    """Every attempt, those of a task next to each other. Its seed is the same whatever model is
    evaluated.
    """
    return [
        Task(
            spec.split,
            example,
            group,
            group * spec.attempts + attempt,
            _seed(spec.seed, example, attempt),
            attempt,
        )
        for group, example in enumerate(spec.tasks)
        for attempt in range(spec.attempts)
    ]


def _seed(seed: int, example: int, attempt: int) -> int:
    return (seed * 1_000_003 + example) * 65_537 + attempt
