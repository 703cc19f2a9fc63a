"""What the supervisor deletes to make room, and what it leaves."""

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import scratch_prefix
from flash_mcp.protocol.records import Run
from flash_mcp.state import datasets
from flash_mcp.state.disk import size_of
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.retention import leftovers
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import staged
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.maintenance import LocalMaintenance
from flash_mcp.tools.compare import compare
from flash_mcp.tools.status import status
from tests.samples import finished_run, queued_run, started_run, supervised

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
    assert [path for path in old if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []


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
        told = asyncio.run(status(run_id=old.id))
        assert "run_days in [disk] of settings.toml" in str(told)
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
    timeouts = Timeouts(poll_s=0.01, idle_exit_s=0.05)
    Supervisor(store.base, timeouts=timeouts).run()
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
        assert caught.value.code == "quota_exceeded"
        assert f"{key} in [disk] of settings.toml" in caught.value.fix
        with acting_as(Caller("bob")):
            put("first")
        put("first")
        put("second")  # the local owner has no limit
    assert {row.name for row in store.environments() if row.owner == "alice"} == {"first"}
