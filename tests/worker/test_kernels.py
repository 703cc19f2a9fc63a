"""The hand-written gradients beside those of plain PyTorch and PEFT."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from worker.model_files import ModelFiles
from worker.training import kernels
from worker.training.kernels import Head, LoraLinear, token_logps
from worker.training.policy import load_policy


@pytest.mark.parametrize("fields", [{}, {"scale": 0.25}, {"softcap": 4.0}, {"scale": 3.0, "softcap": 9.0}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [7, 64, 1000])
def test_log_probabilities_and_entropies_are_those_of_a_softmax(monkeypatch, bias: bool, tile: int, fields):
    monkeypatch.setattr(kernels, "VOCABULARY_TILE", tile)
    torch.manual_seed(0)
    head = Head(torch.nn.Linear(16, 100, bias=bias), **fields)
    ours, theirs = (torch.randn(9, 16, generator=torch.Generator().manual_seed(1)) * 5 for _ in range(2))
    ours.requires_grad_(), theirs.requires_grad_()
    targets, upstream = torch.randint(100, (9,)), torch.randn(9)
    logps, entropies = token_logps(head, ours, targets, 0.7)
    expected = torch.log_softmax(head.logits(theirs) / 0.7, -1)  # (9, 100)
    chosen = expected.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logps, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(1), rtol=1e-4, atol=1e-5)
    assert not entropies.requires_grad
    (logps * upstream).sum().backward()
    (chosen * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"scale": 0.25}, {"softcap": 4.0}, {"scale": 3.0, "softcap": 9.0}], ids=str)
@pytest.mark.parametrize("tile", [7, 1000])
def test_the_gradient_of_entropies_is_that_of_a_softmax(monkeypatch, tile: int, fields: dict[str, float]):
    """Together with that of log-probabilities, which it is added to."""
    monkeypatch.setattr(kernels, "VOCABULARY_TILE", tile)
    torch.manual_seed(0)
    head = Head(torch.nn.Linear(16, 100, dtype=torch.float64), **fields)
    ours, theirs = (torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).double() for _ in range(2))
    ours.requires_grad_(), theirs.requires_grad_()
    targets, upstream, weights = torch.randint(100, (9,)), torch.randn(9), torch.randn(9)
    logps, entropies = token_logps(head, ours, targets, 0.7, trains_entropy=True)
    logits = head.linear(theirs) * head.scale
    if head.softcap:
        logits = head.softcap * (logits / head.softcap).tanh()
    expected = torch.log_softmax(logits / 0.7, -1)
    entropies_too = -(expected.exp() * expected).sum(1)
    torch.testing.assert_close(entropies, entropies_too)
    (logps * upstream + entropies * weights).sum().backward()
    (expected.gather(1, targets[:, None]).squeeze(1) * upstream + entropies_too * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_far_apart_logits_neither_overflow_nor_vanish(scale: float) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 5000, bias=False, dtype=torch.bfloat16)
    hidden = (torch.randn(4, 8) * scale).to(torch.bfloat16).requires_grad_()
    logps, entropies = token_logps(Head(head), hidden, torch.tensor([0, 17, 4095, 4999]), 1.0)
    logps.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert (logps <= 0).all() and (entropies >= -1e-3).all() and entropies.isfinite().all()


@pytest.mark.parametrize(("chance", "allowed"), [(0.99, 0.02), (0.999, 0.09)])
def test_the_slope_of_a_token_that_is_nearly_certain_is_not_mostly_rounding(chance: float, allowed: float) -> None:
    """In bf16: 0.054 and 0.127 off, if the target's part is rounded with the others'."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 20_000, bias=False, dtype=torch.bfloat16)
    head.weight.data.normal_(generator=generator)
    targets = torch.arange(64)
    directions = head.weight[targets].float()
    # The target's logit is the length squared; of the others, all are small.
    wanted = math.log(20_000 * chance / (1 - chance))
    hidden = directions * (wanted + 0.5) / directions.square().sum(1, keepdim=True)
    slopes: list[torch.Tensor] = []
    for dtype in (torch.bfloat16, torch.float64):
        exact = torch.nn.Linear(64, 20_000, bias=False, dtype=dtype)
        exact.weight.data.copy_(head.weight)
        leaf = hidden.detach().bfloat16().to(dtype).requires_grad_()
        if dtype == torch.bfloat16:
            logps, _ = token_logps(Head(exact), leaf, targets, 1.0)
        else:
            logps = exact(leaf).log_softmax(-1).gather(1, targets[:, None])
        logps.sum().backward()
        assert leaf.grad is not None
        slopes.append(leaf.grad.double())
    off = (slopes[0] - slopes[1]).norm() / slopes[1].norm()
    assert off < allowed


