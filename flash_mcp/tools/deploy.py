"""deploy, undeploy and chat: serve a checkpoint, and talk to it."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import anyio
import httpx
from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field

from environments.tools import add_call_parts
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Deployment, Json, text_of
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import costs, serving
from flash_mcp.state.owners import caller
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.targets import find_target
from flash_mcp.supervisor.launch.devices import cards_for
from flash_mcp.supervisor.process import ensure_supervised
from flash_mcp.supervisor.server import Server, check_serving_port, error_message, server_of
from flash_mcp.supervisor.server import idle_minutes as idle_limit
from flash_mcp.tools import snippets
from flash_mcp.tools.shared.loading import check_machine
from flash_mcp.tools.shared.tool_base import Result, ResultModel, report
from flash_mcp.tools.shared.truncation import shorten, to_text
from flash_mcp.tools.shared.waiting import deadline_after, wait_until

CHAT_LIMIT_S = 40.0
ANSWER_CHARACTERS = 3000
OPENING_CHARACTERS = 300
MOST_TOKENS = 4096
ELSEWHERE = """; or serve it on a node of a target: deploy(run_id={run_id!r}, target=...); or on \
another machine: checkpoints(run_id={run_id!r}) names its files, which vLLM takes with \
--enable-lora --lora-modules NAME=FOLDER"""


class Deployed(Result):
    """A served adapter."""

    deployment: str
    """Pass to chat and undeploy."""
    name: str
    """Its other name."""
    state: str
    """starting, ready, failed, stopping or stopped."""
    run_id: str | None = None
    """The adapter's run."""
    step: int | None = None
    """The adapter's step."""
    model: str
    """Base model; its name in the OpenAI API too."""
    target: str | None = None
    """Where it is served, if elsewhere."""
    precision: str | None = None
    """In which its server computes, and its run did if that was another."""
    pending_reason: str | None = None
    """Why it has not started there."""
    spent: str | None = None
    """Hours of a GPU that it has taken there, and their price if it is known."""
    base_url: str | None = None
    """OpenAI-compatible endpoint on the server's machine; `deployment` is the model name.
    Callers from elsewhere have chat."""
    api_key_file: str | None = None
    """JSON file on the server; the endpoint asks for its api_key."""
    curl: str | None = None
    """With deploy: a request that works as it stands, with the prompt of a task of its run."""
    python: str | None = None
    """With deploy: the same with the openai package."""
    idle_minutes: float
    """It ends after so many minutes in which nobody used its server; 0: never."""
    record: bool | None = None
    """True if its requests are recorded: rollouts(run_id=deployment) shows them."""
    seconds: float
    """Seconds since deploy was called."""


class Message(BaseModel):
    """One message of a conversation, as OpenAI's API has it."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None


class Answer(ResultModel):
    """A model's answer."""

    text: str
    tool_calls: list[Json] | None = None
    finish: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float


class Chat(Result):
    """One turn of a conversation with a deployment."""

    deployment: str
    opening: str | None = None
    """What was sent before `message`, as in training."""
    adapter: Answer
    """The trained model's answer."""
    base: Answer | None = None
    """The untrained model's, with side_by_side."""
    precision: str | None = None
    """In which both are computed, and the run was if that was another."""


Wait = Annotated[float, Field(ge=0, le=45, description="Seconds to wait for it.")]
_REFERENCE = "Deployment id or name; default: the only one."
Reference = Annotated[str | None, Field(min_length=1, description=_REFERENCE)]


async def deploy(
    run_id: Annotated[str, Field(min_length=1)],
    step: Annotated[int | None, Field(ge=0)] = None,
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,99}$")] = None,
    port: Annotated[int | None, Field(ge=1024, le=65535)] = None,
    idle_minutes: Annotated[float | None, Field(ge=0, le=525_600)] = None,
    record: bool | None = None,
    target: str | None = None,
    wait_s: Wait = 40.0,
) -> Deployed:
    """Serve a run's checkpoint, and its base model, with vLLM's OpenAI server.

    `ready` means that the adapter answered a chat request. The first deployment of a base model
    takes half a minute or more; further ones join its server within seconds. A second call with the
    same arguments changes nothing and returns the state. The server listens on loopback and ends
    with its last deployment. To end one, call undeploy.

    Args:
        run_id: Run whose adapter to serve.
        step: Its step; default: the newest intact one.
        name: Your name for it; default RUN_ID-STEP.
        port: Port on loopback; default: a free one.
        idle_minutes: Minutes without a request that end it; 0: never; default: 60, or the
            operator's.
        record: Record requests for rollouts and curate.
        target: Serve it on a node there.
    """
    store, deadline = open_store(), deadline_after(wait_s)
    is_here = target in (None, LOCAL_TARGET)
    if is_here:
        check_machine(ELSEWHERE.format(run_id=run_id))
    if is_here and port is not None:
        await run_sync(check_serving_port, store, run_id, port)
    gpus = 1 if target is None or is_here else await run_sync(_cards, store, run_id, target)
    row = await run_sync(
        lambda: serving.request(
            store,
            run_id,
            step=step,
            name=name,
            port=port,
            idle_minutes=idle_minutes,
            record=record,
            target=target,
            gpus=gpus,
        )
    )
    await run_sync(ensure_supervised, store)
    row = await _settled(store, row.id, ("ready", "failed", "stopped"), deadline)
    if row.state == "failed":
        raise failure(row)
    return await run_sync(_with_snippets, store, row)


