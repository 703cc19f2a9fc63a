"""The step's gradient beside a dense reference: plain PyTorch, one sequence at a time, no packs, no
TRL. It knows of the product only how it is called.

Both compute in fp64: in fp32 the reference itself is 1.4e-6 off."""

import copy
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from flash_mcp.protocol.spec import RunSpec
from tests.forked import forked
from tests.worker.test_grpo import MAX_COMPLETION, make_policy, settings_of
from tests.worker.test_trees import make_calls
from worker.adapter import save_adapter
from worker.model import Model
from worker.model_files import ModelFiles
from worker.ranks import Ranks
from worker.rollouts.calls import Call, merged
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion
from worker.training import packing
from worker.training.grpo import Trainer, load_teacher
from worker.training.policy import load_policy

GROUPS, SIZE = 3, 4
Group = list[tuple[PlayedRollout, list[Call]]]


def make_groups(tokenizer: Any, *, failed: bool = False) -> list[Group]:
    """Trees of calls, some of one call. With `failed`: a group of equal rewards, a rollout that
    failed before it began and one that failed later."""
    rng, template = random.Random(3), ChatTemplate(tokenizer)
    groups: list[Group] = []
    for group in range(GROUPS):
        rows: Group = []
        for index in range(group * SIZE, (group + 1) * SIZE):
            calls = make_calls(template, rng, f"question {group}")[: rng.choice([1, 9])]
            task = RolloutTask("train", group, group, index, seed=index)
            reward = rng.choice([0.0, 0.3, 1.0])
            rows.append((PlayedRollout(task, f"t{index}", merged(calls), reward=reward), calls))
        groups.append(rows)
    if failed:
        for rollout, _ in groups[1]:
            rollout.reward = 0.1 + 0.2
        never, later = groups[2][0], groups[2][3]
        never[0].error = later[0].error = {"code": "environment_error", "what": "boom"}
        never[0].transcript = None
        groups[2][0] = never[0], []
        groups[2][1][0].reward, groups[2][2][0].reward = 0.25, 1.0
    return groups


def advantages_of(rollouts: list[PlayedRollout], loss: str) -> list[float]:
    valid = [rollout.reward for rollout in rollouts if not rollout.error]
    mean = sum(valid) / len(valid)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in valid) / (len(valid) - 1))
    if len(set(valid)) == 1:
        return [0.0] * len(rollouts)
    by = {"dr_grpo": 1.0, "rollout_mean": 1.0, "maxrl": mean}.get(loss, spread + 1e-4)
    return [0.0 if rollout.error else (rollout.reward - mean) / by for rollout in rollouts]


def turn_advantages_of(rollouts: list[PlayedRollout], loss: str) -> list[list[float]]:
    """For each rollout the advantage of each turn: reward to go, less its mean among those that came so far."""

    def to_go(rollout: PlayedRollout, turn: int) -> float:
        return rollout.reward - sum(reward or 0.0 for _, reward in rollout.turn_rewards[:turn])

    def standing(value: float, others: list[float]) -> float:
        mean = sum(others) / len(others)
        spread = math.sqrt(sum((other - mean) ** 2 for other in others) / (len(others) - 1))
        return 0.0 if len(set(others)) == 1 else (value - mean) / (spread + 1e-4 if loss == "dapo" else 1.0)

    valid = [rollout for rollout in rollouts if not rollout.error]
    result: list[list[float]] = []
    for rollout in rollouts:
        result.append([])
        for turn in range(len(rollout.turn_rewards)):
            peers = [to_go(other, turn) for other in valid if len(other.turn_rewards) > turn]
            if len(peers) == 1:  # none but this one has so many turns
                peers += [other.reward for other in valid if other is not rollout]
            result[-1].append(0.0 if rollout.error else standing(to_go(rollout, turn), peers))
    return result


