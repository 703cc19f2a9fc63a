"""What this machine has to train with. Asked of the system, never of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flash_mcp.protocol.packages import nvidia_smi

QUERY = "name,memory.total,memory.free,utilization.gpu"


@dataclass(frozen=True)
class Device:
    """A GPU, or the machine's processor. Sizes in GiB; `busy` is the share in use."""

    kind: str
    name: str
    memory_gib: float
    free_gib: float
    busy: float | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Driver:
    """A GPU's driver and its compute capability, such as 580.65.06 and 9.0."""

    gpu: str
    version: str
    capability: str


def devices() -> list[Device]:
    return [*gpus(), processor()]


def processor() -> Device:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Device("cpu", _processor_name(), _gib(memory.total), _gib(memory.available), cores=cores)


def gpus() -> list[Device]:
    """NVIDIA GPUs as nvidia-smi tells; none where it is missing or fails."""
    return [_gpu(line) for line in ask(QUERY) if line.count(",") >= 3]


def drivers() -> list[Driver]:
    """What `gpus` are driven by, in the same order."""
    results: list[Driver] = []
    for line in ask("driver_version,compute_cap,name"):
        version, capability, name = (part.strip() for part in line.split(",", 2))
        results.append(Driver(name, version, capability))
    return results


def free_memory() -> dict[str, float]:
    """{UUID: GiB} of each GPU, as nvidia-smi knows it."""
    return {uuid: _from_mib(free) for uuid, free in _pairs("uuid,memory.free").items()}


def names_of(cards: Sequence[str]) -> list[str]:
    """The UUID of each GPU that is named by its number; others keep their names."""
    uuids = _pairs("index,uuid", 30.0)
    return [uuids.get(card, card) for card in cards]


def ids() -> list[str]:
    """What CUDA calls each GPU: its number, or the UUIDs of its instances where it is split (MIG):
    the number alone would be the first of them."""
    names: list[str] = []
    for line in nvidia_smi(["-L"], 30.0):
        if card := re.match(r"GPU (\d+):", line):
            names.append(card[1])
        elif instance := re.search(r"\(UUID: (MIG-[^)]+)\)", line):
            if names and names[-1].isdigit():
                names.pop()
            names.append(instance[1])
    return names


def numbers(version: str) -> tuple[int, ...]:
    """580.65.06 as (580, 65, 6); empty where it is not known."""
    parts = version.split(".")
    if all(map(str.isdigit, parts)):
        return tuple(map(int, parts))
    return ()


def ask(query: str, timeout_s: float = 10.0) -> list[str]:
    """One line for each GPU; none where nvidia-smi is missing or fails."""
    return nvidia_smi([f"--query-gpu={query}", "--format=csv,noheader,nounits"], timeout_s)


def _pairs(query: str, timeout_s: float = 10.0) -> dict[str, str]:
    """{first column: second column} of a query for two."""
    rows = [line.partition(",") for line in ask(query, timeout_s)]
    return {first.strip(): second.strip() for first, _, second in rows}


def _gpu(line: str) -> Device:
    name, total, free, busy = (part.strip() for part in line.rsplit(",", 3))
    return Device(
        "gpu",
        name,
        _from_mib(total),
        _from_mib(free),
        busy=float(busy) / 100 if busy.isdigit() else None,
    )


def _from_mib(text: str) -> float:
    if text.replace(".", "").isdigit():
        return round(float(text) / 1024, 1)
    return 0.0


def _gib(size_bytes: int) -> float:
    return round(size_bytes / 2**30, 1)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu"
    )
