"""The inference engine: vLLM in this process, stepped by its owner.

Every private vLLM name that the worker touches is here or in lora_cpu.py;
tests/worker/test_engine.py is their contract test."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor

from worker.adapter import merged_weights, named_as, save_adapter
from worker.capacity import KV_BLOCK_TOKENS, engine_cache_bytes
from worker.engine.text_models import (
    CPU_LORA_WORKER,
    UTILIZATION,
    back_cache_when_used_on_cpu,
    prepare_text_model,
    room_for_rank,
)
from worker.model_files import ModelFiles
from worker.process import CARDS, close_listening, listening, quick_imports
from worker.rollouts.turns import Completion, Sampling

if TYPE_CHECKING:
    from peft import PeftModel
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine
import re
from dataclasses import dataclass, field

from peft import PeftModel

from worker.process import PortClosing

# How much probability a grammar leaves to each token of an answer, noted where vLLM applies it
#
# vLLM applies grammars in functions that know no engine, in the process of the model runner: this
# one, or those of an engine on several cards, each of which has all logits and records the same.


@dataclass
class Shares:
    """Of a request with a grammar: the log-probability that the model gave to the allowed tokens,
    by the place of the token in the answer.

    A token that vLLM drops, when a policy comes in mid turn, is sampled again at its place. Tensors
    are kept, because on a GPU the step is still being computed."""

    temperature: float
    prompt_tokens: int
    logs: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def of(self, tokens: int) -> list[float] | None:
        """Of an answer of so many tokens; None if one is unknown."""
        if not tokens or not set(range(tokens)) <= self.logs.keys():
            return None
        logs = [self.logs[place] for place in range(tokens)]
        return cast(Any, torch.stack(logs).clamp(max=0.0)).tolist()


SHARES: dict[str, Shares] = {}
"""By request."""


class SharesRecording(PortClosing):
    """Mixed into vLLM's worker class as its `worker_extension_cls`."""

    def record_shares(self) -> None:
        record_shares()

    def expect_shares(self, request_id: str, temperature: float, prompt_tokens: int) -> None:
        SHARES[request_id] = Shares(temperature, prompt_tokens)

    def take_shares(self, request_id: str, tokens: int) -> list[float] | None:
        """Those of an answer of so many tokens, which are then forgotten."""
        shares = SHARES.pop(request_id, None)
        return shares and shares.of(tokens)


