"""The trainer's tokens pass the experts that they passed in the engine."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.architectures import make_architecture
from tests.model_rows import ARCHITECTURES, make_model
from tests.worker.test_engine import asynchronous_core, engines, train  # noqa: F401  a fixture
from tests.worker.test_ways import adapted, make_pack, plain_logps, with_gradient
from worker.engine.vllm import VllmEngine
from worker.handshake import settle_routing
from worker.model_files import ModelFiles, experts_of
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion, Sampling
from worker.training import packing
from worker.training.packing import Pack, Way, group_logps
from worker.training.policy import load_policy
from worker.training.routing import give_experts

IS_SECOND = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def told_experts(model: Any, tokens: int, *, seed: int = 3) -> Tensor:
    """Some at random for each token and layer, and for every seventh token none."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, config.num_hidden_layers, experts_of(config), generator=generator).argsort(-1)
    experts = order[..., : config.num_experts_per_tok].to(torch.int8)
    experts[::7] = -1
    return experts


def plain(policy: Any, pack: Pack) -> Tensor:
    """`plain_logps`, each sequence with its own experts."""
    model = policy.get_base_model()
    assert pack.experts is not None
    first, *others = pack.experts.split([len(pack.prompt), *map(len, pack.completions)])
    found: list[Tensor] = []
    for completion, at, experts in zip(pack.completions, pack.trained, others, strict=True):
        give_experts(model, torch.cat([first, experts]))
        alone = Pack(pack.prompt, [completion], [at], torch.arange(len(at)), [()], [0])
        found.append(plain_logps(policy, alone))
    give_experts(model, None)
    return torch.cat(found)


@pytest.mark.parametrize("keep_tokens", [torch.inf, 0])
@pytest.mark.parametrize(
    ("name", "way"),
    [("mixtral", Way.PACKED), ("granitemoe", Way.PACKED), ("gpt_oss", Way.ROWS), ("qwen3_next", Way.STATE)],
)
def test_each_way_of_computing_a_mixture_passes_the_experts_that_are_told(name: str, way: Way, keep_tokens: float):
    """Also where activations are computed again, after the passes of rows with other experts."""
    model = make_architecture(name)
    policy = adapted(model)
    pack = make_pack(40, [48, 9, 1, 30], way)
    pack = replace(pack, experts=told_experts(model, 40 + 48 + 9 + 1 + 30))
    expected, expected_grads = with_gradient(policy, plain(policy, pack))
    own = plain_logps(policy, pack)
    mine, grads = with_gradient(policy, pack.logps(model, 0.7, keep_tokens=keep_tokens)[0])
    assert (mine - expected).norm() < 1e-5 * expected.norm() < 1e-3 * (mine - own).norm()
    assert (grads - expected_grads).norm() < 5e-5 * expected_grads.norm()


def test_a_router_gives_the_experts_that_are_told_and_its_own_where_none_are() -> None:
    model = make_architecture("mixtral")
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    ids = torch.arange(3, 33)[None]
    told = told_experts(model, 20)
    with torch.no_grad():
        model(input_ids=ids)
        own = [*seen]
        seen.clear()
        give_experts(model, told)
        model(input_ids=ids)
    for layer, (chosen, before) in enumerate(zip(seen, own, strict=True)):
        is_told = pad(told[:, layer] >= 0, (0, 0, 0, 10))
        assert torch.equal(chosen[:20][is_told[:20]], told[:, layer].long()[is_told[:20]])
        assert layer or torch.equal(chosen[~is_told], before[~is_told]), "in the first layer inputs are the same"


