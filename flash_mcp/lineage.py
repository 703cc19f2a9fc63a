"""Where a run comes from: the code that made it. Its environment, parent adapter and dataset stand in its own row."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from flash_mcp import __version__

ROOT = Path(__file__).parent.parent


@cache
def code_version() -> str:
    """The package's version; in a git checkout VERSION+gCOMMIT, with .dirty where files differ from the commit.

    That of this process: later commits do not change the code that it runs.
    """
    if not (ROOT / ".git").exists():  # an installed package may lie in somebody else's checkout
        return __version__
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=.dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+g{found}"