def record_shares() -> None:
    """Begin to record. A CPU uses the first of vLLM's model runners, a GPU the second."""
    from vllm.v1.worker import gpu_model_runner as first  # noqa: PLC0415
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker  # noqa: PLC0415

    second = cast(Any, StructuredOutputsWorker)
    if getattr(second.apply_grammar_bitmask, "records_shares", False):
        return
    apply_first = cast(Any, first).apply_grammar_bitmask
    apply_second = second.apply_grammar_bitmask

    def recording_first(scheduled: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        """Without drafts each request has one row, in the batch's order."""
        rows = {request_id: row for row, request_id in enumerate(batch.req_ids)}
        ends: dict[str, int] = {}
        for request_id, row in rows.items():
            scheduled_tokens = scheduled.num_scheduled_tokens[request_id]
            ends[request_id] = int(batch.num_computed_tokens_cpu[row]) + scheduled_tokens
        with _recorded(logits, grammar.structured_output_request_ids, rows, ends):
            apply_first(scheduled, grammar, batch, logits)

    def recording_second(
        worker: Any, logits: Tensor, batch: Any, request_ids: list[str], bitmask: Any
    ) -> None:
        rows = dict(zip(batch.req_ids, batch.cu_num_logits_np.tolist(), strict=False))
        after_step = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        ends = dict(zip(batch.req_ids, after_step.tolist(), strict=True))
        with _recorded(logits, request_ids, rows, ends):
            apply_second(worker, logits, batch, request_ids, bitmask)

    cast(Any, recording_second).records_shares = True
    cast(Any, first).apply_grammar_bitmask = recording_first
    second.apply_grammar_bitmask = recording_second


@contextmanager
def _recorded(
    logits: Tensor, request_ids: Sequence[str], rows: dict[str, int], ends: dict[str, int]
) -> Generator[None]:
    """While the grammars are applied to `logits`. `ends` are the tokens that each request has after
    the step, without the one that is sampled."""
    # A request may have ended while its last step was under way.
    names = [name for name in request_ids if own_id(name) in SHARES and name in rows]
    if not names:
        yield
        return
    held = [SHARES[own_id(name)] for name in names]
    index = [rows[name] for name in names]
    temperatures = [shares.temperature or 1.0 for shares in held]
    before = _log_sums(logits, index, temperatures)
    yield
    logs = _log_sums(logits, index, temperatures) - before
    for name, shares, log in zip(names, held, logs.unbind(), strict=True):
        shares.logs[ends[name] - shares.prompt_tokens] = log


def own_id(request_id: str) -> str:
    """The number of a request, to which vLLM adds a random ending."""
    return request_id.partition("-")[0]


def _log_sums(logits: Tensor, rows: list[int], temperatures: list[float]) -> Tensor:
    scale = torch.tensor(temperatures).to(logits.device, non_blocking=True)
    return torch.logsumexp(logits[rows].float() / scale[:, None], dim=-1)


Sync = Literal["merged", "adapter"]
WAYS: tuple[Sync, ...] = get_args(Sync)
SYNC_VARIABLE = "FLASH_SYNC"
NO_EXPERTS = re.compile(
    r"(AuxOutput Connector|--enable-return-routed-experts|Routed-experts|No supported MoE)[^.\n\[]*"
)
"""What vLLM says where it cannot return the experts of tokens."""
SEQUENCES_ON_CPU = 128
"""An engine on a CPU advances at least so many at once. A token of 128 takes 0.6 times as long as
one of 32 (a model of 135M in fp32 on two cores)."""
PRELOAD = "LD_PRELOAD"
IN_PROCESSES = {
    "distributed_executor_backend": "mp",
    "worker_extension_cls": f"{SharesRecording.__module__}.{SharesRecording.__name__}",
}


class VllmEngine:
    """RolloutEngine over vLLM's LLMEngine, on the CPU or the GPU.

    `sync` is how `load_policy` transfers the policy. "merged" writes W + scale·BA
    over the weights: decoding is as fast as with the base model. "adapter" transfers only the
    adapter, of rank at most `lora_rank`: a sync is cheap whatever the model's size.

    With several `cards`, as CUDA_VISIBLE_DEVICES names them, each holds a part of every layer and
    computes it in a process of its own (tensor parallelism). Such an engine takes adapters only.

    On a GPU the engine's weights and its bounded cache stay on the card during training. The
    engine never sleeps, so it cannot wake with stale weights."""

    def __init__(
        self,
        base: ModelFiles,
        *,
        max_length: int,
        max_num_seqs: int,
        seed: int = 0,
        lora_rank: int | None = None,
        sync: Sync = "merged",
        dtype: str = "bfloat16",
        cards: Sequence[str] = ("",),
        returns_experts: bool = False,
    ) -> None:
        on_gpu = torch.cuda.is_available()
        self._sync = sync
        by_adapter = sync == "adapter"
        with quick_imports():
            # Imported here: vLLM reads the environment when it is imported.
            from vllm import EngineArgs  # noqa: PLC0415
            from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        prepare_text_model(base.config)
        self._base = base
        _rank_no_tokens()
        if not on_gpu:
            _sample_by_inversion_on_cpu()
            _pack_experts_at_each_load_on_cpu()
            back_cache_when_used_on_cpu()
        arguments = engine_arguments(
            base,
            max_length=max_length,
            max_num_seqs=max_num_seqs,
            seed=seed,
            lora_rank=(lora_rank or 8) if by_adapter else None,
            dtype=dtype,
            on_gpu=on_gpu,
            shards=len(cards),
        )
        others = listening()
        self.experts_trouble = ""
        """Why it does not return experts, if it was asked to."""
        self._engine: LLMEngine
        with _variables(cards):
            if returns_experts:
                returning = EngineArgs(**arguments, enable_return_routed_experts=True)
                try:
                    self._engine = LLMEngine.from_engine_args(returning)
                except ValueError as error:
                    reason = NO_EXPERTS.search(str(error))
                    if reason is None:
                        raise
                    self.experts_trouble = reason[0]
            self.returns_experts = returns_experts and not self.experts_trouble
            if not self.returns_experts:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        close_listening(keep=others)
        self.processes: list[Any] = []
        """Those of the cards, if there are several."""
        if len(cards) > 1:
            engine = cast(Any, self._engine)
            executor = engine.engine_core.engine_core.model_executor
            self.processes = [worker.proc for worker in executor.workers]
            if not on_gpu:  # NCCL may still connect
                self._on_cards("close_listening_ports")
        self._on_cards("record_shares")
        self._has_grammar: set[str] = set()
        self._adapter: LoRARequest | None = None
        self._is_merged = False
        """Whether a policy was merged into the weights: the base model is gone."""
        self._versions = itertools.count(1)
        self.policy_number = 0
        """Of the policy that samples, as its owner counts them."""
        self._sampled: dict[str, dict[int, int]] = {}
        """Of turns that began under an earlier policy: {its number: tokens that it sampled}"""
        self._ended: list[tuple[str, Completion]] = []
        """Turns that ended while a policy came in."""

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
        from vllm.sampling_params import StructuredOutputsParams as Structure  # noqa: PLC0415

        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            seed=sampling.seed,
            logprobs=0,
            detokenize=bool(sampling.stop),  # vLLM's text is read only to find stop strings
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if sampling.is_base and self._is_merged:
            what = "the adapter is merged into the weights of the base model"
            raise ValueError(f"{what}; {SYNC_VARIABLE}=adapter keeps them apart")
        if grammar := sampling.grammar:
            params.structured_outputs = Structure(
                json=grammar.json_schema, structural_tag=grammar.structural_tag
            )
            self._on_cards("expect_shares", request_id, sampling.temperature, len(prompt_ids))
            self._has_grammar.add(request_id)
        try:
            self._engine.add_request(
                request_id,
                {"prompt_token_ids": list(prompt_ids)},
                params,
                lora_request=None if sampling.is_base else self._adapter,
            )
        except Exception as error:
            if sampling.grammar is None:
                raise
            self._shares(request_id, 0)
            raise ValueError(f"vLLM refuses the grammar: {error}") from error

    def step(self) -> list[tuple[str, Completion]]:
        outputs: list[Any] = self._engine.step()
        done = [output for output in outputs if output.finished]
        ended = self._ended
        self._ended = []
        return ended + [(output.request_id, self._completion(output)) for output in done]

    def _completion(self, output: Any) -> Completion:
        sampled = self._sampled.pop(output.request_id, {})
        completion = _completion(output.outputs[0])
        experts = output.outputs[0].routed_experts
        if self.returns_experts and experts is not None:
            signed = "int8" if self._base.experts <= 128 else "int16"  # -1 is an unknown one
            completion = replace(completion, experts=experts.astype(signed))
        if output.request_id in self._has_grammar:
            allowed = self._shares(output.request_id, len(completion.token_ids))
            completion = replace(completion, allowed=allowed, has_grammar=True)
        rest = len(completion.token_ids) - sum(sampled.values())
        return replace(completion, policies={**sampled, self.policy_number: rest})

    def _shares(self, request_id: str, tokens: int) -> list[float] | None:
        self._has_grammar.remove(request_id)
        return self._on_cards("take_shares", request_id, tokens)

    def _on_cards(self, method: str, *args: Any) -> Any:
        """What this method of SharesRecording returns, on the first card."""
        if not self.processes:
            return getattr(SharesRecording(), method)(*args)
        return cast(Any, self._engine).collective_rpc(method, args=args)[0]

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))
        for request_id in request_ids:
            self._sampled.pop(request_id, None)
            if request_id in self._has_grammar:
                self._shares(request_id, 0)

    def unfinished(self) -> int:
        return len(self._ended) + self._engine.get_num_unfinished_requests()

    def load_policy(self, policy: PeftModel, number: int = 0, *, mid_turn: bool = False) -> None:
        """Sample from `policy`, which has this number, from now on.

        Raises RuntimeError while a request is under way, unless `mid_turn`: the request then goes
        on under the new policy, which computes its tokens' keys and values anew. Their
        log-probabilities stay those of the policy that sampled them."""
        from vllm.v1.core.sched.interface import PauseState  # noqa: PLC0415

        if not mid_turn:
            self._check_idle()
        engine = cast(Any, self._engine)
        core = engine.engine_core.engine_core
        # If vLLM returns experts, it resets the cache of running requests only while it is paused.
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            self._ended = self.step()  # which returns those that ended before, too
        if self._sync == "adapter":
            with tempfile.TemporaryDirectory() as folder:
                save_adapter(policy, Path(folder))
                self._put_adapter(Path(folder))
        else:
            weights = {"weights_iterator": merged_weights(policy, self._base.prefix)}
            engine.collective_rpc("reload_weights", kwargs=weights)
            self._is_merged = True
        self._forget_prefixes()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        for request_id, request in core.scheduler.requests.items():
            sampled = self._sampled.setdefault(own_id(request_id), {})
            before = sum(sampled.values())
            sampled[self.policy_number] = request.num_output_tokens - before
        self.policy_number = number

    def load_adapter(self, folder: Path) -> None:
        """Sample from the base model with the adapter in `folder` from now on; `sync` must be
        "adapter".

        Raises RuntimeError while a request is under way.
        """
        self._check_idle()
        self._put_adapter(folder)
        self._forget_prefixes()

    def _put_adapter(self, folder: Path) -> None:
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        # The prefix cache tells adapters apart by name and path, not by content: each gets a new
        # name.
        request = LoRARequest(f"policy-{next(self._versions)}", 1, str(folder))
        with tempfile.TemporaryDirectory() as scratch:
            named = str(named_as(self._base, folder, Path(scratch)))
            # On a turn's own request, load_inplace would read the adapter again at every step.
            self._engine.add_lora(LoRARequest(request.lora_name, 1, named, load_inplace=True))
        self._adapter = request

    def unload_adapter(self) -> None:
        """Sample from the base model from now on."""
        self._check_idle()
        self._forget_prefixes()
        self._adapter = None

    def share_base(self, policy: PeftModel) -> int:
        """Let the policy have no copy of the base weights that this engine holds too, if it takes
        adapters; the bytes that this frees."""
        if self._sync != "adapter" or self.processes:
            return 0
        return cast(Any, self._engine).apply_model(functools.partial(share_base, policy=policy))[0]

    def close(self) -> None:
        """End the processes of an engine on several cards."""
        if self.processes:
            cast(Any, self._engine).engine_core.shutdown()

    def _check_idle(self) -> None:
        if count := self.unfinished():
            raise RuntimeError(f"{count} requests are under way: their policy cannot change")

    def _forget_prefixes(self) -> None:
        """Requests under way are prefilled again."""
        if not self._engine.reset_prefix_cache(reset_running_requests=self.unfinished() > 0):
            raise RuntimeError("vLLM kept cache entries of the policy before")