def test_a_head_in_fp32_is_nearer_to_the_exact_log_probabilities_and_slopes() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 20_000, bias=False, dtype=torch.bfloat16)
    linear.weight.data.normal_(generator=generator)
    hidden = torch.randn(64, 64, generator=generator).bfloat16()
    targets = torch.arange(64)

    def computed(in_fp32: bool) -> list[torch.Tensor]:
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            logps, _ = token_logps(Head(linear, in_fp32=in_fp32), leaf, targets, 1.0)
        logps.sum().backward()
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        return [logps.detach().double(), leaf.grad.double()]

    leaf = hidden.double().requires_grad_()
    exact = (leaf @ linear.weight.double().t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    exact.sum().backward()
    assert leaf.grad is not None
    for half, whole, wanted in zip(computed(False), computed(True), (exact.detach(), leaf.grad), strict=True):
        errors = [((part - wanted).norm() / wanted.norm()).item() for part in (half, whole)]
        assert errors[1] < 0.9 * errors[0], errors
    assert (computed(True)[0] - exact).abs().max() < 1e-4 < (computed(False)[0] - exact).abs().max()


def _gradients(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(input_ids=ids).logits
    logits.float().square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("other", ["alone", "disabled", "two adapters", "a bias of its own"])
def test_an_adapted_layer_is_pefts(tiny_model: Path, other: str) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    ours = load_policy(ModelFiles(tiny_model), rank=4, alpha=8, seed=0, dtype=torch.float32)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), config)
    assert any(type(module) is LoraLinear for module in ours.modules())
    for model in (ours, theirs):
        if other == "two adapters":
            model.add_adapter("second", config)
            model.base_model.set_adapter(["default", "second"])
        if other == "a bias of its own":
            biased = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", lora_bias=True)
            model.add_adapter("second", biased)
            model.base_model.set_adapter("second")
        generator = torch.Generator().manual_seed(3)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.normal_(std=0.1, generator=generator)
                weight.requires_grad_()
    ids = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(4))
    if other == "disabled":
        with ours.disable_adapter(), theirs.disable_adapter(), torch.no_grad():
            torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
        return
    (mine, grads), (expected, wanted) = _gradients(ours, ids), _gradients(theirs, ids)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == wanted.keys() and grads
    for name, grad in grads.items():
        assert (grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_in_one_kernel_are_no_further_off_fp32_than_those_of_transformers(dtype: torch.dtype, tiny_model: Path):
    def gradient(dtype: torch.dtype, *, fused: bool) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.copy_(torch.linspace(0.5, 2, len(weight)))
        if fused:
            assert kernels.fuse_norms(model) == 5
        embedded = model.get_input_embeddings()(torch.arange(40, 90)[None]).detach()
        embedded.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = model.model(inputs_embeds=embedded).last_hidden_state
        assert hidden.dtype == dtype
        hidden.float().square().sum().backward()
        return embedded.grad.float()

    def off(found: torch.Tensor) -> float:
        return ((found - exact).norm() / exact.norm()).item()

    exact = gradient(torch.float32, fused=False)
    if dtype == torch.float32:
        torch.testing.assert_close(gradient(dtype, fused=True), exact, rtol=1e-5, atol=1e-5)
    else:
        assert off(gradient(dtype, fused=True)) <= 1.05 * off(gradient(dtype, fused=False))


def test_norms_of_another_kind_are_left_alone() -> None:
    module = importlib.import_module("transformers.models.gemma.modeling_gemma")
    norm = module.GemmaRMSNorm(8)
    with_one = module.GemmaRMSNorm(8)
    with_one.variance_epsilon = 1e-6  # as if it were called like Llama's
    assert kernels.fuse_norms(torch.nn.ModuleList([norm, with_one])) == 0
