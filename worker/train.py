"""A run from job.json to the final adapter."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel

from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.spec import RunSpec
from worker.capacity import share_machine
from worker.engine.fetch import ensure
from worker.heartbeat import Cancelled, Heartbeat
from worker.process import quick_imports
from worker.ranks import ALONE, Ranks, check_devices
from worker.rollouts.gold import Row, dataset_rows
from worker.survey import PREFLIGHT_TASKS, RESUMED_TASKS, preflight
from worker.training.checkpoints import Finished
from worker.training.kernels import FP32_HEAD
from worker.training.packing import Way, way_of
from worker.training.sft import GOLD_SPLITS, Tuner, gold_rows, loss_of_frequencies, make_sft_trainer
from worker.training.trackers import Trackers
from worker.training_session import TrainingSession, deadline_of

log = logging.getLogger("worker")
GOLD_ERROR_SHARE = 0.05
"""The share of gold answers that may fail. A failed rollout is one of many; a gold answer that
fails is missing from the data.
"""


def rollouts_at_once(spec: RunSpec, ranks: int) -> int:
    """Those of a rank in a step, and in the steps that begin ahead of it."""
    steps = 1 + spec.max_staleness
    return math.ceil(spec.batch_size / ranks) * spec.rollouts_per_prompt * steps


def train(
    job: Json, spec: RunSpec, writer: RunWriter, heartbeat: Heartbeat, scratch: Path, ranks: Ranks
) -> int:
    """Train and return the last step. FlashError, or Cancelled once the latest step is saved."""
    check_devices(ranks)
    share_machine(ranks.count)
    resume_from = _resume_point(writer, scratch, ranks)
    if resume_from:
        heartbeat.step = resume_from[0]
    at_once = rollouts_at_once(spec, ranks.count)
    with TrainingSession.opened(
        job, spec, writer, heartbeat, at_once=at_once, trains=True, ranks=ranks
    ) as session:
        session.deadline = deadline_of(job, spec)
        session.regression = job.get("regression")
        session.ratios = {part["name"]: part["ratio"] for part in job.get("mixture") or ()}
        if resume_from:
            session.resume(*resume_from)
        watched = {"max_error_share": spec.max_error_share, "advance": heartbeat.advance}
        tasks = RESUMED_TASKS if resume_from else PREFLIGHT_TASKS
        model = session.model
        look = partial(preflight, template=model.template, max_length=model.max_length, **watched)
        ranks.from_first(
            lambda: [session.wait(look(host, tasks=tasks)) for host in session.hosts.values()]
        )
        policy = model.policy
        assert isinstance(policy, PeftModel)
        causal_lm = cast(Any, policy.get_base_model())
        setattr(causal_lm.get_output_embeddings(), FP32_HEAD, spec.fp32_head)
        way = way_of(causal_lm)
        if way != Way.PACKED and session.model.is_shared:
            what = (
                "one card cannot hold the model, and it lacks the packed pass, which sharing needs"
            )
            raise FlashError("out_of_memory", what, fix="use another model, or larger cards")
        if way == Way.ROWS:
            what = "training takes longer and more memory: a prompt is computed for each completion"
            session.writer.event("warning", what)
        common: dict[str, Any] = {
            "output_dir": str(scratch / "trainer"),
            "callbacks": [session.reporter],
            "way": way,
            "ranks": ranks,
        }
        if spec.algorithm == "sft":
            trainer = _sft_trainer(job, session, policy, common)
        else:
            trainer = _rollout_trainer(job, session, policy, common)
        if not ranks.is_first:
            return _steps(trainer, session, resume_from)
        trackers = Trackers(spec, writer, trainer.args)
        session.reporter.tell = trackers.tell
        try:
            return _steps(trainer, session, resume_from)
        finally:
            trackers.close()


def _rollout_trainer(
    job: Json, session: TrainingSession, policy: PeftModel, common: dict[str, Any]
) -> Any:
    """A trainer on the session's rollouts."""
    with quick_imports():  # they import vLLM, which SFT may not need
        from worker.training.grpo import Trainer, load_teacher  # noqa: PLC0415

    spec = session.spec
    teacher = None
    if spec.algorithm == "distill":
        source = job["teacher"]
        folder = Path(source["path"])
        if "model" in source:
            folder = ensure(source["path"], has_gpu=torch.cuda.is_available())
        teacher = load_teacher(source, folder, session.model, common["way"])
    common["keep_tokens"] = session.check_memory(common["way"], teacher.bytes if teacher else 0)
    if session.has_engine:
        session.start_engine()
    return Trainer(
        policy,
        session.model.template.tokenizer,
        spec,
        rollouts_of=session.rollouts,
        max_completion=spec.max_tokens,
        teacher=teacher,
        warn=lambda what: session.writer.event("warning", what),
        **common,
    )


