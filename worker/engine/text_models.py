"""What vLLM needs to run a model for its text only."""

from __future__ import annotations

import functools
import mmap
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

STAND_INS = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def prepare_text_model(config: Any) -> None:
    """Let this process load a model of transformers config `config` in vLLM.

    torchvision's build on PyPI needs the CUDA build of torch, so a CPU has none. vLLM's Qwen3.5 and
    others import it nevertheless, through the image processors of transformers, and never call it
    for text. They are imported here with stand-ins in its place, which are then removed."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    # vLLM's Transformers backend decorates transformers' own classes, also for the trainer.
    cast(Any, PreTrainedModel).do_not_compile = True
    if find_spec("torchvision"):
        return
    from vllm import ModelRegistry  # noqa: PLC0415

    registry = cast(Any, ModelRegistry)
    with _stand_ins():
        for name in config.architectures or ():
            lazy = registry.models.get(name)
            if hasattr(lazy, "module_name"):
                # vLLM would import it in another process first, to look at it.
                registry.register_model(name, lazy.load_model_cls())


class _Absent:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError("images need torchvision, which is not installed")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type[_Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


@contextmanager
def _stand_ins() -> Generator[None]:
    from transformers.utils import import_utils  # noqa: PLC0415

    # What these answer is kept: without torchvision they must be asked before it seems to be there.
    cast(Any, import_utils).is_torchvision_available()
    cast(Any, import_utils).is_torchvision_v2_available()
    modules = {name: _StandIn(name) for name in STAND_INS}
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def back_cache_when_used_on_cpu() -> None:
    """Let the system give this process the memory of an engine's cache as its blocks are written.

    vLLM writes zeros to all of it: seconds of the start for each GiB where a hypervisor has to find
    that memory, for a cache of which short conversations use a small part."""
    import torch  # noqa: PLC0415
    from vllm.v1.worker import gpu_model_runner  # noqa: PLC0415  also the CPU's runner

    runner: Any = gpu_model_runner
    own = runner.allocate_kv_cache
    if hasattr(own, "__wrapped__"):
        return

    def zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype)

    @functools.wraps(own)
    def allocate(*args: Any) -> dict[str, torch.Tensor]:
        own_zeros, torch.zeros = torch.zeros, cast(Any, zeros)
        try:
            return own(*args)
        finally:
            torch.zeros = own_zeros

    runner.allocate_kv_cache = allocate


# -- options of vLLM's that an engine and a server of a model share --------------------------------
# It imports neither torch nor vLLM: the process that chooses a server's options is then replaced by
# the server.

CPU_LORA_WORKER = "worker.engine.lora_cpu.LoraWorker"
PROMPT_THREADS = "prompt_threads"
"""The key in vLLM's additional_config of the threads that a prompt may take."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports; an adapter of a rank in between uses the next larger one."""
UTILIZATION = 0.01
"""vLLM ignores this share of a GPU's memory beside `kv_cache_memory_bytes`, except that it does not
start if less is free."""


def room_for_rank(rank: int) -> int:
    """The smallest of LORA_RANKS that holds `rank`."""
    return next((room for room in LORA_RANKS if room >= rank), rank)
