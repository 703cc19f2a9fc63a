"""How an attempt brings this version of flash-mcp to a node, with real uv."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

import fsspec
import pytest

from environments import locks
from environments.process import requirements
from environments.sandbox.scratch import scratch_folder
from flash_mcp import __version__
from flash_mcp.protocol import node_code
from flash_mcp.protocol.artifacts import Artifacts
from flash_mcp.protocol.node_code import Order
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor import targets
from flash_mcp.supervisor.targets import code_folder, on_node
from tests.places import ROOT
from tests.protocol.test_run_folder import BUCKET, ObjectStore
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

UV = Path(sys.executable).with_name("uv")


class Node:
    """A machine that shares a storage, and no more."""

    def __init__(self, tmp_path: Path, flash_home: Path, storage: str = "") -> None:
        self.storage = storage or str(tmp_path / "shared")
        self.home = tmp_path / "node"
        self.caches = self.home / "machines" / socket.gethostname()
        self.log = tmp_path / "log.1"
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "uv").symlink_to(UV)
        interpreter = Path(sys.executable).resolve()
        (tmp_path / "my python").symlink_to(interpreter.parent)
        self.python = f"'{tmp_path}/my python/{interpreter.name}'"
        flash_home.mkdir(exist_ok=True)
        artifacts = Artifacts(self.storage, retry_s=5)
        self.digest = artifacts.put(code_folder(flash_home), "run-1")
        self.archive = artifacts.url_of(self.digest)
        self.variables = {"PATH": f"{programs}:/usr/bin:/bin", "FLASH_HOME": str(self.home), "UV_OFFLINE": "1",
                          "PYTHONPATH": sysconfig.get_path("purelib")}  # fmt: skip

    def start(self, *module: str, **variables: str) -> subprocess.Popen[str]:
        settings = TargetSettings(engine="slurm", storage=self.storage, setup="uv", python=self.python)
        code = Order(archive=self.archive, digest=self.digest, log=str(self.log))
        command = on_node(settings, module, code)
        if "://" in self.storage:  # uv would fetch fsspec for it, which this interpreter has
            command = [sys.executable, *command[command.index("python") + 1 :]]
        return subprocess.Popen(
            command, env={**self.variables, **variables}, cwd="/",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *module: str, **variables: str) -> tuple[int, str]:
        process = self.start(*module, **variables)
        said, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, said


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have no index: flash-mcp is installed without the packages that it needs."""
    monkeypatch.setattr(targets, "OVERRIDES", without_packages())


def without_packages() -> str:
    names = {re.split(r"[^\w.-]", line)[0] for line in metadata.requires("flash-mcp") or ()}
    return "".join(f"{name}; sys_platform == 'never'\n" for name in sorted(names))


@pytest.fixture
def node(tmp_path: Path, flash_home: Path) -> Node:
    return Node(tmp_path, flash_home)


def is_locked(path: Path) -> bool:
    with path.open("a") as lock:
        return not locks.try_lock(lock)


