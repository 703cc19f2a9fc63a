"""deploy, undeploy and chat: serving what a run has learned, and talking to it."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import httpx
from pydantic import BaseModel, ConfigDict, Field

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Deployment, Json
from flash_mcp.state.owners import caller
from flash_mcp.state.serving import find_deployment, request, request_stop
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.keeper import look_after
from flash_mcp.supervisor.model_servers import Server, check_port, error_message
from flash_mcp.tools.shared.fitting import shorten, to_text
from flash_mcp.tools.shared.frame import Part, Result, report

POLL_S = 0.25
WAIT_LIMIT_S = 43.0
CHAT_LIMIT_S = 40.0
ANSWER_CHARACTERS = 3000


class Deployed(Result):
    """A served adapter."""

    deployment: str
    """Pass to chat and undeploy."""
    name: str
    """Its other name."""
    state: str
    """starting, ready, failed, stopping or stopped."""
    run_id: str | None = None
    """The run whose adapter it is."""
    step: int | None = None
    """The step of that adapter."""
    model: str
    """Base model; its name in the OpenAI API too."""
    base_url: str | None = None
    """OpenAI-compatible endpoint on the server's machine; `deployment` is the model name.
    Callers from elsewhere have chat."""
    api_key_file: str | None = None
    """JSON file beside it whose api_key the endpoint asks for."""
    seconds: float
    """Since it was asked for."""


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Answer(Part):
    """What a model said."""

    text: str
    finish: str
    """stop; length: max_tokens reached; timeout: cut off after 40 s."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float


class Chat(Result):
    """One turn of talk with a deployment."""

    deployment: str
    adapter: Answer
    """The trained model's answer."""
    base: Answer | None = None
    """The untrained model's, with side_by_side."""


Wait = Annotated[
    float, Field(ge=0, le=45, description="Seconds to wait for it, 0 to 45; default 40.")
]
Reference = Annotated[
    str | None,
    Field(
        min_length=1,
        description="Deployment id or name, as returned by deploy; may be left out if there is one.",
    ),
]


async def deploy(
    run_id: Annotated[str, Field(min_length=1)],
    step: Annotated[int | None, Field(ge=0)] = None,
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,99}$")] = None,
    port: Annotated[int | None, Field(ge=1024, le=65535)] = None,
    wait_s: Wait = 40.0,
) -> Deployed:
    """Serve a run's checkpoint with vLLM's OpenAI server, base model and adapter side by side.

    `ready` means that the adapter has answered a chat request. The first deployment of a base model
    takes half a minute or more; further ones join its server within seconds. Calling again with the
    same arguments changes nothing and returns the state. The server listens on loopback and goes
    with its last deployment: undeploy.

    Args:
        run_id: Run whose adapter to serve, as returned by train.
        step: Step of the checkpoint; default: the newest whose files are whole.
        name: A name of your own; default RUN_ID-STEP.
        port: Port on loopback; default: a free one, chosen for you.
    """
    store, deadline = open_store(), _deadline(wait_s)
    if port is not None:
        await anyio.to_thread.run_sync(check_port, store, run_id, port)
    row = await anyio.to_thread.run_sync(
        lambda: request(store, run_id, step=step, name=name, port=port)
    )
    await anyio.to_thread.run_sync(look_after, store)
    row = await _settled(store, row.id, ("ready", "failed", "stopped"), deadline)
    if row.state == "failed":
        raise failure(row)
    return describe(store, row)


async def undeploy(
    deployment: Reference = None, wait_s: Annotated[float, Field(ge=0, le=45)] = 20.0
) -> Deployed:
    """Stop serving an adapter. The server of its base model ends with its last one. The checkpoint
    stays.

    A deployment that has ended already is returned as it is. Ending a run: cancel.

    Args:
        wait_s: Seconds to wait for its end; default 20.
    """
    store, deadline = open_store(), _deadline(wait_s)
    row = await anyio.to_thread.run_sync(find_deployment, store, deployment)
    row = await anyio.to_thread.run_sync(request_stop, store, row.id)
    if row.state == "stopping":
        await anyio.to_thread.run_sync(look_after, store)
    return describe(store, await _settled(store, row.id, ("stopped",), deadline))