class Reference:
    """The base model, with W + scale BA in the place of each adapted weight."""

    def __init__(self, folder: Path, policy: Any, spec: RunSpec) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float64)
        self.base.requires_grad_(False)
        self.spec = spec
        self.adapters = {
            name: [getattr(module, part)["default"].weight.detach().clone() for part in ("lora_A", "lora_B")]
            for name, module in policy.get_base_model().named_modules()
            if hasattr(module, "lora_A")
        }  # fmt: skip
        self.start = copy.deepcopy(self.adapters)
        self.entropies: list[Tensor] = []
        """Sums over the tokens that each call sampled."""
        self.advantages: Any = lambda rollouts: advantages_of(rollouts, spec.loss_type)
        self.teacher: Any = None
        """(calls, of a rollout) -> what the teacher gives to the sampled tokens"""
        for pair in self.adapters.values():
            for weight in pair:
                weight.requires_grad_()

    def logps(self, call: Call, adapters: dict[str, list[Tensor]]) -> Tensor:
        """Of the tokens that the call sampled."""
        ids = torch.tensor(call.transcript.ids)
        weights = {
            f"{name}.weight": self.base.get_submodule(name).weight + 2.0 * b @ a for name, (a, b) in adapters.items()
        }
        inputs = {"input_ids": ids[None], "use_cache": False}
        logits = torch.func.functional_call(self.base, weights, args=(), kwargs=inputs).logits[0]
        logps = (logits[:-1] / self.spec.temperature).log_softmax(-1)
        if adapters is self.adapters:
            self.entropies.append(-(logps.exp() * logps)[call.shown - 1 :].sum())
        return logps.gather(1, ids[1:, None])[call.shown - 1 :, 0]

    def token_terms(self, calls: list[Call], advantage: float) -> Tensor:
        """(N,) -advantage * weight * log-probability, and the KL penalty, of a rollout's tokens."""
        spec = self.spec
        if not calls or (spec.mask_truncated and calls[-1].transcript.truncated):
            return torch.zeros(0)
        mine = torch.cat([self.logps(call, self.adapters) for call in calls])
        engine = torch.tensor(
            list(itertools.chain(*(c.transcript.logprobs[c.shown - len(c.transcript.prompt_ids) :] for c in calls)))
        )  # fmt: skip
        apart = mine.detach() - engine
        if spec.importance_sampling.startswith("sequence"):
            apart = apart.sum().expand_as(apart)
        ratio = apart.exp()
        weight = torch.ones_like(ratio)
        if spec.importance_sampling.endswith("truncate"):
            weight = ratio.clamp(max=spec.importance_sampling_clip)
        elif spec.importance_sampling.endswith("mask"):
            weight = ratio * (ratio <= spec.importance_sampling_clip)
        if self.teacher:
            with torch.no_grad():
                behind = torch.cat([self.teacher(call) for call in calls]) - mine.detach()
            terms = -advantage * behind * weight * mine
        else:
            terms = -advantage * weight * mine
        if spec.kl_penalty_coef:
            with torch.no_grad():
                before = torch.cat([self.logps(call, self.start) for call in calls])
            terms = terms + spec.kl_penalty_coef * ((before - mine).exp() - (before - mine) - 1)
        return terms

    def gradients(self, groups: list[Group]) -> dict[str, list[Tensor]]:
        loss = self.spec.loss_type
        total = torch.zeros(())
        count = 0
        parts: list[list[Tensor]] = []
        for group in groups:
            advantages = self.advantages([rollout for rollout, _ in group])
            if self.teacher:
                advantages = [float(not rollout.error) for rollout, _ in group]
            parts.append([
                self.token_terms(calls, advantage)
                for (_, calls), advantage in zip(group, advantages, strict=True)
            ])  # fmt: skip
            count += sum(map(len, parts[-1]))
        for terms in parts:
            tokens = sum(map(len, terms))
            whole = torch.stack([part.sum() for part in terms]).sum()
            if loss in ("grpo", "rollout_mean"):
                means = [part.mean() for part in terms if len(part)]
                total = total + torch.stack(means).sum() / SIZE / GROUPS
            elif loss in ("dr_grpo", "maxrl"):
                total = total + whole / (SIZE * MAX_COMPLETION) / GROUPS
            elif loss == "bnpo":
                total = total + whole / tokens / GROUPS
            else:
                total = total + whole / count
        if self.spec.entropy_coef:
            total = total - self.spec.entropy_coef * torch.stack(self.entropies).sum() / count
        total.backward()
        return {name: [weight.grad for weight in pair] for name, pair in self.adapters.items()}


class Caught(TrainerCallback):
    """The gradients of the optimizer's step, before they are clipped."""

    def __init__(self, policy: Any, last: int) -> None:
        self.policy = policy
        self.last = last
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        for name, weight in self.policy.named_parameters():
            if weight.requires_grad and ".ref." not in name:
                assert ".teacher." not in name
                self.gradients[name.removeprefix("base_model.model.")] = weight.grad.clone()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.last


