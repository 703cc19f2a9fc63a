"""What a process sets before it imports torch and vLLM."""

from __future__ import annotations

import logging
import os
import warnings

MODEL_FOLDER = "FLASH_MODEL_FOLDER"
"""The variable with the folder of the base model that a server serves."""
CARDS = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs of a process; empty for none."""
PROCESS_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would pin the trainer's threads too
    # Per-request seeds and processed log-probabilities never use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Environment variables that torch and vLLM read when they are imported."""


def prepare_process() -> None:
    """Set what torch and vLLM read when they are imported."""
    for name, value in PROCESS_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Groups differ in length, and fixed segments of a card's memory would leave holes. Not for an
    # engine on several cards: vLLM's own all-reduce cannot share such memory.
    if "," not in os.environ.get(CARDS, ""):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # One GPU: with several, the trainer would spread its batch over them and ask for as many times
    # the rollouts.
    os.environ[CARDS] = os.environ.get(CARDS, "0").split(",")[0]
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("vllm").setLevel(logging.ERROR)
