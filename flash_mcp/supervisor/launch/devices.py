"""What this machine has to train with. Asked of the system, never of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flash_mcp.protocol.base_models import ModelCard, find, parameters_in_name
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.packages import nvidia_smi
from flash_mcp.protocol.spec import EvalSpec, RunSpec
from flash_mcp.state.targets import Cards

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
    name = "cpu"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(names, name)
    return Device("cpu", name, _gib(memory.total), _gib(memory.available), cores=cores)


def gpus() -> list[Device]:
    """NVIDIA GPUs as nvidia-smi tells; none where it is missing or fails."""
    results: list[Device] = []
    for line in ask(QUERY):
        if line.count(",") >= 3:
            name, total, free, busy = map(str.strip, line.rsplit(",", 3))
            share = float(busy) / 100 if busy.isdigit() else None
            results.append(Device("gpu", name, _from_mib(total), _from_mib(free), busy=share))
    return results


def drivers() -> list[Driver]:
    """What `gpus` are driven by, in the same order."""
    results: list[Driver] = []
    for line in ask("driver_version,compute_cap,name"):
        version, capability, name = map(str.strip, line.split(",", 2))
        results.append(Driver(name, version, capability))
    return results


def free_memory() -> dict[str, float]:
    """{UUID: GiB} of each GPU, as nvidia-smi knows it."""
    return {uuid: _from_mib(free) for uuid, free in _pairs("uuid,memory.free").items()}


def names_of(cards: Sequence[str]) -> list[str]:
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


def _from_mib(text: str) -> float:
    if text.replace(".", "").isdigit():
        return round(float(text) / 1024, 1)
    return 0.0


def _gib(size_bytes: int) -> float:
    return round(size_bytes / 2**30, 1)


# -- what a base model needs of a card's memory, before it is fetched ------------------------------

GIB = 2**30
WEIGHT_BYTES = 2.0
"""Of a parameter, as it is trained and served."""
FOUR_BIT_BYTES = 0.6
"""The trainer's with base_precision="nf4": embeddings keep their precision. An estimate."""
COPIES = {"cpu": 3, "gpu": 2}
"""Of the base weights: one in the trainer and, with an engine, the others there. vLLM on a CPU
keeps packed weights in addition to those that it loaded.
"""
WEIGHTS_SHARE = 0.85
"""Of a card's memory that weights may take; the rest is for the cache and the training pass."""
QUANTIZED = re.compile(r"awq|gptq|bnb|fp8|int[48]|[48]-?bit", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryNeed:
    """What a run's weights alone take of a device. The worker adds all else before it loads."""

    parameters: float
    is_known: bool
    """False if only the model's name says how many."""
    least_gib: float
    """One copy of the weights."""
    all_gib: float
    """Every copy, of which each of the run's GPUs holds its part if one cannot hold all."""
    device: Device

    def __str__(self) -> str:
        source = "" if self.is_known else ", by its name,"
        where = f"{self.device.memory_gib:g} GiB of {self.device.name}"
        copies = f"{self.all_gib:.1f} GiB for its weights in trainer and engine"
        if self.all_gib == self.least_gib:
            copies = f"{self.all_gib:.1f} GiB for its weights"
        size = f"{self.parameters / 1e9:.3g} billion parameters"
        return f"{size}{source} need {copies}, of {where}, {self.device.free_gib:g} free"

    @property
    def fits(self) -> bool:
        return self.all_gib <= self.device.memory_gib

    def check(self) -> None:
        """FlashError(out_of_memory) for a model that cannot fit; one whose size only its name
        gives must exceed the memory twice.
        """
        limit = self.device.memory_gib
        if not self.is_known:
            limit *= 2
        if self.all_gib <= limit:
            return
        fix = "use a smaller model: catalog(kind='models') has sizes; or a machine with more memory"
        if not self.is_known:
            fix += "; if the name misleads, fetch it yourself and pass its folder"
        raise FlashError(
            "out_of_memory",
            f"the model cannot fit: {self}",
            needed_gib=round(self.all_gib, 1),
            available_gib=self.device.memory_gib,
            fix=fix,
        )

    def warning(self) -> str | None:
        if not self.fits:
            return f"the model cannot fit this machine: {self}; use a smaller one"
        if self.all_gib > self.device.free_gib:
            return f"memory may run out: {self}; end what else runs, or use a smaller model"
        return None


def memory_need(
    card: ModelCard,
    device: Device,
    *,
    has_engine: bool,
    four_bit: bool = False,
    trains: bool = True,
    gpus: int = 1,
) -> MemoryNeed | None:
    """None if neither the card nor the model's name says how large it is. `has_engine`: the run
    generates. `four_bit`: the trainer's base weights have 4 bits, and several `gpus` do not share
    them.
    """
    parameters = card.parameters
    if parameters is None and not QUANTIZED.search(card.name):
        parameters = parameters_in_name(card.name)
    if not parameters:
        return None
    full = parameters * WEIGHT_BYTES / GIB
    one = parameters * FOUR_BIT_BYTES / GIB if four_bit else full
    copies = COPIES[device.kind] - 1 if has_engine else 0
    every = (one if trains else 0.0) + copies * full
    if device.kind == "gpu" and not four_bit:
        every /= gpus
    return MemoryNeed(parameters, card.parameters is not None, one, every, device)


def need_of(spec: RunSpec | EvalSpec, device: Device) -> MemoryNeed | None:
    """What a run or an evaluation needs on a device; None if nobody knows how large its model is.
    FlashError(unknown_model).
    """
    trains = isinstance(spec, RunSpec)
    return memory_need(
        find(spec.model),
        device,
        has_engine=not trains or spec.generates,
        four_bit=trains and spec.base_precision == "nf4",
        trains=trains,
        gpus=spec.gpus,
    )


def cards_for(model: str, cards: Cards | None) -> int:
    """How many of a node's cards the server takes, as `deploy` does here: 1, 2, 4 or more, until
    they hold the weights. 1 if the cards or the model's size are not known.
    """
    count = 1
    if cards is None or cards.kind != "gpu":
        return count
    device = Device("gpu", cards.name, cards.memory_gib, cards.memory_gib)
    while count * 2 <= cards.count:
        need = memory_need(find(model), device, has_engine=True, trains=False, gpus=count)
        if need is None or need.all_gib <= WEIGHTS_SHARE * cards.memory_gib:
            break
        count *= 2
    return count
