"""What an attempt holds open while it trains or evaluates: environment, policy, engine, reporter."""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from environments.process.host import EnvironmentHost
from environments.process.sandbox import describe
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from worker.engine.fetch import ensure, log_progress
from worker.engine.vllm import VllmEngine, default_sync
from worker.event_loop import AsyncRunner
from worker.heartbeat import Cancelled, Pulse
from worker.rollouts.metrics import summarize, summarize_evaluation
from worker.rollouts.scheduler import Generator, Limits, Rollout, Task, collect
from worker.rollouts.transcript import ChatTemplate
from worker.settings import Settings
from worker.training import memory
from worker.training.checkpoints import Reporter
from worker.training.grpo import group_advantages, scales_advantages
from worker.training.policy import load_policy
from worker.training.sft import Row

log = logging.getLogger("worker")
T = TypeVar("T")
MAX_LENGTH = 4096


BLOCK = 512
"""Attempts of an evaluation that are handed to the scheduler together: each of them holds an open
episode.
"""


@contextmanager
def opened(
    job: Json, spec: Settings, writer: RunWriter, pulse: Pulse, *, at_once: int, trains: bool = True
) -> Iterator[Session]:
    """Model and environment, ready for rollouts; `at_once` is how many are wanted at the same time.

    Without `trains` there is a policy only where the engine cannot read the job's adapter by
    itself."""
    pulse.enter("model")
    tell = log_progress()

    def on_fetched(stage: str, share: float) -> None:
        pulse.advance()
        tell(stage, share)

    model_path = ensure(spec.model, on_progress=on_fetched)
    tokenizer, ends = AutoTokenizer.from_pretrained(model_path), end_ids(model_path)
    template = ChatTemplate(tokenizer, thinking=spec.thinking, end_ids=ends)
    dtype = _dtype(model_path)
    adapter = Path(job["init_adapter"]["path"]) if job.get("init_adapter") else None
    policy = None
    if trains or (adapter and default_sync(dtype) == "merged"):
        policy = load_policy(
            model_path,
            rank=spec.lora_rank,
            alpha=spec.lora_alpha,
            seed=spec.seed,
            dtype=dtype,
            adapter_path=adapter,
        )
    max_length = _max_length(spec, AutoConfig.from_pretrained(model_path))

    with AsyncRunner() as runner:
        pulse.enter("environment")
        secrets = {name: os.environ.pop(name) for name in spec.secrets if name in os.environ}

        async def on_progress(message: str) -> None:
            pulse.advance()
            writer.event("phase", message)

        starting = EnvironmentHost.start(
            Path(job["environment"]["path"]),
            args=spec.environment_args,
            secrets=secrets,
            concurrency=spec.env_concurrency,
            timeout_s=spec.env_timeout_s,
            on_progress=on_progress,
        )
        try:
            host = runner.run(starting, stop=pulse.cancelled)
        except CancelledError:
            raise Cancelled from None
        writer.event("sandbox", describe(host.sandbox))
        session = Session(
            spec, writer, pulse, host, model_path, template, policy or adapter, runner, max_length,
            dtype=dtype, at_once=at_once,
        )  # fmt: skip
        try:
            yield session
        finally:
            session.close()
            runner.run(host.stop())


