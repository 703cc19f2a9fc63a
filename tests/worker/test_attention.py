"""The GPU's attention of a pack, with the flash kernels that PyTorch has for a CPU in place of those for a GPU."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_mcp.protocol.errors import FlashError
from worker.model_files import ModelFiles
from worker.precision import precision_of
from worker.training import attention
from worker.training.attention import Layout
from worker.training.packing import hidden_states
from worker.training.policy import load_policy

FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Fork = tuple[int, int, int]
PACKS: list[tuple[int, list[int], list[Fork]]] = [
    (5, [3, 7, 1], []), (9, [12], []), (0, [4, 6], []), (70, [30, 58], []), (150, [130, 0, 5], []),
    (20, [60, 40], [(30, 26, 80), (50, 45, 80), (60, 10, 80), (90, 85, 120)]),  # one forks within the prompt
    (10, [200], [(100, 40, 210), (130, 0, 210), (150, 140, 210)]),  # and one has nothing before it
]  # fmt: skip


def segments_of(ends: Tensor) -> list[slice]:
    marks = ends.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(marks)]


def mask_of(rows: slice, columns: slice, causal: bool, window_size_left: int | None = None, window_size_right: int = 0):
    """The GPU's rule: the last query is that of the last key."""
    queries, keys = rows.stop - rows.start, columns.stop - columns.start
    apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (apart >= 0) | (not causal)
    if window_size_left is not None:
        seen &= apart <= window_size_left
    return {"is_causal": False, "attn_mask": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}