@pytest.mark.parametrize("kind", ["tree", "paths", "prompts"])
def test_packs_of_a_batch_have_the_experts_of_its_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tree on a CPU, as its paths where it is too long, and around a common prompt on a card."""
    model = make_architecture("mixtral")
    prompt = 12
    ids_BT = torch.randint(3, 290, (3, 40), generator=torch.Generator().manual_seed(0))
    ids_BT[:, :prompt] = ids_BT[0, :prompt]
    forks: list[Any] = [[], [(30, 20)] if kind != "prompts" else [], []]
    experts = [told_experts(model, tokens, seed=row) for row, tokens in enumerate((40, 40, 25))]
    for told in experts[1:]:
        told[:prompt] = experts[0][:prompt]
    if kind == "paths":
        monkeypatch.setattr(packing, "LONGEST", 10)
    batch = ids_BT, torch.ones_like(ids_BT), torch.ones(3, 40 - prompt, dtype=torch.long), torch.inf, forks
    packs = packing.packs_of(*batch, Way.ROWS if kind == "prompts" else Way.PACKED, None, experts)
    found = torch.zeros(3, 40 - prompt)
    for pack in packs:
        found = pack.put(found, replace(pack, way=Way.PACKED).logps(model, 1.0)[0])
    for row, told in enumerate(experts):
        for path in packing.paths_of(40, forks[row]):
            give_experts(model, pad(told, (0, 0, 0, 0, 0, 40 - len(told)), value=-1)[path])
            ids = ids_BT[row, path]
            logps = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            places = torch.tensor(path[prompt:]) - prompt
            torch.testing.assert_close(found[row][places], logps[prompt - 1 :], rtol=1e-4, atol=1e-4)


def start(model: Path, dtype: str = "bfloat16") -> VllmEngine:
    return VllmEngine(ModelFiles(model), max_length=256, max_num_seqs=8, dtype=dtype, returns_experts=True)


def played(engine: VllmEngine, template: ChatTemplate, turns: int, *, mid_turn: Any = None) -> list[Transcript]:
    """Conversations of several turns, four at a time."""
    talks = [Transcript(template, [{"role": "user", "content": f"question {row}"}]) for row in range(4)]
    for turn in range(turns):
        for row, talk in enumerate(talks):
            engine.submit(str(row), talk.context, Sampling(24, seed=100 * turn + row))
        iterations = 0
        while engine.unfinished():
            if turn == 1 and iterations == 6 and mid_turn is not None:
                engine.load_policy(mid_turn, 2, mid_turn=True)
            for row, completion in engine.step():
                assert len(completion.experts) == len(talks[int(row)].context) + len(completion.token_ids) - 1
                talks[int(row)].add_answer(completion)
            iterations += 1
        for talk in talks if turn + 1 < turns else ():
            talk.add_environment([{"role": "user", "content": "and then?"}])
    return talks


def distance(policy: Any, talks: Sequence[Transcript], experts: list[Tensor] | None) -> float:
    """The mean difference of log-probabilities in nats."""
    width = max(map(len, talks))
    rows = [(t.ids, [1] * len(t), [0] * len(t.prompt_ids) + t.mask) for t in talks]
    ids, seen, mask = (torch.tensor([row[at] + [0] * (width - len(row[at])) for row in rows]) for at in range(3))
    engine = torch.tensor([[0.0] * len(t.prompt_ids) + t.logprobs + [0.0] * (width - len(t)) for t in talks])
    model = policy.get_base_model()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=policy.dtype == torch.bfloat16):
        logps, _ = group_logps(model, ids, seen, mask, 1.0, None, Way.PACKED, experts)
    return (logps - engine)[mask.bool()].abs().mean().item()


def events_of(engine: VllmEngine, policy: Any, model: Path) -> list[str]:
    events: list[str] = []
    settle_routing(engine, policy, ModelFiles(model), 256, lambda kind, text: events.append(text))
    return events


@pytest.mark.usefixtures("engines")
@pytest.mark.skipif(IS_SECOND, reason="of the first runner")
def test_the_first_runner_is_named_where_it_tells_no_experts(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    engine = start(model, "float32")
    (event,) = events_of(engine, None, model)
    assert "does not repeat" in event and "Model Runner V2" in event
    engine.submit("0", [65, 66], Sampling(2))
    assert next(completion for _, completion in engine.step() or engine.step()).experts is None


@pytest.mark.usefixtures("engines")
@pytest.mark.skipif(not IS_SECOND, reason="vLLM's first runner tells none")
class TestSecondRunner:
    """See tests/worker/test_second_runner.py."""

    def test_the_engines_experts_bring_the_trainer_closer_and_others_take_it_away(self, tmp_path: Path, monkeypatch):
        fields = {"num_hidden_layers": 8, "num_experts": 16, "mlp_only_layers": [1]}
        kind, before = ARCHITECTURES["qwen3_moe"]
        monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", (kind, {**before, **fields}))
        model = make_model("qwen3_moe", tmp_path, dtype=torch.bfloat16)
        engine = start(model)
        policy = load_policy(ModelFiles(model), rank=8, alpha=16, seed=0, dtype=torch.bfloat16)
        train(policy, 1)
        engine.load_policy(policy)
        talks = played(engine, ChatTemplate(ModelFiles(model).tokenizer), 3)
        told = [torch.from_numpy(talk.experts) for talk in talks]
        assert all((experts[: len(talk) - 1] >= 0).all() for talk, experts in zip(talks, told, strict=True))
        own, repeated = distance(policy, talks, None), distance(policy, talks, told)
        wrong = distance(policy, talks, [(experts + 1) % 16 for experts in told])
        assert repeated < own < wrong / 2

    @pytest.mark.parametrize("core", ["synchronous", "asynchronous"])
    def test_it_tells_them_also_when_a_policy_comes_in_mid_turn(self, core: str, tmp_path: Path) -> None:
        model = make_model("qwen3_moe", tmp_path)
        with asynchronous_core() if core == "asynchronous" else nullcontext():
            engine = start(model, "float32")
        first, second = (
            load_policy(ModelFiles(model), rank=8, alpha=16, seed=0, dtype=torch.float32) for _ in range(2)
        )
        train(first, 1)
        train(second, 2)
        engine.load_policy(first, 1)
        talks = played(engine, ChatTemplate(ModelFiles(model).tokenizer), 2, mid_turn=second)
        assert sum(bool(talk.policies[1] and talk.policies[2]) for talk in talks) >= 2
        engine.load_policy(second, 3)
        assert distance(second, played(engine, ChatTemplate(ModelFiles(model).tokenizer), 2), None) < 1e-5

    def test_experts_that_take_the_trainer_away_are_not_repeated(self, tmp_path: Path, monkeypatch) -> None:
        model = make_model("qwen3_moe", tmp_path)
        engine = start(model, "float32")
        policy = load_policy(ModelFiles(model), rank=8, alpha=16, seed=0, dtype=torch.float32)
        (event,) = events_of(engine, policy, model)
        assert "training repeats" in event
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: [(name, other(completion)) for name, completion in step()])
        (event,) = events_of(engine, policy, model)
        assert "does not repeat" in event and not engine.returns_experts


def other(completion: Completion) -> Completion:
    return replace(completion, experts=(completion.experts + 1) % 4)
