"""What is computed of a card without one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import paper, shapes
from bench.random_model import config_of
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.spec import DEFAULT_MODEL
from worker.training import attention


@pytest.mark.parametrize(("prompt", "lengths"), [(64, [16320]), (0, [16384]), (256, [1536] * 8), (256, [512, 100, 7])])
def test_attention_is_counted_as_it_is_computed(prompt: int, lengths: list[int]) -> None:
    heads, kv_heads, size = 32, 8, 128
    rows: Any = attention.Layout(prompt, lengths, torch.bfloat16, torch.device("meta"), flash=True).mask.rows

    def tensor(count: int) -> torch.Tensor:
        return torch.empty(prompt + sum(lengths), count, size, dtype=torch.bfloat16, device="meta", requires_grad=True)

    with FlopCounterMode(display=False, custom_mapping=paper._flash_flops([prompt, *lengths])) as counted:
        out = attention._Flash.apply(tensor(heads), tensor(kv_heads), tensor(kv_heads), rows, 0.1, None)
        out.sum().backward()
    pairs = sum(length**2 / 2 for length in (prompt, *lengths)) + prompt * sum(lengths)
    assert counted.get_total_flops() == pytest.approx(3.5 * 4 * pairs * heads * size)


def test_the_step_of_a_model_is_computed(tmp_path: Path) -> None:
    config_of("0.6B").save_pretrained(tmp_path)
    before = paper.step_cost(tmp_path, flash=False, recomputed=False)
    after = paper.step_cost(tmp_path, flash=True, recomputed=False)
    assert after.flops < before.flops and after.moved < before.moved
    work, packs = paper.WORK, paper.GROUPS * math.ceil(paper.WORK.group_size / paper.WORK.rows)
    answers = work.rows * work.completion
    layers = 4 * 440e6 * (work.prompt + answers)  # twice the parameters a token, there and back to the inputs
    head = 6 * 151936 * 1024 * answers  # and once more, since its products are not kept
    pairs = work.rows * work.completion**2 / 2 + work.prompt * answers
    assert after.flops == pytest.approx(packs * (layers + head + 3.5 * 4 * pairs * 2048 * 28), rel=0.1)


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_a_model_of_each_shape_is_written(shape: str, tmp_path: Path) -> None:
    assert shapes.make(shape, tmp_path, models_dir() / DEFAULT_MODEL) > 20e6 and (tmp_path / "config.json").exists()
