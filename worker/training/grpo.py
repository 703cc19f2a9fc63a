"""GRPO: TRL's trainer, with our rollouts and our forward pass.

TRL's losses, importance-sampling modes, optimizer loop, logging and resume are used. Replaced are

    _prepare_inputs                      rollouts and advantages; a micro-batch is a group
    _get_per_token_logps_and_entropies   packed: a group's prompt once, no padding, head on trained
                                         tokens only
    _compute_loss                        skips groups without advantage; the importance ratio needs
                                         no extra pass

Not used of the paper's GRPO: the clipped old policy, since each batch is used for one step (ratio
1), and by default the KL term and the division by the group's standard deviation (Dr. GRPO,
https://arxiv.org/abs/2503.20783).

Axes: G rollouts of a group, P prompt tokens, C completion tokens, T = P + C."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad, use_adapter

from flash_mcp.protocol.spec import RunSpec
from worker.ranks import ALONE, Ranks
from worker.rollouts.scheduler import Rollout
from worker.training.checkpoints import trainer_arguments
from worker.training.packing import (
    Pack,
    check_trl_head,
    group_logps,
    packs_of,
    packs_of_paths,
    recompute,
)
from worker.training.parallel import Passes, combine, no_loss

RolloutsOf = Callable[[int], list[Rollout]]
"""Step, from 1 -> its rollouts, those of a group next to each other."""


class Trainer(GRPOTrainer):
    """GRPOTrainer on the finished rollouts of `rollouts_of`. `packed` is the result of
    worker.training.packing.can_pack.

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
        packed: bool,
        keep_tokens: float = math.inf,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._passes = Passes(model, ranks)
        own_groups = len(self._ranks.mine(range(spec.batch_size)))
        corrected = spec.importance_sampling != "none"
        args = _arguments(spec, model, output_dir, max_completion, own_groups)
        # Rows that nobody reads. A step is an epoch, so that no attempt resumes within an epoch.
        unread = cast(Any, Dataset).from_list([{"prompt": ""}] * own_groups)
        cast(Any, super()).__init__(
            model=model,
            reward_funcs=_rewards_come_with_rollouts,
            args=args,
            train_dataset=unread,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)
        # TRL corrects the mismatch of engine and trainer only with its own engine (`use_vllm`).
        # The flag has no other effect in the methods that are not replaced here.
        self.use_vllm = self.vllm_importance_sampling_correction = corrected
        self._rollouts_of = rollouts_of
        self._pad_id = int(tokenizer.pad_token_id)
        self._own_groups = own_groups
        # TRL's losses are means over this rank's groups, but DAPO's, which counts all tokens.
        self._weight = 1.0 if spec.loss_type == "dapo" else own_groups / spec.batch_size
        self._loss = 0.0  # the sum over this rank's groups of the step
        self._group_size = spec.rollouts_per_prompt
        self._packed = packed
        self._keep_tokens = keep_tokens
        if not packed:
            check_trl_head(model.get_base_model(), self.temperature)
        # One dict per group of the step; TRL clears it on resume.
        self._buffered_inputs: Any = None
        # The current group's inputs, which TRL's signature of the forward pass lacks.
        self._inputs: dict[str, Any] = {}
        self._pack: Pack | None = None  # the one computed now; None for all at once

    # -- rollouts ----------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Micro-batch `_step % own_groups` of this rank's rollouts of the step: one group of G."""
        micro = self._step % self._own_groups
        if micro == 0 or self._buffered_inputs is None:
            rollouts = self._rollouts_of(self.state.global_step + 1)
            groups = groups_of(rollouts, self._group_size)
            buffered: list[dict[str, Any]] = [self._tensors(group) for group in groups]
            with torch.no_grad():
                self._passes.finish()  # those of the reference
            trained = torch.stack([inputs["tool_mask"].sum() for inputs in buffered]).sum()
            trained = self._ranks.sum(trained)
            for inputs in buffered:
                inputs["num_items_in_batch"] = trained
            self._buffered_inputs = buffered
        return self._buffered_inputs[micro]

    def _tensors(self, group: Sequence[Rollout]) -> dict[str, Any]:
        """TRL's inputs of one group: its longest prompt has P tokens, its longest completion C. A
        rollout is one row, also if it is a tree: so advantage and loss mean are the rollout's.
        """
        padding = self._pad_id
        device = self.accelerator.device
        nothing: tuple[list[int], list[int], list[float]] = [padding], [0], [0.0]
        transcripts = [rollout.transcript for rollout in group]
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

        advantages_G = group_advantages(group, scale=self.scale_rewards == "group")
        inputs: dict[str, Any] = {
            "prompt_ids": padded(prompts, padding, "left"),  # (G, P)
            "prompt_mask": padded(ones(prompts), side="left"),  # (G, P)
            "completion_ids": padded(completions, padding),  # (G, C)
            "completion_mask": padded(ones(completions)),  # (G, C)
            "tool_mask": padded(masks),  # (G, C) 1 on the model's own tokens
            "sampling_per_token_logps": padded(logprobs),  # (G, C)
            "advantages": advantages_G.to(device),  # (G,)
            "forks": [t.forks if t and t.mask else [] for t in transcripts],
        }
        if self.beta:
            inputs["ref_per_token_logps"] = self._reference_logps(inputs)
        return inputs

    def _reference_logps(self, inputs: dict[str, Tensor]) -> Tensor:
        """(G, C) log-probabilities under the policy that the run started from: TRL keeps its
        adapter as "ref".
        """
        self._inputs = inputs
        model = cast(Any, self).model
        ids_GT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen_GT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        completion = inputs["completion_ids"].size(1)
        with torch.no_grad(), use_adapter(self._unwrapped(model), "ref"):
            return self._get_per_token_logps_and_entropies(model, ids_GT, seen_GT, completion)[0]

    def _unwrapped(self, model: Any) -> Any:
        return cast(Any, self.accelerator).unwrap_model(model)

    # -- backward ----------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """TRL's. After this rank's last group of the step, gradients and metrics are those of all
        ranks.
        """
        trl = cast(Any, super())
        loss: Tensor = trl.training_step(model, inputs, num_items_in_batch)
        if self._ranks.count == 1:
            return loss
        self._loss += loss.item()
        if self._step % self._own_groups:
            return torch.zeros_like(loss)  # transformers adds up what this method returns
        self._passes.finish()
        own_loss = self._loss
        self._loss = 0.0
        return combine(self, self._ranks, own_loss, weight=self._weight)

    # -- forward -----------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # Without advantage and KL a group's gradient is zero.
        if not self.beta and not inputs["advantages"].any():
            return no_loss(model)
        self._inputs = inputs
        if not self._packed:
            return cast(Any, super())._compute_loss(model, inputs)
        return self._loss_by_pack(model, inputs)

    def _loss_by_pack(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of a group after the backward pass of every pack but the last: only one pack's
        activations are alive.

        TRL computes the group's loss once for each pack, in which that pack's log-probabilities
        have a gradient. The gradients add up to the whole one, since no row's loss depends on
        another row. The last time all values are known, so only its metrics count.
        """
        existing: Any = cast(Any, self)._metrics
        metrics = existing["train"]
        *earlier, last = self._packs(inputs)
        mask_GC = inputs["tool_mask"]
        inputs["known_logps"] = inputs["sampling_per_token_logps"] * mask_GC
        inputs["known_entropies"] = torch.zeros_like(inputs["known_logps"])
        try:
            for self._pack in earlier:
                existing["train"] = defaultdict(list)
                loss = cast(Any, super())._compute_loss(model, inputs)
                cast(Any, self.accelerator).backward(loss)
            existing["train"] = metrics
            self._pack = last
            return cast(Any, super())._compute_loss(model, inputs)
        finally:
            existing["train"] = metrics
            self._pack = None

    def _packs(self, inputs: dict[str, Any]) -> list[Pack]:
        ids_GT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen_GT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask_GC = inputs["tool_mask"]
        return packs_of(ids_GT, seen_GT, mask_GC, self._keep_tokens, inputs["forks"])

    def _get_per_token_logps_and_entropies(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: Any,
        input_ids: Tensor,  # (G, T)
        attention_mask: Tensor,  # (G, T)
        logits_to_keep: int,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's (logps, entropies, aux_loss), each (G, C), zero on tokens that are not trained."""
        inputs = self._inputs
        causal_lm = self._unwrapped(model).get_base_model()
        if self._packed:
            with self.accelerator.autocast():
                if self._pack is None:
                    logps_GC, entropies_GC = group_logps(
                        causal_lm,
                        input_ids,
                        attention_mask,
                        inputs["tool_mask"],
                        self.temperature,
                        inputs["forks"],
                    )
                else:
                    logps_GC, entropies_GC = self._pack_logps(causal_lm, self._pack)
            outputs = logps_GC, entropies_GC, None
        else:
            recompute(causal_lm, input_ids.numel() > self._keep_tokens)
            theirs = cast(Any, super())._get_per_token_logps_and_entropies
            if any(inputs["forks"]):
                outputs = self._logps_by_path(theirs, model, input_ids, attention_mask, **others)
            else:
                outputs = theirs(model, input_ids, attention_mask, logits_to_keep, **others)
        if torch.is_grad_enabled() and self.use_vllm:
            # The step is on-policy, so these log-probabilities are also the old ones. TRL would
            # compute them in another pass.
            trainer_GC = outputs[0].detach()
            inputs["importance_sampling_ratio"] = self._importance_ratio(trainer_GC, inputs)
        return outputs

    def _logps_by_path(
        self, theirs: Any, model: Any, ids_GT: Tensor, seen_GT: Tensor, **others: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's outputs of a group with trees, from `theirs`, TRL's method, of each path."""
        inputs = self._inputs
        mask_GC = inputs["tool_mask"]
        packs = packs_of_paths(ids_GT, seen_GT, mask_GC, inputs["forks"], range(len(ids_GT)))

        def padded(rows: list[Tensor], value: int, side: str) -> Tensor:
            return pad(rows, padding_value=value, padding_side=side)

        prompts = [pack.prompt for pack in packs]
        completions = [pack.completions[0] for pack in packs]
        ids = padded(prompts, self._pad_id, "left"), padded(completions, self._pad_id, "right")
        seen = (
            padded([torch.ones_like(row) for row in prompts], 0, "left"),
            padded([torch.ones_like(row) for row in completions], 0, "right"),
        )
        width = ids[1].size(1)
        values, entropies, aux = theirs(
            model, torch.cat(ids, 1), torch.cat(seen, 1), width, **others
        )
        logps_GC = mask_GC.new_zeros(mask_GC.shape, dtype=torch.float32)
        entropies_GC = torch.zeros_like(logps_GC)
        for row, pack in enumerate(packs):
            logps_GC = pack.put(logps_GC, values[row, pack.trained[0]].float())
            if entropies is not None:
                entropies_GC = pack.put(entropies_GC, entropies[row, pack.trained[0]].float())
        return logps_GC, None if entropies is None else entropies_GC, aux

    def _pack_logps(self, causal_lm: Any, pack: Pack) -> tuple[Tensor, Tensor]:
        """(logps, entropies), each (G, C): a pack's own with a gradient, and those that are known.

        Until a row's pack is computed, the engine's log-probabilities stand for it."""
        inputs = self._inputs
        values_N, entropies_N = pack.logps(
            causal_lm, self.temperature, keep_tokens=self._keep_tokens
        )
        logps_GC = pack.put(inputs["known_logps"], values_N)
        inputs["known_logps"] = logps_GC.detach()
        inputs["known_entropies"] = pack.put(inputs["known_entropies"], entropies_N)
        return logps_GC, inputs["known_entropies"]

    def _importance_ratio(self, logps_GC: Tensor, inputs: dict[str, Any]) -> Tensor:
        """exp(trainer - engine), (G, C) or (G, 1), truncated or masked as the mode says.

        As TRL computes it in `_generate_and_score_completions`; tests/worker/test_grpo.py compares
        the two."""
        mask_GC = inputs["tool_mask"]
        difference_GC = (logps_GC - inputs["sampling_per_token_logps"]) * mask_GC
        sequence = self.vllm_importance_sampling_mode.startswith("sequence")
        ratio = torch.exp(difference_GC.sum(-1, keepdim=True) if sequence else difference_GC)
        low: float | None = self.vllm_importance_sampling_clip_min
        high: float = self.vllm_importance_sampling_clip_max or math.inf
        if self.vllm_importance_sampling_mode.endswith("truncate"):
            clipped = torch.clamp(ratio, min=low, max=high)
        else:
            outside = (ratio < (low or 0.0)) | (ratio > high)
            clipped = ratio.masked_fill(outside, 0.0)

        def share(values: Tensor, weights: Tensor) -> float:
            """The mean of `values` over `weights`."""
            return ((values * weights).sum() / weights.sum().clamp(min=1)).item()

        counted = torch.ones_like(ratio) if sequence else mask_GC
        # KL(engine | trainer) on what the engine sampled, by the estimator k3:
        # http://joschu.net/blog/kl-approx.html
        kl_GC = difference_GC.exp() - 1 - difference_GC
        metrics: dict[str, list[float]] = cast(Any, self)._metrics["train"]
        metrics["sampling_logp_difference/mean"].append(share(difference_GC.abs(), mask_GC))
        metrics["is_ratio/mean"].append(share(clipped, counted))
        metrics["is_ratio/clipped_share"].append(share(ratio != clipped, counted))
        metrics["sampling_kl"].append(share(kl_GC, mask_GC))
        return clipped


def _arguments(
    spec: RunSpec, model: PeftModel, output_dir: str, max_completion: int, own_groups: int
) -> Any:
    group_size = spec.rollouts_per_prompt
    mode = spec.importance_sampling
    return cast(Any, GRPOConfig)(
        **trainer_arguments(spec, model, output_dir),
        max_steps=spec.steps,
        # A micro-batch is one group, which shares a prompt: its activations bound the memory.
        per_device_train_batch_size=group_size,
        gradient_accumulation_steps=own_groups,
        steps_per_generation=own_groups,
        num_generations=group_size,
        max_completion_length=max_completion,
        disable_dropout=True,
        beta=spec.kl_penalty_coef,
        temperature=spec.temperature,
        loss_type=spec.loss_type,
        scale_rewards="group" if scales_advantages(spec) else "none",
        vllm_importance_sampling_mode="token_truncate" if mode == "none" else mode,
        vllm_importance_sampling_clip_max=spec.importance_sampling_clip,
    )


def groups_of(rollouts: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    """The rollouts of each group, of so many that are next to each other."""
    return [rollouts[at : at + size] for at in range(0, len(rollouts), size)]


def scales_advantages(spec: RunSpec) -> bool:
    """Whether the run's loss divides advantages by their group's deviation: Dr. GRPO does not."""
    return spec.loss_type != "dr_grpo"


def group_advantages(group: Sequence[Rollout], *, scale: bool) -> Tensor:
    """(G,) reward minus the group's mean, divided by its standard deviation if `scale`.

    A rollout that the environment failed says nothing about the policy: it has advantage 0 and does
    not count in the mean."""
    rewards = [math.nan if rollout.error else rollout.reward for rollout in group]
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    valid = rewards_G[~rewards_G.isnan()]
    # The mean of equal numbers is rounded, so compare the numbers.
    if valid.numel() == 0 or valid.min() == valid.max():
        return torch.zeros_like(rewards_G)
    advantages_G = rewards_G - valid.mean()
    if scale:
        advantages_G = advantages_G / (valid.std() + 1e-4)
    return advantages_G.nan_to_num(0.0)


def _rewards_come_with_rollouts(**_: Any) -> list[float | None]:
    raise AssertionError("TRL asked for a reward, but rollouts are scored by their environment")
