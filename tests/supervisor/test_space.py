"""Runs on a disk that fills up, at several points: each waits for space, and then goes on."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import TextContent

from flash_mcp.protocol.errors import FlashError, as_flash_error
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.state import queue
from flash_mcp.state.disk import LEAST_FREE_BYTES, RESERVE, RESERVE_BYTES
from flash_mcp.state.serving import request
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import folder_files, staged
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.process import take_lock
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.waiting import obstacles
from tests.attempts import VOWELS
from tests.places import ROOT
from tests.samples import finished_run, queued_run
from tests.supervisor.test_loop import Bench
from tests.supervisor.test_model_servers import make_adapter, make_run, new_supervisor, settle, stop_all
from tests.waiting import WAIT_S, wait_for
from tests.watch import is_running

pytestmark = pytest.mark.slow

MIB = 1 << 20
DISK_MIB = 96
Fill = Callable[[Path], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,nr_inodes=6000", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def bench(disk: Path) -> Iterator[Bench]:
    made = Bench(disk / "home")
    yield made
    free(disk)
    made.clean_up()


def until_nothing_fits(write: Callable[[], object]) -> None:
    """Writes again what fails for a while, as the heartbeat's next file gives the room of the last one back."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            while True:
                write()
        time.sleep(0.01)


def fill(disk: Path, leave: int = 0) -> None:
    """Until `leave` bytes are free."""
    with (disk / "filler").open("wb", buffering=0) as stream:
        size = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - leave
        with contextlib.suppress(OSError):
            os.posix_fallocate(stream.fileno(), 0, size)
        if not leave:
            until_nothing_fits(lambda: stream.write(bytes(4096)))


def use_up_inodes(disk: Path) -> None:
    (disk / "fillers").mkdir()
    numbers = itertools.count()
    until_nothing_fits(lambda: (disk / "fillers" / str(next(numbers))).touch())


def free(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)
    shutil.rmtree(disk / "fillers", ignore_errors=True)


either_way = pytest.mark.parametrize("fill", [fill, use_up_inodes])


def run_until(supervisor: Supervisor, condition: Callable[[], object]) -> None:
    """As the supervisor's own loop, which waits out a full disk."""

    def met() -> object:
        supervisor._tick_unless_held_up()
        return condition()

    wait_for(met)


def finish(bench: Bench, run: Run) -> Run:
    run_until(bench.supervisor, lambda: bench.store.run(run.id).ended)
    return bench.store.run(run.id)


def ticks(bench: Bench, count: int = 20) -> None:
    for _ in range(count):
        bench.supervisor._tick_unless_held_up()
        time.sleep(0.02)


@either_way
@pytest.mark.parametrize("is_claimed", [False, True], ids=["before a run starts", "when its folder is made"])
def test_a_disk_that_is_full_is_waited_for(bench: Bench, disk: Path, fill: Fill, is_claimed: bool) -> None:
    run = bench.train({"steps": 2}, max_attempts=1)
    assert not is_claimed or queue.claim(bench.store)
    fill(disk)
    ticks(bench)
    assert bench.store.run(run.id).ended is None
    free(disk)
    assert finish(bench, run).state == "succeeded"


@either_way
def test_a_disk_that_fills_while_a_run_writes_metrics(bench: Bench, disk: Path, fill: Fill) -> None:
    run = bench.held({"steps": 4}, at=3, max_attempts=1)
    (Path(run.folder) / "almost").touch()
    fill(disk)
    (Path(run.folder) / "almost").rename(Path(run.folder) / "go")
    wait_for(lambda: not is_running(bench.pid(run)))
    ticks(bench)
    assert bench.store.run(run.id).ended is None
    assert any("disk_full" in obstacle for obstacle in obstacles(bench.store, run))
    free(disk)
    ended = finish(bench, run)
    assert (ended.state, ended.step) == ("succeeded", 4)
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3, 4]
    assert [row.step for row in bench.store.checkpoints(run.id)] == [1, 2, 3, 4]


