"""An agent's conversations as tokens: what is trained is what was sampled, whatever the agent does.
FLASH_SLOW=1 plays 10,000 of them."""

import asyncio
import json
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from environments.agents.calls import NO_USAGE
from environments.agents.dialects import ApiError, TurnToSend
from environments.agents.endpoint import AgentEpisode
from environments.agents.server import DIALECTS
from environments.agents.session import AgentSession, Peer
from environments.base import EnvironmentAgent, RewardResult, TaskExample
from environments.faults import EnvironmentFault
from environments.process.host import Opening, Score
from tests.tiny import make_tokenizer
from tests.virtual import FakeEngine, rolled, run_virtually
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, TalkLimits
from worker.rollouts.transcript import ChatTemplate
from worker.rollouts.turns import Sampling
from worker.training.packing import paths_of

CONVERSATIONS = 10_000 if os.environ.get("FLASH_SLOW") else 1000
AT_ONCE = 500


class Fuzzer(EnvironmentAgent):
    """Asks in every way that an agent may: it adds messages, writes answers anew, asks again, asks twice at once,
    changes history, begins anew, leaves, or fails. The task's number decides."""

    max_calls = 6

    def __init__(self) -> None:
        self.sessions: dict[str, AgentSession] = {}
        self.left: set[int] = set()

    async def run(self, example: TaskExample, base_url: str, api_key: str, model: str) -> Any:
        rng = random.Random(example.id)
        session = self.sessions[api_key]
        histories = [[self._said(rng, ("system", "user")) for _ in range(rng.randint(1, 3))]]
        answers = 0
        while answers < 8 and (not answers or rng.random() < 0.8):
            asked = [rng.choice(histories) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
            bodies = [json.loads(json.dumps({"model": model, "messages": messages})) for messages in asked]
            found = await asyncio.gather(*(ask(session, body) for body in bodies), return_exceptions=True)
            for body, answer in zip(bodies, found, strict=True):
                if isinstance(answer, ApiError) and answer.status == 400 and rng.random() < 0.7:
                    continue  # the context is too short for this conversation: others go on
                if isinstance(answer, BaseException):
                    raise answer
                answers += 1
                histories.append(self._next(rng, body["messages"], answer.turn))
            if answers and rng.random() < 0.1:
                await self._ask_again(session, bodies, found)
            act = rng.random()
            if act < 0.05:
                raise ValueError("the agent fails")
            if act < 0.1:
                histories.append([self._said(rng, ("user",))])
            if act > 0.97:
                self.left.add(int(example.id or 0))
                asking = asyncio.create_task(ask(session, bodies[0]))
                await asyncio.sleep(0)
                asking.cancel()
                await asyncio.sleep(1)
        return RewardResult(1.0)

    async def _ask_again(self, session: AgentSession, bodies: Sequence[Any], found: Sequence[Any]) -> None:
        """Send the last request again, as a client does whose answer was lost."""
        first = [each for body, each in zip(bodies, found, strict=True) if body == bodies[-1]]
        if isinstance(first[-1], TurnToSend):
            again = await ask(session, bodies[-1], is_retry=True)
            assert again in first

    def _next(self, rng: random.Random, messages: list[Any], turn: Any) -> list[Any]:
        """How the conversation goes on after this turn of the model."""
        turn = dict(turn)
        if rng.random() < 0.3:
            turn["content"] = [{"type": "text", "text": turn["content"].strip()}]
        added = [self._said(rng, ("user", "tool")) for _ in range(rng.randint(1, 3))]
        longer = [*messages, turn, *added]
        if rng.random() < 0.1:
            longer[0] = {**longer[0], "content": f"{longer[0]['content']}!"}
        return longer

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
        messages = await episode.start_episode(example)
        self.episodes[index] = (episode, example)
        return Opening(index, f"{index}", messages, episode.max_episode_turns(example), is_agent=True)

    async def next_call(self, number: int) -> Any:
        episode, _ = self.episodes[number]
        return await episode.next_call() or ("max_turns" if episode.is_at_limit else "done")

    async def answer_call(self, number: int, call: int, text: str, calls: Any = (), usage: Any = NO_USAGE) -> None:
        self.episodes[number][0].answer_call(call, {"role": "assistant", "content": text}, usage)

    async def refuse_call(self, number: int, call: int, code: str, what: str) -> None:
        self.episodes[number][0].refuse_call(call, code, what)

    async def score(self, episode: int, *, latency_ms: int, total_tokens: int) -> Score:
        agent, example = self.episodes[episode]
        try:
            result = await agent.score_episode(example, None)
        finally:
            await self.close(episode)
        return Score(result.score, True, {}, result.reason, None)

    async def score_group(self, ended: Any) -> list[Score]:
        raise NotImplementedError

    async def close(self, number: int) -> None:
        if found := self.episodes.pop(number, None):
            await found[0].close_episode()


class Attentive(Peer):
    """A client that does not leave, and reads every answer."""

    has_left = left_unread = False

    def __init__(self) -> None:
        self.is_sent = False


async def ask(session: AgentSession, body: Any, *, is_retry: bool = False) -> TurnToSend:
    asked = DIALECTS["/chat/completions"].read(body, {})
    client = Attentive()
    (call,) = session.ask(client, asked.messages, asked.tools, is_retry=is_retry)
    try:
        answer = await asyncio.shield(call.answer)
        client.is_sent = call.is_sent = True
        return answer
    finally:
        call.leave(client)


class Recorder(FakeEngine):
    """Keeps what it sampled after each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[tuple[int, ...], list[tuple[list[int], list[float]]]] = {}

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        super().submit(request_id, prompt_ids, sampling)
        wanted = self.wanted[request_id]
        self.turns.setdefault(tuple(prompt_ids), []).append((wanted.token_ids, wanted.logprobs))


def test_the_trained_ids_of_agents_are_those_that_were_sampled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # each fault is a warning
    template = ChatTemplate(make_tokenizer())
    outcomes: dict[str, int] = {}
    forks = 0
    for first in range(0, CONVERSATIONS, AT_ONCE):
        agent, engine = Fuzzer(), Recorder()
        tasks = [RolloutTask("train", first + n, n, n, first + n) for n in range(AT_ONCE)]
        limits = TalkLimits(max_tokens=6, max_length=150)
        rollouts, _ = run_virtually(rolled(tasks, InProcess(agent), engine, limits, template))
        for rollout in rollouts:
            code = rollout.error["code"] if rollout.error else rollout.finish
            outcomes[code] = outcomes.get(code, 0) + 1
            assert (code == "lost_call") <= (rollout.task.example in agent.left)
            forks += len(rollout.transcript.forks) if rollout.transcript else 0
            check(rollout, engine)
        assert not agent.sessions, "every session ends with its rollout"
    assert set(outcomes) == {"done", "max_turns", "length", "environment_error", "lost_call"}
    assert min(outcomes.values()) > 20 and forks > CONVERSATIONS, (outcomes, forks)


def check(rollout: PlayedRollout, engine: Recorder) -> None:
    """Each of the rollout's own turns was sampled after exactly the tokens on its path before it, and is trained
    once."""
    transcript = rollout.transcript
    if transcript is None:
        return
    first = len(transcript.prompt_ids)
    left = {place + first for place, is_own in enumerate(transcript.mask) if is_own}
    turns = 0
    for path in paths_of(len(transcript), transcript.forks):
        ids = [transcript.ids[place] for place in path]
        at = 0
        while at < len(path):
            if path[at] not in left:
                at += 1
                continue
            sampled, logprobs = next(
                (tokens, probabilities)
                for tokens, probabilities in engine.turns[tuple(ids[:at])]
                if tokens == ids[at : at + len(tokens)]
            )
            places = path[at : at + len(sampled)]
            assert [transcript.logprobs[place - first] for place in places] == logprobs
            left -= set(places)
            at += len(sampled)
            turns += 1
    assert not left and turns == rollout.turns
