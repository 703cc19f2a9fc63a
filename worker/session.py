"""What an attempt keeps open while it works: environment, policy and engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Generic, Self, TypeVar

from peft import PeftModel

from environments.checks.constants import best_constant
from environments.process.host import EnvironmentHost
from environments.sandbox.confinement import describe
from environments.sandbox.needs import PLAYS_OUTSIDE, Needs
from environments.settings import LOCAL_OWNER, identity, machine_directory
from environments.untrusted_text import plain_name
from flash_mcp.protocol import extensions, records
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.spec import MOST_AT_ONCE, EvalSpec, RunSpec
from worker.engine.vllm import Sync, VllmEngine
from worker.event_loop import AsyncRunner
from worker.handshake import agreeing_engine, check_effect, record_of, settle_routing
from worker.heartbeat import Cancelled, Heartbeat
from worker.model import Model, load_model
from worker.ranks import ALONE, Ranks, lost_process
from worker.rollouts import scheduler
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, TalkLimits

T = TypeVar("T")
S = TypeVar("S", bound=RunSpec | EvalSpec)
CONSTANT_TASKS = 10
CONSTANT_CHARACTERS = 200
PLACE_TIMEOUT_S = 600.0
"""Time that a run waits while as many environments run as settings.toml allows."""
OPEN_AT_ONCE = 512
"""Tasks of an evaluation that are under way at once: each of them holds an open episode."""


def start_environments(
    job: Json,
    spec: RunSpec | EvalSpec,
    writer: RunWriter,
    heartbeat: Heartbeat,
    runner: AsyncRunner,
    ranks: Ranks,
    opened: ExitStack,
) -> dict[str, EnvironmentHost]:
    """The job's environments by name, each in a process of its own with its own secrets; one alone
    has an empty name. The run's secrets leave this process's variables.

    Each rank has environments of its own, and its share of the run's concurrency."""
    heartbeat.enter("environment")
    secrets = {name: os.environ.pop(name) for name in spec.secrets if name in os.environ}

    async def on_progress(message: str) -> None:
        heartbeat.advance()
        writer.event("phase", message)

    def stop(host: EnvironmentHost) -> None:
        runner.run(host.stop())

    environments: list[Json] = job.get("mixture") or []
    share = ranks.count * max(1, len(environments))
    if not environments:
        own = {"args": spec.environment_args, "secrets": spec.secrets}
        environments = [{**job["environment"], **own}]
    hosts: dict[str, EnvironmentHost] = {}
    for environment in environments:
        starting = EnvironmentHost.start(
            Path(environment["path"]),
            known_as=identity(environment.get("owner", LOCAL_OWNER), environment["name"]),
            args=environment["args"],
            secrets={name: secrets[name] for name in environment["secrets"] if name in secrets},
            concurrency=max(1, spec.env_concurrency // share),
            timeout_s=spec.env_timeout_s,
            on_progress=on_progress,
            place_timeout_s=PLACE_TIMEOUT_S,
        )
        try:
            host = runner.run(starting, stop=heartbeat.cancelled)
        except CancelledError:
            raise Cancelled from None
        opened.callback(stop, host)
        writer.event("sandbox", describe(host.sandbox))
        hosts[environment["name"]] = host
    if len(hosts) == 1:
        return {"": hosts.popitem()[1]}
    return hosts


class Session(Generic[S]):
    """The policy, its engine and its environment, with which rollouts are made."""

    def __init__(
        self,
        spec: S,
        writer: RunWriter,
        heartbeat: Heartbeat,
        model: Model,
        hosts: dict[str, EnvironmentHost],
        runner: AsyncRunner,
        at_once: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.spec = spec
        self.writer = writer
        self.heartbeat = heartbeat
        self.model = model
        self.hosts = hosts
        """The environments of a mixture by name; one alone has an empty name."""
        self.host = next(iter(hosts.values()))
        self.runner = runner
        self._at_once = at_once * len(model.cards)
        self._constants: dict[str, dict[str, float]] = {}
        self.limits = TalkLimits(
            max_tokens=spec.max_tokens,
            max_length=model.max_length,
            temperature=spec.temperature,
            top_p=spec.top_p,
            stop=tuple(spec.stop_sequences),
        )
        self._engine: VllmEngine | None = None
        self._generator: scheduler.Generator | None = None
        self._synced: int | None = None
        self.gateway: Any = None
        self.swaps_mid_turn = False
        """Whether turns go on when the policy changes."""

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
        heartbeat.enter("model")
        model = load_model(job, spec, writer, heartbeat, trains=trains, ranks=ranks, cards=cards)
        with AsyncRunner() as runner, ExitStack() as opened:
            hosts = start_environments(job, spec, writer, heartbeat, runner, ranks, opened)
            session = cls(spec, writer, heartbeat, model, hosts, runner, at_once, ranks)
            try:
                if Needs.from_folder(session.host.folder).gateway:
                    session.open_gateway()
                yield session
            except Exception as error:
                lost = lost_process(session.engine_processes)
                if lost is None:
                    raise
                raise lost from error
            finally:
                session.close()

    def open_gateway(self) -> None:
        """Let agents outside ask for the tasks of every rank that makes rollouts."""
        key = self.ranks.share(token_hex(32))
        port = 0
        if self.has_engine:
            # A request asks a rank at random: with n ranks it takes n of them to meet the one that
            # has a task, in POLL_S / n altogether.
            door = extensions.find("flash_mcp.players", "gateway")
            poll_s = door.POLL_S / self.ranks.count**2

            async def opened() -> Any:
                return door.Gateway(self.host, key, poll_s)

            self.gateway = self.runner.run(opened())
            port = self.gateway.endpoint.port
        ports = [number for number in self.ranks.gather(port) if number]
        self.writer.opens_gateway(ports, key)
        self.writer.event("gateway", f"rollouts wait for agents outside: {PLAYS_OUTSIDE}")

    @property
    def _sequences(self) -> int:
        """Conversations that the engine advances at once, of those that are under way."""
        return min(max(self._at_once, 32), MOST_AT_ONCE)

    def start_engine(self) -> tuple[VllmEngine, scheduler.Generator]:
        """The engine and the generator of its turns; made once."""
        if self._engine is None or self._generator is None:
            engine = self._engine = self._checked_engine()
            self.ranks.engine_processes = engine.processes
            self._generator = scheduler.Generator(
                engine, run_step=lambda: self.runner.call_waiting(engine.step)
            )
        return self._engine, self._generator

    def _checked_engine(self) -> VllmEngine:
        """An engine that computes what the trainer's model does, where that is in memory."""
        policy = self.model.policy
        if self.model.is_shared or not isinstance(policy, PeftModel):
            if self._wants_experts:
                what = "cards that share a model do not repeat the engine's choice of experts"
                self.writer.event("routing", what)
            return self._new_engine(self.model.sync)
        folder = machine_directory() / "handshakes"
        engine = agreeing_engine(
            self._new_engine,
            self.model.ways,
            policy,
            self.model.base,
            self.limits.max_length,
            self.writer.event,
            partial(record_of, folder, self.model.base, policy, self.limits.max_length),
        )
        if self._wants_experts:
            base, length = self.model.base, self.limits.max_length
            settle_routing(engine, policy, base, length, self.writer.event)
        if freed := engine.share_base(policy):
            what = f"engine and trainer share {freed / 2**30:.2f} GiB of base weights"
            self.writer.event("one_base", what)
        return engine

    @property
    def _wants_experts(self) -> bool:
        """Whether the engine samples what a mixture is trained on."""
        spec: RunSpec | EvalSpec = self.spec
        trains = isinstance(spec, RunSpec) and spec.algorithm != "sft"
        return trains and self.model.base.experts > 0

    def _new_engine(self, sync: Sync) -> VllmEngine:
        self.heartbeat.enter("engine")
        return VllmEngine(
            self.model.base,
            max_length=self.limits.max_length,
            max_num_seqs=self._sequences,
            seed=self.spec.seed,
            lora_rank=self.spec.lora_rank if self.model.policy else None,
            sync=sync,
            dtype=str(self.model.dtype).removeprefix("torch."),
            cards=self.model.cards,
            returns_experts=self._wants_experts and not self.model.is_shared,
        )

    @property
    def engine_processes(self) -> list[Any]:
        """Those of an engine on several cards."""
        return self._engine.processes if self._engine else []

    def close(self) -> None:
        if self._generator:
            self.runner.run(self._generator.aclose())
        if self.gateway:
            self.runner.run(self.gateway.endpoint.aclose())
        if self._engine:
            self.ranks.engine_processes = []  # their end is no loss any more
            self._engine.close()

    @property
    def has_engine(self) -> bool:
        """Whether this rank makes rollouts: of ranks that share the model, the first makes all."""
        return self.ranks.is_first or not self.model.is_shared

    def own(self, items: Sequence[T]) -> list[T]:
        if self.model.is_shared:
            return list(items) if self.has_engine else []
        return self.ranks.mine(items)

    def sync(self, step: int) -> float:
        """Let the engine have the policy after `step` steps; the seconds that this took."""
        started = time.monotonic()
        if self._synced != step and self.has_engine:
            engine, generator = self.start_engine()
            policy = self.model.policy
            if isinstance(policy, Path):
                check_effect(engine, policy, self.model.base.tokenizer)
                engine.load_adapter(policy)
            elif policy is not None:
                load = partial(engine.load_policy, policy, step, mid_turn=self.swaps_mid_turn)
                self.runner.run(generator.between_steps(lambda: self.runner.call_waiting(load)))
            self._synced = step
        return time.monotonic() - started

    def collect(
        self,
        tasks: list[RolloutTask],
        limits: TalkLimits,
        on_done: Callable[[PlayedRollout], None] = lambda rollout: None,
    ) -> list[PlayedRollout]:
        """One rollout per task under the policy that was synced last; calls `on_done` with each as
        it ends. Raises Cancelled.
        """
        return self.wait(self.collecting(tasks, limits, on_done))

    async def collecting(
        self,
        tasks: list[RolloutTask],
        limits: TalkLimits,
        on_done: Callable[[PlayedRollout], None] = lambda rollout: None,
        host: EnvironmentHost | None = None,
        open_at_once: int | None = None,
    ) -> list[PlayedRollout]:
        """`collect` on the event loop, for a session whose engine runs; `host` is another
        environment than the run's.
        """
        if self._generator is None:
            assert not tasks
            return []

        def done(rollout: PlayedRollout) -> None:
            self.heartbeat.advance()
            on_done(rollout)

        template = self.model.template
        hosts: Any = host or self.gateway or self.hosts
        # Each call of the environment has an end: that is no stall, however long an agent works.
        wait = partial(self.heartbeat.advance, by_work=False)
        waiting = asyncio.create_task(self._generator.while_idle(wait))
        try:
            return await scheduler.collect(
                tasks,
                hosts,
                self._generator,
                template,
                limits,
                on_done=done,
                open_at_once=open_at_once,
            )
        finally:
            waiting.cancel()

    def collect_each(
        self, tasks: list[RolloutTask], limits: TalkLimits, on_done: Callable[[PlayedRollout], None]
    ) -> None:
        """`collect` with at most about OPEN_AT_ONCE open episodes, without keeping the rollouts."""
        self.wait(self.collecting(tasks, limits, on_done, open_at_once=OPEN_AT_ONCE))

    def constant_level(self, split: str, tasks: Sequence[int], name: str = "") -> dict[str, float]:
        """What the best constant answer, or the best part of the prompt, reaches on these tasks of
        an environment, for the summary of an evaluation: a model that is no better has learned
        nothing of the task. Empty if there is none, and for few tasks: some constant is right on
        one of them.
        """
        if len(tasks) < CONSTANT_TASKS:
            return {}
        if name not in self._constants:
            constant = self.wait(best_constant(self.hosts[name], split, tasks, copies=True))
            self._constants[name] = {}
            if constant is not None:
                self._constants[name] = {
                    "constant_success": constant.success_share,
                    "constant_n": len(constant.successes),
                }
                share = f"succeeds on {sum(constant.successes)} of {len(constant.successes)}"
                what = f"the best constant, {constant.answer!r:.100}, {share} tasks"
                answer = constant.answer[:CONSTANT_CHARACTERS]
                self.writer.event("constant", what, answer=answer, environment=name)
        return self._constants[name]

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; raises Cancelled after a cancel."""
        try:
            return self.runner.run(coroutine, stop=self.heartbeat.cancelled)
        except CancelledError:
            raise Cancelled from None


def check_errors(rows: Sequence[records.Rollout], max_share: float) -> None:
    """FlashError(environment_error), with evidence, if more than `max_share` rollouts failed."""
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
