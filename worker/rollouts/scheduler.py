"""The rollout scheduler: many conversations at once over one continuous-batching engine.

Every conversation is a coroutine: it asks the engine for a turn, gives the turn to the environment,
and repeats this until it ends and is scored. No conversation waits for another: there is no turn
barrier. One driver steps the engine while turns are wanted, and admits new turns between two
iterations.

    conversation --generate--> Generator --submit/step--> engine
         '-------step/score--> EnvironmentHost --pipe--> the environment's process

Only an environment that scores groups makes conversations wait: those of a task that have ended
stay open until the last of them has ended, and are scored together.

An agent may make several calls at once, and continue any of them (worker/rollouts/calls.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, cast

from environments.agents.calls import AgentCall, CallOptions, Usage
from environments.checks.playing import together
from environments.process.host import Ended, EnvironmentFault, Opening, Score
from environments.same_task import kind_of
from environments.untrusted_text import plain_name
from flash_mcp.protocol import records
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from worker.rollouts.calls import Call, merged
from worker.rollouts.task_choice import TaskPlace
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion, RolloutEngine, Sampling

Finish = Literal["done", "max_turns", "length", "error"]
Finished = list[tuple[str, Completion]]
Host = Any
"""environments.process.host.EnvironmentHost, or what answers its calls in its place."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutTask:
    """What one rollout works on. `group` and `index` place it in its step; `seed` decides its
    sampling.

    `attempt` counts the rollouts of the same task within the step, from 0. `environment` is the
    name of one of a mixture.
    """

    split: str
    example: int
    group: int
    index: int
    seed: int
    attempt: int = 0
    environment: str = ""

    def named(self, task_id: str) -> str:
        """The id of the task among those of the run."""
        if not self.environment:
            return task_id
        return f"{self.environment}/{task_id}"


def task_groups(
    split: str, examples: Iterable[TaskPlace], size: int, seed_of: Callable[[int, int, int], int]
) -> list[RolloutTask]:
    """`size` tasks for each example in a row, with seeds `seed_of(number, index, attempt)`."""
    tasks: list[RolloutTask] = []
    for group, (number, environment) in enumerate(examples):
        for attempt in range(size):
            index = len(tasks)
            seed = seed_of(number, index, attempt)
            tasks.append(RolloutTask(split, number, group, index, seed, attempt, environment))
    return tasks


def grouped(tasks: Sequence[RolloutTask]) -> list[list[RolloutTask]]:
    """The tasks of each group. Those of a group must be next to each other."""
    return [list(group) for _, group in itertools.groupby(tasks, lambda task: task.group)]


def mixed_seed(seed: int, major: int, minor: int) -> int:
    return (seed * 1_000_003 + major) * 65_537 + minor


@dataclass(frozen=True)
class TalkLimits:
    """Sampling and budgets. `max_tokens` is of one turn, `max_length` of the whole conversation."""

    max_tokens: int
    max_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None
    """In place of the environment's; an empty one takes that away."""

    def prompted(self, messages: list[Json]) -> list[Json]:
        """The first messages of a conversation, with this system prompt."""
        if self.system_prompt is None:
            return messages
        rest = [message for message in messages if message["role"] != "system"]
        if self.system_prompt:
            return [{"role": "system", "content": self.system_prompt}, *rest]
        return rest


