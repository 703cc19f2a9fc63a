"""Our training step against TRL's own: the same rollouts must give the same gradients."""

import copy
import functools
import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import RunSpec, resolve
from tests.tiny import change_adapter
from worker.model_files import ModelFiles
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.training import packing
from worker.training.checkpoints import Reporter
from worker.training.grpo import SCALED, Trainer, advantages_of, turn_advantages
from worker.training.policy import attention_of, load_policy

GROUPS, SIZE, MAX_COMPLETION = 2, 4, 64


def make_rollouts(tokenizer: Any, seed: int = 0, *, turns: int = 2, groups: int = GROUPS) -> list[PlayedRollout]:
    """`groups` x SIZE multi-turn rollouts of uneven length, with log-probabilities that are a little
    off."""
    rng, template = random.Random(seed), ChatTemplate(tokenizer)
    rollouts = []
    for index in range(groups * SIZE):
        transcript = Transcript(template, [{"role": "user", "content": f"question {index // SIZE}"}])
        for turn in range(rng.randint(1, turns)):
            if turn:
                transcript.add_environment([{"role": "user", "content": "and"}])
            ids = [rng.randrange(33, 126) for _ in range(rng.randint(1, 9))]
            transcript.completion_ids += ids
            transcript.mask += [1] * len(ids)
            transcript.logprobs += [-4.5 + rng.gauss(0, 0.5) for _ in ids]
        task = RolloutTask("train", index // SIZE, index // SIZE, index, seed=index)
        rollouts.append(PlayedRollout(task, f"t{index}", transcript, reward=rng.choice([0.0, 0.3, 1.0])))
    return rollouts


def settings_of(**fields: Any) -> RunSpec:
    base = {"batch_size": GROUPS, "group_size": SIZE, "lora_rank": 8, "lora_alpha": 16, "steps": 1}
    return resolve(RunSpec(environment="e", **{**base, **fields})).spec


def make_policy(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    return change_adapter(load_policy(ModelFiles(model), rank=8, alpha=16, seed=0, dtype=dtype))


def our_gradients(policy, tokenizer, spec, rollouts, out, keep_tokens=math.inf, metrics=None) -> dict[str, Tensor]:
    trainer = Trainer(
        policy, tokenizer, spec, rollouts_of=lambda step: rollouts,
        output_dir=str(out), max_completion=MAX_COMPLETION, callbacks=[],
        way=packing.way_of(policy.get_base_model()), keep_tokens=keep_tokens,
    )  # fmt: skip
    policy.train()
    trainer.accelerator.backward(trainer.compute_loss(policy, trainer._prepare_inputs([])))
    if metrics is not None:
        metrics.update(trainer._metrics["train"])
    return gradients(policy)


def trl_gradients(policy: Any, tokenizer: Any, spec: RunSpec, rollouts: list[PlayedRollout], out: Path):
    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        transcripts = [r.transcript for r in rollouts if r.transcript]
        return {
            "prompt_ids": [t.prompt_ids for t in transcripts],
            "completion_ids": [t.completion_ids for t in transcripts], "logprobs": [t.logprobs for t in transcripts],
            "env_mask": [t.mask for t in transcripts], "reward": [r.reward for r in rollouts],
        }  # fmt: skip

    corrected = spec.importance_sampling != "none"
    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=SIZE, gradient_accumulation_steps=GROUPS, num_generations=SIZE,
        max_completion_length=MAX_COMPLETION, beta=spec.kl_penalty_coef, temperature=spec.temperature,
        loss_type=spec.loss_type, scale_rewards="group" if spec.loss_type in SCALED else "none",
        vllm_importance_sampling_mode=spec.importance_sampling if corrected else "token_truncate",
        vllm_importance_sampling_clip_max=spec.importance_sampling_clip, use_cpu=True, report_to=[],
        bf16=policy.dtype == torch.bfloat16, gradient_checkpointing=False, router_aux_loss_coef=0.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        policy, reward_funcs=lambda reward, **_: reward, args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "q"}] * GROUPS), rollout_func=rollout_func,
    )  # fmt: skip
    # TRL's correction belongs to its own engine; this switches it on for rollouts from elsewhere.
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrected
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = GROUPS
    policy.train()
    batch = trainer._generate_and_score_completions([{"prompt": f"q{i // SIZE}"} for i in range(GROUPS * SIZE)])
    for group in range(GROUPS):
        rows = slice(group * SIZE, (group + 1) * SIZE)
        part = {name: value[rows] if value.dim() else value for name, value in batch.items()}
        trainer._compute_loss(policy, part).backward()
    return gradients(policy)


