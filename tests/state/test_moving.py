"""A state directory that is moved: the database names its files relative to it."""

import json
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

from flash_mcp.protocol.records import Checkpoint, Deployment, EnvironmentVersion, Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.database import PATH_COLUMNS
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.serving import request
from flash_mcp.state.sqlite import Database
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import inline_files, staged
from tests.places import ROOT
from tests.samples import ENVIRONMENT, finished_run
from tests.supervisor.test_loop import Bench, bench, start_supervisor
from tests.waiting import wait_for

Everything = tuple[list[Run], list[Checkpoint], list[EnvironmentVersion], list[Deployment]]


def furnish(home: Path, scratch: Path) -> None:
    """A run with checkpoints, one that starts from it and from a dataset, environments of two
    owners, and a deployment."""
    store = open_store()
    run = finished_run(scratch)
    for owner in ("local", "alice"):
        with acting_as(Caller(owner)), staged("sums", _files()) as stage:
            store.publish(stage)
    adapter = {"path": store.checkpoint(run.id).path, "run_id": run.id, "step": 20, "digest": "d"}
    dataset = {"name": "rows", "digest": "e", "path": str(home / "datasets" / "rows" / "e")}
    Path(dataset["path"]).mkdir(parents=True)
    Path(dataset["path"], "train.jsonl").touch()
    args = {"rows": f"{home}/rows", "nested": [{"of": f"{home}/more"}], "own": "./data", "n": 3}
    spec = resolve(RunSpec(environment="sums", algorithm="sft", environment_args=args))
    queue.enqueue(store, spec, store.environment("sums"), adapter, dataset=dataset)
    request(store, run.id)


def _files() -> dict[str, bytes]:
    return dict(inline_files({"environment.py": ENVIRONMENT}))  # pyright: ignore[reportReturnType]


def everything(store: Store) -> Everything:
    runs = store.runs()
    checkpoints = [row for run in runs for row in store.checkpoints(run.id)]
    return runs, checkpoints, store.environments(), store.deployments()


def as_text(found: Everything) -> str:
    return json.dumps([[vars(row) for row in rows] for rows in found], default=RunSpec.model_dump)


def stored_texts(base: Path) -> list[str]:
    """What stands in the columns that hold paths."""
    db = Database(base / "flash.db")
    found: list[str] = []
    for table, columns in PATH_COLUMNS.items():
        for row in db.query(f"SELECT {', '.join(columns)} FROM {table}"):
            found += [text for text in row.values() if text is not None]
    db.close()
    return found


@pytest.fixture
def furnished(flash_home: Path, tmp_path: Path) -> Path:
    furnish(flash_home, tmp_path)
    open_store().close()
    return flash_home


def check_moved(before: Everything, old: Path, new: Path) -> None:
    """Everything reads in the new place as it did in the old one."""
    after = everything(Store(new))
    assert as_text(after) == as_text(before).replace(f"{old}/", f"{new}/")
    runs, checkpoints, environments, deployments = after
    for run in runs:
        if run.attempt:
            assert RunFolder(run.folder).checkpoints.newest_good() == 20
    assert checkpoints
    paths = [row.path for row in checkpoints]
    paths += [row.path for row in environments if row.name == "sums"]
    paths += [str(row.adapter_path) for row in deployments]
    assert all(Path(path).is_dir() and Path(path).is_relative_to(new) for path in paths)
    (waiting,) = [run for run in runs if not run.attempt]
    assert waiting.init_adapter and waiting.dataset
    for path in (waiting.environment_path, waiting.init_adapter["path"], waiting.dataset["path"]):
        assert Path(path).is_dir() and Path(path).is_relative_to(new)
    assert waiting.spec.environment_args["own"] == "./data"


def test_a_moved_state_directory_reads_as_before(furnished: Path, tmp_path: Path) -> None:
    before = everything(Store(furnished))
    new = tmp_path / "elsewhere"
    furnished.rename(new)
    check_moved(before, furnished, new)
    assert not [text for text in stored_texts(new) if str(furnished) in text or str(new) in text]


def test_a_backup_is_restored_elsewhere(furnished: Path, tmp_path: Path) -> None:
    before = everything(Store(furnished))
    new = tmp_path / "elsewhere"
    type_commands(furnished, tmp_path, new)
    check_moved(before, furnished, new)


__all__ = ["bench"]
TEXT = re.search(r"^## Backup\n(.*?)^## ", (ROOT / "docs" / "reliability.md").read_text(), re.DOTALL | re.MULTILINE)
BLOCKS = re.findall(r"(?:^    .*\n)+", TEXT[1] if TEXT else "", re.MULTILINE)
SAVE, UNPACK = map(textwrap.dedent, BLOCKS)


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


@pytest.mark.skipif(not shutil.which("sqlite3"), reason="sqlite3 is not installed")
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


@pytest.mark.skipif(not shutil.which("sqlite3"), reason="sqlite3 is not installed")
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
