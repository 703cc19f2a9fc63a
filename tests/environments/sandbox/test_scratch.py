"""Scratch folders that hostile code left behind."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from environments.sandbox import scratch
from tests.places import ROOT
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

HOSTILE = """
    import os, sys
    os.chdir(sys.argv[1])
    os.symlink(sys.argv[2], "link to a folder")
    os.symlink(sys.argv[2] + "/kept", "link to a file")
    os.mkfifo("fifo")
    os.makedirs("closed/inside/deep")
    open("closed/inside/file", "w").close()
    os.chmod("closed/inside", 0)
    os.chmod("closed", 0)
    os.mkdir("wide")
    for number in range(300):
        os.mkdir(f"wide/{number}")
        open(f"wide/{number}/x", "w").close()
    for depth in range(3000):
        os.mkdir("deep")
        os.symlink(sys.argv[2], "out")
        os.chdir("deep")
"""


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory, where that can be: a disk takes 30 times as long for the folders."""
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("TMPDIR", "/dev/shm")
        monkeypatch.setattr(tempfile, "tempdir", None)  # else it stays where it was looked up
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("")
    (tmp_path / "outside").chmod(0o750)
    return tmp_path / "outside"


def fill(folder: Path, outside: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HOSTILE), folder, outside]
    subprocess.run(command, check=True, timeout=WAIT_S)


@pytest.mark.hostile("scratch")
def test_all_is_removed_and_no_link_is_followed(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    fill(folder, outside)
    scratch.remove(folder)
    assert not folder.exists() and [path.name for path in outside.iterdir()] == ["kept"]
    assert outside.stat().st_mode & 0o777 == 0o750


@pytest.mark.hostile("scratch")
def test_a_link_in_the_place_of_a_folder_leads_nowhere(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    scratch.remove(tmp_path / "link")
    assert (outside / "kept").exists()


@pytest.mark.hostile("scratch")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_user_without_rights_removes_it_too(tmp_path: Path) -> None:
    code = f"""
        import os, sys, tempfile
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from environments.sandbox import scratch
        place = Path(tempfile.mkdtemp())
        os.chown(place, 4242, 4242)
        os.setgroups([])
        os.setresgid(4242, 4242, 4242)
        os.setresuid(4242, 4242, 4242)
        (place / "left").mkdir()
        (place / "outside").mkdir()
        sys.argv = ["", str(place / "left"), str(place / "outside")]
        exec({textwrap.dedent(HOSTILE)!r})
        os.chdir(place)
        scratch.remove(place / "left")
        print(os.listdir(place))
        scratch.remove(place)
    """
    told = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], timeout=WAIT_S, text=True)
    assert told == "['outside']\n"


def test_what_a_dead_process_left_is_swept_and_the_rest_stays(tmp_path: Path, outside: Path, flash_home: Path) -> None:
    home = flash_home / "scratch"
    for name in ("left", "locked", "another user's"):
        (home / name).mkdir(parents=True)
    fill(home / "left", outside)
    (home / "a file").write_text("")
    (home / "a link").symlink_to(outside)
    kept = {"locked", "a file", "a link"}
    if os.getuid() == 0:
        os.chown(home / "another user's", 4242, 4242)
        kept.add("another user's")
    # Only these are old: a sweep may come between the making of a new folder and its lock.
    for path in home.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    with ExitStack() as stack:
        scratch.lock_folder(home / "locked", stack)
        mine, lock = scratch.scratch_folder("local", 9, 9)
        wait_for(lambda: {path.name for path in home.iterdir()} == kept | {mine.name})
        assert mine.parent == home and home.stat().st_mode & 0o777 == 0o700
        lock.close()
    assert (outside / "kept").exists()


def test_a_killed_process_gives_its_place_back(flash_home: Path) -> None:
    code = f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from environments.sandbox import scratch
        held = scratch.scratch_folder("alice", 1, 1)
        print("ready", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"ready\n"
        with pytest.raises(scratch.BusyError, match="alice 1"):
            scratch.scratch_folder("alice", 1, 1)
        holder.kill()
    scratch.scratch_folder("alice", 1, 1)[1].close()


def test_what_is_being_removed_is_not_counted(flash_home: Path) -> None:
    folder = flash_home / "scratch" / f"{scratch.GARBAGE}alice.x"
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        scratch.lock_folder(folder, stack)
        scratch.scratch_folder("alice", 1, 1)[1].close()
