"""A run from job.json to the final adapter: the pieces put together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel

from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from worker.heartbeat import Cancelled, Pulse
from worker.session import Session, opened
from worker.settings import Settings
from worker.survey import PREFLIGHT_TASKS, RESUMED_TASKS, _preflight
from worker.training.checkpoints import Finished
from worker.training.grpo import Trainer
from worker.training.packing import can_pack
from worker.training.sft import GOLD_SPLITS, dataset_rows, gold_rows, make_sft_trainer

log = logging.getLogger("worker")
T = TypeVar("T")
GOLD_ERROR_SHARE = 0.05
"""A rollout that fails is one of many; a gold answer that is missing is missing from the data."""


def train(job: Json, spec: Settings, writer: RunWriter, pulse: Pulse, scratch: Path) -> int:
    """Train and return the last step. Raises FlashError, or Cancelled once the latest step is
    saved.
    """
    resume_from = _resume_point(writer, scratch)
    pulse.step = resume_from[0] if resume_from else 0
    rollouts_per_step = spec.batch_size * (spec.group_size or 1)
    with opened(job, spec, writer, pulse, at_once=rollouts_per_step) as session:
        if resume_from:
            session.resumed_at = session.reporter.saved_step = resume_from[0]
        host, max_length = session.host, session.limits.max_length
        tokenizer, template, policy = session.template.tokenizer, session.template, session.policy
        assert isinstance(policy, PeftModel)
        watched: dict[str, Any] = {
            "max_error_share": spec.max_error_share,
            "advance": pulse.advance,
        }
        looked_at = RESUMED_TASKS if resume_from else PREFLIGHT_TASKS
        longest, turns = session.wait(_preflight(host, template, max_length, looked_at, **watched))
        packed = can_pack(policy.get_base_model())
        if not packed:
            writer.event(
                "warning", "training takes longer and more memory: the model has no packed pass"
            )
        common = {
            "output_dir": str(scratch / "trainer"),
            "callbacks": [session.reporter],
            "packed": packed,
        }
        if spec.algorithm == "sft":
            pulse.enter("dataset")
            if dataset := job.get("dataset"):
                rows = dataset_rows(dataset, template)
            else:
                watched["max_error_share"] = min(spec.max_error_share, GOLD_ERROR_SHARE)
                rows = {
                    name: session.wait(gold_rows(host, template, split, **watched))
                    for name, split in GOLD_SPLITS.items()
                }
                for name, split in GOLD_SPLITS.items():
                    if left_out := host.splits.get(split, 0) - len(rows[name]):
                        what = (
                            f"{left_out} {split} tasks failed in environment code and were left out"
                        )
                        writer.event("warning", what)
            keep_tokens = session.check_batch_memory(rows["train"], packed=packed)
            trainer = make_sft_trainer(
                policy,
                tokenizer,
                spec,
                rows,
                writer,
                max_length=max_length,
                keep_tokens=keep_tokens,
                **common,
            )
            session.reporter.held_out = trainer.held_out
        else:
            keep_tokens = session.check_memory(longest, turns, packed=packed)
            session.start_engine()
            trainer = Trainer(
                policy,
                tokenizer,
                spec,
                rollouts_of=session.rollouts,
                max_completion=spec.max_tokens,
                keep_tokens=keep_tokens,
                **common,
            )
        return _optimize(trainer, session, resume_from)


def _optimize(trainer: Any, session: Session, resume_from: tuple[int, Path] | None) -> int:
    """Evaluate, train (with evaluations in `Session._before_step`), evaluate; save the step that a
    cancel finds.
    """
    spec = session.spec
    if spec.eval_before and resume_from is None:
        session.evaluate(0)
    pulse = session.pulse
    pulse.enter("train")
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
    step = trainer.state.global_step
    if (
        spec.eval_after or (spec.eval_every and step % spec.eval_every == 0)
    ) and not pulse.cancelled.is_set():
        session.evaluate(step)
    return step


def _resume_point(writer: RunWriter, scratch: Path) -> tuple[int, Path] | None:
    step = writer.folder.newest_good_checkpoint()
    if step is None:
        return None
    log.info("going on from checkpoint %s", step)
    writer.event("phase", f"going on from checkpoint {step}", step=step)
    return step, writer.folder.fetch_checkpoint(step, scratch / "resume")
