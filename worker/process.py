"""What a process sets before it imports torch and vLLM, and how busy it and its cards are."""

from __future__ import annotations

import errno
import functools
import gc
import importlib.metadata
import logging
import os
import resource
import socket
import sys
import time
import warnings
from collections.abc import Generator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flash_mcp.protocol.packages import nvidia_smi

MODEL_FOLDER = "FLASH_MODEL_FOLDER"
"""The variable with the folder of the base model that a server serves."""
COMPUTES_IN = "the model is computed in "
"""What a server's log says before the name of its precision."""
CARDS = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs of a process; empty for none."""
PROCESS_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would pin the trainer's threads too
    # Per-request seeds and processed log-probabilities never use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "0",  # half a second for its 300 loggers, whose errors we log
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Environment variables that torch and vLLM read when they are imported."""


def spin_shortly() -> None:
    """Let OpenMP's threads wait for each other for microseconds before they sleep, unless the user
    chose how they wait. By default they spin for milliseconds, and whatever else runs on their
    cores holds them up by whole time slices.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def prepare_process() -> None:
    """Set what torch and vLLM read when they are imported."""
    spin_shortly()
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


_card_shares: list[float] = []
"""Of the samples since the last step."""
_before = (time.monotonic(), time.process_time())


def sample_cards() -> None:
    """Note how busy this process's cards are now."""
    cards = os.environ.get(CARDS)
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    lines = nvidia_smi([*query, f"--id={cards}"] if cards else query, 5.0)
    busy = [float(line) / 100 for line in lines if line.isdigit()]
    if busy:
        _card_shares.append(sum(busy) / len(busy))


def usage() -> dict[str, float]:
    """Since the last call: the mean share of the cards' time that was used, and the processors that
    this process kept busy. And its memory now.
    """
    global _before
    began, busy_s = _before
    _before = (time.monotonic(), time.process_time())
    values = {
        "system/processors": (_before[1] - busy_s) / max(_before[0] - began, 1e-3),
        "system/process_gib": psutil.Process().memory_info().rss / 2**30,
    }
    if _card_shares:
        values["system/card_share"] = sum(_card_shares) / len(_card_shares)
        _card_shares.clear()
    return values


# -- imports of large packages ---------------------------------------------------------------------


@contextmanager
def quick_imports() -> Generator[None]:
    """Import large packages within it: torch, vLLM and their like take a third less CPU time.

    They make a million objects that all stay. The garbage collector would look at them again and
    again while they are imported, and for as long as the process lives."""
    # transformers and TRL ask for it when they are imported, and it reads the files of every
    # installed package.
    mapping = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = functools.cache(mapping)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        importlib.metadata.packages_distributions = mapping


# -- close the TCP ports that an engine leaves open ------------------------------------------------
# torch.distributed's gloo listens on a port for every process group, even in a world of one
# process, where nobody ever connects. Any local user could: gloo asks for no key.


def listening() -> set[int]:
    """The file descriptors of this process that listen on TCP."""
    descriptors = (int(link.name) for link in Path("/proc/self/fd").iterdir())
    return {descriptor for descriptor in descriptors if _listens(descriptor)}


def close_listening(keep: Set[int] = frozenset()) -> None:
    """Close every listening TCP socket of this process except `keep`.

    gloo keeps the numbers of its descriptors, so each stays taken, by a socket that nothing can
    reach. The kernel forgets the closed socket in gloo's epoll set.
    """
    for descriptor in listening() - keep:
        with socket.socket(socket.AF_UNIX) as unreachable:
            os.dup2(unreachable.fileno(), descriptor, inheritable=False)


def _listens(descriptor: int) -> bool:
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or closed meanwhile
        return False
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        borrowed.detach()


class PortClosing:
    """Mixed into vLLM's worker class as its `worker_extension_cls`."""

    def close_listening_ports(self) -> None:
        close_listening()


# -- when memory runs out: how errors say so, and what was left ------------------------------------

GIB = 2**30
WORDS = (
    "out of memory",
    "not allocate memory",
    "'t allocate memory",
    "not enough memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "no available memory",
    "available kv cache memory",
    "less than desired gpu memory",
)
"""What allocators say, and vLLM when its engine finds too little memory."""
CARD_WORDS = ("cuda", "cublas", "kv cache", "gpu")
NO_KERNEL_MEMORY = "could not create a primitive"
"""oneDNN's whole message when a kernel finds no memory for its code. Its message for an unknown
operation is longer.
"""
NO_THREAD = "can't start new thread"
"""Python's message when a thread finds no memory for its stack, and when the system allows no more
threads.
"""


def is_memory_error(error: BaseException) -> bool:
    """Whether memory ran out, on the machine or the device. Each allocator words it differently."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    message = str(error).lower()
    if names_memory(message):
        return True
    if message == NO_THREAD:
        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return message == NO_KERNEL_MEMORY


def names_memory(text: str) -> bool:
    """Whether a text, in lower case, says that memory ran out."""
    return any(words in text for words in WORDS)


def memory_state(error: BaseException) -> dict[str, float]:
    """GiB that this process holds, held at most, and that are left: of the card if the error is
    the card's.
    """
    torch: Any = sys.modules.get("torch")  # the control of an attempt does not import it
    is_card = any(word in str(error).lower() for word in CARD_WORDS)
    if torch and torch.cuda.is_available() and is_card:
        held, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        left = torch.cuda.mem_get_info()[0]
    else:
        held = psutil.Process().memory_info().rss
        # The kernel notes the peak now and then: it may lie below what is held.
        peak = max(held, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        left = psutil.virtual_memory().available
    sizes = {"held_gib": held, "peak_gib": peak, "available_gib": left}
    return {name: round(size / GIB, 2) for name, size in sizes.items()}