async def chat(
    deployment: Reference = None,
    message: Annotated[str | None, Field(min_length=1)] = None,
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=200)] = None,
    side_by_side: bool = False,
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256,
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    stop: Annotated[list[str] | None, Field(max_length=4)] = None,
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None,
) -> Chat:
    """Talk to a deployed adapter, and with side_by_side to its base model as well.

    Nothing is remembered between calls: pass the conversation so far as messages. No environment
    answers: for scored conversations see rollouts. An answer that is not whole after 40 s is
    returned as far as it came.

    Args:
        message: What the user says; or pass messages.
        messages: A whole conversation that ends before the model's turn.
        side_by_side: Ask the untrained base model too; default false.
        max_tokens: Tokens of an answer; default 256.
        temperature: 0 (default) gives the likeliest answer.
        top_p: Nucleus sampling mass; default 1.
        stop: Texts that end an answer.
        seed: Makes sampling repeatable.
    """
    store = open_store()
    conversation = _conversation(message, messages)
    row = await anyio.to_thread.run_sync(find_deployment, store, deployment)
    server = await anyio.to_thread.run_sync(_ready_server, store, row)
    body: Json = {
        "messages": conversation,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop": stop,
        "seed": seed,
        "chat_template_kwargs": {"enable_thinking": row.data.get("thinking", False)},
    }
    names = [row.id, row.model] if side_by_side else [row.id]
    answers: dict[str, Answer | FlashError] = {}

    async def ask(name: str) -> None:
        try:
            answers[name] = await _answer(server, {**body, "model": name})
        except FlashError as error:
            answers[name] = error

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(ask, name)
    adapter, base = (_or_raise(answers.get(name)) for name in (row.id, row.model))
    assert adapter is not None
    return Chat(
        deployment=row.id, adapter=adapter, base=base, next=_after_chat(row, adapter, side_by_side)
    )


def _conversation(message: str | None, messages: list[Message] | None) -> list[Json]:
    if (message is None) == (messages is None):
        fix = "pass message='...' for one question, or messages=[{role, content}, ...] for a conversation"
        raise FlashError("invalid_argument", "give either message or messages", fix=fix)
    conversation = messages or [Message(role="user", content=message or "")]
    if conversation[-1].role == "assistant":
        fix = "end messages with the user's turn"
        raise FlashError(
            "invalid_argument", "the conversation ends with the assistant's turn", fix=fix
        )
    return [turn.model_dump() for turn in conversation]


def _ready_server(store: Store, row: Deployment) -> Server:
    if row.state == "failed":
        raise failure(row)
    if row.state in ("stopping", "stopped"):
        fix = f"deploy(run_id={row.run_id!r}, step={row.step}) serves it again"
        raise FlashError(
            "unknown_deployment", f"{row.id} has been stopped", deployment=row.id, fix=fix
        )
    if row.state == "starting":
        fix = f"deploy(run_id={row.run_id!r}, step={row.step}, name={row.name!r}) waits for it"
        raise FlashError(
            "not_ready",
            "the deployment is still starting",
            deployment=row.id,
            seconds=_age_s(row),
            fix=fix,
        )
    server = Server.find(store.base, row.model)
    if server is None or not server.is_alive():
        raise _gone(row)
    return server


def _broken(why: str) -> FlashError:
    what = f"the server broke the answer off: {why}"
    return FlashError("deployment_failed", what, fix="call deploy again, which tells its state")


