"""Base weights in NF4: gradients of the same weights at full size, memory, refusals, and a run."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.supervisor.launch.devices import Device, memory_need
from tests import reaper
from tests.attempts import Attempt, make_run
from tests.places import ROOT, WHEELS
from worker.adapter import merged_weights
from worker.model_files import ModelFiles
from worker.training import memory, packing, policy
from worker.training.policy import load_policy

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.mark.long  # pytest and torch start anew for them
@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="they run by themselves")
def test_those_that_need_bitsandbytes_pass_with_it(tmp_path: Path) -> None:
    """It is kept out of the tests' environment: peft imports it, a second of each worker's start."""
    wheels = list(WHEELS.glob("bitsandbytes-*.whl"))
    if not wheels:
        pytest.skip("scripts/test fetches bitsandbytes")
    with ZipFile(wheels[0]) as wheel:
        wheel.extractall(tmp_path / "packages")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "in_nf4_has or in_nf4_trains"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "PYTEST_ADDOPTS": ""}
    environment.pop(reaper.VARIABLE)  # a run of its own, whose workers have the package too
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def made(model: Path, *, four_bit: bool) -> Any:
    torch.manual_seed(0)
    return load_policy(ModelFiles(model), rank=8, alpha=16, seed=0, dtype=torch.float32, four_bit=four_bit)


def result(adapted: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities of a packed pass, the adapter's gradients)."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.05, generator=generator)
    ids = torch.randint(33, 126, (3, 40), generator=generator)
    trained = torch.ones(3, 12, dtype=torch.long)
    logps = packing.group_logps(adapted.get_base_model(), ids, torch.ones_like(ids), trained, 1.0)[0]
    logps.sum().backward()
    gradients = [p.grad.flatten() for p in adapted.parameters() if p.requires_grad]
    return logps.detach(), torch.cat(gradients)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@needs_bitsandbytes
def test_a_policy_in_nf4_has_the_gradients_of_its_weights_at_full_size(tiny_model: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415

    small = made(tiny_model, four_bit=True)
    whole = made(tiny_model, four_bit=False)
    _, before = result(made(tiny_model, four_bit=False))
    layers = dict(small.named_modules())
    changed = 0
    for name, module in whole.named_modules():
        packed = getattr(layers.get(name), "weight", None)
        if isinstance(module, torch.nn.Linear) and hasattr(packed, "quant_state"):
            restored = dequantize_4bit(packed.data, packed.quant_state).to(torch.float32)
            changed += not torch.equal(module.weight, restored)
            module.weight.data.copy_(restored)
    assert changed == 14  # seven of each of its two layers
    logps, gradients = result(small)
    expected_logps, expected = result(whole)
    torch.testing.assert_close(logps, expected_logps, rtol=1e-3, atol=5e-3)
    assert off(gradients, expected) < 0.01 < 0.05 < off(before, expected)
    with pytest.raises(ValueError, match="4-bit weights"):
        list(merged_weights(small))


@needs_bitsandbytes
def test_a_run_in_nf4_trains_an_adapter_and_syncs_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model, steps=2, base_precision="nf4")
    final = Attempt(run).ended()
    assert final and final["state"] == "succeeded", final
    found = run.metrics(2)
    assert found and found["metrics"]["grad_norm"] > 0
    # The engine's weights are whole, so log-probabilities differ by the rounding of four bits.
    assert 0 < found["metrics"]["sampling_logp_difference/mean"] < 0.5


def test_without_bitsandbytes_nf4_is_refused_with_the_command(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy, "find_spec", lambda name: None)
    with pytest.raises(FlashError, match=r"engine_missing.*uv pip install bitsandbytes"):
        made(tiny_model, four_bit=True)


def test_linear_layers_in_nf4_need_a_quarter_of_bf16(tiny_model: Path) -> None:
    work = memory.Workload(64, 4, 8)
    full = memory.estimate(ModelFiles(tiny_model), work, torch.bfloat16, 2**34)
    small = memory.estimate(ModelFiles(tiny_model), replace(work, four_bit=True), torch.bfloat16, 2**34)
    whole: Any = policy.without_storage(ModelFiles(tiny_model), torch.bfloat16, 8, experts=False).get_base_model()
    linear = sum(each.base_layer.weight.numel() for each in whole.modules() if hasattr(each, "base_layer"))
    assert full.weights - small.weights == pytest.approx(linear * (2 - 0.516), abs=20)
    assert small.engine_weights == full.engine_weights


def test_a_model_that_fits_a_card_only_in_nf4_is_not_refused() -> None:
    card = ModelCard("qwen3-8b", "hub:Qwen/Qwen3-8B", parameters=8_200_000_000)
    device = Device("gpu", "NVIDIA RTX 4090", 24.0, 24.0)
    full = memory_need(card, device, has_engine=True)
    small = memory_need(card, device, has_engine=True, four_bit=True)
    assert full and small and (full.fits, small.fits) == (False, True)
