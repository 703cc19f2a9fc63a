"""A virtual clock, and an engine and an environment that live on it: the real scheduler runs hours in seconds."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from environments.process.host import Ended, EnvironmentFault, Opening, Score, Step
from tests.tiny import make_tokenizer
from worker.rollouts.scheduler import Generator, PlayedRollout, collect
from worker.rollouts.transcript import ChatTemplate
from worker.rollouts.turns import Completion, Sampling

T = TypeVar("T")
END = 258  # the token that ends a turn in tests.tiny's vocabulary


class _NoWait(selectors.DefaultSelector):
    """Never sleeps: the loop's clock jumps to the next timer instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoWait()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The coroutine's result and the virtual seconds that it took."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine), loop.now
    finally:
        loop.close()


@dataclass
class FakeEngine:
    """Answers every request with tokens that depend on its prompt and seed alone; a step decodes one token of each."""

    step_s: float = 0.01
    running: dict[str, list[int]] = field(default_factory=dict)
    wanted: dict[str, Completion] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        assert request_id not in self.running
        rng = random.Random(f"{sampling.seed}/{sum(prompt_ids)}")
        length = rng.randint(1, sampling.max_tokens + 4)
        ids = [rng.randrange(97, 123) for _ in range(min(length, sampling.max_tokens))]
        reason = "length" if length > sampling.max_tokens else "stop"
        if reason == "stop":
            ids[-1] = END
        self.running[request_id] = []
        self.wanted[request_id] = Completion(ids, [-float(token) for token in ids], reason)

    def step(self) -> list[tuple[str, Completion]]:
        self.batches.append(len(self.running))
        finished = []
        for request_id, written in list(self.running.items()):
            written.append(0)
            if len(written) == len(self.wanted[request_id].token_ids):
                finished.append((request_id, self.wanted.pop(request_id)))
                del self.running[request_id]
        return finished

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.running.pop(request_id, None)
            self.wanted.pop(request_id, None)

    async def run_step(self) -> list[tuple[str, Completion]]:
        await asyncio.sleep(self.step_s)
        return self.step()


async def rolled(tasks, host, engine, limits, template=None, **options) -> list[PlayedRollout]:
    """What the scheduler collects with an engine that has `run_step`."""
    generator = Generator(engine, run_step=engine.run_step)
    try:
        return await collect(tasks, host, generator, template or ChatTemplate(make_tokenizer()), limits, **options)
    finally:
        await generator.aclose()


@dataclass
class FakeHost:
    """Episodes of a number of turns drawn from the task; every call takes `latency_s`, may raise, and is recorded."""

    latency_s: Callable[[], float] = lambda: 0.0
    fault: Callable[[str, int], str | None] = lambda call, example: None
    """The code of what `call` (open, step, score) raises on an example."""
    max_turns: int = 6
    opened: dict[int, list[str]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    scores_groups: bool = False

    async def open(self, split: str, index: int) -> Opening:
        await self._serve("open", index)
        episode = len(self.opened)
        self.opened[episode] = [f"{index}"]
        return Opening(episode, f"task-{index}", [{"role": "user", "content": f"q{index}"}], self.max_turns)

    async def step(self, episode: int, assistant_text: str, tool_calls: Sequence[Any] = (), usage: Any = None) -> Step:
        said = self.opened[episode]
        await self._serve("step", int(said[0]))
        said.append(assistant_text)
        turns = 1 + int(said[0]) % self.max_turns
        reward = None if len(said) % 2 else len(said) / 8
        ends = len(said) > turns
        return Step(ends, [] if ends else [{"role": "user", "content": f"r{len(said)}"}], reward)

    async def score(self, episode: int, *, latency_ms: int, total_tokens: int) -> Score:
        await self._serve("score", int(self.opened[episode][0]))
        assert episode not in self.closed
        self.closed.add(episode)
        return Score(float(len(self.opened[episode])), True, {}, None, None)

    async def score_group(self, ended: Sequence[Ended]) -> list[Score]:
        """The reward is the number of the group's turns; a fault is that of the first episode."""
        numbers = [each.episode for each in ended]
        await self._serve("score", int(self.opened[numbers[0]][0]))
        assert self.closed.isdisjoint(numbers)
        self.closed |= set(numbers)
        turns = sum(len(self.opened[number]) - 1 for number in numbers)
        return [Score(float(turns), True, {}, None, None) for _ in numbers]

    async def close(self, episode: int) -> None:
        await asyncio.sleep(self.latency_s())
        self.closed.add(episode)

    async def _serve(self, call: str, example: int) -> None:
        await asyncio.sleep(self.latency_s())
        if code := self.fault(call, example):
            raise EnvironmentFault(code, "the environment failed")
