"""A supervisor of an older version is replaced, and nothing else is."""

import subprocess
from pathlib import Path

import pytest

from flash_mcp import __version__
from flash_mcp.supervisor import process
from flash_mcp.supervisor.process import LockOwner, is_supervised


def test_a_process_that_is_not_the_supervisor_is_left_alone(flash_home: Path) -> None:
    """The lock names the process of an old version, whose number is another program's by now."""
    flash_home.mkdir()
    with subprocess.Popen(["/bin/sleep", "100"]) as other, (flash_home / process.LOCK).open("a+") as held:
        LockOwner(other.pid).write(held)
        lock = process.take_lock(flash_home)
        assert lock
        with lock:
            assert is_supervised(flash_home)
            assert not process.ensure_supervisor(flash_home)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(("version", "is_older"), [("", True), ("0.0.9", True), (__version__, False), ("99.0", False)])
def test_only_an_older_version_is_replaced(version: str, is_older: bool) -> None:
    assert LockOwner(1, version).is_older() == is_older
