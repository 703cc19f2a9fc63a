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

from worker.process import prepare_process

prepare_process()
import torch  # noqa: E402  reads what the line above sets
from vllm import platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
kernels: Any = types.ModuleType("vllm.vllm_flash_attn")
kernels.flash_attn_varlen_func = kernels.get_scheduler_metadata = None
kernels.compile_flash_attn_varlen_func_from_specs = None
sys.modules["vllm.vllm_flash_attn"] = kernels
from vllm.platforms import cuda  # noqa: E402  needs the lines above

platforms._current_platform = cuda.NvmlCudaPlatform()
from vllm import EngineArgs  # noqa: E402  keeps the platform that it finds

from worker.engine.vllm import engine_arguments  # noqa: E402
from worker.model_files import ModelFiles  # noqa: E402


def driver(name: str, capability: tuple[int, ...], memory: int) -> Any:
    """What vLLM asks of NVML."""
    return types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetCudaComputeCapability=lambda handle: capability,
        nvmlDeviceGetName=lambda handle: name, nvmlDeviceGetUUID=lambda handle: "GPU-0",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=memory), NVMLError=OSError,
    )  # fmt: skip


def graphs_of(config: Any) -> dict[str, Any]:
    """What the runner of cards would capture, and replay for so many tokens, one a conversation.

    It knows no ranks and no pool of graphs here, and believes that it has captured. Its module asks
    the kernels what they can, so it is imported as on a CPU."""
    platforms._current_platform = CpuPlatform()
    from vllm.v1.worker.gpu import cudagraph_utils, lora_utils  # noqa: PLC0415

    places: Any = cudagraph_utils
    places.get_pp_group = lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
    places.current_platform = types.SimpleNamespace(get_global_graph_pool=lambda: None)
    cases = lora_utils.get_lora_capture_cases(config.lora_config, config.compilation_config)
    mode = config.compilation_config.cudagraph_mode
    manager: Any = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), mode, decode_query_len=1, lora_capture_cases=cases
    )
    manager._graphs_captured = True

    def replayed(tokens: int, adapters: int) -> str:
        found = manager.dispatch(tokens, tokens, 1, adapters, 1)
        return f"{found.cg_mode.name} {found.num_tokens} {found.num_active_loras}"

    captured = {mode.name: len(found) for mode, found in manager._capture_descs.items()}
    return captured | {f"{n} {adapters}": replayed(n, adapters) for n in (1, 3, 64, 65) for adapters in (0, 1)}


def main(model: Path, card: str) -> None:
    name, capability, gib = card.split(":")
    memory = int(gib) << 30
    cuda.pynvml = driver(name, tuple(map(int, capability.split("."))), memory)
    torch.cuda.mem_get_info = lambda device=None: (memory, memory)
    torch.cuda.is_available = lambda: True
    torch.cuda.empty_cache = lambda: None
    arguments = engine_arguments(
        ModelFiles(model), max_length=512, max_num_seqs=64, seed=0, lora_rank=12, dtype="bfloat16", on_gpu=True
    )
    config: Any = EngineArgs(**arguments).create_engine_config()
    graphs = config.compilation_config
    facts = {
        "device": config.device_config.device_type, "dtype": str(config.model_config.dtype),
        "largest_graph": graphs.max_cudagraph_capture_size, "graphs": str(graphs.cudagraph_mode),
        "specialized": graphs.cudagraph_specialize_lora, "autotune": config.kernel_config.enable_flashinfer_autotune,
        "utilization": config.cache_config.gpu_memory_utilization, "rank": config.lora_config.max_lora_rank,
        "eager": config.model_config.enforce_eager, "allocator": torch._C._accelerator_getAllocatorSettings(),
    }  # fmt: skip
    facts["captured"] = graphs_of(config)
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


for each in sys.argv[2:]:
    # A process for each card: vLLM keeps what it asked the driver.
    if (child := os.fork()) == 0:
        main(Path(sys.argv[1]), each)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"no configuration for {each}")
