"""Backups that are taken while a supervisor and its worker write, and what is made of them
elsewhere.
"""

from __future__ import annotations

import json
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from flash_mcp.cli import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import backup, queue
from flash_mcp.state.store import Store, open_store
from tests.samples import finished_run
from tests.supervisor.test_loop import Bench, bench, start_supervisor
from tests.waiting import wait_for
from tests.watch import is_running

__all__ = ["bench"]


@pytest.mark.slow
def test_a_backup_taken_while_a_supervisor_writes_goes_on_elsewhere(bench: Bench, tmp_path: Path) -> None:
    ended = bench.train({"steps": 3})
    bench.finish(ended)
    run = bench.train({"steps": 40, "1": {"at": 38, "do": "hold"}})
    process = start_supervisor(bench)
    archives = [tmp_path.parent / f"{tmp_path.name}-{number}.tar{'.gz' * (number % 2)}" for number in range(4)]
    for number, archive in enumerate(archives):
        wait_for(lambda at=number * 9 + 1: bench.step(run) >= at)
        assert backup.backup(bench.base, archive).runs == 2
    process.kill()
    process.wait()
    for number, archive in enumerate(archives):
        elsewhere = tmp_path.parent / f"{tmp_path.name}-home-{number}"
        elsewhere.mkdir()
        summary = backup.restore(elsewhere, archive)
        assert (summary.runs, summary.environments, summary.damaged) == (2, 1, [])
        second = Bench(elsewhere)
        there = second.store.run(run.id)
        assert there.folder == str(elsewhere / "runs" / run.id) and there.state in ("starting", "running")
        steps = [row.step for row in second.store.metrics(run.id)]
        assert steps == list(range(1, len(steps) + 1)) and all(RunFolder(there.folder).metrics(step) for step in steps)
        for row in second.store.checkpoints(run.id):
            assert Path(row.path, "adapter.bin").is_file() and str(elsewhere) in row.path
        assert len(second.store.metrics(ended.id)) == 3
        if number == 3:  # and it ends there as it would have here
            Path(there.folder, "go").touch()
            done = second.finish(there)
            assert (done.state, done.step) == ("succeeded", 40)
            assert [row.step for row in second.store.metrics(run.id)] == list(range(1, 41))
            second.clean_up()
    bench.clean_up()
    assert not is_running(bench.pid(run))


