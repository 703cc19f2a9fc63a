"""An agent as an environment of many turns: each of its requests is a turn of the model.

    endpoint = Endpoint(loop)                    # a server on 127.0.0.1 and a free port
    episode = AgentEpisode(agent, endpoint, call)
    messages = await episode.start_episode(example)     # what the agent asked first
    reply = await episode.step_episode(example, [*messages, turn], turn["content"])

Each request of the agent is a call, which waits for the model's turn. A call that continues the
conversation of an earlier one names it as its parent, so the calls of a rollout form a tree: an
agent may branch, begin anew, and ask several things at once. The model is reached through the pipe
of the environment's process, as in every other environment, and the sandbox needs no way out: the
server listens in a network namespace that holds nothing else.

A caller that plays one turn after the other (the gate) sees an environment of many turns. The
worker answers calls as they come (`next_call`, `answer_call`)."""

# Any method of an environment may be `async def`.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from environments.agents.calls import ANSWER_ROLES, NO_OPTIONS, NO_USAGE, AgentCall, Usage
from environments.agents.dialects import MODEL, ApiError
from environments.agents.server import Endpoint
from environments.agents.session import AgentSession, at_most
from environments.base import (
    ChatMessage,
    EnvironmentAgent,
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    Json,
    RewardResult,
    TaskExample,
)
from environments.faults import EnvironmentFault

SHOWN_CHARACTERS = 1000
Call = Callable[..., Coroutine[Any, Any, Any]]


