"""vLLM's OpenAI server of a base model, for its text.

    python -m worker.engine.openai_server --model FOLDER ...

Its engine is a process that imports this module too, under another name, so that both can load the
model without torchvision."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

from worker.engine.text_models import prepare_text_model
from worker.model_files import ModelFiles
from worker.process import quick_imports

with quick_imports():
    prepare_text_model(ModelFiles(Path(sys.argv[sys.argv.index("--model") + 1])).config)
    import_module("vllm.v1.engine.async_llm")  # both processes need most of what it imports

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