def engine_arguments(
    base: ModelFiles,
    *,
    max_length: int,
    max_num_seqs: int,
    seed: int,
    lora_rank: int | None,
    dtype: str,
    on_gpu: bool,
    shards: int = 1,
) -> dict[str, Any]:
    """Arguments of vllm.EngineArgs. With a `lora_rank`, the engine takes adapters. `shards` cards
    share its layers."""
    common: dict[str, Any] = {
        "model": str(base.path),
        "dtype": dtype,
        "max_model_len": max_length,
        "max_num_seqs": max_num_seqs,
        "seed": seed,
        # Without chunks, as on a CPU, vLLM caches no prefix of layers with a state.
        "enable_prefix_caching": on_gpu or not base.has_state,
        "kv_cache_memory_bytes": engine_cache_bytes(
            base, max_length, max_num_seqs, itemsize=getattr(torch, dtype).itemsize, shards=shards
        ),
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "enable_lora": lora_rank is not None,
        "max_lora_rank": room_for_rank(lora_rank or 8),
    }
    if base.has_tower:
        common["language_model_only"] = True
    if shards > 1:
        common |= {"tensor_parallel_size": shards, **IN_PROCESSES}
    if on_gpu:
        return common | _for_gpu(max_num_seqs)
    return common | {
        "enforce_eager": True,
        # Conversations seldom reach their full length, for which the cache is made: an evaluation
        # of short ones advances more of them at once. If the cache is full, the last ones wait.
        "max_num_seqs": max(max_num_seqs, SEQUENCES_ON_CPU),
        # On the CPU vLLM rewinds the generator of a seeded request whose prompt is cut in chunks,
        # and CPU generators cannot (`CPU Generator does not use offset`).
        "enable_chunked_prefill": False,
        "worker_cls": CPU_LORA_WORKER if lora_rank is not None else "auto",
        # The prefix cache holds whole blocks: with vLLM's 128, no shorter chat prompt is found.
        "block_size": KV_BLOCK_TOKENS if shards > 1 else block_tokens_on_cpu(base, dtype),
        "gpu_memory_utilization": 1.0,
    }


