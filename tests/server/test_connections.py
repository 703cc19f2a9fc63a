"""Clients that send slowly, or open many connections: over real sockets."""

import asyncio
import logging
import re
import socket
import time
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from uvicorn.server import ServerState

from environments.settings import FILE, ServerSettings
from flash_mcp.protocol.sealing import new_key
from flash_mcp.server import connections
from flash_mcp.server.connections import LimitedConfig, LimitedProtocol
from flash_mcp.server.http_server import Admission, application
from flash_mcp.server.mcp_server import build_server
from flash_mcp.state import references, tokens
from flash_mcp.state.store import open_store
from tests.forked import fork_of
from tests.ports import free_port
from tests.samples import queued_run, started_run, supervised
from tests.server.test_mcp_server import body_of, serving
from tests.teams import Team, team_server
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

HALF = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "
WHOLE = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@contextmanager
def limited(home: Path, **settings: int | list[str]) -> Generator[Team]:
    home.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (home / FILE).write_text("\n".join(["[server]", *lines, ""]))
    with team_server() as team:
        yield team


def connect(team: Team, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", team.port), timeout=WAIT_S)
    connection.sendall(data)
    return connection


def upload(team: Team, length: int, owner: str = "alice") -> bytes:
    """The headers of an upload, whose sender waits until the server asks for the body."""
    lines = [
        "PUT /environments/e HTTP/1.1",
        f"host: 127.0.0.1:{team.port}",
        f"authorization: Bearer {team.token(owner)}",
        f"content-length: {length}",
        "expect: 100-continue",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    try:
        while data := connection.recv(4096):
            received += data
    except ConnectionResetError:
        pass
    return received


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.hostile("slow connections")
def test_half_sent_headers_by_the_hundred_stop_nobody(flash_home: Path) -> None:
    with limited(flash_home, connections_per_address=50) as team, ExitStack() as stack:
        slow = [stack.enter_context(connect(team, HALF)) for _ in range(300)]
        with team.http() as http:
            assert http.get("/healthz").text == "ok\n"
        wait_for(lambda: sum(map(is_open, slow)) <= 50)
        assert is_open(slow[-1]), "the oldest ones ended"


@pytest.mark.hostile("slow connections")
def test_headers_that_do_not_arrive_end_their_connection(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)
    with team_server() as team:
        for data in (b"", HALF):
            with connect(team, data) as slow:
                assert answer(slow).startswith(b"HTTP/1.1 408 ")


@pytest.mark.hostile("slow connections")
def test_a_second_request_has_the_same_time(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
    with team_server() as team:
        for at_once, later in ((WHOLE + HALF, b""), (WHOLE, HALF)):
            with connect(team, at_once) as slow:
                received = slow.recv(4096)
                slow.sendall(later)
                received += answer(slow)
            assert received.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in received


def test_a_connection_may_be_idle_for_longer_than_headers_may_take(flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    with team_server() as team, connect(team, WHOLE) as idle:
        assert idle.recv(4096).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.5)
        idle.sendall(WHOLE)
        assert idle.recv(4096).startswith(b"HTTP/1.1 200 ")
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 1)
    with team_server() as team, connect(team, WHOLE) as idle:
        assert answer(idle).startswith(b"HTTP/1.1 200 "), "and then the server closes"


@pytest.mark.hostile("slow connections")
def test_a_body_that_does_not_arrive_ends_its_connection(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.3)
    with team_server() as team, connect(team, upload(team, 1000)) as slow:
        assert slow.recv(4096).startswith(b"HTTP/1.1 100 ")
        slow.sendall(b"x")
        assert answer(slow).startswith(b"HTTP/1.1 408 ")
        monkeypatch.setattr(connections, "MIN_BODY_RATE", 0.1)
        with connect(team, upload(team, 10)) as steady:
            assert steady.recv(4096).startswith(b"HTTP/1.1 100 ")
            for _ in range(10):
                steady.sendall(b"x")
                time.sleep(0.1)
            assert b"upload_invalid" in steady.recv(4096), "what arrives slowly and steadily is taken"


@pytest.mark.hostile("slow connections")
def test_who_has_requests_under_way_on_every_connection_is_refused_another(flash_home: Path) -> None:
    with limited(flash_home, connections=2) as team, ExitStack() as stack:
        for owner in ("alice", "bob"):
            under_way = stack.enter_context(connect(team, upload(team, 1000, owner)))
            assert under_way.recv(4096).startswith(b"HTTP/1.1 100 ")
        with connect(team, HALF) as third:
            assert answer(third).startswith(b"HTTP/1.1 503 ")


async def test_a_call_that_takes_longer_than_a_request_may_is_answered(flash_home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.3)
    run_id = queued_run(tmp_path / "environment").id
    with supervised(), team_server(authenticate=False) as team:
        async with team.client("none") as client:
            result = await client.call_tool("status", {"run_id": run_id, "wait_s": 1.5})
            assert body_of(result)["changed"] is False


# -- streams ---------------------------------------------------------------------------------------


def stream(team: Team, token: str) -> socket.socket:
    """A page's stream of changes that has begun; what refuses it has status 429 or 503."""
    lines = ["GET /ui/events HTTP/1.1", f"host: 127.0.0.1:{team.port}", f"authorization: Bearer {token}"]
    return connect(team, "\r\n".join([*lines, "", ""]).encode())


def begins(connection: socket.socket) -> bool:
    return connection.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.hostile("slow connections")
def test_one_token_s_streams_have_a_limit_and_shut_nobody_out(flash_home: Path) -> None:
    with limited(flash_home, streams_per_owner=5) as team, ExitStack() as stack:
        token = team.token("mallory", "read")
        for _ in range(5):
            assert begins(stack.enter_context(stream(team, token)))
        with stream(team, token) as sixth:
            assert sixth.recv(4096).startswith(b"HTTP/1.1 429 ")
        with team.http(token) as http:
            assert http.get("/metrics").status_code == 200, "calls go on"
        assert begins(stack.enter_context(stream(team, team.token("alice", "read"))))


@pytest.mark.hostile("slow connections")
def test_agents_behind_one_proxy_fit_though_they_share_its_address(flash_home: Path) -> None:
    with limited(flash_home, connections_per_address=8) as team, ExitStack() as stack:
        tokens = [team.token(f"owner-{number}") for number in range(3)]
        streams: list[socket.socket] = []
        for number in range(30):
            streams.append(stack.enter_context(stream(team, tokens[number % 3])))
            assert begins(streams[-1])
        with team.http(tokens[0]) as http:
            assert http.get("/metrics").status_code == 200
        assert all(map(is_open, streams))


@pytest.mark.hostile("slow connections")
def test_where_all_connections_are_taken_the_owner_with_the_most_streams_loses_one(flash_home: Path) -> None:
    with limited(flash_home, connections=10) as team, ExitStack() as stack:
        mallory, alice = team.token("mallory", "read"), team.token("alice")
        streams = [stack.enter_context(stream(team, mallory)) for _ in range(8)]
        own = [stack.enter_context(stream(team, alice)) for _ in range(2)]
        assert all(map(begins, [*streams, *own]))
        with team.http(team.token("bob")) as http:
            assert http.get("/metrics").status_code == 200
        wait_for(lambda: sum(map(is_open, streams)) < 8)
        assert all(map(is_open, own))


def own_key(team: Team, run_id: str, *lines: str) -> bytes:
    """The headers of a request that the key of a rollout would open."""
    return request(team, "POST", f"/gateway/{run_id}/0/v1/chat/completions", *lines)


def request(team: Team, method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"host: 127.0.0.1:{team.port}", *lines, "", ""]).encode()


@pytest.mark.hostile("slow connections")
def test_who_has_no_token_fills_no_memory_and_learns_of_no_run(flash_home: Path) -> None:
    run = queued_run(flash_home)
    with limited(flash_home) as team:
        with connect(team, own_key(team, run.id, "content-length: 100000000000")) as connection:
            assert answer(connection).startswith(b"HTTP/1.1 413")
        said: set[str] = set()
        for run_id in (run.id, "run-", "run-zzzzzzzz"):
            with connect(team, own_key(team, run_id, "connection: close", "content-length: 0")) as connection:
                head, _, body = answer(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401")
            said.add(body.decode())
        assert len(said) == 1 and "run-" not in said.pop()
        with connect(team, b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://localhost:[\r\n\r\n") as connection:
            assert connection.recv(12) == b"HTTP/1.1 403"


@pytest.mark.hostile("slow connections")
@pytest.mark.parametrize("proxies", [[], ["127.0.0.1"]])
def test_the_oldest_stranger_of_an_address_makes_room_whatever_it_does(flash_home: Path, proxies: list[str]) -> None:
    with limited(flash_home, connections_per_address=5, proxies=proxies) as team, ExitStack() as stack:
        half = request(team, "POST", "/ui/sign-in", "x-forwarded-for: 203.0.113.7", "content-length: 1000") + b"token="
        opened = [stack.enter_context(connect(team, half)) for _ in range(8)]
        wait_for(lambda: sum(map(is_open, opened)) == 5)
        assert is_open(opened[-1])
        with team.http(team.token("alice")) as http:
            assert http.get("/metrics").status_code == 200


def routes() -> list[tuple[str, str]]:
    """(method, path) of each route of the server, and of methods that it does not have."""
    gate = application(build_server(), "127.0.0.1", Admission(authenticate=True))
    results: list[tuple[str, str]] = []
    for route in cast("Any", gate.app).app.router.routes:
        path = re.sub(r"{\w+(:path)?}", "x", route.path.replace("{rank:int}", "0"))
        results += [(method, path) for method in sorted({*(route.methods or ()), "GET", "POST"} - {"HEAD"})]
    return results


@pytest.mark.hostile("slow connections")
def test_a_strangers_body_has_ten_seconds_on_every_route_and_holds_no_answer_up(flash_home: Path, monkeypatch):
    monkeypatch.setattr(connections, "STRANGER_BODY_S", 0.5)
    bodies = {"content-length: 90000": b"x", "transfer-encoding: chunked": b"1\r\nx\r\n"}
    with limited(flash_home, connections_per_address=500) as team, ExitStack() as stack:
        sent = [
            (route, stack.enter_context(connect(team, request(team, *route, line) + body)))
            for route in routes()
            for line, body in bodies.items()
        ]
        for route, connection in sent:
            said = answer(connection)
            expected = rb"408" if route == ("POST", "/ui/sign-in") else rb"(200|303|40[145]|413)"
            assert re.match(rb"HTTP/1.1 " + expected, said) and said.count(b"HTTP/1.1") == 1, (route, said)


@pytest.mark.hostile("slow connections")
def test_a_strangers_body_ends_at_64_kib_on_every_route(flash_home: Path) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with team_server() as team:
        for route in routes():
            head = request(team, *route, "transfer-encoding: chunked")
            with connect(team, head) as connection, pytest.raises(ConnectionError):
                for _ in range(1000):
                    connection.sendall(chunk)


@pytest.mark.hostile("slow connections")
def test_a_thousand_strangers_fill_no_memory_and_shut_nobody_out(flash_home: Path) -> None:
    port = free_port()
    with serving(port) as server, ExitStack() as stack:
        team = Team(port)
        token = (flash_home / tokens.LOCAL_TOKEN).read_text().strip()
        http = stack.enter_context(team.http(token))
        assert http.get("/metrics").status_code == 200
        process = psutil.Process(fork_of(server.pid))
        idle = process.memory_info().rss
        half = [request(team, "POST", path, "content-length: 4000000") for path in ("/ui/sign-in", "/gateway/x/0/v1/y")]
        strangers: deque[socket.socket] = deque()
        for number in range(1000):
            address = f"127.0.0.{2 + number % 10}"
            connection = socket.create_connection(("127.0.0.1", port), WAIT_S, source_address=(address, 0))
            stack.callback(connection.close)
            strangers.append(connection)
            with suppress(ConnectionError):
                connection.sendall([*half, HALF][number % 3] + b"a" * 60_000)
            if len(strangers) > 500:
                strangers.popleft().close()
            if number % 100 == 99:
                with team.http(token) as another:
                    assert another.get("/metrics").status_code == 200
        assert http.get("/metrics").status_code == 200
        assert process.memory_info().rss < 2 * idle


def test_the_key_of_a_rollout_is_known_before_the_body(flash_home: Path) -> None:
    run, writer = started_run(flash_home)
    Path(references.environment(open_store(), run.environment_reference).path, "environment.toml").write_text(
        "gateway = true\n"
    )
    worker = socket.create_server(("127.0.0.1", 0))
    writer.opens_gateway([worker.getsockname()[1]], "ab" * 32)
    key = new_key("ab" * 32)
    with worker, team_server() as team:
        for wrong in (new_key("cd" * 32), key[:-1], f"{key}0", "sk-", "", "ab" * 32, "\u00e9"):
            head = own_key(team, run.id, f"authorization: Bearer {wrong}", "content-length: 1000")
            with connect(team, head) as connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 401 "), wrong
        for header in (f"authorization: Bearer {key}", f"x-api-key: {key}"):
            with connect(team, own_key(team, run.id, header, "content-length: 300000")) as connection:
                connection.sendall(b"x" * 300_000)
                asked, _ = worker.accept()
                with asked:
                    received = b""
                    while len(received.partition(b"\r\n\r\n")[2]) < 300_000:
                        received += asked.recv(1 << 16)
                    asked.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_bad_requests_of_strangers_fill_no_log(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    few = connections.FEW_WARNINGS
    few._passed_at.clear()
    with limited(flash_home) as team:
        logging.getLogger("uvicorn.error").addHandler(handler)
        try:
            for again in (False, True):
                if again:
                    few._passed_at.clear()  # a minute later
                for _ in range(30):
                    with connect(team, b"NO HTTP\r\n\r\n") as connection:
                        assert answer(connection).startswith(b"HTTP/1.1 400")
        finally:
            logging.getLogger("uvicorn.error").removeHandler(handler)
    said = "Invalid HTTP request received."
    assert [line for line in lines if said in line] == [said, f"{said} (29 more before)"]


async def test_blanks_around_header_values_are_gone_and_those_inside_stay():
    """RFC 9110 section 5.5. The SDK compares such values with the body of the request."""
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = LimitedConfig(app, "127.0.0.1", 0, ServerSettings(), lifespan="off")
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: LimitedProtocol(config, state, {}), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nmcp-name: \t catalog \t \r\nuser-agent:a b\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert seen == [(b"host", b"h"), (b"mcp-name", b"catalog"), (b"user-agent", b"a b")]
