"""nvidia-smi, where there is one."""

from __future__ import annotations

import shutil
import subprocess


def nvidia_smi(arguments: list[str], timeout_s: float) -> list[str]:
    """The lines of nvidia-smi; none where it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
