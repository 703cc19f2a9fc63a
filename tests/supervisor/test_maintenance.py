"""What the supervisor deletes to make room, and what it leaves."""

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import scratch_prefix
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import datasets, removal
from flash_mcp.state.disk import size_of
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.removal import add_removed, due_folders
from flash_mcp.state.retention import leftovers
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import staged
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.launch.base import JobStatus
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.maintenance import LocalMaintenance, Maintenance
from flash_mcp.supervisor.reconciler import RunReconciler
from flash_mcp.supervisor.secrets import Vault
from flash_mcp.tools.compare import compare
from flash_mcp.tools.status import status
from tests.protocol.test_artifacts import folder as some_folder
from tests.samples import finished_run, queued_run, started_run, supervised
from tests.supervisor.test_targets import HASTE, Bench, Lab, bench
from tests.waiting import wait_for

DAY_S = 86_400.0


@pytest.fixture
def store(flash_home: Path) -> Store:
    return open_store()


def ended_days_ago(store: Store, run: Run, days: float, **columns: str) -> Run:
    for name, value in {**columns, "ended": time.time() - days * DAY_S}.items():
        store.execute(f"UPDATE runs SET {name} = ? WHERE id = ?", [value, run.id])
    return store.run(run.id)


def allow(store: Store, **values: float) -> None:
    lines = [f"{name} = {value}" for name, value in values.items()]
    (store.base / "settings.toml").write_text("\n".join(["[disk]", *lines]))


def clear(store: Store) -> None:
    LocalMaintenance(store, Supervisor(store.base).target).step()


def has_files(run: Run) -> bool:
    return Path(run.folder).is_dir()


# -- leftovers -------------------------------------------------------------------------------------