def test_a_checkpoint_that_does_not_fit_is_waited_for(bench: Bench, disk: Path) -> None:
    script = {"steps": 2, "size_bytes": 20 * MIB}
    run = bench.held(script, max_attempts=1)
    fill(disk, leave=LEAST_FREE_BYTES + MIB)
    (Path(run.folder) / "go").touch()
    run_until(bench.supervisor, lambda: bench.store.run(run.id).state == "queued")
    ticks(bench)
    waiting = bench.store.run(run.id)
    assert (waiting.state, waiting.attempt) == ("queued", 1)
    assert waiting.error and waiting.error["code"] == "disk_full"
    assert waiting.error["values"]["needed_bytes"] == 20 * MIB
    lock = take_lock(bench.base)
    assert lock
    with lock:
        assert any("disk_full" in obstacle for obstacle in obstacles(bench.store, waiting))
    assert not [*Path(run.folder, "checkpoints", "2").iterdir()]
    free(disk)
    ended = finish(bench, run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 2)


def test_a_worker_that_cannot_write_its_heartbeat_is_not_replaced(bench: Bench, disk: Path) -> None:
    supervisor = bench.supervisor
    run = bench.held({"steps": 3})
    worker = bench.worker(run)
    os.kill(worker, signal.SIGSTOP)
    fill(disk)
    ticks(bench, count=1)
    supervisor._attempts[run.id].beat_at -= 1000
    ticks(bench)
    free(disk)
    assert supervisor._attempts[run.id].number == 1
    (Path(run.folder) / "go").touch()
    os.kill(worker, signal.SIGCONT)
    supervisor._attempts[run.id].beat_at = supervisor._attempts[run.id].watched_s
    ended = finish(bench, run)
    assert (ended.state, ended.attempt) == ("succeeded", 1)


def test_a_disk_that_fills_before_the_end_of_a_run_is_read(bench: Bench, disk: Path) -> None:
    run = bench.train({"steps": 2}, max_attempts=1)
    bench.supervisor.tick()
    wait_for(lambda: RunFolder(run.folder).result())
    fill(disk)
    ticks(bench)
    free(disk)
    ended = finish(bench, run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 1, 2)
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2]


def test_a_disk_that_fills_while_a_run_is_cancelled(bench: Bench, disk: Path) -> None:
    run = bench.held(max_attempts=1)
    queue.request_cancel(bench.store, run.id)
    fill(disk)
    ticks(bench)
    free(disk)
    assert finish(bench, run).state == "cancelled"


def test_a_run_that_waits_for_space_can_be_cancelled(bench: Bench, disk: Path) -> None:
    run = bench.train()
    assert queue.claim(bench.store)
    full = FlashError("disk_full", "it is full", needed_bytes=10**15)
    assert queue.requeue(bench.store, run.id, 1, full, counts_as="nothing")
    ticks(bench, 3)
    assert bench.store.run(run.id).attempt == 1  # nobody has a petabyte
    assert queue.request_cancel(bench.store, run.id).state == "cancelled"


TRAIN = """
import time
from pathlib import Path

SIZE = {size}


def train(job, spec, writer, heartbeat, scratch, ranks):
    for step in (1, 2):
        while step == 2 and not Path(writer.folder.path("go")).exists():
            time.sleep(0.02)
        source = scratch / "adapter"
        source.mkdir(exist_ok=True)
        (source / "adapter.bin").write_bytes(bytes(SIZE))
        writer.metrics(step, {{"loss": 1.0}})
        writer.commit_checkpoint(step, source, {{}})
    return 2
"""


