"""What an attempt keeps open while it works: environment, policy, engine and reporter."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import torch
from peft import PeftModel
from transformers import AutoTokenizer, GenerationConfig

from environments.checks.constants import best_constant
from environments.process.host import EnvironmentHost
from environments.sandbox.confinement import describe
from environments.settings import LOCAL_OWNER, identity
from environments.untrusted_text import plain_name
from flash_mcp.protocol import records
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.run_writer import RunWriter
from flash_mcp.protocol.spec import EvalSpec, RunSpec
from worker.engine import measure
from worker.engine.fetch import commit_of, config_of, ensure, log_progress
from worker.engine.vllm import Sync, VllmEngine, can_share, default_sync
from worker.event_loop import AsyncRunner
from worker.heartbeat import Cancelled, Heartbeat
from worker.process import CARDS
from worker.ranks import ALONE, Ranks, lost_process
from worker.rollouts import scheduler
from worker.rollouts.metrics import summarize, summarize_evaluation
from worker.rollouts.scheduler import Limits, Rollout, Task, mixed_seed, task_groups
from worker.rollouts.transcript import ChatTemplate
from worker.training import memory
from worker.training.checkpoints import Reporter
from worker.training.policy import load_policy
from worker.training.trackers import eval_metrics

if TYPE_CHECKING:
    from worker.training.sft import Row

log = logging.getLogger("worker")
CONSTANT_TASKS = 10
CONSTANT_CHARACTERS = 200
T = TypeVar("T")
S = TypeVar("S", bound=RunSpec | EvalSpec)
MAX_LENGTH = 4096
PLACE_TIMEOUT_S = 600.0
"""Time that a run waits while as many environments run as settings.toml allows."""
EARLY_EVENTS = 10
"""An attempt reports the model among so many of its first events."""
SYNC_FIGURES = "sync.json"
"""The file of FLASH_HOME that keeps what was measured."""
MEASURED_STEPS = 50
"""A shorter run would gain less than the minutes of two engine starts."""
BLOCK = 512
"""Tasks of an evaluation that the scheduler gets at once: each of them holds an open episode."""


@dataclass(frozen=True)
class Model:
    """A base model, ready for use."""

    path: Path
    template: ChatTemplate
    dtype: torch.dtype
    max_length: int
    policy: PeftModel | Path | None
    """The policy; the folder of an adapter that only the engine reads; None for the base model."""
    sync: Sync | None = None
    """How the engine gets the policy, where that was measured."""
    cards: Sequence[str] = ("",)
    """Those that share the base weights, as CUDA_VISIBLE_DEVICES names them. One holds them all."""

    @property
    def is_shared(self) -> bool:
        return len(self.cards) > 1


def load_model(
    job: Json,
    spec: RunSpec | EvalSpec,
    writer: RunWriter,
    heartbeat: Heartbeat,
    *,
    trains: bool,
    at_once: int = 1,
    ranks: Ranks = ALONE,
    cards: Sequence[str] = ("",),
) -> Model:
    """Without `trains`, the policy is loaded only if the engine cannot read the job's adapter; that
    of several `cards` can."""
    heartbeat.enter("model")
    tell = log_progress()

    def on_fetched(stage: str, share: float) -> None:
        heartbeat.advance()
        tell(stage, share)

    pinned = _pinned_commit(writer.folder) or job.get("lineage", {}).get("model_commit")
    path = Path(
        ranks.from_first(lambda: str(ensure(spec.model, revision=pinned, on_progress=on_fetched)))
    )
    if commit := commit_of(path):
        writer.event("model", f"{spec.model} at commit {commit}", commit=commit)
    config = config_of(path)
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(path)
    template = ChatTemplate(tokenizer, thinking=spec.thinking, end_ids=end_ids(path))
    # bf16, unless the model's own files are fp32 on purpose, as the tiny models of tests are.
    dtype = torch.float32 if config.dtype == torch.float32 else torch.bfloat16
    check_precision(dtype)
    adapter = Path(job["init_adapter"]["path"]) if job.get("init_adapter") else None
    max_length = _length(spec, config)
    if len(cards) > 1:
        check_sharing(config, dtype, len(cards))
        return Model(path, template, dtype, max_length, adapter, adapter and "adapter", cards)
    policy = adapter
    sync: Sync | None = None
    if trains or (adapter and default_sync(dtype) == "merged"):
        has_engine = isinstance(spec, EvalSpec) or spec.generates
        smallest = memory.Workload(0, 1, 1, max_length, 1, int(has_engine), spec.lora_rank)
        smallest = replace(smallest, four_bit=is_four_bit(spec))
        sharing = ranks.count if can_share(dtype) else 1
        most = max(ranks.gather(memory.check_model(path, smallest, dtype, sharing)))
        arguments: Json = {
            "rank": spec.lora_rank,
            "alpha": spec.lora_alpha,
            "seed": spec.seed,
            "dtype": dtype,
            "adapter_path": adapter,
        }
        if most > 1:
            return _shared_model(path, template, dtype, max_length, arguments, writer, ranks)
        sync = ranks.from_first(
            lambda: choose_sync(path, spec, dtype, max_length, at_once, writer, heartbeat)
        )
        policy = load_policy(path, **arguments, four_bit=is_four_bit(spec))
    return Model(path, template, dtype, max_length, policy, sync)


def check_sharing(config: Any, dtype: torch.dtype, count: int) -> None:
    """FlashError unless an engine on `count` cards can share the model."""
    from worker.training.shards import check_shape  # noqa: PLC0415

    check_shape(config, count)
    if not can_share(dtype):
        what = "processors cannot share a model in bf16"
        raise FlashError("device_unsupported", what, gpus=count, fix="use gpus=1")


def _shared_model(
    path: Path,
    template: ChatTemplate,
    dtype: torch.dtype,
    max_length: int,
    arguments: Json,
    writer: RunWriter,
    ranks: Ranks,
) -> Model:
    """A model whose layers the ranks share, in the trainer and in one engine of rank 0."""
    from worker.training.shards import check_shape, load_shared_policy  # noqa: PLC0415

    check_shape(config_of(path), ranks.count)
    what = f"one card cannot hold the model: {ranks.count} share each of its layers"
    writer.event("shared", what, gpus=ranks.count)
    cards = ranks.gather(os.environ.get(CARDS, ""))
    policy = load_shared_policy(path, ranks, **arguments)
    return Model(path, template, dtype, max_length, policy, "adapter", cards)


def _length(spec: RunSpec | EvalSpec, config: Any) -> int:
    """Tokens of a whole conversation, within the model's context."""
    context: int = config.get_text_config().max_position_embeddings
    if spec.max_length and spec.max_length > context:
        raise FlashError(
            "invalid_argument",
            "max_length is longer than the model's context",
            max_length=spec.max_length,
            context=context,
            fix=f"set max_length to at most {context}",
        )
    return spec.max_length or min(context, MAX_LENGTH)


