"""RolloutEngine: where tokens come from. vLLM in process, stepped by whoever owns it.

Every private vLLM name that the worker touches is here or in worker/lora_cpu.py;
tests/worker/test_engine.py is their contract test."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from worker.rollouts.turns import Completion, Sampling
from worker.training.memory import KV_BLOCK_TOKENS, engine_cache_bytes

if TYPE_CHECKING:
    from peft import PeftModel
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

Sync = Literal["merged", "adapter"]
CPU_LORA_WORKER = "worker.engine.lora_cpu.LoraWorker"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for; an adapter of a rank in between uses the next larger one."""


class VllmEngine:
    """RolloutEngine over vLLM's LLMEngine, on the CPU or the GPU.

    `sync` is how `load_policy` brings the policy in. "merged" writes W + scale·BA over the weights:
    decoding costs what the base model costs, the CPU's default. "adapter" hands over the adapter
    alone, of at most `lora_rank`: a sync costs next to nothing whatever the model's size, the GPU's
    default.

    On a GPU the engine keeps its share of the card, weights and a bounded cache, beside the
    trainer. Nothing has to sleep or wake, so nothing wakes with stale weights."""

    def __init__(
        self,
        model_path: Path,
        *,
        max_length: int,
        max_num_seqs: int,
        seed: int = 0,
        lora_rank: int | None = None,
        sync: Sync | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        on_gpu = torch.cuda.is_available()
        numbers: torch.dtype = getattr(torch, dtype)
        self._sync = sync or (default_sync(numbers) if lora_rank else "merged")
        by_adapter = self._sync == "adapter"
        if not on_gpu:
            _sample_by_inversion_on_cpu()
        from vllm import EngineArgs  # noqa: PLC0415  heavy, and it reads the environment when it is imported
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self._engine: LLMEngine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_path),
                dtype=dtype,  # pyright: ignore[reportArgumentType]
                max_model_len=max_length,
                max_num_seqs=max_num_seqs,
                seed=seed,
                enforce_eager=not on_gpu,
                enable_prefix_caching=True,
                # The prefix cache holds whole blocks: at vLLM's 128 no chat prompt shorter than
                # that is ever found.
                block_size=None if on_gpu else KV_BLOCK_TOKENS,
                kv_cache_memory_bytes=engine_cache_bytes(
                    model_path, max_length, max_num_seqs, itemsize=numbers.itemsize
                ),
                # A seeded request whose prompt is cut in chunks fails on the CPU: vLLM rewinds its
                # generator, and CPU generators cannot (`CPU Generator does not use offset`).
                enable_chunked_prefill=on_gpu,
                # A group's first prompt shall be in the cache after one step: siblings recompute
                # what is not.
                max_num_batched_tokens=8192 if on_gpu else None,
                disable_log_stats=True,
                logprobs_mode="processed_logprobs",
                gpu_memory_utilization=free_share() if on_gpu else 1.0,
                enable_lora=by_adapter,
                max_lora_rank=room_for_rank(lora_rank or 8),  # pyright: ignore[reportArgumentType]
                worker_cls=CPU_LORA_WORKER if by_adapter and not on_gpu else "auto",
            )
        )
        self._adapter: LoRARequest | None = None
        self._versions = itertools.count(1)

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            seed=sampling.seed,
            logprobs=0,
            detokenize=bool(sampling.stop),  # else nobody reads vLLM's text
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(
            request_id, {"prompt_token_ids": list(prompt_ids)}, params, lora_request=self._adapter
        )

    def step(self) -> list[tuple[str, Completion]]:
        outputs: list[Any] = self._engine.step()
        return [
            (output.request_id, _completion(output.outputs[0]))
            for output in outputs
            if output.finished
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def unfinished(self) -> int:
        """Requests that the engine still holds."""
        return self._engine.get_num_unfinished_requests()

    def load_policy(self, policy: PeftModel) -> None:
        """Sample from `policy` from now on. Raises RuntimeError while a request is under way."""
        from worker.training.policy import merged_weights, save_adapter  # noqa: PLC0415

        if self._sync == "adapter":
            with tempfile.TemporaryDirectory(prefix="flash-policy-") as folder:
                save_adapter(policy, Path(folder))
                self.load_adapter(Path(folder))
            return
        self._check_idle()
        self._engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": merged_weights(policy)}
        )
        self._forget_prefixes()

    def load_adapter(self, folder: Path) -> None:
        """Sample from the base model with the adapter in `folder` from now on; only where `sync` is
        "adapter".

        Raises RuntimeError while a request is under way.
        """
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        self._check_idle()
        # The prefix cache tells adapters apart by name and path, not by what is in them: each has
        # its own.
        request = LoRARequest(f"policy-{next(self._versions)}", 1, str(folder))
        # On the requests of turns load_inplace would read the adapter again at every step.
        self._engine.add_lora(LoRARequest(request.lora_name, 1, str(folder), load_inplace=True))
        self._forget_prefixes()
        self._adapter = request

    def _check_idle(self) -> None:
        if self.unfinished():
            raise RuntimeError(
                f"{self.unfinished()} requests are under way: their policy cannot change"
            )

    def _forget_prefixes(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept cache entries of the policy before")


def _completion(output) -> Completion:
    token_ids = list(output.token_ids)
    logprobs = [at[token].logprob for token, at in zip(token_ids, output.logprobs, strict=True)]
    return Completion(token_ids, logprobs, "length" if output.finish_reason == "length" else "stop")


def _sample_by_inversion_on_cpu() -> None:
    """Draw one uniform number per seeded sequence instead of one exponential per vocabulary entry.

    vLLM's own way costs 1.2 ms a sequence and token at a vocabulary of 49,152: more than the model
    itself at 32 sequences of a 135M model."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p  # noqa: PLC0415

    def forward_cpu(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        logprobs = apply_top_k_top_p(logits, k, p).log_softmax(
            dim=-1, dtype=torch.float32
        )  # (N, V)
        uniform = torch.rand(len(logprobs), 1)
        for row, generator in generators.items():
            uniform[row, 0] = torch.rand((), generator=generator)
        cumulated = logprobs.exp().cumsum(-1)
        # The first entry above the draw: entries that top-k or top-p removed add nothing and are
        # never it.
        tokens = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True).squeeze(-1)
        return tokens.clamp(max=logprobs.size(-1) - 1), logprobs

    TopKTopPSampler.forward_cpu = forward_cpu


def room_for_rank(rank: int) -> int:
    """The smallest of LORA_RANKS that holds `rank`."""
    return next((room for room in LORA_RANKS if room >= rank), rank)


def default_sync(dtype: torch.dtype) -> Sync:
    """vLLM's kernels for adapters on a GPU take half precision alone."""
    return "adapter" if torch.cuda.is_available() and dtype != torch.float32 else "merged"


def free_share() -> float:
    """What is free on the card now, as a part of all of it: vLLM refuses to start where less is."""
    gc.collect()
    torch.cuda.empty_cache()  # what a trainer gave back, PyTorch holds
    free, total = torch.cuda.mem_get_info()
    return 0.95 * free / total