def _sft_trainer(
    job: Json, session: TrainingSession, policy: PeftModel, common: dict[str, Any]
) -> Tuner:
    """A trainer on the job's dataset, or on the environment's gold answers."""
    template = session.model.template
    session.heartbeat.enter("dataset")
    dataset = job.get("dataset")
    rows = session.ranks.from_first(
        lambda: dataset_rows(dataset, template) if dataset else _gold_rows(session)
    )
    common["keep_tokens"] = session.check_memory(common["way"])
    trainer = make_sft_trainer(
        policy,
        template.tokenizer,
        session.spec,
        rows,
        session.writer,
        max_length=session.model.max_length,
        **common,
    )
    session.reporter.steady["frequencies/loss"] = loss_of_frequencies(rows["train"])
    # Ranks that share the model compute the same rows: each pass needs all of them.
    if session.ranks.is_first or session.model.is_shared:
        session.reporter.begin = trainer.begin
        session.reporter.measure = trainer.measure
    return trainer


def _gold_rows(session: TrainingSession) -> dict[str, list[list[Row]]]:
    """The environment's gold answers by task. An event reports those that are missing."""
    share = min(session.spec.max_error_share, GOLD_ERROR_SHARE)
    watched = {"max_error_share": share, "advance": session.heartbeat.advance}
    host = session.host
    rows: dict[str, list[list[Row]]] = {}
    splits = dict(GOLD_SPLITS)
    if not session.spec.evaluates:
        del splits["holdout"]  # measuring it costs a pass over its rows at each checkpoint
    for name, split in splits.items():
        count = host.splits.get(split, 0)
        if name == "holdout":
            count = min(count, session.spec.eval_examples)
        session.heartbeat.enter("dataset", of=count)
        model = session.model
        gold = gold_rows(host, model.template, split, model.max_length, count, **watched)
        rows[name] = session.wait(gold)
        if missing := count - len(rows[name]):
            what = f"{missing} {split} tasks failed in environment code and were left out"
            session.writer.event("warning", what)
    return rows


def _steps(trainer: Any, session: TrainingSession, resume_from: tuple[int, Path] | None) -> int:
    """Evaluate, train (`TrainingSession` evaluates between steps), evaluate. After a cancel, save
    the step.
    """
    spec = session.spec
    if spec.eval_before and resume_from is None:
        session.evaluate(0)
    if resume_from is None:
        session.try_regression(0)
    heartbeat = session.heartbeat
    heartbeat.enter("train")
    try:
        trainer.train(resume_from_checkpoint=str(resume_from[1]) if resume_from else None)
    except Cancelled:
        step = trainer.state.global_step
        if step > 0 and session.reporter.saved_step != step:
            trainer._save_checkpoint(trainer.model, None)
            session.reporter.commit(Path(trainer.args.output_dir), step)
        raise
    except Finished:
        pass
    session.end_steps_ahead()
    step = trainer.state.global_step
    is_due = spec.eval_after or (spec.eval_every and step % spec.eval_every == 0)
    if is_due and not heartbeat.cancelled.is_set():
        session.evaluate(step)
    session.try_regression(step)
    return step


def _resume_point(
    writer: RunWriter, scratch: Path, ranks: Ranks = ALONE
) -> tuple[int, Path] | None:
    """The step and the folder of the newest good checkpoint."""
    step = ranks.from_first(writer.folder.checkpoints.newest_good)
    if step is None:
        return None
    path = writer.folder.checkpoints.fetch(step, scratch / "resume")
    what = f"going on from checkpoint {step}"
    if not (path / OPTIMIZER).is_file():
        what += ", with a fresh optimizer: only the newest checkpoint keeps its state"
    log.info("%s", what)
    writer.event("phase", what, step=step)
    return step, path