def gradients(policy: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def both(model: Path, tmp_path: Path, rollouts: list[PlayedRollout], dtype: torch.dtype, **fields: Any):
    tokenizer, spec = AutoTokenizer.from_pretrained(model), settings_of(**fields)
    ours = our_gradients(make_policy(model, dtype), tokenizer, spec, rollouts, tmp_path)
    theirs = trl_gradients(make_policy(model, dtype), tokenizer, spec, copy.deepcopy(rollouts), tmp_path)
    assert ours.keys() == theirs.keys() and ours
    return ours, theirs


CASES = [
    *({"loss_type": loss} for loss in ("dr_grpo", "grpo", "bnpo", "dapo")),
    *({"importance_sampling": mode} for mode in ("token_mask", "sequence_truncate", "sequence_mask", "none")),
    {"kl_penalty_coef": 0.1},
    {"temperature": 0.7, "importance_sampling_clip": 1.1},
]
SOME = CASES[3:6] + CASES[8:9]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_gradients_equal_trls_in_fp32(fp32_model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    rollouts = make_rollouts(AutoTokenizer.from_pretrained(fp32_model))
    ours, theirs = both(fp32_model, tmp_path, rollouts, torch.float32, **fields)
    mine, expected = flat(ours), flat(theirs)
    assert (mine - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("fields", SOME, ids=str)
def test_packs_whose_backward_passes_follow_each_other_give_the_gradients_of_one_pack(
    fp32_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    tokenizer, spec = AutoTokenizer.from_pretrained(fp32_model), settings_of(**fields)
    passes: list[str] = []
    compute = packing.Pack.logps

    def logps(pack: packing.Pack, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        values, entropies = compute(pack, *args, **options)
        if values.requires_grad:
            passes.append("forward")
            values.register_hook(lambda gradient: passes.append("backward"))
        return values, entropies

    def step(pack_tokens: int) -> tuple[Tensor, dict[str, list[float]]]:
        monkeypatch.setattr(packing, "PACK_TOKENS", pack_tokens)
        metrics: dict[str, list[float]] = {}
        found = our_gradients(
            make_policy(fp32_model), tokenizer, spec, make_rollouts(tokenizer), tmp_path,
            metrics=metrics,
        )  # fmt: skip
        return flat(found), metrics

    (whole, expected), (split, metrics) = step(4096), step(16)
    assert (split - whole).norm() < 5e-6 * whole.norm() and metrics.keys() == expected.keys()
    for name, values in metrics.items():
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    monkeypatch.setattr(packing.Pack, "logps", logps)
    step(16)
    assert len(passes) > 4 * GROUPS and passes == ["forward", "backward"] * (len(passes) // 2)


@pytest.mark.parametrize("fields", SOME, ids=str)
def test_gradients_point_where_trls_do_in_bf16(tiny_model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    rollouts = make_rollouts(AutoTokenizer.from_pretrained(tiny_model))
    ours, theirs = both(tiny_model, tmp_path, rollouts, torch.bfloat16, **fields)
    assert torch.nn.functional.cosine_similarity(flat(ours), flat(theirs), dim=0) > 0.999


def test_rollouts_of_a_group_may_have_prompts_of_their_own(fp32_model: Path, tmp_path: Path) -> None:
    rollouts = make_rollouts(AutoTokenizer.from_pretrained(fp32_model))
    for index, rollout in enumerate(rollouts):
        assert rollout.transcript
        rollout.transcript.prompt_ids = rollout.transcript.prompt_ids[index:]
    ours, theirs = both(fp32_model, tmp_path, rollouts, torch.float32)
    assert (flat(ours) - flat(theirs)).norm() < 1e-5 * flat(theirs).norm()


def test_activations_that_are_computed_twice_give_the_same_gradients_bit_for_bit(tiny_model, tmp_path, monkeypatch):
    tokenizer, held, sizes = AutoTokenizer.from_pretrained(tiny_model), [], []
    rollouts = make_rollouts(tokenizer)
    compute = packing.Pack.logps

    def logps(pack: packing.Pack, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        sizes.append(pack.tokens)
        return compute(pack, *args, **options)

    monkeypatch.setattr(packing.Pack, "logps", logps)
    monkeypatch.setattr(packing, "PACK_TOKENS", 128)

    def gradients_of(keep_tokens: float) -> Tensor:
        saved: dict[int, Any] = {}  # alive, so that no address is used twice

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        policy = make_policy(tiny_model, torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = our_gradients(policy, tokenizer, settings_of(), rollouts, tmp_path, keep_tokens)
        assert not policy.get_input_embeddings()._forward_hooks
        held.append(sum(storage.nbytes() for storage in saved.values()))
        return flat(found)

    whole, twice = gradients_of(math.inf), gradients_of(0)
    assert torch.equal(whole, twice) and torch.equal(whole, gradients_of(min(sizes)))
    assert len(set(sizes)) == 2 and held[1] < held[2] < held[0]


@pytest.mark.parametrize(("stop", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_a_trainer_that_resumes_ends_where_one_that_was_not_stopped_ends(fp32_model, tmp_path, stop: int, dtype):
    tokenizer = AutoTokenizer.from_pretrained(fp32_model)

    def attempt(name: str, steps: int, resume: str | None = None) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        if not resume:
            folder.create({})
        writer = RunWriter(folder, folder.newest_epoch() + 1)
        spec = settings_of(steps=steps, save_every=2, kl_penalty_coef=0.1, loss_type="grpo", learning_rate=1e-2)
        Trainer(
            make_policy(fp32_model, dtype), tokenizer, spec,
            rollouts_of=lambda step: make_rollouts(tokenizer, seed=step),
            max_completion=MAX_COMPLETION, way=packing.Way.PACKED, output_dir=str(tmp_path / "out"),
            callbacks=[Reporter(writer, spec, threading.Event())],
        ).train(resume_from_checkpoint=resume)  # fmt: skip
        return folder

    whole, cut = attempt("whole", 4), attempt("cut", stop)
    attempt("cut", 4, cut.checkpoints.verify(stop)["path"])
    kept, expected = (run.checkpoints.manifest(4)["files"]["adapter_model.safetensors"] for run in (cut, whole))
    assert kept == expected and list(cut.metric_steps()) == list(whole.metric_steps()) == [1, 2, 3, 4]
    for step in whole.metric_steps():
        assert cut.metrics(step)["metrics"]["kl"] == whole.metrics(step)["metrics"]["kl"]


BASE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "bos_token_id": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "way"),
    [
        (transformers.FalconConfig(**BASE), "state"),
        (transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4), "packed"),
        (transformers.RecurrentGemmaConfig(**BASE, logits_soft_cap=0.5), "rows"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_computed_the_fastest_way_that_is_exact(config: Any, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config))
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    before = torch.get_rng_state()
    assert packing.way_of(model) == way
    assert torch.equal(torch.get_rng_state(), before), "resumed runs draw what undisturbed ones draw"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_rslora": True}, "use_rslora=True"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern="),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"target_modules": ["q_proj", "v_proj"]}, "target_modules"),
        ({"r": 8}, "rank 8 (the run: lora_rank=4)"),
        ({}, None),
    ],
    ids=str,
)
def test_an_adapter_that_would_be_another_policy_is_refused_by_the_field_that_says_so(
    fp32_model: Path, tmp_path: Path, fields: dict[str, Any], named: str | None
) -> None:
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **fields})
    get_peft_model(AutoModelForCausalLM.from_pretrained(fp32_model), config).save_pretrained(tmp_path)
    start = functools.partial(load_policy, ModelFiles(fp32_model), rank=4, alpha=8, seed=0, dtype=torch.float32)
    if named is None:
        given = load_file(tmp_path / "adapter_model.safetensors")
        name, taken = next(entry for entry in start(adapter_path=tmp_path).named_parameters() if "lora_A" in entry[0])
        assert torch.equal(taken, given[name.replace(".default", "")])
        return
    with pytest.raises(FlashError) as caught:
        start(adapter_path=tmp_path)
    assert caught.value.code == "adapter_mismatch" and named in caught.value.what


def test_an_adapter_of_a_model_of_another_size_is_refused(fp32_model: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**BASE, head_dim=8))
    get_peft_model(other, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).save_pretrained(tmp_path)
    with pytest.raises(FlashError, match=r"adapter_mismatch.*another base model"):
        load_policy(ModelFiles(fp32_model), rank=4, alpha=8, seed=0, dtype=torch.float32, adapter_path=tmp_path)


def test_what_rows_of_several_prompts_begin_with_is_computed_once(fp32_model: Path) -> None:
    causal_lm, tokenizer = make_policy(fp32_model).get_base_model(), AutoTokenizer.from_pretrained(fp32_model)
    transcripts = [r.transcript for r in make_rollouts(tokenizer, turns=3) if r.transcript]
    transcripts[1].completion_ids[:2] = transcripts[0].completion_ids[:2]
    width = max(map(len, transcripts))
    rows = [(t.ids, [1] * len(t), [0] * len(t.prompt_ids) + t.mask) for t in transcripts]
    ids, seen, mask = (torch.tensor([row[at] + [0] * (width - len(row[at])) for row in rows]) for at in range(3))
    (tree,) = packing.packs_of(ids, seen, mask)
    assert tree.tokens == len({tuple(t.ids[:end]) for t in transcripts for end in range(1, len(t) + 1)})
    expected = packing.group_logps(causal_lm, ids, seen, mask, 0.7, way=packing.Way.ROWS)
    torch.testing.assert_close(packing.group_logps(causal_lm, ids, seen, mask, 0.7), expected, rtol=1e-5, atol=1e-5)


def answers_after_a_long_prompt() -> tuple[Tensor, Tensor, Tensor]:
    """Eight of 1,000 tokens after one of 3,000; no two begin alike."""
    ids = torch.arange(32_000).view(8, 4000)
    ids[:, :3000] = ids[0, :3000]
    return ids, torch.ones_like(ids), torch.ones(8, 1000, dtype=torch.long)


def test_a_long_prompt_is_shared_by_several_completions() -> None:
    """In packs of 4,096 it would be computed eight times."""
    packs = packing.packs_of(*answers_after_a_long_prompt())
    assert [pack.rows for pack in packs] == [[0, 1, 2, 3, 4, 5], [6, 7]] and packs[0].tokens == 9000


def test_a_group_without_advantage_costs_no_forward_pass(tiny_model: Path, tmp_path: Path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rollouts = make_rollouts(tokenizer)
    for rollout in rollouts:
        rollout.reward = 0.5
    monkeypatch.setattr(packing.Pack, "logps", None)
    policy = make_policy(tiny_model, torch.bfloat16)
    grads = our_gradients(policy, tokenizer, settings_of(), rollouts, tmp_path)
    assert not any(gradient.any() for gradient in grads.values())
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert grads.keys() == trained, "Adam's momentum goes on for all of them, as it would with TRL"


def test_a_gradient_that_is_no_number_ends_the_run_before_it_is_saved(fp32_model: Path, tmp_path: Path) -> None:
    tokenizer, folder = AutoTokenizer.from_pretrained(fp32_model), RunFolder(tmp_path / "run")
    folder.create({})

    def rollouts_of(step: int) -> list[PlayedRollout]:
        rollouts = make_rollouts(tokenizer, seed=step)
        rollouts[0].reward = math.inf if step == 2 else 1.0
        return rollouts

    spec, writer = (settings_of(steps=3, save_every=1, importance_sampling="none"), RunWriter(folder, 1))
    trainer = Trainer(
        make_policy(fp32_model), tokenizer, spec, rollouts_of=rollouts_of, max_completion=MAX_COMPLETION,
        way=packing.Way.PACKED,
        output_dir=str(tmp_path / "out"), callbacks=[Reporter(writer, spec, threading.Event())],
    )  # fmt: skip
    with pytest.raises(FlashError, match=r"diverged step=2.*learning_rate"):
        trainer.train()
    assert folder.checkpoints.steps() == [1]


def test_a_rollout_that_the_environment_failed_moves_nothing() -> None:
    rewards = enumerate((1.0, 0.0, 0.0))
    group = [PlayedRollout(RolloutTask("train", 0, 0, i, 0), "t", reward=reward) for i, reward in rewards]
    group[2].error = {"code": "environment_error", "what": "boom"}
    assert advantages_of(group, settings_of()) == [0.5, -0.5, 0.0]
    group[1].error = group[2].error
    assert advantages_of(group, settings_of()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3])
@pytest.mark.parametrize("size", [3, 8, 13])
def test_equal_rewards_have_no_advantage_however_their_mean_is_rounded(reward: float, size: int) -> None:
    group = [PlayedRollout(RolloutTask("train", 0, 0, index, 0), "t", reward=reward) for index in range(size)]
    assert not any(advantages_of(group, settings_of(loss_type="grpo")))


def test_what_rounding_leaves_of_a_return_is_no_reward() -> None:
    """0.1 + 0.25 + 0.3 is less than the exact sum of these three numbers."""
    group = [PlayedRollout(RolloutTask("train", 0, 0, index, 0), "t") for index in range(2)]
    for rollout, last in zip(group, (0.0, 0.5), strict=True):
        rollout.turn_rewards = list(enumerate((0.1, 0.25, 0.3, last), start=1))
        rollout.reward = 0.1 + 0.25 + 0.3 + last
    turns = turn_advantages(group, settings_of(loss_type="maxrl"))
    assert [row[3][1] for row in turns] == [-1.0, 1.0]


def test_packs_without_a_mask_are_bounded_by_memory_alone() -> None:
    """A prompt of 3,000 tokens and eight answers of 1,000."""
    limit = packing.pack_limit
    assert limit(3000) == 9000 and limit(3000, longest=packing.LONGEST) == packing.LONGEST
    assert limit(3000, 20_000, packing.LONGEST) == 20_000
    assert limit(3000, 11_000, packing.LONGEST) == 9000, "shorter packs, computed twice"
    arguments = answers_after_a_long_prompt()
    (pack,) = packing.packs_of(*arguments, longest=packing.LONGEST)
    assert pack.tokens == 11_000
    assert len(packing.packs_of(*arguments, longest=5500)) == 4, "after memory ran out"
    trees = [[(3500, 3100)]] * 8
    assert len(packing.packs_of(*arguments, forks_B=trees, longest=packing.LONGEST)) == 1
    assert len(packing.packs_of(*arguments, forks_B=trees)) == 2
    for most in ({"longest": 3999}, {"keep_tokens": 499}, {"keep_tokens": 499, "longest": packing.LONGEST}):
        assert len(packing.packs_of(*arguments, forks_B=trees, **most)) == 16, "two paths of each"