def block_tokens_on_cpu(base: ModelFiles, dtype: str) -> int:
    """Tokens of a block of the cache: 16 where vLLM has the same kind of kernel for 16 and 32, as
    on x86 but for AMX in bf16. The prefix cache holds whole blocks, so a second turn computes the
    rest of the last one again: with 32, a tenth of the engine's time for three turns in bf16.

    vLLM 0.31 has the kernel for 16, and does not list it."""
    from vllm.v1.attention.backend import MultipleOf  # noqa: PLC0415
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415

    isa_of = cast(Any, cpu_attn)._get_attn_isa
    kernels = [isa_of(getattr(torch, dtype), tokens) for tokens in (16, KV_BLOCK_TOKENS)]
    if kernels != ["vec16", "vec"] or base.has_state:
        return KV_BLOCK_TOKENS
    backend = cast(Any, cpu_attn).CPUAttentionBackend
    backend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [MultipleOf(16)])
    return 16


def _for_gpu(max_num_seqs: int) -> dict[str, Any]:
    return {
        "enable_chunked_prefill": True,
        # A group's first prompt should be cached after one step: until then its siblings
        # compute it again.
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": UTILIZATION,
        # Seconds of the start, for kernels that neither seeded requests nor processed
        # log-probabilities use.
        "enable_flashinfer_autotune": False,
        "compilation_config": {
            # A decoding step has a token for each sequence. Other steps prefill, where a graph
            # gains little.
            "max_cudagraph_capture_size": max_num_seqs,
            # With the first runner one set of graphs, with the adapter's kernels, also for the base
            # model. The second captures both sets in any case.
            "cudagraph_specialize_lora": False,
        },
    }


