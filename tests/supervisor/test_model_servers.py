"""Deployments: the rules on a quick scripted server, the whole on vLLM's own with the tiny model."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from anyio.to_thread import run_sync

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.recordings import Recording
from flash_mcp.protocol.records import Deployment
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue, references
from flash_mcp.state.owners import LOCAL, Caller, Quotas, acting_as
from flash_mcp.state.serving import find_deployment, request, request_stop
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor import model_servers
from flash_mcp.supervisor.launch.base import Handle
from flash_mcp.supervisor.launch.local import LocalLauncher, ProcessRecord
from flash_mcp.supervisor.loop import WORKER, Supervisor
from flash_mcp.supervisor.process import is_supervised
from flash_mcp.supervisor.server import ADMIN_KEY, Server, check_serving_port, idle_minutes, server_of
from flash_mcp.tools import deploy as deploy_tools
from flash_mcp.tools.deploy import Message, _answer, chat, deploy, describe, undeploy
from flash_mcp.tools.rollouts import rollouts
from flash_mcp.tools.snippets import calls_of
from tests.forked import fork_of
from tests.places import TESTS
from tests.ports import free_port
from tests.samples import sample_rollout
from tests.supervisor.test_loop import HASTE
from tests.waiting import WAIT_S, wait_for
from tests.watch import is_running, listening_ports
from worker import serving
from worker.rollouts.transcript import ChatTemplate

pytestmark = pytest.mark.slow

NEEDS_CURL = pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
SCRIPTED = (sys.executable, str(TESTS / "serving_worker.py"))
"""A worker whose servers are scripted."""


def make_adapter(folder: Path, rank: int = 8, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, **config}))
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(8))
    return folder


def make_run(store: Store, model: str, checkpoints: dict[int, Path]) -> str:
    """A run of `model` that has saved these adapters by step."""
    environment = store.add_environment(name="sums", digest="0" * 16, path="/nowhere", size_bytes=1)
    run, _ = queue.enqueue(store, resolve(RunSpec(environment="sums", model=model)), environment)
    folder = RunFolder(run.folder)
    folder.create(queue.job(run))
    writer = RunWriter(folder, 1)
    for step, adapter in checkpoints.items():
        writer.commit_checkpoint(step, adapter, {})
    queue.request_cancel(store, run.id)  # no supervisor shall train it
    return run.id


# -- the rules, on a scripted server ---------------------------------------------------------------


@pytest.fixture
def store(flash_home: Path) -> Store:
    return Store(flash_home)


@pytest.fixture
def deployments(store: Store) -> Iterator[Supervisor]:
    yield new_supervisor(store.base)
    stop_all(store.base)


def new_supervisor(base: Path, worker: Sequence[str] = SCRIPTED, **timeouts: float) -> Supervisor:
    timing = dataclasses.replace(HASTE, **timeouts)
    return Supervisor(base, launcher=LocalLauncher(base / "attempts", gpus=[]), worker=worker, timeouts=timing)


def stop_all(base: Path) -> None:
    """End the model servers of a state directory."""
    launcher = LocalLauncher(base / "attempts", gpus=[])
    for record in (base / "attempts").glob("srv-*"):
        launcher.cancel(Handle(record.name, ""))


def until(supervisor: Supervisor, condition: Callable[[], Any]) -> Any:
    """Tick until the condition holds."""
    supervisor.tick()
    return wait_for(condition, tick=supervisor.tick)


def settle(supervisor: Supervisor, deployment_id: str, state: str) -> Deployment:
    """Tick until the deployment is in `state`."""
    until(supervisor, lambda: supervisor.store.deployment(deployment_id).state == state)
    return supervisor.store.deployment(deployment_id)


def served(store: Store, supervisor: Supervisor, folder: Path) -> tuple[Deployment, Server, int]:
    """A deployment that is ready, its server and the server's process."""
    row = settle(supervisor, request(store, make_run(store, "toy", {1: make_adapter(folder)})).id, "ready")
    return row, server_for(store, row), server_pid(store, row)


def server_for(store: Store, row: Deployment) -> Server:
    server = server_of(store.base, row)
    assert server
    return server


def leader(store: Store, row: Deployment) -> int:
    """The first process of the attempt that serves it."""
    record = ProcessRecord.read(store.base / "attempts" / f"{row.server_run}-{row.server_attempt}")
    assert record
    return fork_of(record.pid)


def server_pid(store: Store, row: Deployment) -> int:
    return psutil.Process(leader(store, row)).children()[0].pid


def engine_pid(store: Store, row: Deployment) -> int:
    folder = RunFolder(store.server_run(str(row.server_run)).folder)
    return int(wait_for(lambda: re.search(r"engine=(\d+)", folder.log_tail(row.server_attempt or 1, 4000)))[1])


