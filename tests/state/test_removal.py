"""Removing runs, environments and datasets: all of one, and nothing that something else stands on."""

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.cli import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import datasets, queue, removal
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.removal import OF_A_RUN, remove
from flash_mcp.state.retention import drop_files
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import staged
from tests.samples import reported


@pytest.fixture
def store(flash_home: Path) -> Store:
    return open_store()


def published(store: Store, text: str = "def load_environment(): ...") -> EnvironmentVersion:
    with staged("calc", {"environment.py": text.encode()}, store.base) as stage:
        return store.publish(stage)[0]


def made(store: Store, environment: EnvironmentVersion, scratch: Path, *, end: bool = True, **pinned: Json) -> Run:
    """A run with a row in every table of its own."""
    run, _ = queue.enqueue(store, resolve(RunSpec(environment="calc", steps=3)), environment, **pinned)
    reported(store, run, scratch)
    store.put_log(run.id, 1, "step 3")
    values = {"id": f"dep-{run.id}", "owner": "local", "name": run.id, "model": run.model, "run_id": run.id}
    store.add_deployment({**values, "step": 3, "state": "stopped"})
    if end:
        assert queue.finish(store, run.id, 1, "succeeded", step=3)
    return store.run(run.id)


def rows_of(store: Store, run: Run) -> dict[str, int]:
    counts = {table: f"SELECT count(*) AS n FROM {table} WHERE run_id = ?" for table in OF_A_RUN}
    counts["runs"] = "SELECT count(*) AS n FROM runs WHERE id = ?"
    return {table: store.query(sql, [run.id])[0]["n"] for table, sql in counts.items()}


def refused(store: Store, reference: str, code: str = "in_use") -> str:
    with pytest.raises(FlashError) as caught:
        remove(store, reference)
    assert caught.value.code == code, caught.value
    return str(caught.value)


def export_of(store: Store, run: Run) -> tuple[Path, Path]:
    """The folder of an export, and its lock."""
    folder = store.base / "exports" / f"{run.id}-3-merged"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(5000))
    lock = folder.with_name(f"{folder.name}.lock")
    lock.touch()
    return folder, lock


def test_a_run_goes_whole_and_another_stays_whole(store: Store, tmp_path: Path) -> None:
    environment = published(store)
    gone, kept = (made(store, environment, tmp_path) for _ in range(2))
    before = rows_of(store, kept)
    record = store.base / "attempts" / f"{gone.id}-1"
    record.mkdir(parents=True)
    (whole, lock), (others, *_) = (export_of(store, run) for run in (gone, kept))
    looked = remove(store, gone.id, dry_run=True)
    assert looked.freed_bytes > 1000 and rows_of(store, gone) == before and min(before.values()) > 0
    assert remove(store, gone.id) == looked
    assert set(rows_of(store, gone).values()) == {0} and rows_of(store, kept) == before
    assert not Path(gone.folder).exists() and not record.exists() and Path(kept.folder).is_dir()
    assert not whole.exists() and not lock.exists() and others.is_dir()
    assert not (store.base / "removed").exists()
    refused(store, gone.id, "unknown_run")
    tables = {row["name"] for row in store.query("SELECT m.name FROM sqlite_master m, pragma_table_info(m.name) c "
                                                 "WHERE m.type = 'table' AND c.name = 'run_id'")}  # fmt: skip
    assert tables == {*OF_A_RUN, "exam_looks"}, "a table that names runs; a look is spent for good"


def test_an_export_goes_alone(store: Store, tmp_path: Path) -> None:
    run = made(store, published(store), tmp_path)
    folder, lock = export_of(store, run)
    looked = remove(store, folder.name, dry_run=True)
    assert (looked.kind, looked.freed_bytes) == ("export", 5000) and folder.is_dir()
    assert remove(store, folder.name) == looked
    assert not folder.exists() and not lock.exists() and Path(run.folder).is_dir()
    for name in (folder.name, "..", "."):
        refused(store, name, "unknown_run")


def test_a_run_that_something_stands_on_stays(store: Store, tmp_path: Path) -> None:
    environment = published(store)
    base = made(store, environment, tmp_path)
    start: Json = {"path": base.folder, "run_id": base.id, "step": 3, "digest": "0"}
    active = made(store, environment, tmp_path, end=False, init_adapter=start)
    assert "cancel" in refused(store, active.id) and active.id in refused(store, base.id)
    queue.finish(store, active.id, 1, "succeeded", step=3)
    store.update_deployment(f"dep-{base.id}", state="ready")
    assert "undeploy" in refused(store, base.id)
    store.update_deployment(f"dep-{base.id}", state="stopped")
    remove(store, base.id)
    assert store.run(active.id).init_adapter == start, "where it came from stays known"


