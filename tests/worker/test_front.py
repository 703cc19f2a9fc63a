"""The routes of a model server, without vLLM behind them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from worker.engine.front import Front
from worker.ports import close_listening, listening

pytestmark = pytest.mark.anyio
USER, ADMIN = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers everything, and says which key it was asked with."""
    await JSONResponse(Request(scope).headers.get("authorization"))(scope, receive, send)


def made() -> Front:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "user")
        patch.setenv("FLASH_ADMIN_KEY", "admin")
        return Front(behind)


async def answer(
    method: str, path: str, headers: dict[str, Any] | None = None, front: Front | None = None
) -> httpx.Response:
    transport = httpx.ASGITransport(app=front or made())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.hostile("model servers")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/adapters"),
        ("DELETE", "/adapters/dep-1"),
        ("POST", "/invocations"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/chat/completions"),
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("POST", "/health"),
    ],
)
async def test_without_a_key_nothing_but_health_answers(method: str, path: str) -> None:
    for header in (None, "", "Bearer", "Bearer user2", "Bearer üser", "Basic user", "user"):
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        refused = await answer(method, path, headers)
        assert refused.status_code == 401
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "api_key_file" in error["message"]


async def test_clients_of_anthropics_api_send_their_key_in_their_own_header() -> None:
    served = await answer("POST", "/v1/messages", {"x-api-key": "user"})
    assert served.json() == USER["authorization"], "vLLM reads no other header"
    assert (await answer("POST", "/v1/messages", {"x-api-key": "user2"})).status_code == 401


async def test_health_needs_no_key() -> None:
    assert (await answer("GET", "/health")).status_code == 200


@pytest.mark.hostile("model servers")
async def test_a_users_key_opens_the_routes_of_users_and_no_others() -> None:
    assert (await answer("POST", "/v1/chat/completions", USER)).json() == "Bearer user"
    assert (await answer("GET", "/v1/models", USER)).is_success
    for method, path in (
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/adapters"),
        ("POST", "/v1//chat/completions"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/scale_elastic_ep"),
    ):
        refused = await answer(method, path, USER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.hostile("model servers")
async def test_the_supervisors_key_loads_adapters_asks_for_tokens_and_nothing_else() -> None:
    loaded = await answer("POST", "/v1/load_lora_adapter", ADMIN)
    assert loaded.json() == "Bearer user", "vLLM itself asks for the users' key"
    assert (await answer("POST", "/v1/chat/completions", ADMIN)).json() == "Bearer user"
    assert (await answer("POST", "/v1/responses", ADMIN)).status_code == 404
    assert (await answer("POST", "/adapters", ADMIN)).status_code == 404


async def test_only_users_who_let_it_compute_end_its_idleness() -> None:
    front = made()

    async def idle_s() -> float:
        return (await answer("GET", "/v1/idle", ADMIN, front)).json()["idle_s"]

    front.used_at -= 1000
    await answer("GET", "/metrics", USER, front)
    await answer("POST", "/v1/completions", ADMIN, front)
    assert await idle_s() >= 1000
    front.under_way += 1
    assert await idle_s() == 0
    front.under_way -= 1
    await answer("POST", "/v1/chat/completions", USER, front)
    assert await idle_s() < 1000


async def test_a_node_sees_how_long_the_supervisor_has_been_silent() -> None:
    front = made()
    assert (await answer("GET", "/v1/idle", None, front)).status_code == 401
    front.watched_at -= 1000
    for key, least in ((USER, 1000), (ADMIN, 0), (USER, 0)):
        told = (await answer("GET", "/v1/idle", key, front)).json()
        assert least <= told["unwatched_s"] < least + 500


@pytest.mark.hostile("model servers")
async def test_a_web_socket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await made()(scope, None, send)  # pyright: ignore
    assert sent == ["websocket.close"]


@pytest.mark.hostile("model servers")
def test_listening_sockets_are_closed_but_for_those_to_keep() -> None:
    with socket.create_server(("127.0.0.1", 0)) as kept:
        others = listening()
        before = sorted(Path("/proc/self/fd").iterdir())
        listening()
        assert sorted(Path("/proc/self/fd").iterdir()) == before, "looking opens nothing"
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = closed.getsockname()
            close_listening(keep=others)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            os.fstat(closed.fileno())  # its number stays taken
        socket.create_connection(kept.getsockname()).close()