def printed(command: Sequence[str]) -> str:
    """What a command that a person pasted prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_of_experts_is_refused_with_the_export_that_works(store: Store, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", target_parameters=["layers.0.mlp.experts.down_proj"])
    run_id = make_run(store, "toy", {3: adapter})
    with pytest.raises(FlashError) as caught:
        request(store, run_id)
    assert caught.value.code == "model_unsupported"
    assert caught.value.fix.startswith(f"checkpoints(run_id='{run_id}@3', export='merged')")


@NEEDS_CURL
def test_the_snippets_of_a_deployment_work_as_they_stand_with_the_prompt_of_training(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    run_id = make_run(store, "toy", {3: make_adapter(tmp_path / "a")})
    row = settle(deployments, request(store, run_id).id, "ready")
    found = calls_of(store, row, server_for(store, row))
    assert not found.has_prompt and "hello" in found.curl
    store.put_rollouts(run_id, "train", 3, [sample_rollout(3, 0, 1.0)])
    found = calls_of(store, row, server_for(store, row))
    assert found.has_prompt and '"temperature": 0, "max_tokens": 512' in found.curl
    assert "    temperature=0,\n    max_tokens=512,\n" in found.python
    for text in (found.curl, found.python):
        assert "Use <calc> to calculate." in text and "What is 3 * 0?" in text
        assert server_for(store, row).api_key not in text
    assert json.loads(printed(["bash", "-c", found.curl]))["choices"]
    assert printed([sys.executable, "-c", found.python]) == "hello\n"
    # A prompt that is too long for a line is cut down to the system message.
    long = sample_rollout(3, 0, 1.0)
    long["messages"][1]["content"] = "why? " * 1000
    store.put_rollouts(run_id, "train", 3, [long])
    shorter = calls_of(store, row, server_for(store, row))
    assert "Use <calc> to calculate." in shorter.curl and "why?" not in shorter.curl


async def test_a_message_is_sent_after_the_opening_of_the_run_unless_it_is_raw(
    store: Store, deployments: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, server, _ = await run_sync(served, store, deployments, tmp_path / "a")

    def sent() -> Any:
        return server.call("/request_body").json()

    answer = await chat(message="What is 7 * 6?")
    assert (answer.opening, answer.precision) == (None, "float32")
    store.put_precision(str(row.run_id), "bfloat16")
    said = (await chat(message="What is 7 * 6?")).precision
    assert said and "float32; its run was computed in bfloat16" in said and f"evaluate(model={row.id!r})" in said
    monkeypatch.setattr(references, "_checkpoint", lambda *_: references.Subject("toy", precision="bfloat16"))
    assert references.find_subject(store, row.id).precision == "float32", "an evaluation measures what is served"
    rows = [sample_rollout(3, index, 1.0) for index in range(3)]
    store.put_rollouts(str(row.run_id), "train", 3, rows)
    assert "message='What is 3 * 0?', side_by_side=true" in describe(store, row).next
    answer = await chat(message="What is 7 * 6?")
    assert answer.opening == "system: Use <calc> to calculate."
    assert [message["role"] for message in sent()["messages"]] == ["system", "user"]
    assert sent()["messages"][-1]["content"] == "What is 7 * 6?"
    assert (sent()["temperature"], sent()["max_tokens"]) == (0.0, 512)
    assert (await chat(message="What is 7 * 6?", raw=True)).opening is None
    assert len(sent()["messages"]) == 1
    assert (await chat(messages=[Message(role="user", content="What is 7 * 6?")])).opening is None
    assert len(sent()["messages"]) == 1


def test_asking_again_finds_the_deployment_and_other_steps_join_its_server_wherever_it_runs(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    run_id = make_run(store, "toy", {step: make_adapter(tmp_path / str(step)) for step in (1, 2, 3)})
    newest = settle(deployments, request(store, run_id).id, "ready")
    assert request(store, run_id, step=3) == newest
    for step, supervisor in ((2, deployments), (1, new_supervisor(store.base, ("/bin/false",)))):
        older = settle(supervisor, request(store, run_id, step=step).id, "ready")
        assert older.id != newest.id and older.server_run == newest.server_run
    assert store.deployment(newest.id).state == "ready"


def test_the_server_ends_with_its_last_deployment_and_leaves_no_process(store, deployments: Supervisor, tmp_path):
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a"), 2: make_adapter(tmp_path / "b")})
    rows = [settle(deployments, request(store, run_id, step=step).id, "ready") for step in (1, 2)]
    ids = [row.id for row in rows]
    server = server_for(store, rows[0])
    engine = engine_pid(store, rows[0])
    request_stop(store, ids[0])
    settle(deployments, ids[0], "stopped")
    assert [entry["id"] for entry in server.call("/models").json()["data"]] == [ids[1]]
    request_stop(store, ids[1])
    settle(deployments, ids[1], "stopped")
    wait_for(lambda: not is_running(engine))
    assert not Path(server.folder).exists() and not store.active_targets()


def reboot(store: Store) -> Supervisor:
    """End the processes as a machine's end does, with records of an earlier boot; the next supervisor."""
    stop_all(store.base)
    for record in (store.base / "attempts").glob("srv-*"):
        slots, boot, stat = record.read_text().split(" ", 2)
        record.write_text(f"{slots} {boot[::-1]} {stat}")
    return new_supervisor(store.base)


