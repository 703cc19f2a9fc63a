"""What packages bring by entry points, ours and other people's alike (docs/extending.md)."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


OURS = {
    "flash_mcp.adapters": {
        "verifiers": "environments.adapters.verifiers:adapt",
        "inspect_ai": "environments.adapters.inspect_tasks:adapt",
    }
}
"""What is found without metadata too: an environment's own interpreter has our files alone."""


@functools.cache
def brought(group: str) -> dict[str, list[EntryPoint]]:
    """What is installed here, by name. It reads a file of each installed package, once."""
    # Loaded here: with the e-mail package that it needs it takes a tenth of an environment's start.
    metadata: Any = importlib.import_module("importlib.metadata")
    results: dict[str, list[EntryPoint]] = {}
    ours = [metadata.EntryPoint(*item, group) for item in OURS.get(group, {}).items()]
    for point in [*ours, *metadata.entry_points(group=group)]:
        named = results.setdefault(point.name, [])
        if point.value not in (other.value for other in named):  # a package may be found twice
            named.append(point)
    return results


def find(group: str, name: str) -> Any:
    """The object of that name. ValueError if no package brings it, if several do, or if it cannot
    be imported.
    """
    existing = brought(group).get(name, [])
    if not existing:
        names = ", ".join(sorted(brought(group))) or "none"
        raise ValueError(f"no installed package brings {name!r} for {group}; there are: {names}")
    if len(existing) > 1:
        values = " and ".join(point.value for point in existing)
        raise ValueError(f"several packages bring {name!r} for {group}: {values}; remove one")
    try:
        return existing[0].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} of {group} cannot be imported: {error}") from error
