"""The package for CPUs has the Python code of vLLM's wheel for GPUs."""

import json
from importlib import metadata

import pytest

from tests import gpu_wheel
from tests.places import ROOT


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.partition(";")[0].strip().partition("==") for line in lines]
    return {package: version for package, _, version in pairs if version}


@pytest.mark.cpu
def test_the_python_code_of_the_gpus_vllm_is_that_which_the_tests_run() -> None:
    version = metadata.version(gpu_wheel.CPU_PACKAGE)
    known = json.loads(gpu_wheel.RESULT.read_text())
    assert known["version"] == version == pins("constraints-gpu.txt")["vllm"]
    # The version's own file, and the look at which of the two packages is installed.
    assert known["different"] == ["vllm/_version.py", "vllm/platforms/__init__.py"]
    files = gpu_wheel.installed()
    for path in known["different"]:
        del files[path]
    assert len(files) == known["equal_files"] and gpu_wheel.digest(files) == known["digest"]


def test_a_gpu_machine_gets_the_same_trainer_as_the_tests() -> None:
    cpu, gpu = pins("constraints-cpu.txt"), pins("constraints-gpu.txt")
    for package in ("trl", "transformers", "peft", "accelerate", "torch"):
        assert gpu[package] == cpu[package], package
