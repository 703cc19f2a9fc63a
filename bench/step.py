"""The training step: our forward and backward pass beside TRL's own, on the same rollouts and
weights.

    ours             worker.training.grpo.Trainer
    trl              GRPOTrainer with the same loss and no gradient checkpointing
    trl as it comes  GRPOTrainer with its defaults: checkpointing, and no correction of the sampling
                     mismatch, for which it would need one more pass

What is timed is `training_step` over the step's micro-batches: from finished rollouts to gradients,
no optimizer, in the precision that a run on this machine chooses. Gradients are compared in it,
where both are off by rounding, and in fp32, which says how far off each of them is."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft.tuners.lora import Linear
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from bench.rollouts import rotated
from flash_mcp.protocol.spec import RunSpec, resolve
from worker.capacity import capacity_bytes
from worker.model_files import ModelFiles
from worker.precision import name_of, precision_of
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.training.checkpoints import trainer_arguments
from worker.training.grpo import SCALED, RolloutsOf, Trainer
from worker.training.kernels import LoraLinear
from worker.training.packing import way_of
from worker.training.policy import load_policy

Json = dict[str, Any]
RANK = 16
TEXT = Path(__file__).parents[1] / "TRAINING.md"


@dataclass(frozen=True)
class Case:
    """A step's rollouts: lengths in tokens, turns and tokens of a turn drawn from what is given."""

    label: str
    groups: int
    size: int
    prompt: int
    turns: tuple[int, ...]
    answer: range
    reply: int = 16


def cases(*, quick: bool) -> list[Case]:
    groups, size = (2, 4) if quick else (4, 8)
    return [
        Case("shared prompt, 118 + 42 tokens", groups, size, 118, (1,), range(42, 43)),
        Case("multi-turn, uneven", groups, size, 118, (1, 2, 4, 6), range(8, 41)),
    ]


def plain_trainer(
    policy: Any,
    tokenizer: Any,
    spec: RunSpec,
    *,
    rollouts_of: RolloutsOf,
    output_dir: str,
    max_completion: int,
    callbacks: Sequence[TrainerCallback],
    as_it_comes: bool = True,
) -> GRPOTrainer:
    """TRL's trainer where the worker has its own, fed with the same rollouts through
    `rollout_func`.

    The policy is changed to PEFT's own layers and PyTorch's attention: what it would have with TRL.
    """
    policy.get_base_model().set_attn_implementation("sdpa")
    for module in policy.modules():
        if isinstance(module, LoraLinear):
            module.__class__ = Linear

    def rollout_func(prompts: list[str], trainer: Any) -> Json:
        rollouts = rollouts_of(trainer.state.global_step + 1)
        transcripts = [rollout.transcript for rollout in rollouts if rollout.transcript]
        return {
            "prompt_ids": [transcript.prompt_ids for transcript in transcripts],
            "completion_ids": [transcript.completion_ids for transcript in transcripts],
            "logprobs": [transcript.logprobs for transcript in transcripts],
            "env_mask": [transcript.mask for transcript in transcripts],
            "reward": [rollout.reward for rollout in rollouts],
        }

    args = GRPOConfig(
        **{**trainer_arguments(spec, policy, output_dir), "gradient_checkpointing": as_it_comes},
        max_steps=spec.steps,
        per_device_train_batch_size=spec.group_size,
        gradient_accumulation_steps=spec.batch_size,
        num_generations=spec.group_size,
        max_completion_length=max_completion,
        beta=spec.kl_penalty_coef,
        temperature=spec.temperature,
        loss_type=spec.loss_type,
        scale_rewards="group" if spec.loss_type in SCALED else "none",
        vllm_importance_sampling_mode=spec.importance_sampling,
        vllm_importance_sampling_clip_max=spec.importance_sampling_clip,
    )
    trainer = GRPOTrainer(
        policy,
        reward_funcs=lambda reward, **_: reward,
        args=args,
        train_dataset=Dataset.from_list(
            [{"prompt": str(index)} for index in range(spec.batch_size)]
        ),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        rollout_func=rollout_func,
    )
    if not as_it_comes:
        # TRL's correction belongs to its own engine; this switches it on for rollouts from
        # elsewhere.
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        trainer._last_loaded_step = trainer.state.global_step
    return trainer


def our_trainer(policy: Any, *args: Any, **options: Any) -> Trainer:
    return Trainer(policy, *args, **options, way=way_of(policy.get_base_model()))


SYSTEMS: dict[str, Callable[..., Any]] = {
    "ours": our_trainer,
    "trl": lambda *args, **options: plain_trainer(*args, **options, as_it_comes=False),
    "trl as it comes": plain_trainer,
}


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """{"cases": [...]}: seconds of every repeat, medians of the ratios within a repeat, and how
    gradients compare.
    """
    return {"cases": [_run_case(model_path, case, repeat) for case in cases(quick=quick)]}