@contextmanager
def _variables(cards: Sequence[str]) -> Generator[None]:
    """Variables for the processes that the engine starts. It may use these cards; what this process
    sees was decided when CUDA started. vLLM sets LD_PRELOAD by itself. Later processes need
    neither, and the dynamic linker splits a path that has a space."""
    own = {PRELOAD: os.environ.get(PRELOAD, "")}
    if len(cards) > 1:
        own[CARDS] = os.environ[CARDS]
        os.environ[CARDS] = ",".join(filter(None, cards))
    try:
        yield
    finally:
        os.environ |= own


def _completion(output: Any) -> Completion:
    """`output` is a vllm.CompletionOutput."""
    token_ids = list[int](output.token_ids)
    logprobs: list[float] = [
        at[token].logprob for token, at in zip(token_ids, output.logprobs, strict=True)
    ]
    return Completion(
        token_ids,
        logprobs,
        "length" if output.finish_reason == "length" else "stop",
        stopped_by=output.stop_reason if isinstance(output.stop_reason, str) else None,
    )


def _rank_no_tokens() -> None:
    """Leave out each sampled token's rank in its distribution, which nothing here reads.

    vLLM compiles a kernel for it in every process, at the first token."""
    from vllm.v1.sample import sampler  # noqa: PLC0415

    # N sequences, V vocabulary
    def no_ranks(logprobs_NV: Tensor, _values_N1: Tensor) -> Tensor:
        return torch.zeros(len(logprobs_NV), dtype=torch.int64, device=logprobs_NV.device)

    cast(Any, sampler).batched_count_greater_than = no_ranks


def _sample_by_inversion_on_cpu() -> None:
    """Draw one uniform number per seeded sequence instead of one exponential per vocabulary entry.

    vLLM's own way costs 1.2 ms a sequence and token at a vocabulary of 49,152: more than the model
    itself at 32 sequences of a 135M model."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler  # noqa: PLC0415

    # N sequences, V vocabulary
    def forward_cpu(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        kept_NV = sampler.apply_top_k_top_p(logits, k, p)  # of logits (N, V)
        logprobs_NV = kept_NV.log_softmax(dim=-1, dtype=torch.float32)
        uniform_N1 = torch.rand(len(logprobs_NV), 1)
        for row, generator in generators.items():
            uniform_N1[row, 0] = torch.rand((), generator=generator)
        cumulated_NV = logprobs_NV.exp().cumsum(-1)
        draw_N1 = uniform_N1 * cumulated_NV[:, -1:]
        # The first entry above the draw. Entries that top-k or top-p removed add nothing to the
        # sum, so they are never drawn.
        tokens_N = torch.searchsorted(cumulated_NV, draw_N1, right=True).squeeze(-1)
        return tokens_N.clamp(max=logprobs_NV.size(-1) - 1), logprobs_NV

    sampler.TopKTopPSampler.forward_cpu = forward_cpu


def _pack_experts_at_each_load_on_cpu() -> None:
    """Bring the experts' weights into the form of the CPU's kernel whenever they are loaded.

    vLLM 0.31 does so at the first load alone: what is loaded later would be read as packed."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts  # noqa: PLC0415

    method = cast(Any, experts).UnquantizedFusedMoEMethod
    own = method._setup_kernel
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def set_up(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        is_packed_by_vllm = self.moe_kernel is None
        own(self, layer, w13, w2)
        if not is_packed_by_vllm:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = set_up


# -- one copy of the base weights for engine and trainer, where both hold the same numbers ---------
# An engine that takes adapters never changes its base weights, and the trainer freezes them. The
# engine keeps some layers of a model in one matrix, such as qkv_proj: the trainer's q_proj is then
# some of its rows.

WRAPPED = re.compile(r"\b(base_layer|base_model\.model)\.")
"""What adapters add to the names of weights, in PEFT and in vLLM."""


def share_base(engine_model: Any, policy: PeftModel) -> int:
    """Let the policy's frozen weights be the engine's where they are equal, number by number; the
    bytes that this frees."""
    held = {_name(name): weight.data for name, weight in engine_model.named_parameters()}
    fused: dict[str, list[str]] = getattr(engine_model, "packed_modules_mapping", {})
    own = {
        _name(name): weight
        for name, weight in policy.named_parameters()
        if not weight.requires_grad
    }
    freed = 0
    for name, weight in own.items():
        start, matrix = _place(name, own, held, fused)
        # vLLM pads a vocabulary at its end.
        rows = None if matrix is None else matrix[start : start + len(weight)]
        if rows is None or rows.is_inference() or rows.layout != weight.layout:
            continue
        is_alike = rows.dtype == weight.dtype and rows.device == weight.device
        if is_alike and torch.equal(rows, weight.data):
            freed += weight.nbytes
            weight.data = rows
    return freed


def _name(name: str) -> str:
    """From the decoder on, which wrappers of engine and trainer have at different places."""
    return WRAPPED.sub("", name).rpartition("model.")[2]


def _place(
    name: str, own: dict[str, Any], held: dict[str, Tensor], fused: dict[str, list[str]]
) -> tuple[int, Tensor | None]:
    """The first row and the engine's matrix of the trainer's weight."""
    if name in held:
        return 0, held[name]
    for whole, parts in fused.items():
        for number, part in enumerate(parts):
            siblings = [name.replace(f".{part}.", f".{before}.") for before in parts[:number]]
            matrix = held.get(name.replace(f".{part}.", f".{whole}."))
            if f".{part}." in name and matrix is not None and own.keys() >= {*siblings}:
                return sum(len(own[sibling]) for sibling in siblings), matrix
    return 0, None