async def _answer(server: Server, body: Json) -> Answer:
    """Stream one answer, so that what was said by the deadline is not lost."""
    started, text, finish, usage = time.monotonic(), "", "", dict[str, Any]()
    request_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with anyio.move_on_after(CHAT_LIMIT_S) as limit:
        try:
            async with (
                httpx.AsyncClient(
                    timeout=CHAT_LIMIT_S, trust_env=False, headers=server.headers
                ) as client,
                client.stream(
                    "POST", f"{server.url}/chat/completions", json=request_body
                ) as response,
            ):
                if not response.is_success:
                    raise _refusal((await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    chunk = _chunk(line)
                    if "error" in chunk:
                        raise _broken(error_message(to_text(chunk)))
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices", []):
                        text += choice["delta"].get("content") or ""
                        finish = choice.get("finish_reason") or finish
                    if len(text) and len(text) % 400 < 4:
                        await report(f"{len(text)} characters")
        except httpx.TransportError as error:
            raise _broken(f"{type(error).__name__}: {error}") from error
    if not finish and not limit.cancelled_caught:
        raise _broken("it ended before the answer did")
    return Answer(
        text=shorten(text, ANSWER_CHARACTERS),
        finish=finish or "timeout",
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        seconds=round(time.monotonic() - started, 2),
    )


def _chunk(line: str) -> Json:
    """One server-sent event; empty for the last and for blank lines."""
    data = line.removeprefix("data: ").strip()
    return json.loads(data) if line.startswith("data: ") and data != "[DONE]" else {}


def _refusal(body: str) -> FlashError:
    message = error_message(body)
    if "context length" in message or "max_model_len" in message:
        return FlashError(
            "prompt_too_long", message, fix="shorten the conversation, or lower max_tokens"
        )
    return FlashError(
        "invalid_argument",
        f"the server refused: {message}",
        fix="change what it names, and call again",
    )


def _or_raise(answer: Answer | FlashError | None) -> Answer | None:
    if isinstance(answer, FlashError):
        raise answer
    return answer


def _deadline(wait_s: float) -> float:
    return time.monotonic() + min(wait_s, WAIT_LIMIT_S)


async def _settled(
    store: Store, deployment_id: str, states: tuple[str, ...], deadline: float
) -> Deployment:
    """The row once it is in one of `states`, or as it is at `deadline`."""
    told = time.monotonic()
    while True:
        row = await anyio.to_thread.run_sync(store.deployment, deployment_id)
        if row.state in states or time.monotonic() >= deadline:
            return row
        if time.monotonic() - told > 5:
            told = time.monotonic()
            await report(f"{row.state} for {_age_s(row):.0f} s")
        await anyio.sleep(POLL_S)


def failure(row: Deployment) -> FlashError:
    """Why a deployment failed."""
    if not row.error:
        return _gone(row)
    error = FlashError.from_dict(row.error)
    if not caller().is_local:  # the end of a log that others' deployments share
        error.values.clear()
    return error


def _gone(row: Deployment) -> FlashError:
    fix = f"deploy(run_id={row.run_id!r}, step={row.step}) tells its state and starts it again"
    return FlashError("deployment_failed", "its server has ended", deployment=row.id, fix=fix)


def _age_s(row: Deployment) -> float:
    return round(time.time() - row.created, 1)


def describe(store: Store, row: Deployment) -> Deployed:
    """A deployment as the tools return it."""
    is_reachable = row.state == "ready" and caller().is_local
    server = Server.find(store.base, row.model) if is_reachable else None
    return Deployed(
        deployment=row.id,
        name=row.name,
        state=row.state,
        run_id=row.run_id,
        step=row.step,
        model=row.model,
        base_url=row.base_url if server else None,
        api_key_file=server.file if server else None,
        seconds=_age_s(row),
        next=_next_step(row),
    )


def _next_step(row: Deployment) -> str:
    match row.state:
        case "ready":
            return f"chat(deployment={row.id!r}, message='...', side_by_side=true) compares it with the base model"
        case "starting":
            return "the server is starting, which takes a minute or more on a CPU; call deploy again to wait for it"
        case "stopping":
            return "it is ending; undeploy again waits for it"
        case _:
            return f"deploy(run_id={row.run_id!r}, step={row.step}) serves it again"


def _after_chat(row: Deployment, adapter: Answer, side_by_side: bool) -> str:
    if adapter.finish == "timeout":
        beside = ", or use the endpoint that deploy returns" if caller().is_local else ""
        return f"the answer was cut off after 40 s: lower max_tokens{beside}"
    if adapter.finish == "length":
        return "the answer reached max_tokens: raise it for the whole of it"
    if not side_by_side:
        return "side_by_side=true shows the base model's answer too; undeploy when done"
    return f"one answer proves little: status(run_id={row.run_id!r}) compares on held-out tasks; undeploy when done"