def _cards(store: Store, run_id: str, target: str) -> int:
    """How many cards of the target's nodes the server takes. FlashError(unknown_target)."""
    return cards_for(store.run(run_id).model, find_target(store.base, target).cards)


def _with_snippets(store: Store, row: Deployment) -> Deployed:
    result = describe(store, row)
    server = server_of(store.base, row) if result.base_url else None
    if server:
        calls = snippets.calls_of(store, row, server)
        result.curl = calls.curl
        result.python = calls.python
        if not calls.has_prompt:
            recorded_requests = f"rollouts(run_id={row.run_id!r}, which='index', limit=1)"
            result.next += f"; ask it as in training: {recorded_requests} shows a prompt"
    return result


async def undeploy(
    deployment: Reference = None, wait_s: Annotated[float, Field(ge=0, le=45)] = 20.0
) -> Deployed:
    """Stop serving an adapter. The server of its base model ends with its last adapter. The
    checkpoint is kept.

    A deployment that already ended is returned as it is. To end a run, call cancel.

    Args:
        wait_s: Seconds to wait for its end.
    """
    store, deadline = open_store(), deadline_after(wait_s)
    row = await run_sync(functools.partial(serving.find_deployment, to_end=True), store, deployment)
    row = await run_sync(serving.request_stop, store, row.id)
    if row.state == "stopping":
        await run_sync(ensure_supervised, store)
    return describe(store, await _settled(store, row.id, ("stopped",), deadline))


async def chat(
    deployment: Reference = None,
    message: Annotated[str | None, Field(min_length=1)] = None,
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=200)] = None,
    raw: bool = False,
    side_by_side: bool = False,
    max_tokens: Annotated[int | None, Field(ge=1, le=MOST_TOKENS)] = None,
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    stop: Annotated[list[str] | None, Field(max_length=4)] = None,
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None,
) -> Chat:
    """Talk to a deployed adapter, and with side_by_side to its base model too.

    Calls share no memory: pass the conversation so far as messages. An answer that is not complete
    after 40 s is returned as far as it got. The model sees the tools of its run; to answer a call,
    pass its tool_calls and the result as messages. No environment takes part; for scored
    conversations, call rollouts.

    Args:
        message: The user's message, after the system prompt and examples of the run's tasks; or
            messages.
        messages: A whole conversation that ends before the model's turn, sent as it is.
        raw: Leave out that prompt and those examples.
        side_by_side: Ask the base model too.
        max_tokens: Tokens of an answer; default: the run's.
        temperature: 0 takes the likeliest token each time.
        top_p: Nucleus sampling mass.
        stop: Texts that end an answer.
        seed: Makes sampling repeatable.
    """
    store = open_store()
    conversation = _conversation(message, messages)
    row = await run_sync(serving.find_deployment, store, deployment)
    server = await run_sync(_ready_server, store, row)
    opening: list[Json] = []
    if message is not None and not raw:
        opening = await run_sync(snippets.opening_of, store, row)
    run = await run_sync(store.run, row.run_id)
    body: Json = {
        "messages": [*opening, *conversation],
        "max_tokens": max_tokens or min(run.spec.max_tokens, MOST_TOKENS),
        "temperature": temperature,
        "top_p": top_p,
        "stop": stop,
        "seed": seed,
        "chat_template_kwargs": {"enable_thinking": row.thinking},
    }
    if tools := await run_sync(snippets.tools_of, store, row):
        body["tools"] = tools
    names = [row.id, row.model] if side_by_side else [row.id]
    # The answers of several models at once; raises the first error in the order of `names`
    with _one_of_few_chats():
        asking = (_answer(server, {**body, "model": name}) for name in names)
        results = await asyncio.gather(*asking, return_exceptions=True)
    answers: dict[str, Answer] = {}
    for name, result in zip(names, results, strict=True):
        if isinstance(result, BaseException):
            raise result
        answers[name] = result
    adapter = answers[row.id]
    following = _after_chat(row, adapter, side_by_side)
    texts = [f"{message['role']}: {text_of(message)}" for message in opening]
    return Chat(
        deployment=row.id,
        opening=shorten("\n".join(texts), OPENING_CHARACTERS) if texts else None,
        adapter=adapter,
        base=answers.get(row.model),
        precision=_precision(store, row),
        next=following,
    )