def test_leftovers_of_killed_processes_are_deleted_after_a_day(store: Store, tmp_path: Path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    over = finished_run(tmp_path)
    active, _ = started_run(tmp_path / "environment")
    old = [
        store.base / "environments" / ".staged-abc",
        store.base / "environments" / "@alice" / ".upload-abc",
        store.base / "datasets" / ".staged-abc",
        store.base / "removed" / "abc",
        Path(over.folder, "metrics", f".7.json.{'0' * 32}"),
        temporary / f"{scratch_prefix(over.folder)}abc",
        temporary / f"{scratch_prefix(str(store.base / 'runs' / 'srv-dead'))}abc",
        store.base / "runs" / "srv-dead",
    ]
    running = store.base / "runs" / "srv-running"  # its heartbeat has just been written
    running.mkdir(parents=True)
    kept = [
        store.base / "environments" / ".staged-new",
        store.base / "environments" / "echo",
        Path(over.folder, "metrics", ".mine"),
        Path(active.folder, "metrics", f".7.json.{'0' * 32}"),
        temporary / f"{scratch_prefix(active.folder)}abc",
        temporary / "flash-of-another-program",
        temporary / f"{scratch_prefix(str(running))}abc",
    ]
    for path in (*old, *kept):
        path.mkdir(parents=True)
        (path / "file").write_text("x" * 1000)
        if path.name != ".staged-new":
            os.utime(path, (0, 0))
    clear(store)
    assert [path for path in old if path.exists()] == [] and [path for path in kept if not path.exists()] == []


def test_a_leftover_of_another_user_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.base / "environments" / ".staged-abc"
    path.mkdir(parents=True)
    os.utime(path, (0, 0))
    assert list(leftovers(store)) == [path]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert list(leftovers(store)) == []


# -- old runs --------------------------------------------------------------------------------------


def test_no_run_loses_its_files_by_default(store: Store, tmp_path: Path) -> None:
    run = ended_days_ago(store, finished_run(tmp_path), 10_000)
    clear(store)
    assert has_files(run) and store.checkpoints(run.id)


def test_an_old_run_loses_its_files_and_stays_in_the_list_with_its_verdict(store: Store, tmp_path: Path) -> None:
    old, new = finished_run(tmp_path / "old"), finished_run(tmp_path / "new")
    ended_days_ago(store, old, 91)
    allow(store, run_days=90)
    with supervised():
        verdict = compare(old.id).verdict
        clear(store)
        assert not has_files(old) and has_files(new)
        assert store.rollout_count(old.id) == 0 and store.rollout_count(new.id) > 0
        assert store.checkpoints(old.id) == [] and len(store.metrics(old.id)) == 20
        assert "run_days in [disk] of settings.toml" in str(asyncio.run(status(run_id=old.id)))
        assert compare(old.id).verdict == verdict
    removed = store.run(old.id).files_removed
    clear(store)
    assert removed and store.run(old.id).files_removed == removed, "once"


def test_runs_that_are_active_served_or_started_from_keep_their_files(store: Store, tmp_path: Path) -> None:
    base, served, child, grandchild = (finished_run(tmp_path / str(n)) for n in range(4))
    queued = queued_run(tmp_path / "queued")
    for run in (base, served, child):
        ended_days_ago(store, run, 100)
    start = f'{{"run_id": "{base.id}", "step": 10, "path": "{base.folder}"}}'
    ended_days_ago(store, child, 100, init_adapter=start)
    start = f'{{"run_id": "{child.id}", "step": 10, "path": "{child.folder}"}}'
    ended_days_ago(store, grandchild, 1, init_adapter=start)
    values = {"owner": "local", "name": "mine", "model": served.model, "step": 20}
    store.add_deployment({"id": "dep-1", "run_id": served.id, **values, "state": "ready"})
    allow(store, run_days=90)
    clear(store)
    assert all(map(has_files, (base, served, child, grandchild)))
    # Each follows once nothing that has its files starts from it.
    ended_days_ago(store, grandchild, 100)
    store.update_deployment("dep-1", state="stopped")
    for _ in range(3):
        clear(store)
    assert not any(map(has_files, (base, served, child, grandchild)))
    assert store.run(queued.id).state == "queued"


def test_the_runs_that_ended_first_go_until_the_rest_fits(store: Store, tmp_path: Path) -> None:
    runs = [finished_run(tmp_path / str(n)) for n in range(4)]
    for days, run in enumerate(reversed(runs), start=1):
        ended_days_ago(store, run, days)
    size = size_of(Path(runs[0].folder))
    export = store.base / "exports" / f"{runs[2].id}-20-merged"
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(bytes(size))
    allow(store, total_gib=2.5 * size / 2**30)
    clear(store)
    assert list(map(has_files, runs)) == [False, False, False, True]
    assert not export.exists()


def test_a_broken_settings_file_stops_nothing_and_deletes_nothing(store: Store, tmp_path: Path, caplog):
    run = ended_days_ago(store, finished_run(tmp_path), 1000)
    (store.base / "settings.toml").write_text("[disk]\nrun_days = 'soon'")
    Supervisor(store.base, timeouts=Timeouts(poll_s=0.01, idle_exit_s=0.05)).run()
    assert has_files(run) and "run_days" in caplog.text


def test_the_supervisor_applies_the_limits_while_it_is_idle(store: Store, tmp_path: Path) -> None:
    run = ended_days_ago(store, finished_run(tmp_path), 1000)
    allow(store, run_days=1)
    Supervisor(store.base, timeouts=Timeouts(poll_s=0.01, idle_exit_s=0.05)).run()
    assert not has_files(run)


# -- what an owner may store -----------------------------------------------------------------------


def test_an_owner_may_store_as_much_as_the_operator_allows(store: Store) -> None:
    allow(store, uploads_gib=1e-6, datasets_gib=1e-6)
    files = {"environment.py": b"#" * 900}
    rows = [{"messages": [{"role": "user", "content": "x" * 600}]}]

    def push(name: str) -> None:
        with staged(name, files, store.base) as stage:
            store.publish(stage)

    def save(name: str) -> None:
        datasets.register(name, rows, [], {"counts": {}}, store.base)

    for put, key in ((push, "uploads_gib"), (save, "datasets_gib")):
        with acting_as(Caller("alice")):
            put("first")
            put("first")  # what is there already takes nothing
            with pytest.raises(FlashError) as caught:
                put("second")
        assert caught.value.code == "quota_exceeded" and f"{key} in [disk] of settings.toml" in caught.value.fix
        with acting_as(Caller("bob")):
            put("first")
        put("first")
        put("second")  # the local owner has no limit
    assert {row.name for row in store.environments() if row.owner == "alice"} == {"first"}


__all__ = ["bench"]
folder = some_folder


def files(run: Run) -> list[str]:
    return [str(path.relative_to(run.folder)) for path in Path(run.folder).rglob("*.*")]


def ended(bench: Bench, folder: Path, **fields: object) -> Run:
    """A run whose second attempt saved checkpoints and ended."""
    run = bench.train("lab", **fields)
    bench.until(lambda: bench.now(run).handle)
    bench.lab.engine.statuses[f"{run.id}-1"] = JobStatus("gone", "NODE_FAIL", is_preempted=True)
    bench.until(lambda: bench.now(run).attempt == 2)
    writer = bench.start(run)
    (folder / OPTIMIZER).write_bytes(b"moments")
    for step in (1, 2, 3, 4):
        writer.metrics(step, {"loss": 1.0})
        writer.commit_checkpoint(step, folder, {})
    writer.commit_result("succeeded", 4)
    bench.lab.engine.statuses[f"{run.id}-2"] = JobStatus("gone", "COMPLETED")
    bench.until(lambda: bench.now(run).ended)
    return bench.now(run)


def test_jobs_that_no_run_waits_for_are_ended_and_those_of_live_attempts_stay(bench: Bench) -> None:
    statuses = bench.lab.engine.statuses
    run = bench.train()
    bench.start(run)
    over = ("run-of-a-lost-row-1", f"{run.id}-0")  # the latter: an attempt that was replaced
    statuses |= dict.fromkeys(over, JobStatus("alive")) | {"run-pending-1": JobStatus("pending")}
    bench.reconciler.maintenance.clear()
    assert [statuses[key].state for key in (*over, "run-pending-1")] == ["gone"] * 3
    assert statuses[f"{run.id}-1"].state == "alive"


def test_a_target_leaves_the_jobs_of_another_target_on_the_same_engine(bench: Bench) -> None:
    near = Lab()
    near.name, near.launcher = "near", bench.lab.launcher
    reconciler = RunReconciler(bench.store, near, Vault(bench.store.base), HASTE)
    run, other = bench.train("lab"), bench.train("near")
    bench.until(lambda: bench.now(run).handle)
    reconciler.attend(bench.store.taken_runs("near"))
    keys = [f"{run.id}-1", f"{other.id}-1"]
    for maintenance in (bench.reconciler.maintenance, reconciler.maintenance):
        maintenance.clear()
        assert [bench.lab.engine.statuses[key].state for key in keys] == ["pending"] * 2
    assert {handle.key for handle in near.launcher.under_way()} == set(keys)


def test_a_supervisor_ends_what_one_that_died_left_on_a_target_without_active_runs(bench: Bench, folder: Path) -> None:
    ended(bench, folder)
    bench.lab.engine.statuses["run-of-a-lost-row-1"] = JobStatus("alive")
    supervisor = Supervisor(bench.store.base, launcher=Lab().launcher, timeouts=HASTE, open_target=lambda *_: bench.lab)

    def is_gone() -> bool:
        supervisor.tick()
        return bench.lab.engine.statuses["run-of-a-lost-row-1"].state == "gone"

    wait_for(is_gone)


def test_the_folder_of_a_removed_run_goes_though_the_remover_was_killed_and_an_attempt_writes_late(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(bench, folder)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "remove", lambda _: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            removal.remove(bench.store, run.id)
    assert files(run)
    maintenance = bench.reconciler.maintenance
    maintenance.clear()
    assert not Path(run.folder).exists()

    late = Path(run.folder, "metrics", "5.1.json")
    for _ in range(2):
        late.parent.mkdir(parents=True)
        late.write_text("{}")
        maintenance.clear()
        assert late.exists()  # it is not due yet
        bench.store.execute("UPDATE removed_folders SET due = 0", [])
        maintenance.clear()
        assert not Path(run.folder).exists()
    assert not bench.store.query("SELECT * FROM removed_folders")


def test_a_storage_that_does_not_answer_keeps_a_removed_folder_for_later(bench: Bench, folder: Path, monkeypatch):
    def refuse(_: RunFolder) -> None:
        raise FlashError("store_unreachable", "it is away")

    run = ended(bench, folder)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "remove", refuse)
        with pytest.raises(FlashError):
            removal.remove(bench.store, run.id)
        with pytest.raises(FlashError):
            bench.reconciler.maintenance.clear()
    assert [place for place, _ in due_folders(bench.store, "lab")] == [run.folder]
    bench.reconciler.maintenance.clear()
    assert not Path(run.folder).exists()


def aged(bench: Bench, run: Run, days: float) -> Maintenance:
    bench.store.execute("UPDATE runs SET ended = ? WHERE id = ?", [time.time() - days * DAY_S, run.id])
    return Maintenance(bench.store, bench.lab)


def test_what_attempts_that_were_replaced_left_goes_after_the_end_of_the_run(bench: Bench, folder: Path) -> None:
    run = ended(bench, folder)
    late = ["metrics/2.1.json", "checkpoints/9/1-1/adapter_model.safetensors", "evals/3/0001-0"]
    for name in (*late, "evals/3.2.json"):
        path = Path(run.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    before = set(files(run)) - set(late)
    aged(bench, run, 0.5).clear()
    assert set(files(run)) == before and not Path(run.folder, "evals/3/0001-0").exists()


def test_runs_on_targets_keep_the_checkpoints_and_files_that_were_asked_for(bench: Bench, folder: Path) -> None:
    run = ended(bench, folder, keep_checkpoints=1)
    assert [row.step for row in bench.store.checkpoints(run.id)] == [3, 4]
    assert RunFolder(run.folder).checkpoints.steps() == [3, 4]
    assert not Path(run.folder, "checkpoints", "1").exists()

    state = Path(bench.store.checkpoint(run.id).path, OPTIMIZER)
    aged(bench, run, 29).clear()
    assert state.exists()
    aged(bench, run, 31).clear()
    assert not state.exists()
    assert RunFolder(run.folder).checkpoints.newest_good() == 4

    (bench.store.base / "settings.toml").write_text("[disk]\nrun_days = 3\n")
    maintenance = aged(bench, run, 4)
    maintenance.clear()
    assert bench.now(run).files_removed and not bench.store.checkpoints(run.id)
    maintenance.clear()
    assert not Path(run.folder).exists() and [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), FlashError("artifact_damaged", "a link leads elsewhere")]
)
def test_one_folder_that_cannot_be_deleted_or_cleared_holds_up_no_other(
    error: Exception, bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to another account, whose files this one may not delete, or a node made a link in it."""
    stuck, other = ended(bench, folder), ended(bench, folder)
    for run in (stuck, other):
        aged(bench, run, 31)
    mine = {"remove": RunFolder.remove, "remove_files": RunFolder.remove_files}

    def refuse_one(name: str) -> None:
        def call(of: RunFolder, *arguments: list[str]) -> None:
            if of.url == stuck.folder:
                raise error
            mine[name](of, *arguments)

        monkeypatch.setattr(RunFolder, name, call)

    for name in mine:
        refuse_one(name)
    Maintenance(bench.store, bench.lab).clear()
    assert [OPTIMIZER in " ".join(files(run)) for run in (stuck, other)] == [True, False]
    add_removed(bench.store, stuck)
    add_removed(bench.store, other)
    Maintenance(bench.store, bench.lab).clear()
    assert [Path(run.folder).exists() for run in (stuck, other)] == [True, False]
    assert due_folders(bench.store, "lab") == []
    assert stuck.folder in bench.store.column("SELECT place FROM removed_folders", [])
