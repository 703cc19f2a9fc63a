"""What tests/forked.py imports before it forks: all that a worker needs."""

from worker.imports import quick_imports
from worker.process import prepare_process

prepare_process()
with quick_imports():
    import vllm.v1.engine.llm_engine
    from vllm import EngineArgs

    import worker.evaluate
    import worker.train

__all__ = ["EngineArgs", "vllm", "worker"]
