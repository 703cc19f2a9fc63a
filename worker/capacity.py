"""The memory of this machine or card, and how much of it an engine's cache takes."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from worker.model_files import ModelFiles
from worker.process import usage

MIB = 2**20
GIB = 2**30
GPU_PROCESS_BYTES = 2 * GIB
"""CUDA's context, and the engine's graphs and workspace. This is a guess."""
KV_BLOCK_TOKENS = 32
"""Block size of the cache that memory is planned for; an engine may take smaller ones. On a CPU
prefixes are found by whole blocks: with vLLM's default of 128, shorter prompts would never be
found.
"""
STATE_BLOCKS = 4
"""Blocks that a sequence takes for its states, where some layers have one. It is enough for tiny
models, larger ones were not tried."""
STATE_SIZES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    ("mamba_num_heads", "ssm_state_size", "mamba_head_dim"),
)
"""Where configs have the number of heads of a layer with a state, and a head's two sizes."""
KV_CACHE_SHARE = 4
"""On the CPU the cache takes at most 1/KV_CACHE_SHARE of the memory: sequences that do not fit
wait.
"""


def kv_cache_bytes(
    base: ModelFiles,
    max_length: int,
    sequences: int,
    free: int,
    weights: int = 0,
    *,
    itemsize: int = 2,
    shards: int = 1,
) -> int:
    """Bytes of an engine's cache for every sequence at full length, but at most what it may take of
    `free` bytes, and at least one sequence. On a GPU that is half of what the engine's `weights`
    leave: training gets the rest.

    Each of `shards` cards has its share of the heads.
    """
    room = free // KV_CACHE_SHARE
    if torch.cuda.is_available():
        room = max(0, free - weights - GPU_PROCESS_BYTES) // 2
    config = base.text
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = math.ceil(heads / shards)
    layer = 2 * itemsize * heads * base.head_size * KV_BLOCK_TOKENS
    states = 0
    if base.has_state:
        # vLLM makes every block as large as a layer's state, and gives each sequence some more.
        layer *= math.ceil(state_bytes(config) / layer)
        states = STATE_BLOCKS
    block = layer * config.num_hidden_layers
    blocks = math.ceil(max_length / KV_BLOCK_TOKENS) + states
    one = blocks + 1  # vLLM keeps one block empty
    every = sequences * blocks + 1
    return block * max(one, min(every, room // block))


def state_bytes(config: Any) -> int:
    """Bytes of what one layer with a state keeps of a sequence, in fp32: the product of a head's
    two sizes for each head, or what a wide one would be where the config names none.
    """
    for names in STATE_SIZES:
        sizes = [getattr(config, name, 0) for name in names]
        # A size that follows from others is named "auto".
        numbers: list[int] = [size for size in sizes if isinstance(size, int) and size]
        if len(numbers) == len(names):
            return 4 * math.prod(numbers)
    return 64 * config.hidden_size


def engine_cache_bytes(
    base: ModelFiles, max_length: int, sequences: int, *, itemsize: int = 2, shards: int = 1
) -> int:
    """`kv_cache_bytes` with the memory that is free on this machine now, after PyTorch's allocator
    has returned what it keeps of freed tensors.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        free = capacity_bytes()
    weights = math.ceil(base.weights_bytes / shards)
    sizes = {"itemsize": itemsize, "shards": shards}
    return kv_cache_bytes(base, max_length, sequences, free, weights, **sizes)


_processes = 1


def share_machine(processes: int) -> None:
    """Leave as much memory of the machine to each of `processes` like this one. Each has a GPU of
    its own, if there are any.
    """
    global _processes
    _processes = processes


def capacity_bytes() -> int:
    """The memory that this process may use in total: what is free plus what it already holds. On a
    GPU, of the card.
    """
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    rooms = _control_group_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    room = min([psutil.virtual_memory().available, *rooms]) // _processes
    return room + psutil.Process().memory_info().rss


def used_gib() -> dict[str, float]:
    """What is in use now, by all processes: of the machine's memory, and of the card's; and how
    busy they were since the last call.
    """
    values = usage()
    values["system/memory_gib"] = psutil.virtual_memory().used / 2**30
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        values["system/card_gib"] = (total - free) / 2**30
    return values


def _control_group_rooms(membership: Path, root: Path) -> Iterator[int]:
    """Bytes left within each memory limit that control groups (version 1 or 2) set on this
    process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        limit_file = "memory.max"
        used_file = "memory.current"
        if controllers:
            limit_file = "memory.limit_in_bytes"
            used_file = "memory.usage_in_bytes"
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                limit = (folder / limit_file).read_text().strip()
                used = int((folder / used_file).read_text())
                rows = (folder / "memory.stat").read_text().splitlines()
                statistics = dict(row.split() for row in rows)
            except (OSError, ValueError):
                continue
            if limit.isdigit():
                # The kernel drops inactive files first.
                yield int(limit) - used + int(statistics.get("inactive_file", 0))
