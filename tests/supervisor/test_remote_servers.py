"""Deployments on targets: the rules with a node that the test plays, the whole with vLLM's server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from anyio.to_thread import run_sync

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import Listening, trust
from flash_mcp.protocol.records import Deployment, Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.sealing import Receiver
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import costs, queue
from flash_mcp.state.serving import request, request_stop
from flash_mcp.state.store import Store
from flash_mcp.state.targets import Cards, TargetSettings, find_target, key_of, new_target, remove_target, write_target
from flash_mcp.supervisor import model_servers
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher
from flash_mcp.supervisor.launch.devices import cards_for
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.supervisor.model_servers import ModelServers
from flash_mcp.supervisor.reconciler import RunReconciler
from flash_mcp.supervisor.secrets import Vault
from flash_mcp.supervisor.server import Server, server_of
from flash_mcp.supervisor.targets import RemoteTarget
from flash_mcp.tools.catalog import catalog
from flash_mcp.tools.deploy import chat, describe
from flash_mcp.tools.snippets import calls_of
from tests import engines, sshd
from tests.memory_launcher import MemoryLauncher
from tests.places import ROOT, TESTS
from tests.ports import free_port
from tests.supervisor.test_model_servers import NEEDS_CURL, make_adapter, make_run
from tests.waiting import wait_for
from worker.serving import make_certificate

pytestmark = pytest.mark.slow

SCRIPTED = (sys.executable, str(TESTS / "scripted_server.py"))


class Engine(MemoryLauncher):
    """An engine that a test leads: what is submitted waits for a machine."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[str, Launch] = {}
        self.is_down = False

    def submit(self, launch: Launch) -> Handle:
        if self.is_down:
            raise FlashError("target_unreachable", "the engine does not answer", fix="wait")
        self.launches[launch.key] = launch
        self.statuses.setdefault(launch.key, JobStatus("pending", "Slurm: Resources"))
        return Handle(launch.key, f"job of {launch.key}")

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        if self.is_down:
            raise FlashError("target_unreachable", "the engine does not answer", fix="wait")
        return super().poll(handles)