class Session:
    """The policy, its engine and its environment: what rollouts are made with, during training and
    evaluation.
    """

    def __init__(
        self,
        spec: Settings,
        writer: RunWriter,
        pulse: Pulse,
        host: EnvironmentHost,
        model_path: Path,
        template: ChatTemplate,
        policy: PeftModel | Path | None,
        runner: AsyncRunner,
        max_length: int,
        *,
        dtype: torch.dtype,
        at_once: int,
    ) -> None:
        self.spec, self.writer, self.pulse, self.host, self.runner = (
            spec,
            writer,
            pulse,
            host,
            runner,
        )
        self.model_path, self.template, self.policy = model_path, template, policy
        self._dtype, self._at_once = dtype, at_once
        self.limits = Limits(
            max_tokens=spec.max_tokens,
            max_length=max_length,
            temperature=spec.temperature,
            top_p=spec.top_p,
            stop=tuple(spec.stop_sequences),
        )
        self.reporter = Reporter(
            writer, spec, pulse.cancelled, before_step=self._before_step, advance=pulse.advance
        )
        self.resumed_at = 0
        """The step whose checkpoint this attempt goes on from."""
        self._engine: VllmEngine | None = None
        self._generator: Generator | None = None
        self._synced: int | None = None

    def check_memory(self, prompt: int, turns: int, *, packed: bool) -> float:
        """Say what GRPO needs. Returns the tokens of a group above which its activations must be
        recomputed.

        FlashError(out_of_memory) where it cannot fit. `prompt` tokens are the longest.
        """
        spec, limits = self.spec, self.limits
        return self._check_memory(
            memory.Workload(
                prompt, limits.max_tokens, turns, limits.max_length, spec.group_size, self._sequences, spec.lora_rank,
                packed,
            )
        )  # fmt: skip

    def check_batch_memory(self, rows: list[Row], *, packed: bool) -> float:
        """`check_memory` of SFT on batches of `rows`."""
        spec, length = self.spec, self.limits.max_length
        longest = min(max((len(row["input_ids"]) for row in rows), default=1), length)
        sequences = self._sequences if spec.eval_before or spec.eval_every or spec.eval_after else 0
        return self._check_memory(
            memory.Workload(
                0, longest, 1, length, spec.batch_size, sequences, spec.lora_rank, packed
            )
        )

    def _check_memory(self, work: memory.Workload) -> float:
        needs, keep_tokens, warning = memory.check(self.model_path, work, self._dtype)
        says = f"at most {needs}"
        if keep_tokens is not None:
            says += f"; groups of more than {keep_tokens} tokens take longer: activations are computed twice"
        log.info("memory: %s", says)
        self.writer.event("memory", says, **asdict(needs))
        if warning:
            log.warning("%s", warning)
            self.writer.event("warning", warning)
        return math.inf if keep_tokens is None else keep_tokens

    @property
    def _sequences(self) -> int:
        """Conversations that the engine advances at once."""
        return min(max(self._at_once, 32), 256)

    def start_engine(self) -> tuple[VllmEngine, Generator]:
        """The engine and its turns; made once."""
        if self._engine is None or self._generator is None:
            self.pulse.enter("engine")
            engine = self._engine = VllmEngine(
                self.model_path,
                max_length=self.limits.max_length,
                max_num_seqs=self._sequences,
                seed=self.spec.seed,
                lora_rank=self.spec.lora_rank if self.policy else None,
                dtype=str(self._dtype).removeprefix("torch."),
            )
            self._generator = Generator(
                engine, run_step=lambda: self.runner.call_waiting(engine.step)
            )
        return self._engine, self._generator

    def close(self) -> None:
        if self._generator:
            self.runner.run(self._generator.aclose())

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of optimizer step `step`: G for each of its P examples. Called by the
        trainer.
        """
        spec = self.spec
        examples = examples_of(step, spec.batch_size, self.host.splits["train"], spec.seed)
        self.pulse.enter("sync", step - 1)
        sync_s = self.sync(step - 1)
        self.pulse.enter("rollout")
        size = spec.group_size
        tasks = [
            Task(
                "train",
                example,
                group,
                group * size + member,
                _seed(spec, step, group * size + member),
                member,
            )
            for group, example in enumerate(examples)
            for member in range(size)
        ]
        started = time.monotonic()
        rollouts = self.collect(tasks, self.limits)
        rollout_s = time.monotonic() - started
        groups = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
        scale = scales_advantages(spec)
        advantages = [
            value for group in groups for value in group_advantages(group, scale=scale).tolist()
        ]
        rows = [
            rollout.row(step, value) for rollout, value in zip(rollouts, advantages, strict=True)
        ]
        self.writer.rollouts(step, rows)
        check_errors(rows, spec.max_error_share)
        self.reporter.pending = {
            **summarize(groups),
            "engine/tokens_per_s": sum(r.transcript.model_tokens for r in rollouts if r.transcript)
            / rollout_s,
            "time/rollout_s": rollout_s,
            "time/sync_s": sync_s,
        }
        self.pulse.enter("train")
        return rollouts

    def evaluate(self, step: int) -> None:
        """Greedy rollouts of the eval split under the policy after `step` steps."""
        total = min(self.spec.eval_examples, self.host.splits.get("eval", 0))
        if not total:
            self.writer.event(
                "warning", "the environment declares no eval split; the evaluation was left out"
            )
            return
        if step <= self.resumed_at and self.writer.folder.evaluation(
            step
        ):  # later ones are of a policy that is lost
            return
        self.sync(step)
        self.pulse.enter("eval", step)
        limits = Limits(
            self.limits.max_tokens, self.limits.max_length, temperature=0.0, stop=self.limits.stop
        )
        started = time.monotonic()
        rows: list[Json] = []
        tasks = [Task("eval", index, index, index, seed=index) for index in range(total)]
        self.collect_blocks(tasks, limits, lambda rollout: rows.append(rollout.row(step)))
        rows.sort(key=lambda row: row["index"])
        summary = summarize_evaluation(rows, seconds=time.monotonic() - started)
        self.writer.evaluation(step, summary, rows)
        log.info("step %s: eval %s", step, summary)

    def _before_step(self, step: int, steps: int) -> None:
        """After `step` steps of `steps`, before the next one."""
        self.pulse.steps = steps
        self.pulse.enter(self.pulse.phase, step)
        if step and self.spec.eval_every and step % self.spec.eval_every == 0:
            self.evaluate(step)
            self.pulse.enter("train")

    def sync(self, step: int) -> float:
        """Put the policy after `step` steps into the engine, unless it is there; the seconds that
        it took.
        """
        started = time.monotonic()
        engine, _ = self.start_engine()
        if self._synced != step:
            if isinstance(self.policy, Path):
                engine.load_adapter(self.policy)
            elif self.policy is not None:
                engine.load_policy(self.policy)
            self._synced = step
        return time.monotonic() - started

    def collect(
        self,
        tasks: list[Task],
        limits: Limits,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """One rollout per task under what was synced last; each goes to `on_done` when it ends.
        Raises Cancelled.
        """
        _, generator = self.start_engine()

        def done(rollout: Rollout) -> None:
            self.pulse.advance()
            on_done(rollout)

        return self.wait(collect(tasks, self.host, generator, self.template, limits, on_done=done))

    def collect_blocks(
        self, tasks: list[Task], limits: Limits, on_done: Callable[[Rollout], None]
    ) -> None:
        """`collect`, BLOCK tasks at a time; nothing is kept of them."""
        for start in range(0, len(tasks), BLOCK):
            self.collect(tasks[start : start + BLOCK], limits, on_done)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; raises Cancelled once the run shall end."""
        try:
            return self.runner.run(coroutine, stop=self.pulse.cancelled)
        except CancelledError:
            raise Cancelled from None


