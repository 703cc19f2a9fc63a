"""Which checkpoints of a run are kept, and what a kill between two file operations leaves."""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.checkpoints import OPTIMIZER, Checkpoints
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.storage import Storage
from flash_mcp.state import queue, retention, serving
from flash_mcp.state.disk import usage
from flash_mcp.state.locks import BACKUP, try_lock
from flash_mcp.state.removal import remove
from flash_mcp.state.retention import drop_files, prune_checkpoints
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.checkpoints import _listed
from tests.places import ROOT
from tests.samples import end, evaluate, learn, read_in, started_run
from tests.supervisor.test_maintenance import clear, ended_days_ago
from tests.waiting import WAIT_S

STEPS = range(1, 11)


@pytest.fixture
def store(flash_home: Path) -> Store:
    return open_store()


def saved(folder: Path, *, best: int = 3, **fields: int) -> tuple[Run, RunWriter]:
    """A run with a checkpoint at each of STEPS, of which `best` had the highest reward."""
    run, writer = started_run(folder / "environment", **fields)
    for step in STEPS:
        adapter = folder / f"adapter-{step}"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"r": 32, "lora_alpha": 64}')
        (adapter / "adapter_model.safetensors").write_bytes(b"weights")
        (adapter / OPTIMIZER).write_bytes(b"moments")
        writer.commit_checkpoint(step, adapter, {"reward/mean": 0.9 if step == best else 0.5})
    read_in(open_store(), run.id)
    return run, writer


def steps(store: Store, run: Run) -> list[int]:
    """The steps with a checkpoint, in the store and in the folder."""
    found = [row.step for row in store.checkpoints(run.id)]
    assert RunFolder(run.folder).checkpoints.steps() == found
    return found


def with_optimizer(run: Run) -> list[int]:
    folder = RunFolder(run.folder)
    paths = {step: Path((folder.checkpoints.manifest(step) or {})["path"]) for step in STEPS}
    return [step for step, path in paths.items() if (path / OPTIMIZER).is_file()]


# -- the optimizer's state -------------------------------------------------------------------------


def test_only_the_newest_good_checkpoint_keeps_the_optimizers_state(store: Store, tmp_path: Path) -> None:
    run, writer = saved(tmp_path)
    folder = RunFolder(run.folder)
    assert with_optimizer(run) == [10]
    for step in STEPS:
        assert folder.checkpoints.verify(step)["optimizer_bytes"] == len(b"moments")
    (row,) = [row for row in store.checkpoints(run.id) if row.step == 1]
    files = [path for path in Path(row.path).iterdir() if path.name != "MANIFEST.json"]
    assert row.size_bytes == sum(path.stat().st_size for path in files)
    assert serving.request(store, run.id, step=5).step == 5
    # A damaged one is none, so the one before is resumed from: without its optimizer's state.
    Path(folder.path("checkpoints", "10", "1-10", OPTIMIZER)).write_bytes(b"damaged")
    assert folder.checkpoints.newest_good() == 9
    end(writer, run.id, 10)


def test_a_checkpoint_that_cannot_be_read_back_takes_nothing_from_the_one_before(store: Store, tmp_path, monkeypatch):
    run, writer = saved(tmp_path)
    put = Storage.put_files

    def lie(self: Storage, place: str, files: dict[str, Path]) -> None:
        put(self, place, files)
        Path(self.path(place), "adapter_model.safetensors").write_bytes(b"other")

    monkeypatch.setattr(Storage, "put_files", lie)
    writer.commit_checkpoint(11, tmp_path / "adapter-10", {})
    assert with_optimizer(run) == [10] and RunFolder(run.folder).checkpoints.newest_good() == 10


def test_a_zombie_takes_nothing_from_its_successor(store: Store, tmp_path: Path) -> None:
    run, zombie = saved(tmp_path)
    RunWriter(RunFolder(run.folder), 2).commit_checkpoint(9, tmp_path / "adapter-9", {})
    zombie.folder.checkpoints._drop_older_optimizers("checkpoints/10/1-10", zombie.epoch)
    assert with_optimizer(run) == [9, 10]


