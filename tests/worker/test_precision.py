"""The precision of a model by what the machine computes fast and has room for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker import precision

GIB = 2**30


def config(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    text = SimpleNamespace(layer_types=["full_attention"], **fields)
    return SimpleNamespace(dtype=dtype, get_text_config=lambda: text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of 1 GiB, on a CPU of 16 GiB without products in bf16."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    monkeypatch.setattr(precision, "has_bf16_products", lambda: False)
    monkeypatch.setattr(precision, "capacity_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def test_a_cpu_without_products_in_bf16_computes_in_fp32(folder: Path) -> None:
    assert precision.precision_of(config(), folder) == torch.float32


def test_bf16_stays_where_two_copies_in_fp32_would_take_half_of_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "capacity_bytes", lambda: 8 * GIB - 1)
    assert precision.precision_of(config(), folder) == torch.bfloat16
    assert precision.precision_of(config(torch.float32), folder) == torch.float32, "its files are"


def test_bf16_stays_on_cpus_and_cards_that_have_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_bf16_products", lambda: True)
    assert precision.precision_of(config(), folder) == torch.bfloat16
    monkeypatch.setattr(precision, "has_bf16_products", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision.precision_of(config(), folder) == torch.bfloat16
    assert precision.precision_of(config(torch.float32), folder) == torch.float32


def test_layers_with_a_state_are_computed_in_bf16_on_any_cpu(folder: Path) -> None:
    stateful = config(torch.float32, linear_conv_kernel_dim=4)
    stateful.get_text_config().layer_types[:] = ["linear_attention", "full_attention"]
    assert precision.precision_of(stateful, folder) == torch.bfloat16


def test_pytorch_says_whether_this_cpu_has_them() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if "avx2" not in flags:
        pytest.skip("no x86-64 of the last ten years")
    has_them = {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags
    assert precision.has_bf16_products() == has_them