def of_cpu(part: Tensor, rows: slice, heads: int) -> Tensor:
    """(1, heads, tokens of the segment, D), each query head with its key head."""
    return part[rows].repeat_interleave(heads // part.size(1), dim=1).transpose(0, 1)[None]


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor,
    most_queries: int, most_keys: int, dropout: float, causal: bool, debug: bool, *, scale: float, **window: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = torch.empty_like(query), query.new_empty(query.size(1), len(query)).float()
    for rows, columns in zip(segments_of(query_ends), segments_of(key_ends), strict=True):
        assert rows.stop - rows.start <= most_queries and columns.stop - columns.start <= most_keys
        parts = [of_cpu(part, at, query.size(1)) for part, at in ((query, rows), (key, columns), (value, columns))]
        [segment], [lse[:, rows]] = FORWARD(*parts, dropout, **mask_of(rows, columns, causal, **window), scale=scale)
        out[rows] = segment.transpose(0, 1)
    nothing = torch.empty(0)
    return out, lse, nothing, nothing.clone(), nothing.clone()


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    query_ends: Tensor, key_ends: Tensor, most_queries: int, most_keys: int, dropout: float,
    causal: bool, *random: Tensor, scale: float, **window: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads = query.size(1)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, columns in zip(segments_of(query_ends), segments_of(key_ends), strict=True):
        places = (grad, rows), (query, rows), (key, columns), (value, columns), (out, rows)
        parts = [of_cpu(part, at, heads) for part, at in places]
        mask = mask_of(rows, columns, causal, **window)
        found = BACKWARD(*parts, lse[None, :, rows].contiguous(), dropout, **mask, scale=scale)
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


def dense_mask(prompt: int, completions: list[int], forks: list[Fork], window: int | None) -> Tensor:
    """What each token sees, from what comes before it."""
    before = list(range(-1, prompt + sum(completions) - 1))
    for place in itertools.accumulate([prompt, *completions[:-1]]):
        if place < len(before):
            before[place] = prompt - 1
    for start, after, _ in forks:
        before[start] = after - 1
    mask = torch.full((len(before), len(before)), -torch.inf)
    for query in range(len(before)):
        key, apart = query, 0
        while key >= 0 and apart < (window or len(before)):
            mask[query, key] = 0.0
            key, apart = before[key], apart + 1
    return mask


@pytest.mark.parametrize("window", [None, 1, 24, 64, 100])
@pytest.mark.parametrize(("prompt", "completions", "forks"), PACKS, ids=str)
def test_no_way_of_attention_differs_from_a_dense_mask(flash, monkeypatch, prompt, completions, forks, window) -> None:
    """Blocks of a CPU, those of a GPU, and flash attention."""
    monkeypatch.setattr(attention, "GPU_BLOCK", 128)
    of = prompt, completions, torch.float32, torch.device("cpu")
    layouts = [Layout(*of, flash=on, forks=forks, windows={"": window}) for on in (False, True)]
    spans = attention.spans_of([prompt, *completions, layouts[0].filler], forks)
    blocks = attention.Blocks.of(spans, window, *of[2:], on_cpu=False)
    of_gpu = layouts[0].mask.clone()
    of_gpu.blocks = blocks
    total = prompt + sum(completions)
    dense = torch.full([total + layouts[0].filler] * 2, -torch.inf)
    dense.fill_diagonal_(0.0)
    dense[:total, :total] = dense_mask(prompt, completions, forks, window)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, len(dense), 8, generator=generator) for heads in (4, 2, 2)]
    sinks, weight = torch.randn(4, generator=generator), torch.randn(total, 4, 8, generator=generator)
    found: list[list[Tensor]] = []
    for mask in (dense[None, None], *(layout.mask for layout in layouts), of_gpu):
        leaves = [part.clone().requires_grad_() for part in inputs]
        out, _ = attention._attend(None, *leaves, mask, scaling=0.3, s_aux=sinks)
        (out[0, :total] * weight).sum().backward()
        found.append([out[0, :total], *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for expected, *others in zip(*found, strict=True):
        for other in others:
            assert (other - expected).norm() < 1e-5 * expected.norm()


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        stored = [each.untyped_storage().nbytes() for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.bytes = max(self.bytes, *stored, 0)
        return made


@pytest.mark.parametrize("window", [None, 128])
def test_a_tree_of_24576_tokens_makes_no_mask_of_its_square(window: int | None) -> None:
    """That would be 604 MB."""
    with Largest() as largest:
        forks = [(8000, 4000, 24576), (12000, 11000, 24576), (18000, 4000, 24576)]
        layout = Layout(2000, [22576], torch.float32, torch.device("cpu"), forks=forks, windows={"": window})
        parts = [torch.randn(1, 1, 24576, 8, requires_grad=True) for _ in range(3)]
        out, _ = attention._attend(None, *parts, layout.mask)
        out.sum().backward()
    assert largest.bytes < 8e6


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


@pytest.mark.parametrize(
    ("capability", "dtype", "package", "active"),
    [
        ((9, 0), torch.bfloat16, "", "FA3"), ((9, 0), torch.float16, "", "FA3"), ((9, 0), torch.float32, "", None),
        ((8, 0), torch.bfloat16, "", None), ((10, 0), torch.bfloat16, "", None), ((9, 0), torch.bfloat16, None, None),
        ((9, 0), torch.bfloat16, "raise ImportError('undefined symbol')", None),
    ],
)  # fmt: skip
def test_hopper_computes_by_flash_attention_3_where_its_package_loads(
    capability: tuple[int, int], dtype: torch.dtype, package: str | None, active: str | None,
    fp32_model: Path, tmp_path: Path, monkeypatch, caplog,
) -> None:  # fmt: skip
    """The stand-in has the operators that PyTorch looks for, and computes nothing."""
    operators = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        operators.define(f"{name}(Tensor query) -> Tensor")
    if package is not None:
        (tmp_path / "flash_attn_interface.py").write_text(package)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    try:
        attention.use_flash_3(ModelFiles(fp32_model).config, dtype, torch.device("cuda"))
        assert current_flash_attention_impl() == active and ("undefined symbol" in caplog.text) == bool(package)
    finally:
        restore_flash_attention_impl(_raise_warn=False)
        operators._destroy()


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