def choose_sync(
    path: Path,
    spec: RunSpec | EvalSpec,
    dtype: torch.dtype,
    max_length: int,
    at_once: int,
    writer: RunWriter,
    heartbeat: Heartbeat,
) -> Sync | None:
    """The way of a sync that is faster for this run on this card; an event says what was measured.

    None where there is no choice: on the CPU, in fp32, and for a run that is too short to measure.
    """
    if is_four_bit(spec):
        return "adapter"  # nothing can be merged into its weights
    if not isinstance(spec, RunSpec) or spec.algorithm != "grpo":
        return None
    if default_sync(dtype) != "adapter":
        return None
    load = measure.Load(
        model=str(path),
        dtype=str(dtype).removeprefix("torch."),
        max_length=max_length,
        sequences=sequences_of(at_once),
        rank=spec.lora_rank,
        device=torch.cuda.get_device_name(),
        engine=metadata.version("vllm"),
    )
    heartbeat.enter("sync")
    try:
        choice = measure.choose(
            load,
            at_once * spec.max_tokens,
            home() / SYNC_FIGURES,
            may_measure=(spec.steps or 0) >= MEASURED_STEPS,
            is_cancelled=heartbeat.cancelled.is_set,
        )
    except (FlashError, OSError) as error:
        writer.event("warning", f"how the engine gets the policy was not measured: {error}")
        return None
    if choice is None:
        return None
    writer.event("sync", str(choice), **{way: asdict(e) for way, e in choice.figures.items()})
    return choice.sync


