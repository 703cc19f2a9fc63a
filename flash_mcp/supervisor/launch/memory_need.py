"""What a base model needs of a card's memory, before it is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flash_mcp.protocol.base_models import ModelCard, find, parameters_in_name
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import EvalSpec, RunSpec
from flash_mcp.state.targets import Cards
from flash_mcp.supervisor.launch.devices import Device

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
