"""When memory runs out: how errors say so, and what was left."""

from __future__ import annotations

import errno
import resource
import sys
from typing import Any

import psutil

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
