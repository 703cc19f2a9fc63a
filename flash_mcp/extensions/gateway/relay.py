"""/gateway/RUN/...: an agent outside the sandbox asks a run for tasks, and its model, through us.

    POST /gateway/RUN/tasks    with a token that may write: a task, with base_url and api_key
    /gateway/RUN/RANK/v1/...   with that key: the model's APIs; POST .../result ends the rollout

The worker of the run answers, on a port of loopback for each of its ranks
(worker/rollouts/gateway.py). The body of a request is read once its key is known for one that this
worker made; whether its rollout goes on, the worker says."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import httpx
from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from environments.agents.dialects import ApiError
from environments.agents.server import DIALECTS
from environments.sandbox.needs import Needs
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE, Run
from flash_mcp.protocol.run_files import GATEWAY_BASE_URL, GatewayFile
from flash_mcp.protocol.sealing import is_of
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.server.uploads import refusal_response
from flash_mcp.state import references
from flash_mcp.state.owners import LOCAL, acting_as, refuse_reader
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store, open_store

OWN_KEY = re.compile(r"/gateway/[^/]+/[0-9]+/v1/")
"""Begins the paths that the key of a rollout opens, instead of a token."""
UNAUTHORIZED = 401
OF_A_CONNECTION = ("host", "connection", "transfer-encoding", "content-length", GATEWAY_BASE_URL)
"""Headers that are not passed on."""


class Relay:
    """An ASGI application: it sees when its client leaves, and leaves the worker too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if "transfer-encoding" in request.headers:
                what = "the length of the body is not known"
                raise FlashError("too_large", what, fix="send a Content-Length")
            if "rank" in request.path_params:
                run, where = request.scope["state"]["played"] or (None, None)
            else:
                run, where = await run_sync(_run_of, request.path_params["run_id"])
            body = await request.body() if where else b""
        except ClientDisconnect:
            return
        except FlashError as error:
            await refusal_response(error)(scope, receive, send)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            if where is None or not await _passed(request, body, where, send):
                # The run has ended, or its worker is not there, or did not make the key.
                if run and "rank" not in request.path_params:
                    answer = JSONResponse({"task": None, "state": run.state})
                else:
                    what = "incorrect API key, or its rollout has ended"
                    error = ApiError(UNAUTHORIZED, "invalid_api_key", what)
                    dialect = DIALECTS.get(f"/{request.path_params['rest']}", DIALECTS[CHAT])
                    answer = JSONResponse(dialect.error(error), error.status)
                await answer(scope, receive, send)
            group.cancel_scope.cancel()


ROUTES = (
    Route("/gateway/{run_id}/{rank:int}/v1/{rest:path}", Relay(), methods=["GET", "POST"]),
    Route("/gateway/{run_id}/tasks", Relay(), methods=["POST"]),
)
CHAT = "/chat/completions"


async def _passed(request: Request, body: bytes, where: GatewayFile, send: Send) -> bool:
    ports = where["ports"]
    rank: int = request.path_params.get("rank", secrets.randbelow(len(ports))) % len(ports)
    url = f"http://127.0.0.1:{ports[rank]}/tasks"
    headers = _passed_on(request.headers)
    if "rank" in request.path_params:
        url = f"http://127.0.0.1:{ports[rank]}/v1/{request.path_params['rest']}"
    else:
        headers["authorization"] = f"Bearer {where['key']}"
        own = f"gateway/{request.path_params['run_id']}/{rank}/v1"
        headers[GATEWAY_BASE_URL] = f"{request.base_url}{own}"
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


def _run_of(run_id: str) -> tuple[Run, GatewayFile | None]:
    refuse_reader("playing a run's rollouts")
    return worker_of(open_store(), run_id)


def played(path: str, headers: Mapping[str, str]) -> tuple[Run, GatewayFile] | None:
    """The run of a path of OWN_KEY, and its worker, if that made the key of the request. Who has
    none learns nothing, not even what runs.
    """
    store, run_id = open_store(), path.split("/")[2]
    key = headers.get("authorization") or headers.get("x-api-key", "")
    with acting_as(LOCAL), suppress(FlashError):
        if store.first("SELECT id FROM runs WHERE id = ?", [run_id]):
            run, where = worker_of(store, run_id)
            if where and is_of(where["key"], key.removeprefix("Bearer ").strip()):
                return run, where
    return None


def worker_of(store: Store, run_id: str) -> tuple[Run, GatewayFile | None]:
    """The run, and where its worker gives out tasks, if it does so now. FlashError(unknown_run),
    FlashError(invalid_argument) if the run never does, FlashError(environment_invalid).
    """
    run = store.run(run_id)
    where = None
    if run.state in ACTIVE:
        folder = Path(references.environment(store, run.environment_reference).path)
        try:
            is_outside = Needs.from_folder(folder).gateway
        except ValueError as error:
            fix = "push the environment again, and start another run"
            raise FlashError("environment_invalid", str(error), run_id=run_id, fix=fix) from error
        if run.target != LOCAL_TARGET or not is_outside:
            what = "this run plays its rollouts itself"
            fix = "for a run that agents outside play, put gateway = true into environment.toml"
            raise FlashError("invalid_argument", what, run_id=run_id, fix=fix)
        where = folder_of(run).gateway(run.attempt)
    return run, where


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name not in OF_A_CONNECTION}


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