@pytest.mark.parametrize(("size_bytes", "leave"), [(64, 0), (20 * MIB, LEAST_FREE_BYTES + MIB)])
def test_the_real_worker_ends_on_a_full_disk_so_that_another_attempt_follows(
    bench: Bench, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, leave: int
) -> None:
    """It cannot even write its result where nothing is free."""
    package = tmp_path / "stand_in" / "worker"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'worker')!r})")
    (package / "train.py").write_text(TRAIN.format(size=size_bytes))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{ROOT}")
    bench.supervisor.target.worker = (sys.executable, "-P", "-m", "worker.main")
    run = bench.train(max_attempts=1)
    run_until(bench.supervisor, lambda: bench.store.checkpoints(run.id))
    (Path(run.folder) / "almost").touch()
    fill(disk, leave=leave)
    (Path(run.folder) / "almost").rename(Path(run.folder) / "go")
    wait_for(lambda: not is_running(bench.pid(run)))
    ticks(bench)
    assert bench.store.run(run.id).ended is None
    free(disk)
    ended = finish(bench, run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 2)


@pytest.mark.parametrize("values", [{"needed_bytes": "much"}, {"path": 7}, {"path": "/gone/x"}])
def test_what_a_worker_says_of_space_holds_nobody_up(bench: Bench, values: dict[str, object]) -> None:
    run = bench.train({"steps": 1})
    assert queue.claim(bench.store)
    full = FlashError("disk_full", "it is full", **values)
    assert queue.requeue(bench.store, run.id, 1, full, counts_as="nothing")
    assert finish(bench, run).state == "succeeded"


def test_a_disk_of_temporary_files_that_is_full_is_waited_for(bench: Bench, disk: Path) -> None:
    other = FlashError("disk_full", "it is full", path=str(disk / "tmp"))
    run = bench.train({"steps": 1})
    supervisor = bench.supervisor
    supervisor.base = disk.parent  # a disk with space
    assert queue.claim(bench.store) and queue.requeue(bench.store, run.id, 1, other, counts_as="nothing")
    fill(disk, leave=LEAST_FREE_BYTES - MIB)
    ticks(bench, 3)
    assert bench.store.run(run.id).attempt == 1
    free(disk)
    assert finish(bench, run).state == "succeeded"


def test_attempts_that_a_full_disk_ended_are_not_counted(bench: Bench) -> None:
    run = bench.train(max_attempts=1)
    full = FlashError("disk_full", "it is full")
    for attempt in (1, 2, 3):
        assert (claimed := queue.claim(bench.store)) and claimed.attempt == attempt
        assert queue.requeue(bench.store, run.id, attempt, full, counts_as="nothing")
    assert queue.claim(bench.store)
    assert not queue.requeue(bench.store, run.id, 4, FlashError("worker_failed", "lost"))


def command_line(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "flash_mcp.cli", *words], {**os.environ, "FLASH_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    "command", [["status"], ["catalog"], ["wait", "run-1"], ["train"], ["recover"], ["undeploy", "dep-1"]]
)
def test_every_command_names_a_full_disk_on_a_fresh_home(disk: Path, command: list[str]) -> None:
    home = disk / "home"
    Store(home).close()
    fill(disk)
    done = command_line(home, *command)
    assert done.returncode != 0 and "[disk_full" in done.stderr, done.stderr


def test_doctor_examines_all_on_a_full_disk(disk: Path) -> None:
    home = disk / "home"
    Store(home).close()
    fill(disk)
    assert "disk_full" in command_line(home, "doctor").stdout


def test_what_fills_the_disk_can_be_removed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = disk / "home"
    monkeypatch.setenv("FLASH_HOME", str(home))
    run = finished_run(disk.parent / "scratch")
    Path(run.folder, "large").write_bytes(bytes(10 * MIB))
    Supervisor(open_store().base).maintenance.step()
    open_store().close()
    fill(disk)
    assert command_line(home, "remove", run.id).returncode == 0
    assert not Path(run.folder).exists() and not open_store().runs()
    free(disk)
    Supervisor(open_store().base).maintenance.step()
    assert (home / RESERVE).stat().st_size == RESERVE_BYTES