def test_a_run_that_ended_long_ago_loses_its_optimizers_state_and_can_be_served(store: Store, tmp_path: Path) -> None:
    (long_ago, first), (lately, second) = (saved(tmp_path / name) for name in "ab")
    for writer, run, days in ((first, long_ago, 31), (second, lately, 29)):
        end(writer, run.id, 10)
        ended_days_ago(store, run, days)
    clear(store)
    assert (with_optimizer(long_ago), with_optimizer(lately)) == ([], [10])
    assert serving.request(store, long_ago.id).step == 10


KILLED = """
import os, shutil, sys
from pathlib import Path
from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.run_folder import RunWriter

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile"}
base = Path(sys.argv[1])

def commit(writer, step):
    adapter = base / f"adapter-{step}"
    adapter.mkdir(exist_ok=True)
    for name in ("adapter_model.safetensors", OPTIMIZER):
        (adapter / name).write_bytes(f"{name} {step}".encode())
    writer.commit_checkpoint(step, adapter, {})

def killed_after(operations, folder):
    left = operations
    def count(event, arguments):
        nonlocal left
        if event in OPERATIONS and str(folder) in str(arguments):
            left -= 1
            if left < 0:
                os._exit(9)
    sys.addaudithook(count)

start = RunFolder(base / "start")
writer = RunWriter(start, 1)
commit(writer, 10)
kills = 0
while True:
    folder = base / f"run-{kills}"
    shutil.copytree(base / "start", folder)
    child = os.fork()
    if child == 0:
        run = RunFolder(folder)
        writer = RunWriter(run, 2)
        killed_after(kills, folder)
        commit(writer, 20)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    run = RunFolder(folder)
    step = run.checkpoints.newest_good()
    assert step in (10, 20), (kills, step)
    path = run.checkpoints.fetch(step, base)
    assert (path / OPTIMIZER).read_bytes() == f"{OPTIMIZER} {step}".encode(), (kills, step)
    commit(RunWriter(run, 3), 20)
    assert run.checkpoints.newest_good() == 20
    found = sorted(str(each.relative_to(folder)) for each in folder.rglob(OPTIMIZER))
    assert found == [f"checkpoints/20/3-1/{OPTIMIZER}"], (kills, found)
    if os.waitstatus_to_exitcode(status) == 0:
        break
    kills += 1
print(kills)
"""


@pytest.mark.slow
def test_a_kill_between_any_two_file_operations_leaves_a_folder_that_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


# -- which checkpoints stay ------------------------------------------------------------------------


def test_the_newest_the_best_and_those_in_use_stay(store: Store, tmp_path: Path) -> None:
    few, _ = saved(tmp_path / "few", keep_checkpoints=9)
    prune_checkpoints(store, store.run(few.id))
    assert steps(store, few) == list(STEPS)
    run, writer = saved(tmp_path, keep_checkpoints=2)
    served = serving.request(store, run.id, step=1)
    store.update_deployment(served.id, state="stopped")
    served = serving.request(store, run.id, step=2)
    start = f'{{"run_id": "{run.id}", "step": 5, "path": ""}}'
    named = f'{{"run_id": null, "step": null, "path": "{store.checkpoint(run.id, 6).path}"}}'
    for adapter in (start, named):
        other, _ = saved(tmp_path / f"from-{len(adapter)}")
        store.execute("UPDATE runs SET init_adapter = ? WHERE id = ?", [adapter, other.id])
    prune_checkpoints(store, store.run(run.id))
    assert steps(store, run) == [1, 2, 3, 5, 6, 8, 9, 10]
    # A better one is known once it was evaluated.
    learn(writer, [7])
    evaluate(writer, 4, 10)
    evaluate(writer, 8, 90)
    read_in(store, run.id)
    prune_checkpoints(store, store.run(run.id))
    assert steps(store, run) == [1, 2, 5, 6, 8, 9, 10]
    end(writer, run.id, 10)


def test_an_evaluation_that_environment_code_failed_makes_no_checkpoint_the_best(store: Store, tmp_path: Path) -> None:
    run, writer = saved(tmp_path, keep_checkpoints=2)
    learn(writer, [4, 7])
    for step in (4, 7):
        writer.evaluation(step, {"n": 0, "success": None, "reward_mean": None, "error_share": 1.0}, [])
    read_in(store, run.id)
    prune_checkpoints(store, store.run(run.id))
    assert steps(store, run) == [3, 8, 9, 10]
    end(writer, run.id, 10)


