"""The run folder's contract, over every kind of file system that it is meant for."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.run_folder import LAUNCH, RunFolder, RunWriter, read_beats
from tests.damage import DAMAGES
from tests.places import TESTS
from tests.ports import free_port
from tests.waiting import WAIT_S

WORKER = TESTS / "scripted_worker.py"
SECRET_KEY = "s3cret-key-that-nobody-must-see"
BUCKET = "runs"


SERVER = """
import logging, sys, threading, time
from moto.moto_server import threaded_moto_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.core.utils import utcnow
from moto.s3.models import S3Backend
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

put, one_at_a_time = S3Response.put_object, threading.Lock()
listed = S3Backend.list_objects
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


def put_object(self):
    with one_at_a_time:  # moto's If-None-Match is looked at before, and not while, an object is put
        return put(self)


def list_objects(*arguments, **named):
    keys, *rest = listed(*arguments, **named)
    now = utcnow()
    return [key for key in keys if (now - key.last_modified).total_seconds() >= Counting.lag], *rest


class Counting(DomainDispatcherApplication):
    requests = 0
    key = sys.argv[3]
    delay = rate = lag = expired = 0.0

    def __call__(self, environ, start_response):
        Counting.requests += 1
        time.sleep(Counting.delay)
        is_old = Counting.key in environ.get("HTTP_AUTHORIZATION", "")
        if Counting.expired == 1 or (Counting.expired and is_old):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [EXPIRED]
        answer = super().__call__(environ, start_response)
        if Counting.rate:
            answer = list(answer)
            time.sleep((int(environ.get("CONTENT_LENGTH") or 0) + sum(map(len, answer))) / Counting.rate)
        return answer


threaded_moto_server.DomainDispatcherApplication = Counting
S3Response.put_object = put_object
S3Backend.list_objects = list_objects
logging.getLogger("werkzeug").setLevel(logging.ERROR)
for line in sys.stdin:
    if line == "start\\n":
        server = ThreadedMotoServer(sys.argv[2], int(sys.argv[1]), verbose=False)
        server.start()
    elif line == "stop\\n":
        server.stop()
    elif " " in line:
        name, value = line.split()
        setattr(Counting, name, float(value))
    print(Counting.requests, flush=True)
