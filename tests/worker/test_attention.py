"""The GPU's attention of a pack, with the flash kernels that PyTorch has for a CPU in place of those for a GPU."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_mcp.protocol.errors import FlashError
from worker.model_files import ModelFiles
from worker.precision import precision_of
from worker.training import attention
from worker.training.attention import Layout
from worker.training.packing import hidden_states
from worker.training.policy import load_policy

FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LENGTHS = [(5, [3, 7, 1]), (9, [12]), (0, [4, 6]), (70, [30, 58])]


def segments_of(ends: Tensor) -> list[slice]:
    marks = ends.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(marks)]


def of_cpu(part: Tensor, rows: slice, heads: int) -> Tensor:
    """(1, heads, tokens of the segment, D), each query head with its key head."""
    return part[rows].repeat_interleave(heads // part.size(1), dim=1).transpose(0, 1)[None]


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor,
    most_queries: int, most_keys: int, dropout: float, causal: bool, debug: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = torch.empty_like(query), query.new_empty(query.size(1), len(query)).float()
    for rows, columns in zip(segments_of(query_ends), segments_of(key_ends), strict=True):
        assert rows.stop - rows.start <= most_queries and columns.stop - columns.start <= most_keys
        parts = [of_cpu(part, at, query.size(1)) for part, at in ((query, rows), (key, columns), (value, columns))]
        [segment], [lse[:, rows]] = FORWARD(*parts, dropout, causal, scale=scale)
        out[rows] = segment.transpose(0, 1)
    nothing = torch.empty(0)
    return out, lse, nothing, nothing.clone(), nothing.clone()


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    query_ends: Tensor, key_ends: Tensor, most_queries: int, most_keys: int, dropout: float,
    causal: bool, *random: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads = query.size(1)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, columns in zip(segments_of(query_ends), segments_of(key_ends), strict=True):
        places = (grad, rows), (query, rows), (key, columns), (value, columns), (out, rows)
        parts = [of_cpu(part, at, heads) for part, at in places]
        found = BACKWARD(*parts, lse[None, :, rows].contiguous(), dropout, causal, scale=scale)
        for of, at, [part] in zip(grads, (rows, columns, columns), found, strict=True):
            of[at] = part.transpose(0, 1).unflatten(1, (of.size(1), -1)).sum(2)
    return grads


@pytest.fixture
def flash() -> Iterator[None]:
    """PyTorch's flash kernels of the CPU, segment by segment, behind the operators of the GPU's."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(("prompt", "completions"), LENGTHS, ids=str)
def test_flash_attention_in_two_parts_has_the_outputs_and_gradients_of_the_masked_one(
    flash: None, prompt: int, completions: list[int]
) -> None:
    total = prompt + sum(completions)
    cpu = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    found: list[list[Tensor]] = []
    layouts = [Layout(prompt, completions, torch.float32, cpu, flash=on) for on in (False, True)]
    length = total + layouts[0].filler

    def rows(heads: int) -> Tensor:
        return torch.randn(1, heads, length, 8, generator=generator)

    inputs, weight = [rows(4), rows(2), rows(2)], torch.randn(total, 4, 8, generator=generator)
    for layout in layouts:
        leaves = [part.clone().requires_grad_() for part in inputs]
        out, _ = attention._attend(None, *leaves, layout.mask, scaling=0.3)
        (out[0, :total] * weight).sum().backward()
        found.append([out[0, :total], *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert torch.equal(layouts[0].positions, layouts[1].positions)
    for masked, in_parts in zip(*found, strict=True):
        assert (in_parts - masked).norm() < 1e-5 * masked.norm()


def test_the_kernels_give_the_shapes_that_the_stand_ins_give(flash: None) -> None:
    """By PyTorch's own rules for CUDA, which need no GPU."""

    def shapes(device: str, dtype: torch.dtype, ends: Tensor) -> list[torch.Size]:
        query = torch.zeros(20, 4, 8, dtype=dtype, device=device)
        key = torch.zeros(20, 2, 8, dtype=dtype, device=device)
        span = (ends, ends, 15, 15, 0.0, True)
        out, lse, *random = attention.FLASH_FORWARD(query, key, key, *span, False, scale=1.0)
        grads = attention.FLASH_BACKWARD(query, query, key, key, out, lse, *span, *random[:2], scale=1.0)
        return [tensor.shape for tensor in (out, lse, *grads)]

    mine = shapes("cpu", torch.float32, torch.tensor([0, 5, 20], dtype=torch.int32))
    with FakeTensorMode():
        assert shapes("cuda", torch.bfloat16, torch.empty(3, dtype=torch.int32, device="cuda")) == mine


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_card_without_bf16_is_refused_by_name(tiny_model: Path, monkeypatch, has_bf16: bool, dtype: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    base = ModelFiles(tiny_model)
    assert precision_of(base, 0, dtype).dtype == getattr(torch, dtype)
    if not has_bf16:
        for name in ("bfloat16", None):
            with pytest.raises(FlashError, match=r"device_unsupported gpu=.*Tesla T4.*8\.0 or more"):
                precision_of(base, 0, name)


def test_a_model_computes_the_same_by_flash_attention(flash: None, fp32_model: Path) -> None:
    policy = load_policy(ModelFiles(fp32_model), rank=8, alpha=16, seed=0, dtype=torch.float32)
    ids = torch.arange(40, 90)
    masked, in_parts = (
        hidden_states(policy.get_base_model(), ids, Layout(20, [18, 12], torch.float32, policy.device, flash=on))
        for on in (False, True)
    )
    torch.testing.assert_close(in_parts[:50], masked[:50], rtol=1e-5, atol=1e-5)