def _run_case(model_path: Path, case: Case, repeat: int) -> Json:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    fields: Json = {
        "batch_size": case.groups,
        "group_size": case.size,
        "lora_rank": RANK,
        "lora_alpha": 2 * RANK,
        "steps": 1,
    }
    spec = resolve(RunSpec(environment="bench", **fields)).spec
    dtype = precision_of(ModelFiles(model_path), capacity_bytes()).dtype
    rollouts = make_rollouts(make_policy(model_path, dtype), tokenizer, case)
    transcripts = [rollout.transcript for rollout in rollouts if rollout.transcript]
    longest = max(len(transcript.completion_ids) for transcript in transcripts)
    with tempfile.TemporaryDirectory() as scratch:

        def make_step(name: str, dtype: torch.dtype = dtype) -> Step:
            return Step(
                SYSTEMS[name](
                    make_policy(model_path, dtype), tokenizer, spec, output_dir=scratch,
                    rollouts_of=lambda step: rollouts, max_completion=longest, callbacks=[],
                )
            )  # fmt: skip

        steps = {name: make_step(name) for name in SYSTEMS}
        for name, step in steps.items():
            say(case, f"{name}, first pass", step.run())  # the first pass allocates
        times: dict[str, list[Times]] = {name: [] for name in steps}
        for number in range(repeat):
            for name in rotated(list(steps), number):
                gc.collect()
                times[name].append(steps[name].run())
                say(case, name, times[name][-1])
        precise = {}
        for name in ("ours", "trl"):
            step = steps[name]
            if dtype != torch.float32:
                step = make_step(name, torch.float32)
                say(case, f"{name} in fp32", step.run())
            precise[name] = step.gradient()
    gradients = {name: step.gradient() for name, step in steps.items()}
    packed = case.groups * case.prompt + sum(
        len(transcript.completion_ids) for transcript in transcripts
    )
    trained = sum(transcript.model_tokens for transcript in transcripts)
    bound_s = roofline_s(steps["ours"].model, packed, trained)
    return {
        "label": case.label,
        "precision": name_of(dtype),
        "rollouts": len(rollouts),
        "seconds": {name: [each.wall_s for each in of] for name, of in times.items()},
        "over": _over(times, "wall_s"),
        "over_by_cpu": _over(times, "cpu_s"),
        "tokens": {
            "packed": packed,
            "padded": len(rollouts) * (case.prompt + longest),
            "trained": trained,
        },
        "gradient": {
            "ours to trl": compare(gradients["ours"], gradients["trl"]),
            "ours to trl in fp32": compare(precise["ours"], precise["trl"]),
            "ours to fp32": compare(gradients["ours"], precise["trl"]),
            "trl to fp32": compare(gradients["trl"], precise["trl"]),
        },
        "bound_s": bound_s,
        "bound_share": bound_s / statistics.median(each.wall_s for each in times["ours"]),
    }


@dataclass(frozen=True)
class Times:
    """Of one step. The process's own time counts nothing of what else the machine does."""

    wall_s: float
    cpu_s: float


def _over(times: dict[str, list[Times]], clock: str) -> dict[str, float]:
    """The median ratio of each system's time to ours, within a repeat."""
    return {
        name: statistics.median(
            getattr(theirs, clock) / getattr(mine, clock)
            for theirs, mine in zip(of, times["ours"], strict=True)
        )
        for name, of in times.items()
    }


def say(case: Case, what: str, times: Times) -> None:
    """A line for each pass: all of them take up to half an hour on a CPU."""
    took = f"{times.wall_s:.1f} s, {times.cpu_s:.1f} s of CPU time"
    sys.stderr.write(f"step: {case.label}: {what}: {took}\n")