@dataclass
class PlayedRollout:
    """A conversation while it is made. `transcript` is None if the environment failed at its
    start. `seconds` is the time that it took, without a wait for the others of its group."""

    task: RolloutTask
    task_id: str
    transcript: Transcript | None = None
    finish: Finish = "done"
    turns: int = 0
    reward: float = 0.0
    success: bool = False
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    reason: str | None = None
    expected: str | None = None
    kind: str | None = None
    error: dict[str, str] | None = None
    seconds: float = 0.0
    turn_rewards: list[tuple[int, float | None]] = field(default_factory=list[Any])
    """(end of the turn in the completion, its reward) of each turn; they are part of `reward`."""
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """What the endpoint refused to an agent or left out, by what it was."""

    @property
    def has_turn_rewards(self) -> bool:
        return any(reward is not None for _, reward in self.turn_rewards)

    def packed(self) -> Json:
        """The ended rollout as JSON, for another process."""
        transcript = self.transcript.packed() if self.transcript else None
        return {**vars(self), "task": vars(self.task), "transcript": transcript}

    @classmethod
    def unpacked(cls, packed: Json, template: ChatTemplate) -> Self:
        """The inverse of `packed`. `template` is the model's."""
        task = RolloutTask(**packed["task"])
        arguments = packed["transcript"]
        transcript = Transcript.unpacked(arguments, template) if arguments else None
        fields: Json = {**packed, "task": task, "transcript": transcript}
        return cls(**fields)

    def record(self, step: int, advantage: float | None = None) -> records.Rollout:
        """The rollout as rollouts/STEP.jsonl and evals/STEP.json hold it."""
        written: Json = {}
        if transcript := self.transcript:
            written = {
                "messages": transcript.messages,
                "branches": transcript.branches,
                "calls": transcript.calls,
                "tokens": transcript.tree if transcript.calls else None,
                "tools": transcript.template.tools,
                "prompt_tokens": len(transcript.prompt_ids),
                "completion_tokens": transcript.model_tokens,
                "env_tokens": len(transcript.completion_ids) - transcript.model_tokens,
                "truncated": transcript.truncated,
            }
        return records.Rollout(
            step=step,
            index=self.task.index,
            group=self.task.group,
            task_id=self.task_id,
            split=self.task.split,
            attempt=self.task.attempt,
            reward=self.reward,
            success=self.success,
            advantage=advantage,
            metrics=self.metrics,
            reason=self.reason,
            expected=self.expected,
            kind=self.kind,
            error=self.error,
            turns=self.turns,
            finish=self.finish,
            refusals=self.refusals,
            seconds=round(self.seconds, 3),
            **written,
        )


def groups_of(rollouts: Sequence[PlayedRollout], size: int) -> list[Sequence[PlayedRollout]]:
    """The rollouts of each group, of so many that are next to each other."""
    return [rollouts[at : at + size] for at in range(0, len(rollouts), size)]


CYCLES = 4
"""Cycles of the event loop between two iterations of the engine. A conversation whose environment
answers at once takes two to ask for its next turn, which the next iteration then begins."""


IDLE_EVERY_S = 20.0


