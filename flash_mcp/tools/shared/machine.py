"""Checks of the server and its machine, for `catalog(kind="health")` and `flash-mcp doctor`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from flash_mcp.protocol.errors import FlashError, as_flash_error
from flash_mcp.protocol.packages import how_to_install, missing_packages
from flash_mcp.protocol.paths import home, models_dir
from flash_mcp.protocol.records import Deployment
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.disk import has_space, in_words, usage
from flash_mcp.state.owners import caller
from flash_mcp.state.store import open_store
from flash_mcp.state.targets import targets
from flash_mcp.supervisor.launch import devices
from flash_mcp.supervisor.process import is_supervised, unfit
from flash_mcp.tools.shared.waiting import obstacles

Level = Literal["ok", "warning", "problem"]
Outcome = tuple[Level, str, str]
"""Level, detail and fix."""
FREE_DISK_GIB = 5.0
FREE_TEMPORARY_BYTES = 1 << 30
FREE_MEMORY_GIB = 4.0
SHOWN_BYTES = 1_000_000
SHOWN = 3
"""Runs, deployments and files that are named."""
LATELY_S = 86_400.0
DRIVER = 580
"""The first driver of CUDA 13, for which vLLM and PyTorch are built."""
CAPABILITY = (8, 0)
"""The first compute capability with bfloat16."""
ON_CPU = "or train on the CPU: `CUDA_VISIBLE_DEVICES= scripts/install` in a new checkout"
ROOM = {
    "runs": "`flash-mcp remove --older-than 30d`, or run_days in [disk] of settings.toml",
    "checkpoints": "train with a lower keep_checkpoints or a higher save_every",
    "models": "delete the folders of models that you do not use; they are fetched again",
    "interpreters": "delete the folder interpreters while nothing runs; they are installed again",
    "environments": "`flash-mcp remove NAME@DIGEST`",
    "datasets": "`flash-mcp remove NAME@DIGEST`",
    "exports": "`flash-mcp remove` with the name of a folder in exports",
    "the database": "`flash-mcp remove`; it shrinks afterwards",
    "scratch": "what ended processes left is deleted after a day",
}
"""How to take less of each kind of thing."""


class Finding(ResultModel):
    """The outcome of one check."""

    level: Level
    name: str
    detail: str
    fix: str | None = ""


def findings_of(checks: Mapping[str, Callable[[], Outcome]]) -> list[Finding]:
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            level, detail, fix = check()
        except (FlashError, OSError) as error:
            result = as_flash_error(f"check: {name}", error)
            level, detail, fix = "problem", f"[{result.code}] {result.what}", result.fix
        findings.append(Finding(level=level, name=name, detail=detail, fix=fix))
    return findings


def ok(detail: str) -> Outcome:
    return "ok", detail, ""


def disk() -> Outcome:
    base = home()
    free = shutil.disk_usage(base).free / 2**30
    if not caller().is_local:  # its files are the operator's
        level: Level = "ok" if free >= FREE_DISK_GIB else "problem"
        return level, f"{free:.0f} GiB free", ""
    taken = {name: size for name, size in usage(base).items() if size >= SHOWN_BYTES}
    sizes = ", ".join(f"{name} {in_words(size)}" for name, size in taken.items())
    detail = f"{free:.0f} GiB free; taken: {sizes or 'nearly nothing'}"
    if free < FREE_DISK_GIB:
        fixes = [f"{name}: {ROOM[name]}" for name in taken]
        fixes.append("or set FLASH_HOME (and FLASH_MODELS) to another disk")
        return "problem", detail, "; ".join(fixes)
    # Models and temporary files may lie on disks of their own.
    for path, variable in ((models_dir(), "FLASH_MODELS"), (tempfile.gettempdir(), "TMPDIR")):
        if not has_space([Path(path)], FREE_TEMPORARY_BYTES):
            what = f"{detail}; less than {in_words(FREE_TEMPORARY_BYTES)} are free in {path}"
            return "warning", what, f"free space there, or set {variable} to another disk"
    return ok(detail)


def memory() -> Outcome:
    cpu = devices.processor()
    detail = f"{cpu.free_gib} of {cpu.memory_gib} GiB free, {cpu.cores} cores"
    if cpu.free_gib >= FREE_MEMORY_GIB:
        return ok(detail)
    needed = f"a small model on the CPU needs {FREE_MEMORY_GIB:.0f} GiB"
    return "warning", detail, f"{needed}; close other programs"


def gpu() -> Outcome:
    cards = devices.gpus()
    if not cards:
        what = "training runs on the CPU, which suits models up to about 0.4 billion parameters"
        return ok(f"none: {what}")
    for driver in devices.drivers():
        version = devices.numbers(driver.version)
        if version and version[0] < DRIVER:
            detail = f"{driver.gpu} has driver {driver.version}; the packages need CUDA 13"
            return "problem", detail, f"install NVIDIA driver {DRIVER} or newer, {ON_CPU}"
        capability = devices.numbers(driver.capability)
        if capability and capability < CAPABILITY:
            detail = f"{driver.gpu} (compute capability {driver.capability}) has no bfloat16"
            fix = f"use a card of compute capability 8.0 or more (Ampere, 2020), {ON_CPU}"
            return "problem", detail, fix
    free = [f"{card.name}, {card.free_gib} of {card.memory_gib} GiB free" for card in cards]
    return ok("; ".join(free))


def engine() -> Outcome:
    if missing := missing_packages():
        what = f"not installed here: {', '.join(missing)}; only targets can train"
        return "warning", what, how_to_install(missing)
    return ok("the packages for training are installed")


def queue() -> Outcome:
    """Active runs of all owners, by target."""
    store = open_store()
    counts = store.counts_by_target()
    parts: list[str] = []
    for name in (LOCAL_TARGET, *targets(store.base)):
        waiting = counts.get((name, "queued"), 0) + counts.get((name, "starting"), 0)
        parts.append(f"{name}: {counts.get((name, 'running'), 0)} running, {waiting} waiting")
    return ok("; ".join(parts))


def supervisor() -> Outcome:
    if result := unfit(home()):
        return "problem" if result.hangs else "warning", result.what, result.fix
    if is_supervised(home()):
        return ok("running")
    waiting = len(open_store().active_runs())
    if waiting:
        detail = f"not running, and {waiting} runs wait for it"
        fix = "a running server starts one within seconds, and so does `flash-mcp supervise`"
        return "warning", detail, fix
    return ok("not needed now; the first train starts it")


def waiting_runs() -> Outcome:
    """What keeps runs from going on, and files of theirs that are damaged."""
    store = open_store()
    held: dict[str, str] = {}
    for run in store.active_runs():
        for what in obstacles(store, run):
            held.setdefault(what, run.id)
        for event in store.events(run.id, 3, ["warning"]):
            if "is damaged" in event.message:
                held.setdefault(event.message, run.id)
    if not held:
        return ok("nothing holds a run up")
    lines = [f"{run_id}: {what}" for what, run_id in list(held.items())[:SHOWN]]
    return "warning", "; ".join(lines), "status(run_id=...) says more; runs go on by themselves"


def deployments() -> Outcome:
    """Those whose server is started again, and those that failed lately."""
    rows = open_store().deployments()
    lately = time.time() - LATELY_S
    troubled: list[Deployment] = []
    for row in rows:
        is_current = row.state == "starting" or (row.state == "failed" and row.updated > lately)
        if row.error and is_current:
            troubled.append(row)
    if not troubled:
        starting = sum(row.state == "starting" for row in rows)
        ready = f"{sum(row.state == 'ready' for row in rows)} ready"
        if starting:
            ready += f", {starting} starting"
        return ok(ready)
    lines: list[str] = []
    fixes: list[str] = []
    for row in troubled[:SHOWN]:
        error = FlashError.from_dict(row.error or {})
        lines.append(f"{row.id} is {row.state}: [{error.code}] {error.what}")
        fixes.append(error.fix)
    return "warning", "; ".join(lines), "; ".join(dict.fromkeys(fixes))


HEALTH: dict[str, Callable[[], Outcome]] = {
    "supervisor": supervisor,
    "queue": queue,
    "waiting runs": waiting_runs,
    "deployments": deployments,
    "disk": disk,
    "memory": memory,
    "gpu": gpu,
    "engine": engine,
}
"""What a caller without a shell may see."""