def train(
    model: Path, groups: list[Group], spec: RunSpec, out: Path, *, teacher: Any = None, last: int = 1,
    way: packing.Way = packing.Way.PACKED, **options: Any,
) -> Caught:  # fmt: skip
    """A step of the trainer's own loop, by default one. `teacher` names one as job.json does."""
    policy = make_policy(model, torch.float64)
    if teacher:
        template = ChatTemplate(AutoTokenizer.from_pretrained(model))
        held = Model(ModelFiles(model), template, torch.float64, 256, policy)
        options["teacher"] = load_teacher(teacher, Path(teacher["path"]), held, packing.Way.PACKED)
    caught = Caught(policy, last)
    rollouts = [rollout for group in groups for rollout, _ in group]
    trainer = Trainer(
        policy, AutoTokenizer.from_pretrained(model), spec, rollouts_of=lambda step: copy.deepcopy(rollouts),
        output_dir=str(out), max_completion=MAX_COMPLETION, callbacks=[caught], way=way, **options,
    )  # fmt: skip
    trainer.train()
    return caught


def check(caught: Caught, model: Path, groups: list[Group], spec: RunSpec, reference: Any = None) -> None:
    reference = reference or Reference(model, make_policy(model, torch.float64), spec)
    expected = reference.gradients(groups)
    assert len(caught.gradients) == 2 * len(expected) > 0
    mine, theirs = [], []
    for name, pair in expected.items():
        for part, gradient in zip(("A", "B"), pair, strict=True):
            mine.append(caught.gradients[f"{name}.lora_{part}.default.weight"].flatten())
            theirs.append(gradient.flatten())
    difference = (torch.cat(mine) - torch.cat(theirs)).norm() / torch.cat(theirs).norm()
    assert difference < 1e-6


def spec_of(**fields: Any) -> RunSpec:
    return settings_of(batch_size=GROUPS, group_size=SIZE, max_grad_norm=1000, **fields)


LOSSES = ["dr_grpo", "rollout_mean", "grpo", "bnpo", "dapo", "cispo", "maxrl"]
MODES = ["none", "token_mask", "sequence_truncate", "sequence_mask"]
CASES: list[dict[str, Any]] = [
    *({"loss_type": loss, "importance_sampling_clip": 1.3} for loss in LOSSES),
    *({"importance_sampling": mode, "importance_sampling_clip": 1.3} for mode in MODES),
    {"kl_penalty_coef": 0.1, "temperature": 0.7},
    {"entropy_coef": 0.3, "temperature": 0.7},
    {"entropy_coef": 0.3, "loss_type": "rollout_mean", "mask_truncated": True},
    *({"loss_type": loss, "mask_truncated": True} for loss in LOSSES),
]


