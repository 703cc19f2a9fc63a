"""A database that is damaged or lost while the folders are whole."""

import shutil
from pathlib import Path

import pytest

from flash_mcp.cli import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.owners import LOCAL_OWNER, Caller, acting_as
from flash_mcp.state.removal import OF_A_RUN
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import staged
from flash_mcp.supervisor.process import take_lock
from flash_mcp.supervisor.recovery import recover
from tests.samples import reported

REPORTED = [table for table in OF_A_RUN if table not in ("deployments", "logs")]
"""What a worker wrote."""
NOT_RECOVERED = ("request_digest", "idempotency_key", "updated", "ended", "started", "beat")
NOT_RECOVERED += ("progress", "cancel_requested", "used_s", "used_before_s")


def made(store: Store, scratch: Path, state: queue.EndState | None = "succeeded", *, owner: str = LOCAL_OWNER) -> Run:
    """A run that reported something of every kind; without `state` it runs on."""
    files = {"environment.py": b"def load_environment(): ..."}
    with acting_as(Caller(owner)), staged("calc", files, store.base) as stage:
        environment = store.publish(stage)[0]
        run, _ = queue.enqueue(store, resolve(RunSpec(environment="calc", steps=3)), environment)
    writer = reported(store, run, scratch)
    if state:
        error = FlashError("diverged", "lost") if state == "failed" else None
        writer.commit_result(state, 3, error)
        queue.finish(store, run.id, 1, state, step=3, error=error.to_dict() if error else None)
    return store.run(run.id)


def rows(store: Store, run: Run) -> dict[str, list[Json]]:
    kept = {table: store.query(f"SELECT * FROM {table} WHERE run_id = ?", [run.id]) for table in REPORTED}
    (row,) = store.query("SELECT * FROM runs WHERE id = ?", [run.id])
    kept["runs"] = [{name: row[name] for name in row if name not in NOT_RECOVERED}]
    return kept


def lose(store: Store) -> None:
    store.close()
    for path in store.base.glob("flash.db*"):
        path.unlink()


def test_a_lost_database_is_rebuilt_from_the_folders(flash_home: Path, tmp_path: Path, capsys):
    store = open_store()
    theirs = made(store, tmp_path, owner="alice")
    failed = made(store, tmp_path, "failed")
    running = made(store, tmp_path, None)
    before = {run.id: rows(store, run) for run in (theirs, failed, running)}
    assert all(before[theirs.id].values())
    lose(store)
    assert Store(flash_home).runs() == []
    assert main.main(["recover"]) == 0
    told = capsys.readouterr().out
    assert "took in 3 runs and 2 environments" in told and "lost: tokens" in told
    store.close()  # the connection to the file that is gone
    fresh = Store(flash_home)
    for run in (theirs, failed):
        assert rows(fresh, run) == before[run.id]
        ended = fresh.run(run.id)
        assert ended.ended and ended.started and ended.owner == run.owner
    assert fresh.run(failed.id).error == failed.error
    found = {(row.owner, row.name, row.path) for row in fresh.environments()}
    assert found == {(run.owner, "calc", run.environment_path) for run in (theirs, failed)}
    # The run that had not ended continues with its next attempt.
    claimed = queue.claim(fresh)
    assert claimed and (claimed.id, claimed.attempt, claimed.step) == (running.id, 2, 3)
    again = recover(flash_home)
    assert (again.runs, again.environments, again.kept, again.lost) == ([], [], 5, ())


def test_a_damaged_database_is_moved_aside(flash_home: Path, tmp_path: Path) -> None:
    store = open_store()
    run = made(store, tmp_path)
    before = rows(store, run)
    store.query("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    with store.path.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xa5" * (store.path.stat().st_size - 4096))
    with pytest.raises(FlashError, match="flash-mcp recover"):
        Store(flash_home).check()
    found = recover(flash_home)
    assert found.runs == [run.id] and found.damaged and Path(found.damaged).is_file()
    fresh = Store(flash_home)
    fresh.check()
    assert rows(fresh, run) == before


def test_a_database_of_an_unreleased_version_is_moved_aside(flash_home: Path, tmp_path: Path) -> None:
    run = made(open_store(), tmp_path)
    store = open_store()
    before = rows(store, run)
    store.execute("DROP INDEX rollouts_evaluated")
    store.execute("ALTER TABLE rollouts DROP COLUMN truncated")
    store.close()
    with pytest.raises(FlashError, match="unreleased version: rollouts has no column truncated") as caught:
        Store(flash_home)
    assert caught.value.code == "state_corrupt" and "flash-mcp recover" in caught.value.fix
    assert recover(flash_home).damaged and rows(Store(flash_home), run) == before


def test_rows_that_exist_stay_and_a_folder_that_cannot_be_read_stops_no_other(flash_home: Path, tmp_path: Path) -> None:
    store = open_store()
    known, lost, torn, empty = (made(store, tmp_path) for _ in range(4))
    for run in (lost, torn, empty):
        for table in REPORTED:
            store.execute(f"DELETE FROM {table} WHERE run_id = ?", [run.id])
        store.execute("DELETE FROM runs WHERE id = ?", [run.id])
    store.execute("DELETE FROM metrics WHERE run_id = ?", [known.id])
    before = rows(store, known)
    Path(torn.folder, "job.json").write_text('{"run_id": ')
    Path(empty.folder, "job.json").unlink()
    environment = Path(known.environment_path, "environment.py")
    environment.chmod(0o644)
    environment.write_text("changed")
    store.execute("DELETE FROM environments")
    Path(lost.folder, "beat.json").write_text("\0\0")
    found = recover(flash_home)
    assert found.runs == [lost.id] and rows(store, known) == before
    assert sorted(problem.split(":")[0] for problem in found.problems) == sorted(
        [f"runs/{torn.id}", f"runs/{empty.id}", f"environment calc@{known.environment_digest}"]
    )


def test_a_state_directory_that_moved_is_rebuilt_where_it_is(flash_home: Path, tmp_path: Path) -> None:
    store = open_store()
    run = made(store, tmp_path)
    lose(store)
    home = tmp_path / "elsewhere"
    shutil.move(flash_home, home)
    assert recover(home).runs == [run.id]
    taken = Store(home).run(run.id)
    assert taken.folder == str(home / "runs" / run.id) and Path(taken.environment_path).is_relative_to(home)
    assert Path(Store(home).checkpoint(run.id).path).is_dir()


def test_a_cancelled_run_does_not_start_again(flash_home: Path, tmp_path: Path) -> None:
    store = open_store()
    run = made(store, tmp_path, None)
    queue.request_cancel(store, run.id, "enough")
    lose(store)
    recover(flash_home)
    fresh = Store(flash_home)
    assert fresh.run(run.id).state == "cancelled" and queue.claim(fresh) is None


def test_nothing_is_recovered_under_a_supervisor(flash_home: Path) -> None:
    open_store()
    lock = take_lock(flash_home)
    assert lock
    with lock, pytest.raises(FlashError, match="state_busy"):
        recover(flash_home)
