"""The engine that a GPU would get, as far as vLLM configures it without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT, TESTS

CARDS = ["NVIDIA H100:9.0:80", "NVIDIA A100:8.0:40", "NVIDIA RTX 4090:8.9:24"]

REPLAYED = {
    "1 0": "FULL 1 0", "1 1": "FULL 1 2", "3 0": "FULL 4 0", "3 1": "FULL 4 2", "64 0": "FULL 64 0",
    "64 1": "FULL 64 2", "65 0": "NONE 65 0", "65 1": "NONE 65 2",
}  # fmt: skip
"""{conversations, adapters in use: kind, size and adapters of the graph}: 11 sizes up to 64, each with and without
the kernels for adapters."""


@pytest.mark.long  # half a minute of a processor, and only another vLLM can change it
def test_vllm_takes_the_arguments_for_a_card(tiny_model: Path) -> None:
    command = [sys.executable, TESTS / "worker" / "gpu_configuration.py", tiny_model, *CARDS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    configurations = [json.loads(line) for line in done.stdout.splitlines()]
    expected = {
        "device": "cuda", "dtype": "torch.bfloat16", "largest_graph": 64, "graphs": "FULL_AND_PIECEWISE",
        "specialized": False, "autotune": False, "utilization": 0.01, "rank": 16, "eager": False,
        "allocator": "expandable_segments:True", "captured": {"FULL": 22, "PIECEWISE": 22, **REPLAYED},
    }  # fmt: skip
    assert configurations == [expected] * len(CARDS)