def test_nothing_is_queued_that_would_be_made_from_what_was_removed_meanwhile(store: Store, tmp_path: Path) -> None:
    environment = published(store)
    base = made(store, environment, tmp_path)
    start: Json = {"path": store.checkpoint(base.id).path, "run_id": base.id, "step": 3, "digest": "0"}
    dataset = datasets.register("rows", [{"messages": []}], [], {"counts": {}}, store.base)
    pinned = {"name": "rows", "digest": dataset.digest, "path": str(datasets.locate("rows", store.base))}
    spec = resolve(RunSpec(environment="calc"))
    for reference, code, stands_on in (
        (base.id, "unknown_checkpoint", {"init_adapter": start}),
        (f"rows@{dataset.digest}", "unknown_dataset", {"dataset": pinned}),
        (f"calc@{environment.digest}", "unknown_environment", {}),
    ):
        remove(store, reference)
        with pytest.raises(FlashError) as caught:
            queue.enqueue(store, spec, environment, **stands_on)
        assert caught.value.code == code
    assert not store.runs()


def test_a_version_goes_after_the_runs_that_were_made_from_it(store: Store, tmp_path: Path) -> None:
    old, new = published(store), published(store, "def load_environment(): pass")
    dataset = datasets.register("rows", [{"messages": []}], [], {"counts": {}}, store.base)
    pinned = datasets.locate(f"rows@{dataset.digest}", store.base)
    run = made(store, old, tmp_path, dataset={"name": "rows", "digest": dataset.digest, "path": str(pinned)})
    references = [f"calc@{old.digest[:6]}", f"rows@{dataset.digest}"]
    for reference in references:
        assert run.id in refused(store, reference)
    (pinned / "train.jsonl").chmod(0o644)
    (pinned / "train.jsonl").write_text("damaged")
    remove(store, run.id)
    assert [remove(store, reference).kind for reference in references] == ["environment", "dataset"]
    assert not Path(old.path).exists() and not pinned.exists()
    assert [row.digest for row in store.environments()] == [new.digest] and Path(new.path).is_dir()
    for reference in references:
        refused(store, reference, "unknown_environment")
    assert published(store).digest == old.digest, "and can be published again"


def test_another_owners_version_goes_only_where_the_owner_is_named(store: Store, capsys: pytest.CaptureFixture[str]):
    ours = published(store)
    with acting_as(Caller("alice")):
        theirs = published(store)
        digest = datasets.register("rows", [{"messages": []}], [], {"counts": {}}, store.base).digest
    reference = f"calc@{ours.digest}"
    assert theirs.digest == ours.digest and remove(store, reference).owner == "local"
    assert f"name the version: alice/{reference}" in refused(store, reference, "unknown_environment")
    assert f"name the version: alice/rows@{digest}" in refused(store, f"rows@{digest}", "unknown_dataset")
    assert [row.owner for row in store.environments()] == ["alice"] and Path(theirs.path).is_dir()
    assert main.main(["remove", f"alice/{reference}"]) == 0
    assert main.main(["remove", f"alice/rows@{digest[:6]}", "--json"]) == 0
    told, gone = capsys.readouterr().out.splitlines()
    assert f"alice/{reference}" in told
    assert (json.loads(gone)["reference"], json.loads(gone)["owner"]) == (f"alice/rows@{digest}", "alice")
    assert not store.environments() and not Path(theirs.path).exists() and not datasets.everyones(store.base)


def test_a_name_without_a_digest_is_told_its_versions(store: Store) -> None:
    row = published(store)
    assert f"name the version: calc@{row.digest}" in refused(store, "calc", "unknown_environment")
    refused(store, "cal", "unknown_run")
    assert "did you mean 'calc'" in refused(store, "cal@3f2a9c", "unknown_environment")


