"""The precision of a model by what the machine computes fast and has room for."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from worker import precision
from worker.model import _precision  # pyright: ignore[reportPrivateUsage]

GIB = 2**30


def config(dtype: torch.dtype = torch.bfloat16, kind: str = "full_attention") -> Any:
    text = SimpleNamespace(layer_types=[kind, "full_attention"], hidden_size=576, linear_conv_kernel_dim=4)
    return SimpleNamespace(dtype=dtype, get_text_config=lambda: text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of 1 GiB, on a CPU of 16 GiB that computes products as fast in bf16."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    monkeypatch.setattr(precision, "has_bf16_products", lambda: True)
    monkeypatch.setattr(precision, "bf16_over_fp32", lambda *_: 1.0)
    monkeypatch.setattr(precision, "capacity_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


NONE: dict[str, Any] = {"has_bf16_products": False}
SLOWER: dict[str, Any] = {"bf16_over_fp32": 1.5}
SMALL: dict[str, Any] = {"capacity_bytes": 8 * GIB - 1}


@pytest.mark.parametrize(
    ("machine", "files", "dtype"),
    [
        ({}, config(), torch.bfloat16),
        ({"bf16_over_fp32": 1.1}, config(), torch.bfloat16),
        (SLOWER, config(), torch.float32),
        (NONE, config(), torch.float32),
        (NONE | SMALL, config(), torch.bfloat16),
        (SLOWER | SMALL, config(), torch.bfloat16),
        (SLOWER, config(kind="linear_attention"), torch.bfloat16),
        (NONE, config(torch.float32, "linear_attention"), torch.bfloat16),
        (SMALL, config(torch.float32), torch.float32),
        (NONE | {"cuda": True}, config(), torch.bfloat16),
        ({"cuda": True}, config(torch.float32), torch.float32),
    ],
)
def test_a_model_is_computed_in_the_faster_precision_that_fits(
    machine: dict[str, Any], files: Any, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in machine.items():
        where: Any = (torch.cuda, "is_available") if name == "cuda" else (precision, name)
        monkeypatch.setattr(*where, lambda *_, value=value: value)
    assert precision.precision_of(files, folder).dtype == dtype


@pytest.mark.parametrize(
    ("capacity_gib", "files", "code"),
    [
        (8, config(), None),
        (3, config(), "out_of_memory"),
        (3, config(torch.float32), None),
        (8, config(kind="linear_attention"), "device_unsupported"),
    ],
)
def test_fp32_that_is_asked_for_is_refused_by_name_where_it_cannot_be(
    capacity_gib: int, files: Any, code: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "capacity_bytes", lambda: capacity_gib * GIB)
    precision.check_precision(torch.bfloat16, files, folder)
    with pytest.raises(FlashError) if code else nullcontext() as caught:
        precision.check_precision(torch.float32, files, folder)
    assert (caught and caught.value.code) == code


@pytest.mark.parametrize(
    ("asked", "reported", "chosen"),
    [
        (None, None, "bfloat16"),
        ("float32", "bfloat16", "float32"),
        (None, "float32", "float32"),
        (None, "int8", "bfloat16"),
    ],
)
def test_the_precision_of_a_run_is_what_was_asked_for_or_what_its_first_attempt_chose(
    asked: Any, reported: Any, chosen: str, folder: Path
) -> None:
    run = RunFolder(folder / "run")
    if reported:
        RunWriter(run, 1).event("precision", "chosen on another machine", precision=reported)
    writer = RunWriter(run, 2)
    assert _precision(SimpleNamespace(precision=asked), config(), folder, writer) == chosen  # type: ignore[arg-type]
    assert run.event("0002-000000.json")["precision"] == chosen  # type: ignore[index]


def test_the_probe_takes_the_best_of_several_tries_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows take twice as long in bf16, 2 rows half as long, and the first try ten times as long."""
    clock, called = 0.0, list[tuple[int, torch.dtype]]()

    def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal clock
        assert torch.get_num_threads() == 1
        slower = 1.0 if inputs.dtype == torch.float32 else {8: 2.0, 2: 0.5}[len(inputs)]
        clock += slower * len(inputs) * (1 if (len(inputs), inputs.dtype) in called else 10)
        called.append((len(inputs), inputs.dtype))
        return torch.zeros(len(inputs), len(weight), dtype=inputs.dtype)

    monkeypatch.setattr(precision, "linear", linear)
    monkeypatch.setattr(precision, "time", SimpleNamespace(thread_time=lambda: clock))
    before = torch.get_num_threads()
    probe = precision.bf16_over_fp32.__wrapped__
    assert probe(4, (8, 2)) == 1.0 and probe(4, (8,)) == 2.0
    assert torch.get_num_threads() == before


def test_pytorch_says_whether_this_cpu_has_them() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if "avx2" not in flags:
        pytest.skip("no x86-64 of the last ten years")
    has_them = {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags
    assert precision.has_bf16_products() == has_them