_chats = Counter[str]()
"""Those under way of each owner."""


@contextmanager
def _one_of_few_chats() -> Generator[None, None, None]:
    """Leave room in model servers for the chats of others. FlashError(rate_limited) if the caller
    waits for as many answers as an owner over HTTP may.
    """
    owner, most = caller().owner, caller().limits.chats
    if _chats[owner] >= most and not caller().is_local:
        what = f"{most} chats of yours wait for their answers"
        fix = "call again when one has its own, and send no more than that at once"
        raise FlashError("rate_limited", what, retry_after_s=5, fix=fix)
    _chats[owner] += 1
    try:
        yield
    finally:
        _chats[owner] -= 1


def _conversation(message: str | None, messages: list[Message] | None) -> list[Json]:
    if (message is None) == (messages is None):
        conversation = "messages=[{role, content}, ...] for a conversation"
        fix = f"pass message='...' for one question, or {conversation}"
        raise FlashError("invalid_argument", "give either message or messages", fix=fix)
    conversation = messages or [Message(role="user", content=message or "")]
    if conversation[-1].role == "assistant":
        fix = "end messages with the user's turn"
        what = "the conversation ends with the assistant's turn"
        raise FlashError("invalid_argument", what, fix=fix)
    return [turn.model_dump(exclude_none=True) for turn in conversation]


def _ready_server(store: Store, row: Deployment) -> Server:
    if row.state == "failed" or serving.ended_idle(row):
        raise failure(row)
    if row.state in ("stopping", "stopped"):
        fix = f"deploy(run_id={row.run_id!r}, step={row.step}) serves it again"
        what = f"{row.id} has been stopped"
        raise FlashError("unknown_deployment", what, deployment=row.id, fix=fix)
    if row.state == "starting":
        fix = f"deploy(run_id={row.run_id!r}, step={row.step}, name={row.name!r}) waits for it"
        what = "the deployment is still starting"
        if row.error:
            what = f"the deployment is starting again: {row.error['what']}"
        elif pending_reason := store.pending_reason(row):
            what = f"the deployment waits: {pending_reason}"
        raise FlashError("not_ready", what, deployment=row.id, seconds=_age_s(row), fix=fix)
    if server := server_of(store.base, row):
        return server
    raise _gone(row)


def _broken(why: str, wrote: str = "") -> FlashError:
    what = f"the server ended the answer early: {why}"
    fix = "call deploy again to see its state"
    return FlashError("deployment_failed", what, fix=fix, wrote=wrote)


