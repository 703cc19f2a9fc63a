"""An agent's conversations as tokens: what is trained is what was sampled, whatever the agent does."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from environments.base import EnvironmentAgent, RewardResult, TaskExample
from environments.process.endpoint import AgentEpisode, ApiError, Session
from environments.process.faults import EnvironmentFault
from environments.process.host import Opening, Score, Step
from environments.process.replies import NO_USAGE
from tests.tiny import make_tokenizer
from tests.virtual import FakeEngine, run_virtually
from worker.rollouts.scheduler import Generator, Limits, Rollout, Task, collect
from worker.rollouts.transcript import ChatTemplate
from worker.rollouts.turns import Sampling

CONVERSATIONS = 2000
AT_ONCE = 500


class Fuzzer(EnvironmentAgent):
    """Asks in every way that an agent may: it adds messages, writes answers anew, asks again, asks
    twice at once, changes history, or fails. The task's number decides.
    """

    max_calls = 4

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.forked: set[int] = set()

    async def run(self, example: TaskExample, base_url: str, api_key: str, model: str) -> Any:
        rng = random.Random(example.id)
        session = self.sessions[api_key]
        messages: list[Any] = [
            self._said(rng, ("system", "user")) for _ in range(rng.randint(1, 3))
        ]
        answers = 0
        while answers < 8 and (not answers or rng.random() < 0.8):
            body = json.loads(json.dumps({"model": model, "messages": messages}))
            answer = await session.ask(body, is_retry=False)
            assert int(example.id or 0) not in self.forked, "changed history is not answered"
            answers += 1
            if rng.random() < 0.2:
                assert await session.ask(body, is_retry=True) == answer
            turn = dict(answer.turn)
            act = rng.random()
            if act < 0.3:
                turn["content"] = [{"type": "text", "text": turn["content"].strip()}]
            elif act < 0.35:
                raise ValueError("the agent fails")
            messages += [
                turn,
                *(self._said(rng, ("user", "tool")) for _ in range(rng.randint(1, 3))),
            ]
            if act > 0.9:
                self.forked.add(int(example.id or 0))
                messages[0]["content"] += "!"
            elif act > 0.87:
                self.forked.add(int(example.id or 0))
                body["messages"] = messages
                await asyncio.gather(*(session.ask(body, is_retry=False) for _ in range(2)))
        return RewardResult(1.0)

    def _said(self, rng: random.Random, roles: Sequence[str]) -> Any:
        text = "".join(rng.choices("abc \n<|im_end|>☃", k=rng.randint(0, 12)))
        return {"role": rng.choice(roles), "content": text}


@dataclass
class InProcess:
    """Episodes of one agent without a process of their own."""

    agent: Fuzzer
    scores_groups: bool = False
    episodes: dict[int, Any] = field(default_factory=dict)

    async def open(self, split: str, index: int) -> Opening:
        async def call(method: Any, *args: Any) -> Any:
            result = method(*args)
            try:
                return await result if asyncio.iscoroutine(result) else result
            except (ValueError, ApiError) as error:
                raise EnvironmentFault("environment_error", str(error)) from error

        endpoint: Any = SimpleNamespace(sessions=self.agent.sessions, url="")
        example = TaskExample({}, "", id=f"{index}")
        episode = await AgentEpisode(self.agent, endpoint, call).new_episode(example)
        messages = await episode.start_episode(example, "")
        self.episodes[index] = (episode, example, [*messages])
        return Opening(index, f"{index}", messages, episode.max_episode_turns(example))

    async def step(self, number: int, text: str, calls: Any = (), usage: Any = NO_USAGE) -> Step:
        episode, example, messages = self.episodes[number]
        messages.append({"role": "assistant", "content": text})
        result = await episode.step_episode(example, list(messages), text)
        messages += result.messages
        return Step(result.done, list(result.messages))

    async def score(self, number: int, *, latency_ms: int, total_tokens: int) -> Score:
        episode, example, _ = self.episodes[number]
        try:
            result = await episode.score_episode(example, None)
        finally:
            await self.close(number)
        return Score(result.score, True, {}, result.reason, None)

    async def score_group(self, ended: Any) -> list[Score]:
        raise NotImplementedError

    async def close(self, number: int) -> None:
        if found := self.episodes.pop(number, None):
            await found[0].close_episode()


class Recorder(FakeEngine):
    """Keeps what each request asked, by the seed of its task's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, tuple[list[int], Sampling]] = {}
        self.turns: list[tuple[list[int], list[int], list[float]]] = []

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        super().submit(request_id, prompt_ids, sampling)
        wanted = self.wanted[request_id]
        self.turns.append((list(prompt_ids), wanted.token_ids, wanted.logprobs))


def test_the_trained_ids_of_agents_are_those_that_were_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)  # each fault is a warning
    template = ChatTemplate(make_tokenizer())
    outcomes: dict[str, int] = {}
    for first in range(0, CONVERSATIONS, AT_ONCE):
        agent = Fuzzer()
        engine = Recorder()

        async def play(agent: Fuzzer, engine: Recorder, first: int) -> list[Rollout]:
            generator = Generator(engine, run_step=engine.run_step)
            tasks = [Task("train", first + n, n, n, first + n) for n in range(AT_ONCE)]
            limits = Limits(max_tokens=6, max_length=210)
            host: Any = InProcess(agent)
            rollouts = await collect(tasks, host, generator, template, limits)
            await generator.aclose()
            return rollouts

        rollouts, _ = run_virtually(play(agent, engine, first))
        for rollout in rollouts:
            code = rollout.error["code"] if rollout.error else rollout.finish
            outcomes[code] = outcomes.get(code, 0) + 1
            assert (code == "forked_history") <= (rollout.task.example in agent.forked)
            if not rollout.error:
                check(rollout, engine)
        assert not agent.sessions, "every session ends with its rollout"
    assert set(outcomes) == {"done", "max_turns", "length", "environment_error", "forked_history"}
    assert min(outcomes.values()) > 20, outcomes


def check(rollout: Rollout, engine: Recorder) -> None:
    """Each of the transcript's own turns was sampled after exactly the tokens before it."""
    transcript = rollout.transcript
    assert transcript is not None
    ids = transcript.ids
    start = len(transcript.prompt_ids)
    at = start
    turns = 0
    while at < len(ids):
        if not transcript.mask[at - start]:
            at += 1
            continue
        sampled, logprobs = next(
            (tokens, probabilities)
            for prompt, tokens, probabilities in engine.turns
            if prompt == ids[:at] and tokens == ids[at : at + len(tokens)]
        )
        assert transcript.logprobs[at - start : at - start + len(sampled)] == logprobs
        assert all(transcript.mask[at - start : at - start + len(sampled)])
        at += len(sampled)
        turns += 1
    assert turns == rollout.turns