"""


class ObjectStore:
    """moto's S3 server; what it holds stays while it is away.

    In a process of its own: a vLLM engine that is started later looks at every module, and trips
    over those of flask."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.port = free_port(host)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{self.port}",
            "AWS_ACCESS_KEY_ID": "key-of-the-test",
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # the client's own retries would hide ours
            "NO_PROXY": f"127.0.0.1,{host}",
        }
        command = [sys.executable, "-c", SERVER, str(self.port), host, self.environment["AWS_ACCESS_KEY_ID"]]
        # File systems are kept for each process, with the endpoint of an earlier store.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell("start")

    def write_keys(self, path: Path) -> Path:
        """A file for `env_file` of a target."""
        path.write_text("\n".join(f"{name}={shlex.quote(each)}" for name, each in self.environment.items()))
        return path

    def end(self) -> None:
        with self._process as server:
            server.kill()

    def requests(self) -> int:
        """How many it has answered."""
        return self._tell("count")

    def _tell(self, what: str) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    @contextmanager
    def frozen(self) -> Generator[None]:
        """It takes connections and says nothing."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def delay(self, seconds: float) -> None:
        """Let each answer take so much longer from now on."""
        self._tell(f"delay {seconds}")

    @contextmanager
    def faulty(self, kind: str, value: float = 1.0) -> Generator[None]:
        """Within, it refuses all keys (`expired`), with 2 the test's own alone, carries so many bytes a second
        for each request (`rate`), or its lists lack what is younger than so many seconds (`lag`)."""
        self._tell(f"{kind} {value}")
        try:
            yield
        finally:
            self._tell(f"{kind} 0")

    @contextmanager
    def away(self) -> Generator[None]:
        self._tell("stop")
        try:
            yield
        finally:
            self._tell("start")


@pytest.fixture(scope="module")
def object_store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield store
    store.end()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("object_store")
        return f"s3://{BUCKET}/{uuid4().hex}/run"
    return f"file://{tmp_path}/run" if request.param == "file" else f"memory://{uuid4().hex}/run"


@pytest.fixture
def folder(url: str) -> RunFolder:
    return RunFolder(url)


def adapter(tmp_path: Path, content: bytes = b"weights") -> Path:
    source = tmp_path / uuid4().hex
    (source / "optimizer").mkdir(parents=True)
    (source / "adapter.bin").write_bytes(content)
    (source / "optimizer" / "state.bin").write_bytes(b"moments")
    return source


def file_system(folder: RunFolder) -> tuple[Any, str]:
    return fsspec.core.url_to_fs(folder.url, use_listings_cache=False)


def files_of(folder: RunFolder) -> dict[str, bytes]:
    filesystem, root = file_system(folder)
    return {path: filesystem.cat_file(path) for path in filesystem.find(root)}


@pytest.mark.slow
def test_an_empty_folder_has_nothing_to_say(folder: RunFolder) -> None:
    assert (folder.newest_epoch(), folder.beat(), folder.result(), folder.is_cancelled()) == (0, None, None, False)
    assert (folder.metric_steps(), folder.rollout_steps(), folder.event_names(), folder.checkpoints.steps()) == (
        {},
        {},
        [],
        [],
    )
    assert folder.checkpoints.newest_good() is None and folder.log_tail(1) == ""
    with pytest.raises(FlashError, match="unknown_run"):
        folder.job()


@pytest.mark.slow
def test_the_job_can_be_written_again_and_read_by_another(folder: RunFolder, url: str) -> None:
    job = {"run_id": "run-1", "spec": {"environment_args": {"name": "Zoë"}}}
    folder.create(job)
    folder.create(job)
    assert RunFolder(url).job() == job


def test_an_epoch_is_claimed_once_and_not_after_a_newer_one(folder: RunFolder, url: str) -> None:
    RunWriter(folder, 1)
    with pytest.raises(FlashError, match="fenced"):
        RunWriter(RunFolder(url), 1)

    RunWriter(folder, 12)
    with pytest.raises(FlashError, match="fenced"):
        RunWriter(folder, 9)
    assert folder.newest_epoch() == 12


def test_of_many_who_claim_an_epoch_at_once_one_gets_it(folder: RunFolder, url: str) -> None:
    barrier, owners = threading.Barrier(6), list[int]()

    def claim(number: int) -> None:
        contender = RunFolder(url)
        barrier.wait(WAIT_S)
        try:
            RunWriter(contender, 3)
            owners.append(number)
        except FlashError as error:
            assert error.code == "fenced"

    threads = [threading.Thread(target=claim, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(owners) == 1


def test_an_owner_notices_any_later_claim_by_one_file_and_gaps_are_closed(folder: RunFolder, url: str) -> None:
    first = RunWriter(folder, 1)
    first.check_owner()
    RunWriter(RunFolder(url), 4)  # attempts 2 and 3 never started
    with pytest.raises(FlashError, match="fenced"):
        first.check_owner()
    assert sorted(folder.names("epoch")) == ["1", "2", "3", "4"]


def test_what_an_engine_starts_again_claims_the_next_number_unless_a_later_launch_owns_the_run(
    folder: RunFolder, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(launch: int) -> int:
        monkeypatch.setenv(LAUNCH, str(launch))
        return RunWriter(RunFolder(url), folder.next_epoch(launch)).epoch

    assert [start(1), start(1), start(1)] == [1, 2, 3]
    assert start(3) == 4  # the supervisor's third launch comes after what the first one claimed
    with pytest.raises(FlashError, match="fenced"):
        start(1)
    assert start(3) == 5


def test_what_the_owner_writes_is_read_back(folder: RunFolder, url: str) -> None:
    writer = RunWriter(folder, 1)
    writer.beat(3, "train")
    writer.metrics(3, {"loss": 0.5, "kl": None})
    writer.rollouts(3, [{"index": 0, "text": "line\nbreak\u2028"}, {"index": 1, "text": "Zoë \ud800"}])
    writer.evaluation(0, {"n": 2, "success": 0.5}, [{"index": 0}])
    writer.event("warning", "slow", seconds=9)
    writer.event("warning", "slower")
    reader = RunFolder(url)
    beat, metrics, evaluation = reader.beat(), reader.metrics(3), reader.evaluation(0)
    assert beat and (beat["epoch"], beat["step"], beat["phase"]) == (1, 3, "train")
    assert metrics and metrics["metrics"] == {"loss": 0.5, "kl": None}
    assert [row["text"] for row in reader.rollouts(3)] == ["line\nbreak\u2028", "Zoë ?"]
    assert evaluation and evaluation["rollouts"] == [{"index": 0}]
    events = [reader.event(name) for name in reader.event_names()]
    assert [event and event["message"] for event in events] == ["slow", "slower"]
    assert list(reader.metric_steps()) == list(reader.rollout_steps()) == [3]
    assert list(reader.eval_steps()) == [0]
    before = folder.metric_steps()
    writer.metrics(3, {"loss": 2.5})  # a step written again replaces itself and shows a new version
    assert list(folder.metric_steps()) == [3] and folder.metric_steps() != before
    with pytest.raises(ValueError, match="JSON"):
        writer.metrics(4, {"loss": float("nan")})
    assert list(folder.metric_steps()) == [3] and (folder.metrics(3) or {})["metrics"] == {"loss": 2.5}


def test_a_checkpoint_is_whole_and_verified(folder: RunFolder, tmp_path: Path) -> None:
    manifest = RunWriter(folder, 1).commit_checkpoint(10, adapter(tmp_path), {"reward/mean": 0.5})
    assert folder.checkpoints.steps() == [10] and folder.checkpoints.verify(10) == manifest
    assert manifest["size_bytes"] == len(b"weights") + len(b"moments")
    assert set(manifest["files"]) == {"adapter.bin", "optimizer/state.bin"}
    fetched = folder.checkpoints.fetch(10, tmp_path / "fetched")
    assert (fetched / "optimizer" / "state.bin").read_bytes() == b"moments"


def test_what_a_killed_copy_of_a_checkpoint_left_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(f"memory://{uuid4().hex}")
    manifest = RunWriter(folder, 1).commit_checkpoint(10, adapter(tmp_path), {})
    name = f"fetched-{manifest['digest']}"
    (tmp_path / f".{name}.part-killed").mkdir()
    assert folder.checkpoints.fetch(10, tmp_path / "fetched") == tmp_path / name
    assert not list(tmp_path.glob(".*.part-*"))


@pytest.mark.slow
def test_the_same_checkpoint_written_twice_is_the_newer(folder: RunFolder, tmp_path: Path) -> None:
    writer = RunWriter(folder, 1)
    old = writer.commit_checkpoint(10, adapter(tmp_path, b"old"), {})
    new = writer.commit_checkpoint(10, adapter(tmp_path, b"new"), {})
    assert folder.checkpoints.verify(10) == new != old and folder.checkpoints.steps() == [10]


def test_a_store_that_is_away_damages_no_checkpoint(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = RunWriter(folder, 1)
    for step in (5, 10):
        writer.commit_checkpoint(step, adapter(tmp_path), {})

    def away(_: str) -> str:
        raise FlashError("store_unreachable", "it does not answer")

    monkeypatch.setattr(folder, "digest", away)
    with pytest.raises(FlashError, match="store_unreachable"):
        folder.checkpoints.newest_good()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder: RunFolder, tmp_path: Path) -> None:
    writer = RunWriter(folder, 1)
    for step in (5, 10):
        writer.commit_checkpoint(step, adapter(tmp_path), {})
    filesystem, _ = file_system(folder)
    paths = {step: f"{(folder.checkpoints.manifest(step) or {})['path']}/adapter.bin" for step in (5, 10)}
    filesystem.pipe_file(paths[10], b"weight?")
    with pytest.raises(FlashError, match="checkpoint_corrupt"):
        folder.checkpoints.verify(10)
    assert folder.checkpoints.newest_good() == 5
    filesystem.rm_file(paths[5])
    assert folder.checkpoints.newest_good() is None
    with pytest.raises(FlashError, match="checkpoint_corrupt"):
        folder.checkpoints.fetch(5, tmp_path / "fetched")


def test_a_checkpoint_without_its_manifest_does_not_exist(folder: RunFolder, tmp_path: Path) -> None:
    manifest = RunWriter(folder, 1).commit_checkpoint(5, adapter(tmp_path), {})
    filesystem, _ = file_system(folder)
    filesystem.rm_file(f"{manifest['path']}/MANIFEST.json")
    assert folder.checkpoints.steps() == []
    with pytest.raises(FlashError, match="unknown_checkpoint"):
        folder.checkpoints.verify(5)


def test_a_zombie_changes_nothing(folder: RunFolder, tmp_path: Path) -> None:
    zombie = RunWriter(folder, 1)
    zombie.beat(1, "train")
    zombie.commit_checkpoint(1, adapter(tmp_path), {})
    RunWriter(folder, 2)
    before = files_of(folder)
    deeds = [
        lambda: zombie.beat(2, "train"),
        lambda: zombie.metrics(2, {"loss": 1.0}),
        lambda: zombie.rollouts(2, [{"index": 0}]),
        lambda: zombie.evaluation(2, {}, []),
        lambda: zombie.event("phase", "still here"),
        lambda: zombie.commit_checkpoint(1, adapter(tmp_path, b"stale"), {}),
        lambda: zombie.commit_checkpoint(2, adapter(tmp_path), {}),
        lambda: zombie.commit_result("succeeded", 2),
    ]
    for deed in deeds:
        with pytest.raises(FlashError, match="fenced"):
            deed()
    assert files_of(folder) == before


def test_a_cancel_and_a_result_reach_the_other_side(folder: RunFolder, url: str) -> None:
    writer = RunWriter(folder, 1)
    RunFolder(url).request_cancel("enough")
    assert folder.is_cancelled()
    writer.commit_result("failed", 7, FlashError("out_of_memory", "too large", fix="use less"), retryable=True)
    result = RunFolder(url).result()
    assert result and (result["state"], result["step"], result["epoch"], result["retryable"]) == ("failed", 7, 1, True)
    assert str(FlashError.from_dict(result["error"])) == "[out_of_memory] too large. Fix: use less"


def test_what_nobody_reads_can_be_deleted_and_the_rest_stays(folder: RunFolder, tmp_path: Path) -> None:
    first = RunWriter(folder, 1)
    for step in (1, 2):
        first.metrics(step, {"loss": 1.0})
        first.commit_checkpoint(step, adapter(tmp_path), {})
    first.attempts(3, [{"index": 0}])
    first._write("checkpoints/7/1-9/weights", b"not whole")
    second = RunWriter(folder, 2)
    second.metrics(2, {"loss": 2.0})
    second.attempts(4, [{"index": 0}])
    second._write("checkpoints/8/2-1/weights", b"being saved")
    second._put("evals/3.2.json", {"step": 3, "summary": {}, "rollouts": []})
    before = set(folder.sizes())
    folder.drop_superseded()
    assert before - set(folder.sizes()) == {"metrics/2.1.json", "evals/3/0001-000000", "checkpoints/7/1-9/weights"}
    folder.checkpoints.remove(1)
    folder.checkpoints.remove(5)
    assert folder.checkpoints.steps() == [2] and folder.checkpoints.newest_good() == 2


def test_the_tail_of_a_log_is_its_end(folder: RunFolder) -> None:
    folder.create({})
    filesystem, root = file_system(folder)
    filesystem.pipe_file(f"{root}/log.2", b"first line\n" * 1000 + b"last line\n")
    assert folder.log_tail(2, 15).endswith("line\nlast line\n") and len(folder.log_tail(2, 15)) == 15


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.1")
    with ThreadPoolExecutor(1) as pool:
        tail = pool.submit(RunFolder(tmp_path).log_tail, 1)
        try:
            assert tail.result(timeout=30) == ""
        finally:
            os.close(os.open(tmp_path / "log.1", os.O_RDWR))  # so that a thread that waits ends


def test_a_result_of_an_attempt_that_was_replaced_is_no_result(folder: RunFolder) -> None:
    """As an attempt leaves it that was stopped between its last look at the epochs and the write."""
    RunWriter(folder, 1).commit_result("failed", 3)
    stale = (folder.result() or {})["epoch"]
    owner = RunWriter(folder, 2)
    assert stale == 1 and folder.result() is None
    owner.commit_result("succeeded", 5)
    assert (folder.result() or {})["state"] == "succeeded"


def test_a_zombie_that_wakes_while_its_successor_saves_takes_nothing_from_it(folder: RunFolder, tmp_path, monkeypatch):
    """Both save the same step; the older one was stopped when its files were half copied."""
    zombie, source = RunWriter(folder, 1), adapter(tmp_path, b"stale")
    check = zombie.check_owner
    manifests = []

    def successor_saves() -> None:
        if not manifests:
            monkeypatch.setattr(zombie, "check_owner", check)
            manifests.append(RunWriter(folder, 2).commit_checkpoint(7, adapter(tmp_path, b"fresh"), {}))
        check()

    monkeypatch.setattr(zombie, "check_owner", lambda: monkeypatch.setattr(zombie, "check_owner", successor_saves))
    with pytest.raises(FlashError, match="fenced"):
        zombie.commit_checkpoint(7, source, {})
    assert folder.checkpoints.verify(7) == manifests[0]
    assert (folder.checkpoints.fetch(7, tmp_path / "fetched") / "adapter.bin").read_bytes() == b"fresh"


@contextmanager
def suppress_fenced() -> Generator[None]:
    try:
        yield
    except FlashError as error:
        assert error.code == "fenced"


def test_a_zombie_that_wakes_after_its_last_check_takes_nothing_from_its_successor(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older attempt was stopped before it wrote the manifest, and found itself the owner."""
    zombie = RunWriter(folder, 1)
    check = zombie.check_owner
    checks = iter([check, lambda: (check(), successor_saves()), check])
    saved = []

    def successor_saves() -> None:
        owner = RunWriter(folder, 2)
        saved.append(owner.commit_checkpoint(7, adapter(tmp_path, b"fresh"), {}))
        owner.commit_result("succeeded", 7)

    monkeypatch.setattr(zombie, "check_owner", lambda: next(checks)())
    with suppress_fenced():
        zombie.commit_checkpoint(7, adapter(tmp_path, b"stale"), {})
    assert folder.checkpoints.verify(7) == saved[0]
    assert (folder.checkpoints.fetch(7, tmp_path / "fetched") / "adapter.bin").read_bytes() == b"fresh"