class Generator:
    """Turns for many coroutines of one event loop from one engine.

    `run_step` runs one engine iteration outside this loop, so that environments are served while
    the engine computes; in tests it puts the engine on a virtual clock."""

    def __init__(
        self, engine: RolloutEngine, *, run_step: Callable[[], Awaitable[Finished]]
    ) -> None:
        self._engine = engine
        self._run_step = run_step
        self._numbers = itertools.count()
        self._arrived: list[tuple[str, Sequence[int], Sampling]] = []
        self._warm: set[int] = set()
        self._abandoned: list[str] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._engine_lock = asyncio.Lock()

    async def while_idle(self, call: Callable[[], None]) -> None:
        """`call` now and then while no turn is waited for, until this is cancelled."""
        while True:
            await asyncio.sleep(IDLE_EVERY_S)
            if not self._waiting:
                call()

    async def between_steps(self, call: Callable[[], Awaitable[None]]) -> None:
        """`call` while no iteration runs and no turn is submitted."""
        async with self._engine_lock:
            await call()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn. A cancelled call aborts its request."""
        request_id = str(next(self._numbers))
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._arrived.append((request_id, prompt_ids, sampling))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        finally:
            if self._waiting.pop(request_id, None):
                self._abandoned.append(request_id)

    async def aclose(self) -> None:
        for future in self._waiting.values():
            future.cancel()
        if self._driver:
            await asyncio.wait([self._driver])

    async def _drive(self) -> None:
        self._warm.clear()
        try:
            while self._waiting or self._abandoned:
                async with self._engine_lock:
                    self._take_in()
                    if not self._waiting:
                        return
                    finished = await self._run_step()
                for request_id, completion in finished:
                    future = self._waiting.pop(request_id, None)
                    if future and not future.done():
                        future.set_result(completion)
                for _ in range(CYCLES):
                    await asyncio.sleep(0)
        except Exception as error:
            waiting = self._waiting
            self._waiting = {}
            self._arrived.clear()
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    def _take_in(self) -> None:
        gone = {request_id for request_id, *_ in self._arrived if request_id not in self._waiting}
        if abandoned := [request_id for request_id in self._abandoned if request_id not in gone]:
            self._engine.abort(abandoned)
        self._abandoned.clear()
        arrived = self._arrived
        self._arrived = []
        fresh: set[int] = set()
        for request_id, prompt_ids, sampling in arrived:
            if request_id in gone:
                continue
            # One turn of a group goes first: after its prefill the others find their common prompt
            # in the prefix cache.
            prompt = hash(tuple(prompt_ids))
            if prompt in fresh:
                self._arrived.append((request_id, prompt_ids, sampling))
                continue
            if prompt not in self._warm:
                fresh.add(prompt)
            try:
                self._engine.submit(request_id, prompt_ids, sampling)
            except ValueError as error:
                future = self._waiting.pop(request_id)
                if not future.done():
                    future.set_exception(error)
        self._warm |= fresh


async def collect(
    tasks: Sequence[RolloutTask],
    hosts: Any,
    generator: Generator,
    template: ChatTemplate,
    limits: TalkLimits,
    *,
    on_done: Callable[[PlayedRollout], None] = lambda rollout: None,
    open_at_once: int | None = None,
) -> list[PlayedRollout]:
    """One rollout per task, in the order of `tasks`; those of a group are next to each other. If
    the environment fails, the rollout has an error. `hosts` are those of a mixture, by name.

    `on_done` is called with each rollout as soon as it is scored or has failed. With
    `open_at_once`, no group begins while so many rollouts are under way, and none is kept: the
    result is empty.
    """
    under_way = 0
    has_ended = asyncio.Event()

    async def finish(talks: Sequence[_Conversation], host: Host) -> None:
        nonlocal under_way
        # Make these conversations, and score those that have ended, together if they are several
        try:
            await together(talk.converse() for talk in talks)
            ended = [talk for talk in talks if talk.episode is not None]
            if ended:
                await _score(ended, host)
        finally:
            open_ones = [talk for talk in talks if talk.episode is not None]
            if open_ones:
                await asyncio.shield(asyncio.gather(*(talk.close() for talk in open_ones)))
        for talk in talks:
            on_done(talk.rollout)
        under_way -= len(talks)
        has_ended.set()

    rollouts: list[PlayedRollout] = []
    async with asyncio.TaskGroup() as running:
        for group in grouped(tasks):
            while open_at_once is not None and under_way >= open_at_once:
                has_ended.clear()
                await has_ended.wait()
            under_way += len(group)
            is_mixture = isinstance(hosts, Mapping)
            host: Host = cast("Any", hosts)[group[0].environment] if is_mixture else hosts
            begun = [
                PlayedRollout(task, task.named(f"{task.split}/{task.example}")) for task in group
            ]
            talks = [_Conversation(rollout, host, generator, template, limits) for rollout in begun]
            if open_at_once is None:
                rollouts += begun
            units = [talks]
            if not host.scores_groups:
                units = [[talk] for talk in talks]
            for unit in units:
                running.create_task(finish(unit, host))
    return rollouts


async def _score(ended: Sequence[_Conversation], host: Host) -> None:
    clock = asyncio.get_running_loop().time
    started = clock()
    facts = [talk.ended() for talk in ended]
    try:
        if len(facts) == 1:
            scores = [await host.score(**asdict(facts[0]))]
        else:
            scores = await host.score_group(facts)
    except EnvironmentFault as fault:
        for talk in ended:
            talk.fail(fault)
    else:
        for talk, score in zip(ended, scores, strict=True):
            talk.take(score)
    for talk in ended:
        talk.rollout.seconds += clock() - started


@dataclass
class _Conversation:
    """A rollout in the making. `episode` is its open episode."""

    rollout: PlayedRollout
    host: Host
    generator: Generator
    template: ChatTemplate
    limits: TalkLimits
    episode: int | None = None

    async def converse(self) -> None:
        """Open the episode and take all turns. The episode stays open unless this fails."""
        rollout = self.rollout
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            opening = await self.host.open(rollout.task.split, rollout.task.example)
            self.episode = opening.episode
            rollout.task_id = rollout.task.named(opening.task_id)
            rollout.expected = opening.expected
            rollout.kind = rollout.task.named(kind_of(opening.messages, opening.group))
            if opening.is_agent:
                serving = _SampledCalls(
                    rollout, self.template, self.host, self.generator, self.limits
                )
                rollout.finish = await serving.serve(opening)
            else:
                messages = self.limits.prompted(opening.messages)
                rollout.transcript = Transcript(self.template, messages, opening.tools)
                rollout.finish = await self._take_turns(opening, rollout.transcript)
        except (EnvironmentFault, FlashError) as fault:
            if isinstance(fault, FlashError) and fault.code != "template_unsupported":
                raise
            self.fail(fault)
            await asyncio.shield(self.close())
        rollout.seconds = clock() - started

    async def _take_turns(self, opening: Opening, transcript: Transcript) -> Finish:
        rollout = self.rollout
        limits = self.limits
        while True:
            prompt = transcript.context
            budget = min(limits.max_tokens, limits.max_length - len(prompt))
            if budget < 1:
                transcript.truncated = True
                if rollout.turns == 0:
                    raise _too_long(transcript, limits)
                transcript.drop_unanswered()
                return "length"
            sampling = _sampling(budget, limits, f"{rollout.task.seed}/{rollout.turns}")
            completion = await self.generator.generate(prompt, sampling)
            turn = transcript.add_answer(completion)
            rollout.turns += 1
            usage = Usage(len(prompt), len(completion.token_ids), completion.finish_reason)
            step = await self.host.step(opening.episode, turn.content, turn.tool_calls, usage)
            rollout.turn_rewards.append((len(transcript.completion_ids), step.reward))
            if step.done:
                return "done"
            if rollout.turns >= opening.max_turns:
                return "max_turns"
            transcript.add_environment(step.messages)

    def ended(self) -> Ended:
        assert self.episode is not None
        assert self.rollout.transcript is not None
        return Ended(
            self.episode,
            latency_ms=round(1000 * self.rollout.seconds),
            total_tokens=len(self.rollout.transcript),
        )

    def take(self, score: Score) -> None:
        """The episode is scored, and so it is closed."""
        self.episode = None
        rollout = self.rollout
        rollout.reward = score.reward
        rollout.success = score.success
        rollout.metrics = score.metrics
        rollout.reason = score.reason
        rollout.refusals = score.refusals
        if score.error:
            rollout.error = {"code": "environment_error", "what": score.error}

    def fail(self, fault: EnvironmentFault | FlashError) -> None:
        rollout = self.rollout
        rollout.finish = "error"
        if isinstance(fault, FlashError):
            said = shown = fault.account
        else:
            said = fault.what
            shown = fault.shown
            rollout.refusals = fault.refusals
        rollout.error = {"code": fault.code, "what": said}
        name = f"rollout {rollout.task.index} of task {plain_name(rollout.task_id)}"
        log.warning("%s: [%s] %s", name, fault.code, shown)

    async def close(self) -> None:
        if self.episode is None:
            return
        episode = self.episode
        self.episode = None
        try:
            await self.host.close(episode)
        except EnvironmentFault as fault:
            log.warning("closing an episode: [%s] %s", fault.code, fault.shown)


def _sampling(budget: int, limits: TalkLimits, key: str) -> Sampling:
    seed = zlib.crc32(key.encode()) & 0x7FFFFFFF
    return Sampling(budget, limits.temperature, limits.top_p, limits.stop, seed)


def _too_long(transcript: Transcript, limits: TalkLimits) -> EnvironmentFault:
    what = f"a prompt of {len(transcript)} tokens leaves no room in {limits.max_length}"
    return EnvironmentFault("prompt_too_long", what)


class AgentCalls:
    """Answers the calls of one agent, as many at once as it makes. `complete` says with what."""

    def __init__(
        self, rollout: PlayedRollout, template: ChatTemplate, host: Host, limits: TalkLimits
    ) -> None:
        self._rollout = rollout
        self._template = template
        self._host = host
        self._limits = limits
        self._answered: dict[int, Call] = {}
        self._prompts: Counter[int] = Counter()
        self._refused: EnvironmentFault | None = None

    async def serve(self, opening: Opening) -> Finish:
        """Answer calls until the agent ends. The rollout's transcript is then all of them."""
        episode = opening.episode
        listening = asyncio.ensure_future(self._host.next_call(episode))
        answering = {asyncio.ensure_future(self._answer(episode, opening.call))}
        try:
            while True:
                done, _ = await asyncio.wait(
                    (listening, *answering), return_when=asyncio.FIRST_COMPLETED
                )
                for task in answering & done:
                    task.result()
                answering -= done
                if listening not in done:
                    continue
                call = listening.result()
                if not isinstance(call, AgentCall):
                    if not self._answered:
                        what = "the agent ended before any of its requests was answered"
                        raise self._refused or EnvironmentFault("environment_error", what)
                    return "length" if self._refused else call
                answering.add(asyncio.ensure_future(self._answer(episode, call)))
                listening = asyncio.ensure_future(self._host.next_call(episode))
        finally:
            for task in (listening, *answering):
                task.cancel()
            await asyncio.gather(listening, *answering, return_exceptions=True)
            if self._answered:
                calls = [self._answered[number] for number in sorted(self._answered)]
                self._rollout.transcript = merged(calls)

    async def _answer(self, episode: int, request: AgentCall) -> None:
        try:
            call = self._call(request)
            grammar, stop = call.transcript.template.limits_of(request.options)
        except FlashError as error:
            if error.code != "template_unsupported":
                raise
            await self._host.refuse_call(episode, request.number, "invalid_value", error.account)
            return
        transcript = call.transcript
        options = request.options
        limits = self._limits
        budget = min(limits.max_tokens, limits.max_length - call.shown)
        budget = min(budget, options.max_tokens or budget)
        if budget < 1:
            fault = self._refused = _too_long(transcript, self._limits)
            await self._host.refuse_call(
                episode, request.number, "context_length_exceeded", fault.what
            )
            return
        prompt = transcript.ids
        # Which of two calls at once comes first is chance, so their numbers decide nothing.
        digest = zlib.crc32(str(prompt).encode())
        self._prompts[digest] += 1
        key = f"{self._rollout.task.seed}/{digest}/{self._prompts[digest]}"
        sampling = _sampling(budget, limits, key)
        stops = (*limits.stop, *stop)
        sampling = replace(sampling, stop=stops, grammar=grammar, is_base=options.is_base)
        completion = await self.complete(episode, call, sampling)
        if completion is None:
            return
        call.finish = completion.finish_reason
        call.has_grammar = completion.has_grammar
        turn = transcript.add_answer(
            completion, reads_calls=options.tool_choice != "none", trains=options.is_trained
        )
        self._answered[request.number] = call
        self._rollout.turns += 1
        text = turn.content
        if completion.stopped_by in options.stop:
            text = text.partition(str(completion.stopped_by))[0]
        usage = self._usage(prompt, completion, transcript.template, options)
        await self._host.answer_call(episode, request.number, text, turn.tool_calls, usage)

    async def complete(self, episode: int, call: Call, sampling: Sampling) -> Completion | None:
        """The answer to a call; None if it was refused."""
        raise NotImplementedError

    def _usage(
        self,
        prompt: Sequence[int],
        completion: Completion,
        template: ChatTemplate,
        options: CallOptions,
    ) -> Usage:
        """What the agent's API says of a turn beside its text."""
        logprobs: list[tuple[str, float]] = []
        if options.logprobs:
            texts = map(template.tokenizer.decode, completion.token_ids)
            logprobs = list(zip(texts, completion.logprobs, strict=True))
        stopped_by = completion.stopped_by if completion.stopped_by in options.stop else None
        return Usage(
            len(prompt),
            len(completion.token_ids),
            completion.finish_reason,
            stopped_by,
            self._limits.temperature,
            self._limits.top_p,
            logprobs,
        )

    def _call(self, call: AgentCall) -> Call:
        parent = None
        if call.parent is None:
            messages = self._limits.prompted(call.messages)
            transcript = Transcript(self._template, messages, call.tools)
        else:
            parent = self._answered.get(call.parent)
            if parent is None:
                raise EnvironmentFault("environment_error", "a call continues one without answer")
            transcript = parent.transcript.copy()
            transcript.add_environment(call.messages)
            if transcript.forks:  # the template shows the history otherwise: as if begun anew
                parent = None
                transcript = Transcript(transcript.template, transcript.messages)
        return Call(call.number, parent, transcript, len(transcript), call.options)


class _SampledCalls(AgentCalls):
    """Answers them with what the model samples."""

    def __init__(
        self,
        rollout: PlayedRollout,
        template: ChatTemplate,
        host: Host,
        generator: Generator,
        limits: TalkLimits,
    ) -> None:
        super().__init__(rollout, template, host, limits)
        self._generator = generator

    async def complete(self, episode: int, call: Call, sampling: Sampling) -> Completion | None:
        grammar = sampling.grammar
        try:
            completion = await self._generator.generate(call.transcript.ids, sampling)
            if grammar is not None and not completion.token_ids:
                raise ValueError("vLLM cannot compile it")
        except ValueError as error:
            if grammar is None and not sampling.is_base:
                raise
            what = f"the model cannot be held to this format: {error!s:.300}"
            if sampling.is_base:
                what = f"the base model cannot be asked: {error!s:.300}"
            await self._host.refuse_call(episode, call.number, "invalid_value", what)
            return None
        return completion
