"""The stages of scripts/gpu-check that repeat what other projects published. Each goes on where it
was ended, if it gets the same folder again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench import gpu, paper
from bench.gpu_model import make_rollouts, make_step
from bench.gpu_place import GIB, Place, seconds_of
from bench.gpu_published import PRIME, TOKENS
from bench.gpu_results import Results
from bench.random_model import free
from flash_mcp.protocol.run_folder import RunFolder
from tests.attempts import Attempt, make_run
from tests.places import ROOT
from worker.training import packing

PROMPT = 64
RANK = 16
MATERIAL = "FLASH_PEERS"
"""The variable with the folder that holds model/, train.jsonl and test.jsonl: Qwen2.5-0.5B-Instruct
and GSM8K. scripts/pack_gpu.py --peers packs it."""
END_S = 30
"""Before the stage's limit, in which the figures are read."""


def peers(place: Place) -> None:
    """prime-rl's rows: sequences of 16,384 tokens, all activations recomputed."""
    for size in PRIME:
        if f"{size}_memory_gib" not in place.results.read():
            _prime_row(place, size)
        free()


def _prime_row(place: Place, size: str) -> None:
    model = place.model(size)
    length = 300 if place.cpu else TOKENS
    rollouts = make_rollouts(AutoTokenizer.from_pretrained(model), 1, 2, PROMPT, length - PROMPT)
    step = make_step(place, model, rollouts, rank=RANK, keep_tokens=0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    rate = 2 * length / seconds_of(step.run, 2)

    def add(**figures: float) -> None:
        place.results.add(**{f"{size}_{name}": value for name, value in figures.items()})

    add(tokens_per_s=rate)
    published_rate, published_mfu, _ = PRIME[size]
    mfu = published_mfu / published_rate  # of each token a second, as prime-rl counts operations
    add(mfu=mfu * rate)
    if matmul := Results(place.results.out, "environment").read().get("matmul_tflops"):
        work = paper.Work(PROMPT, length - PROMPT, 1, longest=packing.LONGEST)
        cost = paper.step_cost(model, flash=True, recomputed=True, work=work, groups=1)
        bound = length / (cost.flops / (matmul * 1e12))
        add(tokens_per_s_bound=bound, mfu_bound=mfu * bound)
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    held = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else weights
    add(memory_gib_bound=weights / GIB, memory_gib=held / GIB)


def gsm8k(place: Place) -> None:
    """GRPO by LoRA of rank 32 on GSM8K, as verl publishes it: evaluated before, in the middle and
    after."""
    material = small_material(place) if place.cpu else Path(os.environ.get(MATERIAL, "~/peers"))
    material = material.expanduser()
    if not (material / "train.jsonl").is_file():
        place.results.add(left_out=f"{material}, named by {MATERIAL}, holds no GSM8K")
        return
    run = RunFolder(place.results.out / "gsm8k")
    if not Path(run.path("job.json")).is_file():
        run = make_run(Path(run.path("")), material / "model", **_fields(place, material))
    if run.result() is None:
        attempts = len(list(Path(run.path("")).glob("log.*")))
        with Attempt(run, attempts + 1) as attempt, suppress(subprocess.TimeoutExpired):
            attempt.process.wait(gpu.LIMITS_S["gsm8k"] - END_S)
    result = run.result() or {}
    steps = run.metric_steps()
    place.results.add(steps=len(steps), of_steps=run.job()["spec"]["steps"])
    seconds = sum(run.metrics(step)["metrics"]["time/step_s"] for step in steps)
    place.results.add(step_s=seconds / max(len(steps), 1))
    successes = {step: run.evaluation(step)["summary"]["success"] for step in run.eval_steps()}
    if successes:
        place.results.add(base_success=successes[min(successes)], success=successes[max(successes)])
    assert result, "not finished: start it again with the same --out"
    assert result["state"] == "succeeded", result


def _fields(place: Place, material: Path) -> dict[str, Any]:
    environment = place.results.out / "gsm8k_environment"
    shutil.copytree(ROOT / "bench" / "gsm8k_environment", environment, dirs_exist_ok=True)
    (environment / "datasets").mkdir(exist_ok=True)
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(material / name, environment / "datasets")
    fields: dict[str, Any] = {
        "environment": environment, "steps": 2 if place.cpu else 40, "save_every": 5,
        "batch_size": 32, "group_size": 8, "max_tokens": 512, "max_length": 1024,
        "lora_rank": 32, "lora_alpha": 64, "learning_rate": 4e-5, "regression": "off",
        "eval_before": True, "eval_every": 20, "eval_after": True, "eval_examples": 1319,
    }  # fmt: skip
    return fields | place.small()


def small_material(place: Place) -> Path:
    """The tiny model and rows of GSM8K's form, for the CPU."""
    folder = place.scratch / "peers"
    shutil.copytree(place.tiny(), folder / "model")
    for name, numbers in (("train.jsonl", range(8)), ("test.jsonl", range(8, 12))):
        rows = [
            {"question": f"What is {number} + 1000?", "answer": f"It is #### 1,{number:03}"}
            for number in numbers
        ]
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