@pytest.mark.parametrize("what", ["metrics", "rollouts", "evaluation", "result"])
def test_a_zombie_that_wakes_between_its_check_and_its_write_replaces_nothing(
    folder: RunFolder, url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It was stopped when it had found itself the owner, and wrote after its successor had."""

    def write(writer: RunWriter, loss: float) -> None:
        rows = [{"index": 0, "reward": loss}]
        deeds = {
            "metrics": lambda: writer.metrics(5, {"loss": loss}),
            "rollouts": lambda: writer.rollouts(5, rows),
            "evaluation": lambda: writer.evaluation(5, {"loss": loss}, rows),
            "result": lambda: writer.commit_result("failed" if loss else "succeeded", 5),
        }
        deeds[what]()

    def seen() -> Any:
        reader = RunFolder(url)
        readers = {
            "metrics": lambda: (reader.metric_steps(), reader.metrics(5)),
            "rollouts": lambda: (reader.rollout_steps(), list(reader.rollouts(5))),
            "evaluation": lambda: (reader.eval_steps(), reader.evaluation(5)),
            "result": reader.result,
        }
        return readers[what]()

    zombie = RunWriter(folder, 1)
    check, expected = zombie.check_owner, list[Any]()

    def successor_writes() -> None:
        check()
        write(RunWriter(RunFolder(url), 2), 0.0)
        expected.append(seen())

    monkeypatch.setattr(zombie, "check_owner", successor_writes)
    write(zombie, 1.5)
    assert [seen()] == expected and expected[0]


@pytest.mark.slow
def test_a_successor_removes_what_a_killed_attempt_left_of_the_same_checkpoint(folder: RunFolder, tmp_path: Path):
    lost = RunWriter(folder, 1).commit_checkpoint(7, adapter(tmp_path), {})
    filesystem, _ = file_system(folder)
    filesystem.rm_file(f"{lost['path']}/MANIFEST.json")
    RunWriter(folder, 2).commit_checkpoint(7, adapter(tmp_path), {})
    assert not [path for path in files_of(folder) if path.startswith(f"{lost['path']}/")]
    assert folder.checkpoints.verify(7)["epoch"] == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_absent(tmp_path: Path, damage: str) -> None:
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder, 1)
    folder.create({"run_id": "run-1", "created": 1.5})
    writer.beat(3, "train")
    writer.metrics(3, {"loss": 0.5})
    writer.rollouts(3, [{"index": 0, "reward": 1.0}])
    writer.evaluation(3, {"n": 2}, [])
    writer.event("warning", "slow")
    writer.commit_checkpoint(3, adapter(tmp_path), {})
    writer.commit_result("succeeded", 3)
    readers = {
        "beat.json": folder.beat,
        "result.1.json": folder.result,
        "metrics/3.1.json": lambda: folder.metrics(3),
        "evals/3.1.json": lambda: folder.evaluation(3),
        "events/0001-000000.json": lambda: folder.event("0001-000000.json"),
        "rollouts/3.1.jsonl": lambda: list(folder.rollouts(3)),
        "checkpoints/3/1-1/MANIFEST.json": lambda: folder.checkpoints.manifest(3),
    }
    for name, read in readers.items():
        assert read() and not folder.damaged
        DAMAGES[damage](tmp_path / name)
        assert not read()
        if (name, damage) != ("rollouts/3.1.jsonl", "empty"):
            assert folder.damaged.pop(name)
    assert folder.checkpoints.steps() == []
    DAMAGES[damage](tmp_path / "job.json")
    if damage not in ("NaN", "other fields"):
        with pytest.raises(FlashError, match=r"no job\.json that can be read"):
            folder.job()
    writer.beat(4, "train")  # also over a folder
    assert (folder.beat() or {})["step"] == 4


def test_a_file_of_another_step_or_with_a_damaged_line_is_damaged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder, 1)
    writer.metrics(3, {"loss": 0.5})
    Path(tmp_path, "metrics", "3.1.json").rename(tmp_path / "metrics" / "4.1.json")
    assert folder.metrics(4) is None and folder.damaged == {"metrics/4.1.json": "it is of step 3"}

    writer.rollouts(3, [{"index": 0, "reward": 1.0}, {"index": 1, "reward": 0.5}])
    path = tmp_path / "rollouts" / "3.1.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert [row["index"] for row in folder.rollouts(3)] == [0]
    assert "line 2" in folder.damaged["rollouts/3.1.jsonl"]


def test_lines_are_decoded_one_by_one(tmp_path: Path) -> None:
    RunWriter(RunFolder(tmp_path), 1).rollouts(3, [{"index": at, "ids": [*range(1000, 3000)]} for at in range(100)])
    tracemalloc.start()
    try:
        assert sum(1 for _ in RunFolder(tmp_path).rollouts(3)) == 100
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * (tmp_path / "rollouts" / "3.1.jsonl").stat().st_size


# -- object stores ---------------------------------------------------------------------------------


@pytest.fixture
def far_url(object_store: ObjectStore) -> str:
    return f"s3://{BUCKET}/{uuid4().hex}/run"


def test_a_claim_whose_answer_was_lost_finds_itself(far_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, monkey = RunFolder(far_url), [ConnectionResetError("the answer was lost")]
    pipe_file = folder.filesystem._filesystem.pipe_file

    def lose_the_answer(*arguments: Any, **options: Any) -> None:
        pipe_file(*arguments, **options)
        if monkey:
            raise monkey.pop()

    monkeypatch.setattr(folder.filesystem._filesystem, "pipe_file", lose_the_answer)
    assert RunWriter(folder, 1).epoch == 1
    with pytest.raises(FlashError, match="fenced"):
        RunWriter(RunFolder(far_url), 1)


def test_files_in_a_store_are_read_within_limits_also_empty_ones(far_url: str) -> None:
    folder = RunFolder(far_url, retry_s=0.2)
    for name in ("beat.json", "log.1"):
        folder.write(name, b"")
    assert folder.read("beat.json") == "" and folder.log_tail(1) == ""
    folder.write("log.1", b"0123456789")
    assert (folder.log_tail(1, 4), folder.log_tail(1, 40)) == ("6789", "0123456789")
    assert (folder.read("log.1", 10), folder.read("log.1", 9)) == ("0123456789", None)
    assert read_beats([folder]) == [None]
    RunWriter(folder, 1).beat(3, "train")
    beat = read_beats([folder])[0]
    assert beat and beat["step"] == 3


def test_a_store_that_stays_away_is_named(far_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(far_url, retry_s=0.2)
    writer = RunWriter(folder, 1)
    with object_store.away(), pytest.raises(FlashError, match="store_unreachable") as caught:
        writer.metrics(1, {"loss": 1.0})
    assert SECRET_KEY not in str(caught.value)
    writer.metrics(1, {"loss": 1.0})
    assert list(folder.metric_steps()) == [1]


def test_a_store_that_refuses_our_keys_or_has_no_such_bucket_is_named(far_url: str, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(far_url, retry_s=0.2)
    writer = RunWriter(folder, 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("The provided token has expired.")

    with monkeypatch.context() as patch:
        for name in ("pipe_file", "cat_file", "ls"):
            patch.setattr(folder.filesystem._filesystem, name, refuse)
        for ask in (folder.beat, lambda: writer.metrics(1, {"loss": 1.0}), folder.metric_steps):
            with pytest.raises(FlashError, match=r"store_refused.*token has expired"):
                ask()
    writer.metrics(1, {"loss": 1.0})
    nowhere = RunFolder("s3://no-such-bucket/run", retry_s=0.2)
    with pytest.raises(FlashError, match="store_refused"):
        nowhere.beat()
    with pytest.raises(FlashError, match="store_refused"):
        read_beats([nowhere])


def test_a_store_that_says_nothing_is_given_up_in_the_time_that_the_control_plane_has(far_url: str, monkeypatch):
    monkeypatch.setattr("flash_mcp.protocol.storage.READ_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and no more
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(FlashError, match="store_unreachable"):
            RunFolder(far_url, retry_s=0.2).beat()
    assert time.monotonic() - began < 30  # S3's client alone takes minutes


def test_packages_that_a_store_needs_are_named() -> None:
    with pytest.raises(FlashError, match="engine_missing") as caught:
        RunFolder("gs://bucket/run")
    assert "extra s3" in caught.value.fix and "gcs" in caught.value.what


def test_a_heartbeat_asks_who_owns_the_run_while_another_thread_looks_at_a_listing(far_url: str) -> None:
    folder = RunFolder(far_url)
    writer = RunWriter(folder, 1)
    with folder.listed(), ThreadPoolExecutor(1) as heartbeat:
        RunWriter(RunFolder(far_url), 2)
        assert folder.newest_epoch() == 1
        with pytest.raises(FlashError, match=r"fenced.*newest=2"):
            heartbeat.submit(writer.check_owner).result()


@pytest.mark.slow
def test_a_worker_sits_out_an_object_store_that_goes_away_and_loses_nothing(
    far_url: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    folder = RunFolder(far_url)
    # More steps than it can make: however slow the test, the worker is at work when the store goes
    # away.
    folder.create({"run_id": "run-1", "spec": {"algorithm": "grpo", "environment_args": {"steps": 10_000}}})
    log = tmp_path / "log"
    with log.open("wb") as stream:
        worker = subprocess.Popen(
            [sys.executable, WORKER, far_url, "--attempt", "1"], stdout=stream, stderr=stream,
            env={**os.environ, **object_store.environment, "PYTHONPATH": str(WORKER.parents[1])},
        )  # fmt: skip
    deadline = time.monotonic() + 200
    try:
        for at in (2, 8):
            while at not in folder.metric_steps():
                assert time.monotonic() < deadline and worker.poll() is None, log.read_text()
            with object_store.away():
                time.sleep(0.5)  # the time that the store is away
        folder.request_cancel()
        assert worker.wait(WAIT_S) == 0, log.read_text()
    finally:
        worker.kill()
    result = folder.result() or {}
    assert result["state"] == "cancelled"
    steps = list(range(1, result["step"]))
    assert list(folder.metric_steps()) == list(folder.rollout_steps()) == steps
    assert folder.checkpoints.steps() == [*steps, result["step"]]
    assert all(len(list(folder.rollouts(step))) == 3 for step in steps)
    assert all(folder.checkpoints.verify(step) for step in folder.checkpoints.steps())
    assert "is tried again" in log.read_text()
    told = log.read_bytes() + b"".join(files_of(folder).values())
    for secret in (SECRET_KEY, object_store.environment["AWS_ACCESS_KEY_ID"]):
        assert secret.encode() not in told
    assert json.loads(files_of(folder)[f"{folder.root}/epoch/1"])["pid"] == worker.pid


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "{}", '{"r": null}', '{"r": "many"}'],
    ids=["absent", "empty", "cut off", "a list", "no rank", "rank null", "rank a word"],
)
def test_an_adapter_without_a_readable_configuration_is_no_checkpoint(tmp_path: Path, text: str | None):
    config = tmp_path / "adapter_config.json"
    config.write_text('{"r": 8, "lora_alpha": 16}')
    assert read_adapter_config(tmp_path, "r", "lora_alpha") == {"r": 8, "lora_alpha": 16}
    config.unlink() if text is None else config.write_text(text)
    with pytest.raises(FlashError) as caught:
        read_adapter_config(tmp_path, "r")
    assert caught.value.code == "unknown_checkpoint"
    assert str(tmp_path) in str(caught.value) and "checkpoints lists" in str(caught.value.fix)
