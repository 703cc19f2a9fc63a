"""The commands of a backup in docs/reliability.md, typed while a supervisor and its worker write."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest

from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.store import Store
from tests.places import ROOT
from tests.samples import finished_run
from tests.supervisor.test_loop import Bench, bench, start_supervisor
from tests.waiting import wait_for

__all__ = ["bench"]
TEXT = re.search(r"^## Backup\n(.*?)^## ", (ROOT / "docs" / "reliability.md").read_text(), re.DOTALL | re.MULTILINE)
BLOCKS = re.findall(r"(?:^    .*\n)+", TEXT[1] if TEXT else "", re.MULTILINE)
SAVE, UNPACK = map(textwrap.dedent, BLOCKS)

pytestmark = pytest.mark.skipif(not shutil.which("sqlite3"), reason="sqlite3 is not installed")


def type_commands(base: Path, user_home: Path, new: Path) -> None:
    """Save the state directory `base` to `user_home`, and unpack it as `new`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(user_home), "FLASH_HOME": str(base), "PATH": path}
    saved = subprocess.run(["sh", "-c", SAVE], env=env, capture_output=True, text=True)
    assert saved.returncode <= 1, saved.stderr  # 1: a file changed as it was read
    unpack = UNPACK.replace("/new/folder", str(new))
    assert "flash-mcp doctor" in unpack
    done = subprocess.run(["sh", "-c", unpack], env=env, capture_output=True, text=True)
    assert "state_corrupt" not in done.stdout and str(new) in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_backup_taken_while_a_supervisor_writes_goes_on_elsewhere(bench: Bench, tmp_path: Path) -> None:
    ended = bench.train({"steps": 3})
    bench.finish(ended)
    run = bench.train({"steps": 40, "1": {"at": 38, "do": "hold"}})
    process = start_supervisor(bench)
    beside = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    beside.mkdir()
    wait_for(lambda: bench.step(run) >= 9)
    type_commands(bench.base, beside, beside / "new")
    process.kill()
    process.wait()
    second = Bench(beside / "new")
    there = second.store.run(run.id)
    assert there.folder == str(beside / "new" / "runs" / run.id) and there.state in ("starting", "running")
    steps = [row.step for row in second.store.metrics(run.id)]
    assert steps == list(range(1, len(steps) + 1)) and all(RunFolder(there.folder).metrics(step) for step in steps)
    for row in second.store.checkpoints(run.id):
        RunFolder(there.folder).checkpoints.verify(row.step)
    assert len(second.store.metrics(ended.id)) == 3
    Path(there.folder, "go").touch()  # and it ends there as it would have here
    done = second.finish(there)
    assert (done.state, done.step) == ("succeeded", 40)
    assert [row.step for row in second.store.metrics(run.id)] == list(range(1, 41))
    second.clean_up()
    bench.clean_up()


@pytest.mark.slow
def test_a_backup_is_private_and_has_settings_and_results_only(flash_home: Path, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for name in ("settings.toml", "targets.toml", "targets.key"):
        (flash_home / name).write_text(f"# {name}\n")
    (flash_home / "models").mkdir()
    (flash_home / "models" / "weights").write_bytes(b"to be fetched again")
    before = sorted(flash_home.rglob("*"))
    type_commands(flash_home, tmp_path, tmp_path / "new")
    assert {*flash_home.rglob("*")} - {*before} <= {flash_home / "backup.lock"}
    archive = tmp_path / "state.tar"
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as saved:
        tops = {name.partition("/")[0] for name in saved.getnames()}
    assert tops - {"environments", "datasets"} == {"flash.db", "runs", "settings.toml", "targets.toml", "targets.key"}
    store = Store(tmp_path / "new")
    assert store.run(run.id).state == "succeeded" and len(store.metrics(run.id)) == 20
    assert RunFolder(store.run(run.id).folder).checkpoints.newest_good() == 20