def is_four_bit(spec: RunSpec | EvalSpec) -> bool:
    """Whether the trainer's base weights have 4 bits."""
    return isinstance(spec, RunSpec) and spec.base_precision == "nf4"


def sequences_of(at_once: int) -> int:
    """Conversations that an engine advances at once, of `at_once` that are under way."""
    return min(max(at_once, 32), 256)


def check_precision(dtype: torch.dtype) -> None:
    """FlashError(device_unsupported) if the GPU has no bfloat16: fp16 would overflow where models
    were trained in bf16, and loss scaling is not implemented.
    """
    if dtype != torch.bfloat16 or not torch.cuda.is_available():
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise FlashError(
            "device_unsupported",
            "the GPU has no bfloat16, in which models are trained",
            gpu=torch.cuda.get_device_name(),
            fix="use a card of compute capability 8.0 or more (A10, A100, RTX 30 and newer), or "
            "train on the CPU",
        )


def _pinned_commit(folder: RunFolder) -> str | None:
    """The commit of the hub model that an earlier attempt of this run used."""
    for name in folder.event_names():
        is_early = int(name.removesuffix(".json").rpartition("-")[2]) < EARLY_EVENTS
        event = folder.event(name) if is_early else None
        if event and event["kind"] == "model":
            return cast("Json", event).get("commit")
    return None


