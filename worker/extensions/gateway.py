"""Rollouts that a program outside the sandbox plays, where environment.toml says gateway = true.

    POST /tasks       with the gateway's key: a task that nobody has, and a key of its rollout
    POST /v1/...      with the rollout's key: the model, by the APIs that every agent calls
    POST /v1/result   with the rollout's key: {"answer": TEXT}, which the environment scores, or
                      {"score": NUMBER, "success": BOOL}, or {"error": TEXT}, which drops it

The environment has the tasks and scores answers, as for a model that answers itself. The server is
the worker's own, on loopback; `flash-mcp gateway` asks it, and `flash-mcp serve --http` leads to
it. What does not come back within the time of a call into the environment is dropped, and so is a
task after half an hour in which nobody asks for one. Of several ranks each has a server, and all
have the same key."""

# `run` is a coroutine here, as any method of an environment may be.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from environments.agents.calls import AgentCall, Usage
from environments.agents.dialects import invalid
from environments.agents.endpoint import AgentEpisode
from environments.agents.server import Endpoint, Exchange
from environments.agents.session import AgentSession
from environments.base import (
    LARGEST_REWARD,
    EnvironmentAgent,
    EnvironmentEpisode,
    RewardResult,
    TaskExample,
    reward_of,
)
from environments.faults import EnvironmentFault
from environments.process.host import EnvironmentHost, Opening, Score
from environments.process.replies import ForgedError, ReplyReader, parse
from environments.untrusted_text import Redactor
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import GATEWAY_BASE_URL
from flash_mcp.protocol.sealing import new_key

T = TypeVar("T")
POLL_S = 20.0
"""How long a request for a task waits for one. Of several ranks another may have one meanwhile."""
UNASKED_S = 1800.0
"""How long tasks wait while nobody asks for one, if that is more than the time of a call."""
EXAMPLE = TaskExample({}, "")
Outcome = str | RewardResult
"""What a program sends back: an answer, or a reward of its own."""


class _Outside(EnvironmentAgent):
    """The agent of one rollout, whose program is elsewhere. `run` returns what it sends back, or
    raises EnvironmentFault if that is an error."""

    max_calls = 1000

    def __init__(self, task: Json, offers: asyncio.Queue[_Outside]) -> None:
        self.task = task
        self.taken_at: float | None = None
        self.result: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._offers = offers

    async def run(self, example: TaskExample, base_url: str, api_key: str, model: str) -> Outcome:
        self.task |= {"base_url": base_url, "api_key": api_key, "model": model}
        self.offer()
        return await self.result

    def offer(self) -> None:
        self.taken_at = None
        self._offers.put_nowait(self)