class AgentEpisode(EnvironmentMultiTurn):
    """An EnvironmentAgent as an environment of many turns. Each rollout has a copy with a session.

    `call` runs a method of the agent: coroutines in the event loop, others in a thread. `key` opens
    the endpoint; by default a random one."""

    def __init__(
        self, agent: EnvironmentAgent, endpoint: Endpoint, call: Call, key: str | None = None
    ) -> None:
        self.dataset = agent.dataset
        self.eval_dataset = agent.eval_dataset
        self.max_score_concurrency = agent.max_score_concurrency
        self.usage = NO_USAGE
        """Of the turn that `step_episode` gets next."""
        self._agent = agent
        self._endpoint = endpoint
        self._call = call
        named = {"key": key} if key else {}
        self._session = AgentSession(agent.max_calls, agent.max_tokens, agent.max_seconds, **named)
        self._running: asyncio.Task[Any] | None = None
        self._tools: list[Json] = []
        self.options = NO_OPTIONS
        """Of the first request."""
        self._turns = 0

    async def new_episode(self, example: TaskExample) -> AgentEpisode:
        agent = await self._begin(self._agent.new_episode, example)
        if not isinstance(agent, EnvironmentAgent):
            what = f"new_episode must return an EnvironmentAgent, got {type(agent).__name__}"
            raise EnvironmentFault("environment_error", what)
        return AgentEpisode(agent, self._endpoint, self._call)

    async def start_episode(self, example: TaskExample) -> list[ChatMessage]:
        session = self._session
        self._endpoint.sessions[session.key] = session
        self._running = asyncio.create_task(self._run(example))
        call = await self.next_call()
        if call is None:
            what = "run returned without asking the model: there is nothing to train or evaluate"
            if session.last_refusal:
                what = f"{what}. The API refused its last request: {session.last_refusal}"
            reason = getattr(self._running.result(), "reason", None)
            if reason:
                what = f"{what}. Its reward says: {str(reason)[-SHOWN_CHARACTERS:]}"
            raise EnvironmentFault("environment_error", what, refusals=self.refusals)
        self._tools = call.tools
        self.options = call.options
        return call.messages

    async def sft_completion(self, example: TaskExample) -> list[ChatMessage]:
        return await self._begin(self._agent.sft_completion, example)

    async def gold_turn(self, example: TaskExample, number: int) -> ChatMessage | None:
        """The gold answer to a request, which may be one that waits."""
        messages = [dict(message) for message in self._session.messages(number)]
        return await self._begin(self._agent.gold_turn, example, messages, number)

    def max_episode_turns(self, example: TaskExample) -> int:
        return self._agent.max_calls

    def episode_tools(self, example: TaskExample) -> Sequence[Json]:
        return self._tools

    async def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        """Answer the oldest request; the next one is what the environment says."""
        self._turns += 1
        turn = messages[-1]
        self.answer_call(self._session.oldest_unanswered, turn, self.usage)
        call = await self.next_call()
        if call is None:
            return EnvironmentStepResult(done=True)
        added = [message for message in call.messages if message["role"] in ANSWER_ROLES]
        return EnvironmentStepResult(False, added or [{"role": "user", "content": ""}])

    async def next_call(self) -> AgentCall | None:
        """The agent's next request; None once the agent has ended."""
        assert self._running is not None
        session = self._session
        asking = asyncio.ensure_future(session.requests.get())
        try:
            await asyncio.wait((asking, self._running), return_when=asyncio.FIRST_COMPLETED)
            if not self._running.done():
                return asking.result()
        finally:
            asking.cancel()
        if session.has_lost:
            what = "an answer of the model reached no client, and its request was not sent again"
            if ended := self._running.exception():  # such as an agent that was killed
                what = f"{what}; {ended}"
            raise EnvironmentFault("lost_call", what, refusals=self.refusals)
        if not session.was_refused:
            self._running.result()
        return None

    def answer_call(self, number: int, turn: ChatMessage, usage: Usage) -> None:
        turn = dict(turn)
        if turn["content"] is not None:
            # The gate writes lone surrogates, which no API can send.
            turn["content"] = turn["content"].encode(errors="replace").decode()
        self._session.answer(number, turn, usage)

    def refuse_call(self, number: int, code: str, what: str) -> None:
        self._session.fail(number, ApiError(400, code, what, "messages"))

    @property
    def refusals(self) -> dict[str, int]:
        """What the API refused or left out, by what it was."""
        return dict(self._session.refusals)

    @property
    def is_at_limit(self) -> bool:
        """Whether a request was refused because the rollout is at a limit."""
        return self._session.limit is not None

    async def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> Any:
        """What `run` returns. If the conversation is at a limit, the agent learns it as from any
        model's API; one that ends with an exception then has reward 0.
        """
        session = self._session
        assert self._running is not None
        what = "the conversation is longer than the model's context"
        if self._turns:
            what = "the turns that were to be played are over"
        error = ApiError(400, "context_length_exceeded", what, "messages")
        if self._turns >= self._agent.max_calls:
            error = at_most(self._agent.max_calls)
        error = session.limit or error
        session.refuse(error)
        try:
            return await asyncio.shield(self._running)
        except EnvironmentFault as fault:
            if not session.was_refused:
                raise
            return RewardResult(0.0, success=False, reason=f"{error}, and {fault.what}")

    def score_group(self, example: TaskExample, episodes: Sequence[EnvironmentEpisode]) -> Any:
        return self._agent.score_group(example, episodes)

    async def close_episode(self) -> None:
        """End the agent. A thread cannot be ended: this call then lasts until the host gives it up,
        and starts another process for the episodes to come.
        """
        session = self._session
        self._endpoint.sessions.pop(session.key, None)
        session.refuse(ApiError(401, "invalid_api_key", "this rollout has ended"))
        running = self._running
        if running is None:
            return
        if inspect.iscoroutinefunction(self._agent.run):
            running.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # read, so that asyncio does not report it
        await self._begin(self._agent.close_episode)

    async def _run(self, example: TaskExample) -> Any:
        try:
            run = self._agent.run
            return await self._call(run, example, self._endpoint.url, self._session.key, MODEL)
        except EnvironmentFault as fault:
            fault.refusals = self.refusals
            raise

    def _begin(self, method: Callable[..., Any], *args: Any) -> asyncio.Task[Any]:
        """Call a method of the agent, in a task of its own: `call` knows one method of each."""
        return asyncio.create_task(self._call(method, *args))