def test_a_kill_while_checkpoints_are_deleted_is_made_good(store: Store, tmp_path: Path, monkeypatch):
    run, _ = saved(tmp_path, keep_checkpoints=2)
    move = retention.move_away

    def die_after(*arguments: object) -> None:
        move(*arguments)  # pyright: ignore[reportArgumentType]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retention, "move_away", die_after)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoints(store, store.run(run.id))
    prune_checkpoints(store, store.run(run.id))
    assert steps(store, run) == [3, 8, 9, 10] and not (store.base / "removed").exists()


def test_a_checkpoint_that_goes_while_it_is_to_be_served_is_refused(store: Store, tmp_path: Path, monkeypatch):
    run, _ = saved(tmp_path, keep_checkpoints=2)
    fetch = Checkpoints.fetch

    def and_prune(self: Checkpoints, step: int, into: Path, *, whole: bool, digest: str | None = None) -> Path:
        path = fetch(self, step, into, whole=whole, digest=digest)
        prune_checkpoints(store, store.run(run.id))
        return path

    monkeypatch.setattr(serving, "read_adapter_config", lambda *_: {"r": 32})
    monkeypatch.setattr(Checkpoints, "fetch", and_prune)
    with pytest.raises(FlashError, match="unknown_checkpoint"):
        serving.request(store, run.id, step=1)
    assert store.deployments() == []


@contextmanager
def backing_up(base: Path) -> Generator[None]:
    with (base / BACKUP).open("a+") as file:
        assert try_lock(file, shared=True)
        yield


def test_nothing_is_pruned_while_a_backup_copies_what_the_database_names(store: Store, tmp_path: Path) -> None:
    run, _ = saved(tmp_path, keep_checkpoints=2)
    before = steps(store, run)
    with backing_up(store.base), backing_up(store.base):
        prune_checkpoints(store, run)
        assert steps(store, run) == before
    prune_checkpoints(store, run)
    assert len(steps(store, run)) < len(before)


def test_no_backup_begins_while_files_are_deleted(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, _ = saved(tmp_path, keep_checkpoints=2)
    began: list[bool] = []

    def try_to_begin(*arguments: Any) -> None:
        with (store.base / BACKUP).open("a") as file:
            began.append(try_lock(file, shared=True))
        move_away(*arguments)

    move_away = retention.move_away
    monkeypatch.setattr(retention, "move_away", try_to_begin)
    prune_checkpoints(store, run)
    assert began == [False]
    with backing_up(store.base):
        assert len(steps(store, run)) < len(STEPS)


def test_no_run_loses_its_files_while_a_backup_copies_them(store: Store, tmp_path: Path) -> None:
    run, _ = saved(tmp_path)
    assert queue.finish(store, run.id, 1, "succeeded", step=10)
    with backing_up(store.base):
        assert not drop_files(store, run.id, "it is old")
        with pytest.raises(FlashError, match="a backup is being made"):
            remove(store, run.id)
        assert remove(store, run.id, dry_run=True).freed_bytes and steps(store, run) == list(STEPS)
    assert drop_files(store, run.id, "it is old") and not Path(run.folder).exists()


def test_latest_leads_to_the_newest_checkpoint_and_is_none_itself(store: Store, tmp_path: Path) -> None:
    run, writer = saved(tmp_path, keep_checkpoints=1)
    link = Path(run.folder, "latest")
    taken = usage(store.base)["checkpoints"]
    listed = _listed(store, run.id, 3, None)
    assert f"{link} leads to the newest" in listed.next
    assert link.resolve() == Path(listed.checkpoints[0].path).resolve()
    assert (link / "adapter_config.json").is_file()
    prune_checkpoints(store, store.run(run.id))
    assert link.resolve() == Path(listed.checkpoints[0].path).resolve()
    assert usage(store.base)["checkpoints"] < taken
    assert RunFolder(run.folder).checkpoints.steps() == [3, 9, 10]
    # An attempt that was replaced, and wakes, moves it nowhere.
    RunFolder(run.folder).claim(2)
    with pytest.raises(FlashError, match="newer attempt"):
        writer.commit_checkpoint(11, tmp_path / "adapter-10", {})
    read_in(store, run.id)
    assert link.resolve() == Path(listed.checkpoints[0].path).resolve()
