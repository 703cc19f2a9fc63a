"""The rows of docs/models.md, each tried again with `scripts/test --long`, and most steps of three always."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from flash_mcp.protocol.base_models import NEEDS_GPU
from tests.model_rows import ARCHITECTURES, make_model
from tests.models import STEPS, run_row, stored_cells, stored_rows
from worker.training.policy import load_policy

QUICK = ("qwen3_5", "gemma3", "qwen3_moe")
"""A wrapper with a state, a wrapper with two kinds of attention, a mixture of experts."""
QUICK_STEPS = tuple(step for step in STEPS if step not in ("evaluate", "deploy"))
"""The others start processes of vLLM."""


def test_the_page_has_a_row_for_each_architecture() -> None:
    assert list(stored_rows()) == list(ARCHITECTURES)


def test_train_refuses_each_no_of_the_page() -> None:
    refused = [name for name, verdict in stored_rows().items() if verdict.startswith("no")]
    assert refused == list(NEEDS_GPU)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite"])
def test_of_a_mixture_of_experts_neither_routers_nor_experts_are_trained(name: str, tmp_path: Path) -> None:
    policy = load_policy(make_model(name, tmp_path), rank=4, alpha=8, seed=0, dtype=torch.float32)
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert any("attn" in name for name in trained)
    for name in trained:
        assert "lora_" in name
        assert not {"gate", "router", "shared_expert_gate", "experts"} & set(name.split("."))


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