def examples_of(step: int, count: int, total: int, seed: int) -> list[int]:
    """The `count` examples of step 1, 2, ...: they go through all `total` again and again, each
    time in another order.

    A function of the step alone: whoever goes on where another stopped draws what that one would
    have drawn."""
    places = range((step - 1) * count, step * count)
    return [_order(place // total, total, seed)[place % total] for place in places]


@lru_cache(maxsize=2)
def _order(epoch: int, total: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(total), total)


def check_errors(rows: list[Json], max_share: float) -> None:
    """FlashError(environment_error) with the evidence, where more than `max_share` of the rollouts
    failed.
    """
    errors = [row for row in rows if row["error"]]
    if len(errors) <= max_share * len(rows):
        return
    first = errors[0]["error"]
    raise FlashError(
        "environment_error",
        f"{len(errors)} of {len(rows)} rollouts failed in environment code; the "
        f"first, on task {errors[0]['task_id']}: [{first['code']}] {first['what']}",
        max_error_share=max_share,
        fix="run env_test, mend the environment and push it again",
    )


def _dtype(model_path: Path) -> torch.dtype:
    """bf16, unless the model's own files are fp32 on purpose (the tiny models of tests)."""
    return (
        torch.float32
        if AutoConfig.from_pretrained(model_path).dtype == torch.float32
        else torch.bfloat16
    )


def end_ids(model_path: Path) -> list[int]:
    """The tokens at which vLLM ends a turn of this model beside its tokenizer's eos."""
    try:
        ids = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # it has no such file
        ids = None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _max_length(spec: Settings, config: Any) -> int:
    context = config.get_text_config().max_position_embeddings
    if spec.max_length and spec.max_length > context:
        raise FlashError(
            "invalid_argument",
            "max_length is longer than the model's context",
            max_length=spec.max_length,
            context=context,
            fix=f"set max_length to at most {context}",
        )
    return spec.max_length or min(context, MAX_LENGTH)


def _seed(spec: Settings, step: int, index: int) -> int:
    return ((spec.seed) * 1_000_003 + step) * 65_537 + index