def start_environment(
    job: Json,
    spec: RunSpec | EvalSpec,
    writer: RunWriter,
    heartbeat: Heartbeat,
    runner: AsyncRunner,
    ranks: Ranks,
) -> EnvironmentHost:
    """The job's environment in its process. The run's secrets leave this process's variables.

    Each rank has an environment of its own, and its share of the run's concurrency."""
    heartbeat.enter("environment")
    secrets = {name: os.environ.pop(name) for name in spec.secrets if name in os.environ}

    async def on_progress(message: str) -> None:
        heartbeat.advance()
        writer.event("phase", message)

    environment = job["environment"]
    starting = EnvironmentHost.start(
        Path(environment["path"]),
        known_as=identity(environment.get("owner", LOCAL_OWNER), environment["name"]),
        args=spec.environment_args,
        secrets=secrets,
        concurrency=max(1, spec.env_concurrency // ranks.count),
        timeout_s=spec.env_timeout_s,
        on_progress=on_progress,
        place_timeout_s=PLACE_TIMEOUT_S,
    )
    try:
        host = runner.run(starting, stop=heartbeat.cancelled)
    except CancelledError:
        raise Cancelled from None
    writer.event("sandbox", describe(host.sandbox))
    return host


class Session(Generic[S]):
    """The policy, its engine and its environment, with which rollouts are made."""

    def __init__(
        self,
        spec: S,
        writer: RunWriter,
        heartbeat: Heartbeat,
        model: Model,
        host: EnvironmentHost,
        runner: AsyncRunner,
        at_once: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.spec = spec
        self.writer = writer
        self.heartbeat = heartbeat
        self.model = model
        self.host = host
        self.runner = runner
        self._at_once = at_once * len(model.cards)
        self._constant: dict[str, float] | None = None
        self.limits = Limits(
            max_tokens=spec.max_tokens,
            max_length=model.max_length,
            temperature=spec.temperature,
            top_p=spec.top_p,
            stop=tuple(spec.stop_sequences),
        )
        self._engine: VllmEngine | None = None
        self._generator: scheduler.Generator | None = None
        self._synced: int | None = None

    @classmethod
    @contextmanager
    def opened(
        cls,
        job: Json,
        spec: S,
        writer: RunWriter,
        heartbeat: Heartbeat,
        *,
        at_once: int,
        trains: bool,
        ranks: Ranks = ALONE,
        cards: Sequence[str] = ("",),
    ) -> Generator[Self]:
        """Model and environment, ready for rollouts, `at_once` of them at the same time."""
        model = load_model(
            job, spec, writer, heartbeat, trains=trains, at_once=at_once, ranks=ranks, cards=cards
        )
        with AsyncRunner() as runner:
            host = start_environment(job, spec, writer, heartbeat, runner, ranks)
            session = cls(spec, writer, heartbeat, model, host, runner, at_once, ranks)
            try:
                yield session
            except Exception as error:
                lost = lost_process(session.engine_processes)
                if lost is None:
                    raise
                raise lost from error
            finally:
                session.close()
                runner.run(host.stop())

    @property
    def _sequences(self) -> int:
        """Conversations that the engine advances at once."""
        return sequences_of(self._at_once)

    def start_engine(self) -> tuple[VllmEngine, scheduler.Generator]:
        """The engine and the generator of its turns; made once."""
        if self._engine is None or self._generator is None:
            self.heartbeat.enter("engine")
            engine = self._engine = VllmEngine(
                self.model.path,
                max_length=self.limits.max_length,
                max_num_seqs=self._sequences,
                seed=self.spec.seed,
                lora_rank=self.spec.lora_rank if self.model.policy else None,
                sync=self.model.sync,
                dtype=str(self.model.dtype).removeprefix("torch."),
                cards=self.model.cards,
            )
            self.ranks.engine_processes = engine.processes
            self._generator = scheduler.Generator(
                engine, run_step=lambda: self.runner.call_waiting(engine.step)
            )
        return self._engine, self._generator

    @property
    def engine_processes(self) -> list[Any]:
        """Those of an engine on several cards."""
        return self._engine.processes if self._engine else []

    def close(self) -> None:
        if self._generator:
            self.runner.run(self._generator.aclose())
        if self._engine:
            self.ranks.engine_processes = []  # their end is no loss any more
            self._engine.close()

    @property
    def has_engine(self) -> bool:
        """Whether this rank makes rollouts: of ranks that share the model, the first makes all."""
        return self.ranks.is_first or not self.model.is_shared

    def own(self, items: Sequence[T]) -> list[T]:
        """The items whose rollouts this rank makes."""
        if self.model.is_shared:
            return list(items) if self.has_engine else []
        return self.ranks.mine(items)

    def sync(self, step: int) -> float:
        """Put the policy after `step` steps into the engine, unless it is there; the seconds that
        this took.
        """
        started = time.monotonic()
        if self._synced != step and self.has_engine:
            engine, _ = self.start_engine()
            policy = self.model.policy
            if isinstance(policy, Path):
                engine.load_adapter(policy)
            elif policy is not None:
                engine.load_policy(policy)
            self._synced = step
        return time.monotonic() - started

    def collect(
        self,
        tasks: list[Task],
        limits: Limits,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """One rollout per task under the policy that was synced last; calls `on_done` with each as
        it ends. Raises Cancelled.
        """
        if not tasks:
            return []
        _, generator = self.start_engine()

        def done(rollout: Rollout) -> None:
            self.heartbeat.advance()
            on_done(rollout)

        template = self.model.template
        return self.wait(
            scheduler.collect(tasks, self.host, generator, template, limits, on_done=done)
        )

    def collect_blocks(
        self, tasks: list[Task], limits: Limits, on_done: Callable[[Rollout], None]
    ) -> None:
        """`collect`, BLOCK tasks at a time or a few more, so that no group is split, without
        keeping the rollouts.
        """
        block: list[Task] = []
        for group in scheduler.grouped(tasks):
            block += group
            if len(block) >= BLOCK:
                self.collect(block, limits, on_done)
                block = []
        if block:
            self.collect(block, limits, on_done)

    def constant_level(self, split: str, tasks: Sequence[int]) -> dict[str, float]:
        """What the best constant answer reaches on these tasks, for the summary of an evaluation:
        a model that is no better has learned nothing of the task. Empty if it is not known, and
        for few tasks: some constant is right on one of them.
        """
        if len(tasks) < CONSTANT_TASKS:
            return {}
        if self._constant is None:
            constant = self.wait(best_constant(self.host, split, tasks))
            self._constant = {}
            if constant is not None:
                self._constant = {
                    "constant_success": constant.success_share,
                    "constant_n": len(constant.successes),
                }
                share = f"succeeds on {constant.success_share:.1%} of {len(constant.successes)}"
                what = f"the best constant, {constant.answer!r:.100}, {share} tasks"
                self.writer.event("constant", what, answer=constant.answer[:CONSTANT_CHARACTERS])
        return self._constant

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; raises Cancelled after a cancel."""
        try:
            return self.runner.run(coroutine, stop=self.heartbeat.cancelled)
        except CancelledError:
            raise Cancelled from None


class TrainingSession(Session[RunSpec]):
    """A session whose policy is trained, with the reporter of its steps."""

    def __init__(self, spec: RunSpec, *parts: Any) -> None:
        super().__init__(spec, *parts)
        self.reporter = Reporter(
            self.writer,
            spec,
            self.heartbeat.cancelled,
            before_step=self._before_step,
            advance=self.heartbeat.advance,
            saves=self.ranks.is_first,
        )
        self.resumed_at = 0
        """The step of the checkpoint that this attempt resumed from."""

    def check_memory(self, prompt: int, turns: int, *, packed: bool) -> float:
        """Report the memory that GRPO needs if the longest prompt has `prompt` tokens. Returns the
        tokens of a pass above which its activations must be recomputed.

        FlashError(out_of_memory) if the run cannot fit.
        """
        work = memory.Workload(
            prompt=prompt,
            max_tokens=self.limits.max_tokens,
            turns=turns,
            max_length=self.limits.max_length,
            group_size=self.spec.rollouts_per_prompt,
            sequences=self._sequences,
            lora_rank=self.spec.lora_rank,
            packed=packed,
        )
        return self._check_memory(work)

    def check_batch_memory(self, rows: list[Row], *, packed: bool) -> float:
        """`check_memory` of SFT on batches of `rows`."""
        spec = self.spec
        length = self.limits.max_length
        longest = max((len(row["input_ids"]) for row in rows), default=1)
        work = memory.Workload(
            prompt=0,
            max_tokens=min(longest, length),
            turns=1,
            max_length=length,
            group_size=spec.batch_size,
            sequences=self._sequences if spec.generates else 0,
            lora_rank=spec.lora_rank,
            packed=packed,
        )
        return self._check_memory(work)

    def _check_memory(self, work: memory.Workload) -> float:
        work = replace(work, four_bit=is_four_bit(self.spec), shards=len(self.model.cards))
        needs, keep_tokens, warning = memory.check(self.model.path, work, self.model.dtype)
        message = f"at most {needs}"
        if keep_tokens is not None:
            message += (
                f"; packs of more than {keep_tokens} tokens are split, or take longer: activations "
                "are computed twice"
            )
        log.info("memory: %s", message)
        self.writer.event("memory", message, **asdict(needs))
        if warning:
            log.warning("%s", warning)
            self.writer.event("warning", warning)
        return math.inf if keep_tokens is None else keep_tokens

    def rollouts(self, step: int) -> list[Rollout]:
        """This rank's rollouts of optimizer step `step`: G for each of its examples. The trainer
        calls this.
        """
        spec = self.spec
        examples = examples_of(step, spec.batch_size, self.host.splits["train"], spec.seed)
        self.heartbeat.enter("sync", step - 1)
        sync_s = self.sync(step - 1)
        tasks = task_groups(
            "train",
            examples,
            spec.rollouts_per_prompt,
            lambda example, index, attempt: mixed_seed(spec.seed, step, index),
        )
        # A group stays on one rank: its advantages need all its rewards.
        own = list(itertools.chain.from_iterable(self.own(scheduler.grouped(tasks))))
        self.heartbeat.enter("rollout", of=len(tasks))
        started = time.monotonic()
        rollouts = self.collect(own, self.limits)
        every = self._from_all(rollouts)
        if self.ranks.is_first:
            self._report_rollouts(step, every, time.monotonic() - started, sync_s)
        self.heartbeat.enter("train")
        if self.model.is_shared:
            groups = self.ranks.mine(range(spec.batch_size))
            rollouts = [item for item in every if item.task.group in groups]
        return rollouts

    def _from_all(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of all ranks, in the order of the step."""
        if self.ranks.count == 1:
            return rollouts
        parts = self.ranks.gather([rollout.packed() for rollout in rollouts])
        template = self.model.template
        every = [Rollout.unpacked(item, template) for part in parts for item in part]
        return sorted(every, key=lambda entry: entry.task.index)

    def _report_rollouts(
        self, step: int, rollouts: list[Rollout], rollout_s: float, sync_s: float
    ) -> None:
        """Write a step's rollouts and leave their metrics to the reporter."""
        from worker.training.grpo import (  # noqa: PLC0415  only GRPO needs TRL's
            group_advantages,
            groups_of,
            scales_advantages,
        )

        spec = self.spec
        groups = groups_of(rollouts, spec.rollouts_per_prompt)
        rows: list[records.Rollout] = []
        for group in groups:
            advantages_G = cast(Any, group_advantages(group, scale=scales_advantages(spec)))
            for rollout, advantage in zip(group, advantages_G.tolist(), strict=True):
                rows.append(rollout.record(step, advantage))
        self.writer.rollouts(step, [row.fields() for row in rows])
        check_errors(rows, spec.max_error_share)
        tokens = sum(rollout.transcript.model_tokens for rollout in rollouts if rollout.transcript)
        self.reporter.pending = {
            **summarize(groups),
            "engine/tokens_per_s": tokens / rollout_s,
            "time/rollout_s": rollout_s,
            "time/sync_s": sync_s,
        }

    def evaluate(self, step: int) -> None:
        """Greedy rollouts of the eval split under the policy after `step` steps."""
        total = min(self.spec.eval_examples, self.host.splits.get("eval", 0))
        if not total:
            what = "the environment declares no eval split; the evaluation was left out"
            self.writer.event("warning", what)
            return
        # Evaluations of later steps belong to a policy that was lost with the attempt before.
        if step <= self.resumed_at and self.writer.folder.evaluation(step):
            return
        self.sync(step)
        self.heartbeat.enter("eval", step, of=total)
        ours = self.limits
        limits = Limits(ours.max_tokens, ours.max_length, temperature=0.0, stop=ours.stop)
        started = time.monotonic()
        own: list[records.Rollout] = []
        tasks = task_groups("eval", range(total), 1, lambda example, index, attempt: index)
        mine = self.own(tasks)
        self.collect_blocks(mine, limits, lambda rollout: own.append(rollout.record(step)))
        parts = self.ranks.gather([row.fields() for row in own])
        if not self.ranks.is_first:
            return
        rows = [records.Rollout.from_row(fields) for part in parts for fields in part]
        rows.sort(key=lambda row: row.index)
        summary = summarize_evaluation(rows, seconds=time.monotonic() - started)
        summary |= self.constant_level("eval", range(total))
        self.writer.evaluation(step, summary, [row.fields() for row in rows])
        self.reporter.tell(step, eval_metrics(summary))
        log.info("step %s: eval %s", step, summary)

    def _before_step(self, step: int, steps: int) -> None:
        """After `step` steps of `steps`, before the next one."""
        self.heartbeat.steps = steps
        self.heartbeat.enter(self.heartbeat.phase, step)
        if step and self.spec.eval_every and step % self.spec.eval_every == 0:
            self.evaluate(step)
            self.heartbeat.enter("train")


def examples_of(step: int, count: int, total: int, seed: int) -> list[int]:
    """The `count` examples of step 1, 2, ...: they pass through all `total` again and again, each
    time in another order.

    They depend on the step alone, so an attempt that resumes draws what the one before would
    have."""
    places = range((step - 1) * count, step * count)
    return [_order(place // total, total, seed)[place % total] for place in places]


@lru_cache(maxsize=2)
def _order(epoch: int, total: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(total), total)


def check_errors(rows: Sequence[records.Rollout], max_share: float) -> None:
    """FlashError(environment_error) with the evidence if more than `max_share` of the rollouts
    failed.
    """
    errors = [(row.task_id, row.error) for row in rows if row.error]
    if len(errors) <= max_share * len(rows):
        return
    task_id, first = errors[0]
    raise FlashError(
        "environment_error",
        f"{len(errors)} of {len(rows)} rollouts failed in environment code; the "
        f"first, on task {plain_name(task_id)}, with {first['code']}",
        max_error_share=max_share,
        wrote=first["what"],
        fix="run env_test, fix the environment and push it again",
    )


def end_ids(model_path: Path) -> list[int]:
    """The tokens, beside its tokenizer's eos, at which vLLM ends a turn of this model."""
    try:
        ids: Any = cast(Any, GenerationConfig).from_pretrained(model_path).eos_token_id
    except OSError:  # the model has no such file
        return []
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids
