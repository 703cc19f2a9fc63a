"""vLLM as the rollout engine: the real one, on the tiny model in this process."""

import asyncio
import copy
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import psutil
import pytest
import torch
import xgrammar
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from environments.agents.calls import CallOptions
from flash_mcp.protocol import device_locks
from flash_mcp.protocol.base_models import with_tools
from tests.model_rows import make_model
from tests.tiny import CHATML, change_adapter
from tests.virtual import FakeHost
from worker.adapter import save_adapter
from worker.capacity import kv_cache_bytes
from worker.engine import vllm
from worker.engine.text_models import LORA_RANKS, UTILIZATION, room_for_rank
from worker.engine.vllm import Sync, VllmEngine
from worker.model_files import ModelFiles
from worker.rollouts import transcript
from worker.rollouts.scheduler import Finished, Generator, PlayedRollout, RolloutTask, TalkLimits, collect
from worker.rollouts.transcript import ChatTemplate, trained
from worker.rollouts.turns import Completion, Grammar, Sampling
from worker.training import packing
from worker.training.policy import load_policy

RANK = 12  # not one of vLLM's
PROMPT = [33 + (index * index) % 90 for index in range(300)]  # longer than two blocks of the CPU's prefix cache
BF16_NATS = 0.2
"""Engine and trainer round at different places: at most 0.074 in 4,600 tokens; to the policy before at least 1.5."""


Core = Literal["synchronous", "asynchronous"]
Engines = dict[tuple[Path, Sync, Core], VllmEngine]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Those that the tests have started. All live until the last test: the end of one breaks the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not torch.cuda.is_available():  # for an asynchronous core
            patch.setattr(torch.cuda, "Event", NoStream)
            patch.setattr(torch.cuda, "Stream", NoStream)
            patch.setattr(torch.cuda, "current_stream", NoStream)
            patch.setattr(torch.cuda, "stream", nullcontext)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield {}
        torch.set_num_threads(threads)


def engine_of(
    engines: Engines, model: Path, sync: Sync, dtype: str = "bfloat16", core: Core = "synchronous"
) -> VllmEngine:
    key = model, sync, core
    if key not in engines:
        with asynchronous_core() if core == "asynchronous" else nullcontext():
            engines[key] = VllmEngine(
                ModelFiles(model), max_length=512, max_num_seqs=16, lora_rank=RANK, sync=sync, dtype=dtype
            )
    return engines[key]


@contextmanager
def asynchronous_core() -> Iterator[None]:
    """An engine that starts here schedules an iteration before it knows the tokens of the one
    before, as vLLM does on a GPU and not on a CPU."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    check = CpuPlatform.check_and_update_config

    def check_and_allow(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_allow))
        yield


class NoStream:
    """A stream or an event of CUDA where everything runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = record = synchronize = __init__


@pytest.fixture
def merged(engines: Engines, tiny_model: Path) -> VllmEngine:
    return engine_of(engines, tiny_model, "merged")


@pytest.fixture
def by_adapter(engines: Engines, tiny_model: Path) -> VllmEngine:
    return engine_of(engines, tiny_model, "adapter")


@pytest.fixture(params=["merged", "adapter", "asynchronous"])
def engine(request: pytest.FixtureRequest, engines: Engines, tiny_model: Path) -> VllmEngine:
    if request.param == "asynchronous":
        return engine_of(engines, tiny_model, "adapter", core="asynchronous")
    return engine_of(engines, tiny_model, request.param)


@pytest.fixture(scope="module")
def fp32_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp32")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases and a tied head, in fp32."""
    folder = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(weight, mean=1.0, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    return load_policy(ModelFiles(tiny_model), rank=RANK, alpha=24, seed=0, dtype=torch.bfloat16)


def train(policy: Any, step: int) -> None:
    """Another adapter, as a step of training would leave one."""
    change_adapter(policy, 0.1, seed=step, part="lora_")


def generate(engine: VllmEngine, *requests: tuple[list[int], Sampling]) -> list[Completion]:
    for number, (prompt, sampling) in enumerate(requests):
        engine.submit(str(number), prompt, sampling)
    done: dict[str, Completion] = {}
    while engine.unfinished():
        done.update(engine.step())
    return [done[str(number)] for number in range(len(requests))]


def trainers_logprobs(policy: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    ids = torch.tensor([prompt + completion])
    is_trained = torch.ones(1, len(completion), dtype=torch.long)
    with torch.no_grad(), torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.dtype == torch.bfloat16):
        return packing.group_logps(policy.get_base_model(), ids, torch.ones_like(ids), is_trained, temperature)[0][0]


def difference(policy: Any, completion: Completion) -> float:
    """The largest between the engine's and the trainer's log-probabilities of an answer to PROMPT."""
    expected = trainers_logprobs(policy, PROMPT, completion.token_ids)
    return (torch.tensor(completion.logprobs) - expected).abs().max().item()


def test_after_every_sync_the_engine_samples_with_the_trainers_log_probabilities(engine: VllmEngine, policy: Any):
    for step in range(1, 5):
        before = copy.deepcopy(policy)
        train(policy, step)
        engine.load_policy(policy)
        # The same prompt each time: an entry that the cache kept from the policy before would show.
        for completion in generate(engine, *((PROMPT, Sampling(24, seed=seed)) for seed in range(4))):
            assert len(completion.token_ids) == len(completion.logprobs) > 0
            assert difference(policy, completion) < BF16_NATS
            assert len(completion.token_ids) < 8 or difference(before, completion) > 4 * BF16_NATS


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_in_fp32_log_probabilities_equal_the_trainers_and_company_changes_no_token(engines, fp32_model, sync: Sync):
    policy = load_policy(ModelFiles(fp32_model), rank=RANK, alpha=24, seed=0, dtype=torch.float32)
    train(policy, 1)
    engine = engine_of(engines, fp32_model, sync, "float32")
    engine.load_policy(policy)
    turns = [(PROMPT[number:], Sampling(16, seed=number)) for number in range(12)]
    alone = [generate(engine, turn)[0] for turn in turns]
    together = generate(engine, *turns)
    assert difference(policy, together[0]) < 1e-4
    # bf16 promises no such thing: see Sampling.
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's cache has room for all that it advances at once")
def test_more_conversations_than_the_cache_holds_go_on_in_turn_and_say_what_each_says_alone(
    engines: Engines, fp32_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(engines, fp32_model, "merged", "float32")
    scheduler = cast(Any, engine._engine).engine_core.engine_core.scheduler
    preempted: list[str] = []
    own = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        own(request, *args, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    requests = [(PROMPT[start : start + 60], Sampling(280, seed=start)) for start in range(40)]
    together = generate(engine, *requests)
    assert preempted and sum(len(prompt) + 280 for prompt, _ in requests) > 16 * 512
    for number in {0, 20, int(preempted[0].split("-")[0]), int(preempted[-1].split("-")[0])}:
        assert generate(engine, requests[number])[0].token_ids == together[number].token_ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's cache")
def test_the_cache_takes_memory_as_its_blocks_are_written(engines: Engines, tiny_model: Path, monkeypatch):
    monkeypatch.setattr(vllm, "engine_cache_bytes", lambda *_, **__: 2**30)
    before = psutil.Process().memory_info().rss
    engine = VllmEngine(ModelFiles(tiny_model), max_length=512, max_num_seqs=16)
    engines[tiny_model / "large cache", "merged", "synchronous"] = engine
    assert generate(engine, (PROMPT, Sampling(8)))[0].token_ids
    assert psutil.Process().memory_info().rss - before < 2**29


def test_biases_norms_and_a_tied_head_are_the_engines_own_after_every_sync(engines: Engines, tied_model: Path) -> None:
    policy = load_policy(ModelFiles(tied_model), rank=RANK, alpha=24, seed=0, dtype=torch.float32)
    engine = engine_of(engines, tied_model, "merged", "float32")
    for step in range(3):
        train(policy, step)
        engine.load_policy(policy)
        assert difference(policy, generate(engine, (PROMPT, Sampling(16, seed=step)))[0]) < 1e-4


def test_the_prefix_cache_would_serve_the_old_policy_if_nobody_reset_it(merged: VllmEngine, policy: Any, monkeypatch):
    """The danger is real: what the other tests show absent is there as soon as the reset is left out."""
    train(policy, 1)
    merged.load_policy(policy)
    request = (PROMPT, Sampling(4, temperature=0.0))
    generate(merged, request)
    train(policy, 2)
    with monkeypatch.context() as patch:
        patch.setattr(merged._engine, "reset_prefix_cache", lambda **_: True)
        merged.load_policy(policy)
    assert difference(policy, generate(merged, request)[0]) > 4 * BF16_NATS
    merged.load_policy(policy)
    assert difference(policy, generate(merged, request)[0]) < BF16_NATS


def test_a_second_turn_computes_at_most_one_block_of_the_first_again(merged: VllmEngine, policy: Any, monkeypatch):
    found: list[int] = []
    step = merged._engine.step

    def watched() -> Any:
        outputs = step()
        found.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(merged._engine, "step", watched)
    merged.load_policy(policy)
    turn = Sampling(4, temperature=0.0)
    first = generate(merged, (PROMPT[:251], turn))[0].token_ids
    generate(merged, (PROMPT[:251] + first + PROMPT[:9], turn))
    tokens = merged._engine.vllm_config.cache_config.block_size
    assert torch.cuda.is_available() or tokens == (32 if torch.cpu._is_amx_tile_supported() else 16)  # in bf16
    assert found == [0, (251 + len(first) - 1) // tokens * tokens]  # the last token's key is not there


def test_an_adapters_name_keeps_the_cache_apart_even_without_a_reset(by_adapter: VllmEngine, policy: Any, monkeypatch):
    monkeypatch.setattr(by_adapter._engine, "reset_prefix_cache", lambda **_: True)
    for step in (1, 2):
        train(policy, step)
        by_adapter.load_policy(policy)
        assert difference(policy, generate(by_adapter, (PROMPT, Sampling(4, temperature=0.0)))[0]) < BF16_NATS


def test_an_adapter_in_a_folder_is_sampled_from_as_the_policy_that_wrote_it(by_adapter: VllmEngine, policy, tmp_path):
    request = PROMPT, Sampling(8, temperature=0.0)
    train(policy, 1)
    save_adapter(policy, tmp_path)
    by_adapter.load_policy(policy)
    expected = generate(by_adapter, request)
    train(policy, 2)
    by_adapter.load_policy(policy)
    assert generate(by_adapter, request) != expected
    by_adapter.load_adapter(tmp_path)
    assert generate(by_adapter, request) == expected


def test_the_base_model_answers_beside_the_policy_and_stays_as_it_was(by_adapter: VllmEngine, policy: Any) -> None:
    """In one batch, whatever was cached of the same prompt."""
    sampling = Sampling(8, temperature=0.0)
    both = (PROMPT, sampling), (PROMPT, replace(sampling, is_base=True))
    answers: list[tuple[Completion, Completion]] = []
    for step in (1, 2):
        train(policy, step)
        by_adapter.load_policy(policy)
        trained, base = generate(by_adapter, *both)
        assert difference(policy, trained) < BF16_NATS < difference(policy, base)
        with policy.disable_adapter():
            assert difference(policy, base) < BF16_NATS
        answers.append((trained, base))
    (one, base), (other, again) = answers
    assert base.token_ids == again.token_ids and one.token_ids != other.token_ids


def test_engine_and_trainer_hold_the_base_weights_once(engines: Engines, merged: VllmEngine, tied_model, monkeypatch):
    """Neither changes them. A CPU's engine packs what a card's engine keeps as it is."""
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def storages(weights: Iterable[Tensor]) -> set[int]:
        return {weight.untyped_storage().data_ptr() for weight in weights}

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)
    policy: Any = load_policy(ModelFiles(tied_model), rank=RANK, alpha=24, seed=0, dtype=torch.float32)
    engine = engine_of(engines, tied_model, "adapter", "float32")
    train(policy, 1)
    expected = trainers_logprobs(policy, PROMPT, PROMPT)
    frozen = {name: weight for name, weight in policy.named_parameters() if not weight.requires_grad}
    base = {name: weight.clone() for name, weight in frozen.items()}
    assert merged.share_base(policy) == 0
    assert engine.share_base(policy) == sum(weight.nbytes for weight in base.values())
    [kept] = engine._engine.apply_model(lambda model: storages(model.parameters()))
    assert storages(frozen.values()) <= kept and trainers_logprobs(policy, PROMPT, PROMPT).equal(expected)
    policy(input_ids=torch.tensor([PROMPT])).logits.sum().backward()
    for step in (2, 3):
        train(policy, step)
        engine.load_policy(policy)
        assert difference(policy, generate(engine, (PROMPT, Sampling(8, seed=step)))[0]) < 1e-4
    assert all(weight.equal(base[name]) for name, weight in frozen.items())


def test_a_base_model_that_a_policy_was_merged_into_cannot_be_asked(merged: VllmEngine, policy: Any) -> None:
    merged.load_policy(policy)
    with pytest.raises(ValueError, match="FLASH_SYNC=adapter keeps them apart"):
        merged.submit("0", PROMPT, Sampling(8, is_base=True))
    assert merged.unfinished() == 0


def test_200_merged_syncs_leave_the_base_untouched_and_the_engine_as_after_the_first(merged: VllmEngine, policy: Any):
    base = {name: weight.clone() for name, weight in policy.named_parameters() if "lora_" not in name}
    requests = [(PROMPT, Sampling(24, seed=seed)) for seed in range(4)]
    train(policy, 0)
    merged.load_policy(policy)
    first = generate(merged, *requests)
    for step in range(1, 200):
        train(policy, step)
        merged.load_policy(policy)
    assert generate(merged, *requests) != first
    train(policy, 0)
    merged.load_policy(policy)
    assert generate(merged, *requests) == first
    assert all(torch.equal(dict(policy.named_parameters())[name], weight) for name, weight in base.items())


def test_a_policy_does_not_change_under_a_request(engine: VllmEngine, policy: Any) -> None:
    engine.submit("0", PROMPT, Sampling(8))
    with pytest.raises(RuntimeError, match="1 requests are under way"):
        engine.load_policy(policy)
    engine.abort(["0"])
    engine.load_policy(policy)


@pytest.mark.parametrize("core", ["", "asynchronous"])
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_turns_go_on_under_a_policy_that_comes_in_mid_turn_and_each_token_keeps_its_own_log_probability(
    engines: Engines, fp32_model: Path, sync: Sync, core: str
) -> None:
    """The second policy samples given its own keys and values of what the first one wrote."""
    first, second = (
        load_policy(ModelFiles(fp32_model), rank=RANK, alpha=24, seed=0, dtype=torch.float32) for _ in range(2)
    )
    train(first, 1)
    train(second, 2)
    engine = engine_of(engines, fp32_model, sync, "float32", **({"core": core} if core else {}))
    engine.load_policy(first, 1)
    prompts = [PROMPT, PROMPT, *(PROMPT[number:] for number in range(6))]
    for number, prompt in enumerate(prompts):
        engine.submit(str(number), prompt, Sampling(40, seed=number))
    done: dict[str, Completion] = {}
    iterations = 0
    while engine.unfinished():
        if iterations == 15:
            engine.load_policy(second, 2, mid_turn=True)
        done.update(engine.step())
        iterations += 1
    counts = [dict(done[str(number)].policies) for number in range(len(prompts))]
    assert sum(bool(count.get(1) and count.get(2)) for count in counts) >= 4 and not engine._sampled
    for number, count in enumerate(counts):
        prompt, completion = prompts[number], done[str(number)]
        change = count.get(1, 0)
        logprobs = torch.tensor(completion.logprobs)
        of_first, of_second = (trainers_logprobs(policy, prompt, completion.token_ids) for policy in (first, second))
        expected = torch.cat([of_first[:change], of_second[change:]])
        assert len(logprobs) == sum(count.values()) and (logprobs - expected).abs().max() < 5e-6
        assert len(logprobs) < change + 8 or (of_first - logprobs)[change:].abs().max() > 0.1
    (after,) = generate(engine, (prompts[0], Sampling(8, seed=0)))
    assert after.policies == {2: len(after.token_ids)} and difference(second, after) < 5e-6


def test_a_sync_leaves_no_file_behind(by_adapter: VllmEngine, policy: Any, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    by_adapter.load_policy(policy)
    assert generate(by_adapter, (PROMPT, Sampling(4)))[0].token_ids and not list(tmp_path.iterdir())


def test_processes_that_start_after_an_engine_do_not_preload_its_libraries(by_adapter: VllmEngine) -> None:
    assert by_adapter and "site-packages" not in os.environ.get("LD_PRELOAD", "")


def test_vllm_has_room_for_every_rank_that_it_names() -> None:
    from vllm.config.lora import MaxLoRARanks  # noqa: PLC0415

    assert set(LORA_RANKS) <= set(get_args(MaxLoRARanks))
    assert [room_for_rank(rank) for rank in (1, 8, 9, 33, 512)] == [8, 8, 16, 64, 512]


def test_an_abort_leaves_no_request_and_no_cache_block_behind(engine: VllmEngine, policy: Any) -> None:
    for number in range(6):
        engine.submit(str(number), PROMPT, Sampling(100, seed=number, stop=()))
    finished = [request_id for request_id, _ in engine.step()]  # a seed may end one with its first token
    engine.abort(["1", "3", "5", "never submitted"])
    while engine.unfinished():
        finished += [request_id for request_id, _ in engine.step()]
    assert set(finished) >= {"0", "2", "4"} and len(finished) == len(set(finished))
    engine.submit("6", PROMPT, Sampling(100))
    engine.abort(["6"])  # before it was ever scheduled
    assert engine.unfinished() == 0 and engine.step() == []
    assert engine._engine.reset_prefix_cache(), "blocks of an aborted request are still in use"


def test_a_seeded_turn_is_repeated_bit_for_bit_and_another_seed_gives_another(engine: VllmEngine, policy: Any) -> None:
    engine.load_policy(policy)
    requests = [([50 + number] * 9, Sampling(24, seed=number, top_p=0.9)) for number in range(8)]
    first = generate(engine, *requests)
    assert generate(engine, *requests) == first
    others = generate(
        engine, *((prompt, Sampling(24, seed=s.seed + 100)) for prompt, s in requests if s.seed is not None)
    )
    assert all(one.token_ids != other.token_ids for one, other in zip(first, others, strict=True))


def test_a_turn_ends_with_its_stop_string_or_with_its_budget(engine: VllmEngine, policy: Any, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    engine.load_policy(policy)
    free = generate(engine, (PROMPT, Sampling(24, seed=1)))[0]
    stop = tokenizer.decode(free.token_ids[2:4])
    stopped, short = generate(
        engine, (PROMPT, Sampling(24, seed=1, stop=(stop,))), (PROMPT, Sampling(3, seed=1, stop=("\0",)))
    )
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:4], "stop")
    assert (short.token_ids, short.finish_reason) == (free.token_ids[:3], "length")


@pytest.mark.cpu
def test_rollouts_of_an_asynchronous_core_are_those_of_a_synchronous_one(engines: Engines, fp32_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fp32_model)
    tasks = [RolloutTask("train", index, index // 4, index, seed=index) for index in range(12)]

    async def roll(engine: VllmEngine) -> list[PlayedRollout]:
        async def run_step() -> Finished:
            return await asyncio.to_thread(engine.step)

        generator = Generator(engine, run_step=run_step)
        limits = TalkLimits(max_tokens=12, max_length=400)
        return await collect(tasks, FakeHost(), generator, ChatTemplate(tokenizer), limits)

    policy = load_policy(ModelFiles(fp32_model), rank=RANK, alpha=24, seed=0, dtype=torch.float32)
    train(policy, 1)
    told: list[list[list[int]]] = []
    for core in get_args(Core):
        engine = engine_of(engines, fp32_model, "adapter", "float32", core)
        engine.load_policy(policy)
        rollouts = asyncio.run(roll(engine))
        engine.load_policy(policy)  # possible at once
        told.append([each.transcript.ids for each in rollouts if each.transcript])
    asynchronous = engine._engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]
    assert asynchronous.batch_queue_size == 2 and told[0] == told[1] and len(told[0]) == 12


CHI_SQUARE_999 = {11: 31.26, 4: 18.47}
"""Of the distribution's tail, by degrees of freedom: a right sampler exceeds it once in a thousand seeds."""


def draw(logits: Tensor, *, p: float | None = None, seeded: bool) -> tuple[Tensor, Tensor]:
    """(tokens, log-probabilities) that the engine's sampler gives for every row of `logits` (N, V)."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler  # noqa: PLC0415

    from worker.engine.vllm import _sample_by_inversion_on_cpu  # noqa: PLC0415

    _sample_by_inversion_on_cpu()
    rows = range(len(logits)) if seeded else ()
    generators = {row: torch.Generator().manual_seed(row) for row in rows}
    top_p = None if p is None else torch.full((len(logits),), p)
    sampler = TopKTopPSampler(logprobs_mode="processed_logprobs")
    return sampler.forward_cpu(logits.clone(), generators, None, top_p)  # pyright: ignore[reportReturnType]


@pytest.mark.cpu
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_tokens_are_drawn_with_the_probabilities_that_the_logits_and_top_p_give(seeded: bool, top_p: float | None):
    torch.manual_seed(0)
    row = torch.randn(12) * 1.2
    probabilities = row.softmax(0)
    if top_p is not None:  # the smallest set of likeliest tokens that reaches top_p
        order = probabilities.argsort(descending=True)
        kept = order[: int((probabilities[order].cumsum(0) < top_p).sum()) + 1]
        only = torch.zeros(12).index_fill(0, kept, 1.0)
        probabilities = probabilities * only / (probabilities * only).sum()
    tokens, logprobs = draw(row.expand(20_000, 12), p=top_p, seeded=seeded)
    torch.testing.assert_close(logprobs[0].exp(), probabilities)
    counts = torch.bincount(tokens, minlength=12)
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = 20_000 * probabilities[possible]
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert chi_square < CHI_SQUARE_999[int(possible.sum()) - 1]


@pytest.mark.cpu
def test_no_draw_however_near_to_one_gives_a_token_that_top_p_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((64, 49_152), -30.0)
    logits[:, :5] = torch.randn(64, 5)
    monkeypatch.setattr(torch, "rand", lambda *size: torch.full(size, 1 - 2**-24))
    tokens, _ = draw(logits, p=0.9, seeded=False)
    assert int(tokens.max()) < 5


IN, OUTS, VOCABULARY, SLOTS = 24, (16, 8, 8), 40, 3
BATCHES = {  # the adapter of each token, 0 for none
    "one adapter": [7] * 6, "one adapter and none": [7, 7, 0, 0, 7, 0],
    "three adapters and none": [7, 0, 8, 8, 7, 9, 0, 9], "none": [0] * 4,
}  # fmt: skip


def wrappers(tokens: list[int], prompts: list[int]) -> tuple[Any, Any]:
    """(ours, vLLM's) with the adapters 7, 8, 9 in slots 2, 0, 1."""
    from vllm.lora.layers import LoRAMapping  # noqa: PLC0415
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # noqa: PLC0415

    from worker.engine.lora_cpu import GroupedPunicaWrapper  # noqa: PLC0415

    both = GroupedPunicaWrapper(64, 16, "cpu"), PunicaWrapperCPU(64, 16, "cpu")
    for wrapper in both:
        mapping = LoRAMapping(tuple(tokens), tuple(prompts), is_prefill=True)
        wrapper.update_metadata(mapping, [8, 9, 7], SLOTS + 1, VOCABULARY)
    return both


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_with_an_adapter_get_what_vllm_gives_them_and_rows_without_get_nothing(batch: str, dtype: torch.dtype):
    tokens = BATCHES[batch]
    prompts = tokens[::2]
    ours, theirs = wrappers(tokens, prompts)
    torch.manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size).to(dtype) / 4

    a = tuple(random(SLOTS, 1, RANK, IN) for _ in OUTS)
    b = tuple(random(SLOTS, 1, out, RANK) for out in OUTS)
    head_a, head_b, embed_b = (
        random(SLOTS, 1, RANK, IN), random(SLOTS, 1, VOCABULARY + 8, RANK), random(SLOTS, 1, IN, RANK),
    )  # fmt: skip
    x, low, y = random(len(tokens), IN), random(len(tokens), RANK), random(len(tokens), sum(OUTS))
    last, logits, embedded = (random(len(prompts), IN), random(len(prompts), VOCABULARY), random(len(tokens), IN))
    calls = {
        "linear": (y, tokens, lambda w, out: w.add_lora_linear(out, x, a, b, 1.0, OUTS)),
        "logits": (logits, prompts, lambda w, out: w.add_lora_logits(out, last, head_a, head_b, 1.0)),
        "embedding": (embedded, tokens, lambda w, out: w.add_lora_embedding(out, low, embed_b, add_input=True)),
    }
    for name, (before, adapters, call) in calls.items():
        mine, reference = before.clone(), before.clone()
        call(ours, mine)
        call(theirs, reference)
        adapted = torch.tensor(adapters) > 0
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(mine[adapted], reference[adapted], rtol=tolerance, atol=tolerance, msg=name)
        assert torch.equal(mine[~adapted], before[~adapted]), name
        assert not adapted.any() or not torch.equal(mine[adapted], before[adapted]), name


@pytest.mark.cpu
def test_no_adapter_is_gathered_for_a_token(by_adapter: VllmEngine, policy: Any, monkeypatch: pytest.MonkeyPatch):
    from vllm.lora.punica_wrapper import punica_cpu  # noqa: PLC0415

    gathers = [name for name in vars(punica_cpu) if name.startswith(("bgmv_", "sgmv_"))]
    assert len(gathers) == 6
    for name in gathers:
        monkeypatch.setattr(punica_cpu, name, None)
    train(policy, 3)
    by_adapter.load_policy(policy)
    assert difference(policy, generate(by_adapter, (PROMPT, Sampling(8, seed=1)))[0]) < BF16_NATS


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("tokens", "running", "threads"),
    [((1,) * 40, 1, 2), ((15,), 1, 2), ((1, 16), 1, 6), ((99,), 3, 4), ((99,), 5, 2), ((99,), 40, 2), ((99,), 0, 6)],
)
def test_a_prompt_takes_the_idle_cores_and_other_steps_half_of_all(
    tokens: tuple[int, ...], running: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.engine import lora_cpu  # noqa: PLC0415

    load = tmp_path / "loadavg"
    load.write_text(f"0.00 0.00 0.00 {running}/250 18058\n")
    monkeypatch.setattr(lora_cpu, "LOAD", load)
    monkeypatch.setattr(lora_cpu.CPUWorker, "execute_model", lambda self, step: torch.get_num_threads())
    worker = object.__new__(lora_cpu.LoraWorker)
    before = torch.get_num_threads()
    worker._threads = 2
    worker.vllm_config = SimpleNamespace(additional_config={lora_cpu.PROMPT_THREADS: 6})
    step = SimpleNamespace(num_scheduled_tokens=dict(enumerate(tokens)))
    try:
        assert worker.execute_model(step) == threads
    finally:
        cast(Any, torch)._C.set_num_threads(before)


@pytest.mark.cpu
def test_a_server_on_the_cpu_uses_the_same_worker(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.engine import serve  # noqa: PLC0415

    with monkeypatch.context() as patch:
        patch.setattr(serve.os, "environ", {})
        patch.setattr(serve.psutil, "cpu_count", lambda logical: 6)
        patch.setattr(serve.os, "sched_getaffinity", lambda pid: set(range(5)))
        command = serve.server_command(str(tiny_model), tiny_model, 1, RANK)
        assert serve.os.environ["OMP_NUM_THREADS"] == "2"  # from now on as if the user had set it
        assert "--additional-config" not in serve.server_command(str(tiny_model), tiny_model, 1, RANK)
    assert json.loads(command[command.index("--additional-config") + 1]) == {"prompt_threads": 5}
    assert command[command.index("--worker-cls") + 1] == "worker.engine.lora_cpu.LoraWorker"
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert command[command.index("--generation-config") + 1] == "vllm"  # as the engine of training
    assert command[command.index("--tool-call-parser") + 1] == "hermes"
    assert command[command.index("--chat-template") + 1] == with_tools(CHATML)


@pytest.mark.cpu
def test_a_server_of_a_model_that_needs_a_gpu_is_refused_before_it_starts(tmp_path: Path, monkeypatch):
    from worker.engine import serve  # noqa: PLC0415

    monkeypatch.setattr(sys, "argv", ["serve", "--model", str(make_model("lfm2", tmp_path)), "--port", "1"])
    with pytest.raises(SystemExit) as caught:
        serve.main()
    error = json.loads(str(caught.value.code))
    assert error["code"] == "model_unsupported" and "lfm2 does not run without a GPU" in error["what"]


def test_a_server_takes_the_card_with_the_most_free_memory(tiny_model: Path, tmp_path: Path, monkeypatch):
    """Without a card: what CUDA would say is put in its mouth."""
    from worker.engine import serve  # noqa: PLC0415

    free, chosen = [8 * 2**30, 20 * 2**30], []
    with monkeypatch.context() as patch:
        patch.setattr(serve.os, "environ", {"CUDA_VISIBLE_DEVICES": "3,5", "FLASH_DEVICE_LOCKS": str(tmp_path)})
        said = {
            "is_available": lambda: True, "device_count": lambda: 2, "set_device": chosen.append,
            "mem_get_info": lambda card=None: (free[chosen[-1] if card is None else card], 24 * 2**30),
            "memory_reserved": lambda: 0, "empty_cache": lambda: None,
            "get_device_properties": lambda card: SimpleNamespace(uuid=f"card-{card}"),
            "is_bf16_supported": lambda **_: True,
        }  # fmt: skip
        for name, function in said.items():
            patch.setattr(torch.cuda, name, function)
        command = serve.server_command(str(tiny_model), tiny_model, 1, RANK)
        assert serve.os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    assert "--tensor-parallel-size" not in command
    assert command[command.index("--dtype") + 1] == "bfloat16", "also of a model with fp32 files"
    # vLLM starts only where this share of the card is free, whatever size the cache is given.
    assert float(command[command.index("--gpu-memory-utilization") + 1]) == UTILIZATION
    assert "--enforce-eager" not in command and "--worker-cls" not in command
    cache, at_once = (
        int(command[command.index(f"--{name}") + 1]) for name in ("kv-cache-memory-bytes", "max-num-seqs")
    )
    assert 0 < cache <= 5 * 2**30
    one = kv_cache_bytes(ModelFiles(tiny_model), int(command[command.index("--max-model-len") + 1]) // 4, 1, 0)
    assert at_once == min(256, cache // one) > 8, "as many as the cache has room for"


@pytest.mark.parametrize(
    ("model_gib", "cards"), [(10, "c"), (17, "c"), (18, "c,d"), (33, "c,d"), (35, "c,d,a,b"), (80, "c")], ids=str
)
def test_a_server_takes_as_many_cards_as_the_model_needs(model_gib: int, cards: str, tmp_path: Path, monkeypatch):
    """80 GiB do not fit all: vLLM says so. Another state directory has the card e."""
    from worker.engine import serve  # noqa: PLC0415

    free = [18, 16, 21, 20, 24]
    monkeypatch.setenv("FLASH_DEVICE_LOCKS", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e")
    said = {
        "device_count": lambda: 5,
        "set_device": lambda card: None,
        "mem_get_info": lambda card: (free[card] * 2**30, 24 * 2**30),
        "get_device_properties": lambda card: SimpleNamespace(uuid=f"card-{card}"),
    }
    for name, function in said.items():
        monkeypatch.setattr(torch.cuda, name, function)
    held = device_locks.take("GPU-card-4", tmp_path / "other")
    assert held is not None and serve.use_cards(model_gib * 2**30, tmp_path / "home") == cards.count(",") + 1
    assert serve.os.environ["CUDA_VISIBLE_DEVICES"] == cards
    for number, name in enumerate("abcd"):
        assert bool(device_locks.users(f"GPU-card-{number}", tmp_path / "other")) == (name in cards)
    os.close(held)


FORM = {
    "type": "object", "properties": {"word": {"type": "string", "maxLength": 6}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"], "additionalProperties": False,
}  # fmt: skip


grammars = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")


@grammars
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("mid_turn", [False, True])
@pytest.mark.parametrize("core", get_args(Core))
def test_of_answers_under_a_grammar_the_trained_log_probabilities_are_the_trainers(
    engines: Engines, fp32_model: Path, core: Core, mid_turn: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a policy comes in mid turn: an asynchronous core then drops tokens and samples them anew."""
    policies = [load_policy(ModelFiles(fp32_model), rank=RANK, alpha=24, seed=0, dtype=torch.float32) for _ in range(2)]
    for seed, policy in enumerate(policies, 1):
        train(policy, seed)
    engine = engine_of(engines, fp32_model, "adapter", "float32", core)
    engine.load_policy(policies[0], 1)
    tokenizer = AutoTokenizer.from_pretrained(fp32_model)
    word = {"type": "string", "minLength": 3, "maxLength": 9}
    grammar, _ = ChatTemplate(tokenizer).limits_of(CallOptions(json_schema=word))
    held = [Sampling(200, temperature, seed=seed, grammar=grammar) for seed in range(4)]
    for number, sampling in enumerate([*held, Sampling(8, temperature, seed=9)]):
        engine.submit(str(number), PROMPT, sampling)
    done: dict[str, Completion] = {}
    for iteration in itertools.count():
        if mid_turn and iteration == 4:
            engine.load_policy(policies[1], 2, mid_turn=True)
        done.update(engine.step())
        if not engine.unfinished():
            break
    *answers, free = [done[str(number)] for number in range(5)]
    assert trained(free) == ([1] * len(free.token_ids), free.logprobs), "no grammar holds it"
    for answer in answers:
        both = [trainers_logprobs(policy, PROMPT, answer.token_ids, temperature) for policy in policies]
        change = answer.policies[1]
        assert (change < len(answer.token_ids)) == mid_turn
        expected = torch.cat([both[0][:change], both[1][change:]])
        sampled = torch.tensor(answer.logprobs)
        assert answer.finish_reason == "stop" and answer.allowed is not None
        value = json.loads(tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        assert isinstance(value, str) and 3 <= len(value) < 20, "bytes that are no UTF-8 count more"
        assert (sampled - expected).max() > 0.5, "the grammar decided here"
        mask, _ = trained(answer)
        assert sum(mask) < len(mask), "what the grammar decided is not trained"
        with monkeypatch.context() as patch:
            patch.setattr(transcript, "FREE_SHARE", 1e-30)
            _, logprobs = trained(answer)
        assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4


def test_a_token_is_trained_where_the_grammar_left_the_model_free() -> None:
    nearly = math.log(0.995)
    allowed = [0.0, nearly, math.log(0.9), -20.0]
    answer = Completion([5, 6, 7, 8], [-0.5, -1.0, -0.1, 0.0], "stop", allowed=allowed, has_grammar=True)
    assert trained(answer) == ([1, 1, 0, 0], [-0.5, -1.0 + nearly, 0.0, 0.0])
    assert trained(Completion([5, 6], [-0.5, -1.0], "stop", has_grammar=True)) == ([0, 0], [0.0, 0.0])


LIMITS = [{"maxLength": 4}, {"minLength": 2}, {"minLength": 150, "maxLength": 260}, {"maxLength": 0}, {}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_string_under_a_grammar_has_its_length_and_no_raw_control_character(tiny_model: Path, limits: dict[str, int]):
    properties = {"word": {"type": "string", **limits}, "type": {"const": {"type": "string", "maxLength": 1}}}
    schema = {"type": "object", "properties": properties, "required": ["word"], "additionalProperties": False}
    grammar, _ = ChatTemplate(AutoTokenizer.from_pretrained(tiny_model)).limits_of(CallOptions(json_schema=schema))
    assert grammar and grammar.json_schema
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(grammar.json_schema)

    def is_allowed(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(token) for token in [*text.encode(), 256])

    lengths = (0, 1, 2, 4, 5, 149, 150, 260, 261)
    allowed = [n for n in lengths if is_allowed(json.dumps({"word": ("é日x-8a." * 50)[:n]}, ensure_ascii=False))]
    assert allowed == [n for n in lengths if limits.get("minLength", 0) <= n <= limits.get("maxLength", 999)]
    assert not any(is_allowed(f'{{"word": "{code:c}{(allowed[-1] - 1) * "b"}"}}') for code in range(32))


@grammars
def test_a_required_tool_is_called_and_a_bad_schema_is_refused(merged: VllmEngine, policy: Any, tiny_model: Path):
    merged.load_policy(policy)  # whatever earlier tests left in the engine would decide what it says
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    number = {"n": {"type": "integer", "maximum": 99, "minimum": 0}}
    schema = {"type": "object", "properties": number, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "sub")]
    template = ChatTemplate(tokenizer).for_tools(tools)
    prompt = PROMPT[:200]
    named = CallOptions(tool_choice="required", tool_name="sub", parallel_tool_calls=False)
    either = CallOptions(json_schema=FORM)
    turns = []
    for options in (named, either, CallOptions(tool_choice="required", parallel_tool_calls=False)):
        grammar, stop = template.limits_of(options)
        (answer,) = generate(merged, (prompt, Sampling(300, seed=1, grammar=grammar, stop=stop)))
        assert answer.finish_reason == "stop"
        turns.append(template.read(answer.token_ids))
    assert [call["function"]["name"] for call in turns[0].tool_calls] == ["sub"]
    assert turns[1].tool_calls or set(json.loads(turns[1].content)) == {"word", "sure"}
    assert len(turns[2].tool_calls) == 1 and not any(turn.bad_tool_call for turn in turns)
    with pytest.raises(ValueError, match="vLLM refuses the grammar"):
        bad = Grammar(json_schema=json.dumps({"type": "object", "$ref": "#/nowhere"}))
        merged.submit("bad", prompt, Sampling(9, grammar=bad))
    one_call, stop = template.limits_of(CallOptions(parallel_tool_calls=False))
    assert one_call is None and stop == ("</tool_call>",)
