"""A state directory that is moved: the database names its files relative to it."""

import json
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
from tests.samples import ENVIRONMENT, finished_run
from tests.state.test_backup import type_commands

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
