"""The rows of docs/models.md, each tried again with `scripts/test --long`, and most steps of three always."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from flash_mcp.protocol.base_models import NEEDS_GPU
from flash_mcp.protocol.errors import FlashError
from tests.attempts import Attempt, make_run
from tests.model_rows import ARCHITECTURES, make_model
from tests.models import STEPS, run_row, stored_cells, stored_rows
from worker.adapter import merged_weights, named_in_files
from worker.model_files import ModelFiles
from worker.training.policy import load_policy

QUICK = ("qwen3_5",)  # A wrapper with a state
QUICK_STEPS = tuple(step for step in STEPS if step not in ("evaluate", "deploy", "experts"))
"""The others start processes of vLLM."""


def test_the_page_has_a_row_for_each_architecture() -> None:
    assert list(stored_rows()) == list(ARCHITECTURES)


def test_train_refuses_each_no_of_the_page() -> None:
    refused = [name for name, verdict in stored_rows().items() if verdict.startswith("no")]
    assert refused == list(NEEDS_GPU)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite"])
def test_of_a_mixture_of_experts_neither_routers_nor_experts_are_trained(name: str, tmp_path: Path) -> None:
    policy = load_policy(ModelFiles(make_model(name, tmp_path)), rank=4, alpha=8, seed=0, dtype=torch.float32)
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert any("attn" in name for name in trained)
    for name in trained:
        assert "lora_" in name and not {"gate", "router", "shared_expert_gate", "experts"} & set(name.split("."))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe", "qwen3_moe"])
def test_adapted_experts_are_merged_as_peft_does_and_named_as_in_the_files(name: str, tmp_path: Path) -> None:
    base = make_model(name, tmp_path)
    policy = load_policy(ModelFiles(base), rank=4, alpha=8, seed=0, dtype=torch.float32, experts=True)
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert any(".experts." in name for name in trained)
    assert not {"gate", "router", "shared_expert_gate"} & {part for name in trained for part in name.split(".")}
    with torch.no_grad():
        for weight in (weight for name, weight in policy.named_parameters() if ".lora_B." in name):
            weight.normal_(std=0.1)
        merged = dict(merged_weights(policy))
        in_files = dict(merged_weights(policy, ModelFiles(base).prefix))
    stored = {name: weight for path in base.glob("*.safetensors") for name, weight in load_file(path).items()}
    changed = [name for name in in_files if ".experts." in name and not name.endswith("_bias")]
    assert changed and in_files.keys() <= stored.keys()
    assert all(in_files[name].shape == stored[name].shape for name in in_files)
    assert not any(torch.equal(in_files[name], stored[name]) for name in changed)
    alone = dict(cast(Any, policy).merge_and_unload().named_parameters())
    for name, weight in merged.items():
        torch.testing.assert_close(weight, alone[name])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_export_finds_each_merged_weight_in_the_models_files(name: str, tmp_path: Path) -> None:
    base = make_model(name, tmp_path)
    prefix = ModelFiles(base).prefix
    policy = load_policy(ModelFiles(base), rank=4, alpha=8, seed=0, dtype=torch.float32)
    merged = dict(merged_weights(policy))
    exported = named_in_files(cast(Any, policy).unload(), merged, prefix)
    stored = {name for path in base.glob("*.safetensors") for name in load_file(path)}
    assert len(exported) == len(merged) and exported.keys() <= stored


def test_experts_of_a_dense_model_are_refused(tiny_model: Path) -> None:
    with pytest.raises(FlashError, match=r"invalid_argument.*no mixture of experts"):
        load_policy(ModelFiles(tiny_model), rank=4, alpha=8, seed=0, dtype=torch.float32, experts=True)


def check_row(name: str, folder: Path, only: Sequence[str]) -> None:
    row = run_row(name, folder, only)
    log = (folder / f"{name}.log").read_text()[-2000:]
    seen = {**row.failed, **row.steps}
    for step, stored in stored_cells(name).items():
        if step in only and "nats" not in stored:
            assert seen.get(step, "-") == stored, log


@pytest.mark.cpu
@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_trains_as_its_row_says(name: str, tmp_path: Path) -> None:
    check_row(name, tmp_path, QUICK_STEPS)


@pytest.mark.cpu
@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_does_all_that_its_row_says(name: str, tmp_path: Path) -> None:
    check_row(name, tmp_path, STEPS)


@pytest.mark.cpu
@pytest.mark.long
def test_a_run_trains_the_experts_of_a_mixture_where_it_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_model("qwen3_moe", tmp_path / "base"), steps=2, experts=True)
    Attempt(run).ended()
    result, written = run.result(), run.metrics(2)
    assert result and result["state"] == "succeeded", result
    assert written and written["metrics"]["grad_norm"] > 0
    assert written["metrics"]["sampling_logp_difference/mean"] < 1e-4
    (adapter,) = tmp_path.glob("run/checkpoints/2/*/adapter_config.json")
    assert "layers.0.mlp.experts.down_proj" in json.loads(adapter.read_text())["target_parameters"]
