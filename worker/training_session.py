"""The session of a run: rollouts for its steps, evaluations between them, reports of both."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peft import PeftModel

from environments.faults import EnvironmentFault
from environments.process.host import EnvironmentHost
from environments.settings import LOCAL_OWNER, identity
from flash_mcp.protocol import records
from flash_mcp.protocol.errors import first_of
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.spec import RunSpec
from worker.capacity import MIB, capacity_bytes
from worker.model import is_four_bit
from worker.rollouts.metrics import of_environment, staleness, summarize, summarize_evaluation
from worker.rollouts.scheduler import (
    PlayedRollout,
    RolloutTask,
    TalkLimits,
    grouped,
    groups_of,
    mixed_seed,
    task_groups,
)
from worker.rollouts.task_choice import REFILLS, Source, TaskChoice, TaskPlace, examples_of
from worker.session import PLACE_TIMEOUT_S, Session, check_errors
from worker.training import memory
from worker.training.checkpoints import Reporter
from worker.training.packing import Way, longest_pack, pack_limit
from worker.training.trackers import eval_metrics

log = logging.getLogger("worker")
REGRESSION_TOKENS = 32
"""Of one answer there; the package's tasks need fewer."""


class StepsAhead:
    """The rollouts of one step after the other, by `collect`. Those of later steps may begin before
    their step, and go on from one call to the next.

    A step always has the rollouts of its own tasks: one that waited for whatever ends first would
    train the short ones first."""

    def __init__(self, collect: Callable[[int], Coroutine[Any, Any, list[PlayedRollout]]]) -> None:
        self._collect = collect
        self._under_way: dict[int, asyncio.Task[list[PlayedRollout]]] = {}

    async def take(self, step: int, last: int) -> list[PlayedRollout]:
        """The rollouts of `step`. Those of the steps up to `last` begin."""
        for number in range(step, last + 1):
            if number not in self._under_way:
                self._under_way[number] = asyncio.create_task(self._collect(number))
        return await self._under_way.pop(step)

    async def aclose(self) -> None:
        under_way = self._under_way.values()
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class TrainingSession(Session[RunSpec]):
    """A session whose policy is trained, with the reporter of its steps."""

    def __init__(self, spec: RunSpec, *parts: Any) -> None:
        super().__init__(spec, *parts)
        self.reporter = Reporter(
            self.writer,
            spec,
            self.heartbeat.cancelled,
            before_step=self._before_step,
            planned=self._planned,
            advance=self.heartbeat.advance,
            saves=self.ranks.is_first,
        )
        self.deadline: Deadline | None = None
        self._early_stopping = EarlyStopping(spec.algorithm) if spec.early_stopping else None
        self.resumed_at = 0
        """The step of the checkpoint that this attempt resumed from."""
        self.swaps_mid_turn = spec.max_staleness > 0
        self.regression: Json | None = None
        """The tasks of other kinds that are tried before and after the run."""
        self._choice: TaskChoice | None = None
        if spec.task_sampling == "useful":
            total = self.host.splits["train"]
            self._choice = TaskChoice(total, spec.rollouts_per_prompt, spec.seed)
        self._next_choice = self._choice
        """With what the step under way taught, of which no checkpoint may know yet."""
        self.ratios: dict[str, float] = {}
        """Of the environments of a mixture."""
        self.reporter.add_files = self._add_files
        self._steps_ahead = StepsAhead(lambda step: self.collecting(self._tasks(step), self.limits))

    def resume(self, step: int, folder: Path) -> None:
        self.resumed_at = self.reporter.saved_step = step
        if self._early_stopping and self.ranks.is_first:
            for before in range(max(1, step - LEARNT_STEPS + 1), step + 1):
                if entry := self.writer.folder.metrics(before):
                    self._early_stopping.add(entry["metrics"])
        if self._choice:
            self._choice.load(folder)

    def _add_files(self, checkpoint: Path) -> None:
        if self._choice:
            self._choice.save(checkpoint)

    def end_steps_ahead(self) -> None:
        """End the rollouts of steps that do not follow any more."""
        self.runner.run(self._steps_ahead.aclose())

    def close(self) -> None:
        self.end_steps_ahead()
        super().close()

    def check_memory(self, way: Way, teacher: int = 0) -> float:
        """Report the memory that the run needs beside a `teacher` of so many bytes. Returns the
        tokens of a pass above which its activations must be recomputed.

        FlashError(out_of_memory) if the model and the engine leave no room for any."""
        policy = self.model.policy
        assert isinstance(policy, PeftModel)
        causal_lm = policy.get_base_model()
        work = memory.Workload(
            max_length=self.limits.max_length,
            sequences=self._sequences if self.spec.generates else 0,
            lora_rank=self.spec.lora_rank,
            four_bit=is_four_bit(self.spec),
            experts=self.spec.experts,
            shards=len(self.model.cards),
            teacher=teacher,
        )
        a_token = memory.token_bytes(causal_lm, way)
        capacity = capacity_bytes()
        needs = memory.estimate(self.model.base, work, self.model.dtype, capacity)
        tokens = (capacity - needs.total) / a_token
        if self.regression and not self.spec.generates:
            most = pack_limit(0, longest=longest_pack(causal_lm))
            beside = replace(work, sequences=self._sequences)
            with_engine = memory.estimate(self.model.base, beside, self.model.dtype, capacity)
            left = (capacity - with_engine.total) / a_token
            if self.ranks.share(left >= min(tokens, most)):
                needs = with_engine
                tokens = left
            else:
                self._leave_out("memory holds no engine beside the trainer")
        if tokens < 1:
            raise memory.does_not_fit(self.model.base, work, self.model.dtype, capacity)
        keep_tokens = int(self.ranks.share(tokens))
        message = (
            f"{needs}, and {a_token / MIB:.2g} MiB for each token of a pass: packs of more than "
            f"{keep_tokens} are split, or take longer: activations are computed twice"
        )
        log.info("memory: %s", message)
        pass_needs = {"token_bytes": int(a_token), "keep_tokens": keep_tokens}
        self.writer.event("memory", message, **asdict(needs), **pass_needs)
        return keep_tokens

    def rollouts(self, step: int) -> list[PlayedRollout]:
        """This rank's rollouts of optimizer step `step`: G for each of its examples. The trainer
        calls this.
        """
        spec = self.spec
        self.heartbeat.enter("sync", step - 1)
        sync_s = self.sync(step - 1)
        own = len(self.own(range(spec.batch_size)))
        self.heartbeat.enter("rollout", of=own * spec.rollouts_per_prompt)
        started = time.monotonic()
        rollouts = self.wait(self._steps_ahead.take(step, last_begun(spec, step)))
        every = self._from_all(rollouts)
        if self._choice:
            every = self._refilled(step, every, copy.deepcopy(self._choice))
        if self.ranks.is_first:
            self._report_rollouts(step, every, time.monotonic() - started, sync_s)
        self.heartbeat.enter("train")
        groups = groups_of(every, spec.rollouts_per_prompt)[: spec.batch_size]
        return list(itertools.chain.from_iterable(self.ranks.mine(groups)))

    def _refilled(
        self, step: int, every: list[PlayedRollout], choice: TaskChoice
    ) -> list[PlayedRollout]:
        """The rollouts of a step. Where no group of it teaches, other tasks are tried instead, and
        theirs come first. The first `batch_size` groups are trained."""
        from worker.training.grpo import turn_advantages  # noqa: PLC0415  only GRPO needs TRL's

        spec = self.spec
        size = spec.rollouts_per_prompt
        tried: list[PlayedRollout] = []
        useful = 0
        for turn in range(REFILLS + 1):
            for group in groups_of(every, size):
                turns = itertools.chain.from_iterable(turn_advantages(group, spec))
                teaches = any(advantage for _, advantage in turns)
                useful += teaches
                rewards = [rollout.reward for rollout in group if not rollout.error]
                choice.learn(group[0].task.example, rewards, taught=teaches)
            tried = every + tried
            if useful or turn == REFILLS:
                break
            without = {rollout.task.example for rollout in tried}
            examples = choice.draw(step, spec.batch_size, turn=turn + 1, without=without)
            own = self._own_tasks(step, list(map(TaskPlace, examples)), len(tried) // size)
            self.heartbeat.enter("rollout", of=len(own))
            every = self._from_all(self.collect(own, self.limits))
        self._next_choice = choice
        self.reporter.pending = {"groups/useful": useful, "groups/tried": len(tried) // size}
        return tried

    def _tasks(self, step: int) -> list[RolloutTask]:
        spec = self.spec
        if self._choice:
            examples = list(map(TaskPlace, self._choice.draw(step, spec.batch_size)))
        else:
            sources: dict[str, Source] = {}
            for name, host in self.hosts.items():
                sources[name] = Source(host.splits["train"], self.ratios.get(name, 1.0))
            examples = examples_of(step, spec.batch_size, sources, spec.seed)
        return self._own_tasks(step, examples)

    def _own_tasks(
        self, step: int, examples: Sequence[TaskPlace], before: int = 0
    ) -> list[RolloutTask]:
        """This rank's, of groups that `before` others precede in the step."""
        spec = self.spec
        first = before * spec.rollouts_per_prompt
        tasks = task_groups(
            "train",
            examples,
            spec.rollouts_per_prompt,
            lambda number, index, attempt: mixed_seed(spec.seed, step, first + index),
        )
        tasks = [replace(t, group=before + t.group, index=first + t.index) for t in tasks]
        # A group stays on one rank: its advantages need all its rewards.
        return list(itertools.chain.from_iterable(self.own(grouped(tasks))))

    def _from_all(self, rollouts: list[PlayedRollout]) -> list[PlayedRollout]:
        """The rollouts of all ranks, in the order of the step. Those of others lack experts: a rank
        trains its own, but for groups that were tried in place of others."""
        if self.ranks.count == 1:
            return rollouts
        parts = self.ranks.gather([rollout.packed() for rollout in rollouts])
        template = self.model.template
        every = [PlayedRollout.unpacked(item, template) for part in parts for item in part]
        own = {rollout.task.index: rollout for rollout in rollouts}
        every.sort(key=lambda entry: entry.task.index)
        return [own.get(entry.task.index, entry) for entry in every]

    def _report_rollouts(
        self, step: int, rollouts: list[PlayedRollout], rollout_s: float, sync_s: float
    ) -> None:
        """Write a step's rollouts and leave their metrics to the reporter."""
        from worker.training.grpo import advantages_of  # noqa: PLC0415  only GRPO needs TRL's

        spec = self.spec
        groups = groups_of(rollouts, spec.rollouts_per_prompt)
        rows: list[records.Rollout] = []
        for group in groups:
            advantages = advantages_of(group, spec)
            for rollout, advantage in zip(group, advantages, strict=True):
                rows.append(rollout.record(step, None if spec.teacher else advantage))
        self.writer.rollouts(step, [row.fields() for row in rows])
        check_errors(rows, spec.max_error_share)
        tokens = sum(rollout.transcript.model_tokens for rollout in rollouts if rollout.transcript)
        for name in self.ratios:
            own = [group for group in groups if group[0].task.environment == name]
            summary = summarize(own, spec.thinking_length_penalty_coef)
            self.reporter.pending |= of_environment(name, summary)
        self.reporter.pending |= {
            **summarize(groups, spec.thinking_length_penalty_coef),
            "engine/tokens_per_s": tokens / rollout_s,
            "time/rollout_s": rollout_s,
            "time/sync_s": sync_s,
        }
        if spec.max_staleness:
            self.reporter.pending |= staleness(rollouts, step - 1)

    def evaluate(self, step: int) -> None:
        """Greedy rollouts of the eval split under the policy after `step` steps."""
        examples: list[TaskPlace] = []
        for name, host in self.hosts.items():
            total = min(self.spec.eval_examples, host.splits.get("eval", 0))
            examples += [TaskPlace(number, name) for number in range(total)]
        if not examples:
            what = "the environment declares no eval split; the evaluation was left out"
            self.writer.event("warning", what)
            return
        # Evaluations of later steps belong to a policy that was lost with the attempt before.
        if step <= self.resumed_at and self.writer.folder.evaluation(step):
            return
        self.sync(step)
        tasks = task_groups("eval", examples, 1, lambda number, index, attempt: index)
        mine = self.own(tasks)
        self.heartbeat.enter("eval", step, of=len(mine))
        ours = self.limits
        limits = TalkLimits(ours.max_tokens, ours.max_length, temperature=0.0, stop=ours.stop)
        started = time.monotonic()
        own: list[records.Rollout] = []
        self.collect_each(mine, limits, lambda rollout: own.append(rollout.record(step)))
        parts = self.ranks.gather([row.fields() for row in own])
        if self.deadline:
            self.deadline.evaluation_s = time.monotonic() - started
        if not self.ranks.is_first:
            return
        rows = [records.Rollout.from_row(fields) for part in parts for fields in part]
        rows.sort(key=lambda row: row.index)
        summary = self._summary(rows, examples, time.monotonic() - started)
        self.writer.evaluation(step, summary, [row.fields() for row in rows])
        self.reporter.tell(step, eval_metrics(summary))
        log.info("step %s: eval %s", step, summary)

    def _summary(
        self, rows: Sequence[records.Rollout], examples: Sequence[TaskPlace], seconds: float
    ) -> Json:
        """Of an evaluation; in a mixture also of each environment. `examples` are of `rows`."""
        summary = summarize_evaluation(rows, seconds=seconds)
        for name in self.hosts:
            own = [
                row for row, item in zip(rows, examples, strict=True) if item.environment == name
            ]
            level = self.constant_level("eval", range(len(own)), name)
            if not name:
                return summary | level
            summary |= of_environment(name, summarize_evaluation(own, seconds=seconds) | level)
        return summary

    def try_regression(self, step: int) -> None:
        """What the policy after `step` steps does on tasks of other kinds, as an event. Trouble
        with that environment is a warning: the run goes on. So is trouble with an engine that no
        other part of the run needs.
        """
        if not self.regression or self.heartbeat.cancelled.is_set():
            return
        try:
            self.sync(step)  # on every rank: they may share the model
        except Exception as error:
            if self.spec.generates or self.heartbeat.cancelled.is_set():
                raise
            self._leave_out(f"the engine does not start: {error!s:.300}")
            return
        if not self.ranks.is_first:
            return
        self.heartbeat.enter("regression", step)
        try:
            rollouts = self.wait(self._regression(self.regression))
        except (EnvironmentFault, OSError, ExceptionGroup) as error:
            why = first_of(error)
            if why is not error and getattr(why, "code", "") != "tools_unsupported":
                raise
            self._leave_out(f"{why!s:.300}")
            return
        outcomes = {item.task_id: item.success for item in rollouts if item.error is None}
        solved = f"{sum(outcomes.values())} of {len(outcomes)} regression tasks"
        self.writer.event("regression", f"solved {solved}", step=step, outcomes=outcomes)

    def _leave_out(self, why: str) -> None:
        self.regression = None
        self.writer.event("warning", f"the regression split was not tried: {why}")

    async def _regression(self, split: Json) -> list[PlayedRollout]:
        owner = split.get("owner", LOCAL_OWNER)
        host = await EnvironmentHost.start(
            Path(split["path"]),
            known_as=identity(owner, split["name"]),
            timeout_s=self.spec.env_timeout_s,
            place_timeout_s=PLACE_TIMEOUT_S,
        )
        async with host:
            wanted = split.get("tasks", 100)  # which runs that an older version queued do not name
            examples = map(TaskPlace, range(min(host.splits.get("eval", 0), wanted)))
            tasks = task_groups("eval", examples, 1, lambda number, index, attempt: index)
            # A model that thinks needs the run's own room.
            room = self.limits.max_tokens if self.spec.thinking else REGRESSION_TOKENS
            limits = TalkLimits(room, self.limits.max_length, temperature=0.0)
            return await self.collecting(tasks, limits, host=host)

    def _before_step(self, step: int, steps: int) -> None:
        self.heartbeat.steps = steps
        self.heartbeat.enter(self.heartbeat.phase, step)
        if self.deadline:
            self.deadline.begin(time.monotonic())
        if step and self.spec.eval_every and step % self.spec.eval_every == 0:
            self.evaluate(step)
            self.heartbeat.enter("train")

    def _planned(self, step: int, most: int) -> int:
        self._choice = self._next_choice
        planned, why = self.ranks.from_first(lambda: self._last_step(step, most))
        self.heartbeat.steps = planned
        if planned == step < most:
            self.writer.event("last_step", f"{why}: step {step} is the last, of up to {most}")
        return planned

    def _last_step(self, step: int, most: int) -> tuple[int, str]:
        """(how many steps the run makes in all, after `step` of them, why they are not `most`)"""
        early = self._early_stopping
        if early and self.reporter.last:
            early.add(self.reporter.last)
        if early and early.is_due:
            return step, f"nothing to learn was left in {LEARNT_STEPS} steps"
        if self.deadline:
            planned = self.deadline.steps(step, most, time.monotonic())
            return planned, f"finish_by={self.spec.finish_by}"
        return most, ""


def last_begun(spec: RunSpec, step: int) -> int:
    """The last step whose rollouts begin during `step`. None is under way when the run saves
    or evaluates: an attempt that resumes there has missed nothing."""
    assert spec.steps is not None
    ends = [-(-step // every) * every for every in (spec.save_every, spec.eval_every) if every]
    return min(step + spec.max_staleness, spec.steps, *ends)


# -- the steps of a run that has to end in time (`finish_by`) --------------------------------------


@dataclass
class Deadline:
    """Plans the steps at the pace so far, in which saves and evaluations between steps count."""

    ends: float
    """On the monotonic clock."""
    last_attempts: int
    """Steps' worth of held-out attempts that follow the last step, until one was measured."""
    evaluation_s: float | None = None
    """What an evaluation took."""
    began: float = 0.0
    steps_done: int = 0
    """Steps since it began."""

    def begin(self, now: float) -> None:
        self.began = self.began or now

    def steps(self, step: int, most: int, now: float) -> int:
        """How many steps the run makes in all, after `step` of them; `most` at most."""
        self.steps_done += 1
        pace_s = (now - self.began) / self.steps_done
        last_s = self.last_attempts * pace_s
        if self.last_attempts and self.evaluation_s is not None:
            last_s = self.evaluation_s
        left_s = self.ends - now - last_s
        return min(most, step + max(0, int(left_s / pace_s)))


def deadline_of(job: Json, spec: RunSpec) -> Deadline | None:
    """The job says when its run started, by the server's clock."""
    if spec.finish_s is None:
        return None
    left_s = spec.finish_s - (time.time() - job["started"])
    attempts = spec.eval_examples if spec.eval_after else 0
    return Deadline(time.monotonic() + left_s, -(-attempts // spec.conversations_per_step))


# -- the end of a run that has nothing left to learn (`early_stopping`) ----------------------------

LEARNT_STEPS = 10
LOSS_THRESHOLD = 0.001
"""In nats per token, for SFT: each token of an answer has a probability of 0.999."""


class EarlyStopping:
    """Watches the metrics of the last LEARNT_STEPS steps. A resumed attempt adds those before its
    checkpoint, so that the run ends at the same step however often it was killed.
    """

    def __init__(self, algorithm: str) -> None:
        self._is_learnt = {"sft": _is_learnt, "grpo": _is_solved}.get(algorithm)
        self._recent: deque[bool] = deque(maxlen=LEARNT_STEPS)

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Take the metrics of the next step."""
        if self._is_learnt:
            self._recent.append(self._is_learnt(metrics))

    @property
    def is_due(self) -> bool:
        return sum(self._recent) == LEARNT_STEPS


def _is_learnt(metrics: Mapping[str, float | None]) -> bool:
    loss = metrics.get("loss")
    return loss is not None and loss < LOSS_THRESHOLD


def _is_solved(metrics: Mapping[str, float | None]) -> bool:
    """Every rollout succeeded, and no reward differs from others of its group."""
    return metrics.get("groups/uniform_share") == metrics.get("success/rate") == 1
