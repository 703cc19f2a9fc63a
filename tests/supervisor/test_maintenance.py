"""What is cleared on targets: jobs and files that no run needs, and nothing else."""

import time
from pathlib import Path

import pytest

from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import removal
from flash_mcp.state.removal import add_removed, due_folders
from flash_mcp.supervisor.launch.base import JobStatus
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.maintenance import Maintenance
from flash_mcp.supervisor.reconciler import RunReconciler
from flash_mcp.supervisor.secrets import Vault
from tests.protocol.test_artifacts import folder as some_folder
from tests.supervisor.test_targets import HASTE, Bench, Lab, bench
from tests.waiting import wait_for

__all__ = ["bench"]
DAY_S = 86_400.0
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
    values = [time.time() - days * DAY_S, run.id]
    bench.store.execute("UPDATE runs SET ended = ? WHERE id = ?", values)
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
    assert set(files(run)) == before
    assert not Path(run.folder, "evals/3/0001-0").exists()


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
    assert not Path(run.folder).exists()
    assert [row.step for row in bench.store.metrics(run.id)] == [1, 2, 3, 4]


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
