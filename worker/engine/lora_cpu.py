"""LoRA in vLLM's CPU engine: plain matmuls for each adapter, where vLLM copies A and B of its
adapter for every token.

An engine that is started with the worker class `worker.engine.lora_cpu.LoraWorker` uses it; so it
also gets into the engine process of the OpenAI server. Every private vLLM name of the LoRA path is
in this file; tests/worker/test_engine.py is their contract test.

It also corrects a fault of vLLM: in a batch with and without adapters, the index -1 for "none"
picks the last adapter.

Axes: N tokens, I inputs, O outputs, R rank, S slots of adapters, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from worker.engine.text_models import PROMPT_THREADS, back_cache_when_used_on_cpu

PROMPT_TOKENS = 16
"""A step that computes so many of one conversation computes a prompt."""
LOAD = Path("/proc/loadavg")
Groups = Sequence[tuple[int, slice | Tensor]]
"""(slot, rows) of each adapter of a batch."""


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """What vLLM's LoRA layers call. A stacked A is (S, 1, R, I), a stacked B (S, 1, O, R)."""

    _token_groups: Groups = ()
    _sampler_groups: Groups = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Called when another batch begins."""
        cast(Any, super()).update_metadata(*args, **kwargs)
        self._token_groups = _groups(self.token_lora_indices)
        self._sampler_groups = _groups(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,  # (N, sum of output_slices), changed in place
        x: Tensor,  # (N, I)
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        for slot, rows in self._token_groups:
            x_NI = x[rows].to(lora_a_stacked[0].dtype)
            y_NO = y[rows]
            parts = torch.split(y_NO, list(output_slices), 1)
            for a, b, part in zip(lora_a_stacked, lora_b_stacked, parts, strict=True):
                part.add_(linear(linear(x_NI, a[slot, 0]), b[slot, 0]), alpha=scale)
            if isinstance(rows, Tensor):  # then y[rows] was a copy
                y[rows] = y_NO

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        for slot, rows in self._token_groups:
            y[rows] += linear(x[rows], lora_b_stacked[slot, 0]).to(y.dtype)

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        vocabulary = min(y.size(1), lora_b_stacked.size(2))  # either may be padded
        for slot, rows in self._sampler_groups:
            low_NR = linear(x[rows].to(lora_a_stacked.dtype), lora_a_stacked[slot, 0])
            logits_NV = linear(low_NR, lora_b_stacked[slot, 0, :vocabulary])
            y[rows, :vocabulary] += scale * logits_NV.to(y.dtype)


class LoraWorker(CPUWorker):
    """vLLM's CPU worker with the wrapper above. A step that computes a prompt takes up to
    `additional_config[PROMPT_THREADS]` threads, as far as cores have nothing else to do."""

    def load_model(self, **kwargs: Any) -> None:
        # A call of PyTorch's bf16 matmul takes 20 us whatever its size, one of fp32 takes 2.
        # Decoding makes 420 calls for 30 layers.
        cast(Any, self.vllm_config.lora_config).lora_dtype = torch.float32
        wrapper = f"{__name__}.{GroupedPunicaWrapper.__name__}"
        cast(Any, CpuPlatform).get_punica_wrapper = classmethod(lambda cls: wrapper)
        back_cache_when_used_on_cpu()
        super().load_model(**kwargs)
        self._threads = torch.get_num_threads()

    def execute_model(self, scheduler_output: Any) -> Any:
        threads = self._threads
        most: int = cast(Any, self.vllm_config).additional_config.get(PROMPT_THREADS, threads)
        if most > threads:
            tokens = max(scheduler_output.num_scheduled_tokens.values(), default=0)
            # One token of each conversation gains nothing by more threads, and threads that share
            # a core with others wait for each other at every product.
            if tokens >= PROMPT_TOKENS:
                running = int(LOAD.read_text().split()[3].split("/")[0])  # with this thread
                threads = max(threads, min(most, most + 1 - running))
            cast(Any, torch)._C.set_num_threads(threads)  # vLLM replaces torch.set_num_threads
        return super().execute_model(scheduler_output)


def _groups(slots_N: Tensor) -> Groups:
    """The rows of each adapter (-1: none). Adjacent rows are a slice, which needs no copy."""
    groups: list[tuple[int, slice | Tensor]] = []
    used: list[int] = cast(Any, slots_N).unique().tolist()
    for slot in used:
        if slot < 0:
            continue
        rows = (slots_N == slot).nonzero().squeeze(1)
        first = int(rows[0])
        end = int(rows[-1]) + 1
        groups.append((slot, slice(first, end) if end - first == len(rows) else rows))
    return groups