def test_backup_and_restore_as_commands(
    flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, archive = finished_run(tmp_path), tmp_path / "state.tar.gz"
    for name in ("settings.toml", "targets.toml", "targets.key"):
        (flash_home / name).write_text(f"# {name}\n")
    (flash_home / "models").mkdir()
    (flash_home / "models" / "weights").write_bytes(b"to be fetched again")
    assert main.main(["backup", str(archive)]) == 0
    assert main.main(["backup", str(archive)]) == 2  # never over another
    assert main.main(["restore", str(archive)]) == 2  # nor over what is there
    with tarfile.open(archive) as saved:
        assert not [name for name in saved.getnames() if "models" in name or "lock" in name or "log" in name]
    before = sorted(flash_home.rglob("*"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "targets.toml").write_text("# its own\n")
    monkeypatch.setenv("FLASH_HOME", str(tmp_path / "elsewhere"))
    assert main.main(["restore", str(archive)]) == 0
    out = capsys.readouterr()
    assert main.main(["backup", str(tmp_path / "again.tar"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 1
    there = tmp_path / "elsewhere"
    assert "left: targets.toml" in out.out
    assert (there / "targets.toml").read_text() == "# its own\n"
    assert (there / "settings.toml").read_text() == "# settings.toml\n"
    assert (there / "targets.key").read_text() == "# targets.key\n"
    assert "runs: 1" in out.out and "exists already" in out.err and "already" in out.err
    store = Store(tmp_path / "elsewhere")
    assert store.run(run.id).state == "succeeded" and len(store.metrics(run.id)) == 20
    assert RunFolder(store.run(run.id).folder).checkpoints.newest_good() == 20
    assert sorted(flash_home.rglob("*")) == before


def test_a_backup_is_private_and_leaves_out_what_is_being_pushed(flash_home: Path, tmp_path: Path) -> None:
    finished_run(tmp_path)
    kept = {
        "environments/calc/0123/.config",
        "environments/@alice/calc/0123/@x/.config",
        "datasets/rows/0123/train.jsonl",
    }
    left = {"environments/.staged-1/a.py", "environments/@alice/.upload-1/a.py", "datasets/.staged-1/train.jsonl"}
    for name in kept | left:
        (flash_home / name).parent.mkdir(parents=True, exist_ok=True)
        (flash_home / name).touch()
    archive = tmp_path / "state.tar"
    stale = tmp_path / ".state.tar.part"
    stale.touch(mode=0o666)
    backup.backup(flash_home, archive)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as saved:
        assert {name for name in saved.getnames() if name.startswith(("environments", "datasets"))} == kept


def test_only_paths_of_the_state_directory_move(flash_home: Path, tmp_path: Path) -> None:
    beside = f"/mnt{flash_home}/models/llama"
    store = open_store()
    environment = store.add_environment(name="e", digest="0" * 16, path=f"{flash_home}/environments/e", size_bytes=1)
    spec = resolve(RunSpec(environment="e", environment_args={"rows": f"{flash_home}/rows", "base": beside}))
    run_id = queue.enqueue(store, spec, replace(environment, path=beside))[0].id
    backup.backup(flash_home, tmp_path / "b.tar")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    backup.restore(elsewhere, tmp_path / "b.tar")
    run = Store(elsewhere).run(run_id)
    assert run.environment_path == beside and run.folder == f"{elsewhere}/runs/{run_id}"
    assert run.spec.environment_args == {"rows": f"{elsewhere}/rows", "base": beside}
    assert Store(elsewhere).environments()[0].path == f"{elsewhere}/environments/e"


def test_a_damaged_backup_leaves_nothing_behind(flash_home: Path, tmp_path: Path) -> None:
    finished_run(tmp_path)
    archive, elsewhere = tmp_path / "state.tar", tmp_path / "elsewhere"
    backup.backup(flash_home, archive)
    backup.backup(flash_home, tmp_path / "state.tar.gz")
    packed = (tmp_path / "state.tar.gz").read_bytes()
    elsewhere.mkdir()
    whole = archive.read_bytes()
    page = whole.index(b"SQLite format 3") + 4096 * 3
    damages = {
        "cut": whole[: len(whole) // 2],
        "text": b"not an archive",
        "another label": whole.replace(b'"time"', b'"tame"', 1),
        "cut while packed": packed[: len(packed) // 2],
        "bits while packed": packed[:2000] + bytes(b ^ 0xA5 for b in packed[2000:2100]) + packed[2100:],
        "page": whole[:page] + bytes(b ^ 0xA5 for b in whole[page : page + 4096]) + whole[page + 4096 :],
    }
    for body in damages.values():
        archive.write_bytes(body)
        with pytest.raises(FlashError) as caught:
            backup.restore(elsewhere, archive)
        assert caught.value.code in ("upload_invalid", "state_corrupt")
        assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["../planted", "/tmp/planted", "runs/../../planted", "link"])
def test_an_archive_that_leads_out_of_the_state_directory_is_no_backup(tmp_path: Path, name: str) -> None:
    archive, elsewhere = tmp_path / "state.tar", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with tarfile.open(archive, "w") as made:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        made.addfile(member)
    with pytest.raises(FlashError, match=rf"upload_invalid.*'{name}' is no file of this archive"):
        backup.restore(elsewhere, archive)
    assert list(elsewhere.iterdir()) == [] and not (tmp_path / "planted").exists()