@pytest.mark.parametrize(
    ("pack_tokens", "failed"),
    [
        (16, True),
        pytest.param(packing.PACK_TOKENS, False, marks=pytest.mark.long),
        pytest.param(packing.PACK_TOKENS, True, marks=pytest.mark.long),
        pytest.param(16, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_step_has_the_gradient_of_the_dense_reference(
    fp32_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any],
    pack_tokens: int, failed: bool,
) -> None:  # fmt: skip
    """With 16 tokens in a pack, or 48 after such a prompt, trees are split into their paths."""
    monkeypatch.setattr(packing, "PACK_TOKENS", pack_tokens)
    monkeypatch.setattr(packing, "LONGEST", 3 * pack_tokens)
    groups = make_groups(AutoTokenizer.from_pretrained(fp32_model), failed=failed)
    for rollout, calls in itertools.chain(*(group[::2] for group in groups)):
        if rollout.transcript:  # each second one was cut off
            rollout.transcript.truncated = calls[-1].transcript.truncated = True
    spec = spec_of(**fields)
    check(train(fp32_model, groups, spec, tmp_path), fp32_model, groups, spec)


@pytest.mark.parametrize("way", [packing.Way.PACKED, packing.Way.ROWS])
def test_whole_trees_and_rows_have_it_too(fp32_model: Path, tmp_path: Path, way: packing.Way) -> None:
    groups = make_groups(AutoTokenizer.from_pretrained(fp32_model))
    spec = spec_of(loss_type="grpo")
    check(train(fp32_model, groups, spec, tmp_path, way=way), fp32_model, groups, spec)


@pytest.mark.parametrize(("schedule", "left"), [("linear", 2 / 3), ("cosine", 0.75)])
def test_the_kl_penalty_falls_by_its_schedule(fp32_model: Path, tmp_path: Path, schedule: str, left: float) -> None:
    """In the second of three steps, which a third of the steps precedes; the first moves nothing."""
    groups = make_groups(AutoTokenizer.from_pretrained(fp32_model))
    spec = spec_of(kl_penalty_coef=0.3, kl_schedule=schedule, steps=3, learning_rate=1e-12)
    caught = train(fp32_model, groups, spec, tmp_path, last=2)
    check(caught, fp32_model, groups, spec_of(kl_penalty_coef=0.3 * left))


@pytest.mark.parametrize("fields", [{}, {"importance_sampling": "sequence_truncate"}], ids=str)
def test_a_batch_that_two_policies_sampled_has_the_gradient_of_the_dense_reference(fp32_model, tmp_path, fields):
    """Of each answer the first half of the tokens is of an earlier policy, the others of the trained one."""
    groups = make_groups(AutoTokenizer.from_pretrained(fp32_model))
    spec = spec_of(importance_sampling_clip=1.3, **fields)
    now = Reference(fp32_model, make_policy(fp32_model, torch.float64), spec)
    earlier = {name: (a, 0.5 * b) for name, (a, b) in now.start.items()}
    weights: list[float] = []
    for row in itertools.chain(*groups):
        rollout, calls = row
        for call in calls:
            with torch.no_grad():
                fresh, stale = now.logps(call, now.start), now.logps(call, earlier)
            half = len(fresh) // 2
            sampled = torch.cat([stale[:half], fresh[half:]])
            call.transcript.logprobs[call.shown - len(call.transcript.prompt_ids) :] = sampled.tolist()
            weights += (fresh - sampled).exp().tolist()
        rollout.transcript = merged(calls)
    assert 0.2 < sum(abs(weight - 1) > 0.01 for weight in weights) / len(weights) < 0.5 < max(weights) - min(weights)
    check(train(fp32_model, groups, spec, tmp_path), fp32_model, groups, spec)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("adapter", {}),
        ("model", {"loss_type": "dapo", "kl_penalty_coef": 0.1, "temperature": 0.7}),
        pytest.param("adapter", {"loss_type": "dapo", "kl_penalty_coef": 0.1}, marks=pytest.mark.long),
        pytest.param("model", {}, marks=pytest.mark.long),
    ],
)
def test_a_distillation_has_the_gradient_of_the_dense_reference(fp32_model, tmp_path, kind: str, fields):
    """The teacher: an adapter of another rank, or another model."""
    groups = make_groups(AutoTokenizer.from_pretrained(fp32_model))
    never, failed = groups[2][0][0], groups[1][1][0]
    never.error = failed.error = {"code": "environment_error", "what": "boom"}
    never.transcript = None
    groups[2][0] = never, []
    spec = spec_of(algorithm="distill", teacher="t", importance_sampling_clip=1.3, **fields)
    reference = Reference(fp32_model, make_policy(fp32_model, torch.float64), spec)
    torch.manual_seed(5)
    if kind == "adapter":
        policy = load_policy(ModelFiles(fp32_model), rank=4, alpha=8, seed=7, dtype=torch.float64)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.1)
        save_adapter(policy, tmp_path / "teacher")
        teacher = {"path": str(tmp_path / "teacher"), "digest": ""}
        taught = Reference(fp32_model, policy, spec)
    else:
        other = AutoModelForCausalLM.from_pretrained(fp32_model)
        for weight in other.parameters():
            weight.data.add_(0.02 * torch.randn_like(weight))
        other.save_pretrained(tmp_path / "teacher")
        AutoTokenizer.from_pretrained(fp32_model).save_pretrained(tmp_path / "teacher")
        teacher = {"model": "larger", "path": str(tmp_path / "teacher")}
        taught = Reference(tmp_path / "teacher", make_policy(fp32_model, torch.float64), spec)
        taught.start = {name: (a, 0 * b) for name, (a, b) in taught.start.items()}
    reference.teacher = lambda call: taught.logps(call, taught.start)
    caught = train(fp32_model, groups, spec, tmp_path / "out", teacher=teacher)
    # A rollout that the environment failed teaches nothing, but counts.
    check(caught, fp32_model, groups, spec, reference)


def test_memory_that_runs_out_once_halves_the_packs_and_the_gradient_stays_the_same(fp32_model, tmp_path, monkeypatch):
    """In the second pack's backward pass, when all but the last layer's gradients are added up."""
    monkeypatch.setattr(packing, "PACK_TOKENS", 300)
    groups = make_groups(AutoTokenizer.from_pretrained(fp32_model))
    sizes: list[int] = []
    several: list[bool] = []
    warnings: list[str] = []
    failing = {2}
    logps = packing.Pack.logps

    def short(pack: packing.Pack, causal_lm: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        sizes.append(pack.tokens)
        several.append(len(pack.rows) > 1)
        if len(sizes) in failing:
            next(p for p in causal_lm.parameters() if p.requires_grad).register_hook(out_of_memory)
        return logps(pack, causal_lm, *args, **options)

    def out_of_memory(_: Tensor) -> None:
        if len(sizes) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(packing.Pack, "logps", short)
    caught = train(fp32_model, groups, spec_of(), tmp_path / "halved", warn=warnings.append)
    (said,) = warnings
    assert f"in a pack of {sizes[1]} tokens" in said and "CUDA out of memory" in said
    again = list(zip(sizes[2:], several[2:], strict=True))
    assert len(again) > GROUPS and all(size <= sizes[1] // 2 for size, is_shared in again if is_shared)
    check(caught, fp32_model, groups, spec_of())
    sizes.clear()
    failing |= {3}
    with pytest.raises(torch.OutOfMemoryError):
        train(fp32_model, groups, spec_of(), tmp_path / "twice", warn=warnings.append)
    assert len(warnings) == 2, "once for each trainer"


RANK_CASES = [{"loss_type": "dapo"}, {"loss_type": "rollout_mean", "kl_penalty_coef": 0.1}]


def train_as(rank: int, model: Path, folder: Path) -> list[Caught]:
    """The steps of RANK_CASES on one of two ranks, of which the first has two of three groups."""
    ranks = Ranks(rank, 2)
    ranks.connect(folder)
    caught: list[Caught] = []
    for fields in RANK_CASES:
        own = ranks.mine(make_groups(AutoTokenizer.from_pretrained(model), failed=True))
        caught.append(train(model, own, spec_of(**fields), folder / f"out-{rank}", ranks=ranks))
    return caught


def test_two_ranks_with_uneven_shares_have_the_gradient_of_the_dense_reference(fp32_model: Path, tmp_path: Path):
    code = f"""
from pathlib import Path
from tests.worker.test_reference import train_as
train_as(1, Path({str(fp32_model)!r}), Path({str(tmp_path)!r}))
"""
    with forked(code, tmp_path / "log"):
        for caught, fields in zip(train_as(0, fp32_model, tmp_path), RANK_CASES, strict=True):
            groups = make_groups(AutoTokenizer.from_pretrained(fp32_model), failed=True)
            check(caught, fp32_model, groups, spec_of(**fields))


@pytest.mark.parametrize("loss", ["dr_grpo", "rollout_mean", "dapo"])
def test_turns_that_are_rewarded_have_the_gradient_of_the_dense_reference(fp32_model: Path, tmp_path: Path, loss: str):
    """Each turn is a sequence of its own there, with the advantage of its own reward to go."""
    rng, template = random.Random(5), ChatTemplate(AutoTokenizer.from_pretrained(fp32_model))
    groups: list[Group] = []
    for group in range(GROUPS):
        rows: Group = []
        for index in range(group * SIZE, (group + 1) * SIZE):
            transcript = Transcript(template, [{"role": "user", "content": f"question {group}"}])
            rollout = PlayedRollout(RolloutTask("train", group, group, index, seed=index), f"t{index}", transcript)
            calls: list[Call] = []
            for turn in range(4 if index == 1 else rng.randint(1, 3)):  # one alone has a fourth turn
                if turn:
                    transcript.add_environment([{"role": "user", "content": "go on"}])
                shown = len(transcript)
                ids = [rng.randrange(33, 126) for _ in range(rng.randint(1, 9))]
                transcript.add_answer(Completion(ids, [-4.5 + rng.gauss(0, 0.5) for _ in ids], "stop"))
                reward = None if group == 2 else rng.choice([None, 0.0, 0.5, -0.25])
                rollout.turn_rewards.append((len(transcript.completion_ids), reward))
                calls.append(Call(turn, calls[-1] if calls else None, transcript.copy(), shown))
            rollout.reward = rng.choice([0.0, 1.0]) + sum(reward or 0.0 for _, reward in rollout.turn_rewards)
            rows.append((rollout, calls))
        groups.append(rows)
    groups[0][2][0].error = {"code": "environment_error", "what": "boom"}
    spec = spec_of(loss_type=loss)
    reference = Reference(fp32_model, make_policy(fp32_model, torch.float64), spec)
    terms = reference.token_terms

    def by_turn(calls: list[Call], advantages: Any) -> Tensor:
        return torch.cat([terms([call], value) for call, value in zip(calls, advantages, strict=True)])

    reference.token_terms = by_turn

    def advantages(rollouts: list[PlayedRollout]) -> Any:
        if rollouts[0].task.group < 2:
            return turn_advantages_of(rollouts, loss)
        pairs = zip(rollouts, advantages_of(rollouts, loss), strict=True)
        return [[advantage] * len(rollout.turn_rewards) for rollout, advantage in pairs]

    reference.advantages = advantages
    check(train(fp32_model, groups, spec, tmp_path), fp32_model, groups, spec, reference)