def test_attempts_at_once_share_one_installation_of_the_servers_version(node: Node) -> None:
    longest = node.start("http.server", "0")
    processes = [node.start("inspect", "--details", "worker.node") for _ in range(2)]
    for process in processes:
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, said
        assert f"Origin: {node.caches}/code/{node.digest[:16]}-cpu/venv/lib/" in said
    # Until it holds the lock, an attempt of another version could remove what it runs.
    wait_for(lambda: is_locked(node.caches / "code" / f"{node.digest[:16]}-cpu.lock"))
    assert longest.poll() is None
    (unchanged := next(node.caches.glob("code/*/venv")) / "unchanged").touch()
    assert node.run("inspect", "flash_mcp")[0] == 0
    assert unchanged.exists()
    longest.terminate()  # which uv passes on
    longest.communicate()
    installed = next(node.caches.glob("code/*/venv/lib/*/site-packages/flash_mcp-*.dist-info"))
    assert f"Version: {__version__}\n" in (installed / "METADATA").read_text()
    for path in (ROOT / "flash_mcp").rglob("*.py"):
        assert (installed.parent / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


def test_the_code_comes_out_of_an_object_store_too(tmp_path: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    store = ObjectStore()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
    node = Node(tmp_path, flash_home, f"s3://{BUCKET}/flash")
    module = ("inspect", "--details", "worker.node")
    code, said = node.run(*module, **store.environment)
    store.end()
    assert code == 0, said
    assert f"Origin: {node.caches}/code/" in said


def test_an_installation_that_was_broken_off_is_made_anew(node: Node) -> None:
    left = node.caches / "code" / f"{node.digest[:16]}-cpu"
    (left / "venv").mkdir(parents=True)
    assert node.run("inspect", "flash_mcp")[0] == 0
    assert (left / "ready").exists()


def test_what_goes_wrong_is_in_the_log_that_the_server_reads(node: Node) -> None:
    code, said = node.run("inspect", "flash_mcp", UV_REQUIRE_HASHES="1")
    assert code == 1 and "could not be installed on this node" in said
    assert "hash" in node.log.read_text()
    with Path(node.archive).open("ab") as stream:
        stream.write(b"damage")
    code, _ = node.run("inspect", "flash_mcp")
    assert code == 1
    assert f"{node.archive} does not match its checksum" in node.log.read_text()


def test_versions_that_nobody_used_for_a_week_are_removed(node: Node) -> None:
    long_ago = time.time() - 8 * 86_400
    for name in ("old", "used", "new"):
        (node.caches / "code" / name).mkdir(parents=True)
        lock = node.caches / "code" / f"{name}.lock"
        lock.touch()
        if name != "new":
            os.utime(lock, (long_ago, long_ago))
    with (node.caches / "code" / "used.lock").open() as held:
        locks.lock(held, shared=True)
        assert node.run("inspect", "flash_mcp")[0] == 0
    assert not (node.caches / "code" / "old").exists()
    assert (node.caches / "code" / "used").exists() and (node.caches / "code" / "new").exists()


def test_an_installation_that_is_half_removed_does_not_count_as_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = tmp_path / "old"
    old.mkdir()
    (old / node_code.READY).touch()
    (tmp_path / "old.lock").touch()
    os.utime(tmp_path / "old.lock", (1, 1))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    node_code._clear(tmp_path / "new")
    assert not (old / node_code.READY).exists()


def test_the_code_is_the_same_bytes_each_time(flash_home: Path) -> None:
    flash_home.mkdir(exist_ok=True)
    first = {path.name: path.read_bytes() for path in code_folder(flash_home).iterdir()}
    shutil.rmtree(flash_home / "code")
    assert {path.name: path.read_bytes() for path in code_folder(flash_home).iterdir()} == first


def test_a_job_that_an_engine_starts_again_after_the_end_of_its_run_does_nothing(tmp_path: Path) -> None:
    """As SkyPilot does if the machine is taken away while the job ends."""
    folder = RunFolder(tmp_path / "run")
    folder.create({"run_id": "run-1"})
    RunWriter(folder, 1).commit_result("succeeded", 3)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "worker.node", folder.url, "--attempt", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "the run has its result\n")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files


def test_a_node_with_another_version_is_refused_with_both(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create({"run_id": "run-1"})
    command = [sys.executable, "-m", "worker.node", folder.url, "--attempt", "1"]
    done = subprocess.run([*command, "--version", "9.9.9"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "run" / "result.1.json").read_text())
    error = result["error"]
    assert (result["state"], error["code"]) == ("failed", "target_refused")
    assert f"has flash-mcp {__version__}; the server has 9.9.9" in error["what"]


def test_nodes_that_share_a_home_have_caches_of_their_own(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in ("one", "two"):
        monkeypatch.setenv("FLASH_MACHINE", machine)
        caches = flash_home / "machines" / machine
        assert requirements.interpreters_dir() == caches / "interpreters"
        folder, held = scratch_folder("me", 1, 1)  # no more than one at once, on each machine
        with held:
            assert folder.parent == caches / "scratch"