class Step:
    """One trainer's way from rollouts to gradients."""

    def __init__(self, trainer: Any) -> None:
        # What `train` does before its loop.
        self._trainer, self._groups = trainer, trainer.args.gradient_accumulation_steps
        if trainer.args.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        self.model: Any = trainer.accelerator.prepare_model(trainer.model)
        trainer.current_gradient_accumulation_steps = self._groups

    def run(self) -> Times:
        """One step; its gradients stay."""
        self.model.zero_grad()
        size = self._trainer.args.per_device_train_batch_size
        batch = [{"prompt": str(row // size)} for row in range(size * self._groups)]
        started, used = time.perf_counter(), time.process_time()
        for _ in range(self._groups):
            self._trainer.training_step(self.model, batch, None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Times(time.perf_counter() - started, time.process_time() - used)

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def compare(mine: Tensor, theirs: Tensor) -> Json:
    cosine = torch.nn.functional.cosine_similarity(mine.double(), theirs.double(), dim=0)
    return {
        "cosine": cosine.item(),
        "norm_difference": ((mine - theirs).norm() / theirs.norm()).item(),
    }


# -- what is trained on ----------------------------------------------------------------------------


def make_policy(model_path: Path, dtype: torch.dtype) -> Any:
    """The base model with an adapter that changes it a little, so that every adapter weight has a
    gradient.
    """
    policy = load_policy(ModelFiles(model_path), rank=RANK, alpha=2 * RANK, seed=0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(torch.empty(weight.shape).normal_(std=0.005, generator=generator))
    return policy


def make_rollouts(policy: Any, tokenizer: Any, case: Case) -> list[PlayedRollout]:
    """Rollouts that the policy sampled after pieces of a text; log-probabilities are its own but
    for an engine's noise.

    Tokens at random would not do: bf16 noise is most of the gradient of what the policy would never
    say."""
    rng, template = random.Random(0), ChatTemplate(tokenizer)
    text = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)

    def piece(count: int) -> list[int]:
        start = rng.randrange(len(text) - count)
        return text[start : start + count]

    prompts = [piece(case.prompt) for _ in range(case.groups)]
    answers = [
        [rng.choice(case.answer) for _ in range(rng.choice(case.turns))]
        for _ in range(case.groups * case.size)
    ]
    said = _sample(
        policy,
        [prompts[index // case.size] for index in range(len(answers))],
        max(map(sum, answers)),
    )
    rollouts = []
    for index, lengths in enumerate(answers):
        transcript = Transcript(template, [{"role": "user", "content": ""}])
        transcript.prompt_ids = list(prompts[index // case.size])
        words = iter(said[index])
        for turn, length in enumerate(lengths):
            added = piece(case.reply) if turn else []
            transcript.completion_ids += added + list(itertools.islice(words, length))
            transcript.mask += [0] * len(added) + [1] * length
        noisy = [logp + rng.gauss(0, 0.01) for logp in _logps(policy, transcript)]
        transcript.logprobs = [
            logp * mine for logp, mine in zip(noisy, transcript.mask, strict=True)
        ]
        task = RolloutTask("train", index // case.size, index // case.size, index, seed=index)
        # The first two of a group differ, so that no group is without advantage.
        reward = float(index % case.size) if index % case.size < 2 else rng.random()
        rollouts.append(PlayedRollout(task, f"t{index}", transcript, reward=reward))
    return rollouts


def _sample(policy: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens after each of the prompts, all of one length."""
    torch.manual_seed(0)
    ids = torch.tensor(prompts, device=policy.device)
    said = policy.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
        min_new_tokens=count, max_new_tokens=count,
    )  # fmt: skip
    return said[:, ids.size(1) :].tolist()


def _logps(policy: Any, transcript: Transcript) -> list[float]:
    half = policy.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast(policy.device.type, torch.bfloat16, enabled=half):
        logits = (
            policy(input_ids=torch.tensor([transcript.ids], device=policy.device)).logits[0].float()
        )  # (L, V)
    targets = torch.tensor(transcript.completion_ids, device=policy.device)
    predicted = logits[len(transcript.prompt_ids) - 1 : -1].log_softmax(-1)  # (C, V)
    return predicted.gather(1, targets[:, None]).squeeze(1).tolist()


# -- the roofline ----------------------------------------------------------------------------------


def roofline_s(policy: Any, tokens: int, trained: int) -> float:
    """Seconds of the matrix products alone at the rate that this machine reaches, attention and the
    adapter left out.

    A frozen weight of n entries costs 2n operations a token forward and 2n backward; the head
    counts on trained tokens."""
    causal_lm = policy.get_base_model()
    head = causal_lm.lm_head.weight.numel()
    layers = sum(
        weight.numel()
        for name, weight in causal_lm.model.layers.named_parameters()
        if "lora_" not in name
    )
    return 4 * (layers * tokens + head * trained) / _operations_per_s(causal_lm.lm_head.weight)


def _operations_per_s(weight: Tensor) -> float:
    """Of matrix products with the head, the widest that the model has."""
    left = torch.randn(512, weight.size(1), dtype=weight.dtype, device=weight.device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        (left @ weight.detach().T).sum().item()
        times.append(time.perf_counter() - started)
    return 2 * left.numel() * weight.size(0) / min(times)


def rows(result: Json) -> Iterator[list[str]]:
    """The table, its header first."""
    yield [
        "rollouts",
        "ours / trl / trl as it comes, s",
        "over trl",
        "over trl as it comes",
        "the two by CPU time",
        "gradient: cosine, difference to trl",
        "in fp32",
        "ours / trl to fp32",
        "tokens packed / padded",
        "bound s",
        "share",
    ]
    for case in result["cases"]:
        gradient = case["gradient"]
        difference = "norm_difference"
        ours = gradient["ours to fp32"][difference]
        trl = gradient["trl to fp32"][difference]
        yield [
            f"{case['rollouts']} {case['label']}, {case['precision']}",
            " / ".join(f"{statistics.median(times):.2f}" for times in case["seconds"].values()),
            f"{case['over']['trl']:.2f}",
            f"{case['over']['trl as it comes']:.2f}",
            " / ".join(f"{case['over_by_cpu'][name]:.2f}" for name in ("trl", "trl as it comes")),
            f"{gradient['ours to trl']['cosine']:.5f}, {gradient['ours to trl'][difference]:.3f}",
            f"{gradient['ours to trl in fp32'][difference]:.0e}",
            f"{ours:.3f} / {trl:.3f}",
            f"{case['tokens']['packed']} / {case['tokens']['padded']}",
            f"{case['bound_s']:.2f}",
            f"{case['bound_share']:.2f}",
        ]