class Node:
    """What an attempt does on its node, with a scripted server."""

    def __init__(self, bench: Bench, row: Deployment, scratch: Path) -> None:
        self.bench, self.scratch = bench, scratch
        run = bench.run(row)
        number = run.attempt
        self.key = f"{run.id}-{number}"
        self.writer: RunWriter = RunWriter(bench.folder(row), number)
        token = bench.engine.launches[self.key].environment["FLASH_LAUNCH_TOKEN"]
        self.receiver = Receiver(self.key, token)
        self.writer.offer(self.receiver.offer)
        self.writer.beat(0, "secrets")
        bench.engine.statuses[self.key] = JobStatus("alive")
        bench.nodes.append(self)
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def get_keys(self) -> dict[str, str]:
        sealed: bytes = self.bench.until(self.writer.take_sealed)
        return self.receiver.open(sealed)

    def listen(self, keys: dict[str, str], *, model: str = "toy", told: str = "") -> None:
        """`told` is a certificate that is named instead of the server's own."""
        self.scratch.mkdir()
        certificate = make_certificate(self.scratch, ["127.0.0.1"])
        options = ["--model", model, "--port", str(self.port), "--tls", str(self.scratch)]
        with (self.scratch / "log").open("wb") as log:
            self.process = subprocess.Popen([*SCRIPTED, *options], stderr=log, env={**os.environ, **keys})
        wait_for(self.accepts)
        adapter = str(self.scratch / "adapter-of-the-node")
        where = Listening(["127.0.0.1"], self.port, told or certificate, adapter)
        self.writer.beat(0, "serve")
        self.writer.listens(where.signed(keys["FLASH_ADMIN_KEY"]))

    def accepts(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def requests(self) -> list[str]:
        return [line for line in (self.scratch / "log").read_text().splitlines() if "HTTP/" in line]

    def die(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()
        self.bench.engine.statuses[self.key] = JobStatus("gone", "Slurm job 7: NODE_FAIL")


class Bench:
    def __init__(self, home: Path, storage: Path) -> None:
        self.store = Store(home)
        self.home = home
        fields = {"engine": "slurm", "storage": str(storage), "python": sys.executable, "nodes": ["127.0.0.0/8"]}
        self.settings = new_target(home, "lab", fields)
        write_target(home, "lab", self.settings)
        self.engine = Engine()
        self.nodes: list[Node] = []
        self.servers, self.reconciler = self.new_servers(), self.new_reconciler(self.engine)

    def new_reconciler(self, launcher: Launcher, **seconds: float) -> RunReconciler:
        timeouts = Timeouts(**{"beat_stale_s": 0.3, "cancel_grace_s": 0.05, "retry_delay_s": 0.0, **seconds})
        return RunReconciler(self.store, self.target(launcher), Vault(self.home), timeouts)

    def run(self, row: Deployment) -> Run:
        """Of its server."""
        return self.store.server_run(self.row(row).server_run or "")

    def target(self, launcher: Launcher) -> RemoteTarget:
        return RemoteTarget("lab", self.settings, launcher, key_of(self.home))

    def new_servers(self) -> ModelServers:
        """As of a supervisor that has just started."""
        return ModelServers(self.store, self.home)

    def folder(self, row: Deployment) -> RunFolder:
        return RunFolder(self.run(row).folder)

    def until(self, condition: Callable[[], Any]) -> Any:
        def met() -> Any:
            self.servers.tick()
            self.reconciler.attend(self.store.taken_runs("lab"))
            self.reconciler.maintenance.clear()
            return condition()

        return wait_for(met)

    def row(self, row: Deployment) -> Deployment:
        return self.store.deployment(row.id)

    def settle(self, row: Deployment, state: str) -> Deployment:
        self.until(lambda: self.row(row).state == state)
        return self.row(row)

    def submitted(self, row: Deployment, attempt: int = 1) -> Deployment:
        """Once the engine has its job."""
        self.until(lambda: self.run(row).handle and self.run(row).attempt == attempt)
        return self.row(row)


@pytest.fixture
def bench(flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("LOOK_S", "AGAIN_S"):
        monkeypatch.setattr(model_servers, name, 0.02)
    made = Bench(flash_home, tmp_path / "storage")
    yield made
    made.servers._pool.shutdown(wait=True)
    for node in made.nodes:
        node.die()


@pytest.fixture
def asked(bench: Bench, tmp_path: Path) -> Deployment:
    """A deployment that was asked for."""
    run_id = make_run(bench.store, "toy", {3: make_adapter(tmp_path / "a", rank=16)})
    return request(bench.store, run_id, target="lab")


@NEEDS_CURL
async def test_it_waits_in_the_queue_then_answers_on_its_node_and_leaves_nothing_when_it_ends(
    bench: Bench, asked: Deployment, tmp_path: Path
) -> None:
    bench.until(lambda: bench.run(asked).pending_reason)
    waiting = describe(bench.store, bench.row(asked))
    assert (waiting.target, waiting.pending_reason) == ("lab", "Slurm: Resources")
    assert "it waits: Slurm: Resources" in str(waiting.next)
    with pytest.raises(FlashError, match="the deployment waits: Slurm: Resources"):
        await chat(asked.id, message="hello")

    node = Node(bench, bench.row(asked), tmp_path / "node")
    keys = await run_sync(node.get_keys)
    assert bench.run(asked).pending_reason is None
    assert bench.store.runs() == [bench.store.run(str(asked.run_id))], "a server is no training"
    job = bench.folder(asked).job()
    assert job["serve"] == {"rank": 16, "name": "toy"} and job["init_adapter"]["path"].startswith("artifact:")
    node.listen(keys)
    ready = await run_sync(bench.settle, asked, "ready")
    assert str(describe(bench.store, ready).base_url).startswith("https://127.0.0.1:")
    assert (await chat(asked.id, message="hello")).adapter.text == "hello"
    assert (await chat(message="hello")).adapter.text == "hello"

    server = server_of(bench.home, ready)
    assert server and server.api_key == keys["VLLM_API_KEY"]
    calls = calls_of(bench.store, ready, server)
    for command in (["bash", "-c", calls.curl], [sys.executable, "-c", calls.python]):
        assert "hello" in (await run_sync(lambda command=command: subprocess.check_output(command, text=True)))
    assert not any(value.encode() in stored(bench, tmp_path) for value in keys.values())

    # The next supervisor finds it.
    bench.servers, bench.reconciler = bench.new_servers(), bench.new_reconciler(bench.engine)
    assert request(bench.store, str(asked.run_id)).id == asked.id
    with pytest.raises(FlashError, match="is served on lab already"):
        request(bench.store, str(asked.run_id), target="local")
    request_stop(bench.store, asked.id)
    with pytest.raises(FlashError, match="is ending on lab"):
        request(bench.store, str(asked.run_id), target="lab")
    await run_sync(bench.settle, asked, "stopped")
    assert bench.engine.statuses[node.key].state == "gone"
    await run_sync(bench.until, lambda: stored_files(tmp_path) == [])
    assert not (bench.home / "servers" / str(ready.server_run)).exists()
    again = request(bench.store, str(asked.run_id), target="lab")
    assert again.id == asked.id and again.server_run != asked.server_run


def stored_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "storage").rglob("*") if path.is_file()]


def stored(bench: Bench, folder: Path) -> bytes:
    """All that others can read, and the database."""
    paths = [*folder.rglob("storage/**/*"), *bench.home.glob("*.db*")]
    return b"".join(path.read_bytes() for path in paths if path.is_file())


def test_a_node_that_fails_is_replaced_once_in_a_while(bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(model_servers, "EVERY_S", 0.05)
    node = Node(bench, bench.submitted(asked), tmp_path / "first")
    first_keys = node.get_keys()
    node.listen(first_keys)
    first = bench.settle(asked, "ready")
    node.die()
    row = bench.submitted(bench.settle(asked, "starting"), 2)
    assert row.error and "NODE_FAIL" in row.error["what"]
    second = Node(bench, row, tmp_path / "second")
    keys = second.get_keys()
    assert keys == first_keys  # callers keep theirs
    second.listen(keys)
    ready = bench.settle(asked, "ready")
    assert ready.base_url != first.base_url and ready.error is None
    second.die()
    failed = bench.settle(asked, "failed")
    assert failed.error and "NODE_FAIL" in failed.error["what"]
    assert all(status.state == "gone" for status in bench.engine.statuses.values())


def test_a_server_that_was_lost_after_it_had_served_well_is_replaced_each_time(
    bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flash_mcp.supervisor.reconciler.SERVED_WELL_S", 0.0)
    for number in (1, 2, 3):
        node = Node(bench, bench.submitted(asked, number), tmp_path / f"node{number}")
        bench.until(lambda: bench.run(asked).state == "running")
        node.die()
    bench.submitted(asked, 4)
    assert bench.row(asked).state == "starting"


def test_a_server_that_answers_no_more_on_a_node_that_lives_is_replaced(
    bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_servers, "EVERY_S", 0.05)
    monkeypatch.setattr(model_servers, "SILENT_S", 0.2)
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    node.listen(node.get_keys())
    bench.settle(asked, "ready")
    assert node.process
    node.process.kill()
    bench.submitted(asked, 2)
    row = bench.settle(asked, "starting")
    assert row.error and row.error["code"] == "unresponsive"
    assert bench.engine.statuses[node.key].state == "gone"


def test_a_server_takes_no_slot_and_is_in_no_list_of_runs(bench: Bench, asked: Deployment) -> None:
    assert bench.reconciler.launcher.capacity == 1
    bench.submitted(asked)
    train = started_run_on(bench, "lab")
    bench.until(lambda: bench.store.run(train.id).handle)
    assert bench.store.counts_by_target() == {("lab", "starting"): 1}
    assert [run.id for run in bench.store.active_runs()] == [train.id]
    assert bench.store.run_counts() == {"starting": 1, "cancelled": 1}
    with pytest.raises(FlashError, match="there is no run"):
        bench.store.run(str(asked.server_run))


def started_run_on(bench: Bench, target: str) -> Run:
    (bench.home / "logs").mkdir()
    path = str(bench.home / "logs")
    environment = bench.store.add_environment(name="calc", digest="abcdef123456", path=path, size_bytes=1)
    spec = RunSpec.model_validate({"environment": "calc", "target": target})
    return queue.enqueue(bench.store, resolve(spec), environment)[0]


def test_what_the_node_says_of_its_end_is_the_error(bench: Bench, asked: Deployment, tmp_path: Path) -> None:
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    node.writer.commit_result("failed", 0, FlashError("unknown_model", "no model toy", fix="name one"))
    failed = bench.settle(asked, "failed")
    assert failed.error and failed.error["code"] == "unknown_model"
    assert len(bench.engine.launches) == 1


def test_a_node_that_cannot_be_reached_is_given_back(bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(model_servers, "REACH_S", 0.2)
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    keys = node.get_keys()
    where = Listening(["127.0.0.1"], node.port, make_certificate(tmp_path, ["127.0.0.1"]), "/adapter")
    node.writer.listens(where.signed(keys["FLASH_ADMIN_KEY"]))
    failed = bench.settle(asked, "failed")
    assert failed.error and failed.error["code"] == "target_refused"
    assert f"cannot be reached from here: 127.0.0.1, port {node.port}" in failed.error["what"]
    assert "ssh of lab in targets.toml" in failed.error["fix"]
    bench.until(lambda: bench.engine.statuses[node.key].state == "gone")


def test_a_node_names_no_address_outside_the_networks_of_its_target(
    bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_servers, "REACH_S", 0.2)
    (bench.home / "targets.toml").unlink()
    bench.settings = TargetSettings(**{**bench.settings.model_dump(), "nodes": ["10.9.0.0/16", "10.8.1.1"]})
    write_target(bench.home, "lab", bench.settings)
    assert [str(network) for network in find_target(bench.home, "lab").nodes] == ["10.9.0.0/16", "10.8.1.1/32"]
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    node.listen(node.get_keys())
    failed = bench.settle(asked, "failed")
    assert failed.error and failed.error["code"] == "target_refused" and "if nodes is set" in failed.error["fix"]
    assert node.requests() == []


@pytest.mark.parametrize(
    "lie", [{"addresses": ["db.internal"]}, {"addresses": ["10.0.0.1:22"]}, {"addresses": ["::1"]}, {"port": 443}]
)
def test_what_is_no_address_of_a_node_counts_as_absent(lie: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    writer = RunWriter(folder, 1)
    said = Listening(["10.0.0.1"], 40000, "certificate", "/adapter").signed("key")
    writer.listens(said)
    assert folder.listening(1) == said
    writer.listens({**said, **lie})
    assert folder.listening(1) is None


def test_a_node_behind_a_host_is_reached_through_ssh_and_again_when_that_ended(
    bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.need(sshd.missing())
    monkeypatch.setattr(model_servers, "EVERY_S", 0.05)
    remove_target(bench.home, "lab")
    write_target(bench.home, "lab", bench.settings.model_copy(update={"ssh": "lab"}))
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    node.listen(node.get_keys())
    folder = tmp_path / "sshd"
    folder.mkdir()
    with sshd.running(folder) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        ready = bench.settle(asked, "ready")
        server = server_of(bench.home, ready)
        assert server and server.port != node.port and server.call("/models").is_success
        connected = bench.servers._servers[str(asked.server_run)]
        tunnel = connected.tunnel
        assert tunnel
        tunnel.kill()
        bench.until(lambda: connected.tunnel is not tunnel)
        bench.until(lambda: answers(server))
        assert bench.row(asked).base_url == ready.base_url
        request_stop(bench.store, asked.id)
        bench.settle(asked, "stopped")
        with pytest.raises(httpx.ConnectError):
            server.call("/models")


def answers(server: Server) -> bool:
    with suppress(httpx.TransportError):
        return server.call("/models").is_success
    return False


def test_whoever_else_listens_there_learns_no_key(bench: Bench, asked: Deployment, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(model_servers, "REACH_S", 1.0)
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    other = tmp_path / "other"
    other.mkdir()
    certificate = make_certificate(other, ["127.0.0.1"])
    node.listen(node.get_keys(), told=certificate)
    bench.settle(asked, "failed")
    assert node.requests() == []


def test_an_address_that_the_node_did_not_write_is_refused(bench: Bench, asked: Deployment, tmp_path: Path) -> None:
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    node.get_keys()
    where = Listening(["127.0.0.1"], 1234, make_certificate(tmp_path, ["127.0.0.1"]), "/adapter")
    node.writer.listens(where.signed("a key of somebody else"))
    failed = bench.settle(asked, "failed")
    assert failed.error and "not written by the node" in failed.error["what"]


def test_a_deployment_that_nobody_uses_ends(bench: Bench, asked: Deployment, tmp_path: Path) -> None:
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    node.listen(node.get_keys(), model="idle")
    stopped = bench.settle(asked, "stopped")
    assert stopped.error and "stopped after 60 minutes" in stopped.error["what"]
    assert bench.engine.statuses[node.key].state == "gone"


def test_the_hours_on_a_node_are_counted_and_too_costly_ones_refused(bench: Bench, asked: Deployment, tmp_path: Path):
    priced = bench.settings.model_copy(update={"price_per_hour": 3600.0})
    (bench.home / "targets.toml").unlink()
    write_target(bench.home, "lab", priced)
    limit = '[cost]\ncurrency = "EUR"\nowner_per_day = 5.0\n'
    (bench.home / "settings.toml").write_text(limit)
    started = time.time()
    node = Node(bench, bench.submitted(asked), tmp_path / "node")
    assert describe(bench.store, bench.row(asked)).spent is None, "it waited until now"
    node.listen(node.get_keys())
    bench.settle(asked, "ready")
    bench.store.execute("UPDATE runs SET spec = json_set(spec, '$.gpus', 4) WHERE serves = ?", [asked.id])

    def beat() -> float:
        node.writer.beat(0, "serve")
        return bench.run(asked).used_s

    bench.until(lambda: beat() > 1.5)
    assert costs.over_limit(bench.store) == {"local"}
    request_stop(bench.store, asked.id)
    stopped = bench.settle(asked, "stopped")
    used_s = bench.run(asked).used_s
    assert 1.5 < used_s < time.time() - started
    (shown,) = {describe(bench.store, stopped).spent, catalog("devices").spent}
    assert shown == f"{4 * used_s / 3600:.2f} h, {4 * used_s:.2f} EUR"

    with pytest.raises(FlashError, match=r"^\[quota_exceeded"):
        request(bench.store, str(asked.run_id), target="lab")
    (bench.home / "settings.toml").write_text(limit.replace("5.0", "500"))
    again = request(bench.store, str(asked.run_id), target="lab")
    assert again.state == "starting"
    assert bench.store.used_s_by_target(again.id) == {"lab": 4 * used_s}, "it began anew"


def test_an_engine_that_does_not_answer_is_what_it_waits_for(bench: Bench, asked: Deployment) -> None:
    bench.engine.is_down = True
    bench.until(lambda: "the engine does not answer" in str(bench.run(asked).pending_reason))
    bench.engine.is_down = False
    bench.submitted(asked)
    request_stop(bench.store, asked.id)
    bench.settle(asked, "stopped")


def test_what_cannot_be_served_elsewhere_is_refused(bench: Bench, tmp_path: Path) -> None:
    run_id = make_run(bench.store, "toy", {3: make_adapter(tmp_path / "a")})
    fields = {"engine": "sky", "address": "http://127.0.0.1:1", "storage": "s3://bucket"}
    write_target(bench.home, "clouds", new_target(bench.home, "clouds", fields))

    def refusal(**arguments: Any) -> FlashError:
        with pytest.raises(FlashError) as caught:
            request(bench.store, run_id, **arguments)
        return caught.value

    assert refusal(target="clouds").code == "target_refused" and refusal(target="lap").code == "unknown_target"
    assert "port is for" in refusal(target="lab", port=8000).what
    assert "record is for" in refusal(target="lab", record=True).what
    assert bench.store.deployments() == []


@pytest.mark.parametrize(
    ("model", "memory_gib", "count", "taken"),
    [
        ("o/m-7B", 24, 8, 1),
        ("o/m-14B", 24, 8, 2),
        ("o/m-70B", 80, 8, 2),
        ("o/m-70B", 24, 4, 4),  # it fits none: the server says what is missing
        ("o/m-14B", 24, 1, 1),
        ("o/nobody-knows", 24, 8, 1),
    ],
)
def test_a_server_takes_the_cards_that_hold_its_weights(model: str, memory_gib: float, count: int, taken: int) -> None:
    cards = Cards(name="a card", memory_gib=memory_gib, count=count)
    assert cards_for(model, cards) == taken and cards_for(model, cards.model_copy(update={"kind": "cpu"})) == 1
    assert cards_for(model, None) == 1


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.long
async def test_vllm_serves_the_adapter_from_a_node_that_shares_nothing_but_a_folder(
    flash_home: Path, tmp_path: Path, tiny_model: Path, tiny_adapter: Path
) -> None:
    bench = Bench(flash_home, tmp_path / "storage")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    more = {"env": variables, "home": str(tmp_path / "node")}
    bench.settings = bench.settings.model_copy(update=more)
    bench.reconciler = bench.new_reconciler(LocalLauncher(tmp_path / "engine" / "attempts", []))
    asked = request(bench.store, make_run(bench.store, str(tiny_model), {5: tiny_adapter}), target="lab")
    try:
        await run_sync(lambda: bench.until(lambda: bench.row(asked).state != "starting"))
        ready = bench.row(asked)
        assert ready.state == "ready", ready.error
        both = await chat(message="hello", side_by_side=True, max_tokens=32)
        assert both.base and both.adapter.text.count("Z") > 20 > both.base.text.count("Z")
        server = server_of(flash_home, ready)
        assert server and server.host == "127.0.0.1", "the one that `nodes` allows"
        refuses_others(server)
        (job,) = [
            each
            for each in psutil.process_iter(["cmdline"])
            if "worker.main" in (each.info["cmdline"] or []) and bench.folder(asked).url in each.info["cmdline"]
        ]
        family = [job, *job.children(recursive=True)]
        assert len(family) >= 3
    finally:
        request_stop(bench.store, asked.id)
        await run_sync(bench.settle, asked, "stopped")
        bench.servers._pool.shutdown(wait=True)
    wait_for(lambda: not any(each.is_running() and each.status() != "zombie" for each in family))
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


def refuses_others(server: Server) -> None:
    """Without the key there is nothing, and without the certificate no connection."""
    with httpx.Client(verify=trust(server.certificate), trust_env=False) as client:
        for path in ("/v1/models", "/v1/idle", "/adapters"):
            assert client.get(server.root + path).status_code == 401
            assert client.get(server.root + path, headers={"x-api-key": "no"}).status_code == 401
        told = client.get(f"{server.url}/idle", headers=server.headers).json()
    assert 0 <= told["unwatched_s"] < 60 and told["idle_s"] < 60
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/models", trust_env=False)
