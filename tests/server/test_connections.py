"""Clients that send slowly, or open many connections: over real sockets."""

import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from environments.settings import FILE
from flash_mcp.server import connections
from tests.samples import queued_run, supervised
from tests.server.test_mcp_server import body_of
from tests.teams import Team, team_server
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow
HALF = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "
WHOLE = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@contextmanager
def limited(home: Path, **settings: int) -> Generator[Team]:
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
            assert received.startswith(b"HTTP/1.1 200 ")
            assert b"HTTP/1.1 408 " in received


def test_a_connection_may_be_idle_for_longer_than_headers_may_take(
    flash_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_body_that_arrives_slowly_and_steadily_is_taken(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections, "MIN_BODY_RATE", 0.1)
    with team_server() as team, connect(team, upload(team, 10)) as slow:
        assert slow.recv(4096).startswith(b"HTTP/1.1 100 ")
        for _ in range(10):
            slow.sendall(b"x")
            time.sleep(0.1)
        assert b"upload_invalid" in slow.recv(4096)


@pytest.mark.hostile("slow connections")
def test_who_has_requests_under_way_on_every_connection_is_refused_another(flash_home: Path) -> None:
    with limited(flash_home, connections=2) as team, ExitStack() as stack:
        for owner in ("alice", "bob"):
            under_way = stack.enter_context(connect(team, upload(team, 1000, owner)))
            assert under_way.recv(4096).startswith(b"HTTP/1.1 100 ")
        with connect(team, HALF) as third:
            assert answer(third).startswith(b"HTTP/1.1 503 ")


async def test_a_call_that_takes_longer_than_a_request_may_is_answered(
    flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    first = f"POST /gateway/{run_id}/0/v1/chat/completions HTTP/1.1"
    return "\r\n".join([first, f"host: 127.0.0.1:{team.port}", *lines, "", ""]).encode()


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
            assert connection.recv(12) == b"HTTP/1.1 421"


@pytest.mark.hostile("slow connections")
def test_who_has_no_token_counts_among_the_connections_of_its_address(flash_home: Path) -> None:
    slow = ("content-length: 1000",)
    with limited(flash_home, connections_per_address=5) as team, ExitStack() as stack:
        opened = [stack.enter_context(connect(team, own_key(team, "run-x", *slow))) for _ in range(5)]
        time.sleep(0.5)
        with connect(team, WHOLE) as another:
            assert b"503" in answer(another)[:20]
        assert all(map(is_open, opened))