def test_a_deployment_goes_on_whenever_its_machine_starts_anew(store: Store, deployments: Supervisor, tmp_path: Path):
    row = request(store, make_run(store, "toy", {1: make_adapter(tmp_path / "a")}))
    until(deployments, lambda: any((store.base / "attempts").glob("srv-*")))  # it does not listen yet
    later = reboot(store)
    server = server_for(store, settle(later, row.id, "ready"))
    later = reboot(store)
    until(later, lambda: store.deployment(row.id).server_attempt == 3)
    row = settle(later, row.id, "ready")
    assert server_for(store, row) == server, "with the same address and key"
    assert store.server_run(str(row.server_run)).preemptions == 2
    request_stop(store, row.id)
    settle(reboot(store), row.id, "stopped")
    assert not list((store.base / "servers").iterdir())


@pytest.mark.usefixtures("unforked")  # what is left of its process group is ended
def test_a_server_that_dies_fails_its_deployments_and_asking_again_starts_another(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    row, _, pid = served(store, deployments, tmp_path / "a")
    engine = engine_pid(store, row)
    os.kill(pid, signal.SIGKILL)
    failed = settle(deployments, row.id, "failed")
    assert failed.error and failed.error["code"] == "deployment_failed" and "engine=" in failed.error["wrote"]
    wait_for(lambda: not is_running(engine))  # the processes of a dead server are ended
    assert request(store, str(row.run_id)).id == row.id
    assert settle(deployments, row.id, "ready").server_run != row.server_run


def test_a_server_that_ends_at_once_fails_with_the_cause_from_its_log(store: Store, deployments: Supervisor, tmp_path):
    run_id = make_run(store, "crash", {1: make_adapter(tmp_path / "a")})
    failed = settle(deployments, request(store, run_id).id, "failed")
    assert failed.error and "the weights are of another model" in failed.error["wrote"]
    assert failed.error["what"] == "the server ended"
    assert "the weights are of another model" in Path(failed.error["values"]["log"]).read_text()
    with pytest.raises(FlashError) as caught:  # a chat without a name says why the last one ended
        anyio.run(partial(chat, message="hello"))
    assert failed.id in caught.value.what and "the weights are of another model" in caught.value.wrote


@pytest.mark.parametrize(("begun", "named"), [("", True), ("INFO:     Application startup complete.\n", False)])
def test_a_server_that_had_answered_is_not_said_to_have_died_of_an_old_request(begun: str, named: bool) -> None:
    log = f"{begun}ValueError: someone's bad request\n" + "INFO: good\n" * 200 + "Killed\n"
    error = serving.explained(log, 1, has_started=serving.STARTED in log)
    cause, _, log_end = error.wrote.partition("\n")
    assert ("someone's" in cause) == named
    assert "Killed" in log_end and "Killed" not in error.what + error.fix
    for cause in ("throwing 'std::bad_alloc'", "MemoryError: ", "CUDA out of memory"):
        assert serving.explained(f"INFO: loading\n{cause}\n", 1, has_started=False).code == "out_of_memory"


@pytest.mark.parametrize("before", ["INFO:     Application startup complete.", "Traceback (most recent"])
def test_a_line_of_the_log_that_looks_like_our_error_is_not_taken_for_it(before: str) -> None:
    ours = FlashError("unknown_model", "x", fix="send the keys").to_dict()
    log = f"{before}\nValueError: raised by a chat template:\n{json.dumps(ours)}\n"
    error = serving.explained(log, 1, has_started=serving.STARTED in log)
    assert "send the keys" not in str(error).partition("\nenvironment or model wrote:\n")[0]


def test_a_server_that_never_answers_fails_in_the_end(store: Store, deployments: Supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "SERVER_START_S", 0.5)
    run_id = make_run(store, "silent", {1: make_adapter(tmp_path / "a")})
    failed = settle(deployments, request(store, run_id).id, "failed")
    assert failed.error and "made no progress" in failed.error["what"]


@pytest.mark.hostile("ports")
def test_who_listens_on_a_servers_port_before_it_gets_no_key(store: Store, deployments: Supervisor, tmp_path: Path):
    requests: list[str] = []

    class Waiting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(str(self.headers["Authorization"]))

        def log_message(self, format: str, *args: Any) -> None: ...

    run_id = make_run(store, "silent", {1: make_adapter(tmp_path / "a")})
    with ThreadingHTTPServer(("127.0.0.1", 0), Waiting) as waiting:
        threading.Thread(target=waiting.serve_forever, daemon=True).start()
        row = request(store, run_id, port=waiting.server_port)
        until(deployments, lambda: [run for run in store.active_servers() if run.phase == "serve"])
        row = store.deployment(row.id)
        engine_pid(store, row)  # it has started, and its worker looks for it twenty times a second
        folder = RunFolder(store.server_run(str(row.server_run)).folder)
        beats = {str(wait_for(folder.beat))}
        until(deployments, lambda: beats.add(str(folder.beat())) or len(beats) > 5)
        waiting.shutdown()
    assert requests == []


def test_an_adapter_that_the_server_refuses_fails_alone(store: Store, deployments: Supervisor, tmp_path: Path) -> None:
    broken = make_adapter(tmp_path / "broken")
    (broken / "broken").touch()
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a"), 2: broken})
    good = settle(deployments, request(store, run_id, step=1).id, "ready")
    bad = settle(deployments, request(store, run_id, step=2).id, "failed")
    assert bad.error and "shapes do not fit" in bad.error["wrote"]
    assert store.deployment(good.id).state == "ready"


def test_an_adapter_of_higher_rank_restarts_the_server_for_all(store: Store, deployments: Supervisor, tmp_path: Path):
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a"), 2: make_adapter(tmp_path / "b", rank=128)})
    small = settle(deployments, request(store, run_id, step=1).id, "ready")
    large = settle(deployments, request(store, run_id, step=2).id, "ready")
    assert settle(deployments, small.id, "ready").server_run == large.server_run != small.server_run


def test_a_model_that_cannot_be_found_fails_with_the_worker_s_own_error(store: Store, tmp_path: Path) -> None:
    supervisor = new_supervisor(store.base, WORKER)
    run_id = make_run(store, str(tmp_path / "gone"), {1: make_adapter(tmp_path / "a")})
    failed = settle(supervisor, request(store, run_id).id, "failed")
    assert failed.error and failed.error["code"] == "unknown_model"
    assert str(tmp_path / "gone") in failed.error["values"]["folder"]


def test_a_port_that_is_taken_is_refused_at_once_and_fails_if_it_was_taken_meanwhile(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a")})
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(FlashError) as caught:
        anyio.run(partial(deploy, run_id, port=taken.getsockname()[1], wait_s=0.0))
    assert caught.value.code == "port_taken" and store.deployments() == []
    row = request(store, run_id, port=(port := free_port()))
    with socket.create_server(("127.0.0.1", port)):
        failed = settle(deployments, row.id, "failed")
    assert failed.error and failed.error["code"] == "port_taken"


def test_another_port_for_a_model_that_is_served_is_refused(store: Store, deployments: Supervisor, tmp_path: Path):
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a"), 2: make_adapter(tmp_path / "b")})
    row = request(store, run_id, step=1)
    until(deployments, lambda: server_of(store.base, store.deployment(row.id)))  # it has not answered yet
    with pytest.raises(FlashError, match="is served on port"):
        check_serving_port(store, run_id, 1)


def test_a_name_stands_for_one_deployment_and_an_id_is_nobody_elses_name(store: Store, tmp_path: Path) -> None:
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a"), 2: make_adapter(tmp_path / "b")})
    row = request(store, run_id, step=1, name="best")
    assert find_deployment(store, "best") == find_deployment(store, row.id) == find_deployment(store, None) == row
    with pytest.raises(FlashError, match="is taken by"):
        request(store, run_id, step=2, name="best")

    store.update_deployment(request(store, run_id, step=2, name="posing").id, name=row.id)
    assert find_deployment(store, row.id).id == row.id
    store.update_deployment(row.id, state="failed")
    assert find_deployment(store, "best").state == "failed"


def test_a_server_that_cannot_even_be_prepared_fails_its_deployments(store: Store, tmp_path: Path) -> None:
    supervisor = new_supervisor(store.base, trouble_s=0.1)
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a")})
    (store.base / "servers").write_text("no folder")
    failed = settle(supervisor, request(store, run_id).id, "failed")
    (store.base / "servers").unlink()
    assert failed.error and "did not pass" in failed.error["what"]
    settle(supervisor, request(store, run_id).id, "ready")


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([{"error": {"message": "EngineCore encountered an issue", "code": 500}}], "EngineCore encountered an issue"),
        ([], "it ended before the answer did"),
    ],
)
def test_an_answer_that_is_broken_off_is_no_long_one(chunks: list[Any], said: str, tmp_path: Path) -> None:
    begun = {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}
    with streaming([begun, *chunks], tmp_path) as server, pytest.raises(FlashError) as caught:
        anyio.run(_answer, server, {"model": "toy", "messages": []})
    assert said in caught.value.account and "EngineCore" not in caught.value.what


