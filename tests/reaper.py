"""Ends the processes of a test run when the run is over, also if it was killed: `python reaper.py ID`, whose
standard input ends with the run. They have FLASH_TEST_RUN=ID in their environment."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

VARIABLE = "FLASH_TEST_RUN"


def reap(run: str) -> None:
    mark = f"{VARIABLE}={run}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with suppress(OSError):
            if pid != os.getpid() and mark in path.read_bytes():
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.read()
    reap(sys.argv[1])
