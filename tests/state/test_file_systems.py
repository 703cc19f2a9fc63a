"""State directories in odd places: file systems without hard links or locks, links, odd names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flash_mcp.cli import doctor
from flash_mcp.supervisor.process import is_supervised
from tests.places import ROOT, TESTS
from tests.refuse import refusing
from tests.samples import ENVIRONMENT
from tests.supervisor.test_ensure import end_supervisors

STEPS = 4
LOOP = """
import sys
from flash_mcp.cli.main import main
from flash_mcp.state.store import open_store

def call(*words):
    print(*words, flush=True)
    code = main(words)
    assert code == 0, code

call("env-push", sys.argv[1], "--name", "echo")
call("train", "--environment", "echo", "--steps", sys.argv[2])
(run,) = open_store().runs()
call("wait", run.id, "--timeout-s", "100")
call("status", run.id)
call("rollouts", run.id)
call("checkpoints", run.id)
print(run.id)
"""
"""What an agent does, with the real tools, supervisor and launcher, and a worker that is a script."""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture
def with_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tests/scripted_worker.py the worker of every supervisor that is started."""
    worker = tmp_path / "scripts" / "worker"
    worker.mkdir(parents=True)
    (worker / "__init__.py").touch()
    path = str(TESTS / "scripted_worker.py")
    (worker / "main.py").write_text(f"import runpy\nrunpy.run_path({path!r}, run_name='__main__')")
    monkeypatch.setenv("PYTHONPATH", f"{worker.parent}:{ROOT}")


@pytest.fixture(autouse=True)
def no_supervisor_left(flash_home: Path) -> Iterator[None]:
    yield
    for home in (Path(os.environ["FLASH_HOME"]), flash_home):
        if home.is_absolute():
            end_supervisors(home)


def play(environment: Path, *prefix: str, cwd: Path = ROOT) -> str:
    """Play LOOP; its output."""
    command = [*prefix, sys.executable, "-c", LOOP, str(environment), str(STEPS)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"step {STEPS}") >= 1, done.stdout
    return done.stdout


def refused(names: str, code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code, which finds the state directory in sys.argv[1], without these system calls."""
    command = [*refusing(names), sys.executable, "-c", code, str(home)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# -- file systems that lack something --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("with_script")
def test_the_loop_works_without_hard_links_and_flock(environment: Path) -> None:
    play(environment, *refusing("link,linkat,flock"))


@pytest.mark.slow
def test_one_supervisor_runs_without_flock(flash_home: Path) -> None:
    """By locks of another kind, which hold for as long as the supervisor keeps the file open."""
    flash_home.mkdir()
    code = """
import pathlib, sys
from flash_mcp.supervisor import process
home = pathlib.Path(sys.argv[1])
process.START_TIMEOUT_S = 60
print(process.ensure_supervisor(home), process.take_lock(home), process.is_supervised(home))
"""
    assert refused("flock", code, flash_home).stdout.split() == ["True", "None", "True"]
    assert refused("flock", code, flash_home).stdout.split() == ["False", "None", "True"]


@pytest.mark.slow
def test_artifacts_and_exports_are_shared_without_flock(flash_home: Path) -> None:
    """Each is made under a lock, by whichever process comes first."""
    flash_home.mkdir()
    code = """
import pathlib, sys
from environments import locks
from flash_mcp.protocol.artifacts import Artifacts, trim
from flash_mcp.extensions.export.background import Exporter
home = pathlib.Path(sys.argv[1])
(home / "made").mkdir()
(home / "made" / "file").write_text("text")
artifacts = Artifacts(str(home / "storage"), retry_s=5)
fetched = artifacts.fetch(artifacts.put(home / "made", "run-1"), home / "cache")
print((fetched / "file").read_text())
trim(home / "cache", 0)
print(fetched.is_dir())
exporter = Exporter(home, "run-1@3", "adapter", None)
print(exporter.look())
with exporter._lock() as held:
    print(locks.try_lock(held), exporter.look().state)
"""
    done = refused("flock", code, flash_home)
    assert done.stdout.split() == ["text", "True", "None", "True", "running"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("call", ["ensure_supervisor(home)", "take_lock(home)", "is_supervised(home)"])
def test_no_supervisor_starts_without_any_locks(flash_home: Path, call: str) -> None:
    flash_home.mkdir()
    (flash_home / "supervisor.lock").touch()
    code = f"""
import pathlib, sys
from flash_mcp.supervisor.process import *
home = pathlib.Path(sys.argv[1])
{call}
"""
    found = refused("flock,fcntl", code, flash_home).stderr.splitlines()[-1]
    assert "[locks_unsupported path=" in found and "No locks available" in found
    assert not is_supervised(flash_home)


@pytest.mark.slow
def test_the_doctor_names_a_file_system_without_locks(flash_home: Path) -> None:
    code = "from flash_mcp.cli import doctor; print(doctor.CHECKS['file system']())"
    found = refused("flock,fcntl", code, flash_home).stdout
    assert found.startswith("('problem', ") and "refuses file locks" in found


@pytest.mark.parametrize(
    ("kind", "level"), [("ext4", "ok"), ("nfs4", "warning"), ("cifs", "warning"), ("fuse.sshfs", "warning")]
)
def test_the_doctor_names_a_network_file_system(flash_home: Path, monkeypatch, kind: str, level: str):
    inner = SimpleNamespace(mountpoint=str(flash_home.parent), fstype=kind)
    outer = SimpleNamespace(mountpoint="/", fstype="overlay")
    monkeypatch.setattr(psutil, "disk_partitions", lambda *, all: [inner, outer])
    found = doctor.CHECKS["file system"]()
    assert found[0] == level and kind in found[1]


# -- a state directory under another name ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("with_script")
def test_a_state_directory_may_have_any_name_and_be_a_link(environment: Path, tmp_path: Path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "-größe 日本 'quote\"$HOME\nline"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("FLASH_HOME", str(link))
    run_id = play(environment).splitlines()[-1]
    assert is_supervised(link) and is_supervised(real)
    end_supervisors(link)
    moved = tmp_path / "moved"
    real.rename(moved)
    for home in (moved, link):
        link.unlink(missing_ok=True)
        link.symlink_to(moved)
        wait = [sys.executable, "-m", "flash_mcp.cli", "wait", run_id]
        variables = {**os.environ, "FLASH_HOME": str(home)}
        subprocess.run(wait, env=variables, cwd=ROOT, check=True)  # 0: it has succeeded