def test_whoever_is_stopped_in_between_can_call_again(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = made(store, published(store), tmp_path)
    before = rows_of(store, run)
    move: Callable[..., Any] = removal.move_away

    def die_after(*args: Any) -> None:
        move(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(removal, "move_away", die_after)
    with pytest.raises(KeyboardInterrupt):
        remove(store, run.id)
    assert rows_of(store, run) == before
    monkeypatch.undo()
    assert remove(store, run.id).freed_bytes == 0
    assert set(rows_of(store, run).values()) == {0} and not (store.base / "removed").exists()


def test_files_outside_of_the_state_directory_are_never_removed(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "mine"
    outside.mkdir()
    row = store.add_environment(name="calc", digest="0123456789ab", path=str(outside), size_bytes=1)
    assert remove(store, f"calc@{row.digest}").freed_bytes == 0
    assert outside.is_dir() and not store.environments()


def test_a_run_whose_files_lie_elsewhere_keeps_them_and_says_where(store: Store, tmp_path: Path, capsys):
    run = made(store, published(store), tmp_path)
    outside = tmp_path / "bucket"
    Path(run.folder).rename(outside)
    store.execute("UPDATE runs SET folder = ? WHERE id = ?", [str(outside), run.id])
    assert not drop_files(store, run.id, "it is old")
    assert store.run(run.id).files_removed is None and store.checkpoints(run.id)
    assert main.main(["remove", run.id]) == 0
    assert f"its files stay at {outside}" in capsys.readouterr().out
    assert (outside / "job.json").exists() and not store.runs()


def test_remove_as_a_command(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = published(store)
    run, reference = made(store, environment, tmp_path), f"calc@{environment.digest}"
    assert main.main(["remove", run.id, "--dry-run"]) == 0
    assert f"would remove run {run.id}" in capsys.readouterr().out
    assert main.main(["remove", reference, run.id]) != 0
    assert "in_use" in capsys.readouterr().err and store.run(run.id)
    assert main.main(["remove", run.id, reference, "--json"]) == 0
    gone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["reference"] for each in gone] == [run.id, reference]
    assert not store.runs() and not store.environments()


# -- by age and outcome, and the question ----------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ended_ago(store: Store, run: Run, days: float, state: str = "succeeded") -> None:
    values = [state, time.time() - days * 86_400, run.id]
    store.execute("UPDATE runs SET state = ?, ended = ? WHERE id = ?", values)


def test_runs_are_removed_by_age_and_outcome_once_somebody_says_yes(store: Store, tmp_path: Path, capsys):
    environment = published(store)
    old, failed, new, served = (made(store, environment, tmp_path) for _ in range(4))
    active = made(store, environment, tmp_path, end=False)
    ended_ago(store, old, 40)
    ended_ago(store, failed, 31, "failed")
    ended_ago(store, served, 50)
    store.update_deployment(f"dep-{served.id}", state="ready")
    everything = {run.id for run in store.runs()}
    assert main.main(["remove", "--older-than", "30d"]) != 0
    told = capsys.readouterr()
    assert "nothing was removed" in told.err and "--yes" in told.err
    assert f"would remove run {old.id}" in told.out and f"would remove run {failed.id}" in told.out
    assert new.id not in told.out and active.id not in told.out and f"dep-{served.id} serves it" in told.err
    assert {run.id for run in store.runs()} == everything
    assert main.main(["remove", "--older-than", "30d", "--failed", "--yes"]) == 0
    assert {run.id for run in store.runs()} == everything - {failed.id}
    assert main.main(["remove", "--older-than", "30d", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reference"] == old.id
    assert {run.id for run in store.runs()} == {new.id, served.id, active.id}


@pytest.mark.parametrize(("answer", "is_removed"), [("y\n", True), ("\n", False), ("", False)])
def test_a_terminal_is_asked_and_shown_what_started_from_it(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    is_removed: bool,
) -> None:
    environment = published(store)
    base = made(store, environment, tmp_path)
    start: Json = {"path": base.folder, "run_id": base.id, "step": 3, "digest": "0"}
    child = made(store, environment, tmp_path, init_adapter=start)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert (main.main(["remove", base.id]) == 0) is is_removed
    assert f"{child.id} started from it" in capsys.readouterr().out
    assert [run.id for run in store.runs()] == [child.id] + [base.id] * (not is_removed)


def test_what_was_shown_to_stay_does_not_end_the_removal(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environment = published(store)
    first, served, last = (made(store, environment, tmp_path) for _ in range(3))
    store.update_deployment(f"dep-{served.id}", state="ready")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert main.main(["remove", first.id, served.id, last.id]) == 0
    assert [run.id for run in store.runs()] == [served.id]


def test_a_removal_that_concerns_no_run_says_so(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["remove", "--failed"]) == 0
    assert capsys.readouterr().err == "no such run has ended\n"


@pytest.mark.parametrize("words", [[], ["--older-than", "soon"]])
def test_remove_without_anything_to_remove_is_refused(store: Store, capsys, words: list[str]):
    assert main.main(["remove", *words]) != 0
    assert "invalid_argument" in capsys.readouterr().err


# -- the database shrinks --------------------------------------------------------------------------


def filled(store: Store) -> None:
    with store.transaction():
        for step in range(400):
            row = {"step": step, "epoch": 1, "time": 0.0, "metrics": {"text": "x" * 10_000}}
            store.put_metrics("run-gone", row)


def test_the_database_shrinks_after_a_removal_while_others_read_and_write(store: Store) -> None:
    filled(store)
    store.query("PRAGMA wal_checkpoint(TRUNCATE)")
    other = Store(store.base)
    full = store.path.stat().st_size
    store.execute("DELETE FROM metrics")
    assert other.runs() == []
    assert store.shrink() > full * 0.8 and store.path.stat().st_size < full * 0.2
    published(other)
    store.check()
    assert store.shrink() == 0
