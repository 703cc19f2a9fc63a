"""An upgrade while the version before runs: the new one takes over, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from flash_mcp import __version__
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.home_paths import HERE
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor import keeper, process
from flash_mcp.supervisor.launch.base import Handle
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.supervisor.model_servers import Server
from flash_mcp.supervisor.process import LockOwner, is_supervised
from flash_mcp.tools.registry import TOOLS
from tests.places import ROOT
from tests.supervisor.test_keeper import end_supervisors
from tests.supervisor.test_loop import wait_for
from tests.watch import is_running

OLD = "aee5dd051d057066ce04e19e0e05af846df8af54"
"""The last commit before the packages were laid out anew: other module names, a lock file that
holds a bare pid, absolute paths in the database."""
MODEL = "scripted"
ENQUEUE = """
import sys
from pathlib import Path
from flash_mcp import queue
from flash_mcp.spec import RunSpec, resolve
from flash_mcp.store import Store

base = Path(sys.argv[1])
store = Store(base)
folder = base / "environments" / "calc" / "abcdef123456"
folder.mkdir(parents=True)
environment = store.add_environment(name="calc", digest="abcdef123456", path=str(folder), size_bytes=1)
script = {"steps": 5, "1": {"at": 3, "do": "hold"}}
run = queue.enqueue(store, resolve(RunSpec(environment="calc", environment_args=script)), environment)[0]
adapter = base / "adapters" / "a"
adapter.mkdir(parents=True)
store.add_deployment({
    "id": "dep-00000001", "name": "old", "model": sys.argv[2], "run_id": run["id"], "step": 1,
    "adapter_path": str(adapter), "data": {"rank": 8, "port": None, "thinking": False}})
print(run["id"])
"""
RUN_SCRIPT = "import runpy\nrunpy.run_path({path!r}, run_name='__main__')\n"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The old version in a folder of its own."""
    command = ["git", "-C", str(ROOT), "archive", OLD]
    found = shutil.which("git") and subprocess.run(command, capture_output=True, check=False)
    if not found or found.returncode:
        pytest.skip(f"the commit {OLD[:7]} is not in this clone")
    folder = tmp_path / "old"
    with tarfile.open(fileobj=BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old_environment(old: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with which Python finds the old version, whose worker and model server are
    scripts."""
    worker = tmp_path / "scripts" / "worker"
    worker.mkdir(parents=True)
    (worker / "__init__.py").touch()
    for module, script in {"main": "scripted_worker.py", "serving": "scripted_server.py"}.items():
        text = RUN_SCRIPT.format(path=str(old / "tests" / script))
        (worker / f"{module}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{worker.parent}:{old}"}


@pytest.fixture
def old_supervisor(
    flash_home: Path, old_environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of the old version, its run held at step 3 and its deployment ready."""
    flash_home.mkdir()
    make = [sys.executable, "-P", "-c", ENQUEUE, str(flash_home), MODEL]
    subprocess.run(make, env=old_environment, cwd=flash_home, check=True)
    command = [*process.PYTHON, "flash_mcp.supervisor", "--home", str(flash_home)]
    with subprocess.Popen(command, env=old_environment, cwd=flash_home) as supervisor:
        wait_for(lambda: _has_come_so_far(flash_home))
        yield supervisor
        supervisor.kill()
    end_supervisors(flash_home)
    launcher = LocalLauncher(flash_home / "attempts", gpus=[])
    for record in (flash_home / "attempts").glob("run-*"):
        launcher.cancel(Handle(record.name, ""))
    if server := Server.find(flash_home, MODEL):
        server.stop()


def stored_paths(store: Store) -> list[str]:
    """The paths of checkpoints, of which the old version wrote some, as they stand in the file."""
    with sqlite3.connect(store.path) as database:
        return [path for (path,) in database.execute("SELECT path FROM checkpoints")]


def _has_come_so_far(base: Path) -> bool:
    """Asked of files alone: the new code's store would change the database."""
    (folder,) = [*(base / "runs").glob("run-*")] or [base]
    beat = RunFolder(folder).beat()
    with sqlite3.connect(base / "flash.db") as database:
        states = database.execute("SELECT state FROM deployments").fetchall()
    return states == [("ready",)] and beat is not None and beat["step"] == 3


@pytest.mark.slow
def test_the_new_version_takes_over_a_run_and_a_deployment_of_the_old(
    flash_home: Path, old_supervisor: subprocess.Popen[bytes]
) -> None:
    assert LockOwner.read(flash_home) == LockOwner(old_supervisor.pid)
    store = open_store()
    keeper.look_after(store)
    assert old_supervisor.wait(30) != 0
    wait_for(lambda: LockOwner.read(flash_home) not in (None, LockOwner(old_supervisor.pid)))
    holder = LockOwner.read(flash_home)
    assert holder
    assert holder.version == __version__
    keeper.look_after(store)
    assert LockOwner.read(flash_home) == holder  # one of this version stays

    (run,) = store.runs()
    assert (run.state, run.attempt) == ("running", 1)
    Path(run.folder, "go").touch()
    wait_for(lambda: store.run(run.id).ended)
    ended = store.run(run.id)
    assert (ended.state, ended.step, ended.attempt) == ("succeeded", 5, 1)
    assert [row.step for row in store.metrics(run.id)] == [1, 2, 3, 4, 5]
    assert [row.step for row in store.checkpoints(run.id)] == [1, 2, 3, 4, 5]
    assert store.rollout_count(run.id) == 15
    launched = [event.name for event in store.events(run.id, 99, ["attempt"])]
    assert launched == ["0001-launched"]

    assert all(path.startswith(HERE) for path in stored_paths(store))
    (deployment,) = store.deployments()
    assert deployment.state == "ready"
    assert deployment.pid
    chat = asyncio.run(TOOLS["chat"].function(deployment=deployment.id, message="Hi"))
    assert chat.adapter.text == "hello"
    stopped = asyncio.run(TOOLS["undeploy"].function(deployment=deployment.id))
    assert stopped.state == "stopped"
    wait_for(lambda: not is_running(deployment.pid or 0))


def test_a_process_that_is_not_the_supervisor_is_left_alone(flash_home: Path) -> None:
    """The lock names an old version's pid, which by now is another program's."""
    flash_home.mkdir()
    with (
        subprocess.Popen(["/bin/sleep", "100"]) as other,
        (flash_home / process.LOCK).open("a+") as held,
    ):
        held.write(f"{other.pid}\n")
        held.flush()
        lock = process.take_lock(flash_home)
        assert lock
        with lock:
            assert is_supervised(flash_home)
            assert not process.ensure_supervisor(flash_home)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    ("version", "is_older"), [("", True), ("0.0.9", True), (__version__, False), ("99.0", False)]
)
def test_only_an_older_version_is_replaced(version: str, is_older: bool) -> None:
    assert LockOwner(1, version).is_older() == is_older