def test_streamed_tool_calls_are_put_together_and_shown(tmp_path: Path) -> None:
    def part(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments, **more}}

    parts = [
        [{**part(0, "", name="add"), "id": "a"}],
        [part(0, '{"x": '), {**part(1, "{}", name="stop"), "id": "b"}],
        [part(0, "1}")],
    ]
    chunks: list[Any] = [{"choices": [{"delta": {"tool_calls": each}}]} for each in parts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    with streaming(chunks, tmp_path) as server:
        answer = anyio.run(_answer, server, {"model": "toy", "messages": []})
    assert answer.text == 'add({"x": 1})\nstop({})'
    assert answer.tool_calls == [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]


@contextmanager
def streaming(chunks: list[Any], folder: Path) -> Generator[Server]:
    """A server that answers with these events."""

    class Streaming(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield Server(str(folder), "toy", listening.server_port, "key")
        listening.shutdown()


def test_a_run_without_a_checkpoint_or_with_a_damaged_one_is_refused(store: Store, tmp_path: Path) -> None:
    empty = make_run(store, "toy", {})
    with pytest.raises(FlashError) as caught:
        request(store, empty)
    assert caught.value.code == "unknown_checkpoint" and "it ended before it saved one" in str(caught.value)
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a"), 2: make_adapter(tmp_path / "b")})
    saved = RunFolder(store.run(run_id).folder).checkpoints.verify(2)
    Path(saved["path"], "adapter_model.safetensors").write_bytes(b"")
    assert request(store, run_id).step == 1, "the newest good one"
    with pytest.raises(FlashError, match=r"^\[checkpoint_corrupt"):
        request(store, run_id, step=2)
    with pytest.raises(FlashError, match=r"no checkpoint at step 9.*\[1, 2\]"):
        request(store, run_id, step=9)


def test_keys_are_their_owners_alone_and_a_server_that_no_deployment_needs_is_ended(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    row, server, pid = served(store, deployments, tmp_path / "a")
    for path in map(Path, (server.file, f"{server.folder}/{ADMIN_KEY}")):
        assert path.stat().st_mode & 0o077 == 0
    assert server.admin_key not in Path(server.file).read_text()
    for process in (pid, leader(store, row)):
        assert server.admin_key not in " ".join(psutil.Process(process).cmdline())
        assert server.api_key not in " ".join(psutil.Process(process).cmdline())
    assert server.api_key not in json.dumps(vars(row))

    store.update_deployment(row.id, state="failed")
    until(new_supervisor(store.base), lambda: not is_running(pid))
    assert not Path(server.folder).exists()


# -- servers that hang, and servers that nobody uses ------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_servers, "EVERY_S", 0.02)
    monkeypatch.setattr(model_servers, "LOOK_S", 0.02)
    monkeypatch.setattr(model_servers, "SILENT_S", 0.5)
    monkeypatch.setattr(model_servers, "PING_TIMEOUT_S", 1.0)
    monkeypatch.setattr(model_servers, "TOKEN_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_is_replaced_with_the_same_address_and_key_and_once_only(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    first, hung, pid = served(store, deployments, tmp_path / "a")
    assert describe(store, first).precision == "float32", "as the server's log says"
    store.put_precision(str(first.server_run), "bfloat16")
    os.kill(pid, signal.SIGSTOP)
    until(deployments, lambda: store.deployment(first.id).server_attempt == 2)
    again = settle(deployments, first.id, "ready")
    server = server_for(store, again)
    assert (again.base_url, server.api_key, again.error) == (first.base_url, hung.api_key, None)
    assert store.server_run(str(first.server_run)).precision == "bfloat16", "what the first attempt chose holds"
    os.kill(server_pid(store, again), signal.SIGSTOP)
    failed = settle(deployments, first.id, "failed")
    assert failed.error and failed.error["code"] == "unresponsive"


@pytest.mark.usefixtures("impatient")
def test_a_server_that_computes_nothing_is_replaced_though_it_answers(store: Store, deployments: Supervisor, tmp_path):
    run_id = make_run(store, "stuck", {1: make_adapter(tmp_path / "a")})
    first = settle(deployments, request(store, run_id).id, "ready")
    until(deployments, lambda: store.deployment(first.id).server_attempt == 2)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_computes_others_tokens_first_does_not_hang(tmp_path: Path) -> None:
    class Busy(BaseHTTPRequestHandler):
        tokens = 0

        def do_GET(self) -> None:
            Busy.tokens += 1
            counted = f'vllm:generation_tokens_total{{model_name="toy"}} {Busy.tokens}.0\n'
            body = '{"idle_s": 0}' if self.path == "/v1/idle" else counted
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            time.sleep(1.5)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        (tmp_path / ADMIN_KEY).write_text("admin")
        server = Server(str(tmp_path), "toy", listening.server_port, "key")
        assert model_servers.examine(server, "dep-1") is not None
        listening.shutdown()


@pytest.mark.usefixtures("impatient")
def test_a_server_that_nobody_uses_ends_and_says_so_and_how_to_start_it_again(store, deployments: Supervisor, tmp_path):
    run_id = make_run(store, "idle", {1: make_adapter(tmp_path / "a")})
    row = request(store, run_id)
    settle(deployments, row.id, "ready")
    assert "after 60 minutes without a request" in describe(store, settle(deployments, row.id, "stopped")).next
    for reference in (None, row.id):
        with pytest.raises(FlashError) as caught:
            anyio.run(partial(chat, reference, message="hello"))
        assert caught.value.code == "unknown_deployment"
        assert "after 60 minutes without a request" in caught.value.what
        assert f"deploy(run_id={run_id!r}, step=1)" in caught.value.fix
    assert request(store, run_id).error is None
    assert settle(deployments, row.id, "ready")


def test_an_hour_without_requests_is_the_operators_to_change_for_those_without_their_own(store: Store, tmp_path: Path):
    settings = store.base / "settings.toml"
    run_id = make_run(store, "toy", {1: make_adapter(tmp_path / "a")})
    others = request(store, run_id)
    own = request(store, run_id, name="own", idle_minutes=7)
    settings.write_text("[serving]\nidle_minutes = 0.5\n")
    assert [idle_minutes(row, store.base) for row in (others, own)] == [0.5, 7]
    settings.write_text("[serving")
    assert [idle_minutes(row, store.base) for row in (others, own)] == [60, 7]


@pytest.mark.usefixtures("impatient")
def test_a_deployment_ends_after_its_own_minutes_and_its_server_with_the_last_one(
    store: Store, deployments: Supervisor, tmp_path: Path
) -> None:
    run_id = make_run(store, "idle", {1: make_adapter(tmp_path / "a")})
    kept = request(store, run_id, name="kept", idle_minutes=0)
    brief = request(store, run_id, name="brief", idle_minutes=3)
    settle(deployments, kept.id, "ready")
    ended = settle(deployments, brief.id, "stopped")
    assert ended.error and "after 3 minutes without a request" in ended.error["what"]
    server, pid = server_for(store, ended), server_pid(store, ended)

    def loaded() -> list[str]:
        return [each["id"] for each in server.call("/models").json()["data"]]

    wait_for(lambda: loaded() == [kept.id])
    assert describe(store, kept).idle_minutes == 0

    request(store, run_id, name="kept", idle_minutes=4)
    ended = settle(deployments, kept.id, "stopped")
    assert ended.error and "after 4 minutes without a request" in ended.error["what"]
    assert not is_running(pid)


def test_a_chat_that_gets_no_token_in_its_time_is_an_error_and_no_empty_text(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(deploy_tools, "CHAT_LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        server = Server(str(tmp_path), "toy", hung.getsockname()[1], "key")
        with pytest.raises(FlashError) as caught:
            anyio.run(_answer, server, {"model": "toy", "messages": []})
    assert caught.value.code == "unresponsive"


@pytest.mark.hostile("other owners")
async def test_chats_of_one_owner_leave_the_model_servers_to_others(store: Store, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        hung.settimeout(WAIT_S)
        open_store()
        (store.base / "servers" / "srv-1").mkdir(parents=True)
        Server(str(store.base / "servers" / "srv-1"), "toy", hung.getsockname()[1], "key").write()
        for owner in ("alice", "bob"):
            run_id = make_run(store, "toy", {1: make_adapter(tmp_path / owner)})
            store.execute("UPDATE runs SET owner = ? WHERE id = ?", [owner, run_id])
            values = {"id": f"dep-{owner}", "owner": owner, "name": "d", "model": "toy", "run_id": run_id, "step": 1}
            store.add_deployment({**values, "state": "ready", "server_run": "srv-1"})

        async def say(who: Caller, deployment: str) -> None:
            with acting_as(who):
                await chat(deployment, message="hello", raw=True)

        alice, bob = (Caller(owner, limits=Quotas(chats=2)) for owner in ("alice", "bob"))
        async with anyio.create_task_group() as group:
            for who in (alice, alice, bob, LOCAL, LOCAL, LOCAL):
                group.start_soon(say, who, "dep-bob" if who is bob else "dep-alice")
            waiting = [(await run_sync(hung.accept))[0] for _ in range(6)]
            with pytest.raises(FlashError, match=r"^\[rate_limited.*2 chats of yours wait for their answers"):
                await say(alice, "dep-alice")
            group.cancel_scope.cancel()
        for connection in waiting:
            connection.close()
    with pytest.raises(FlashError, match="the server ended the answer early"):
        await say(alice, "dep-alice")


def test_a_chat_keeps_the_tool_calls_that_came_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_tools, "CHAT_LIMIT_S", 3.0)
    call = {"index": 0, "id": "1", "function": {"name": "add", "arguments": '{"a": 1'}}
    chunk = {"choices": [{"delta": {"tool_calls": [call]}}]}
    with socket.create_server(("127.0.0.1", 0)) as slow, ThreadPoolExecutor(1) as pool:

        def respond() -> None:
            with slow.accept()[0] as connection:
                connection.sendall(f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps(chunk)}\n\n".encode())
                while connection.recv(65536):  # until the client gives up
                    pass

        pool.submit(respond)
        server = Server(str(tmp_path), "toy", slow.getsockname()[1], "key")
        answer = anyio.run(_answer, server, {"model": "toy", "messages": []})
    assert (answer.text, answer.finish) == ('add({"a": 1)', "timeout")


# -- the whole, on vLLM ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served_home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    home = tmp_path_factory.mktemp("served-home")
    yield home
    _end_supervisor(home)
    stop_all(home)


@pytest.fixture
def vllm_store(served_home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("FLASH_HOME", str(served_home))
    return open_store()


def _end_supervisor(home: Path) -> None:
    for process in psutil.process_iter(["cmdline"]):
        if str(home) in (process.info["cmdline"] or []) and "flash_mcp.supervisor" in process.info["cmdline"]:
            process.kill()
    wait_for(lambda: not is_supervised(home))  # its threads may hold the lock for a moment longer


async def ready(run_id: str, **values: Any) -> Any:
    """Deploy, calling again as the tool says until it is ready."""
    with anyio.fail_after(600):
        while (result := await deploy(run_id, **values)).state == "starting":
            assert "call deploy again" in result.next
    assert result.state == "ready", result
    return result


async def test_nothing_deployed_is_told_as_such(vllm_store: Store) -> None:
    with pytest.raises(FlashError) as caught:
        await chat(message="hello")
    assert caught.value.code == "unknown_deployment" and "deploy" in caught.value.fix
    with pytest.raises(FlashError, match=r"^\[unknown_deployment"):
        await undeploy("dep-00000000")
    with pytest.raises(FlashError, match=r"^\[unknown_run"):
        await deploy("run-00000000")


LOOPS = (
    "{% if messages[0]['content'] == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
"""A chat template that is found out by no check before."""


@NEEDS_CURL
async def test_a_checkpoint_is_deployed_talked_to_and_undeployed(vllm_store: Store, tiny_model, tiny_adapter, tmp_path):
    misfit = tmp_path / "misfit"
    misfit.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (misfit / name).write_bytes((tiny_adapter / name).read_bytes())
    config = json.loads((misfit / "adapter_config.json").read_text())
    (misfit / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    looping = tmp_path / "looping"
    shutil.copytree(tiny_model, looping)
    template = looping / "chat_template.jinja"
    template.write_text(LOOPS + template.read_text())
    tiny_model = looping
    run_id = make_run(vllm_store, str(tiny_model), {5: tiny_adapter, 6: tiny_adapter, 7: misfit})

    started = await deploy(run_id, step=5, wait_s=0)
    assert started.state == "starting"
    with pytest.raises(FlashError, match=r"^\[not_ready"):
        await chat(started.deployment, message="hello")

    first = await ready(run_id, step=5)
    assert first.deployment == started.deployment

    vllm_store.put_rollouts(run_id, "train", 5, [sample_rollout(5, 0, 1.0)])
    shown = await ready(run_id, step=5)
    answered = json.loads(await run_sync(printed, ["bash", "-c", shown.curl]))
    assert "Z" in answered["choices"][0]["message"]["content"]
    assert "Z" in await run_sync(printed, [sys.executable, "-c", shown.python])

    both = await chat(message="hello", side_by_side=True, max_tokens=32)
    assert both.base and both.adapter.text.count("Z") > 20 > both.base.text.count("Z")
    assert both.adapter.completion_tokens == 32 and both.adapter.finish == "length"
    talk = [Message(role=role, content=text) for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    assert (await chat(first.deployment, messages=talk, max_tokens=4)).adapter.prompt_tokens > 20
    with pytest.raises(FlashError, match=r"^\[prompt_too_long"):
        await chat(message="x" * 5000)
    with pytest.raises(FlashError, match="either message or messages"):
        await chat()
    with pytest.raises(FlashError, match="the server refused") as caught:
        await chat(message="loop", raw=True)
    assert "the chat template took longer than 5 s" in caught.value.wrote
    assert (await chat(message="hello", max_tokens=4)).adapter.text
    await talk_with_tools(vllm_store, run_id, first.deployment, tiny_model)
    await records_from_now_on(vllm_store, run_id, first.deployment)

    # The endpoint is anybody's who has the key, and nobody's else.
    row = vllm_store.deployment(first.deployment)
    server = server_for(vllm_store, row)
    assert server.file == first.api_key_file
    async with httpx.AsyncClient(base_url=first.base_url, trust_env=False) as client:
        await refuses_what_is_no_users(client, server, leader(vllm_store, row), tiny_adapter)
        models = (await client.get("/models", headers=server.headers)).json()["data"]
    assert {entry["id"] for entry in models} == {str(tiny_model), first.deployment}
    with acting_as(Caller("alice")):  # who is elsewhere cannot reach it
        elsewhere = describe(vllm_store, row)
        assert (elsewhere.state, elsewhere.base_url, elsewhere.api_key_file) == ("ready", None, None)

    # What the supervisor's checks read is there.
    assert model_servers.examine(server, first.deployment) is not None and model_servers._tokens(server) > 20
    assert 0 < model_servers.idle_seconds(server) < 600

    # Another supervisor finds the server; a second adapter joins it and one that does not fit is
    # told.
    _end_supervisor(vllm_store.base)
    pid = leader(vllm_store, row)
    second = await ready(run_id, step=6)
    assert vllm_store.deployment(second.deployment).server_run == row.server_run
    with pytest.raises(FlashError) as caught:
        await ready(run_id, step=7)
    assert caught.value.code == "deployment_failed" and "DoRA" in str(caught.value)
    with pytest.raises(FlashError, match="2 deployments"):
        await chat(message="hello")

    group = [process.pid for process in psutil.process_iter() if _group(process.pid) == pid]
    assert len(group) >= 3
    for deployment in (first.deployment, second.deployment):
        assert (await undeploy(deployment)).state == "stopped"
    assert (await undeploy(first.deployment)).state == "stopped", "twice is once"
    wait_for(lambda: not any(is_running(process) for process in group))
    with pytest.raises(FlashError, match=r"^\[unknown_deployment"):
        await chat(first.deployment, message="hello")


async def talk_with_tools(store: Store, run_id: str, deployment: str, model: Path) -> None:
    """A run's tools are shown to the model as in training, token for token."""
    from transformers import AutoTokenizer  # noqa: PLC0415  a test that is not slow cannot

    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool = {"name": "add", "description": "", "parameters": parameters}
    tools = [{"type": "function", "function": tool}]
    store.put_rollouts(run_id, "train", 6, [{**sample_rollout(6, 0, 1.0), "tools": tools}])
    function = {"name": "add", "arguments": '{"x": 1}'}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    talk = [
        Message(role="user", content="add 1"),
        Message(role="assistant", content="", tool_calls=calls),
        Message(role="tool", content="2", tool_call_id="call00000"),
    ]
    answer = (await chat(deployment, messages=talk, max_tokens=4)).adapter
    template = ChatTemplate(AutoTokenizer.from_pretrained(model)).for_tools(tools)
    ids = template.prompt_ids([message.model_dump(exclude_none=True) for message in talk])
    assert answer.prompt_tokens == len(ids)


async def records_from_now_on(store: Store, run_id: str, deployment: str) -> None:
    """A deployment that is asked to records what it computes, token by token, until it is told not to."""
    recording = Recording(store.base, deployment)
    assert (await ready(run_id, step=5, record=True)).record
    said = await chat(deployment, message="Say it", max_tokens=4, seed=7, raw=True)
    assert (await ready(run_id, step=5)).record, "asking again leaves that as it is"
    (line,) = recording.lines()
    assert line["messages"] == [{"role": "user", "content": "Say it"}]
    assert line["answer"]["content"] == said.adapter.text
    assert len(line["prompt_token_ids"]) == said.adapter.prompt_tokens
    assert len(line["token_ids"]) == len(line["logprobs"]) == said.adapter.completion_tokens
    assert max(line["logprobs"]) <= 0.0
    assert rollouts(deployment).rollouts[0].messages[-1].content == said.adapter.text
    await answers_other_apis(store, deployment)
    assert not (await ready(run_id, step=5, record=False)).record
    await chat(deployment, message="not this", max_tokens=4)
    assert [*recording.lines()] == [line]


async def answers_other_apis(store: Store, deployment: str) -> None:
    """They are answered, and not recorded."""
    server = server_for(store, store.deployment(deployment))
    url = f"http://127.0.0.1:{server.port}/v1"
    hello = {"role": "user", "content": "Say it"}
    async with httpx.AsyncClient(base_url=url, headers=server.headers, timeout=60) as client:
        for path, asked in (
            ("/responses", {"input": [hello], "max_output_tokens": 4}),
            ("/messages", {"messages": [hello], "max_tokens": 4}),
        ):
            for streams in (False, True):
                body = {**asked, "model": deployment, "stream": streams}
                answer = await client.post(path, json=body)
                assert answer.is_success, answer.text


OPEN_IN_VLLM = (
    ("POST", "/adapters"),
    ("DELETE", "/adapters/evil"),
    ("POST", "/invocations"),
    ("GET", "/ping"),
    ("GET", "/load"),
    ("POST", "/generative_scoring"),
    ("POST", "/scale_elastic_ep"),
    ("GET", "/openapi.json"),
)
"""Routes of vLLM's that ask for no key."""


async def refuses_what_is_no_users(client: httpx.AsyncClient, server: Server, group: int, adapter: Path) -> None:
    """Neither without a key nor with the users' key can anyone change what is served."""
    assert listening_ports(group) == [server.port], "the engine's own are closed"
    evil = {"name": "evil", "src": str(adapter), "lora_name": "evil", "lora_path": str(adapter)}
    for method, path in (*OPEN_IN_VLLM, ("POST", "/v1/load_lora_adapter")):
        url = f"http://127.0.0.1:{server.port}{path}"
        refused = await client.request(method, url, json=evil)
        assert refused.status_code == httpx.codes.UNAUTHORIZED, path
        refused = await client.request(method, url, json=evil, headers=server.headers)
        assert refused.status_code == httpx.codes.NOT_FOUND, path
    assert (await client.get("/models")).json()["error"]["code"] == "invalid_api_key"


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_a_server_of_this_machine_that_does_not_answer_is_slow_and_on_no_node() -> None:
    error = model_servers.ServingAccess().unreachable("127.0.0.1, port 1", 60.0)
    assert error.code == "unresponsive" and "did not answer" in error.what
    assert "targets.toml" not in error.fix and "ssh" not in error.fix
