"""Another account of this machine, and a program in place of sudo that lets everybody be anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ACCOUNT = "games"
"""Each system has it."""
AS_ACCOUNT = ("setpriv", "--reuid", ACCOUNT, "--regid", ACCOUNT, "--clear-groups")
SUDO = """#!/bin/sh
echo "$*" >>{calls}
[ "$1 $2 $4" = "-n -u --" ] || exit 1
user=$3; shift 4
exec setpriv --reuid "$user" --regid "$(id -g "$user")" --clear-groups "$@"
"""


def stand_in_for_sudo(folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new folder, first in PATH. It notes its arguments in `calls`."""
    folder.mkdir()
    program = folder / "sudo"
    program.write_text(SUDO.format(calls=calls))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