async def _answer(server: Server, body: Json) -> Answer:
    """Stream one answer, so that what was said by the deadline is not lost."""
    started, text, finish, usage = time.monotonic(), "", "", dict[str, Any]()
    calls: dict[int, Json] = {}
    request_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with anyio.move_on_after(CHAT_LIMIT_S) as limit:
        try:
            async with (
                httpx.AsyncClient(
                    timeout=None, trust_env=False, headers=server.headers, verify=server.trusted
                ) as client,
                client.stream(
                    "POST", f"{server.url}/chat/completions", json=request_body
                ) as response,
            ):
                if not response.is_success:
                    raise _refusal((await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ").strip()
                    if not line.startswith("data: ") or data == "[DONE]":
                        continue
                    chunk: Json = json.loads(data)
                    if "error" in chunk:
                        raise _broken("it reports an error", error_message(to_text(chunk)))
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices", []):
                        text += choice["delta"].get("content") or ""
                        add_call_parts(calls, choice["delta"].get("tool_calls") or ())
                        finish = choice.get("finish_reason") or finish
                    if len(text) and len(text) % 400 < 4:
                        await report(f"{len(text)} characters")
        except httpx.TransportError as error:
            raise _broken(f"{type(error).__name__}: {error}") from error
    if not finish and not limit.cancelled_caught:
        raise _broken("it ended before the answer did")
    if not finish and not text and not calls:
        what = (
            f"no part of an answer came within {CHAT_LIMIT_S:.0f} s: the server hangs, or computes "
            "others' requests or a long prompt"
        )
        fix = "call chat again in two minutes: a server that hangs is started again"
        raise FlashError("unresponsive", what, fix=fix)
    tool_calls = [calls[index] for index in sorted(calls)]
    said = text_of({"content": text, "tool_calls": tool_calls})
    return Answer(
        text=shorten(said, ANSWER_CHARACTERS),
        tool_calls=tool_calls or None,
        finish=finish or "timeout",
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        seconds=round(time.monotonic() - started, 2),
    )


def _refusal(body: str) -> FlashError:
    message = error_message(body)
    if "context length" in message or "max_model_len" in message:
        what = "the conversation and its answer do not fit into the model's context"
        fix = "shorten the conversation, or lower max_tokens"
        return FlashError("prompt_too_long", what, fix=fix, wrote=message)
    fix = "change what it names, and call again"
    return FlashError("invalid_argument", "the server refused", fix=fix, wrote=message)


async def _settled(
    store: Store, deployment_id: str, states: tuple[str, ...], deadline: float
) -> Deployment:
    """The row once it is in one of `states`, or as it is at `deadline`."""
    return await wait_until(
        functools.partial(store.deployment, deployment_id),
        lambda row: row.state in states,
        deadline,
        lambda row: (f"{row.state} for {_age_s(row):.0f} s", None),
    )


def failure(row: Deployment) -> FlashError:
    if not row.error:
        return _gone(row)
    error = FlashError.from_dict(row.error)
    if not caller().is_local:  # others' deployments share the log, whose end follows the cause
        error.values.clear()
        error.wrote = error.wrote.split("\n")[0]
    return error


def _gone(row: Deployment) -> FlashError:
    fix = f"deploy(run_id={row.run_id!r}, step={row.step}) shows its state and starts it again"
    return FlashError("deployment_failed", "its server has ended", deployment=row.id, fix=fix)


def _age_s(row: Deployment) -> float:
    return round(max(0.0, time.time() - row.created), 1)


def describe(store: Store, row: Deployment) -> Deployed:
    is_reachable = row.state == "ready" and caller().is_local
    server = server_of(store.base, row) if is_reachable else None
    return Deployed(
        deployment=row.id,
        name=row.name,
        state=row.state,
        run_id=row.run_id,
        step=row.step,
        model=row.model,
        target=None if row.target == LOCAL_TARGET else row.target,
        precision=_precision(store, row),
        pending_reason=store.pending_reason(row),
        spent=costs.spent(store.used_s_by_target(row.id), store.base),
        base_url=row.base_url if server else None,
        api_key_file=server.file if server else None,
        idle_minutes=idle_limit(row, store.base),
        record=row.record or None,
        seconds=_age_s(row),
        next=_next_step(store, row),
    )


def _precision(store: Store, row: Deployment) -> str | None:
    """That of the server, beside that of the run if it differs: answers may differ too."""
    served, trained = store.precision_of(row.server_run), store.precision_of(row.run_id)
    if served is None or trained in (None, served):
        return served
    measures = f"evaluate(model={row.id!r}) measures it as it is served"
    return f"{served}; its run was computed in {trained}: {measures}"


def _next_step(store: Store, row: Deployment) -> str:
    match row.state:
        case "ready":
            question = snippets.question_of(store, row) or "..."
            arguments = f"deployment={row.id!r}, message={question!r}, side_by_side=true"
            return f"chat({arguments}) compares it with the base model"
        case "starting":
            slow = "the server is starting, which takes a minute or more on a CPU"
            if pending_reason := store.pending_reason(row):
                slow = f"it waits: {pending_reason}"
            return f"{slow}; call deploy again to wait for it"
        case "stopping":
            return "it is ending; undeploy again waits for it"
        case _:
            again = f"deploy(run_id={row.run_id!r}, step={row.step}) serves it again"
            return (
                f"{row.error['what']}; {again}" if row.error and serving.ended_idle(row) else again
            )


def _after_chat(row: Deployment, adapter: Answer, side_by_side: bool) -> str:
    if adapter.finish == "timeout":
        beside = ", or use the endpoint that deploy returns" if caller().is_local else ""
        return f"the answer was cut off after 40 s: lower max_tokens{beside}"
    if adapter.finish == "length":
        return "the answer reached max_tokens: raise it for the whole answer"
    if not side_by_side:
        return "side_by_side=true shows the base model's answer too; undeploy when done"
    compares = f"status(run_id={row.run_id!r}) compares on held-out tasks"
    return f"one answer proves little: {compares}; undeploy when done"
