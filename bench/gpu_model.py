"""The stages of scripts/gpu-check that compute in their own process: the trainer and the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from bench import step as bench_step
from bench.gpu_place import GIB, RANK, Place, seconds_of
from bench.gpu_results import Results
from bench.gpu_runners import RUNNERS, SWITCH, SYNCS, chosen
from bench.random_model import free
from flash_mcp.protocol.spec import RunSpec, resolve
from tests.places import ROOT
from worker.capacity import capacity_bytes
from worker.model_files import ModelFiles
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Sampling
from worker.training import attention, memory, packing
from worker.training.policy import load_policy


def make_rollouts(
    tokenizer: Any, groups: int, size: int, prompt: int, length: int
) -> list[PlayedRollout]:
    """Random tokens: the time and the memory of a step do not depend on them."""
    generator = torch.Generator().manual_seed(0)
    template = ChatTemplate(tokenizer)

    def tokens(count: int) -> list[int]:
        return torch.randint(33, 126, (count,), generator=generator).tolist()

    prompts = [tokens(prompt) for _ in range(groups)]
    rollouts: list[PlayedRollout] = []
    for index in range(groups * size):
        transcript = Transcript(template, [{"role": "user", "content": ""}])
        transcript.prompt_ids = prompts[index // size]
        transcript.completion_ids = tokens(length)
        transcript.mask = [1] * length
        transcript.logprobs = [-5.0] * length
        task = RolloutTask("train", index // size, index // size, index, seed=index)
        rollouts.append(
            PlayedRollout(task, str(index), transcript, reward=float(index % size == 0))
        )
    return rollouts


def trainer(place: Place) -> None:
    """A step's forward and backward passes on random weights, without an engine."""
    for size in ("0.6B",) if place.cpu else ("0.6B", "8B"):
        _train_step(place, place.model(size), size)
        free()


def _train_step(place: Place, model: Path, label: str) -> None:
    groups, size, prompt, length = (2, 4, 40, 60) if place.cpu else (8, 8, 512, 1024)
    add = place.results.add
    rollouts = make_rollouts(AutoTokenizer.from_pretrained(model), groups, size, prompt, length)
    work = memory.Workload(prompt + length, 0, RANK)
    needs = memory.estimate(ModelFiles(model), work, torch.bfloat16, capacity_bytes())
    step = make_step(place, model, rollouts, groups=groups)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    taken = seconds_of(step.run, 1)
    tokens = groups * (prompt + size * length)
    add(**{f"{label}_step_s": taken, f"{label}_tokens_per_s": tokens / taken})
    bound = bench_step.roofline_s(step.model, tokens, groups * size * length)
    add(**{f"{label}_bound_s": bound, f"{label}_share_of_bound": bound / taken})
    causal_lm: Any = step.model.get_base_model()
    held = memory.token_bytes(causal_lm, packing.way_of(causal_lm)) * tokens / groups
    add(**{f"{label}_estimate_gib": (needs.total - needs.process + held) / GIB})
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / GIB
        reserved = torch.cuda.max_memory_reserved() / GIB
        add(**{f"{label}_peak_gib": peak, f"{label}_reserved_gib": reserved})
    flash = step.gradient()
    kept = attention.can_flash
    attention.can_flash = lambda *_: False
    packing.can_flash = attention.can_flash
    try:
        add(**{f"{label}_step_with_mask_s": seconds_of(step.run, 1)})
        add(**{f"{label}_gradient_off_masked": off(flash, step.gradient())})
    finally:
        attention.can_flash = kept
        packing.can_flash = kept


