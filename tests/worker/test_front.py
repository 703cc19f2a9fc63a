"""The routes of a model server, without vLLM behind them."""

import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tests.model_rows import make_model
from worker.engine.front import Front
from worker.process import close_listening, listening

USER, ADMIN = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers everything, and says which key it was asked with."""
    await JSONResponse(Request(scope).headers.get("authorization"))(scope, receive, send)


def made() -> Front:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "user")
        patch.setenv("FLASH_ADMIN_KEY", "admin")
        return Front(behind)


async def answer(method: str, path: str, headers: dict[str, Any] | None = None, front: Front | None = None):
    transport = httpx.ASGITransport(app=front or made())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.hostile("model servers")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/adapters"), ("DELETE", "/adapters/dep-1"), ("POST", "/invocations"),
        ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/chat/completions"), ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere"), ("POST", "/health"),
    ],
)  # fmt: skip
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
        ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"), ("POST", "/adapters"),
        ("POST", "/v1//chat/completions"), ("GET", "/v1/chat/completions"), ("POST", "/scale_elastic_ep"),
    ):  # fmt: skip
        refused = await answer(method, path, USER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.hostile("model servers")
async def test_the_supervisors_key_loads_adapters_asks_for_tokens_and_nothing_else() -> None:
    loaded = await answer("POST", "/v1/load_lora_adapter", ADMIN)
    assert loaded.json() == "Bearer user", "vLLM itself asks for the users' key"
    assert (await answer("POST", "/v1/chat/completions", ADMIN)).json() == "Bearer user"
    assert (await answer("POST", "/v1/responses", ADMIN)).status_code == 404
    assert (await answer("POST", "/adapters", ADMIN)).status_code == 404


class Server:
    """Answers as vLLM does, and notes the names of the layers that it loads. One that
    `ignores` adapters says the same with each."""

    def __init__(self, ignores: bool) -> None:
        self.ignores = ignores
        self.loaded: dict[str, list[str]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer: Any = {}
        if request.url.path == "/v1/models":
            answer = {"data": [{"id": "base", "parent": None}, {"id": "dep-1", "parent": "base"}]}
        else:
            body = await request.json()
            if request.url.path == "/v1/completions":
                token = -1.0 if self.ignores or body["model"] == "base" else -2.0
                answer = {"choices": [{"logprobs": {"token_logprobs": [token]}}]}
            elif request.url.path == "/v1/load_lora_adapter":
                path = Path(body["lora_path"], "adapter_model.safetensors")
                self.loaded[body["lora_name"]] = sorted(load_file(path))
        await JSONResponse(answer)(scope, receive, send)


@pytest.mark.parametrize("ignores", [False, True])
async def test_an_adapter_gets_the_names_of_the_base_models_files_and_one_without_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    monkeypatch.setenv("FLASH_MODEL_FOLDER", str(make_model("qwen3_5", tmp_path / "base")))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    layer = "layers.3.self_attn.q_proj.lora_{}.weight"
    own = {f"base_model.model.model.{layer.format(part)}": torch.zeros(2, 2) for part in "AB"}
    save_file(own, adapter / "adapter_model.safetensors")
    front = made()
    front.app = server = Server(ignores)
    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        body = {"lora_name": "dep-1", "lora_path": str(adapter)}
        response = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    if ignores:
        assert response.status_code == 400 and "no effect" in response.json()["error"]["message"]
        assert "dep-1" not in server.loaded
        return
    assert response.is_success
    assert front.copies.parent == tmp_path  # where it goes with the attempt, killed or not
    prefix = "base_model.model.model.language_model."
    assert server.loaded["dep-1"] == [prefix + layer.format(part) for part in "AB"]
    assert [path.name for path in front.copies.iterdir()] == ["dep-1"], "vLLM may read it again"
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "dep-1"}, headers=ADMIN)
    assert not list(front.copies.iterdir())


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
        assert least <= (await answer("GET", "/v1/idle", key, front)).json()["unwatched_s"] < least + 500


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
