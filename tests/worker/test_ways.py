"""Every way of computing a group, on the architectures that people train, beside a plain forward pass
of each sequence with transformers' eager attention."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flash_mcp.protocol.errors import FlashError
from tests.architectures import MIXTURES, SIZES, WINDOW, make_architecture
from tests.tiny import change_adapter
from worker.training import attention, packing
from worker.training.kernels import LoraLinear
from worker.training.packing import Pack, Way, way_of

STATE = {"qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h"}
OF_NO_ADAPTER = ("lm_head", "router", "expert", "gate.", "mamba.out_proj", "mixer.out_proj")


def adapted(model: Any) -> Any:
    """The model with an adapter, all of whose weights have a gradient."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in f"{name}." for part in OF_NO_ADAPTER)
    ]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    return change_adapter(get_peft_model(model, config)).train()


def make_pack(prompt: int, lengths: list[int], way: Way) -> Pack:
    """Some tokens of every completion are not trained."""
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randint(3, 300, (size,), generator=generator) for size in (prompt, *lengths)]
    trained = [torch.tensor([at for at in range(size) if at % 5 != 2]) for size in lengths]
    places = torch.arange(sum(map(len, trained)))
    return Pack(parts[0], parts[1:], trained, places, [()] * len(lengths), list(range(len(lengths))), way)


def plain_logps(policy: Any, pack: Pack) -> Tensor:
    """Of each sequence by itself, with eager attention and the model's own logits."""
    model = policy.get_base_model()
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found: list[Tensor] = []
    for completion, at in zip(pack.completions, pack.trained, strict=True):
        ids = torch.cat([pack.prompt, completion])[None]
        logits = policy(input_ids=ids, use_cache=False).logits[0, :-1].float() / 0.7
        found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)[len(pack.prompt) - 1 + at])
    model.set_attn_implementation(before)
    return torch.cat(found)


def with_gradient(policy: Any, logps: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities and the adapter's gradient of a weighted sum of them."""
    policy.zero_grad()
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    grads = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
    return logps.detach(), torch.cat(grads)


@pytest.mark.parametrize("prompt", [2, 2 * WINDOW])  # the first is too short to share
@pytest.mark.parametrize("name", SIZES)
def test_the_chosen_way_gives_a_plain_passes_log_probabilities_and_gradients(name: str, prompt: int) -> None:
    model = make_architecture(name)
    before = torch.get_rng_state()
    way = way_of(model)
    assert torch.equal(torch.get_rng_state(), before) and way == (Way.STATE if name in STATE else Way.PACKED)
    policy = adapted(model)
    pack = make_pack(prompt, [2 * WINDOW, 9, 1, 30], way)
    mine, grads = with_gradient(policy, pack.logps(model, 0.7)[0])
    plain, expected = with_gradient(policy, plain_logps(policy, pack))
    assert plain.std() > 0.05, "a model whose logits are all alike would show nothing"
    assert (mine - plain).norm() < 1e-5 * plain.norm()
    # Linear attention sums in fp32 in chunks, which begin elsewhere. Without the prompt's state,
    # gradients would be off by a quarter and more.
    allowed = 5e-5 if name in STATE else 1e-5
    assert (grads - expected).norm() < allowed * expected.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_5_text"])
def test_rows_give_them_too_also_if_activations_are_computed_twice(name: str) -> None:
    model = make_architecture(name)
    policy = adapted(model)
    pack = make_pack(2 * WINDOW, [2 * WINDOW, 9, 30], Way.ROWS)
    plain, expected = with_gradient(policy, plain_logps(policy, pack))
    state = make_pack(2 * WINDOW, [2 * WINDOW, 9, 30], Way.STATE)
    for tried, keep_tokens in ((pack, torch.inf), (pack, 0), (state, 0)):
        mine, grads = with_gradient(policy, tried.logps(model, 0.7, keep_tokens=keep_tokens)[0])
        assert (mine - plain).norm() < 1e-5 * plain.norm() and (grads - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_a_tree_of_a_mixed_model_has_the_log_probabilities_of_its_paths(name: str) -> None:
    """The second branch goes on from the middle of the first, more than a window away from it."""
    model = make_architecture(name)
    ids = torch.arange(3, 3 + 110)[None] % 290 + 3
    seen, trained = torch.ones_like(ids), torch.ones(1, 90, dtype=torch.long)
    trained[0, :5] = 0
    packs = packing.packs_of(ids, seen, trained, forks_B=[[(80, 30)]], way=way_of(model))
    logps = torch.zeros(1, 90)
    for pack in packs:
        logps = pack.put(logps, pack.logps(model, 1.0)[0])
    model.set_attn_implementation("eager")
    for path, first in zip([list(range(80)), [*range(30), *range(80, 110)]], (25, 30), strict=True):
        logits = model(input_ids=ids[:, path], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logits.gather(1, ids[0, path[1:], None]).squeeze(1)
        mine = logps[0, [place - 20 for place in path[first:]]]
        torch.testing.assert_close(mine, chosen[first - 1 :], rtol=1e-4, atol=1e-4)


def as_one_completion(model: Any, prompt: int, completions: list[int], *forks: Any) -> attention.Layout:
    return LAYOUT(model, prompt, [sum(completions)], *forks)


def at_double_places(model: Any, *arguments: Any) -> attention.Layout:
    layout = LAYOUT(model, *arguments)
    layout.positions *= 2
    return layout


LAYOUT = packing.layout_of


@pytest.mark.parametrize("seed", [4, *(pytest.param(n, marks=pytest.mark.long) for n in range(20) if n != 4)])
@pytest.mark.parametrize("name", MIXTURES)
def test_rounding_at_a_router_hides_no_way_of_a_mixture_and_no_fault(name: str, seed: int, monkeypatch):
    """Where two experts are almost equal, another way of computing sends a token to the other one."""
    model = make_architecture(name, seed=seed, dtype=torch.bfloat16, std=0.12)
    assert way_of(model) == Way.PACKED
    for fault in (as_one_completion, at_double_places):
        monkeypatch.setattr(packing, "layout_of", fault)
        assert way_of(model) != Way.PACKED, fault.__name__


def test_a_model_whose_layers_ask_for_an_unknown_option_is_not_packed_wrongly() -> None:
    query = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match="position_bias"):
        attention._attend(None, query, query, query, None, position_bias=torch.ones(8))
    with pytest.raises(NotImplementedError, match="is_causal=False"):
        attention._attend(None, query, query, query, None, is_causal=False)


def test_logits_that_the_head_does_not_know_are_refused() -> None:
    model = make_architecture("llama")
    forward = model.forward

    def squared(**inputs: Any) -> Any:
        outcome = forward(**inputs)
        outcome.logits = outcome.logits.square()
        return outcome

    model.forward = squared
    with pytest.raises(FlashError, match=r"llama.*gradients would be wrong"):
        way_of(model)