def make_step(
    place: Place,
    model: Path,
    rollouts: list[PlayedRollout],
    *,
    groups: int = 1,
    rank: int = RANK,
    **options: Any,
) -> bench_step.Step:
    """The step of a policy whose adapter has a gradient everywhere."""
    fields: dict[str, Any] = {"lora_rank": rank, "lora_alpha": 2 * rank, "steps": 1}
    fields |= {"batch_size": groups, "group_size": len(rollouts) // groups}
    spec = resolve(RunSpec(environment="e", **fields)).spec
    policy = load_policy(ModelFiles(model), rank=rank, alpha=2 * rank, seed=0, dtype=torch.bfloat16)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:  # which starts at zero: no weight of lora_A would have a gradient
            weight.data.normal_(std=0.01)
    longest = max(len(rollout.transcript.completion_ids) for rollout in rollouts)
    trainer = bench_step.SYSTEMS["ours"](
        policy, AutoTokenizer.from_pretrained(model), spec, output_dir=str(place.scratch),
        max_completion=longest, rollouts_of=lambda number: rollouts, callbacks=[], **options,
    )  # fmt: skip
    return bench_step.Step(trainer)


def off(mine: Tensor, theirs: Tensor) -> float:
    return ((mine - theirs).norm() / theirs.norm()).item()


# -- the engine ------------------------------------------------------------------------------------

MEASURE = "import sys; from bench.gpu_model import measure; measure(*sys.argv[1:])"
INTERPRETED = "import tests.second_runner; "


def engine(place: Place) -> None:
    """Both model runners, each in a process of its own. One that fails is a finding."""
    model = place.model("0.6B")
    for runner, value in RUNNERS.items():
        code = (INTERPRETED if place.cpu and runner == "second" else "") + MEASURE
        command = [sys.executable, "-c", code, runner, str(model), str(place.results.out)]
        subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, SWITCH: value})
    place.results.add(**chosen(place.results.read()))


def measure(runner: str, folder: str, out: str) -> None:
    """Figures of one runner with each sync."""
    model = Path(folder)
    policy = load_policy(ModelFiles(model), rank=RANK, alpha=2 * RANK, seed=0, dtype=torch.bfloat16)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.01)
    for sync in SYNCS:
        _sample(Results(Path(out), "engine"), model, policy, sync, f"{runner}_{sync}")
        free()


def _sample(results: Results, model: Path, policy: Any, sync: Any, label: str) -> None:
    from worker.engine.vllm import VllmEngine  # noqa: PLC0415

    def add(figure: str, value: float) -> None:
        results.add(**{f"{label}_{figure}": value})

    on_card = torch.cuda.is_available()
    started = time.monotonic()
    made = VllmEngine(
        ModelFiles(model),
        max_length=1024,
        max_num_seqs=256 if on_card else 32,
        lora_rank=RANK,
        sync=sync,
    )
    add("start_s", time.monotonic() - started)
    add("sync_ms", 1000 * seconds_of(lambda: made.load_policy(policy), 3))
    prompt = list(range(40, 104))
    length = 256 if on_card else 16
    for count in (64, 256) if on_card else (8,):
        started = time.perf_counter()
        for number in range(count):
            made.submit(str(number), prompt, Sampling(length, seed=number))
        answers: list[Any] = []
        while made.unfinished():
            answers += [completion for _, completion in made.step()]
        taken = time.perf_counter() - started
        tokens = sum(len(answer.token_ids) for answer in answers)
        rate = tokens / taken
        add(f"tokens_per_s_at_{count}", rate)
        if copied := Results(results.out, "environment").read().get("copy_gb_per_s"):
            # Each step of decoding reads every weight once; the cache is small beside them.
            weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
            bound = count * copied * 1e9 / weights
            results.add(**{f"bound_tokens_per_s_at_{count}": bound})
            add(f"share_of_bound_at_{count}", rate / bound)
    off_T = torch.cat([_mismatch(policy, prompt, answer) for answer in answers[:8]])
    add("mismatch_nats", off_T.mean().item())
    add("largest_mismatch_nats", off_T.max().item())


def _mismatch(policy: Any, prompt: list[int], answer: Any) -> Tensor:
    """(T,) differences of the trainer's log-probabilities from the engine's."""
    ids = torch.tensor([prompt + answer.token_ids], device=policy.device)
    trained = torch.ones(1, len(answer.token_ids), dtype=torch.long, device=policy.device)
    with torch.no_grad(), torch.autocast(policy.device.type, torch.bfloat16):
        logps = packing.group_logps(
            policy.get_base_model(), ids, torch.ones_like(ids), trained, 1.0
        )[0][0]
    return (torch.tensor(answer.logprobs) - logps.cpu()).abs()
