"""What tests/forked.py does before it forks: it imports all that a worker needs."""

import atexit
import os
from types import SimpleNamespace

from tests import forked
from worker.process import quick_imports
from worker.warm import import_all

import_all()
with quick_imports():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.platforms import current_platform

    import worker.extensions.export.gguf_file
    import worker.extensions.export.program
    import worker.training.packing
    import worker.training.sft

    # It looks at the names of all modules, and one time is enough for all who are forked.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda *_: None

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.SiLU())(
            torch.zeros(4, dtype=torch.long)
        )

worker.extensions.export.gguf_file.subprocess = SimpleNamespace(run=forked.run_forked)

atexit.register(os._exit, 0)  # what triton finds wrong with the end of the server concerns no test

__all__ = ["worker"]
