"""target="auto": the cheapest place whose cards hold the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from environments.sandbox.needs import Needs
from flash_mcp.protocol.base_models import check_without_gpu, find
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.packages import missing_packages
from flash_mcp.protocol.records import EnvironmentVersion
from flash_mcp.protocol.spec import AUTO, LOCAL_TARGET, ResolvedEval, ResolvedSpec
from flash_mcp.state import costs
from flash_mcp.state.store import Store
from flash_mcp.state.targets import targets
from flash_mcp.supervisor.launch.devices import WEIGHTS_SHARE, Device, MemoryNeed, gpus, processor
from flash_mcp.supervisor.launch.local import find_gpus

Resolved = TypeVar("Resolved", ResolvedSpec, ResolvedEval)
NeedOn = Callable[[Device], MemoryNeed | None]
"""What the model needs on a device; None if nobody knows how large it is."""
SHOWN = 6
"""Places that were not chosen and are named."""


@dataclass(frozen=True)
class Place:
    name: str
    cards: Device | None
    """One card of a node, or the processor; None if it is not known."""
    count: int = 1
    """Cards of a node."""
    price_per_hour: float = 0.0
    """Without a price, 0."""
    trouble: str = ""
    """Why no run can go there."""
    is_full: bool = False
    """Whether a run would have to wait there."""

    def refusal(self, need_on: NeedOn, cards: int) -> str:
        if self.trouble or self.cards is None:
            return self.trouble or f"its cards are not known: `flash-mcp target check {self.name}`"
        if cards > self.count and self.cards.kind == "gpu":
            return f"a node has {self.count} GPUs, as targets.toml says"
        need = need_on(self.cards)
        if need and need.all_gib > WEIGHTS_SHARE * self.cards.memory_gib:
            share = f"{WEIGHTS_SHARE:.0%}"
            return f"{need.all_gib:.1f} GiB of weights exceed {share} of {_gib(self.cards)}"
        return ""

    def __str__(self) -> str:
        assert self.cards
        price = f"{self.price_per_hour:g} an hour" if self.price_per_hour else "no price"
        return f"{price}, {_gib(self.cards)}{', full' if self.is_full else ''}"


def choose(places: Sequence[Place], need_on: NeedOn, cards: int = 1) -> tuple[str, str]:
    """The cheapest place with room, of those with GPUs if the model fits any, and why; a full one
    if all are full. FlashError(device_unsupported) if it fits none.
    """
    refusals = {place.name: place.refusal(need_on, cards) for place in places}
    fitting = sorted((place for place in places if not refusals[place.name]), key=_order)
    if not fitting:
        said = "; ".join(f"{name}: {why}" for name, why in refusals.items())
        fix = "use a smaller model, or add a target with larger cards: `flash-mcp target add`"
        raise FlashError("device_unsupported", f"no target can take the run: {said}", fix=fix)
    best, *others = fitting
    rest = [f"{place.name} ({place})" for place in others]
    rest += [f"not {name} ({why})" for name, why in refusals.items() if why]
    why = f"target=auto chose {best.name}: {best}"
    if need := best.cards and need_on(best.cards):
        why += f", for {need.all_gib:.1f} GiB of weights"
    if rest:
        why += f"; others: {', '.join(rest[:SHOWN])}"
    if len(rest) > SHOWN:
        why += f" and {len(rest) - SHOWN} more"
    return best.name, why


def check_gpus(count: int, *, shares_model: bool = False) -> None:
    """FlashError(device_unsupported) if this machine has fewer GPUs, or without any, processors,
    which share no model.
    """
    if count == 1:
        return
    has = cards = len(find_gpus())
    if not cards and not shares_model:
        has = processor().cores or 1
    if count > has:
        available = f"{has} GPUs"
        fix = f"use gpus={has}, or another target"
        if not cards:
            available = "no GPU"
            fix = "leave gpus out, or name a target with GPUs"
        if not cards and has:
            available += f" and {has} processors"
        if not cards and has > 1:
            fix += f"; gpus={has} trains on each processor as if it were a GPU"
        what = f"gpus={count}, and this machine has {available}"
        raise FlashError("device_unsupported", what, fix=fix)


def check_architecture(model: str) -> None:
    """FlashError(model_unsupported) if the model of a folder needs a GPU and there is none."""
    card = find(model)
    if card.scheme == "folder" and not gpus():
        check_without_gpu(Path(card.address))


def check_gateway(environment: EnvironmentVersion, target: str) -> None:
    """FlashError(invalid_argument) if agents outside could not ask a run there for tasks."""
    try:
        is_outside = Needs.from_folder(Path(environment.path)).gateway
    except ValueError:  # loading the environment says so
        return
    if is_outside and target != LOCAL_TARGET:
        what = f"agents outside ask the worker of a run for tasks, and do not reach one on {target}"
        fix = 'use target="local", or take gateway out of environment.toml'
        raise FlashError("invalid_argument", what, fix=fix)


def placed(
    store: Store, resolved: Resolved, need_on: NeedOn, existing: str | None = None
) -> tuple[Resolved, str | None]:
    """The spec with a target in place of "auto", and why that one. `existing` is the target that an
    earlier call with the same idempotency key was given.
    """
    if resolved.spec.target != AUTO:
        return resolved, None
    target, why = existing, None
    if target is None:
        target, why = choose(places(store), need_on, resolved.spec.gpus)
    spec = resolved.spec.model_copy(update={"target": target})
    sources = {**resolved.sources, "target": AUTO}
    return resolved.model_copy(update={"spec": spec, "sources": sources}), why


def places(store: Store) -> list[Place]:
    counts = store.counts_by_target()
    active: dict[str, int] = {}
    for (name, _), number in counts.items():
        active[name] = active.get(name, 0) + number
    waiting = store.targets_with_waiting()
    missing, here = missing_packages(), gpus()
    results = [
        Place(
            LOCAL_TARGET,
            max(here, key=lambda card: card.memory_gib, default=processor()),
            count=max(1, len(here)),
            price_per_hour=costs.price_of_hour(store.base).price_per_hour,
            trouble=f"not installed here: {', '.join(missing)}" if missing else "",
            is_full=active.get(LOCAL_TARGET, 0) >= max(1, len(here)),
        )
    ]
    for name, settings in targets(store.base).items():
        is_full = active.get(name, 0) >= settings.slots or name in waiting
        cards = settings.cards
        device = cards and Device(cards.kind, cards.name, cards.memory_gib, cards.memory_gib)
        price = settings.price_per_hour or 0.0
        results.append(Place(name, device, cards.count if cards else 1, price, is_full=is_full))
    return results


def _order(place: Place) -> tuple[bool, bool, float, bool, str]:
    """Processors last: there a run takes many times as long, whatever an hour costs."""
    assert place.cards
    is_slow = place.cards.kind != "gpu"
    is_away = place.name != LOCAL_TARGET
    return is_slow, place.is_full, place.price_per_hour, is_away, place.name


def _gib(cards: Device) -> str:
    return f"{cards.memory_gib:g} GiB of {cards.name}"
