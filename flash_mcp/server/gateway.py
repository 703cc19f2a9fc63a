"""/gateway/RUN/...: an agent outside the sandbox asks a run for tasks, and its model, through us.

    POST /gateway/RUN/tasks    with a token that may write: a task, with base_url and api_key
    /gateway/RUN/v1/...        with that key: the model's APIs; POST /gateway/RUN/v1/result ends it

The worker of the run answers, on a port of loopback (worker/rollouts/gateway.py). It alone knows
the keys of rollouts, and refuses requests without one."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import httpx
from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE, Run
from flash_mcp.protocol.run_files import GATEWAY_BASE_URL, GatewayFile
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.server.uploads import refusal_response
from flash_mcp.state.owners import LOCAL, NOBODY, acting_as, caller, refuse_reader
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import open_store

PATH = "/gateway/{run_id}/{rest:path}"
OF_A_CONNECTION = ("host", "connection", "transfer-encoding", "content-length", GATEWAY_BASE_URL)
"""Headers that are not passed on."""


def has_own_key(path: str) -> bool:
    """Whether the key of a rollout opens this path, instead of a token."""
    _, first, *rest = path.split("/")
    return first == "gateway" and rest[1:2] == ["v1"]


class Relay:
    """An ASGI application: it sees when its client leaves, and leaves the worker too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if "transfer-encoding" in request.headers:
                what = "the length of the body is not known"
                raise FlashError("too_large", what, fix="send a Content-Length")
            body = await request.body()
            run, where = await run_sync(_worker_of, request.path_params["run_id"])
        except FlashError as error:
            await refusal_response(error)(scope, receive, send)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            if where is None or not await _passed(request, body, run, where, send):
                # The run has ended, or its worker has not come yet.
                answer = JSONResponse({"task": None, "state": run.state})
                if has_own_key(request.url.path):
                    answer.status_code = 503
                await answer(scope, receive, send)
            group.cancel_scope.cancel()


async def _passed(request: Request, body: bytes, run: Run, where: GatewayFile, send: Send) -> bool:
    """Whether the worker answered."""
    headers = _passed_on(request.headers)
    headers[GATEWAY_BASE_URL] = f"{request.base_url}gateway/{run.id}/v1"
    if not has_own_key(request.url.path):
        headers["authorization"] = f"Bearer {where['key']}"
    url = f"http://127.0.0.1:{where['port']}/{request.path_params['rest']}"
    answer = None
    try:
        async with (
            httpx.AsyncClient(timeout=None, trust_env=False) as client,
            client.stream(request.method, url, headers=headers, content=body) as reply,
        ):
            content = reply.aiter_raw()
            answer = StreamingResponse(content, reply.status_code, _passed_on(reply.headers))
            await answer.stream_response(send)
    except httpx.TransportError:
        if answer:
            raise
    return answer is not None


def _worker_of(run_id: str) -> tuple[Run, GatewayFile | None]:
    """The run, and where its worker takes requests."""
    who = caller()
    if who is NOBODY:
        who = LOCAL  # the key of a rollout opens no other one
    else:
        refuse_reader("playing a run's rollouts")
    with acting_as(who):
        run = open_store().run(run_id)
        if run.target != LOCAL_TARGET or run.state not in ACTIVE:
            return run, None
        return run, folder_of(run).gateway(run.attempt)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name not in OF_A_CONNECTION}


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