class Gateway:
    """The environment as the scheduler plays it: each turn answers a program outside. Made in the
    event loop, and the methods of `scheduler.Host` for agents."""

    scores_groups = False

    def __init__(self, host: EnvironmentHost, key: str = "", poll_s: float = POLL_S) -> None:
        self.key = key or secrets.token_hex(32)
        self._poll_s = poll_s
        self._host = host
        self._offers: asyncio.Queue[_Outside] = asyncio.Queue()
        self._asked_at = 0.0
        """When a program last asked for a task, or the newest task came."""
        self._rollouts: dict[int, tuple[_Outside, AgentEpisode]] = {}
        self._reader = ReplyReader(Redactor(()))
        self._loop = asyncio.get_running_loop()
        self.endpoint = Endpoint(self._loop, exchange=partial(_Exchange, self))
        self.endpoint.sessions[self.key] = AgentSession(0)

    # -- the program outside -----------------------------------------------------------------------

    async def take(self) -> _Outside | None:
        """A task that nobody has; None if there is none for a while."""
        self._asked_at = self._loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                while (outside := await self._offers.get()).result.done():
                    pass
                outside.taken_at = self._loop.time()
                return outside
        return None

    def end(self, key: str, body: Json) -> None:
        """What the program of the rollout with this key sends back. ApiError if that is none."""
        outcome = _outcome(body)
        for outside, _ in self._rollouts.values():
            if outside.task.get("api_key") != key or outside.result.done():
                continue
            if isinstance(outcome, EnvironmentFault):
                outside.result.set_exception(outcome)
            else:
                outside.result.set_result(outcome)

    # -- the scheduler -----------------------------------------------------------------------------

    async def open(self, split: str, index: int) -> Opening:
        opening = await self._host.open(split, index)
        task: Json = {"task_id": opening.task_id, "split": split, "messages": opening.messages}
        outside = _Outside({**task, "limit_s": self._host.timeout_s}, self._offers)
        playing = AgentEpisode(outside, self.endpoint, _call, new_key(self.key))
        self._rollouts[opening.episode] = outside, playing
        self._asked_at = self._loop.time()
        try:
            if opening.is_agent:
                what = "gateway = true is for an environment that scores answers: its agent is "
                raise EnvironmentFault("environment_invalid", f"{what}outside")
            messages = await self._in_time(outside, playing.start_episode(EXAMPLE))
            tools = list(playing.episode_tools(EXAMPLE))
            first = self._checked(AgentCall(0, None, messages, tools, playing.options))
            request = {"messages": first.messages, "tools": first.tools, "options": first.options}
        except BaseException:
            await self.close(opening.episode)
            raise
        return replace(opening, **request, is_agent=True)

    async def next_call(self, episode: int) -> AgentCall | Literal["done", "max_turns"]:
        outside, playing = self._rollouts[episode]
        call = await self._in_time(outside, playing.next_call())
        if call is None:
            return "max_turns" if playing.is_at_limit else "done"
        return self._checked(call)

    async def answer_call(
        self, episode: int, call: int, text: str, tool_calls: Sequence[Json], usage: Usage
    ) -> None:
        turn: Json = {"role": "assistant", "content": text}
        if tool_calls:
            turn["tool_calls"] = list(tool_calls)
        self._rollouts[episode][1].answer_call(call, turn, usage)

    async def refuse_call(self, episode: int, call: int, code: str, what: str) -> None:
        self._rollouts[episode][1].refuse_call(call, code, what)

    async def score(self, episode: int, *, latency_ms: int, total_tokens: int) -> Score:
        outside, playing = self._rollouts[episode]
        try:
            ended = playing.score_episode(EXAMPLE, EnvironmentEpisode((), ""))
            outcome = await self._in_time(outside, ended)
            refusals = playing.refusals
            if isinstance(outcome, str):
                await self._host.step(episode, outcome)
                score = await self._host.score(
                    episode, latency_ms=latency_ms, total_tokens=total_tokens
                )
                return replace(score, refusals=refusals)
            success = outcome.resolved_success()
            return Score(outcome.score, success, {}, outcome.reason, None, refusals)
        finally:
            await self.close(episode)

    async def close(self, episode: int) -> None:
        if episode in self._rollouts:
            _, playing = self._rollouts.pop(episode)
            await playing.close_episode()
        await self._host.close(episode)

    async def _in_time(self, outside: _Outside, working: Coroutine[Any, Any, T]) -> T:
        """What comes of the program's work, unless its time is over."""
        task = asyncio.ensure_future(working)
        try:
            while not task.done():
                limit_s = self._host.timeout_s
                since = outside.taken_at
                what = "the agent that took the task sent no result within"
                if since is None:
                    limit_s = max(limit_s, UNASKED_S)
                    since = self._asked_at
                    what = "nobody asked the gateway for a task for"
                left_s = since + limit_s - self._loop.time()
                if left_s <= 0:
                    raise EnvironmentFault("environment_timeout", f"{what} {limit_s:g} s")
                # Not longer: a program may take the task meanwhile.
                await asyncio.wait((task,), timeout=min(left_s, self._host.timeout_s))
            return task.result()
        finally:
            task.cancel()

    def _checked(self, call: AgentCall) -> AgentCall:
        """The request, read as one that comes out of a sandbox."""
        value = {**vars(call), "options": call.options.changed()}
        try:
            line = json.dumps({"number": 0, "value": value}).encode()
            return AgentCall(**self._reader.value("next_call", parse(line)["value"]))
        except ForgedError as error:
            what = "the agent's request cannot be read"
            raise EnvironmentFault("environment_error", what) from error


def _outcome(body: Json) -> Outcome | EnvironmentFault:
    """What a program sent back. ApiError if it is none of the three."""
    success = body.get("success")
    match body.get("answer"), body.get("score"), body.get("error"):
        case str() as answer, None, None:
            return answer
        case None, None, str() as error:
            return EnvironmentFault("environment_error", error, is_foreign=True)
        case None, (int() | float()) as score, None if not isinstance(score, bool):
            if isinstance(success, bool | None):
                if (reward := reward_of(score)) is None:
                    what = f"a score may be at most {LARGEST_REWARD:,.0f} in size"
                    return EnvironmentFault("environment_error", f"{what}; the agent sent more")
                return RewardResult(reward, success)
        case _:
            pass
    what = "send one of answer and error, which are texts, and score, which is a number and may"
    raise invalid(f"{what} have a success, true or false")


class _Exchange(Exchange):
    """A request to the gateway, which may also ask for a task or end a rollout."""

    def __init__(self, gateway: Gateway, *connection: Any) -> None:
        super().__init__(*connection)
        self._gateway = gateway

    async def _ask(self, session: AgentSession) -> None:
        path = self._path
        if path == "/result":
            self._gateway.end(session.key, self._body())
            await self._send(200, {"accepted": True})
        elif path != "/tasks" or session is not self._sessions[self._gateway.key]:
            await super()._ask(session)
        elif outside := await self._gateway.take():
            try:
                if self.client.has_left:
                    raise ConnectionError("the program left")
                base_url = self._headers.get(GATEWAY_BASE_URL, outside.task["base_url"])
                await self._send(200, {"task": {**outside.task, "base_url": base_url}})
            except (OSError, TimeoutError):
                outside.offer()
                raise
        else:
            await self._send(200, {"task": None})


async def _call(method: Any, *args: Any) -> Any:
    result = method(*args)
    return await result if inspect.isawaitable(result) else result
