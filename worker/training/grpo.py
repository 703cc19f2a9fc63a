"""GRPO: TRL's trainer, with our rollouts in front of it and our forward pass inside it.

TRL keeps the losses, the importance-sampling modes, the optimizer loop, logging and resume.
Replaced are

    _prepare_inputs                        rollouts and advantages, a group a micro-batch
    _get_per_token_logps_and_entropies     packed: a group's prompt once, no padding, head on trained tokens alone
    _compute_loss                          skips groups without advantage; the importance ratio needs no extra pass

Left out of the paper's GRPO: the clipped old policy, since each batch is used for one step (ratio
1), and by default the KL term and the division by the group's standard deviation (Dr. GRPO,
https://arxiv.org/abs/2503.20783)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad, use_adapter

from worker.rollouts.scheduler import Rollout
from worker.settings import Settings
from worker.training.checkpoints import trainer_arguments
from worker.training.packing import check_trl_head, group_logps, recompute

RolloutsOf = Callable[[int], list[Rollout]]
"""Step, from 1 -> its rollouts P*G, those of a group next to each other."""


class Trainer(GRPOTrainer):
    """GRPOTrainer that is handed finished rollouts by `rollouts_of`; `packed` as
    worker.training.packing.can_pack says.

    Activations of a group that takes more than `keep_tokens` tokens to compute are recomputed in
    the backward pass."""

    def __init__(
        self,
        model: PeftModel,
        tokenizer: Any,
        spec: Settings,
        *,
        rollouts_of: RolloutsOf,
        output_dir: str,
        max_completion: int,
        callbacks: list[TrainerCallback],
        packed: bool,
        keep_tokens: float = math.inf,
    ) -> None:
        corrected = spec.importance_sampling != "none"
        args: Any = GRPOConfig(
            **trainer_arguments(spec, model, output_dir),
            max_steps=spec.steps,
            # A micro-batch is one group: its rollouts share a prompt, and its activations bound the
            # memory.
            per_device_train_batch_size=spec.group_size,
            gradient_accumulation_steps=spec.batch_size,
            steps_per_generation=spec.batch_size,
            num_generations=spec.group_size,
            max_completion_length=max_completion,
            disable_dropout=True,
            beta=spec.kl_penalty_coef,
            temperature=spec.temperature,
            loss_type=spec.loss_type,
            scale_rewards="group" if scales_advantages(spec) else "none",
            vllm_importance_sampling_mode=spec.importance_sampling
            if corrected
            else "token_truncate",
            vllm_importance_sampling_clip_max=spec.importance_sampling_clip,
        )
        super().__init__(
            model=model,
            reward_funcs=_rewards_come_with_rollouts,
            args=args,
            # Rows that nobody reads, an epoch a step: an attempt that resumes has then no epoch to
            # go on in.
            train_dataset=Dataset.from_list([{"prompt": ""}] * spec.batch_size),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)
        # TRL corrects the mismatch of engine and trainer only with an engine of its own
        # (`use_vllm`). The flag decides nothing else in the methods that are not replaced here.
        self.use_vllm = self.vllm_importance_sampling_correction = corrected
        self._rollouts_of, self._pad_id = rollouts_of, int(tokenizer.pad_token_id)
        self._batch_size, self._group_size = int(spec.batch_size), int(spec.group_size)
        self._packed, self._keep_tokens = packed, keep_tokens
        if not packed:
            check_trl_head(model.get_base_model(), self.temperature)
        # Of the group under way: more than TRL's signature of the forward pass has room for. The
        # forward pass leaves importance_sampling_ratio there for TRL's loss.
        self._inputs: dict[str, Any] = {}

    # -- rollouts ----------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Micro-batch `_step % P` of this step's rollouts: one group of G."""
        micro = self._step % self._batch_size
        if micro == 0 or self._buffered_inputs is None:
            size = self._group_size
            rollouts = self._rollouts_of(self.state.global_step + 1)
            groups = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
            self._buffered_inputs = [self._tensors(group) for group in groups]
            trained = torch.stack(
                [inputs["tool_mask"].sum() for inputs in self._buffered_inputs]
            ).sum()
            for inputs in self._buffered_inputs:
                inputs["num_items_in_batch"] = trained
        return self._buffered_inputs[micro]

    def _tensors(self, group: Sequence[Rollout]) -> dict[str, Tensor]:
        """TRL's inputs of one group: its longest prompt has P tokens, its longest completion C."""
        padding, device = self._pad_id, self.accelerator.device
        nothing: tuple[list[int], list[int], list[float]] = [padding], [0], [0.0]
        transcripts = [rollout.transcript for rollout in group]
        prompts = [t.prompt_ids if t else [padding] for t in transcripts]
        completions, masks, logprobs = zip(
            *(
                (t.completion_ids, t.mask, t.logprobs) if t and t.mask else nothing
                for t in transcripts
            ),
            strict=True,
        )

        def padded(rows: Sequence[list[Any]], value: int = 0, side: str = "right") -> Tensor:
            return pad(
                [torch.tensor(row) for row in rows], padding_value=value, padding_side=side
            ).to(device)

        def ones(rows: Sequence[list[int]]) -> list[list[int]]:
            return [[1] * len(row) for row in rows]

        inputs = {
            "prompt_ids": padded(prompts, padding, "left"),  # (G, P)
            "prompt_mask": padded(ones(prompts), side="left"),  # (G, P)
            "completion_ids": padded(completions, padding),  # (G, C)
            "completion_mask": padded(ones(completions)),  # (G, C)
            "tool_mask": padded(masks),  # (G, C) 1 on the model's own tokens
            "sampling_per_token_logps": padded(logprobs),  # (G, C)
            "advantages": group_advantages(group, scale=self.scale_rewards == "group").to(
                device
            ),  # (G,)
        }
        if self.beta:
            inputs["ref_per_token_logps"] = self._reference_logps(inputs)
        return inputs

    def _reference_logps(self, inputs: dict[str, Tensor]) -> Tensor:
        """(G, C) log-probabilities under the policy that the run started from: TRL keeps its
        adapter as "ref".
        """
        self._inputs = inputs
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad(), use_adapter(self.accelerator.unwrap_model(self.model), "ref"):
            return self._get_per_token_logps_and_entropies(
                self.model, ids, seen, inputs["completion_ids"].size(1)
            )[0]

    # -- forward -----------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # Without advantage and KL a group's gradient is zero: 0 keeps the graph that the optimizer
        # loop expects.
        if not self.beta and not inputs["advantages"].any():
            trained = [
                p.sum() for p in model.parameters() if p.requires_grad
            ]  # all of them: Adam's momentum goes on
            return torch.stack(trained).sum() * 0.0
        self._inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's (logps, entropies, aux_loss), each (G, C), zero on tokens that are not trained."""
        inputs = self._inputs
        causal_lm = self.accelerator.unwrap_model(model).get_base_model()
        if self._packed:
            with self.accelerator.autocast():
                logps, entropies = group_logps(
                    causal_lm, input_ids, attention_mask, inputs["tool_mask"], self.temperature,
                    keep_tokens=self._keep_tokens,
                )  # fmt: skip
            outputs = logps, entropies, None
        else:
            recompute(causal_lm, input_ids.numel() > self._keep_tokens)
            outputs = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **others
            )
        if torch.is_grad_enabled() and self.use_vllm:
            # The step is on-policy, so these log-probabilities are also the old ones: TRL would
            # spend a pass on them.
            inputs["importance_sampling_ratio"] = self._importance_ratio(
                outputs[0].detach(), inputs
            )
        return outputs

    def _importance_ratio(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """exp(trainer - engine), (G, C) or (G, 1), truncated or masked as the mode says.

        As TRL computes it in `_generate_and_score_completions`; tests/worker/test_grpo.py compares the
        two."""
        mask = inputs["tool_mask"]
        difference = (logps - inputs["sampling_per_token_logps"]) * mask
        sequence = self.vllm_importance_sampling_mode.startswith("sequence")
        ratio = torch.exp(difference.sum(-1, keepdim=True) if sequence else difference)
        low: float | None = self.vllm_importance_sampling_clip_min
        high: float = self.vllm_importance_sampling_clip_max or math.inf
        if self.vllm_importance_sampling_mode.endswith("truncate"):
            clipped = torch.clamp(ratio, min=low, max=high)
        else:
            outside = (ratio < (low or 0.0)) | (ratio > high)
            clipped = ratio.masked_fill(outside, 0.0)
        trained = mask.sum().clamp(min=1)
        metrics = self._metrics["train"]
        metrics["sampling_logp_difference/mean"].append((difference.abs().sum() / trained).item())
        counted = torch.ones_like(ratio) if sequence else mask
        for name, values in (("mean", clipped), ("clipped_share", ratio != clipped)):
            metrics[f"is_ratio/{name}"].append(
                ((values * counted).sum() / counted.sum().clamp(min=1)).item()
            )
        # KL(engine | trainer) on what the engine sampled, by the estimator k3:
        # http://joschu.net/blog/kl-approx.html
        metrics["sampling_kl"].append(
            (((difference.exp() - 1 - difference) * mask).sum() / trained).item()
        )
        return clipped


def scales_advantages(spec: Settings) -> bool:
    """Whether the run's loss divides advantages by their group's deviation: Dr. GRPO does not."""
    return spec.loss_type != "dr_grpo"


def group_advantages(group: Sequence[Rollout], *, scale: bool) -> Tensor:
    """(G,) reward minus the group's mean, divided by its standard deviation if `scale`.

    A rollout that the environment failed says nothing of the policy: it has advantage 0 and is left
    out of the mean."""
    rewards = torch.tensor(
        [math.nan if rollout.error else rollout.reward for rollout in group], dtype=torch.float32
    )
    valid = ~rewards.isnan()
    if rewards[valid].unique().numel() < 2:  # not by the mean: that of equal numbers is rounded
        return torch.zeros_like(rewards)
    advantages = rewards - rewards[valid].mean()
    if scale:
        advantages = advantages / (rewards[valid].std() + 1e-4)
    return advantages.nan_to_num(0.0)


def _rewards_come_with_rollouts(**_: Any) -> list[float | None]:
    raise AssertionError("TRL asked for a reward, but rollouts are scored by their environment")
