"""python gpu_configuration.py MODEL NAME:CAPABILITY:GIB ...: the engine's configuration on each such card,
a line of JSON for each.

vLLM's own CUDA platform makes it. Only the driver's library is replaced, and the kernels, which the
build for the CPU lacks."""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from vllm import platforms

sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
kernels: Any = types.ModuleType("vllm.vllm_flash_attn")
kernels.flash_attn_varlen_func = kernels.get_scheduler_metadata = None
kernels.compile_flash_attn_varlen_func_from_specs = None
sys.modules["vllm.vllm_flash_attn"] = kernels
from vllm.platforms import cuda  # noqa: E402  needs the lines above

platforms._current_platform = cuda.NvmlCudaPlatform()
from vllm import EngineArgs  # noqa: E402  keeps the platform that it finds

from worker.engine.vllm import engine_arguments  # noqa: E402


def driver(name: str, capability: tuple[int, ...], memory: int) -> Any:
    """What vLLM asks of NVML."""
    return types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: capability,
        nvmlDeviceGetName=lambda handle: name,
        nvmlDeviceGetUUID=lambda handle: "GPU-0",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=memory),
        NVMLError=OSError,
    )


def main(model: Path, card: str) -> None:
    name, capability, gib = card.split(":")
    memory = int(gib) << 30
    cuda.pynvml = driver(name, tuple(map(int, capability.split("."))), memory)
    torch.cuda.mem_get_info = lambda device=None: (memory, memory)
    torch.cuda.is_available = lambda: True
    torch.cuda.empty_cache = lambda: None
    arguments = engine_arguments(
        model, max_length=512, max_num_seqs=64, seed=0, lora_rank=12, dtype="bfloat16", on_gpu=True
    )
    config: Any = EngineArgs(**arguments).create_engine_config()
    graphs = config.compilation_config
    facts = {
        "device": config.device_config.device_type,
        "dtype": str(config.model_config.dtype),
        "largest_graph": graphs.max_cudagraph_capture_size,
        "graphs": str(graphs.cudagraph_mode),
        "specialized": graphs.cudagraph_specialize_lora,
        "autotune": config.kernel_config.enable_flashinfer_autotune,
        "utilization": config.cache_config.gpu_memory_utilization,
        "rank": config.lora_config.max_lora_rank,
        "eager": config.model_config.enforce_eager,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


for each in sys.argv[2:]:
    # A process for each card: vLLM keeps what it asked the driver.
    if (child := os.fork()) == 0:
        main(Path(sys.argv[1]), each)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"no configuration for {each}")
