"""GRPO: TRL's optimizer loop, resume and logging, with our rollouts, forward pass and loss.

Each batch is used for one step, so the ratio of GRPO's clipped objective is 1 and its gradient is a
sum of fixed coefficients times the gradients of log-probabilities. A token's coefficient is

    - advantage * weight / normaliser
    + beta * (1 - exp(reference - policy)) / normaliser, with a KL penalty

A token's advantage is that of its turn, where the environment rewards turns (`turn_advantages`).
With `entropy_coef` the mean entropy of the step's trained tokens, times that, is taken off.

With a teacher (worker/training/grpo.py) a token's advantage is teacher - policy instead.

The weight is exp(trainer's log-probability - engine's), truncated or masked: the engine rounds in
another way.

Not used of the paper's GRPO: by default the KL term and the division by the group's standard
deviation (Dr. GRPO, https://arxiv.org/abs/2503.20783).

Axes: R rollouts of a step, G of a group, P prompt tokens, C completion tokens, T = P + C; N tokens
of a pack."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad, use_adapter

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.schedules import decayed
from flash_mcp.protocol.spec import LossType, RunSpec
from worker.capacity import capacity_bytes
from worker.model import Model
from worker.model_files import ModelFiles
from worker.precision import precision_of
from worker.ranks import ALONE, Ranks
from worker.rollouts.metrics import thinking_penalties
from worker.rollouts.scheduler import PlayedRollout, groups_of
from worker.rollouts.transcript import Transcript
from worker.training.checkpoints import trainer_arguments
from worker.training.limits import PackLimits, Passes, combine, no_loss
from worker.training.packing import Pack, Way, group_logps, longest_pack, packs_of, way_of
from worker.training.policy import attention_of, names_as_they_are

log = logging.getLogger("worker")
RolloutsOf = Callable[[int], list[PlayedRollout]]
"""Step, from 1 -> its rollouts, those of a group next to each other."""


class Trainer(GRPOTrainer):
    """GRPOTrainer on the finished rollouts of `rollouts_of`. `way` is the result of
    worker.training.packing.way_of.

    Activations of a pass over more than `keep_tokens` tokens are recomputed in the backward
    pass."""

    def __init__(
        self,
        model: PeftModel,
        tokenizer: Any,
        spec: RunSpec,
        *,
        rollouts_of: RolloutsOf,
        output_dir: str,
        max_completion: int,
        callbacks: list[TrainerCallback],
        way: Way,
        keep_tokens: float = math.inf,
        ranks: Ranks = ALONE,
        teacher: Teacher | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._ranks = ranks
        self._passes = Passes(model, ranks)
        # The rows that this counts are never read, and TRL refuses groups of one.
        group_size = max(2, spec.rollouts_per_prompt)
        args = cast(Any, GRPOConfig)(
            **trainer_arguments(spec, model, output_dir),
            max_steps=spec.steps,
            per_device_train_batch_size=group_size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=group_size,
            max_completion_length=max_completion,
            disable_dropout=True,
            beta=spec.kl_penalty_coef,
            temperature=spec.temperature,
        )
        # A row that nobody reads. A step is an epoch, so that no attempt resumes within an epoch.
        unread = cast(Any, Dataset).from_list([{"prompt": ""}])
        cast(Any, super()).__init__(
            model=model,
            reward_funcs=_rewards_come_with_rollouts,
            args=args,
            train_dataset=unread,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)
        self._spec = spec
        self._max_completion = max_completion
        self._rollouts_of = rollouts_of
        self._pad_id = int(tokenizer.pad_token_id)
        self._way = way
        self._teacher = teacher
        longest = longest_pack(model.get_base_model())
        self._limits = PackLimits(keep_tokens, longest, warn)
        self._inputs: dict[str, Any] | None = None  # of the step under way

    # -- rollouts ----------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        """This rank's groups of the step, with R rollouts together."""
        if self._inputs is None:
            rollouts = self._rollouts_of(self.state.global_step + 1)
            inputs = self._tensors(rollouts)
            if self._passes.is_shared and self._needs_whole_rows(self._packs(inputs)):
                # No such pass fits between those with gradients
                inputs["known_logps"] = self._known_logps(inputs)
            with torch.no_grad():
                self._passes.finish()  # those without gradients
            trained = self._ranks.sum(inputs["mask"].sum())
            inputs["step_tokens"] = trained.clamp(min=1)
            of_groups = [
                normalizers(self._spec, mask_GC, int(trained), self._max_completion)
                for mask_GC in torch.split(inputs["mask"], self._spec.rollouts_per_prompt)
            ]
            inputs["normalizers"] = torch.cat(of_groups)
            self._inputs = inputs
        return self._inputs

    def _tensors(self, rollouts: Sequence[PlayedRollout]) -> dict[str, Any]:
        """R rollouts, of which the longest prompt has P tokens and the longest completion C. A
        rollout is one row, also if it is a tree.
        """
        spec = self._spec
        padding = self._pad_id
        device = self.accelerator.device
        nothing: tuple[list[int], list[int], list[float]] = [padding], [0], [0.0]
        transcripts = [rollout.transcript for rollout in rollouts]
        if spec.mask_truncated:
            transcripts = [None if t and t.truncated else t for t in transcripts]
        prompts = [t.prompt_ids if t else [padding] for t in transcripts]
        sampled = [
            (t.completion_ids, t.mask, t.logprobs) if t and t.mask else nothing for t in transcripts
        ]
        completions, masks, logprobs = zip(*sampled, strict=True)

        def padded(rows: Sequence[list[Any]], value: int = 0, side: str = "right") -> Tensor:
            tensors = [torch.tensor(row) for row in rows]
            return pad(tensors, padding_value=value, padding_side=side).to(device)

        def ones(rows: Sequence[list[int]]) -> list[list[int]]:
            return [[1] * len(row) for row in rows]

        prompt_ids = padded(prompts, padding, "left")
        completion_ids = padded(completions, padding)
        seen = padded(ones(prompts), side="left"), padded(ones(completions))
        mask_RC = padded(masks)
        advantages_RC = torch.zeros(mask_RC.shape, device=device)
        share = self.state.global_step / max(1, self.state.max_steps)
        kl_coef = spec.kl_penalty_coef * decayed(spec.kl_schedule, share)
        trained_RC = mask_RC.clone()
        size = spec.rollouts_per_prompt
        by_group = torch.split(advantages_RC, size), torch.split(trained_RC, size)
        for group, advantages_GC, trained_GC in zip(
            groups_of(rollouts, size), *by_group, strict=True
        ):
            for row, parts in enumerate(turn_advantages(group, spec)):
                start = 0
                for end, advantage in parts:
                    advantages_GC[row, start:end] = advantage
                    start = end
            # Without advantage, KL and entropy a group's gradient is zero.
            if not (kl_coef or spec.entropy_coef or advantages_GC.any()):
                trained_GC.zero_()
        inputs: dict[str, Any] = {
            "ids": torch.cat([prompt_ids, completion_ids], dim=1),  # (R, T)
            "seen": torch.cat(seen, dim=1),  # (R, T)
            "mask": mask_RC,  # 1 on the model's own tokens
            "trained": trained_RC,  # those of them that have a gradient
            "engine_logps": padded(logprobs),  # (R, C)
            "advantages": advantages_RC,
            "forks": [t.forks if t and t.mask else [] for t in transcripts],
            "experts": _experts(transcripts),
            "kl_coef": kl_coef,
        }
        if spec.kl_penalty_coef:
            with use_adapter(self._unwrapped(cast(Any, self).model), "ref"):  # TRL keeps it
                inputs["reference_logps"] = self._known_logps(inputs)
        if self._teacher:
            with self._teacher.speaking() as causal_lm:
                inputs["teacher_logps"] = self._known_logps(inputs, causal_lm, self._teacher.way)
        return inputs

    def _known_logps(
        self, inputs: dict[str, Any], causal_lm: Any = None, way: Way | None = None
    ) -> Tensor:
        """(R, C) log-probabilities without a gradient; those of the policy by default. Another
        model chooses its own experts."""
        experts = None if causal_lm else inputs["experts"]
        causal_lm = causal_lm or self._unwrapped(cast(Any, self).model).get_base_model()
        batch = inputs["ids"], inputs["seen"], inputs["mask"]
        way = way or self._way
        with torch.no_grad(), self.accelerator.autocast():
            forks = inputs["forks"]
            return group_logps(causal_lm, *batch, self.temperature, forks, way, experts)[0]

    def _unwrapped(self, model: Any) -> Any:
        return cast(Any, self.accelerator).unwrap_model(model)

    # -- backward ----------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """TRL's, with the gradients and metrics of all ranks."""
        trl = cast(Any, super())
        loss = self._limits.run(
            self,
            lambda: trl.training_step(model, inputs, num_items_in_batch),
            # Ranks that share the model cannot: each pass needs all of them.
            can_repeat=not self._passes.is_shared,
        )
        self._inputs = None
        if self._ranks.count == 1:
            return loss
        self._passes.finish()
        return combine(self, self._ranks, loss.item())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        spec = self._spec
        causal_lm = self._unwrapped(model).get_base_model()
        packs = self._packs(inputs)
        if not packs:
            return no_loss(model)
        known_RC = inputs.get("known_logps")
        if known_RC is None and self._needs_whole_rows(packs):
            known_RC = self._known_logps(inputs)
        metrics = TokenMeans()

        def loss(pack: Pack, logps_N: Tensor, entropies_N: Tensor) -> Tensor:
            of_group = inputs["mask"].size(1) * spec.rollouts_per_prompt
            metrics.begin(pack.places_N // of_group)
            metrics.add("entropy", entropies_N.detach())
            value = loss_of(spec, pack, inputs, logps_N, known_RC, metrics)
            if spec.entropy_coef:
                value = value - spec.entropy_coef * entropies_N.sum() / inputs["step_tokens"]
            return value

        options = {"temperature": self.temperature, "trains_entropy": spec.entropy_coef > 0}
        total = self._limits.sum_of(self, causal_lm, packs, loss, **options)
        means = metrics.means()
        if "is_ratio/squared" in means:
            squared_G = means.pop("is_ratio/squared")
            shares_G = means["is_ratio/mean"] ** 2 / squared_G
            means["is_ratio/effective_share"] = shares_G[squared_G > 0]
        for name, values_G in means.items():
            cast(Any, self)._metrics["train"][name] += cast(Any, values_G).tolist()
        assert total is not None
        return total

    def _packs(self, inputs: dict[str, Any]) -> list[Pack]:
        limits = self._limits
        batch = inputs["ids"], inputs["seen"], inputs["trained"]
        trees = inputs["forks"], self._way, limits.longest, inputs["experts"]
        return packs_of(*batch, limits.keep_tokens, *trees)

    def _needs_whole_rows(self, packs: Sequence[Pack]) -> bool:
        """Whether tokens are weighed by their whole rollout, and one of them is in several packs: a
        long tree, in packs of paths. That takes one pass more."""
        if not self._spec.importance_sampling.startswith("sequence"):
            return False
        rows = [row for pack in packs for row in pack.rows]
        return len(rows) > len(set(rows))


def _experts(transcripts: Sequence[Transcript | None]) -> list[Tensor] | None:
    """(tokens, layers, k) of each rollout; None if no engine returned any."""
    returned = [t.experts if t else None for t in transcripts]
    some = next((experts for experts in returned if experts is not None), None)
    if some is None:
        return None
    return [torch.as_tensor(some[:0] if experts is None else experts) for experts in returned]


class TokenMeans:
    """Means over the tokens of each group, which are in several packs."""

    def __init__(self) -> None:
        self._groups: list[Tensor] = []
        self._values: dict[str, list[Tensor]] = {}

    def begin(self, groups_N: Tensor) -> None:
        """A pack, whose tokens are of these groups."""
        self._groups.append(groups_N)

    def add(self, name: str, values_N: Tensor) -> None:
        self._values.setdefault(name, []).append(values_N)

    def means(self) -> dict[str, Tensor]:
        """By name, the mean of each group that has tokens."""
        groups_N = torch.cat(self._groups)
        counts_G = groups_N.bincount()
        has_any = counts_G > 0
        means: dict[str, Tensor] = {}
        for name, values in self._values.items():
            sums_G = groups_N.bincount(torch.cat(values))
            means[name] = (sums_G / counts_G)[has_any]
        return means


def loss_of(
    spec: RunSpec,
    pack: Pack,
    inputs: dict[str, Any],
    logps_N: Tensor,  # with a gradient
    known_RC: Tensor | None,
    metrics: TokenMeans,
) -> Tensor:
    """The loss of a pack's tokens: weights first, then fixed coefficients times `logps_N`.
    `known_RC` are the log-probabilities of all rollouts, where `pack` lacks some of one."""
    now_N = logps_N.detach()
    rows_N = pack.places_N // inputs["mask"].size(1)

    def at_tokens(name: str) -> Tensor:
        return inputs[name].reshape(-1)[pack.places_N]

    difference_N = now_N - at_tokens("engine_logps")
    log_ratio_N = difference_N
    if spec.importance_sampling.startswith("sequence"):
        engine_RC = inputs["engine_logps"]
        if known_RC is None:
            known_RC = pack.put(engine_RC.to(now_N.dtype), now_N)
        log_ratio_N = ((known_RC - engine_RC) * inputs["mask"]).sum(1)[rows_N]
    ratio_N = log_ratio_N.exp()
    high = spec.importance_sampling_clip
    weight_N = torch.ones_like(ratio_N)
    if spec.importance_sampling.endswith("truncate"):
        weight_N = ratio_N.clamp(max=high)
    elif spec.importance_sampling.endswith("mask"):
        weight_N = ratio_N.masked_fill(ratio_N > high, 0.0)
    advantages_N = at_tokens("advantages")
    if "teacher_logps" in inputs:
        behind_N = at_tokens("teacher_logps") - now_N
        metrics.add("teacher_kl", -behind_N)
        advantages_N = advantages_N * behind_N
    value_N = -advantages_N * weight_N
    slope_N = value_N
    if "reference_logps" in inputs:
        # KL(policy | reference) by the estimator k3: http://joschu.net/blog/kl-approx.html
        away_N = at_tokens("reference_logps") - now_N
        kl_N = away_N.exp() - away_N - 1
        value_N = value_N + inputs["kl_coef"] * kl_N
        slope_N = slope_N + inputs["kl_coef"] * (1 - away_N.exp())
        metrics.add("kl", kl_N)
    if spec.importance_sampling != "none":
        metrics.add("is_ratio/mean", weight_N)
        metrics.add("is_ratio/squared", weight_N**2)
        metrics.add("is_ratio/clipped_share", (weight_N != ratio_N).float())
    # KL(engine | trainer) on what the engine sampled, by k3 too.
    metrics.add("sampling_kl", difference_N.exp() - 1 - difference_N)
    metrics.add("sampling_logp_difference/mean", difference_N.abs())
    # The value is the objective's, the gradient that of the coefficients.
    terms_N = value_N + slope_N * (logps_N - now_N)
    return (terms_N / inputs["normalizers"][rows_N]).sum()


def normalizers(spec: RunSpec, mask_GC: Tensor, all_tokens: int, max_completion: int) -> Tensor:
    """(G,) what the sum over a rollout's tokens is divided by. `all_tokens` are the trained ones of
    the step, of all ranks."""
    tokens_G = mask_GC.sum(1).float()
    rollouts = len(tokens_G) * spec.batch_size
    match spec.loss_type:
        case "grpo" | "rollout_mean":
            return tokens_G.clamp(min=1) * rollouts
        case "bnpo":
            return (tokens_G.sum().clamp(min=1) * spec.batch_size).expand_as(tokens_G)
        case "dapo" | "cispo":
            return torch.full_like(tokens_G, max(all_tokens, 1))
        case "dr_grpo" | "maxrl":
            return torch.full_like(tokens_G, max_completion * rollouts)


Turns = list[tuple[int | None, float]]
"""(end in the completion, None for the last, and advantage) of each turn of a rollout, in order."""


def advantages_of(group: Sequence[PlayedRollout], spec: RunSpec) -> list[float]:
    """The advantage of each rollout; with a teacher, 1 or 0 for one that the environment failed:
    the factor of its tokens' advantages."""
    if spec.algorithm == "distill":
        return [float(not rollout.error) for rollout in group]
    return relative(_rewards(group, spec.thinking_length_penalty_coef), spec.loss_type)


def turn_advantages(group: Sequence[PlayedRollout], spec: RunSpec) -> list[Turns]:
    """The advantages of each rollout's turns: one for all turns, unless the environment rewards
    them. Then what turn k is worth is its return, R(k) = r(k) + r(k+1) + ... + final score, and its
    advantage is that relative to turn k of the group's other rollouts; relative to their whole
    rewards where no other has so many turns.

    Reward to go (Williams 1992; https://spinningup.openai.com/en/latest/spinningup/rl_intro3.html)
    with the group of GRPO as its baseline, turn by turn."""
    advantages = advantages_of(group, spec)
    if spec.algorithm == "distill" or not any(rollout.has_turn_rewards for rollout in group):
        return [[(None, advantage)] for advantage in advantages]
    rewards = _rewards(group, spec.thinking_length_penalty_coef)
    turns: list[Turns] = [[] for _ in group]
    for turn in range(max(len(rollout.turn_rewards) for rollout in group)):
        returns: list[float] = []
        for rollout, reward in zip(group, rewards, strict=True):
            earned = math.fsum(value or 0.0 for _, value in rollout.turn_rewards[:turn])
            value = round(reward - earned, 12)  # what rounding leaves of 0 is 0
            returns.append(value if turn < len(rollout.turn_rewards) else math.nan)
        reached = [row for row, value in enumerate(returns) if not math.isnan(value)]
        if len(reached) == 1:
            returns = [*rewards[: reached[0]], returns[reached[0]], *rewards[reached[0] + 1 :]]
        values = relative(returns, spec.loss_type)
        for row in reached:
            turns[row].append((group[row].turn_rewards[turn][0], values[row]))
    return turns


def _rewards(group: Sequence[PlayedRollout], thinking_coef: float) -> list[float]:
    """Less what thinking costs. A rollout that the environment failed says nothing about the
    policy: it has none (NaN)."""
    rewards = [math.nan if rollout.error else rollout.reward for rollout in group]
    if not thinking_coef:
        return rewards
    penalties = thinking_penalties(group, thinking_coef)
    return [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]


SCALED = ("grpo", "bnpo", "dapo", "cispo")
"""Losses that divide advantages by their group's standard deviation."""


def relative(rewards: Sequence[float], loss_type: LossType) -> list[float]:
    """Rewards less their mean; divided by their standard deviation (SCALED), or by their mean
    (maxrl, whose rewards must not be negative). One that is NaN gets 0 and does not count."""
    # In fp64: a mean that is rounded moves all advantages of the group the same way.
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    valid = rewards_G[~rewards_G.isnan()]
    # The mean of equal numbers is rounded, so compare the numbers.
    if valid.numel() == 0 or valid.min() == valid.max():
        return [0.0] * len(rewards)
    advantages_G = rewards_G - valid.mean()
    if loss_type in SCALED:
        advantages_G = advantages_G / (valid.std() + 1e-4)
    if loss_type == "maxrl":
        if valid.min() < 0:
            raise FlashError(
                "invalid_argument",
                "loss_type=maxrl divides by the group's mean reward, and a reward is negative",
                reward=round(float(valid.min()), 4),
                fix="use another loss_type, or rewards of at least 0",
            )
        advantages_G = advantages_G / valid.mean()
    return cast(Any, advantages_G.nan_to_num(0.0).float()).tolist()


def _rewards_come_with_rollouts(**_: Any) -> list[float | None]:
    raise AssertionError("TRL asked for a reward, but rollouts are scored by their environment")


# The teacher of a distillation on the policy: what it gives to each token that the policy wrote
#
# The advantage of a token is its log-probability under the teacher minus that under the policy: a
# sample of the reverse KL divergence, which is least where the policy is the teacher.

TEACHER = "teacher"
"""The name of its adapter within the policy."""


@dataclass(frozen=True)
class Teacher:
    """Another model, or an adapter of the policy's."""

    causal_lm: Any
    way: Way
    policy: PeftModel | None = None
    """The policy that has its adapter."""

    @property
    def bytes(self) -> int:
        weights = self.causal_lm.named_parameters()
        return sum(p.nbytes for name, p in weights if self.policy is None or f".{TEACHER}." in name)

    @contextmanager
    def speaking(self) -> Generator[Any]:
        """Its causal language model, while it computes as the teacher."""
        if self.policy is None:
            yield self.causal_lm
            return
        with use_adapter(self.policy, TEACHER):
            yield self.causal_lm


def load_teacher(source: Json, folder: Path, model: Model, way: Way) -> Teacher:
    """The teacher that a job names as `source`, from its files in `folder`, for the policy of
    `model`, which is computed in this way.

    FlashError(invalid_argument) if it reads other tokens than the policy writes."""
    policy = model.policy
    assert isinstance(policy, PeftModel)
    if model.is_shared:
        what = "one card cannot hold the model, and layers that cards share have no teacher"
        raise FlashError("out_of_memory", what, fix="use a smaller model, or larger cards")
    if "model" not in source:
        with names_as_they_are():
            cast(Any, policy).load_adapter(folder, TEACHER)
        return Teacher(policy.get_base_model(), way, policy)
    base = ModelFiles(folder)
    if base.tokenizer.get_vocab() != model.template.tokenizer.get_vocab():
        raise FlashError(
            "invalid_argument",
            "the teacher's tokenizer is another one: it cannot read what the model writes",
            teacher=source["model"],
            fix="take a teacher of the model's own family, such as a larger one",
        )
    dtype = precision_of(base, capacity_bytes()).dtype
    causal_lm = base.auto_class.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention_of(base.config)
    )
    causal_lm = causal_lm.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    causal_lm.requires_grad_(False)
    return Teacher(causal_lm, way_of(causal_lm))
