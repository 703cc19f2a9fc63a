"""A disk that is really full: a tmpfs of our own, where this machine lets us mount one."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.state.store import open_store
from flash_mcp.state.versions import folder_files, staged
from flash_mcp.tools.shared.waiting import obstacles
from tests.attempts import VOWELS
from tests.samples import queued_run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    with pytest.raises(OSError), (disk / "filler").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def test_a_full_disk_is_named_and_leaves_nothing_half_made(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run")
    run.create({"run_id": "run-1"})
    writer = RunWriter(run, 1)
    writer.metrics(1, {"loss": 1.0})
    adapter = small_disk.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(bytes(600_000))
    fill(small_disk)
    before = sorted(small_disk.rglob("*"))
    with pytest.raises(FlashError, match="disk_full"):
        writer.metrics(2, {"note": "x" * 5000})
    with pytest.raises(FlashError, match="disk_full"):
        writer.commit_checkpoint(1, adapter, {})
    with pytest.raises(FlashError, match="disk_full"), staged("vowels", folder_files(VOWELS), base=small_disk) as stage:
        stage.commit()
    assert [path for path in sorted(small_disk.rglob("*")) if path.is_file()] == [p for p in before if p.is_file()]
    assert run.metrics(1) and run.metrics(2) is None and run.checkpoints.steps() == []


def test_status_says_that_a_full_disk_holds_a_run_up(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_HOME", str(small_disk))
    run = queued_run(tmp_path)
    fill(small_disk)
    assert any("disk_full" in obstacle for obstacle in obstacles(open_store(), run))