def test_a_deployment_on_a_full_disk_waits_or_says_so_and_is_served_later(disk: Path) -> None:
    store = Store(disk / "home")
    run_id = make_run(store, "toy", {1: make_adapter(disk.parent / "a")})
    supervisor = new_supervisor(store.base)
    row = request(store, run_id)
    fill(disk)
    for _ in range(5):
        supervisor.tick()
    seen = store.deployment(row.id)
    assert seen.state == "starting" or (seen.error or {})["code"] == "disk_full"
    free(disk)
    request(store, run_id)
    settle(supervisor, row.id, "ready")
    stop_all(store.base)
    store.close()


def test_what_an_agent_pushes_to_a_full_disk_is_pushed_whole_later(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_HOME", str(disk / "home"))
    store = open_store()
    files = {"environment.py": b"def load_environment(): ...", "data": bytes(MIB)}
    fill(disk)
    with pytest.raises(FlashError, match="disk_full"), staged("calc", files, store.base) as stage:
        store.publish(stage)
    assert not store.environments()
    free(disk)
    with staged("calc", files, store.base) as stage:
        assert store.publish(stage)[1]


def test_readers_still_read_where_the_store_is_open(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_HOME", str(disk / "home"))
    run = Bench(disk / "home").train()
    before = asyncio.run(TOOLS["status"].function(run_id=run.id))
    fill(disk)
    told = asyncio.run(TOOLS["status"].function(run_id=run.id))
    assert told.run and before.run and told.run.state == before.run.state == "queued"
    assert "disk_full" in str(told.run.warnings)
    with pytest.raises(FlashError, match="disk_full"):
        open_store().execute("UPDATE main.runs SET phase = ?", ["x" * 100_000])


def test_making_an_error_never_fails(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_HOME", str(disk / "home"))
    (disk / "home").mkdir()
    fill(disk)
    assert as_flash_error("tool", ZeroDivisionError("1 / 0")).code == "internal"
    assert as_flash_error("tool", OSError(28, "No space left on device")).code == "disk_full"


async def test_a_fresh_server_names_a_full_disk_in_every_tool(disk: Path) -> None:
    home = disk / "home"
    Store(home).close()
    fill(disk)
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "flash_mcp.cli", "serve"],
        cwd=str(ROOT),
        env={**os.environ, "FLASH_HOME": str(home)},
    )
    async with Client(server) as client:
        for tool, arguments in {
            "status": {},
            "catalog": {},
            "train": {"environment": "calculator"},
            "evaluate": {"model": "smollm2-135m-instruct", "environment": "calculator"},
            "cancel": {"run_id": "run-2f9k1c8d"},
            "checkpoints": {"run_id": "run-2f9k1c8d"},
        }.items():
            answer = await client.call_tool(tool, arguments)
            text = answer.content[0]
            assert isinstance(text, TextContent)
            assert answer.is_error and text.text.startswith("[disk_full"), (tool, text.text)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill_up(disk: Path) -> None:
    with pytest.raises(OSError), (disk / "filler").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def test_a_full_disk_is_named_and_leaves_nothing_half_made(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run")
    run.create({"run_id": "run-1"})
    writer = RunWriter(run, 1)
    writer.metrics(1, {"loss": 1.0})
    adapter = small_disk.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(bytes(600_000))
    fill_up(small_disk)
    before = sorted(small_disk.rglob("*"))
    with pytest.raises(FlashError, match="disk_full"):
        writer.metrics(2, {"note": "x" * 5000})
    with pytest.raises(FlashError, match="disk_full"):
        writer.commit_checkpoint(1, adapter, {})
    with pytest.raises(FlashError, match="disk_full"), staged("vowels", folder_files(VOWELS), base=small_disk) as stage:
        stage.commit()
    assert [path for path in sorted(small_disk.rglob("*")) if path.is_file()] == [p for p in before if p.is_file()]
    assert run.metrics(1) and run.metrics(2) is None and run.checkpoints.steps() == []


def test_status_says_that_a_full_disk_holds_a_run_up(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_HOME", str(small_disk))
    run = queued_run(tmp_path)
    fill_up(small_disk)
    assert any("disk_full" in obstacle for obstacle in obstacles(open_store(), run))
