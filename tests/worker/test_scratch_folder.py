"""An attempt's temporary folder goes when it ends, however it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attempts import Attempt, make_run
from worker.main import _scratch_folder, _temporary_folder

HOLD = """
import sys, time
from worker.main import _scratch_folder
with _scratch_folder(sys.argv[1]) as folder:
    (folder / "optimizer.pt").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(600)
"""


def started(url: str) -> tuple[subprocess.Popen[str], Path]:
    """A process with the scratch folder of an attempt of this run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        return process, Path(process.stdout.readline().strip())


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_what_a_killed_attempt_left_is_removed_also_by_another_run_and_a_living_one_keeps_it(temporary: Path) -> None:
    dead, left = started("s3://runs/dead")
    living, kept = started("s3://runs/living")
    recent, young = started("s3://runs/recent")
    other = temporary / "flash-of-another-program"
    other.mkdir()
    for process in (dead, recent):
        process.kill()
        process.wait()
    for folder in (left, kept, other):
        os.utime(folder, (0, 0))
    with _scratch_folder("s3://runs/next") as own:
        assert {*temporary.iterdir()} == {own, kept, young, other}
    with _scratch_folder("s3://runs/recent") as own:  # the same run's: it can be no younger attempt
        assert {*temporary.iterdir()} == {own, kept, other}
    living.kill()
    living.wait()
    assert {*temporary.iterdir()} == {kept, other}


class UnusedAttempt(Attempt):
    """An attempt of a process that has not looked for a temporary folder yet."""

    program = """
import tempfile
tempfile.tempdir = None
from worker import main
main.prepare_process()
main.main()
"""


@pytest.mark.slow
def test_an_attempt_leaves_no_temporary_file(temporary: Path, tiny_model: Path) -> None:
    UnusedAttempt(make_run(temporary.parent / "run", tiny_model, steps=1)).ended()
    assert not [*temporary.iterdir()]


def test_a_full_temporary_folder_is_kept_to(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(temporary)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        with (temporary / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(bytes(4096))
        with _scratch_folder("s3://runs/one") as folder:
            assert folder.parent == temporary
    finally:
        subprocess.run(["umount", "-l", str(temporary)], check=True)
    monkeypatch.setenv("TMPDIR", str(temporary / "nowhere"))
    assert _temporary_folder().is_dir()
