"""The precision of a model by what the machine computes fast and has room for."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import RunSpec, resolve
from worker import precision
from worker.heartbeat import Heartbeat
from worker.model import load_model
from worker.model_files import ModelFiles

GIB = 2**30
HALF, WHOLE = {"dtype": torch.bfloat16}, {"dtype": torch.float32}
STATE = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that computes products as fast in bf16."""
    monkeypatch.setattr(precision, "has_bf16_products", lambda: True)
    monkeypatch.setattr(precision, "bf16_over_fp32", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


def files_of(folder: Path, fields: dict[str, Any]) -> ModelFiles:
    """Weights of 1 GiB."""
    Qwen3NextConfig(
        hidden_size=576, num_hidden_layers=2, **{"layer_types": ["full_attention"] * 2} | fields
    ).save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    return ModelFiles(folder)


NONE: dict[str, Any] = {"has_bf16_products": False}
SLOWER: dict[str, Any] = {"bf16_over_fp32": 1.5}
LEAST = 8 * GIB  # room for fp32 where bf16 would do


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("machine", "capacity", "fields", "dtype"),
    [
        ({}, LEAST, HALF, torch.bfloat16), ({"bf16_over_fp32": 1.1}, LEAST, HALF, torch.bfloat16),
        (SLOWER, LEAST, HALF, torch.float32), (NONE, LEAST, HALF, torch.float32),
        (NONE, LEAST - 1, HALF, torch.bfloat16), (SLOWER, LEAST - 1, HALF, torch.bfloat16),
        (SLOWER, LEAST, HALF | STATE, torch.bfloat16), (NONE, LEAST, WHOLE | STATE, torch.bfloat16),
        ({}, LEAST - 1, WHOLE, torch.float32), (NONE | {"cuda": True}, LEAST, HALF, torch.bfloat16),
        ({"cuda": True}, LEAST, WHOLE, torch.float32),
    ],
)  # fmt: skip
def test_a_model_is_computed_in_the_faster_precision_that_fits(machine, capacity, fields, dtype, tmp_path, monkeypatch):
    for name, value in machine.items():
        where: Any = (torch.cuda, "is_available") if name == "cuda" else (precision, name)
        monkeypatch.setattr(*where, lambda *_, value=value: value)
    assert precision.precision_of(files_of(tmp_path, fields), capacity).dtype == dtype


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("capacity_gib", "fields", "code"),
    [(8, HALF, None), (3, HALF, "out_of_memory"), (3, WHOLE, None), (8, HALF | STATE, "device_unsupported")],
)
def test_fp32_that_is_asked_for_is_refused_by_name_where_it_cannot_be(capacity_gib, fields, code: str | None, tmp_path):
    base, capacity = files_of(tmp_path, fields), capacity_gib * GIB
    assert precision.precision_of(base, capacity, "bfloat16").dtype == torch.bfloat16
    with pytest.raises(FlashError) if code else nullcontext() as caught:
        assert precision.precision_of(base, capacity, "float32").dtype == torch.float32
    assert (caught and caught.value.code) == code


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("asked", "reported", "chosen"),
    [
        (None, None, "bfloat16"), ("float32", "bfloat16", "float32"), (None, "float32", "float32"),
        (None, "int8", "bfloat16"),
    ],
)  # fmt: skip
def test_the_precision_of_a_run_is_what_was_asked_for_or_what_its_first_attempt_chose(
    asked: Any, reported: Any, chosen: str, tiny_model: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    if reported:
        RunWriter(run, 1).event("precision", "chosen on another machine", precision=reported)
    writer = RunWriter(run, 2)
    spec: Any = resolve(RunSpec(environment="e", model=str(tiny_model))).spec
    spec = SimpleNamespace(**dict(spec), precision=asked)
    assert load_model({}, spec, writer, Heartbeat(writer), trains=False).dtype == getattr(torch, chosen)
    assert run.event("0002-000000.json")["precision"] == chosen  # type: ignore[index]


@pytest.mark.parametrize("served", [False, True])
def test_the_probe_takes_the_best_of_several_tries_on_one_thread(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more rows take twice as long in bf16, the others half as long, and the first try ten times as long."""
    clock, called = 0.0, list[tuple[int, torch.dtype]]()
    monkeypatch.setattr(precision, "RUN_ROWS", (8, 2))
    monkeypatch.setattr(precision, "SERVED_ROWS", (8,))

    def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal clock
        assert torch.get_num_threads() == 1
        slower = 1.0 if inputs.dtype == torch.float32 else {8: 2.0, 2: 0.5}[len(inputs)]
        clock += slower * len(inputs) * (1 if (len(inputs), inputs.dtype) in called else 10)
        called.append((len(inputs), inputs.dtype))
        return torch.zeros(len(inputs), len(weight), dtype=inputs.dtype)

    monkeypatch.setattr(precision, "linear", linear)
    monkeypatch.setattr(precision, "packed", lambda weight, _: lambda inputs: linear(inputs, weight))
    monkeypatch.setattr(precision, "time", SimpleNamespace(thread_time=lambda: clock))
    before = torch.get_num_threads()
    assert precision.bf16_over_fp32.__wrapped__(4, served) == (2.0 if served else 1.0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_product_is_a_linear_layers(dtype: torch.dtype) -> None:
    if not precision.has_bf16_products():
        pytest.skip("a CPU on which nothing is measured")
    weight, inputs = torch.randn(96, 64).to(dtype), torch.randn(8, 64).to(dtype)
    torch.testing.assert_close(precision.packed(weight, 8)(inputs), torch.nn.functional.linear(inputs, weight))


def test_pytorch_says_whether_this_cpu_has_them() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if "avx2" not in flags:
        pytest.skip("no x86-64 of the last ten years")
    has_them = {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags
    assert precision.has_bf16_products() == has_them
